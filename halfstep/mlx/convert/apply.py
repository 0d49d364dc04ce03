"""From policy to model: gives every module its precision, and says in which format every parameter is held.

`apply` checks that the device can run the policy before it changes anything, and refuses with the reason if it
cannot: nothing is substituted. Any `mlx.nn` model will do:

    halfstep's own layers              get their precision
    Linear, Embedding                  multiply and look up in their own precision; weight gradients are fp32
    RMSNorm, LayerNorm, Softmax, ...   are islands: fp32 inside, compute out
    MultiHeadAttention                 has fp32 scores and softmax; without a fused kernel, as on a CPU, mx.fast's
                                       attention rounds scores to the dtype of its inputs
    other modules that hold arrays     run unchanged, on arrays cast to compute around the call; their gradients
                                       are in compute before they are widened, and `Applied.changes` says so
    the model itself                   its floating inputs are cast to compute, its outputs to the loss format

A subclass of one of these counts as another module: it may have another meaning. What a model computes by
functions, such as `mx.softmax(scores)`, is reached if a role names it, and an fp32 array that meets activations
does not widen them (functions/). All else runs in the dtype of its inputs; activations that are fp32 nevertheless
are refused by the next module (layers.py). Frozen parameters, integers and booleans stay unchanged: they have no
masters.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from halfstep.core.errors import AlreadyPreparedError, PolicyReachError
from halfstep.core.formats import FP32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, base_precision, precisions
from halfstep.core.refusal import check_formats, check_implemented, check_named, check_reach
from halfstep.core.roles import Param, is_narrow, print_value
from halfstep.mlx.convert.functions import reach_functions
from halfstep.mlx.convert.modules import (
    ISLANDS,
    KINDS,
    Around,
    Borders,
    Code,
    Embedding,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    RMSNorm,
    Setting,
    Whole,
    mix_in,
    own_parameters,
)
from halfstep.mlx.convert.places import Place, arrays, public, trainable, walk
from halfstep.mlx.layers import Layer, Matmul, Streams
from halfstep.mlx.numerics.dtypes import is_floating, kind_of, pin_matmuls, supported
from halfstep.mlx.numerics.lowering import NATIVE, casts_of

# The attributes a module gets; none of these is an array, so none is a parameter.
_ATTRIBUTES = ("casts", "name", "streams", "halfstep", "halfstep_model", "halfstep_masters", "halfstep_watched")


@dataclass(frozen=True)
class Applied:
    """What was done to a model: the modules that changed, and how parameters and moments are held."""

    policy: Policy
    masters: dict[str, Param]
    moments: dict[str, Format]
    places: dict[str, Place]  # of the parameters that are trained, by name
    widened: tuple[str, ...]  # parameters that came narrower than they are held
    frozen: tuple[str, ...]  # floating arrays that are not trained
    changes: tuple[tuple[str, str, str], ...]  # name, class and form of each module that is covered
    originals: list[tuple[Module, type, dict[str, Any]]] = field(repr=False)

    def lines(self) -> Iterator[str]:
        """Describes what was done and why, one line per kind of module and per way a parameter is held."""
        yield f"{self.policy} on mlx, {mx.default_device()}"
        forms: dict[tuple[str, str], list[str]] = {}
        for name, kind, form in self.changes:
            forms.setdefault((kind, form), []).append(name or "the model")
        for (kind, form), names in forms.items():
            yield f"  {len(names)} {kind} ({names[0]}{', ...' if len(names) > 1 else ''}): {form}"
        held = Counter(map(print_value, self.masters.values()))
        yield f"  {len(self.masters)} parameters: " + ", ".join(f"{n} held in {how}" for how, n in held.items())
        if self.widened:
            yield f"  {len(self.widened)} of them came narrower and were widened: they have fp32 masters now"
        if self.frozen:
            yield f"  {len(self.frozen)} more ({self.frozen[0]}, ...) are not trained and stay unchanged"


def apply(
    model: Module, policy: Policy, names: Sequence[str] | None = None, *, cast_inputs: bool = True
) -> Applied:
    """Gives a model a policy. `names` are the modules that rules may match, by default all it has."""
    pin_matmuls(mx.default_device())
    by_name = check_policy(model, policy, names)
    places, modules = trainable(model), dict(walk(model))
    values = policy.resolve(_rule_names(modules, places, names))
    originals, changes = _convert(model, modules, policy, by_name)
    _set_formats(model, policy, by_name, cast_inputs)
    masters: dict[str, Any] = {name: values[place.owner].values["param"] for name, place in places.items()}
    moments: dict[str, Any] = {name: values[place.owner].values["moments"] for name, place in places.items()}
    widened = tuple(n for n, p in places.items() if p.array.dtype != mx.float32 and masters[n].format == FP32)
    for name, place in places.items():
        if place.array.ndim < 2:  # gains, biases and scalars are never split
            masters[name] = replace(masters[name], split=False)
    others = {name: place.array for name, place in arrays(model).items() if public(name) and name not in places}
    frozen = tuple(name for name, array in others.items() if is_floating(array))
    return Applied(policy, masters, moments, places, widened, frozen, changes, originals)


def check_policy(model: Module, policy: Policy, names: Sequence[str] | None = None) -> dict[str, Precision]:
    """Refuses a policy that a model, or the default device, cannot run; returns the precision of each module."""
    _check_unprepared(model)
    places, modules = trainable(model), dict(walk(model))
    names = _rule_names(modules, places, names)
    policy.resolve(names)  # refuses rules that match nothing
    check_implemented(policy, "mlx", lambda _: "`current` scales by this step's own amax")
    multiplying = [name for name, m in modules.items() if isinstance(m, Matmul) or _kind(m) is Linear]
    owners = [place.owner for place in places.values()]
    computing = [*(name for name, module in modules.items() if _kind(module) is not None), *owners]
    reach = {"operand": multiplying, "param": owners, "moments": owners, "compute": computing, "grad": computing}
    check_reach(policy, reach | {"grad_weight": computing})
    device = mx.default_device()
    for form in (policy.evaluation(), policy):
        by_name = precisions(form, names)
        wanted = [base_precision(form), *by_name.values()]
        check_formats(wanted, "MLX", kind_of(device), lambda fmt: supported(fmt, device), NATIVE)
    check_named({n: m.named for n, m in modules.items() if isinstance(m, Layer)}, by_name, base_precision(policy))
    return by_name


def set_precision(model: Module, policy: Policy, names: Sequence[str] | None = None) -> None:
    """Sets the formats of each module and leaves the parameters alone."""
    by_name = precisions(policy, _rule_names(dict(walk(model)), trainable(model), names))
    _set_formats(model, policy, by_name, isinstance(model, Whole) and model.halfstep_model.cast_inputs)


def restore(converted: Applied) -> None:
    """Restores every module's own class and attributes. Parameters are not touched."""
    for module, original, attributes in reversed(converted.originals):
        module.__class__ = original
        for name in _ATTRIBUTES:
            module.__dict__.pop(name, None)
        module.__dict__.update(attributes)


