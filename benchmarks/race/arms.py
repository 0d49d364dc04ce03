"""The recipes of the race: how each is set up, and what one update is.

The base class is the fp32 case; each other recipe changes only what defines it. All share the model, its first
weights, the data, AdamW and its settings. All clip to the same norm and skip a step whose norm is not finite. The
stock recipes do so in the cheapest way torch has: the fused AdamW takes a device scalar `found_inf`, so none of
them waits for the device, as the usual `if torch.isfinite(norm)` would.

Peers are the real packages, set up as their documentation says, and imported when their arm starts.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpt2 import GPT2
from benchmarks.race.contract import BETAS, CLIP_NORM, DECAY, RATE, Setting
from benchmarks.race.workers import MissingError
from halfstep.core.formats import E4M3
from halfstep.torch.numerics.dtypes import supported

Batch = tuple[Tensor, Tensor]  # inputs and targets of a micro-batch
# The policies of halfstep's arms.
POLICIES = {
    "halfstep": "bf16-mixed,param=fp32:split",
    "halfstep-lean": "bf16-mixed,param=fp32:split",
    "halfstep-graph": "bf16-mixed,param=fp32:split",
    "halfstep-fp32-masters": "bf16-mixed",
    "halfstep-stock": "bf16-mixed,param=fp32:split",
    "halfstep-fp16": "fp16-mixed",
    "halfstep-fp8": "fp8-mixed,param=fp32:split",  # layer by layer, where that is faster
    "halfstep-fp8-all": "fp8-mixed,param=fp32:split,compute=e4m3",  # every matmul
}
ADAMW: dict[str, Any] = {"lr": RATE, "betas": BETAS, "weight_decay": DECAY}


class Stock:
    """fp32, as torch trains by default: the base of all recipes."""

    compiles = True
    counts_memory = True  # whether torch counts all that a step allocates

    def __init__(self, setting: Setting, device: torch.device, compile: bool):
        self.setting, self.device, self.compile = setting, device, compile and self.compiles
        torch.manual_seed(setting.seed)
        self.model = self.build().to(device)
        self.optimizer: Any = self.make_optimizer()
        self.set_up()

    def build(self) -> nn.Module:
        s = self.setting
        return GPT2(layers=s.layers, width=s.width, heads=s.heads, vocabulary=s.vocabulary, context=s.context)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)

    def set_up(self) -> None:
        """Sets `forward`, which is called to train."""
        self.forward = self.compiled(self.model)

    def compiled(self, model: nn.Module) -> Any:
        return torch.compile(model) if self.compile else model

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def step(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Trains one update and returns the mean loss, on the device."""
        total = torch.zeros((), device=self.device)
        for batch in micro_batches:
            loss = self.loss(batch) / len(micro_batches)
            self.backward(loss)
            total += loss.detach()
        self.update()
        return total

    def loss(self, batch: Batch) -> Tensor:
        with self.context():
            return self.forward(*batch)

    def backward(self, loss: Tensor) -> None:
        """Adds a micro-batch's gradients, in the way the recipe sums them."""
        loss.backward()

    def update(self) -> None:
        """Clips, and steps if the norm is finite."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.found_inf = _found_inf(norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Returns the mean loss of a batch; not compiled, since another graph takes time."""
        with self.context():
            return self.model(*batch)

    def summary(self) -> str:
        return ""


class TF32(Stock):
    """fp32 whose matmuls round their operands to TF32."""

    def set_up(self) -> None:
        """Sets a global switch, which is fine: each arm is a separate process."""
        if self.device.type != "cuda":
            raise MissingError(f"TF32 needs an NVIDIA GPU, and the device is {self.device.type}")
        torch.set_float32_matmul_precision("high")
        super().set_up()


class Autocast(Stock):
    """The usual recipe: torch.autocast in bf16 around the forward pass, fp32 weights, fused AdamW."""

    dtype = torch.bfloat16

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.dtype)


class AutocastEager(Autocast):
    """torch.autocast in bf16 without torch.compile."""

    compiles = False


class AutocastFp16(Autocast):
    """fp16 with dynamic loss scaling by torch's GradScaler."""

    dtype = torch.float16

    def set_up(self) -> None:
        super().set_up()
        self.scaler = torch.amp.GradScaler(self.device.type)  # its defaults are those of halfstep's preset

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


