"""Lightning's ModelParallelStrategy under a policy, on two ranks: what is sharded and sent, skips, resumes."""

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as PlainStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from halfstep.core.errors import HalfstepError
from halfstep.integrations.lightning import ModelParallelStrategy
from halfstep.torch import prepare
from tests.integrations import sharded
from tests.integrations.lightning import modules
from tests.processes import preload_integrations
from tests.refusals import refuses
from tests.torch.nets import same_by_name
from tests.torch.parallel import jobs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


@pytest.fixture(autouse=True, scope="module")
def preloaded():
    preload_integrations()


class Module(lightning.LightningModule):
    """A model that `configure_model` shards, with a schedule; `bad` is the (batch, rank) whose loss is NaN."""

    def __init__(self, optimizer="fused", dropout=0.0, bad=None):
        super().__init__()
        self.net, self.optimizer, self.bad = jobs.net(), optimizer, bad
        self.net.norm = nn.Sequential(self.net.norm, nn.Dropout(dropout))
        self.skipped, self.bad_ranks = [], []

    def configure_model(self):
        self.trainer.precision_plugin.prepare(self)
        self.shard()

    def shard(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, rows, index):
        loss = self.loss(rows)
        return loss * torch.nan if (index, self.global_rank) == self.bad else loss

    def loss(self, rows):
        return F.cross_entropy(self.net(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())

    def validation_step(self, rows, index):
        self.log("validation_loss", self.loss(rows), sync_dist=True)

    def on_train_batch_end(self, *_):
        result = self.trainer.precision_plugin.result
        if result is not None and result.bad_rank is not None:  # after an update, of several ranks
            self.bad_ranks.append(int(result.bad_rank))
            self.skipped.append(bool(result.skipped))

    def configure_optimizers(self):
        optimizer = jobs.OPTIMIZERS[self.optimizer](self.parameters())
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(steps, micro_batches=1):
    rows = [rows for step in range(steps) for rows in jobs.batches(step, micro_batches)]
    return torch.utils.data.DataLoader(rows, batch_size=None)


def trainer(folder, policy="bf16-mixed", strategy=None, **options):
    ranks = jobs.rank_and_ranks()[1]
    given = {"strategy": strategy or ModelParallelStrategy(), "devices": ranks, "use_distributed_sampler": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "shards")  # as torchrun does; Lightning then starts no process itself
        return modules.trainer(folder, policy, gradient_clip_val=1.0, **given, **options)


def fitted(folder, policy="bf16-mixed", steps=2, module=None, micro_batches=1, resume=None, **options):
    module = module or Module()
    made = trainer(folder, policy, accumulate_grad_batches=micro_batches, **options)
    made.fit(module, loader(steps, micro_batches), ckpt_path=resume)
    return made, module


def weights(module):
    return jobs.whole(module.net)


# What is sharded, and what travels


# Bytes that one of two ranks sends of a block, and of the rest: matrices in bf16, norms and biases in fp32.
BLOCK, REST = (17 * 16 + 8 * 33) * 2 + (8 + 8 + 17 + 8) * 4, 25 * 16 * 2 + (8 + 8) * 4


def sent_by_an_update(folder, micro_batches=1):
    sent, held = {}, []

    class Watched(Module):
        def on_train_start(self):
            held.append(self.trainer.precision_plugin.run)

    module = Watched()
    sent = sharded.sent(lambda: fitted(folder, steps=1, module=module, micro_batches=micro_batches))
    (run,) = held
    (optimizer,) = run.optimizers
    moments = [v for p in run.parameters for v in optimizer.state[p].values() if v.ndim]
    return {
        "sent": sent,
        "forms": {(type(p), p.to_local().dtype) for p in module.parameters()},
        "moments": {(type(v), v.to_local().dtype) for v in moments},
        "local": sum(p.to_local().numel() for p in module.parameters()),
        "findings": run.audit(),
        "weights": weights(module),
    }


def test_lightning_shards_masters_and_reduces_fp32_gradients_once_for_an_update(ranks, tmp_path):
    once, twice = [ranks(sent_by_an_update, 2, str(tmp_path), n) for n in (1, 2)]
    assert sum(seen["local"] for seen in once) == sum(p.numel() for p in jobs.net().parameters())
    for seen, accumulated in zip(once, twice, strict=True):
        assert seen["forms"] == seen["moments"] == {(DTensor, torch.float32)}
        assert seen["findings"] == []
        reduced = {dtype: row for (name, dtype), row in seen["sent"].items() if name == "reduce_scatter_base"}
        padded = 50 * 16 + 16 + 16 + 2 * (16 + 16 + 34 * 16 + 34 + 16 * 33 + 16)
        assert {dtype: nbytes for dtype, (_, nbytes) in reduced.items()} == {torch.float32: padded * 4}
        assert accumulated["sent"]["reduce_scatter_base", torch.float32] == reduced[torch.float32]
        gathered = sum(nbytes for (name, _), (_, nbytes) in seen["sent"].items() if name == "allgather_base")
        assert gathered == 4 * BLOCK + REST  # a block again for its backward pass
        others = accumulated["weights"]
        assert all(torch.allclose(others[name], w, atol=0.1 * 2.0**-8) for name, w in seen["weights"].items())


# The updates


def by_own_loop(policy, optimizer):
    """The same model, sharded by hand and trained by `Run.step`."""
    module = Module(optimizer)
    run = prepare(module.net, policy, clip_norm=1.0)
    jobs.shard(module.net)
    made = module.configure_optimizers()
    run.attach(made["optimizer"])
    for step in range(2):
        run.step(module.loss, jobs.batches(step, 1))
        made["lr_scheduler"]["scheduler"].step()
    return weights(module)


def by_lightning(folder, policy, optimizer):
    return weights(fitted(folder, policy, module=Module(optimizer))[1])


@pytest.mark.prove
@pytest.mark.parametrize(
    ("policy", "optimizer"), [("bf16-mixed", "fused"), ("fp16-mixed", "ours"), ("fp32", "foreach")]
)
def test_it_makes_the_updates_of_a_sharded_run(ranks, policy, optimizer, tmp_path):
    by_trainer = ranks(by_lightning, 2, str(tmp_path), policy, optimizer)
    for ours, own in zip(by_trainer, ranks(by_own_loop, 2, policy, optimizer), strict=True):
        assert same_by_name(ours, own)


def skipping(folder, policy):
    made, module = fitted(folder, policy, steps=3, module=Module(bad=(1, 1)))
    return module.skipped, module.bad_ranks, int(made.precision_plugin.run.num_applied), weights(module)


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_the_nan_of_one_rank_is_skipped_by_all_and_its_rank_is_named(ranks, policy, tmp_path):
    for skipped, bad_ranks, applied, after in ranks(skipping, 2, str(tmp_path), policy):
        assert skipped == [False, True, False]
        assert bad_ranks == [-1, 1, -1]
        assert applied == 2
        assert all(w.isfinite().all() for w in after.values())


# Saving and loading


def saved_each_epoch(folder, policy="bf16-mixed", epochs=3, resume=None, **options):
    """Trains epochs of two updates, with dropout that differs between ranks; returns how it ended."""
    torch.manual_seed(2 + jobs.rank_and_ranks()[0])
    keeps = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    made, _ = fitted(
        folder,
        policy,
        module=Module(dropout=0.1),
        resume=resume,
        enable_checkpointing=True,
        callbacks=[keeps],
        epochs=epochs,
        **options,
    )
    run = made.precision_plugin.run
    schedule = made.lr_scheduler_configs[0].scheduler.state_dict()
    return sharded.whole_state(run), int(run.num_applied), schedule, made.global_step


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_a_run_is_resumed_bit_for_bit_and_no_file_is_a_pickle(ranks, policy, tmp_path):
    whole = ranks(saved_each_epoch, 2, str(tmp_path), policy)
    first = tmp_path / "epoch=0.ckpt"
    again = ranks(saved_each_epoch, 2, str(tmp_path / "again"), policy, 3, str(first))
    for (state, *facts), (same_state, *same_facts) in zip(whole, again, strict=True):
        assert facts == same_facts
        assert same_by_name(state, same_state)
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*.*"))
    files = ("manifest.json", "state-00001-of-00002.safetensors", "state-00002-of-00002.safetensors")
    assert names == [f"step-000002/{name}" for name in files]


def evaluated(folder, *saved):
    """Evaluates checkpoints in a Trainer that has not trained; returns losses, the last weights, bytes sent."""
    module, made, found = Sharding(), trainer(folder), []
    for each in saved:
        sent = sharded.sent(lambda each=each: found.extend(made.validate(module, loader(1), ckpt_path=each)))
    gathered = sum(nbytes for (name, _), (_, nbytes) in sent.items() if name == "allgather_base")
    masters = made.precision_plugin.run.masters.names.items()
    losses = [row["validation_loss"] for row in found]
    return losses, {f"model.{name}": jobs.whole_tensor(p) for p, name in masters}, gathered


class Sharding(Module):
    """Shards once, however often `configure_model` is called."""

    def shard(self):
        if not isinstance(self.net, FSDPModule):
            super().shard()


@pytest.mark.prove
def test_another_number_of_ranks_continues_and_evaluates(ranks, tmp_path):
    ends = ranks(saved_each_epoch, 2, str(tmp_path / "two"), "bf16-mixed", 2)
    saved = [str(tmp_path / "two" / f"epoch={epoch}.ckpt") for epoch in (0, 1)]
    expected = []
    for count in (1, 2, 4):
        for losses, found, gathered in ranks(evaluated, count, str(tmp_path), *saved):
            expected = expected or losses
            assert losses == pytest.approx(expected, rel=2.0**-8)
            assert same_by_name(found, {name: ends[0][0][name] for name in found})
            assert count != 2 or gathered == 2 * BLOCK + REST  # once, in bf16 where a matmul is
    assert abs(expected[0] - expected[1]) > 2.0**-7 * expected[0]
    (alone,) = ranks(saved_each_epoch, 1, str(tmp_path / "one"), "bf16-mixed", 3, saved[0])
    assert alone[1] == 6


def evaluated_around(folder):
    """Evaluates, trains and evaluates again, in one Trainer."""
    made, module = trainer(folder), Sharding()
    losses = [made.validate(module, loader(1))[0]["validation_loss"]]
    made.fit(module, loader(2))
    losses += [made.validate(module, loader(1))[0]["validation_loss"]]
    return losses, int(made.precision_plugin.run.num_applied)


@pytest.mark.prove
def test_a_model_is_evaluated_before_and_after_it_is_trained(ranks, tmp_path):
    for (before, after), applied in ranks(evaluated_around, 2, str(tmp_path)):
        assert after < before
        assert applied == 2


# What is refused


class TooLate(Module):
    def configure_model(self):
        self.shard()
        self.trainer.precision_plugin.prepare(self)


class Never(Module):
    def configure_model(self):
        self.shard()


class Whole(Module):
    def shard(self):
        pass


def refused(folder, kind, strategy, policy="bf16-mixed"):
    try:
        made, module = fitted(folder, policy, module=kind(), strategy=strategy())
        made.fit(module, loader(1))
    except HalfstepError as error:
        return str(error)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("kind", "strategy", "said"),
    [
        (Sharding, ModelParallelStrategy, "for an earlier fit"),  # it is fitted twice
        (Whole, ModelParallelStrategy, "has not sharded the model"),
        (Never, ModelParallelStrategy, "configure_model has not applied the policy"),
        (TooLate, ModelParallelStrategy, "wrapped by FSDP already"),
        (Module, PlainStrategy, "ModelParallelStrategy of halfstep.integrations.lightning"),
        (Module, DDPStrategy, "prepare() is for"),
    ],
)
def test_wrong_orders_and_strategies_are_refused(ranks, kind, strategy, said, tmp_path):
    for message in ranks(refused, 2, str(tmp_path), kind, strategy):
        assert said in message


@pytest.mark.prove
def test_a_strategy_without_its_plugin_is_refused(ranks, tmp_path):
    for message in ranks(refused, 2, str(tmp_path), Module, ModelParallelStrategy, Precision()):
        assert "shards under a policy, and there is none" in message


@pytest.mark.parametrize(
    ("given", "said"),
    [({"tensor_parallel_size": 2}, "tensor_parallel_size"), ({"save_distributed_checkpoint": False}, "rows")],
)
def test_other_ways_to_shard_are_refused(given, said):
    with refuses(HalfstepError, said):
        ModelParallelStrategy(**given)
