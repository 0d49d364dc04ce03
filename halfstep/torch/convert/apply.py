"""Policy to model: gives every module its precision and every parameter its storage format.

`apply` checks that the device can run what is asked for before it changes anything, and refuses with the reason if
it cannot. Any `nn.Module` will do. A module changes its class (convert/modules.py); `restore` puts it back.

    halfstep's own layers                    get their precision
    Linear, MultiheadAttention, Embedding    multiply and look up in their own precision; weight gradients are fp32
    Conv*, RNN, LSTM, GRU                    the same, with weight gradients that leave the kernel in compute
    LayerNorm, BatchNorm, Softmax, ...       are islands: fp32 inside, compute out
    CrossEntropyLoss, MSELoss, ...           are islands: fp32 inside and out
    other modules that hold parameters       run as written, in fp32, and return compute (leaves)
    routers of mixtures                      fp32 inside and out; their experts multiply in compute
    the model itself                         returns the loss format; beside a loss, compute (narrow_logits.py)
    attention of transformers' models        has no mask where it is plainly causal (convert/hugging_face.py)

A user's subclass is treated like its base class, unless it has a forward of its own: then it is
a leaf. Functions of the model's own code, such as `F.softmax(x)`, are reached as well (functions/mode.py).

A parameter is held as the policy says (`hold`) and keeps its identity: its data are replaced. A matrix is split
only if every module that holds it can use its bf16 half. Frozen parameters, and those of other dtypes, stay as
they are.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.core.arrays.measure import TOKENS
from halfstep.core.choice.layers import NO_LAYERS, Measured, Timer
from halfstep.core.errors import ArgumentError
from halfstep.core.formats import FP32, Format
from halfstep.core.policy import Policy
from halfstep.core.roles import Param
from halfstep.torch import fusion
from halfstep.torch.convert import fp8_choice, hugging_face, plan
from halfstep.torch.convert.hugging_face import Attention
from halfstep.torch.convert.modules import Island, LayerNorm, Leaf, RMSNorm
from halfstep.torch.convert.plan import (
    Change,
    Originals,
    check_model,
    describe_change,
    plans_of,
    set_module_precision,
)
from halfstep.torch.convert.resolve import ModelPolicy, check_policy, check_supported, devices, resolve, trainable
from halfstep.torch.convert.subclass import put_in_front
from halfstep.torch.fp8.delayed import Amaxes
from halfstep.torch.layers import CastedLinear, Layer, Norm
from halfstep.torch.loss.plain import LEAN_CHUNKS
from halfstep.torch.measure import LayerWork, time_layer_once
from halfstep.torch.model import Decoder
from halfstep.torch.numerics.cast import carried, split
from halfstep.torch.numerics.compile_cache import allow_in_graph, keep_compiled
from halfstep.torch.numerics.dtypes import FLOATS, dtype_of
from halfstep.torch.numerics.matmul import linear_in_graph
from halfstep.torch.numerics.recompute import recompute_in_backward
from halfstep.torch.numerics.record import update_record
from halfstep.torch.numerics.split.holder import Holder
from halfstep.torch.numerics.split.parameter import make_split, make_whole

# `prepare(..., memory="lean")`: what the backward pass computes again, in a third-party model.
#
#   LayerNorm, RMSNorm                     of torch.nn, and modules of other packages that are norms by their names
#   gelu, silu, mish, square, pow          wherever the model's own code or a module of torch.nn calls them
#   x * y of two activations               the gate of a gated MLP
#   activations of transformers            those that are written in several operations, such as `gelu_new`
#
# Each keeps its inputs, which torch would keep as well, and its result is not kept where a linear layer or another
# of these reads it. Attention, dropout, relu, softmax, convolutions and others stay as they are.

MEMORY = ("fast", "lean")
_LIBRARY = "transformers.activations"
_CALLERS = (nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU, nn.Mish, nn.TransformerEncoderLayer)


class Recomputed(nn.Module):
    """A module in front of whose class this is computes its result again in the backward pass."""

    def forward(self, *given: Any, **options: Any) -> Any:
        """Returns the module's output."""
        forward = super().forward
        if len(given) != 1 or options or not isinstance(given[0], Tensor):
            return forward(*given, **options)
        if torch.compiler.is_compiling():  # which finds the parameters by itself
            return recompute_in_backward(_without_mode(forward), given[0])
        return recompute_in_backward(
            _with_parameters(self, _without_mode(forward)), given[0], *self._parameters.values()
        )


