"""FSDP2 in Accelerate, on two ranks: what is sharded, what travels, the updates of a run, saves and resumes."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from halfstep.core.errors import HalfstepError
from halfstep.integrations import parts
from halfstep.torch import prepare
from tests.accelerate_state import fresh_accelerate  # noqa: F401
from tests.integrations import sharded
from tests.processes import preload_integrations
from tests.refusals import refuses
from tests.torch.nets import same_by_name
from tests.torch.parallel import jobs


@pytest.fixture(autouse=True, scope="module")
def preloaded():
    preload_integrations()


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    """Accelerate sets variables, which this process would hand to those it starts."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


# -- what is sharded, and what travels


def prepared_parts():
    """Two updates, the second under a spy; and what the ranks hold then."""
    made = sharded.begin()
    accelerator, model, optimizer, _ = made
    sharded.train(made, 1)
    sent = sharded.sent(lambda: sharded.train(made, 1, first=1, micro_batches=1))
    run, state = accelerator.run, optimizer.state
    moments = [v for p in run.parameters for v in state[p].values() if v.ndim]
    return {
        "type": (accelerator.distributed_type.value, accelerator.is_fsdp2, type(model).__name__),
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "masters": {p.to_local().dtype for p in model.parameters()},
        "moments": ({type(v) for v in moments}, {v.to_local().dtype for v in moments}),
        "local": sum(p.to_local().numel() for p in model.parameters()),
        "sent": sent,
        "findings": run.audit(),
        "whole": accelerator.get_state_dict(model),
        "unwrapped": (isinstance(accelerator.unwrap_model(model), jobs.Net), isinstance(model, FSDPModule)),
    }


def test_shards_are_masters_and_fp32_gradients_are_reduced(ranks):
    """Weights of matmuls travel in bf16, norms and biases in fp32; all gradients in fp32, once for an update."""
    both = ranks(prepared_parts, 2)
    numbers = sum(p.numel() for p in jobs.net().parameters())
    assert sum(seen["local"] for seen in both) == numbers
    for seen in both:
        assert seen["type"] == ("FSDP", True, "FSDPNet")
        assert seen["sharded"]
        assert seen["masters"] == {torch.float32}
        assert seen["moments"] == ({DTensor}, {torch.float32})
        assert seen["unwrapped"] == (True, True)
        assert seen["findings"] == []
        sent = seen["sent"]
        reduced = {dtype: row for (name, dtype), row in sent.items() if name == "reduce_scatter_base"}
        # Shards are padded to the same size: 17 of 33 rows on both ranks.
        padded = 50 * 16 + 16 + 16 + 2 * (16 + 16 + 34 * 16 + 34 + 16 * 33 + 16)
        assert {dtype: nbytes for dtype, (_, nbytes) in reduced.items()} == {torch.float32: padded * 4}
        gathered = sum(nbytes for (name, _), (_, nbytes) in sent.items() if name == "allgather_base")
        block = (17 * 16 + 8 * 33) * 2 + (8 + 8 + 17 + 8) * 4
        assert gathered == 4 * block + 25 * 16 * 2 + (8 + 8) * 4  # a block again for its backward pass


def test_a_whole_state_dictionary_is_on_the_first_rank(ranks):
    first, second = [seen["whole"] for seen in ranks(prepared_parts, 2)]
    assert second == {}
    assert {name: (w.shape, w.dtype) for name, w in first.items()} == {
        name: (w.shape, torch.float32) for name, w in jobs.net().state_dict().items()
    }


# -- the updates


def by_own_loop(policy, optimizer="fused"):
    """The same model, sharded by hand and trained by `Run.step`."""
    model = jobs.net()
    run = prepare(model, policy, clip_norm=1.0)
    jobs.shard(model)
    run.attach(jobs.OPTIMIZERS[optimizer](model.parameters()))
    results = [run.step(jobs.loss_of(model), jobs.batches(step, 1)) for step in range(2)]
    return [float(r.loss) for r in results], jobs.whole(model)


def by_accelerate(policy="bf16-mixed", steps=2, **options):
    made = sharded.begin(policy, **options)
    losses = [loss for loss, _ in sharded.train(made, steps)]
    run = made[0].run
    return losses, {name: jobs.whole_tensor(p) for p, name in run.masters.names.items()}


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [("bf16-mixed", "fused"), *jobs.few([("fp16-mixed", "ours"), ("bf16-mixed,param=fp32:split", "foreach")])],
)
def test_its_loop_makes_the_updates_of_a_sharded_run(ranks, policy, optimizer):
    by_its_loop = ranks(partial(by_accelerate, policy, optimizer=optimizer), 2)
    for (losses, weights), (own_losses, own) in zip(
        by_its_loop, ranks(by_own_loop, 2, policy, optimizer), strict=True
    ):
        assert sum(losses) != sum(own_losses)  # of this rank, and of all
        assert same_by_name(weights, own)


