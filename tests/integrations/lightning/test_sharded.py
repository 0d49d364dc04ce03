"""Lightning's ModelParallelStrategy under a policy, on two ranks: shards, what travels, skips, saves and resumes."""

from functools import partial
from pathlib import Path

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy as PlainStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from halfstep.core.errors import HalfstepError
from halfstep.integrations.lightning import HalfstepPrecision, ModelParallelStrategy
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
        plugin = self.trainer.precision_plugin
        self.skipped.append(plugin.skipped)
        self.bad_ranks.append(int(plugin.result.bad_rank) if plugin.result else None)

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
        block = (17 * 16 + 8 * 33) * 2 + (8 + 8 + 17 + 8) * 4
        assert gathered == 4 * block + 25 * 16 * 2 + (8 + 8) * 4  # a block again for its backward pass
        others = accumulated["weights"]
        assert all(torch.allclose(others[name], w, atol=0.1 * 2.0**-8) for name, w in seen["weights"].items())
