"""A plain PyTorch script under a precision policy: your model, your data, your loop, and three lines of halfstep.

    pip install '.[torch]'
    python examples/torch_plain.py

A small transformer learns to write its input backwards. Each update sums two micro-batches of different lengths,
weighted by their tokens. Halfway through, the run is saved, rebuilt from the file, and resumed.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.torch import Run, prepare

VOCABULARY, LENGTH, WIDTH = 8, 6, 32


class Reverser(nn.Module):
    """Embeddings of tokens and positions, two encoder layers of torch's, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.tokens(tokens) + self.positions(positions)))


def build(policy: str) -> Run:
    """Returns a model and a stock optimizer under `policy`."""
    torch.manual_seed(0)
    model = Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return prepare(model, optimizer, policy, clip_norm=1.0)


def train(run: Run, first: int, last: int) -> float:
    """Trains from step `first` to step `last` and returns the last loss."""

    def loss_fn(batch: Tensor) -> tuple[Tensor, int]:
        losses = F.cross_entropy(run.model(batch).flatten(0, 1), batch.flip(1).flatten(), reduction="sum")
        return losses, batch.numel()

    for step in range(first, last):
        draw = torch.Generator().manual_seed(step)
        micro_batches = [torch.randint(VOCABULARY, (16, n), generator=draw) for n in (LENGTH, LENGTH - 2)]
        result = run.step(loss_fn, micro_batches)
        if (step + 1) % 10 == 0:  # reading a number waits for the device, so not every step
            print(f"  step {step + 1}: loss {float(result.loss):.4f}, skipped {bool(result.skipped)}")
    return float(result.loss)


def main(policy: str, steps: int = 60) -> float:
    """Trains half of the steps, saves, resumes in a new model, and returns the last loss."""
    run = build(policy)
    print(run.summary())
    train(run, 0, steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        torch.save(run.state_dict(), path)  # masters, moments, loss scale, counters, and the policy
        resumed = build(policy)
        resumed.load_state_dict(torch.load(path, weights_only=True))
    return train(resumed, steps // 2, steps)


if __name__ == "__main__":
    for name in ("bf16-mixed", "fp16-mixed"):
        main(name)
