"""What the section on precision shows: the policy that ran, and the warnings from before the first step."""

from itertools import pairwise

from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.report.history import History
from halfstep.report.number_format import number


def read_policy(history: History) -> tuple[Policy | None, str]:
    """Returns the policy that ran last; if another version wrote what this one cannot read, None and the error."""
    try:
        return Policy.parse(history.policies[-1][1]), ""
    except HalfstepError as error:
        return None, str(error)


def describe_policies(history: History) -> str:
    """Says which precisions the run had one after another; empty if it had one."""
    (_, first), *later = history.policies
    parts = [f"`{first}` up to step {later[0][0]:,}"] if later else []
    for (_, policy), (until, _) in pairwise(later):
        parts.append(f"`{policy}` up to step {until:,}")
    return ", then ".join([*parts, f"`{later[-1][1]}`"]) if later else ""


def starting_warnings(history: History) -> dict[str, list[float]]:
    """Returns each message once, with the times at which it came."""
    times: dict[str, list[float]] = {}
    for event in history.warnings:
        times.setdefault(str(event.get("message")), []).append(number(event.get("time")))
    return times
