"""The state of a run under another policy, or on another backend: what was learned keeps every bit."""

from collections.abc import Mapping

from halfstep.config.model import ModelConfig, parameter_shapes
from halfstep.config.policy_schedule import held, rule_names
from halfstep.core.formats import Format
from halfstep.core.policy import Policy
from halfstep.core.state_format import OF_BACKEND, OF_POLICY, Stored, convert


def held_formats(policy: Policy, model: ModelConfig, state: Mapping[str, Stored]) -> dict[str, Format]:
    """Returns the formats that a policy gives the masters and moments of a state."""
    formats, shapes = dict[str, Format](), parameter_shapes(model)
    for (parameter, role), fmt in held(policy, rule_names(model), shapes).items():
        if role == "param":
            formats[f"model.{parameter}"] = fmt
            continue
        moments = [name for name in state if name.startswith("optimizer.") and f".{parameter}." in name]
        formats |= {name: fmt for name in moments if len(state[name].shape) == len(shapes[parameter])}
    return formats


def carry_over(
    given: Mapping[str, Stored],
    ours: Mapping[str, Stored],
    before: Policy,
    now: Policy,
    model: ModelConfig,
    *,
    crosses: bool = False,
) -> dict[str, Stored]:
    """Returns a state that the policy `before` left as a fresh run of the policy `now`, with `ours`, holds it.

    What belongs to the policy `now` alone starts anew, and so does what belongs to a backend, if the run `crosses`
    to another. A loss scale is kept if both policies scale alike, and so are amaxes of layers that both delay.
    """
    anew = tuple(each for each in OF_POLICY if each != "scale." or before.scale != now.scale)
    state = convert(given, ours, held_formats(now, model, ours), anew + (OF_BACKEND if crosses else ()))
    known = {} if crosses else {name: given[name] for name in state.keys() & given.keys()}
    return state | {name: value for name, value in known.items() if name.startswith("amax.")}
