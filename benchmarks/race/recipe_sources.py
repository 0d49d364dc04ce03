"""`speedrun` and `golf` as their sources train them: plain torch, autocast, their own Muon, and no halfstep.

This follows the descriptions of the sources (modded-nanogpt's record 9, Parameter-Golf's baseline) with our
parameter names, so that both sides of a race start from the same weights and tests can compare them:

    speedrun   fp32 weights under torch.autocast in bf16, the stream in fp32, logits capped in bf16 and then
               widened; compiled with coordinate descent; DDP of one process; cuDNN attention
    golf       linear layers keep fp32 weights and cast them, the embedding is bf16, all under autocast too;
               flash attention
    both       eight micro-batches summed in fp32; a fused Adam for each kind of parameter; Muon, matrix by matrix,
               five Newton-Schulz steps in bf16, updates collected in one bf16 buffer and applied from there

One thing differs: rotary positions rotate in our direction. The sources rotate in the other, which is the same
function of weights with the halves of each head of q and k exchanged.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.config.model import ModelConfig
from halfstep.config.run import RunConfig

Batch = tuple[Tensor, Tensor]  # inputs and targets of a micro-batch


class Casting(nn.Linear):
    """A linear layer whose weight follows its input's dtype: golf's."""

    def forward(self, x: Tensor) -> Tensor:
        """Its output."""
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, model: ModelConfig, linear: type[nn.Linear]):
        super().__init__()
        self.heads, self.kv_heads, self.size = model.heads, model.num_kv_heads, model.size_of_head
        narrow = self.kv_heads * self.size
        self.q, self.o = (linear(model.width, model.width, bias=False) for _ in range(2))
        self.k, self.v = (linear(model.width, narrow, bias=False) for _ in range(2))
        self.value_mix = nn.Parameter(torch.empty(())) if model.value_residual else None
        self.q_gain = nn.Parameter(torch.empty(model.heads)) if model.q_gain else None

    def forward(self, x: Tensor, first: Tensor | None, turn: Batch) -> tuple[Tensor, Tensor]:
        """What it adds to the stream, and the first block's values."""
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size)
        k = self.k(x).view(batch, length, self.kv_heads, self.size)
        v = self.v(x).view(batch, length, self.kv_heads, self.size)
        first = v if first is None else first
        if self.value_mix is not None:
            v = (1 - self.value_mix) * v + self.value_mix * first
        q, k = (rotate(F.rms_norm(t, (self.size,)), *turn) for t in (q, k))
        if self.q_gain is not None:
            q = q * self.q_gain.to(q.dtype)[:, None]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o(y.transpose(1, 2).reshape(batch, length, width)), first


