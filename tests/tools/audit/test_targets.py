"""Run folders, checkpoints, recipes and factories as an audit sees them, whole and damaged."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from halfstep.config.load import load, recipe_names, to_toml
from halfstep.core.audit.engine import check
from halfstep.core.audit.finding import Finding
from halfstep.core.errors import ConfigError, HalfstepError
from halfstep.core.state_format import Stored
from halfstep.tools.audit import runs
from halfstep.tools.audit.targets import collect
from halfstep.training.checkpoints import checkpoint
from halfstep.training.telemetry.events import Events


def rules(collected):
    return sorted({finding.rule for finding in check(collected.records)})


@pytest.mark.parametrize("recipe", recipe_names())
def test_our_recipes_break_no_rule(recipe):
    collected = collect(recipe)
    assert len(collected.records) == 3  # every precision that `auto` may choose
    assert all(len(record.weights) > 10 and record.operations for record in collected.records)
    assert check(collected.records) == []


def test_a_recipe_in_pure_bf16_has_no_masters(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('policy = "bf16-true,moments=bf16,norm=bf16"\n[model]\nlayers = 1\n')
    assert rules(collect(str(file))) == ["HS101", "HS104", "HS401"]
    file.write_text('policy = "bf16-true,param=bf16:stochastic"\n[model]\nlayers = 1\n')
    assert rules(collect(str(file))) == []


def tensor(dtype="F32"):
    size = {"F32": 4, "BF16": 2, "I16": 2}[dtype]
    return Stored(dtype, (2, 2), bytes(4 * size))


def save(run, step, weight="F32", moment="F32", policy="fp32", **more):
    arrays = {"model.embed.weight": tensor(weight), "optimizer.0.embed.weight.exp_avg": tensor(moment), **more}
    meta = {"policy": policy, "config": {}, "data": {}}
    return checkpoint.save(run / "checkpoints", step, arrays, meta)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text(to_toml(load("tiny", ["policy=bf16-mixed"])))
    with Events(folder / "events.jsonl") as events:
        events.write("start", policy="bf16-mixed", config={})
        events.write("step", step=1, loss=5.0)
        events.write("step", step=2, loss=float("nan"))
        events.write("end", step=2)
    save(folder, 1)
    save(folder, 2)
    return folder


def test_a_run_folder_is_read_without_its_tensors(run):
    (record,) = collect(str(run)).records
    assert (record.policy, record.updates, record.losses) == ("bf16-mixed", 2, [5.0, None])
    assert [facts.step for facts in record.checkpoints] == [1, 2]
    assert record.checkpoints[0].moments == {"embed.weight/exp_avg": "fp32"}
    assert record.unseen == []
    assert check(record, select=["HS1", "HS4", "HS6"]) == []
    assert rules(collect(str(run / "checkpoints"))) == []
    assert rules(collect(str(run / "checkpoints" / "step-000002"))) == []


def test_a_split_master_is_whole(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2, weight="BF16", **{"remainder.embed.weight": tensor("I16")})
    facts = runs.facts_of(path)
    assert (facts.weights, facts.masters) == ({"embed.weight": "bf16"}, {"embed.weight": "fp32"})


def test_formats_that_drift_are_found_unless_the_policy_changed(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, weight="BF16", moment="BF16")
    assert rules(collect(str(tmp_path / "checkpoints"))) == ["HS104", "HS602", "HS603"]
    save(tmp_path, 3, policy="bf16-true")
    assert len(check(collect(str(tmp_path / "checkpoints")).records, select=["HS6"])) == 2


def test_what_is_missing_of_a_run_is_said(run):
    with open(run / "events.jsonl", "a") as file:
        file.write('{"event": "st')  # a torn last line
    assert collect(str(run)).unseen == []
    (run / "run.toml").unlink()
    assert "run.toml" in collect(str(run)).unseen[0]
    (run / "events.jsonl").unlink()
    assert any("events.jsonl" in text for text in collect(str(run)).unseen)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match="holds no run"):
        collect(str(run))


def test_a_run_that_is_being_written_is_judged_as_far_as_it_is(run):
    lines = (run / "events.jsonl").read_text().splitlines()[:-1]
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    (run / "checkpoints" / "step-000003.partial").mkdir()
    collected = collect(str(run))
    assert collected.unseen == ["the run has not ended, or was killed: what follows is not known"]
    assert rules(collected) == rules(collect(str(run)))


def test_a_torn_newest_checkpoint_is_found(run):
    (run / "checkpoints" / "step-000002" / "state.safetensors").write_bytes(b"torn")
    (found,) = check(collect(str(run)).records, select=["HS605"])
    assert "step-000002" in found.message


def test_what_a_newer_halfstep_wrote_is_refused(run):
    file = run / "checkpoints" / "step-000002" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(HalfstepError, match="has format 99") as error:
        collect(str(run))
    assert "update yours" in error.value.hint


def test_findings_and_layers_of_a_run_are_read(run):
    finding = Finding("HS409", "m", "error", "certain", "f", "p", where=["a"])
    columns = {"count": [10, 10], "amax": [1.0, 7e4], "overflow": [0, 3], "underflow": [0, 0], "subnormal": [0, 0]}
    layers = [{"name": name, "kind": "matmul", "formats": {"activation": "fp16"}} for name in ("a", "b")]
    with Events(run / "events.jsonl") as events:
        events.write("monitor", step=0, layers=layers, every=1, slice=10)
        events.write("layers", step=1, since=0, activation=columns, gradient=columns, weight={})
        events.write("finding", step=1, **finding.to_dict())
    collected = collect(str(run))
    assert collected.findings == [finding]
    (found,) = check(collected.records, select=["HS409"])
    assert (found.where, found.evidence["overflow"]) == (["b"], 3)


def trainer_checkpoint(folder, weight=torch.float32, moment=torch.float32, *, whole=True, scaler=False):
    folder.mkdir(parents=True)
    save_file({"a.weight": torch.zeros(2, 3, dtype=weight)}, folder / "model.safetensors")
    state = {0: {"step": torch.zeros(()), "exp_avg": torch.zeros(2, 3, dtype=moment)}}
    torch.save({"state": state, "param_groups": [{"params": [0]}]}, folder / "optimizer.pt")
    torch.save({}, folder / "scheduler.pt")
    torch.save({}, folder / "training_args.bin")
    if scaler:
        torch.save(torch.amp.GradScaler("cpu").state_dict(), folder / "scaler.pt")
    if whole:
        (folder / "trainer_state.json").write_text("{}")
    return folder


def test_checkpoints_of_a_trainer_are_read_in_order(tmp_path):
    for step in (5, 10, 100):
        trainer_checkpoint(tmp_path / f"checkpoint-{step}", scaler=True)
    (record,) = collect(str(tmp_path)).records
    assert [facts.step for facts in record.checkpoints] == [5, 10, 100]
    facts = record.checkpoints[0]
    assert (facts.weights, facts.moments) == ({"a.weight": "fp32"}, {"a.weight/exp_avg": "fp32"})
    assert facts.scaler is True
    assert check(record) == []


def test_what_is_wrong_with_checkpoints_of_a_trainer(tmp_path):
    trainer_checkpoint(tmp_path / "a" / "checkpoint-1", torch.bfloat16)
    assert rules(collect(str(tmp_path / "a"))) == ["HS601"]
    assert rules(collect(str(tmp_path / "a" / "checkpoint-1"))) == ["HS601"]
    trainer_checkpoint(tmp_path / "b" / "checkpoint-1")
    trainer_checkpoint(tmp_path / "b" / "checkpoint-2", moment=torch.bfloat16)
    assert rules(collect(str(tmp_path / "b"))) == ["HS104", "HS603"]
    trainer_checkpoint(tmp_path / "c" / "checkpoint-1")
    trainer_checkpoint(tmp_path / "c" / "checkpoint-2", whole=False)
    assert rules(collect(str(tmp_path / "c"))) == ["HS605"]
    torn = trainer_checkpoint(tmp_path / "c" / "checkpoint-3") / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-8])
    assert rules(collect(str(tmp_path / "c"))) == ["HS605"]
    (trainer_checkpoint(tmp_path / "c" / "checkpoint-4") / "optimizer.pt").unlink()
    assert rules(collect(str(tmp_path / "c"))) == ["HS605"]
    half = (trainer_checkpoint(tmp_path / "c" / "checkpoint-5")) / "optimizer.pt"
    half.write_bytes(half.read_bytes()[:100])
    assert rules(collect(str(tmp_path / "c"))) == ["HS605"]


def test_a_finished_model_and_a_state_of_accelerate_are_whole(tmp_path):
    save_file({"a.weight": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    torch.save({}, tmp_path / "training_args.bin")
    assert rules(collect(str(tmp_path))) == []
    state = trainer_checkpoint(tmp_path / "step_10", whole=False)
    (state / "optimizer.pt").rename(state / "optimizer.bin")
    (state / "scheduler.pt").rename(state / "scheduler.bin")
    (state / "training_args.bin").unlink()
    (state / "random_states_0.pkl").write_bytes(b"")
    (record,) = collect(str(tmp_path)).records  # of both, the checkpoints
    assert [facts.step for facts in record.checkpoints] == [10]
    assert record.checkpoints[0].moments
    assert check(record) == []


def test_a_layout_that_is_not_read_is_said_and_not_judged(tmp_path):
    (tmp_path / "checkpoint-5" / "global_step5").mkdir(parents=True)
    collected = collect(str(tmp_path))
    assert rules(collected) == []
    assert "DeepSpeed" in collected.unseen[0]
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-5" / "global_step5").rmdir()
    assert rules(collect(str(tmp_path))) == ["HS605"]


class Odd:
    """Its file touches another one when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


