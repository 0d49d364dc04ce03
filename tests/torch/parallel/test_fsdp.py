"""FSDP2: fp32 gradients on the wire, nothing gathered left behind, and casts once for an update."""

import math
import os
from functools import partial
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfstep.core.errors import LossError
from halfstep.torch import prepare
from halfstep.torch.convert.functions.mode import PolicyMode
from halfstep.torch.instruments.collect.averages import AverageWatch
from halfstep.torch.numerics.shards import ShardCast
from tests.processes import run_ranks
from tests.torch.parallel import jobs
from tests.torch.parallel.bounds import assert_same


def sent_in_a_step():
    run, model = jobs.begin(shape=())
    run.step(jobs.loss_of(model), jobs.batches(0, 1))
    with jobs.Wire() as wire:
        run.step(jobs.loss_of(model), jobs.batches(1, 2))
    return wire.sent


def test_only_fp32_gradients_are_reduced(ranks):
    """Weights travel in bf16, norms and biases in fp32; gradients in fp32, once for two micro-batches."""
    # Shards are padded to the same size. Tied embeddings and the last norm; a block's norm, up and down.
    root, block = 25 * 16 * 2 + (8 + 8) * 4, (17 * 16 + 8 * 33) * 2 + (8 + 8 + 17 + 8) * 4
    grads = [2 * (25 * 16 + 16) * 4, *[2 * (17 * 16 + 8 * 33 + 41) * 4] * 2]
    for sent in ranks(sent_in_a_step, 2):
        gathered = [nbytes for name, _, nbytes in sent if name == "allgather_base"]
        assert sorted(gathered) == 2 * [root] + 8 * [block]  # blocks are gathered again for the backward pass
        reduced = [(dtype, nbytes) for name, dtype, nbytes in sent if name == "reduce_scatter_base"]
        assert sorted(nbytes for _, nbytes in reduced) == sorted(grads)
        assert {dtype for dtype, _ in reduced} == {torch.float32}
        assert [row for row in sent if row[0] == "allreduce"] == [("allreduce", torch.float32, 20)]


def kept_after_forward():
    """Bytes of tensors as large as a block's matrices that a forward pass leaves behind for the backward pass."""
    run, model = jobs.begin(shape=())
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = jobs.loss_of(model)(*jobs.batches(0, 1))
    weights = [t for t in saved if t.shape in {(33, 16), (16, 33), (16, 33)[::-1]}]
    held = [t.untyped_storage().nbytes() for t in weights]
    run.backward(loss)
    run.update()
    return len(weights), held


def test_no_gathered_weight_outlives_its_layer(ranks):
    for number, held in ranks(kept_after_forward, 2):
        assert number >= 4
        assert held == [0] * number


def with_unequal_rows():
    """The second rank has a third of the first one's tokens."""
    run, model = jobs.begin(optimizer="sgd", shape=(), clip_norm=0.0)
    rows = torch.randint(0, jobs.WORDS, (8, 12), generator=torch.Generator().manual_seed(0))
    mine = rows.split([6, 2])[jobs.rank_and_ranks()[0]] if dist.is_initialized() else rows
    loss = jobs.loss_of(model)
    result = run.step(lambda rows: (loss(rows) * rows[:, 1:].numel(), rows[:, 1:].numel()), [mine])
    return jobs.rows_of([result]), jobs.whole(model)


def test_ranks_with_unequal_numbers_of_tokens_make_the_mean_of_all(ranks):
    assert_same("fp32", with_unequal_rows(), ranks(with_unequal_rows, 2))


def with_a_backward_pass_of_its_own(micro_batches):
    run, model = jobs.begin(shape=())
    loss = jobs.loss_of(model)

    def adversarial(rows):
        loss(rows).backward()
        return loss(rows)

    with pytest.raises(LossError, match="backward pass of its own"):
        run.step(adversarial, jobs.batches(0, micro_batches))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_backward_pass_of_a_loss_function_is_refused(ranks, micro_batches):
    ranks(with_a_backward_pass_of_its_own, 2, micro_batches)


def stepped(by_hand, steps=2, bad=False):
    """The weights after some steps; gradients of one rank may not be finite in the last."""
    run, model = jobs.begin(optimizer="sgd", shape=(), clip_norm=0.0)
    for step in range(steps):
        if not by_hand:
            run.step(jobs.loss_of(model), jobs.batches(step, 1))
            continue
        jobs.loss_of(model)(*jobs.batches(step, 1)).backward()
        if bad and step == steps - 1 and jobs.rank_and_ranks()[0] == 0:
            run.parameters[0].grad.to_local().fill_(math.inf)
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()
    return jobs.whole(model)


def test_a_loop_that_steps_its_optimizer_makes_the_same_updates(ranks):
    for given, expected in [((True, 2), (False, 2)), ((True, 2, True), (True, 1))]:
        for got, wanted in zip(ranks(stepped, 2, *given), ranks(stepped, 2, *expected), strict=True):
            assert all(torch.equal(got[name], weight) for name, weight in wanted.items())


def in_other_ways(way):
    model = jobs.net()
    if way == "frozen":
        model.blocks[0].requires_grad_(False)
    if way == "checkpointed":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    run = prepare(model, "bf16-mixed", clip_norm=1.0, ema=0.9 if way == "ema" else 0.0)
    if way == "compiled before":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if dist.is_initialized():
        jobs.shard(model)
    if way == "compiled after":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    run.attach(jobs.OPTIMIZERS["ours"](p for p in model.parameters() if p.requires_grad))
    results = [run.step(jobs.loss_of(model), jobs.batches(step, 1)) for step in range(2)]
    rows = jobs.rows_of(results)
    if way == "ema":
        with run.averaged():
            return rows, jobs.whole(model)
    return rows, jobs.whole(model)


