"""Preparing a model: check the arguments, resolve the policy, apply it, and make an engine of them.

And another policy in the middle of a run: what is refused, and what the run keeps beside masters, which are in the
model, and moments, which are in the optimizers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from halfstep.config.model import model_like, owner
from halfstep.config.policy_schedule import check_change
from halfstep.core.arrays.measure import TOKENS, decide_once, resolve_policy
from halfstep.core.averages import check_decay
from halfstep.core.choice import Choice
from halfstep.core.errors import ArgumentError, AutoPolicyError, GradientsError, ParallelError, PolicyChangeError
from halfstep.core.policy import Policy
from halfstep.core.refusal import check_numbers
from halfstep.core.roles import Value
from halfstep.torch import measure
from halfstep.torch.convert.apply import adopt, apply_resolved
from halfstep.torch.convert.plan import check_model, check_type
from halfstep.torch.convert.resolve import ModelPolicy, names_of, resolve
from halfstep.torch.numerics.dtypes import describe, expected_device
from halfstep.torch.optim.drivers import check_given
from halfstep.torch.parallel.ranks import exclude_from_ddp, in_group, num_ranks
from halfstep.torch.update.graph import check_graph, why_not_with
from halfstep.torch.update.parts import RunParts, device_of
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


def measured_choice(model: nn.Module, tokens: int) -> Choice:
    """Returns what `auto` means for a model: what is fastest on its device, by a block as wide as its layers."""
    if num_ranks() > 1:
        raise AutoPolicyError(
            "`auto` is measured in each process, and two of them could choose differently",
            hint="`halfstep probe` measures; name what it chooses",
        )
    if device_of(model).type == "meta":
        raise AutoPolicyError(
            "`auto` is measured on the model's device, and the model is on the meta device",
            hint="`halfstep probe` measures; name what it chooses",
        )
    return decide_once(measure, device_of(model), model_like(p.shape for p in model.parameters()), tokens)


def check_changed(run: RunParts, now: Policy) -> ModelPolicy:
    """Returns another policy, resolved for the model; refuses one that would round what a run has learned."""
    if run.sharded is not None:
        raise ParallelError(
            "the model is sharded, and FSDP has put a class of its own in front of the model's",
            hint="prepare and shard a second model under the new policy, and load run.state_dict()['tensors'] "
            "without `scale.*` into its run, with load_state of halfstep.torch.state",
        )
    if run.accumulation.begun:
        raise GradientsError(
            "gradients wait for their update, at the loss scale of the policy that computed them",
            hint="change the policy after run.update(), or drop the gradients with run.forget()",
        )
    check_change(run.policy, now, names_of(run.model, None), run.masters.held)
    resolved = resolve(run.model, now)
    check_given(run.optimizers, run.model, resolved)
    if in_group() and _exchange_values(run, run.policy) != _exchange_values(run, now):
        raise PolicyChangeError(
            f"`{now}` holds or reduces other things than `{run.policy}`, and which gradients DDP averages was "
            "settled when it wrapped the model",
            hint="give both policies the same `param`, `accumulate` and `reduce`: bf16-mixed and fp8-mixed do",
        )
    return resolved


def _exchange_values(run: RunParts, policy: Policy) -> list[Value]:
    """Returns what a policy says about the exchange of gradients between replicas."""
    values = policy.resolve(names_of(run.model, None))
    held = [values[owner(name)].values["param"] for name in run.masters.held]
    return [policy.accumulate, policy.reduce, *held]


@contextmanager
def carry_state(run: Any) -> Iterator[None]:
    """Gives the model of a `Run` back; inside, its run begins under another policy, and keeps averages and counts.

    It also keeps what the two policies have in common: the scale, amaxes of layers that both delay, and what was
    measured.
    """
    policy, scale_state, narrow = run.policy, run.scale_state, run.conversion.measured.narrow
    kept = run.num_applied, run.skipped, run.found_wrappers  # of DDP, to which both policies send the same
    named: list[dict[str, Tensor]] = [{} if t is None else t.named() for t in (run.averages, run.amaxes)]
    run.unprepare()
    try:
        yield
    finally:
        run.num_applied, run.skipped, run.found_wrappers = kept
        if run.policy.scale == policy.scale:
            run.scale_state = scale_state
        for now, before in zip((run.averages, run.amaxes), named, strict=True):
            for name, value in ({} if now is None else now.named()).items():
                if name in before:
                    value.copy_(before[name])
        if run.policy == policy and narrow:
            run.conversion = adopt(run.model, run.conversion, narrow)