def _without_mode(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Hides what an activation or a small norm calls from the function mode, which would mark parts of it."""

    def call(x: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return forward(x)

    return call


def _with_parameters(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the forward as a function of the module's parameters too, so that a hook on one runs once."""

    def call(x: Tensor, *values: Any) -> Any:
        held = dict(module._parameters)
        try:
            module._parameters.update(zip(held, values, strict=True))
            return forward(x)
        finally:
            module._parameters.update(held)

    return call


def check_memory(memory: Any, model: nn.Module) -> None:
    """Refuses what is no way to use memory, and `lean` for a model in which it would change nothing."""
    if memory not in MEMORY:
        raise ArgumentError(f'memory is "{memory}"', hint='memory="fast" or memory="lean"')
    if memory == "lean" and not any(isinstance(m, _CALLERS) or not _is_of_torch(m) for m in model.modules()):
        kinds = sorted({type(m).__name__ for m in model.modules()})
        raise ArgumentError(
            f'memory="lean" would change nothing: among {", ".join(kinds)} there is no norm over features, and no '
            "activation function whose result is computed again",
            hint='leave it at memory="fast"; torch.utils.checkpoint runs whole parts of a model again',
        )


def save_memory(model: nn.Module, originals: Originals) -> tuple[str, ...]:
    """Makes the modules of a model lean that `plan.convert` made; returns those whose results are not kept."""
    if isinstance(model, Decoder):
        return model.save_memory()
    changed = []
    for name, module in model.named_modules():
        if isinstance(module, Norm | LayerNorm | RMSNorm):
            update_record(module, recomputed=True)
        elif isinstance(module, CastedLinear):
            update_record(module, recomputed=True)
            continue
        elif _is_norm(module) or type(module).__module__ == _LIBRARY:
            originals.append((module, type(module), {}))
            module.__class__ = cast(Any, put_in_front)(Recomputed, type(module))
        else:
            continue
        changed.append(name)
    return tuple(changed)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _is_norm(module: nn.Module) -> bool:
    """Whether a module that runs as written is a norm over features: by its name, with gains and biases alone."""
    held = [*module.parameters()]
    named = "Norm" in type(module).__name__ and not any(True for _ in module.buffers())
    return isinstance(module, Leaf) and named and bool(held) and all(p.dim() == 1 for p in held)


@dataclass(frozen=True)
class Applied:
    """What was done to a model: its modules, and how trained parameters and moments are held, by first name."""

    policy: Policy
    modules: int  # how many have a precision
    masters: dict[str, Param]
    moments: dict[str, Format]
    remainders: dict[str, Tensor]  # of split masters: what the bf16 leaves out; updated in place
    widened: tuple[str, ...]  # parameters and statistics that came narrower than they are held
    changes: tuple[Change, ...]
    originals: Originals = field(repr=False)
    attention: tuple[Attention, ...] = ()  # of models of transformers
    measured: Measured = NO_LAYERS
    amaxes: Amaxes | None = None  # if operands are delayed
    split_later: tuple[str, ...] = ()  # masters that are whole until optimizers come
    recomputed: tuple[str, ...] | None = None  # modules whose results are computed again, if memory is lean

    def reduced_by_run(self) -> list[str]:
        """Names the parameters whose gradients are summed beside them, where DDP does not see them."""
        wide = self.policy.accumulate == FP32
        held = [name for name, param in self.masters.items() if param.split or param.format != FP32 or not wide]
        return [*held, *self.split_later]


def allow_layers_in_graph() -> None:
    """Spares dynamo the code of linear layers, if it is loaded: it is once there are optimizers."""
    if "torch._dynamo" in sys.modules:  # to import it takes seconds
        allow_in_graph(linear_in_graph)
        fusion.install()


def apply(model: nn.Module, policy: Policy, names: Sequence[str] | None = None, **options: Any) -> Applied:
    """Gives a model a policy, whose rules may match `names`; `apply_resolved` has the options."""
    check_model(model, empty=not options.get("split", True))
    return apply_resolved(model, resolve(model, policy, names), **options)


def apply_resolved(
    model: nn.Module,
    resolved: ModelPolicy,
    *,
    tokens: int = TOKENS,
    compiled: bool = True,
    timer: Timer[LayerWork] = time_layer_once,
    split: bool = True,
    memory: str = "fast",
) -> Applied:
    """Gives a model that was checked a policy that was resolved for it.

    `timer` times the layers of rules with `measured`. Without `split`, masters that the policy splits stay whole
    until `split_now`: they may be sharded first. With the memory `lean`, cheap results are computed again in the
    backward pass (below).
    """
    check_memory(memory, model)
    keep_compiled()
    allow_layers_in_graph()
    policy, base, ruled = resolved.policy, resolved.base, resolved.ruled
    parameters, plans = trainable(model), plans_of(model)
    roles, masters, kept_whole = check_policy(model, resolved, plans)
    later = () if split else tuple(name for name, param in masters.items() if param.split)
    masters |= {name: replace(masters[name], split=False) for name in later}
    held: dict[Tensor, Param] = {parameters[name]: param for name, param in masters.items()}
    plan.check_held(plans, held)
    chunks = LEAN_CHUNKS if memory == "lean" else 1
    measured = fp8_choice.measure_all(plans, ruled, held, tokens, compiled=compiled, chunks=chunks, timer=timer)
    chosen = measured.widen(ruled)
    widened = [name for name, p in parameters.items() if p.dtype != torch.float32 and masters[name].format == FP32]
    widened += plan.widen_statistics(plans)
    remainders = _hold_all(model, parameters, masters, policy)
    amaxes = fp8_choice.add_histories(plans, ruled, next(iter(parameters.values())).device)
    attention = hugging_face.choose_attention(model)
    causal, saves = any(not row.why_not for row in attention), memory == "lean"
    code_saves = saves and not isinstance(model, Decoder)  # whose layers do, with no function between them
    originals = plan.convert(model, plans, chosen, base, causal=causal, lean=code_saves)
    recomputed = save_memory(model, originals) if saves else None
    fp8_choice.set_loss_casts(model, ruled, measured)
    notes = fp8_choice.explain_choices(measured, ruled)
    changes = [c for p in plans if (c := describe_change(p, chosen.get(p.name, base), notes.get(p.name, "")))]
    return Applied(
        policy=policy,
        modules=sum(isinstance(module, Layer | Island | Leaf) for module in model.modules()),
        masters=masters,
        moments={name: cast(Format, roles[name]["moments"]) for name in parameters},
        remainders=remainders,
        widened=tuple(widened),
        changes=(*changes, *kept_whole, *_left_alone(model)),
        originals=originals,
        attention=tuple(attention),
        measured=measured,
        amaxes=amaxes,
        split_later=later,
        recomputed=recomputed,
    )


def split_now(model: nn.Module, applied: Applied) -> Applied:
    """Splits masters that `apply` left whole."""
    parameters = {name: p for name, p in model.named_parameters() if name in applied.split_later}
    masters = {name: replace(applied.masters[name], split=True) for name in parameters}
    remainders = _hold_all(model, parameters, masters, applied.policy)
    return replace(applied, masters=applied.masters | masters, remainders=remainders, split_later=())


def hold(wide: Tensor, param: Param, policy: Policy) -> tuple[Tensor, Tensor | None]:
    """Returns an fp32 tensor as its master is held, rounded to nearest, and the remainder if it is split."""
    if param.split:
        return split(wide)
    if policy.emulate:
        return carried(wide, param.format), None
    return wide.to(dtype_of(param.format)), None


def set_precision(
    model: nn.Module, policy: Policy, names: Sequence[str] | None = None, measured: Measured = NO_LAYERS
) -> int:
    """Sets what modules compute in, those that `apply` measured as it did; returns how many modules that are."""
    resolved = resolve(model, policy, names)
    base, ruled = resolved.base, resolved.ruled
    chosen = measured.widen(ruled)
    for device in devices(model):
        check_supported([base, *chosen.values()], device)
    count = sum(
        [set_module_precision(module, chosen.get(name, base), base) for name, module in model.named_modules()]
    )
    fp8_choice.set_loss_casts(model, ruled, measured)
    return count


def adopt(model: nn.Module, applied: Applied, narrow: Mapping[str, bool]) -> Applied:
    """Takes over which of the measured layers are narrow, from a run that is resumed here."""
    changed = {name.removesuffix(fp8_choice.OF_LOSS) for name in applied.measured.changed_by(narrow)}
    measured, resolved = applied.measured.adopt(narrow), resolve(model, applied.policy)
    base, ruled = resolved.base, resolved.ruled
    chosen, notes = measured.widen(ruled), fp8_choice.explain_choices(measured, ruled)
    for name in changed:
        set_module_precision(model.get_submodule(name), chosen[name], base)
    fp8_choice.set_loss_casts(model, ruled, measured)
    plans = {p.name: p for p in plans_of(model) if p.name in changed}
    rows = {n: describe_change(p, chosen[n], notes[n]) for n, p in plans.items()}
    changes = tuple(rows.get(c.name) or c for c in applied.changes)
    return replace(applied, changes=changes, measured=measured)


def restore(applied: Applied) -> None:
    """Gives every module its own class and attributes back, without touching the numbers of parameters."""
    for module, _, _ in applied.originals:
        for name in module.remainders if isinstance(module, Holder) else ():
            make_whole(cast(nn.Parameter, module._parameters[name]))
    plan.restore_all(applied.originals)
    hugging_face.restore_attention(applied.attention)


@torch.no_grad()
def _hold_all(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Param], policy: Policy
) -> dict[str, Tensor]:
    """Holds each parameter as its master is; returns the remainders of those that are split."""
    remainders: dict[str, Tensor] = {}
    split_parameters: dict[Tensor, Tensor] = {}
    for name, parameter in parameters.items():
        held, remainder = hold(parameter.data.float(), masters[name], policy)
        parameter.data = held
        if remainder is not None:
            make_split(parameter, remainder, name)
            remainders[name] = split_parameters[parameter] = remainder
    for module in model.modules():
        for name, held_here in module._parameters.items():
            if held_here is not None and held_here in split_parameters:
                Holder.add_remainder(cast(Holder, module), name, split_parameters[held_here])
    return remainders


def _left_alone(model: nn.Module) -> list[Change]:
    form = "left alone: no policy has a format for"
    odd = [(name, p) for name, p in model.named_parameters() if p.dtype not in FLOATS]
    return [Change(name, "Parameter", f"{form} {str(p.dtype).removeprefix('torch.')}") for name, p in odd]
