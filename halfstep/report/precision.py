"""The section on precision: what was asked for, what ran and why, role by role, and what was warned of at first.

The reason of a choice is shown as it was recorded, word for word.
"""

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import Format
from halfstep.core.policy import Policy
from halfstep.core.roles import ROLES, Value, print_value
from halfstep.report.history import History, nested
from halfstep.report.markup import Html, join, tag, with_code
from halfstep.report.number_format import number, occasions, plural
from halfstep.report.tables import SHOWN, table


def read_policy(history: History) -> Policy | None:
    """The policy that ran, or None where this halfstep cannot read what another one wrote."""
    try:
        return Policy.parse(str(history.start.get("policy")))
    except HalfstepError:
        return None


def precision(history: History, policy: Policy | None) -> Html:
    """The whole section."""
    return tag(
        "section",
        tag("h2", "Precision", id="precision"),
        _chosen(history),
        _warnings(history),
        _roles(policy) if policy is not None else _unreadable(history),
        _rules(policy) if policy is not None else None,
        aria_labelledby="precision",
    )


def _chosen(history: History) -> Html:
    ran, asked = str(history.start.get("policy")), str(nested(history.config, "policy"))
    reason = nested(history.choice, "reason")
    said = join("It ran in ", tag("code", ran))
    if reason is not None:
        preset = tag("code", str(nested(history.choice, "preset")))
        why = join(". Asked for was ", tag("code", asked), "; a measurement chose ", preset, ":")
        return join(tag("p", said, why), tag("blockquote", tag("p", str(reason))))
    if asked == ran:
        return tag("p", said, ", as it was asked for.")
    return tag("p", said, ". Asked for was ", tag("code", asked), ".")


def _warnings(history: History) -> Html:
    """Each message once, with how often it came and when first; at most SHOWN of them."""
    if not history.warnings:
        return tag("p", "It began without a warning.")
    times: dict[str, list[float]] = {}
    for event in history.warnings:
        times.setdefault(str(event.get("message")), []).append(number(event.get("time")))
    items = [tag("li", message, " ", tag("small", occasions(len(at), at[0]))) for message, at in times.items()]
    if len(items) > SHOWN:
        items[SHOWN:] = [tag("li", f"and {plural(len(items) - SHOWN, 'other message')}, in events.jsonl")]
    title = tag("h3", plural(len(history.warnings), "warning"))
    return tag("div", title, tag("ul", *items), class_="warnings")


def _roles(policy: Policy) -> Html:
    rows = [
        (tag("code", role), _value(value), with_code(ROLES[role].meaning))
        for role, value in policy.roles().items()
    ]
    return table("Formats, role by role", ("role", "format", "what it is"), rows, described=True)


def _rules(policy: Policy) -> Html | None:
    if not policy.rules:
        return tag("p", "No rules: the table holds for every module.")
    rows = [
        (tag("code", rule.glob), join(*[_change(role, v) for role, v in rule.changes], between=" "))
        for rule in policy.rules
    ]
    return table("Rules: other formats for some modules", ("modules", "changes"), rows)


def _change(role: str, value: Value) -> Html:
    return tag("span", tag("code", role), " ", _value(value), class_="change")


def _value(value: Value) -> Html:
    """A value, tinted by the bits of its format: a narrow one shows without reading the table."""
    fmt = value if isinstance(value, Format) else getattr(value, "format", None)
    bits = f"bits-{fmt.bits}" if isinstance(fmt, Format) and fmt.bits in (8, 16) else None
    return tag("code", print_value(value), class_=f"format {bits}" if bits else "format")


def _unreadable(history: History) -> Html:
    try:
        Policy.parse(str(history.start.get("policy")))
    except HalfstepError as error:
        return tag("p", f"The table of roles is missing, for this halfstep cannot read the policy: {error}")
    raise AssertionError("a policy that reads has a table")
