"""Why each rule of a tuned policy is there, in a line; and the file that holds them."""

import math

from halfstep.core.policy import Policy
from halfstep.core.roles import print_value
from halfstep.tools.tune.rules import ModuleRule, describe_formats, to_toml
from halfstep.tools.tune.search import Option
from halfstep.tools.tune.tune import Evaluation, TuneResult


def policy_file(tuned: TuneResult) -> str:
    """Returns policy.toml: what was found, with a comment for each rule."""
    s, chosen = tuned.settings, tuned.chosen
    heading = [f"Found by `halfstep tune {s.target}`, from `{s.base}`."]
    if chosen is not None:
        heading.append(f"{describe_verdict(chosen)}; {describe_saving(tuned, chosen)}.")
    if tuned.unit == "bytes":
        heading.append(f"Costs are bytes, not seconds: {tuned.lacking}.")
    return to_toml(tuned.policy, tuned.wanted, lambda wanted: reason_for_rule(tuned, wanted), heading)


def reason_for_rule(tuned: TuneResult, wanted: ModuleRule) -> str:
    """Returns why a rule is there."""
    base = Policy.parse(tuned.settings.base)
    options = {name: tuned.found.assignment.get(name, Option()) for name in wanted.modules}
    if any(option.compute or option.grad for option in options.values()):
        shares = [option.damage for option in options.values()]
        costs = sum(option.cost for option in options.values())
        before = sum(tuned.rows[name][0].cost for name in options)
        took = f"{format_cost(costs, tuned.unit)} instead of {format_cost(before, tuned.unit)}"
        if len(options) == 1:
            return f"it alone loses {_range(shares)} of a step's descent, and takes {took}"
        return f"{len(options)} matmuls: each alone loses {_range(shares)} of a step's descent; they take {took}"
    kept: dict[str, list[str]] = {}
    for name in wanted.modules:
        kept.setdefault(_reason_for_base(tuned, base, name), []).append(name)
    return "; ".join(
        f"`{names[0]}` {reason}" if len(names) == 1 else f"each of {len(names)} matmuls {reason}"
        for reason, names in kept.items()
    )


def _reason_for_base(tuned: TuneResult, base: Policy, name: str) -> str:
    """Returns why a module stays as in the base."""
    cheaper = [option for option in tuned.rows[name] if option.cost < tuned.rows[name][0].cost]
    if not cheaper:
        fast = min(tuned.rows[name][1:], key=lambda option: option.cost)
        took = (
            f"{format_cost(fast.cost, tuned.unit)} instead of {format_cost(tuned.rows[name][0].cost, tuned.unit)}"
        )
        return f"saves nothing here: {took} in {describe_formats(base, fast.compute, fast.grad)}"
    least = min(cheaper, key=lambda option: option.damage)
    text = (
        f"loses {percent(least.damage)} of a step's descent in {describe_formats(base, least.compute, least.grad)}"
    )
    failed = [each for each in tuned.evaluations if not each.met and name in each.modules]
    if not failed:
        return text
    return f"{text}; {describe_verdict(min(failed, key=lambda each: len(each.modules)))} with it"


def describe_verdict(evaluation: Evaluation) -> str:
    """Describes how a policy compares with the base."""
    known, seeds = evaluation.verdict, len(evaluation.gaps)
    if known.diverged:
        return f"{known.diverged} of {seeds} runs diverged (different)"
    low, high = known.interval90
    return f"held-out loss {known.mean:+.4f} ({low:+.4f} to {high:+.4f}, {seeds} seeds: {known.kind})"


def describe_saving(tuned: TuneResult, evaluation: Evaluation) -> str:
    """Describes what a policy saves."""
    ratio = evaluation.cost / tuned.base_cost if tuned.base_cost else 1.0
    return f"matmuls take {format_cost(evaluation.cost, tuned.unit)}, {ratio:.2f} of the base's"


def format_cost(cost: float, unit: str) -> str:
    """Returns a cost with its unit."""
    if unit == "s":
        return f"{cost * 1e3:.3g} ms"
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if cost >= size:
            return f"{cost / size:.3g} {name}"
    return f"{cost:.0f} bytes"


def percent(value: float) -> str:
    """Returns a share in percent, with the digits that matter."""
    return "all" if not math.isfinite(value) else f"{100 * value:.2g} %"


def _range(shares: list[float]) -> str:
    low, high = percent(min(shares)), percent(max(shares))
    return low if low == high else f"{low} to {high}"


def summary(tuned: TuneResult) -> str:
    """Describes the outcome in a line or two."""
    total = len(tuned.rows)
    if tuned.met:
        found = f"{len(tuned.found.assignment)} of {total} matmuls are narrow"
        rest = "" if tuned.found.finished else "; more may be possible: --policies lets it compare more of them"
        return found + rest
    best = tuned.best
    what = "the same held-out loss" if tuned.settings.budget == "same" else f"a gap of {tuned.settings.budget}"
    if best is None:
        return f"no format saves anything here: `{print_value(Policy.parse(tuned.settings.base).compute)}` stays"
    found = f"{describe_verdict(best)}: {best.policy}"
    return f"no policy with a narrow matmul meets the budget, {what}; the best found: {found}"
