"""A bf16 fine-tune under FSDP2 in Lightning: its masters, moments and gradients are fp32, and bf16 travels.

    pip install '.[torch]' lightning transformers
    torchrun --nproc-per-node 2 examples/lightning_fsdp.py out

docs/integrations.md shows the three lines that differ from a script with `precision="bf16-true"`. Run it again
with the same folder, and it resumes from its last checkpoint.
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_llama import counting, pretrained
from torch.distributed.fsdp import fully_shard

from halfstep.integrations.lightning import HalfstepPrecision, ModelParallelStrategy


class FineTune(lightning.LightningModule):
    """A model of transformers, sharded layer by layer."""

    def __init__(self):
        super().__init__()
        self.model = pretrained()

    def configure_model(self):
        """Shards each layer, and the rest."""
        self.trainer.precision_plugin.prepare(self)
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, rows, index):
        """Returns the loss of a batch."""
        return self.model(input_ids=rows, labels=rows).loss

    def configure_optimizers(self):
        """Returns a stock optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(out="lightning-fsdp"):
    """Trains, saves after each epoch, and returns the trainer."""
    trainer = lightning.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        plugins=HalfstepPrecision("bf16-mixed"),
        devices=2,
        max_epochs=2,
        gradient_clip_val=1.0,
        callbacks=ModelCheckpoint(out, save_last=True),
        logger=False,
    )
    last = Path(out, "last.ckpt")
    data = torch.utils.data.DataLoader(counting(256, seed=1), batch_size=16)
    trainer.fit(FineTune(), data, ckpt_path=last if last.exists() else None)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