@pytest.mark.prove
@pytest.mark.parametrize("way", ["frozen", "checkpointed", "compiled before", "compiled after", "ema"])
def test_in_other_ways(ranks, way):
    assert_same("bf16-mixed", in_other_ways(way), ranks(in_other_ways, 2, way))


def evaluated():
    """Logits while training and in the role `eval`, in one process or sharded; each twice, in turns."""
    run, model = jobs.begin("bf16-mixed,eval=fp32", shape=())
    rows, found = torch.arange(40).view(4, 10), []
    for _ in range(2):
        with torch.no_grad():
            found.append(model(rows))
            with run.evaluation():
                found.append(model(rows))
    run.step(jobs.loss_of(model), jobs.batches(0, 1))
    return found


def test_evaluation_gathers_in_its_own_format(ranks):
    trained, exact, *again = evaluated()
    assert not torch.equal(trained, exact)
    for found in ranks(evaluated, 2):
        assert all(map(torch.equal, found, (trained, exact, *again)))


def reached_in_hooks():
    """Functions of FSDP's hooks that the mode sees, which is on while a model's own code runs."""
    run, model = jobs.begin(shape=())
    seen, call = [], PolicyMode.__torch_function__
    with pytest.MonkeyPatch.context() as patch:
        spy = lambda mode, function, *args: seen.append(function.__name__) or call(mode, function, *args)  # noqa: E731
        patch.setattr(PolicyMode, "__torch_function__", spy)
        run.step(jobs.loss_of(model), jobs.batches(0, 1))
    return seen


def test_the_hooks_of_fsdp_are_not_intercepted(ranks):
    for seen in ranks(reached_in_hooks, 2):
        assert "gelu" in seen
        assert not {"untyped_storage", "copy_"} & set(seen)


def casts_in_an_update(writes):
    """The shards that are cast one by one; the others were cast together, before the first micro-batch."""
    run, model = jobs.begin(shape=())
    loss = jobs.loss_of(model)

    def writing(rows):
        found = loss(rows)
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(0.5)  # before the backward pass gathers it again
        return found

    with pytest.MonkeyPatch.context() as patch, Casts() as casts:
        patch.setattr(run, "update", lambda: None)
        run.step(writing if writes else loss, jobs.batches(0, 2))
    return casts.shapes


class Casts(TorchDispatchMode):
    """Lists the shapes of fp32 matrices that are cast to bf16 one by one."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args, kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and found.dtype == torch.bfloat16 and args[0].dim() == 2:
            self.shapes.append(tuple(args[0].shape))
        return found


def test_shards_are_cast_once_for_all_micro_batches(ranks):
    for shapes in ranks(casts_in_an_update, 2, False):
        assert not {(17, 16), (8, 33), (25, 16)} & set(shapes)
    for shapes in ranks(casts_in_an_update, 2, True):
        assert (17, 16) in shapes
        assert not {(8, 33), (25, 16)} & set(shapes)


def by_our_kernel():
    """Trains by our AdamW kernel, interpreted; returns weights, and how many shards each update cast again."""
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    from halfstep.torch.optim import adamw

    dist.init_process_group("gloo")
    weights, again = [], []
    for writes in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            held = mock.Mock(wraps=ShardCast.hold)
            patch.setattr(ShardCast, "hold", lambda *given, held=held: held(*given))
            patch.setattr(adamw, "reachable", lambda tensors: [t.is_contiguous() for t in tensors])
            model = jobs.net()
            run = prepare(model, "bf16-mixed", clip_norm=1.0)
            jobs.shard(model)
            run.attach(jobs.AdamW(model.parameters(), lr=1e-2))
            if not writes:
                run.masters.casts = {}
            for step in range(4):
                if step == 3:
                    with torch.no_grad():
                        model.blocks[0].up.weight.mul_(0.5)
                bad = torch.inf if step == 2 else 1.0  # is skipped
                loss = jobs.loss_of(model)
                held.reset_mock()
                run.step(lambda rows, loss=loss, bad=bad: loss(rows) * bad, jobs.batches(step, 1))
                again.append(held.call_count)
                for gather in run.sharded.gathers.values() if writes else ():
                    assert torch.equal(gather.cast.values, gather.shard.bfloat16())
            weights.append(jobs.whole(model))
    dist.destroy_process_group()
    return weights, again


@pytest.mark.prove
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_our_kernel_writes_the_casts_and_only_what_was_written_to_is_cast_again():
    for (written, casted), again in run_ranks(by_our_kernel):
        assert all(torch.equal(written[name], casted[name]) for name in casted)
        assert again == [5, 0, 0, 1, 5, 5, 5, 5]


def looked_for_averages():
    """What FSDP has gathered, and freed again, is in bf16 and has the shape of a weight."""
    run, model = jobs.begin(shape=())
    watch = AverageWatch()
    freed = torch.zeros(model.blocks[0].up.weight.shape, dtype=torch.bfloat16)
    freed.untyped_storage().resize_(0)
    for step in range(5):
        run.step(jobs.loss_of(model), jobs.batches(step, 1))
        watch.look(dict(model.named_parameters()), [])
    return [*watch.averages()]


def test_the_audit_takes_nothing_that_was_gathered_for_an_average(ranks):
    assert ranks(looked_for_averages, 2) == [[], []]