# Ways to configure it that change no number.
WAYS = {
    "checkpointed": {"plugin": {"activation_checkpointing": True}},
    "compiled": {"compiled": {}},
    "compiled blocks": {"compiled": {"use_regional_compilation": True}},
    "compiled and checkpointed": {"compiled": {}, "plugin": {"activation_checkpointing": True}},
    "kept whole": {"plugin": {"reshard_after_forward": False}},
    "as one": {"plugin": {"auto_wrap_policy": "NO_WRAP"}},
}


SAMPLE = ("checkpointed", "compiled blocks")


@pytest.mark.parametrize(
    "way", [way if way in SAMPLE else pytest.param(way, marks=pytest.mark.prove) for way in WAYS]
)
def test_other_ways_make_the_same_updates(ranks, way):
    plain, other = ranks(by_accelerate, 2), ranks(partial(by_accelerate, **WAYS[way]), 2)
    for (losses, weights), (same_losses, same_weights) in zip(plain, other, strict=True):
        assert same_losses == losses
        assert same_by_name(same_weights, weights)


def of_transformers(tied, narrow, frugal):
    """A model as transformers loads it: the second rank may have nothing but memory for the weights."""

    def load():
        model = sharded.llama(tie_word_embeddings=tied)
        if narrow:
            model.bfloat16()
        if frugal and jobs.rank_and_ranks()[0]:
            for p in model.parameters():
                p.data = torch.full_like(p, torch.nan)
        return model

    plugin = {"transformer_cls_names_to_wrap": None, "cpu_ram_efficient_loading": frugal}
    return by_accelerate(model=load, plugin=plugin)


@pytest.mark.prove
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_models_of_transformers_train_however_they_were_loaded(ranks, tied, narrow):
    plain, frugal = [ranks(of_transformers, 2, tied, narrow, frugal) for frugal in (False, True)]
    for (losses, weights), (same_losses, same_weights) in zip(plain, frugal, strict=True):
        assert same_losses == losses
        assert same_by_name(same_weights, weights)
        assert {w.dtype for w in weights.values()} == {torch.float32}


def with_dropout(checkpointed):
    class Dropping(jobs.Net):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.up = nn.Sequential(nn.Dropout(0.5), block.up)

    calls, forward = [], nn.Dropout.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Dropout, "forward", lambda *given: calls.append(1) or forward(*given))
        plugin = {"activation_checkpointing": checkpointed}
        _, weights = by_accelerate(model=lambda: torch.manual_seed(0) and Dropping(), plugin=plugin)
    return len(calls), weights


def test_activations_that_are_computed_again_have_the_same_dropout(ranks):
    once, twice = [ranks(with_dropout, 2, on) for on in (False, True)]
    for (calls, plain), (more, again) in zip(once, twice, strict=True):
        assert (calls, more) == (4, 8)  # of two blocks in two updates
        assert same_by_name(plain, again)


def accumulated(micro_batches):
    made = sharded.begin(steps=micro_batches)
    wire = sharded.sent(lambda: sharded.train(made, 1, micro_batches=micro_batches))
    return [row for (name, _), row in wire.items() if name == "reduce_scatter_base"], jobs.whole(made[1])


def test_micro_batches_are_reduced_once_for_an_update(ranks):
    for (once, weights), (twice, others) in zip(*[ranks(accumulated, 2, n) for n in (1, 2)], strict=True):
        assert once == twice
        assert all(torch.allclose(others[name], w, atol=0.1 * 2.0**-8) for name, w in weights.items())


def skipping(policy):
    made = sharded.begin(policy)
    accelerator = made[0]
    seen = [skipped for _, skipped in sharded.train(made, 3, spoil=(1, 1))]
    return seen, int(accelerator.run.num_applied), jobs.whole(made[1])


def bad_rank():
    made = sharded.begin()
    sharded.train(made, 2, spoil=(1, 1))
    return int(made[0].result.bad_rank)


@pytest.mark.parametrize("policy", ["bf16-mixed", pytest.param("fp16-mixed", marks=pytest.mark.prove)])
def test_the_nan_of_one_rank_is_skipped_by_all_and_its_rank_is_named(ranks, policy):
    for seen, applied, weights in ranks(skipping, 2, policy):
        assert seen == [False, True, False]
        assert applied == 2
        assert all(w.isfinite().all() for w in weights.values())
    assert ranks(bad_rank, 2) == [1, 1]


