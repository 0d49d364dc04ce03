"""A LightningModule under a policy: its own code, the Trainer's loop, and two lines of halfstep.

    pip install '.[torch]' lightning
    python examples/lightning_trainer.py

A small transformer learns to write its input backwards. The Trainer accumulates, clips, schedules, validates and
writes checkpoints as always; resumed from one, training takes the same steps bit for bit.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.integrations.lightning import HalfstepPrecision

VOCABULARY, LENGTH, WIDTH = 8, 6, 32


class Reverser(lightning.LightningModule):
    """Embeddings of tokens and positions, an encoder layer of torch's, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.tokens(tokens) + self.positions(positions)))

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """Returns the loss of a micro-batch."""
        loss = self._loss(tokens)
        self.log("loss", loss)
        return loss

    def validation_step(self, tokens: Tensor, index: int) -> None:
        """Logs the loss of a held-out batch."""
        self.log("validation_loss", self._loss(tokens), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Returns a stock optimizer and a stock schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), tokens.flip(1).flatten())


def batches(count: int, seed: int) -> Any:
    """Returns a loader of random tokens."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count * 16, LENGTH), generator=draw)
    return torch.utils.data.DataLoader(tokens, batch_size=16)


def main(precision: str, folder: Path, epochs: int = 2, resume: Path | None = None) -> lightning.Trainer:
    """Trains for some epochs, from a checkpoint if one is given, and returns the Trainer."""
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        plugins=HalfstepPrecision(precision),
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Reverser(), batches(16, 1), batches(2, 2), ckpt_path=resume, weights_only=True)
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for precision in sys.argv[1:] or ["bf16-mixed", "16-mixed"]:
            trainer = main(precision, Path(folder) / precision)
            saved = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
            resumed = main(precision, Path(folder) / precision, epochs=4, resume=saved)  # type: ignore[arg-type]
            print(precision, float(resumed.callback_metrics["validation_loss"]))
