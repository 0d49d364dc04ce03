"""Every setting changes what a run leaves behind, or is refused, and every argument is read.

A new setting needs a row here: a value that shows it, or the test that does.
"""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import halfstep.jax
import halfstep.mlx
import halfstep.torch
from halfstep.cli import app
from halfstep.config.load import load
from halfstep.config.run import NEEDS, RunConfig
from halfstep.config.schema import rows
from halfstep.core.errors import SettingConflictError
from halfstep.training.paths import CHECKPOINTS
from tests.training.runs import events_of, final_state, starter

BASE = ["model.layers=2", "model.zero_init=false", "training.steps=4", "training.save_every=2",
        "training.validate_every=2", "training.micro_batches=2", "training.clip_norm=0.1"]  # fmt: skip
UNTIED, MUON = ["model.tied=false"], ["optimizer.muon_momentum_warmup=8"]
# setting -> overrides that show it, the last of which sets it; or the test that does
SHOWN = {
    "title": "cli/test_train.py::test_a_run_prints_a_summary_its_utilization_and_leaves_a_page",
    "backend": "conformance/session/test_training.py::test_it_says_what_and_where_it_is",
    "policy": "cli/test_train.py::test_resume_changes_the_precision_and_trains_further_if_asked",
    "schedule": "training/run/test_policy_schedule.py::test_the_policy_changes_after_its_step_and_is_recorded",
    "seed": ["seed=1"],
    "init": "training/weights/test_pretrained.py::test_a_run_can_be_the_initial_weights",
    "init_digest": "training/weights/test_pretrained.py::test_your_own_recipe_may_name_the_weights_and_pin_them",
    "model.vocabulary": ["model.vocabulary=300"],
    "model.context": ["model.context=8"],
    "model.layers": ["model.layers=3"],
    "model.width": ["model.width=32"],
    "model.heads": ["model.heads=4"],
    "model.kv_heads": ["model.kv_heads=1"],
    "model.head_width": ["model.head_width=4"],
    "model.mlp": ["model.mlp=swiglu"],
    "model.mlp_width": ["model.mlp_width=24"],
    "model.bias": ["model.bias=true"],
    "model.norm": ["model.norm=layer"],
    "model.norm_gain": ["model.norm_gain=false"],
    "model.norm_epsilon": ["model.norm_epsilon=0.01"],
    "model.embedding_norm": ["model.embedding_norm=true"],
    "model.positions": ["model.positions=none"],
    "model.rope_base": ["model.rope_base=100"],
    "model.qk_norm": ["model.qk_norm=gain"],
    "model.q_gain": ["model.q_gain=true"],
    "model.q_gain_start": ["model.q_gain=true", "model.q_gain_start=2"],
    "model.softcap": ["model.softcap=1"],
    "model.unet_skips": ["model.unet_skips=true"],
    "model.value_residual": ["model.value_residual=true"],
    "model.embedding_shortcut": ["model.embedding_shortcut=scalar"],
    "model.branch_scale": ["model.branch_scale=true"],
    "model.tied": UNTIED,
    "model.zero_init": ["model.zero_init=true"],
    "model.zero_head": [*UNTIED, "model.zero_head=true"],
    "model.embedding_std": ["model.embedding_std=0.1"],
    "data.source": "training/test_loop.py::test_data_may_move_and_may_not_change",
    "data.validation": ["data.validation=0.4"],
    "training.steps": ["training.steps=3"],
    "training.batch": ["training.batch=3"],
    "training.micro_batches": ["training.micro_batches=1"],
    "training.clip_norm": ["training.clip_norm=0.01"],
    "training.warmup": ["training.warmup=0.5"],
    "training.warmdown": ["training.warmdown=0.9"],
    "training.validate_every": ["training.validate_every=1"],
    "training.validation_tokens": ["training.validation_tokens=32"],
    "training.save_every": ["training.save_every=1"],
    "training.keep_last": ["training.keep_last=1"],
    "training.keep_every": ["training.keep_last=1", "training.keep_every=2"],
    "training.keep_best": "training/run/test_response.py::test_the_best_is_kept_and_recorded",
    "training.rollback": "training/run/test_response.py::test_a_rollback_leaves_the_run_that_never_saw_the_data",
    "training.deterministic": "training/run/test_response.py::test_a_deterministic_run_switches_torch",
    "training.compile": "torch/test_session.py::test_compile_compiles_the_loss",
    "training.graph": "torch/update/test_graph.py::test_the_trainer_makes_its_steps_as_graphs",
    "training.loggers": "training/telemetry/test_loggers.py::test_a_logger_gets_the_numbers_of_the_events",
    "training.measure_ceiling": "training/telemetry/test_ceiling.py::test_a_missing_ceiling_has_a_reason",
    "training.recompute_blocks": "conformance/session/test_settings.py::test_blocks_are_recomputed",
    "training.memory": "conformance/session/test_settings.py::test_lean_memory_keeps_less_and_trains_alike",
    "training.ema": ["training.ema=0.5"],
    "optimizer.name": ["optimizer.name=adamw"],
    "optimizer.rate": ["optimizer.rate=0.01"],
    "optimizer.embedding_rate": ["optimizer.embedding_rate=0.01"],
    "optimizer.head_rate": [*UNTIED, "optimizer.head_rate=0.01"],
    "optimizer.scalar_rate": ["optimizer.scalar_rate=0.01"],
    "optimizer.betas": ["optimizer.betas=[0.5, 0.5]"],
    "optimizer.epsilon": ["optimizer.epsilon=0.01"],
    "optimizer.weight_decay": ["optimizer.weight_decay=0.9"],
    "optimizer.muon_rate": ["optimizer.muon_rate=0.1"],
    "optimizer.muon_momentum": ["optimizer.muon_momentum=0.1"],
    "optimizer.muon_momentum_start": [*MUON, "optimizer.muon_momentum_start=0.1"],
    "optimizer.muon_momentum_warmup": MUON,
    "optimizer.muon_weight_decay": ["optimizer.muon_weight_decay=0.9"],
    "artifact.format": ["artifact.format=int8-zlib"],
    "artifact.limit": ["artifact.format=int8-zlib", "artifact.limit=1"],
    "parallel.shard": "training/parallel/test_job.py::test_two_ranks_with_shards_train_as_one",
    "parallel.timeout": "training/parallel/test_job.py::test_a_rank_that_hangs_ends_the_run_and_is_named",
    "monitor.on": "training/run/test_monitor.py::test_a_run_without_the_monitor_records_no_layers",
    "monitor.every": "training/run/test_monitor.py::test_each_layer_is_recorded_as_often_as_asked",
    "monitor.sample_every": "training/run/test_monitor.py::test_samples_are_as_frequent_as_asked",
    "monitor.slice": "training/run/test_monitor.py::test_the_session_counts_as_many_elements_as_asked",
    "monitor.shadow_every": "training/run/test_monitor.py::test_a_run_is_the_same_with_shadows",
}
start = starter(*BASE)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A function: what a run with some settings leaves behind, without times and paths."""
    source = tmp_path_factory.mktemp("data") / "text.txt"
    source.write_text("\n\n".join(f"def f{i}(x):\n    return x * {i} + {i * i}" for i in range(400)))
    known = {}

    def run(settings):
        if settings not in known:
            out = tmp_path_factory.mktemp("run")
            start(source, out, *settings).run()
            kept = ("step", "loss", "learning_rate", "grad_norm", "tokens", "bits_per_byte", "over")
            events = [[event.get(key) for key in ("event", *kept)] for event in events_of(out)]
            files = sorted(path.name for folder in (out, out / CHECKPOINTS) for path in folder.iterdir())
            known[settings] = events, files, final_state(out)[0]
        return known[settings]

    return run


@pytest.mark.prove
@pytest.mark.parametrize("key", [key for key, shown in SHOWN.items() if isinstance(shown, list)])
def test_a_setting_changes_what_a_run_leaves_behind(key, left):
    *context, changed = SHOWN[key]
    assert changed.startswith(f"{key}=")
    assert left((*context, changed)) != left(tuple(context))


def test_every_setting_has_a_row_and_every_test_exists():
    assert list(SHOWN) == [row.key for row in rows(RunConfig)]
    for name in (shown for shown in SHOWN.values() if isinstance(shown, str)):
        path, _, test = name.partition("::")
        assert f"def {test}(" in (Path(__file__).parents[1] / path).read_text(encoding="utf-8"), name


# a setting that changes nothing with these overrides
IDLE = {
    "model.rope_base": (["model.positions=learned"], "model.rope_base=100"),
    "model.q_gain_start": ([], "model.q_gain_start=2"),
    "model.unet_skips": (["model.layers=1"], "model.unet_skips=true"),
    "model.value_residual": (["model.layers=1"], "model.value_residual=true"),
    "model.embedding_std": (["init=x"], "model.embedding_std=0.1"),
    "model.zero_init": (["init=x"], "model.zero_init=false"),
    "optimizer.muon_rate": (["optimizer.name=adamw"], "optimizer.muon_rate=0.1"),
    "optimizer.muon_momentum": (["optimizer.name=adamw"], "optimizer.muon_momentum=0.1"),
    "optimizer.muon_momentum_start": ([], "optimizer.muon_momentum_start=0.1"),
    "optimizer.muon_momentum_warmup": (["optimizer.name=adamw"], "optimizer.muon_momentum_warmup=8"),
    "optimizer.muon_weight_decay": (["optimizer.name=adamw"], "optimizer.muon_weight_decay=0.9"),
    "monitor.every": (["monitor.on=false"], "monitor.every=10"),
    "monitor.sample_every": (["monitor.on=false"], "monitor.sample_every=10"),
    "monitor.slice": (["monitor.on=false"], "monitor.slice=64"),
    "monitor.shadow_every": (["monitor.on=false"], "monitor.shadow_every=10"),
}


def test_a_setting_that_changes_nothing_beside_others_is_refused():
    assert IDLE.keys() == NEEDS.keys()
    for key, (context, changed) in IDLE.items():
        load("tiny", context)
        with pytest.raises(SettingConflictError, match=f"{re.escape(key)} = .* changes nothing: ") as caught:
            load("tiny", [*context, changed])
        assert f"leave {key} out" in caught.value.hint
    load("golf", ["optimizer.name=adamw"])  # its own settings of Muon lose their effect with its name


def _functions():
    """The commands, and what the public names of the backends are called with."""
    commands = [app.app, app.app["data"]]
    for command in commands:
        for name in command:
            if callable(target := command[name].default_command):
                yield f"halfstep {name}", target
    for package in (halfstep.torch, halfstep.jax, halfstep.mlx):
        for name in package.__all__:
            public = getattr(package, name)
            members = vars(public).values() if inspect.isclass(public) else [public]
            for member in members:
                target = inspect.unwrap(getattr(member, "__func__", member))
                own = inspect.isfunction(target) and target.__module__.startswith("halfstep")
                if own and (target.__name__ == "__init__" or not target.__name__.startswith("_")):
                    yield f"{package.__name__}.{target.__qualname__}", target


def test_every_argument_of_a_command_and_of_the_public_interface_is_read():
    unread = set()
    functions = dict(_functions())
    assert {"halfstep train", "halfstep pack", "halfstep.torch.prepare", "halfstep.jax.init"} <= functions.keys()
    for name, function in functions.items():
        if function.__code__.co_filename == "<string>":
            continue  # a dataclass writes its own
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        unread |= {f"{name}({each})" for each in inspect.signature(function).parameters if each not in read}
    assert {each for each in unread if not each.endswith(("(self)", "(cls)"))} == set()