def _rule_names(modules: dict[str, Module], places: dict[str, Place], names: Sequence[str] | None) -> list[str]:
    """Returns what rules may match: modules, those of `names` if given, and parameters of the model itself."""
    loose = [name for name, place in places.items() if place.owner == name]
    return [*(filter(None, modules) if names is None else names), *loose]


def _check_unprepared(model: Module) -> None:
    for name, module in walk(model):
        if isinstance(module, (Around, Code, Whole, *KINDS.values())):
            raise AlreadyPreparedError(
                f"the model has a policy already: `{name or type(module).__name__}` casts",
                hint="run.unprepare() restores the model",
            )


def _convert(
    model: Module, modules: dict[str, Module], policy: Policy, by_name: dict[str, Precision]
) -> tuple[list[tuple[Module, type, dict[str, Any]]], tuple[tuple[str, str, str], ...]]:
    """Gives each module the class that casts; returns the originals and how each module was changed."""
    base = base_precision(policy)
    plans = [(name, module, _kind(module), by_name[name] if name else base) for name, module in modules.items()]
    for name, _, kind, precision in plans:
        if kind is MultiHeadAttention and precision.softmax != FP32:
            raise PolicyReachError(
                f"softmax={precision.softmax} does not reach `{name}`: nn.MultiHeadAttention computes it in fp32",
                hint=f"add the rule `{name}: softmax=fp32`",
            )
    originals: list[tuple[Module, type, dict[str, Any]]] = []
    changes = []

    def convert(module: Module, kind: type) -> None:
        before = {key: module.__dict__[key] for key in _ATTRIBUTES if key in module.__dict__}
        originals.append((module, type(module), before))
        module.__class__ = kind if issubclass(kind, Layer) else mix_in(kind, type(module))

    reach_functions()
    for name, module, kind, precision in plans:
        written_by_mlx = type(module).__module__.startswith("mlx.") and not module.children()
        if kind is None and (module is model or written_by_mlx):
            continue
        if kind is not None:
            form = _form(ISLANDS.get(type(module), ""), kind, precision)
            changes.append((name, type(module).__name__, form))
        convert(module, kind or Code)
    if not isinstance(model, Layer) or type(model) in KINDS.values():
        convert(model, Whole)
    return originals, tuple(changes)


