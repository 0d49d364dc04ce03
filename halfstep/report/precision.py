"""What the section on precision shows: the policy that ran, and the warnings from before the first step."""

from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.report.history import History
from halfstep.report.number_format import number


def read_policy(history: History) -> tuple[Policy | None, str]:
    """Returns the policy that ran; if another version wrote what this one cannot read, None and the error."""
    try:
        return Policy.parse(str(history.start.get("policy"))), ""
    except HalfstepError as error:
        return None, str(error)


def starting_warnings(history: History) -> dict[str, list[float]]:
    """Returns each message once, with the times at which it came."""
    times: dict[str, list[float]] = {}
    for event in history.warnings:
        times.setdefault(str(event.get("message")), []).append(number(event.get("time")))
    return times
