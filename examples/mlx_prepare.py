"""Any model and any optimizer of MLX under a precision policy, in three lines: prepare, step, read.

    pip install '.[mlx]'
    python examples/mlx_prepare.py

A small transformer of `mlx.nn` learns to write its input backwards, in bf16 and in fp16 with a loss scale.
"""

import mlx.core as mx
from mlx import nn, optimizers

from halfstep.mlx import prepare

VOCABULARY, LENGTH, WIDTH = 16, 8, 32


class Reverser(nn.Module):
    """Embeddings of tokens and positions, two encoder layers, and the embedding again as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH) for _ in range(2)]
        self.norm = nn.RMSNorm(WIDTH)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Returns the logits of every position."""
        x = self.embed(tokens) + self.positions(mx.arange(LENGTH))
        for layer in self.layers:
            x = layer(x, mask=None)
        return self.embed.as_linear(self.norm(x))


def loss_fn(model: nn.Module, tokens: mx.array) -> mx.array:
    """Returns the mean loss of writing the tokens backwards; the model's outputs are fp32."""
    return nn.losses.cross_entropy(model(tokens), tokens[:, ::-1]).mean()


def train(policy: str, steps: int = 100) -> float:
    """Trains under a policy and returns the last loss."""
    mx.random.seed(0)
    run = prepare(Reverser(), optimizers.AdamW(3e-3), policy, clip_norm=1.0)
    print(run.summary())
    skipped = mx.array(0)
    for _ in range(steps):
        micro_batches = [mx.random.randint(0, VOCABULARY, (16, LENGTH)) for _ in range(2)]
        result = run.step(loss_fn, micro_batches)  # nothing waits for the device
        skipped = skipped + result.skipped
    scale = f"scale {result.scale.item():g}, {skipped.item()} skipped"
    print(f"  loss {result.loss.item():.4f} after {steps} steps, {scale}\n")
    return result.loss.item()


if __name__ == "__main__":
    for name in ("bf16-mixed", "fp16-mixed"):
        train(name)
