"""A Fabric loop under a policy: your own loop, Fabric's set-up and checkpoints, and two lines of halfstep.

    pip install '.[torch]' lightning
    python examples/lightning_fabric.py

A small transformer learns to write its input backwards. The loop accumulates, clips and saves as always; resumed
from a checkpoint, it takes the same steps bit for bit.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.integrations.lightning import Fabric

VOCABULARY, LENGTH, WIDTH, MICRO_BATCHES = 8, 6, 32, 2


class Reverser(nn.Module):
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


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the mean loss of a batch."""
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())


def main(precision: str, path: Path, steps: int = 16, resume: bool = False) -> float:
    """Trains up to a step, saves, and returns the loss of a held-out batch."""
    fabric = Fabric(policy=precision, devices=1)
    fabric.seed_everything(0, verbose=False)
    model = Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume:
        fabric.load(path, state)
    for step in range(state["step"], steps):
        draw = torch.Generator().manual_seed(step)
        for place in range(MICRO_BATCHES):
            tokens = fabric.to_device(torch.randint(VOCABULARY, (16, LENGTH), generator=draw))
            with fabric.no_backward_sync(model, enabled=place < MICRO_BATCHES - 1):
                fabric.backward(loss_of(model, tokens) / MICRO_BATCHES)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(path, state | {"step": steps})
    model.eval()
    with torch.no_grad():
        held_out = torch.randint(VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(-1))
        return float(loss_of(model, fabric.to_device(held_out)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for precision in sys.argv[1:] or ["bf16-mixed", "16-mixed"]:
            path = Path(folder) / f"{precision}.ckpt"
            main(precision, path)
            print(precision, main(precision, path, steps=32, resume=True))