def _set_formats(model: Module, policy: Policy, by_name: dict[str, Precision], cast_inputs: bool) -> None:
    """Sets the formats of each module that was converted."""
    base = base_precision(policy)
    streams = Streams(casts_of(precision).compute for precision in (base, *by_name.values()))
    for name, module in walk(model):
        precision = by_name[name] if name else base
        if isinstance(module, Layer):
            module.precision, module.name, module.streams = precision, name, streams
        elif isinstance(module, Around | Code):
            module.halfstep = Setting(name or "the model", casts_of(precision), streams)
    if isinstance(model, Whole):
        outputs = casts_of(replace(base, compute=policy.loss))
        model.halfstep_model = Borders(casts_of(base), outputs, cast_inputs)


def _kind(module: Module) -> type | None:
    """Returns the class a module is to have, or `Around` to mix into its own; None leaves it unchanged."""
    if isinstance(module, Layer):
        return type(module)
    if type(module) in KINDS:
        return KINDS[type(module)]
    return Around if type(module) in ISLANDS or own_parameters(module) else None


def _form(role: str, kind: type, precision: Precision) -> str:
    fmt, emulated = precision.compute, " (emulated)" if precision.emulate else ""
    if issubclass(kind, Matmul):
        return f"multiplies in {precision.operand.format}{emulated}, weight gradients in {precision.grad_weight}"
    if kind is Embedding:
        return f"looks up its master and casts rows to {fmt}{emulated}, gradients in {precision.grad_weight}"
    if kind in (RMSNorm, LayerNorm) or role:
        return f"is an island: {getattr(precision, role or 'norm')} inside, {fmt} out{emulated}"
    if kind is MultiHeadAttention:
        return f"has {precision.softmax} scores and softmax, {fmt} out{emulated}"
    if kind is not Around:
        return f"computes in {fmt}{emulated}"
    inside = f"numbers of {fmt} in fp32" if precision.emulate else str(fmt)
    gradients = "" if fmt == FP32 else f", their gradients rounded to {fmt} before they are widened"
    missed = f"; {precision.operand.format} is for matmuls" if is_narrow(precision.operand.format) else ""
    return f"runs unchanged, as halfstep does not know it; its own arrays are cast to {inside}{gradients}{missed}"