def test_code_in_a_file_is_never_run(tmp_path):
    touched = tmp_path / "touched"
    torch.save({"model": nn.Linear(3, 2).state_dict(), "odd": Odd(str(touched))}, tmp_path / "model.pt")
    (record,) = collect(str(tmp_path / "model.pt")).records
    assert record.checkpoints[0].weights == {"weight": "fp32", "bias": "fp32"}
    torch.save({"odd": Odd(str(touched))}, tmp_path / "model.pt")
    (record,) = collect(str(tmp_path / "model.pt")).records
    assert "holds neither weights nor" in record.unseen[0]
    assert not touched.exists()
    torch.load(tmp_path / "model.pt", weights_only=False)["odd"].close()
    assert touched.exists()


def test_a_file_of_a_training_loop_is_read(tmp_path):
    model = nn.Linear(3, 2)
    state = {i: {"step": 1, "exp_avg": torch.zeros_like(p)} for i, p in enumerate(model.parameters())}
    optimizer = {"state": state, "param_groups": [{"params": [0, 1]}]}
    torch.save({"optimizer": optimizer, "model": model.half().state_dict()}, tmp_path / "last.pt")
    (found,) = check(collect(str(tmp_path / "last.pt")).records)
    assert (found.rule, found.where) == ("HS601", ["weight", "bias"])


