"""fp32 weights and bf16 activations without autocast and without a policy: one layer in your own loop.

    pip install '.[torch]'
    python examples/casted_linear.py              # --compile, --device cuda, --steps 3242

1. Write CastedLinear where nn.Linear was.
2. model.bfloat16() makes the activations bf16; m.float() gives the casted layers their fp32 weights back.
3. Take torch.autocast out of the loop. The model returns a loss in fp32.

Each casted layer multiplies in the format of its input and has fp32 weight gradients, summed over micro-batches in
fp32. What is no CastedLinear, here the embedding, is trained in bf16; halfstep.torch.prepare gives every parameter
an fp32 master instead (torch_plain.py).
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.torch import CastedLinear, cross_entropy, rms_norm

VOCABULARY, LENGTH, WIDTH, HEADS = 8, 9, 16, 2


class Block(nn.Module):
    """Causal attention and a squared ReLU, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = CastedLinear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = CastedLinear(WIDTH, WIDTH, bias=False)
        self.up = CastedLinear(WIDTH, 4 * WIDTH, bias=False)
        self.down = CastedLinear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the stream with what the block adds to it."""
        q, k, v = self.qkv(rms_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(rms_norm(x, (WIDTH,)))).square())


class GPT(nn.Module):
    """Embeddings of tokens and positions, two blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = CastedLinear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss, fp32 inside and out."""
        stream = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(rms_norm(stream, (WIDTH,)))
        return cross_entropy(logits.flatten(0, 1), y.flatten())


def build(device: str = "cpu") -> GPT:
    """Returns a model with bf16 activations and fp32 weights in its casted layers."""
    torch.manual_seed(0)
    model = GPT().to(device).bfloat16()
    for m in model.modules():
        if isinstance(m, CastedLinear):
            m.float()
    return model


def train(
    model: GPT, steps: int, device: str = "cpu", compiled: bool = False, micro_batches: int = 8
) -> list[float]:
    """Learns to repeat the token of three places before; returns the loss of every step."""
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warmdown = max(1, steps * 926 // 3242)  # the last steps, in which the rate falls to zero
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (steps - step) / warmdown))
    losses = []
    for step in range(steps):
        draw, total = torch.Generator().manual_seed(step), torch.zeros((), device=device)
        for _ in range(micro_batches):
            text = torch.randint(VOCABULARY, (4, 3), generator=draw).repeat(1, 4).to(device)
            loss = forward(text[:, :LENGTH], text[:, 1 : LENGTH + 1])
            loss.backward()
            total += loss.detach() / micro_batches
        for p in model.parameters():
            p.grad /= micro_batches
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total)
    return [float(loss) for loss in losses]


def main() -> None:
    """Trains, and shows which formats weights and gradients had."""
    parser = argparse.ArgumentParser(description="Train a small GPT with CastedLinear.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    model = build(given.device)
    losses = train(model, given.steps, given.device, given.compile)
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {given.steps} steps")
    for name, p in model.named_parameters():
        print(f"  {name:26} held and updated in {str(p.dtype).removeprefix('torch.')}")


if __name__ == "__main__":
    main()
