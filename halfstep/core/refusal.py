"""Refuses what a backend cannot run, by name, before anything changes, and says what runs instead."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from halfstep.core.choice import Support
from halfstep.core.devices import Device, caveat
from halfstep.core.errors import (
    ArgumentError,
    BatchError,
    FormatDtypeError,
    FormatError,
    HalfstepError,
    PolicyConflictError,
    UnmatchedRuleError,
    UnsupportedFormatError,
    UnsupportedRoleError,
    UnsupportedTransformError,
)
from halfstep.core.formats import FP32, TF32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, operand_formats
from halfstep.core.roles import Accumulator, Operand, Value, is_narrow, print_value

EMULATE = "add `emulate=true` to the policy: casts bit for bit, matmuls in fp32"

# What has first derivatives only, and the remedy.
NARROW_ONCE = (
    "a matmul with narrow operands",
    "leave the fp8 rule out where you need this: `bf16-mixed` has the same masters and activations",
)


def check_numbers(*, clip_norm: Any = 0.0, seed: Any = 0, tokens: Any = 1, slice: Any = 1, every: Any = 1) -> None:
    """Refuses values that are no settings of a run."""
    for name, value, kind, least, rule, hint in (
        ("clip_norm", clip_norm, Real, 0, "it must be a number, 0 or more", "0 clips nothing"),
        ("seed", seed, Integral, 0, "a seed is a whole number, not negative", "such as seed=0"),
        ("tokens", tokens, Integral, 1, "a micro-batch has at least 1", "batch times sequence length"),
        ("slice", slice, Integral, 1, "at least 1 element of a tensor is watched", "such as slice=4096"),
        ("every", every, Integral, 1, "it is a number of updates, at least 1", "such as every=100"),
    ):
        if not isinstance(value, kind) or not float(value) >= least:  # also if it is NaN
            raise ArgumentError(f"{name}={value!r}: {rule}", hint=hint)


def check_implemented(policy: Policy, backend: str, without_delayed: Callable[[Operand], str]) -> None:
    """Refuses values that the grammar has and JAX or MLX lacks, with what to write instead.

    `without_delayed` says that of a delayed operand; it is empty if the backend has this one.
    """

    def missing(role: str, value: Value) -> str:
        if role == "reduce" and value != FP32:
            return "`reduce=fp32`: gradients travel in fp32"
        if isinstance(value, Operand) and value.amax == "delayed":
            return without_delayed(value)
        return "matmuls sum in fp32" if isinstance(value, Accumulator) and value.fast else ""

    for changes in (policy.roles(), *(dict(rule.changes) for rule in policy.rules)):
        for role, value in changes.items():
            # Under emulation nothing is measured: what would be narrow if it is faster is always narrow.
            asked = replace(value, measured=False) if policy.emulate and isinstance(value, Operand) else value
            if instead := missing(role, asked):
                raise UnsupportedRoleError(
                    f"`{role}={print_value(value)}` is not implemented on {backend} yet", hint=instead
                )


def check_formats(
    wanted: Iterable[Precision],
    library: str,
    device: str,
    supported: Callable[[Format], Support],
    native: Sequence[Format],
) -> None:
    """Refuses formats that the device cannot run, or that the library lacks, unless they are emulated."""
    for precision in dict.fromkeys(wanted):
        if precision.emulate:
            continue
        for fmt in precision.formats:
            support = supported(fmt)
            if not support:
                raise UnsupportedRoleError(f"{fmt} cannot run on {device}: {support.reason}", hint=EMULATE)
            if fmt not in native:
                raise UnsupportedRoleError(
                    f"{fmt} matmuls are not implemented natively yet on {device}", hint=EMULATE
                )
        if precision.grad != precision.compute:
            raise UnsupportedRoleError(
                f"grad={precision.grad} with compute={precision.compute}: {library} keeps the gradient of an "
                "activation in the activation's own format",
                hint=f"write `grad={precision.compute}`, or {EMULATE}",
            )


def slow_formats(policy: Policy, device: Device) -> list[str]:
    """Returns a warning for each format of a policy that runs on a device without the help of its hardware."""
    formats = [] if policy.emulate else operand_formats(policy)
    return [f"{fmt} on {device.name}: {warning}" for fmt in formats if (warning := caveat(fmt, device))]


def named_format(fmt: Format, known: Iterable[Format]) -> Format:
    """Returns the format that a layer is built with, or refuses one that it cannot compute in by itself."""
    known = list(known)
    if fmt not in known:
        raise UnsupportedFormatError(
            f"compute={fmt}: a layer by itself computes in {', '.join(map(str, known))}",
            hint="narrow operands come with a policy: prepare(model, optimizer, 'fp8-mixed')",
        )
    return fmt


def check_named(named: Mapping[str, Format | None], ruled: Mapping[str, Precision], base: Precision) -> None:
    """Refuses a policy that gives a layer another format than the one that it was built with."""
    for name, fmt in named.items():
        operand = ruled.get(name, base).operand.format
        if fmt not in (None, operand):
            raise PolicyConflictError(
                f"`{name}` was built with compute={fmt}, and the policy says compute={operand} there",
                hint=f"add the rule `{name}: compute={fmt}`, or leave `compute` out where the layer is built",
            )


def twice_error() -> HalfstepError:
    """Returns the error for a second derivative of a matmul with narrow operands."""
    what, hint = NARROW_ONCE
    return UnsupportedTransformError(f"{what} cannot be differentiated twice, nor in forward mode", hint=hint)


def step_error(loss_fn: Any, micro_batches: Any, cast: str = "") -> HalfstepError:
    """Returns the error for a step whose arguments are not a function and several micro-batches.

    `cast` is what makes an array of the framework of one of numpy, if it must.
    """
    if not callable(loss_fn):
        what = f"loss_fn is one `{type(loss_fn).__name__}`, and is called with each micro-batch"
        return ArgumentError(what, hint="pass the function first: run.step(loss_fn, [batch])")
    return BatchError(
        f"micro_batches is one `{type(micro_batches).__name__}`: its rows or keys would be the batches",
        hint=f"put a single batch into a list: run.step(loss_fn, [{f'{cast}(batch)' if cast else 'batch'}])",
    )


def no_batches_error() -> HalfstepError:
    """Returns the error for a step of nothing."""
    return BatchError(
        "micro_batches is empty: there is nothing to make an update of",
        hint="pass one micro-batch at least, run.step(loss_fn, [batch]); an iterator that was read to its end is "
        "empty",
    )


def call_error(
    error: BaseException,
    loss_fn: Callable[..., Any],
    micro_batches: Any,
    array: type,
    given: Sequence[str] = ("a micro-batch",),
    call: str = "run.step(lambda batch: loss_fn(model, *batch), [batch])",
    cast: str = "torch.from_numpy(array).to(device)",
) -> HalfstepError | None:
    """Returns the error behind one of a first call of `loss_fn`, if the step was not called as it must be.

    `given` is what the function is called with, `call` a step of one that takes more, and `cast` what makes an
    array of numpy one of the framework.
    """
    if isinstance(error, HalfstepError) or not isinstance(error, Exception):
        return None
    if isinstance(error, AttributeError | TypeError) and "numpy.ndarray" in str(error):
        return BatchError(
            f"loss_fn was given an array of numpy, which the model does not take: {error}",
            hint=f"convert the arrays of a batch: {cast}",
        )
    try:
        signature = inspect.signature(getattr(loss_fn, "forward", loss_fn))  # a torch module's own takes anything
    except ValueError:  # of a builtin
        return None
    try:
        signature.bind(*given)
    except TypeError:
        return ArgumentError(
            f"loss_fn takes {signature}, and is called with {', '.join(given)}",
            hint=f"let it see all it needs, and take a batch apart itself: {call}",
        )
    batches = [*micro_batches] if isinstance(micro_batches, tuple | list) else []
    arrays: list[Any] = [each for each in batches if isinstance(each, array)]
    if len({(each.ndim, each.dtype) for each in arrays}) < 2:  # sequences of other lengths are several batches
        return None
    shapes = " and ".join(str(tuple(each.shape)) for each in arrays[:2])
    return BatchError(
        f"micro_batches holds arrays of the shapes {shapes}: each is taken for a micro-batch",
        hint="if (x, y) is one batch, put it into a list: run.step(loss_fn, [(x, y)])",
    )


def no_dtype(fmt: Format, framework: str, arrays: str, known: Iterable[Format]) -> FormatError:
    """Returns the error for a format that no dtype of the framework holds; `arrays` is what it calls tensors."""
    why = f"it is a way to multiply fp32 {arrays}"
    if fmt != TF32:
        why = f"{framework} has dtypes for {', '.join(map(str, known))}"
    return FormatDtypeError(
        f"{fmt} has no {framework} dtype: {why}",
        hint=f"keep the {arrays} in float32; cast.quantize rounds them to the format's numbers",
    )


def no_format(dtype: object, arrays: str, known: Iterable[object]) -> FormatError:
    """Returns the error for a dtype that is not a format of a policy."""
    return FormatDtypeError(
        f"{dtype} is not a format that a policy knows; those are {', '.join(map(str, known))}",
        hint=f"integer and boolean {arrays} are not cast; float64 is wider than any format here",
    )


def check_measurable(formats: Iterable[Format], where: str, supported: Callable[[Format], Support]) -> None:
    """Refuses to time formats that a device cannot run, before the clock starts: one may not get its turn."""
    for fmt in formats:
        support = supported(fmt)
        if not support:
            raise UnsupportedFormatError(
                f"{fmt} cannot be timed on {where}: {support.reason}",
                hint="leave it out; `halfstep probe` lists the formats a device runs",
            )


_INSIDE = "a rule reaches the modules it names, not those inside: add `.**`"
# role -> what a rule must name for it to change anything, and how; `operand` is a narrow operand of a matmul
_NEEDS = {
    "operand": ("matmul", "name the layers that multiply, such as `blocks.*.mlp.*` or `lm_head`"),
    "compute": ("module that computes by itself", _INSIDE),
    "grad": ("module that computes by itself", _INSIDE),
    "param": ("module that holds a parameter", "a tied head has the embedding's: name `embed`"),
    "moments": ("module that holds a parameter", "a tied head has the embedding's: name `embed`"),
    "grad_weight": ("module that holds a parameter", _INSIDE),
    "norm": ("norm", "such as `**.*_norm`"),
    "softmax": ("softmax", "name attention, such as `**.attn`"),
}


def check_reach(policy: Policy, reach: Mapping[str, Iterable[str]]) -> None:
    """Refuses a rule that changes nothing: `reach` has the names that each role reaches, where that is known."""
    known = {role: list(names) for role, names in reach.items()}
    for rule in policy.rules:
        for role, value in rule.changes:
            key = "operand" if isinstance(value, Operand) and is_narrow(value.format) else role
            if key in known and not any(rule.matches(name) for name in known[key]):
                what, hint = _NEEDS[key]
                changed = f"{role}={print_value(value)}"
                raise UnmatchedRuleError(
                    f"`{changed}` changes nothing in rule `{rule}`: it names no {what}", hint=hint
                )
