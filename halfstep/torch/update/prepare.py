"""Preparing a model: check the arguments, resolve the policy, apply it, and make an engine of them."""

from typing import Any, TypeVar

from torch import nn

from halfstep.core.arrays.measure import TOKENS, resolve_policy
from halfstep.core.averages import check_decay
from halfstep.core.errors import ArgumentError
from halfstep.core.policy import Policy
from halfstep.core.refusal import check_numbers
from halfstep.torch.convert.apply import apply_resolved
from halfstep.torch.convert.plan import check_model, check_type
from halfstep.torch.convert.resolve import resolve
from halfstep.torch.numerics.dtypes import describe, expected_device
from halfstep.torch.parallel.ranks import exclude_from_ddp, in_group
from halfstep.torch.update.checks import check_given, device_of, measured_choice
from halfstep.torch.update.graph import check_graph, why_not_with
from halfstep.torch.update.step import Engine
from halfstep.torch.update.switches import check_fp32

Kind = TypeVar("Kind", bound=Engine)


def prepare_as(
    kind: type[Kind],
    model: nn.Module,
    optimizer: Any,
    policy: Policy | str | None,
    *,
    clip_norm: float = 0.0,
    seed: int = 0,
    ema: float = 0.0,
    tokens: int = TOKENS,
    memory: str = "fast",
    graph: bool = False,
) -> Kind:
    """Does what `halfstep.torch.prepare` documents, and makes an engine, or the run above it."""
    check_numbers(clip_norm=clip_norm, seed=seed, tokens=tokens)
    if ema:
        check_decay(ema)
    given, named = optimizer, policy
    if named is None and isinstance(given, Policy | str):  # the policy may come second
        given, named = None, given
    if named is None:
        raise ArgumentError(
            "no policy was given",
            hint='prepare(model, optimizer, "bf16-mixed"), or prepare(model, "bf16-mixed") without an optimizer',
        )
    check_type(model)
    device = device_of(model)
    later = given is None and (in_group() or device.type == "meta")  # to be sharded, or filled, first
    check_model(model, empty=later)
    policy, choice, note = resolve_policy(
        named, lambda: measured_choice(model, tokens), describe(expected_device(device))
    )
    resolved = resolve(model, policy)
    optimizers = [] if given is None else check_given(given, model, resolved)
    check_fp32(resolved.wanted)
    if graph and given is not None:  # else at the first step
        check_graph(why_not_with(device, optimizers))
    for p in model.parameters():
        p.grad = None
    conversion = apply_resolved(model, resolved, tokens=tokens, split=not later, memory=memory)
    exclude_from_ddp(model, conversion.reduced_by_run())
    options: dict[str, Any] = {"conversion": conversion, "seed": seed, "ema": ema}
    options |= {"choice": choice, "note": note, "warns": True, "graph": graph}
    return kind(model, optimizers, policy, clip_norm, **options)
