"""Jaxprs: the kinds of primitives, what can be said of an equation, and how to run one again.

Nothing here knows of policies or casts, so an audit can use it on a program that halfstep has never touched.

`bind` runs an equation as it stands, whatever functions it holds. `bind_wide` runs one with fp32 instead of every
narrower float, on masters and on emulated arrays: only primitives of the lists below, which mean the same in any
dtype.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params
from jax.extend.source_info_util import summarize

_Value = TypeVar("_Value")
_OURS = Path(__file__).parent

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
"""For the jit of a step: XLA then rounds wherever the program says so. By default it drops a conversion to bf16
that is undone soon after, and on a GPU stores fp32 activations (GPT-2 124M, H200: 64.5 ms per step, 62.8 with
it)."""

# --- primitives


def words(lines: str) -> frozenset[str]:
    """Returns the words of some lines."""
    return frozenset(lines.split())


LAYOUT = words(
    "transpose reshape broadcast_in_dim squeeze expand_dims slice dynamic_slice gather rev copy concatenate split "
    "pad stop_gradient sharding_constraint reshard scatter dynamic_update_slice tile stack",
)
"""Primitives that move values without changing them."""

ARITHMETIC = words(
    "add sub mul div neg abs sign max min integer_pow pow square sqrt rsqrt cbrt exp exp2 expm1 log log1p tanh "
    "logistic erf erfc erf_inv sin cos tan atan2 rem floor ceil round clamp select_n "
    "asin acos atan sinh cosh asinh acosh atanh scatter-add scatter-sub scatter-mul scatter-min scatter-max "
    "reduce_sum reduce_max reduce_min reduce_prod cumsum cumprod cummax cummin cumlogsumexp",
)
BROADCASTING = words("add sub mul div max min pow atan2 rem clamp select_n")
"""Arithmetic that stretches axes of size 1, and scalars."""

EXACT = words("add sub mul max min neg abs select_n")
"""Arithmetic that gives the same in a narrow format as in fp32 and then rounded."""

COMPARISON = words("eq ne lt le gt ge is_finite argmax argmin")
PRODUCT = words("dot_general conv_general_dilated")

ISLANDS = {"exp": "softmax", "exp2": "softmax", "rsqrt": "norm", "sqrt": "norm", "log": "loss"}
"""The role that a primitive indicates."""

PASSED = words("optimization_barrier device_put")
"""Primitives that return each array unchanged."""

NAMED = words("name")
"""checkpoint_name, which marks an activation."""

INLINED = words("jit pjit closed_call core_call")
REMAT = words("remat2 remat checkpoint")
CALLS = INLINED | REMAT | words("custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr remat_call")
"""Primitives that only call a function, perhaps with a derivative of its own."""

# --- what an equation is


def line_of(eqn: Any) -> str:
    """Returns the line of the user's code that an equation comes from."""
    return str(summarize(eqn.source_info))


def frames_of(eqn: Any) -> Sequence[Any]:
    """Returns the stack of calls that made an equation, innermost first."""
    traceback = eqn.source_info.traceback
    return traceback.frames if traceback is not None else ()


def is_ours(eqn: Any) -> bool:
    """Returns whether an equation is a layer of this package, which states its own casts and gradients."""
    inside = jaxprs_in_params(eqn.params)
    files = [str(inner.debug_info.func_filename or "") for inner in inside]
    return bool(files) and all(_OURS in Path(file).parents for file in files)


def equations_inside(eqn: Any) -> Iterator[Any]:
    """Yields every equation of the functions that an equation holds, at any depth."""
    for inner in jaxprs_in_params(eqn.params):
        for each in inner.eqns:
            yield each
            yield from equations_inside(each)


def multiplies(eqn: Any) -> bool:
    """Returns whether the functions inside an equation multiply."""
    return any(each.primitive.name in PRODUCT for each in equations_inside(eqn))


def is_float(atom: Any) -> bool:
    """Returns whether a variable or literal holds floats."""
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def is_floating(x: Any) -> bool:
    """Returns whether an array or a number is floating."""
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def fits_exactly(number: Any, dtype: Any) -> bool:
    """Returns whether a number is one of a dtype."""
    return np.ndim(number) == 0 and bool(np.float32(number) == np.asarray(number).astype(dtype).astype(np.float32))


def is_conversion(eqn: Any) -> bool:
    """Returns whether an equation converts floats to another floating dtype."""
    return eqn.primitive.name == "convert_element_type" and is_float(eqn.invars[0]) and is_float(eqn.outvars[0])


def is_widening(eqn: Any) -> bool:
    """Returns whether an equation converts floats to a wider floating dtype."""
    return is_conversion(eqn) and eqn.invars[0].aval.dtype.itemsize < eqn.outvars[0].aval.dtype.itemsize