class Accelerate(Autocast):
    """Hugging Face Accelerate."""

    def set_up(self) -> None:
        accelerator = _package("accelerate").Accelerator
        self.accelerator = accelerator(
            mixed_precision="bf16",
            cpu=self.device.type == "cpu",
            gradient_accumulation_steps=self.setting.micro_batches,
            dynamo_backend="inductor" if self.compile else "no",
        )
        self.forward, self.wrapped = self.accelerator.prepare(self.model, self.optimizer)

    def step(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Lets Accelerate divide the loss and find the last micro-batch."""
        total = torch.zeros((), device=self.device)
        for batch in micro_batches:
            with self.accelerator.accumulate(self.forward):
                loss = self.forward(*batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
                    self.optimizer.found_inf = _found_inf(norm)
                self.wrapped.step()
                self.wrapped.zero_grad()
            total += loss.detach() / len(micro_batches)
        return total


class Fabric(Autocast):
    """Lightning Fabric."""

    def set_up(self) -> None:
        index = self.device.index or 0
        on_cpu = self.device.type == "cpu"
        self.fabric = _package("lightning.fabric", "lightning_fabric").Fabric(
            accelerator=self.device.type, devices=1 if on_cpu else [index], precision="bf16-mixed"
        )
        self.fabric.launch()
        self.forward, self.wrapped = self.fabric.setup(self.compiled(self.model), self.optimizer)

    def loss(self, batch: Batch) -> Tensor:
        return self.forward(*batch)

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def update(self) -> None:
        """Keeps Fabric's clipping from reading the norm, as it would to raise an error."""
        norm = self.fabric.clip_gradients(self.forward, self.wrapped, max_norm=CLIP_NORM, error_if_nonfinite=False)
        self.optimizer.found_inf = _found_inf(norm)
        self.wrapped.step()
        self.wrapped.zero_grad()


class HuggingFace(Autocast):
    """transformers' own GPT-2 with the same weights and the same loss."""

    def build(self) -> nn.Module:
        transformers, s = _package("transformers"), self.setting
        config = transformers.GPT2Config(
            vocab_size=s.vocabulary,
            n_positions=s.context,
            n_embd=s.width,
            n_layer=s.layers,
            n_head=s.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        model = transformers.GPT2LMHeadModel(config)
        turned = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")  # stored the other way there
        torch.manual_seed(s.seed)
        weights = {
            name if name.startswith("lm_head") else f"transformer.{name}": value.t()
            if name.endswith(turned)
            else value
            for name, value in super().build().state_dict().items()
        }
        model.load_state_dict(weights)
        return _WithLoss(model)


class _WithLoss(nn.Module):
    """A causal language model of transformers, called as the race's own."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=inputs).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TorchAO(Autocast):
    """torchao's float8 with its defaults: tensor-wise scales of each step. The head is tied, and left out."""

    def build(self) -> nn.Module:
        """Replaces the linear layers by torchao's."""
        float8, model = _package("torchao.float8"), super().build()
        _check_fp8(self.device)
        return float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name != "lm_head")


class Casted(Stock):
    """No autocast: fp32 weights that each layer casts to its input's dtype, and a bf16 residual stream."""

    def build(self) -> nn.Module:
        model = super().build()
        exchanged = {nn.Linear: _Linear, nn.Embedding: _Embedding, nn.LayerNorm: _LayerNorm}
        for module in model.modules():
            module.__class__ = exchanged.get(type(module), type(module))  # type: ignore[call-overload]
        return model


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class _Embedding(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight).bfloat16()


class _LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class PureBf16(Stock):
    """Weights, gradients and moments in bf16: what a bound on speed looks like, not a way to train."""

    def build(self) -> nn.Module:
        """Rounds the weights once; every update rounds them again."""
        return super().build().bfloat16()


class Halfstep(Stock):
    """`prepare` with halfstep's own AdamW; evaluated as the policy says, fp8 in bf16."""

    options: ClassVar[dict[str, Any]] = {}  # of `prepare`

    def make_optimizer(self) -> torch.optim.Optimizer:
        from halfstep.torch import AdamW

        return AdamW(self.model.parameters(), **ADAMW)

    def set_up(self) -> None:
        from halfstep.torch import prepare

        seed, tokens = self.setting.seed, self.setting.batch * self.setting.context
        given = {"clip_norm": CLIP_NORM, "seed": seed, "tokens": tokens, **self.options}
        self.run = prepare(self.model, self.optimizer, POLICIES[self.setting.arm], **given)
        self.forward = self.compiled(self.model)

    def step(self, micro_batches: Sequence[Batch]) -> Tensor:
        return self.run.step(lambda batch: self.forward(*batch), micro_batches).loss

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        with self.run.evaluation():
            return super().evaluate(batch)

    def summary(self) -> str:
        return self.run.summary()


class HalfstepLean(Halfstep):
    """`prepare` with memory="lean"."""

    options: ClassVar[dict[str, Any]] = {"memory": "lean"}


class HalfstepGraph(Halfstep):
    """One CUDA graph per update, whose memory torch does not count when it is launched."""

    counts_memory = False
    options: ClassVar[dict[str, Any]] = {"graph": True}

    def set_up(self) -> None:
        if self.device.type != "cuda":
            raise MissingError(f"CUDA graphs need an NVIDIA GPU, and the device is {self.device.type}")
        super().set_up()


class HalfstepStock(Halfstep):
    """With torch's own fused AdamW: masters are joined for the step and split after it."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return Stock.make_optimizer(self)


class HalfstepFp8(Halfstep):
    """`prepare` under fp8-mixed."""

    def set_up(self) -> None:
        _check_fp8(self.device)
        super().set_up()


MAKERS: dict[str, type[Stock]] = {
    "fp32": Stock,
    "tf32": TF32,
    "autocast-eager": AutocastEager,
    "autocast": Autocast,
    "autocast-fp16": AutocastFp16,
    "accelerate": Accelerate,
    "fabric": Fabric,
    "hf": HuggingFace,
    "torchao": TorchAO,
    "casted": Casted,
    "pure-bf16": PureBf16,
    "halfstep": Halfstep,
    "halfstep-lean": HalfstepLean,
    "halfstep-graph": HalfstepGraph,
    "halfstep-fp32-masters": Halfstep,
    "halfstep-stock": HalfstepStock,
    "halfstep-fp16": Halfstep,
    "halfstep-fp8": HalfstepFp8,
    "halfstep-fp8-all": HalfstepFp8,
}


def _found_inf(norm: Tensor) -> Tensor:
    """Returns 1 if the norm is not finite: the fused AdamW then changes nothing."""
    return 1 - torch.isfinite(norm).float()


def _check_fp8(device: torch.device) -> None:
    support = supported(E4M3, device)
    if not support:
        raise MissingError(support.reason)


def _package(*names: str) -> Any:
    """Imports a peer by the first of its names that is installed; Lightning has two."""
    for name in names:
        if find_spec(name.partition(".")[0]) is not None:
            return import_module(name)
    distribution = names[0].partition(".")[0]
    raise MissingError(f"{distribution} is not installed", hint=f"pip install {distribution}")