class MLP(nn.Module):
    """Squared ReLU between two matrices."""

    def __init__(self, model: ModelConfig, linear: type[nn.Linear]):
        super().__init__()
        self.up = linear(model.width, model.size_of_mlp, bias=False)
        self.down = linear(model.size_of_mlp, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What it adds to the stream."""
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """Attention and MLP, behind a mix of the residual stream and the embedding."""

    def __init__(self, model: ModelConfig, linear: type[nn.Linear]):
        super().__init__()
        self.attn, self.mlp = Attention(model, linear), MLP(model, linear)
        by_channel = model.embedding_shortcut == "channel"
        self.residual_mix = nn.Parameter(torch.empty((2, model.width) if by_channel else 2))
        self.attn_scale = nn.Parameter(torch.empty(model.width)) if model.branch_scale else None
        self.mlp_scale = nn.Parameter(torch.empty(model.width)) if model.branch_scale else None

    def forward(self, x: Tensor, x0: Tensor, first: Tensor | None, turn: Batch) -> tuple[Tensor, Tensor]:
        """The stream after it, and the first block's values."""
        mix = self.residual_mix if self.attn_scale is None else self.residual_mix.to(x.dtype)
        x = mix[0] * x + mix[1] * x0
        y, first = self.attn(rms_normalize(x), first, turn)
        x = x + scale_branch(y, self.attn_scale, x.dtype)
        return x + scale_branch(self.mlp(rms_normalize(x)), self.mlp_scale, x.dtype), first


class Speedrun(nn.Module):
    """Record 9: tokens and targets to the mean loss."""

    linear: type[nn.Linear] = nn.Linear
    table_dtype: torch.dtype | None = torch.bfloat16  # of the tables of rotary positions

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.config = model
        self.embed = nn.Embedding(model.vocabulary, model.width)
        self.blocks = nn.ModuleList(Block(model, self.linear) for _ in range(model.layers))
        self.lm_head = None if model.tied else self.linear(model.width, model.vocabulary, bias=False)
        rates = model.rope_base ** -(torch.arange(0, model.size_of_head, 2).float() / model.size_of_head)
        angles = torch.outer(torch.arange(model.context).float(), rates)[:, None]  # a head is the next axis
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x = rms_normalize(self.embed(tokens))
        turn = self.turn(tokens.shape[1], x.dtype)
        x0, first = x, None
        for block in self.blocks:
            x, first = block(x, x0, first, turn)
        return self.loss(rms_normalize(x), targets)

    def turn(self, length: int, dtype: torch.dtype) -> Batch:
        """The tables of rotary positions."""
        kept = self.table_dtype or dtype
        return self.cos[:length].to(kept), self.sin[:length].to(kept)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of capped logits, in fp32."""
        logits = F.linear(x, self.embed.weight) if self.lm_head is None else self.lm_head(x)
        cap = self.config.softcap
        logits = (cap * torch.tanh(logits / cap)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Golf(Speedrun):
    """Parameter-Golf's baseline, whose first blocks hand their outputs to the last ones."""

    linear = Casting
    table_dtype = None

    def __init__(self, model: ModelConfig):
        super().__init__(model)
        self.skip_weights = nn.Parameter(torch.empty(model.layers // 2, model.width))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x = rms_normalize(self.embed(tokens))
        turn = self.turn(tokens.shape[1], x.dtype)
        x0, kept = x, list[Tensor]()
        half = self.config.layers // 2
        for block in self.blocks[:half]:
            x, _ = block(x, x0, None, turn)
            kept.append(x)
        for block in self.blocks[half:]:
            if kept:
                # The weights are in the order of the blocks they come from.
                x = x + self.skip_weights[len(kept) - 1].to(x.dtype) * kept.pop()
            x, _ = block(x, x0, None, turn)
        return self.loss(rms_normalize(x), targets)


class Muon(torch.optim.Optimizer):
    """Muon as both sources write it, on one rank."""

    def __init__(self, parameters: Sequence[Tensor], lr: float):
        super().__init__(parameters, {"lr": lr, "momentum": 0.95})
        self.orthogonalize = newton_schulz

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            count = sum(p.numel() for p in group["params"])
            updates = torch.zeros(count, device=group["params"][0].device, dtype=torch.bfloat16)
            place = 0
            for p in group["params"]:
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p.grad))
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = self.orthogonalize(p.grad.add(buffer, alpha=group["momentum"]))
                update *= max(1, p.shape[0] / p.shape[1]) ** 0.5
                updates[place : place + p.numel()] = update.flatten()
                place += p.numel()
            if dist.is_initialized():
                dist.all_reduce(updates)
            place = 0
            for p in group["params"]:
                p.add_(updates[place : place + p.numel()].view_as(p).to(p.dtype), alpha=-group["lr"])
                place += p.numel()


def newton_schulz(gradient: Tensor) -> Tensor:
    """Orthogonalizes matrices by five Newton-Schulz steps in bf16."""
    tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.bfloat16()
    x = x / (x.norm() + 1e-7)
    x = x.T if tall else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


class Arm:
    """A source's model, optimizers and step."""

    def __init__(self, config: RunConfig, weights: dict[str, Any], device: torch.device):
        self.config, self.device = config, device
        self.golf = config.model.unet_skips
        self.model: nn.Module = Golf(config.model) if self.golf else Speedrun(config.model)
        self.model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        self.model.to(device)
        if self.golf:
            self.model.embed.to(torch.bfloat16)
        self.optimizers, self.muon = self._optimizers()
        self.wrapped = self._wrapped()

    def _optimizers(self) -> tuple[list[torch.optim.Optimizer], Muon]:
        given, named = self.config.optimizer, dict(self.model.named_parameters())
        kinds: dict[str, list[Tensor]] = {"embed": [], "head": [], "matrices": [], "scalars": []}
        for name, p in named.items():
            matrix = name.endswith(".weight") and p.ndim == 2
            first = name.partition(".")[0]
            kind = {"embed": "embed", "lm_head": "head"}.get(first, "matrices" if matrix else "scalars")
            kinds[kind].append(p)
        muon = Muon(kinds["matrices"], given.muon_rate)
        rates = {"embed": given.embedding_rate, "head": given.head_rate, "scalars": given.scalar_rate}
        adam = [
            torch.optim.Adam(kinds[kind], lr=rate, betas=given.betas, eps=given.epsilon, fused=True)
            for kind, rate in rates.items()
            if kinds[kind]
        ]
        for optimizer in (muon, *adam):
            for group in optimizer.param_groups:
                group["base"] = group["lr"]
        return [*adam, muon], muon

    def _wrapped(self) -> nn.Module:
        model = self.model
        if self.device.type == "cuda":  # the kernel each source asks for
            torch.backends.cuda.enable_cudnn_sdp(not self.golf)
            torch.backends.cuda.enable_flash_sdp(self.golf)
            torch.backends.cuda.enable_mem_efficient_sdp(False)
            torch.backends.cuda.enable_math_sdp(False)
        if self.config.training.compile:
            if not self.golf:
                torch._inductor.config.coordinate_descent_tuning = True
            model = torch.compile(model, dynamic=False if self.golf else None)  # type: ignore[assignment]
            self.muon.orthogonalize = torch.compile(newton_schulz)
        if self.golf:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            return model
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return DistributedDataParallel(model, device_ids=[0] if self.device.type == "cuda" else None)

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a micro-batch, to train on."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            return self.wrapped(*batch)

    def step(self, done: int, micro_batches: Sequence[Batch], factor: float) -> Tensor:
        """The update after `done` of them; the mean loss, on the device."""
        total, count = torch.zeros((), device=self.device), len(micro_batches)
        for index, batch in enumerate(micro_batches):
            alone = isinstance(self.wrapped, DistributedDataParallel) and index < count - 1
            with self.wrapped.no_sync() if alone else nullcontext():
                loss = self.loss(batch)
                (loss / count if self.golf else loss).backward()
            total += loss.detach() / count
        if not self.golf:
            for p in self.model.parameters():
                p.grad /= count
        given = self.config.optimizer
        share = min(done / max(1, given.muon_momentum_warmup), 1)
        momentum = (1 - share) * given.muon_momentum_start + share * given.muon_momentum
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base"] * factor
                if optimizer is self.muon:
                    group["momentum"] = momentum
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return total

    def evaluate(self, batch: Batch) -> Tensor:
        """The mean loss of a batch; with the graph that is compiled already, so gradients are made and dropped."""
        return self.loss(batch).detach()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions: the halves of each head turn by the angle of their position."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def rms_normalize(x: Tensor) -> Tensor:
    """Divides by the root of the mean square."""
    return F.rms_norm(x, (x.shape[-1],))


def scale_branch(y: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiplies what a branch adds by its factor per channel, if it has one."""
    return y if scale is None else scale.to(dtype) * y