def functions_of(eqn: Any) -> list[tuple[Any, Sequence[Any]]]:
    """Returns the functions whose results are those of an equation, each as a jaxpr and its constants.

    One, or the branches of a `cond`; it takes the last inputs of the equation.
    """
    found = [eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr") if key in eqn.params]
    closed = found[:1] or eqn.params.get("branches", ())
    return [(getattr(each, "jaxpr", each), getattr(each, "consts", ())) for each in closed]


def inputs_of(eqn: Any, jaxpr: Any, given: Sequence[_Value]) -> Sequence[_Value]:
    """Returns what a function of an equation takes of the equation's own inputs."""
    return given[len(given) - len(jaxpr.invars) :]


def parts_of_scan(eqn: Any) -> tuple[int, int]:
    """Returns how many constants and how many carried values a scan has; it runs along its other inputs.

    Ranks show it, as those lose an axis inside; the equation's own fields have other names in jax 0.10 and 0.11.
    """
    jaxpr = eqn.params["jaxpr"].jaxpr
    along = sum(out.aval.ndim != inside.aval.ndim for out, inside in zip(eqn.invars, jaxpr.invars, strict=True))
    pairs = zip(eqn.outvars, jaxpr.outvars, strict=True)
    carried = sum(out.aval.ndim == inside.aval.ndim for out, inside in pairs)
    return len(eqn.invars) - along - carried, carried


# --- running equations again


def walk(
    jaxpr: Any,
    env: dict[Any, _Value],
    literal: Callable[[Any], _Value],
    equation: Callable[[Any, list[_Value]], Iterable[_Value]],
) -> list[_Value]:
    """Evaluates a jaxpr with values of any kind, and returns its results.

    `env` has the values of its constants and inputs, by variable, and gets those of all others; `literal` makes
    one of a literal, and `equation` returns those of an equation's outputs, given its inputs.
    """

    def read(atom: Any) -> _Value:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(jaxpr: Any, eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates one equation as its own jaxpr: primitives differ in how they are called."""
    inputs = {atom: x for atom, x in zip(eqn.invars, arrays, strict=True) if not isinstance(atom, Literal)}
    alone = jaxpr.replace(constvars=(), invars=list(inputs), outvars=eqn.outvars, eqns=[eqn])
    return jax.core.eval_jaxpr(alone, (), *inputs.values())


def bind_wide(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates an equation with fp32 instead of every narrower float, in its arrays and its parameters."""
    wide = [jnp.asarray(x, jnp.float32) if is_floating(x) else x for x in arrays]
    kind, _, combined = eqn.primitive.name.partition("-")
    if kind == "scatter" and combined:
        # It holds the function that combines two numbers, in their dtype, so that is built again.
        kept = {k: eqn.params[k] for k in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
        return [getattr(lax, f"scatter_{combined}")(*wide, **kept)]
    narrow = {k: v for k, v in eqn.params.items() if isinstance(v, np.dtype) and jnp.issubdtype(v, jnp.floating)}
    return results(eqn, wide, **dict.fromkeys(narrow, jnp.dtype(jnp.float32)))


def results(eqn: Any, arrays: Sequence[Any], **changed: Any) -> list[Any]:
    """Binds an equation's primitive to arrays, with some of its parameters changed; returns a list in any case."""
    out = eqn.primitive.bind(*arrays, **{**eqn.params, **changed})
    return list(out) if eqn.primitive.multiple_results else [out]


def scan_with(
    eqn: Any, arrays: Sequence[Any], run: Callable[[list[Any], Any], tuple[list[Any], Any]], along: Any = None
) -> tuple[list[Any], Any]:
    """Runs a scan with another body, `run(inputs of a turn, its part of along) -> (results, more)`.

    Returns the results, and what there is more of each turn, stacked.
    """
    first, count = parts_of_scan(eqn)
    last, outvars = first + count, eqn.params["jaxpr"].jaxpr.outvars

    def as_declared(arrays: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
        return [jnp.asarray(x, atom.aval.dtype) for x, atom in zip(arrays, atoms, strict=True)]

    def body(carry: list[Any], parts: tuple[list[Any], Any]) -> tuple[list[Any], tuple[list[Any], Any]]:
        out, more = run([*arrays[:first], *carry, *parts[0]], parts[1])
        out = as_declared(out, outvars)
        return out[:count], (out[count:], more)

    carry = as_declared(arrays[first:last], eqn.invars[first:last])
    ends, (rows, more) = scan_again(eqn, body, carry, (list(arrays[last:]), along))
    return [*ends, *rows], more


def scan_again(eqn: Any, body: Callable[..., Any], carry: Any, along: Any) -> Any:
    """Runs another body in the loop of a scan: as many turns, in its direction."""
    return lax.scan(body, carry, along, **{name: eqn.params[name] for name in ("length", "reverse", "unroll")})


def remat_again(eqn: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is computed again in the backward pass as that of a remat is."""
    again: Callable[..., Any] = jax.checkpoint(
        fn, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
    )
    return again
