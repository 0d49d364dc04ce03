"""Continuing a torch.amp job: a run takes over the state of torch's optimizers and of its GradScaler.

Weights need no conversion: under autocast the model holds its fp32 masters itself. The rest is in two state dicts.

    optimizer.state_dict()    moments and counts of parameters, by their place in the groups or by name, and
                              settings such as rates and decay
    scaler.state_dict()       the scale, and the number of finite steps since it last changed. From here on the
                              policy's law moves it: a scale that is not a power of two, or beyond floor or
                              ceiling, becomes the nearest one that is not above it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.core.errors import ScaleStateError, StateError
from halfstep.core.formats import FP32
from halfstep.core.scaling import DynamicScale, ScaleState
from halfstep.torch.numerics.dtypes import dtype_of
from halfstep.torch.numerics.shards import is_shard, shard_like, shard_rows
from halfstep.torch.optim.adamw import Optimizer
from halfstep.torch.optim.drivers import held_by, is_moment, label
from halfstep.torch.update.parts import RunParts

# Keys of a saved group that say how a step is made, not which.
_OWN = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
_LAW = {"growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "interval"}
_LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
State = Mapping[str, Any]


def take_over(run: RunParts, optimizers: State | Sequence[State | None], scaler: State | None) -> str:
    """Takes over saved states and describes them, or refuses them before anything is changed."""
    states = [optimizers] if isinstance(optimizers, Mapping) else list(optimizers)
    if len(states) != len(run.optimizers):
        raise StateError(
            f"{len(states)} optimizer states were given for {len(run.optimizers)} optimizers",
            hint="pass a list with one for each, None for an optimizer without a saved state",
        )
    saved = zip(run.optimizers, states, strict=True)
    pairs = [(o, s, _match_parameters(run, o, s)) for o, s in saved if s is not None]
    scale = _read_scale(run, scaler) if scaler else None
    lines = []
    for optimizer, state, matched in pairs:
        steps = _write_state(run, optimizer, state, matched)
        run.num_applied.fill_(max(steps, int(run.num_applied)))
        lines.append(f"{label(optimizer)}: {len(matched)} parameters after {steps} updates")
    if scale is not None and scaler is not None:
        run.scale_state = scale
        if run.scale_watch is not None:
            run.scale_watch.forget()
        good = int(scale.good_steps)
        known = {theirs: getattr(run.policy.scale, ours) for theirs, ours in _LAW.items() if theirs in scaler}
        odds = ", ".join(f"{name}={scaler[name]:g}" for name, ours in known.items() if scaler[name] != ours)
        note = f"; the scaler had {odds}, but the policy's law holds now" if odds else ""
        lines.append(f"loss scale {float(scale.scale):g} after {good} finite steps{note}")
    return "\n".join(lines)


def _match_parameters(
    run: RunParts, optimizer: torch.optim.Optimizer, saved: State
) -> dict[Tensor, dict[str, Any]]:
    if not {"state", "param_groups"} <= saved.keys():
        raise StateError(
            "this is not a state of a torch optimizer: it lacks `state` or `param_groups`",
            hint="pass optimizer.state_dict(); load what run.state_dict() returned by run.load_state_dict",
        )
    groups = saved["param_groups"]
    _check_rule(optimizer, groups)
    sizes = [[len(group["params"]) for group in side] for side in (groups, optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise StateError(
            f"the saved groups hold {sizes[0]} parameters, and those of {label(optimizer)} {sizes[1]}",
            hint="create the groups as they were when the state was saved",
        )
    params = list(held_by(optimizer))
    indices = [index for group in groups for index in group["params"]]
    labels = [name for group in groups for name in group.get("param_names", ())]
    by_name = {run.masters.names[p]: p for p in params}
    if by_name.keys() == set(labels):
        params = [by_name[name] for name in labels]
    matched = {p: dict(saved["state"].get(i, {})) for p, i in zip(params, indices, strict=True)}
    for p, state in matched.items():
        _check_entry(run, optimizer, p, state)
    return {p: state for p, state in matched.items() if state}


def _check_rule(optimizer: torch.optim.Optimizer, groups: Sequence[State]) -> None:
    for group in groups if isinstance(optimizer, Optimizer) else ():
        odd = "maximize" if group.get("maximize") else "amsgrad" if group.get("amsgrad") else ""
        if not odd and group.get("weight_decay") and group.get("decoupled_weight_decay") is False:
            odd = f"weight_decay={group['weight_decay']:g} of Adam, added to the gradient"
        if odd:
            raise StateError(
                f"the saved state is from {odd}, which {label(optimizer)} does not have",
                hint="keep torch's own optimizer: prepare takes it",
            )


def _check_entry(
    run: RunParts, optimizer: torch.optim.Optimizer, parameter: Tensor, state: dict[str, Any]
) -> None:
    name = run.masters.names[parameter]
    if isinstance(optimizer, Optimizer) and state and state.keys() != {"step", *optimizer.slots}:
        odd = sorted(state.keys() ^ {"step", *optimizer.slots})[0]
        raise StateError(
            f"the saved state of `{name}` and that of {label(optimizer)} differ in `{odd}`",
            hint="it is from another optimizer, or amsgrad, which halfstep's AdamW does not have: keep torch's",
        )
    for key, value in state.items():
        if key in _LIKE_PARAMETERS and isinstance(value, Tensor) and value.shape != parameter.shape:
            raise StateError(
                f"`{key}` of `{name}` has the shape {tuple(value.shape)}, not {tuple(parameter.shape)}",
                hint="create the groups as they were when the state was saved, with parameters in the same order",
            )


@torch.no_grad()
def _write_state(
    run: RunParts, optimizer: torch.optim.Optimizer, saved: State, matched: dict[Tensor, dict[str, Any]]
) -> int:
    steps = 0
    for group, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({k: v for k, v in theirs.items() if k in group and k not in _OWN})
    for p, state in matched.items():
        group = next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))
        on_device = isinstance(optimizer, Optimizer) or group.get("fused") or group.get("capturable")
        for key, value in state.items():
            if key == "step":
                steps = max(steps, int(value))
                state[key] = torch.tensor(float(value), device=p.device if on_device else "cpu")
            elif isinstance(value, Tensor):
                moments = dtype_of(run.conversion.moments.get(run.masters.names[p], FP32))
                dtype = moments if is_moment(p, value) else value.dtype
                state[key] = _spread_as(p, value).to(p.device, dtype, copy=True)
        optimizer.state[p] = state
    return steps


def _spread_as(parameter: Tensor, value: Tensor) -> Tensor:
    """Returns a piece of state as its parameter is held: of a sharded one, the rows of this rank."""
    if is_shard(parameter) and not is_shard(value) and value.shape == parameter.shape:
        return shard_like(parameter, value[slice(*shard_rows(parameter)[:2])])
    return value


def _read_scale(run: RunParts, scaler: State) -> ScaleState:
    law = run.policy.scale
    if not isinstance(law, DynamicScale):
        raise ScaleStateError(
            f"the state of a GradScaler was given, but the policy says scale={law.word}",
            hint="omit it; only fp16 needs a scale, and `fp16-mixed` has one",
        )
    if not isinstance(scaler, Mapping) or "scale" not in scaler:
        raise StateError("this is not a state of a GradScaler: it has no `scale`", hint="pass scaler.state_dict()")
    scale = float(scaler["scale"])
    if not (math.isfinite(scale) and scale > 0):
        raise ScaleStateError(
            f"the GradScaler's scale is {scale:g}: it has no floor, and its training stood still",
            hint=f"omit it to start from the policy's own, {law.init_scale:g}",
        )
    power = min(max(2.0 ** math.floor(math.log2(scale)), law.floor), law.ceiling)
    good = min(int(scaler.get("_growth_tracker", 0)), law.interval - 1)
    return run.scalars(ScaleState(power, good, law.hysteresis, False))