def by_own_hybrid_loop():
    model = jobs.net()
    run = prepare(model, "bf16-mixed", clip_norm=1.0)
    jobs.shard(model, 2, 2)
    run.attach(jobs.OPTIMIZERS["fused"](model.parameters()))
    sent = sharded.sent(lambda: [run.step(jobs.loss_of(model), jobs.batches(step, 1)) for step in range(2)])
    return jobs.whole(model), sent


def by_hybrid_accelerate(folder):
    made = sharded.begin(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
    sent = sharded.sent(lambda: sharded.train(made, 2))
    weights = jobs.whole(made[1])
    made[0].save_state(folder)
    seen = [skipped for _, skipped in sharded.train(made, 1, first=2, spoil=(2, 3))]
    return weights, sent, (seen, int(made[0].result.bad_rank)), sharded.whole_state(made[0].run)


@pytest.mark.prove
def test_copies_of_shards_make_the_updates_of_an_own_loop_and_are_saved_once(ranks, tmp_path):
    hybrid = ranks(by_hybrid_accelerate, 4, str(tmp_path))
    for (weights, sent, skips, _), (own, own_sent) in zip(hybrid, ranks(by_own_hybrid_loop, 4), strict=True):
        assert same_by_name(weights, own)
        assert skips == ([True], 3)
        reduced = {dtype: nbytes for (name, dtype), (_, nbytes) in sent.items() if name == "reduce_scatter_base"}
        assert reduced == {torch.float32: own_sent["reduce_scatter_base", torch.float32][1]}
    parts_of_ranks = sorted((tmp_path / "step-000002").glob("*.safetensors"), key=lambda path: path.name)
    rows = [{n for n in load_file(path) if not n.startswith("rank.")} for path in parts_of_ranks]
    assert [len(names) > 0 for names in rows] == [True, True, False, False]  # the second copy writes nothing
    assert same_by_name(ranks(loaded, 2, str(tmp_path))[0], hybrid[0][3])


# -- saving and loading


def saved(folder, steps=2, then=2, **options):
    """Trains, saves, and trains on; returns what was saved, and how it ended."""
    made = sharded.begin(model=jobs_with_dropout, **options)
    sharded.train(made, steps)
    made[0].save_state(folder)
    state = sharded.whole_state(made[0].run)
    return state, sharded.train(made, then, first=steps), sharded.whole_state(made[0].run)


def resumed(folder, steps=2, then=2, **options):
    made = sharded.begin(model=jobs_with_dropout, **options)
    sharded.train(made, 1)
    made[0].load_state(folder)
    state = sharded.whole_state(made[0].run)
    return state, sharded.train(made, then, first=steps), sharded.whole_state(made[0].run)


def jobs_with_dropout():
    model = jobs.net()
    model.norm = nn.Sequential(model.norm, nn.Dropout(0.1))
    return model


def test_a_run_is_resumed_bit_for_bit_and_no_file_is_a_pickle(ranks, tmp_path):
    """Each rank draws its own dropout, and gets its random state back; the schedule continues."""
    folder = str(tmp_path / "checkpoint")
    whole, again = ranks(saved, 2, folder), ranks(resumed, 2, folder)
    for (state, losses, end), (same_state, same_losses, same_end) in zip(whole, again, strict=True):
        assert same_by_name(state, same_state)
        assert losses == same_losses
        assert same_by_name(end, same_end)
    assert whole[0][1] != whole[1][1]
    names = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.*"))
    assert names == [f"step-000002/{name}" for name in ("manifest.json", *FILES)]


FILES = ["state-00001-of-00002.safetensors", "state-00002-of-00002.safetensors"]


def alone(function, *given):
    """What one process without a group does, in this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        return function(*given)


def test_another_number_of_ranks_loads_the_same_weights_and_moments(ranks, tmp_path):
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    state = ranks(saved, 2, two)[0][0]
    assert same_by_name(alone(resumed, two)[0], state)
    state = alone(saved, one)[0]
    for found, _, _ in ranks(resumed, 2, one):
        assert same_by_name(found, state)


def narrow_moments(folder):
    """Moments in bf16, of torch's own optimizer, and whether they resume bit for bit."""
    policy = {"policy": "bf16-mixed,moments=bf16"}
    state, losses, end = saved(folder, **policy)
    same_state, same_losses, same_end = resumed(folder, **policy)
    same = losses == same_losses and same_by_name(state, same_state) and same_by_name(end, same_end)
    return {t.dtype for name, t in state.items() if name.endswith(("exp_avg", "exp_avg_sq"))}, same


@pytest.mark.prove
def test_sharded_moments_are_held_as_the_policy_says(ranks, tmp_path):
    assert ranks(narrow_moments, 2, str(tmp_path)) == [({torch.bfloat16}, True)] * 2


@pytest.mark.prove
def test_four_ranks_load_what_two_saved(ranks, tmp_path):
    state = ranks(saved, 2, str(tmp_path))[0][0]
    for found, _, _ in ranks(resumed, 4, str(tmp_path)):
        assert same_by_name(found, state)


def saved_thrice(folder):
    """Into one folder, twice without an update between; then by Accelerate's own names, of which two are kept."""
    made = sharded.begin(
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    )
    accelerator = made[0]
    sharded.train(made, 1)
    for _ in range(3):
        accelerator.save_state()
    state = sharded.whole_state(accelerator.run)
    if accelerator.is_main_process:
        os.makedirs(f"{folder}/checkpoints/checkpoint_3/step-000001.partial-left")  # as by a kill
    accelerator.wait_for_everyone()
    made = sharded.begin(
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    )
    made[0].load_state()
    found = sharded.whole_state(made[0].run)
    made[0].save_state()
    return same_by_name(found, state)


def test_folders_that_accelerate_names_are_kept_found_and_counted_on(ranks, tmp_path):
    assert ranks(saved_thrice, 2, str(tmp_path)) == [True, True]
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["checkpoint_2", "checkpoint_3"]
    assert [path.name for path in (tmp_path / "checkpoints/checkpoint_3").iterdir()] == ["step-000001"]


def overwritten(folder):
    made = sharded.begin()
    for steps in (2, 0, 1):
        sharded.train(made, steps)
        made[0].save_state(folder)
    return True


def test_a_folder_that_is_saved_to_again_has_the_last_save_alone(ranks, tmp_path):
    ranks(overwritten, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]  # two updates, the same again, one more


def refused(folder, policy):
    made = sharded.begin(policy)
    before = sharded.whole_state(made[0].run)
    try:
        made[0].load_state(folder)
    except HalfstepError as error:
        return str(error), same_by_name(before, sharded.whole_state(made[0].run))


def test_what_does_not_fit_is_refused_by_all_ranks_and_nothing_is_loaded(ranks, tmp_path):
    ranks(overwritten, 2, str(tmp_path))
    for said, unchanged in ranks(refused, 2, str(tmp_path), "fp16-mixed"):
        assert "the policy `bf16-mixed`" in said
        assert unchanged
    file = tmp_path / "step-000004" / FILES[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for said, unchanged in ranks(refused, 2, str(tmp_path), "bf16-mixed"):
        assert "damaged" in said
        assert unchanged


def states_after(steps):
    made, found = sharded.begin(), []
    for step in range(steps):
        sharded.train(made, 1, first=step)
        found.append(sharded.whole_state(made[0].run))
    return found


def saving(folder):
    """Saves after each of two updates, and then on and on, until it is killed."""
    made = sharded.begin()
    sharded.train(made, 1)
    made[0].save_state(folder)
    sharded.train(made, 1, first=1)
    while True:
        made[0].save_state(folder)


def loaded(folder):
    made = sharded.begin()
    made[0].load_state(folder)
    return sharded.whole_state(made[0].run)


@pytest.mark.prove
def test_a_killed_job_loses_no_whole_checkpoint(ranks, tmp_path):
    """30 times a rank is killed, or both, up to 90 ms into saves of some 30 ms: the newest folder is whole."""
    expected = ranks(states_after, 2, 2)[0]
    for folder, _ in sharded.killed_saves(tmp_path, saving, lambda f: f.is_dir() and parts.newest(f), 0.09):
        first, second = ranks(loaded, 2, str(folder))
        assert same_by_name(first, second)
        assert sum(same_by_name(first, state) for state in expected) == 1


# -- what is refused


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ({"fsdp_version": 1}, "FSDP1"),
        ({"mixed_precision_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, "round gradients"),
        ({"cpu_offload": True}, "cpu_offload"),
        ({"ignored_modules": "norm"}, "ignored_modules"),
    ],
)
def test_a_plugin_that_a_policy_cannot_train_by_is_refused(plugin, said):
    with refuses(HalfstepError, said):
        sharded.accelerator(plugin=plugin)
    assert AcceleratorState._shared_state == {}


@pytest.mark.parametrize(
    ("sizes", "said"), [({"dp_shard_size": 2, "tp_size": 2}, "tp=2"), ({"dp_replicate_size": 2}, "no shards")]
)
def test_other_ways_to_split_are_refused(sizes, said):
    with refuses(HalfstepError, said):
        sharded.accelerator(parallelism_config=ParallelismConfig(**sizes))


def test_activation_checkpointing_without_layers_is_refused(ranks):
    for said in ranks(without_layers, 2):
        assert "no layer of the model" in said


def without_layers():
    try:
        sharded.begin(plugin={"auto_wrap_policy": "NO_WRAP", "activation_checkpointing": True})
    except HalfstepError as error:
        return str(error)