FACTORIES = """
import torch
from torch import nn

def plain():
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def pure_bf16():
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.1)
    return model, [optimizer], lambda x: model(x).float().square().mean(), torch.ones(2, 4, dtype=torch.bfloat16)

def raises():
    return 1 / 0

def bad_loss():
    return *plain(), lambda batch: batch.no_such_thing, torch.ones(1)

def nothing():
    return None

def other():
    return 1, 2

def on_mlx():
    import mlx.core as mx
    from mlx import nn, optimizers
    model = nn.Linear(4, 4)
    model.set_dtype(mx.bfloat16)
    loss_fn = lambda model, x: model(x).astype(mx.float32).square().mean()
    return model, optimizers.AdamW(1e-6), loss_fn, mx.ones((2, 4), mx.bfloat16)

def on_jax():
    import jax.numpy as jnp
    import optax
    params = {"w": jnp.full((4, 4), 0.5, jnp.bfloat16)}
    loss_fn = lambda params, x: (x @ params["w"]).astype(jnp.float32).mean()
    return loss_fn, params, jnp.ones((2, 4), jnp.bfloat16), optax.adamw(1e-6)

def on_mlx_without_a_loss():
    return on_mlx()[:2]
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "audited_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "audited_factories"


def test_a_factory_is_stepped_if_it_brings_a_loss(factories):
    collected = collect(f"{factories}:plain")
    assert check(collected.records) == []
    assert "no step was made" in collected.unseen[0]
    (record,) = collect(f"{factories}:pure_bf16", steps=3).records
    assert (record.updates, len(record.losses)) == (3, 3)
    found = {f.rule: f for f in check(record)}
    assert {"HS101", "HS102", "HS104"} <= found.keys()
    assert found["HS101"].evidence["lost_share"] > 0.5
    assert np.isfinite(record.losses).all()


@pytest.mark.parametrize("framework", [pytest.param("jax", marks=pytest.mark.prove), "mlx"])
def test_a_factory_may_be_of_another_framework(factories, framework):
    (record,) = collect(f"{factories}:on_{framework}", steps=2).records
    assert record.framework == framework
    assert "HS101" in {finding.rule for finding in check(record)}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", r"raised ZeroDivisionError: division by zero \(at .*audited_factories.py:16\)"),
        ("bad_loss", r"a step of .* raised AttributeError: .*audited_factories.py:19"),
        ("nothing", "returned a NoneType"),
        ("other", r"returned \(int, int\), and none is a model"),
        ("missing", "has no function `missing`"),
        ("on_mlx_without_a_loss", "on mlx a loss and a batch are needed"),
    ],
)
def test_a_factory_that_fails_is_reported(factories, name, problem):
    with pytest.raises(ConfigError, match=problem):
        collect(f"{factories}:{name}")
