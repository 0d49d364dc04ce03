"""Policies that change during a run: `[[schedule]]` in a recipe.

    policy = "fp8-mixed"
    [[schedule]]
    from = 0.85               # after 85 % of the steps; a whole number is a number of steps
    policy = "bf16-mixed"

Masters and moments keep every bit when the policy changes, so a later policy must hold them in formats that hold
all that an earlier one has learned. That is checked when a run begins, not when the change is due. In a loop of
your own, on torch, `run.change_policy` follows the same rule.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.config.model import ModelConfig, module_names, owner, parameter_shapes
from halfstep.config.schema import wrong
from halfstep.core.errors import (
    HalfstepError,
    PolicyChangeError,
    PolicyError,
    SettingConflictError,
    SettingPolicyError,
)
from halfstep.core.formats import Format
from halfstep.core.policy import Policy, read


@dataclass(frozen=True)
class ScheduleEntry:
    """A policy that takes over during the run."""

    from_: int | float
    """How much of the run comes before: a whole number of steps, or a share of all steps, below 1."""
    policy: str
    """The policy from there on, as text."""

    def after(self, steps: int) -> int:
        """Returns the number of steps after which the policy takes over."""
        return self.from_ if isinstance(self.from_, int) else round(self.from_ * steps)


def check_entries(policy: str, entries: Sequence[ScheduleEntry], steps: int) -> None:
    """Refuses a schedule with an entry that cannot be reached, or that names no policy or the one before it."""
    last, before = 0, read(policy)
    for i, entry in enumerate(entries):
        where = f"schedule[{i}]"
        if not (entry.from_ >= 1 if isinstance(entry.from_, int) else 0 < entry.from_ < 1):
            allowed = "a share of the steps, above 0 and below 1, or a whole number of steps, at least 1"
            raise wrong(f"{where}.from", entry.from_, allowed, hint="before it, the run has `policy`")
        at = entry.after(steps)
        said = f"{where}.from = {entry.from_}" + ("" if entry.from_ == at else f", which is step {at},")
        if at >= steps:
            raise SettingConflictError(
                f"{said} leaves no step of {steps} for `{entry.policy}`",
                hint=f"`from` is a share below 1, or a whole number below training.steps ({steps})",
            )
        if at <= last:
            than = "the start of the run, which has `policy`" if last == 0 else f"step {last}, of the entry before"
            raise SettingConflictError(
                f"{said} does not come after {than}", hint="write entries in order, each later than the last"
            )
        try:
            now = read(entry.policy)
        except HalfstepError as error:
            raise SettingPolicyError(
                f'{where}.policy = "{entry.policy}": {error.message}', hint=error.hint
            ) from None
        if now.base == "auto":
            raise SettingPolicyError(
                f'{where}.policy = "{entry.policy}" would be measured, which is done before a run begins',
                hint="name the policy: `halfstep probe` measures what is fastest here",
            )
        if before.base != "auto" and now.build() == before.build():
            raise SettingConflictError(
                f'{where}.policy = "{entry.policy}" changes nothing: it is the policy before it',
                hint="leave the entry out, or name another policy",
            )
        last, before = at, now


def check_later(entries: Sequence[ScheduleEntry], check: Callable[[Policy], object]) -> None:
    """Calls `check`, which refuses policies that cannot run, for each policy that takes over later."""
    for i, entry in enumerate(entries):
        try:
            check(Policy.parse(entry.policy))
        except HalfstepError as error:
            raise SettingPolicyError(f"schedule[{i}].policy: {error.message}", hint=error.hint) from None


@dataclass(frozen=True)
class PolicySchedule:
    """The policies of a run, each with the number of steps after which it takes over; the first one's is 0."""

    phases: tuple[tuple[int, Policy], ...]

    @classmethod
    def of(cls, policy: Policy, entries: Sequence[ScheduleEntry], steps: int) -> "PolicySchedule":
        """Returns the schedule of a run that begins with `policy`."""
        later = ((entry.after(steps), Policy.parse(entry.policy)) for entry in entries)
        return cls(((0, policy), *later))

    @property
    def policies(self) -> list[Policy]:
        """The policies, in order."""
        return [policy for _, policy in self.phases]

    def of_step(self, step: int) -> Policy:
        """Returns the policy of a step, counted from 1; before the first, the first one's."""
        return next(policy for after, policy in reversed(self.phases) if after < max(1, step))

    def changes_after(self, step: int) -> bool:
        """Whether the step after this one has another policy."""
        return self.of_step(step) != self.of_step(step + 1)

    def record(self) -> list[dict[str, Any]]:
        """Returns the schedule as manifests and events record it: in steps, beginning with the first policy."""
        return [{"from": after, "policy": str(policy)} for after, policy in self.phases]

    def check(self, model: ModelConfig) -> None:
        """Refuses a policy that would round what the one before it has learned."""
        for (_, before), (after, now) in zip(self.phases, self.phases[1:], strict=False):
            try:
                check_change(before, now, rule_names(model), parameter_shapes(model), f", after step {after},")
            except PolicyError as error:
                raise SettingPolicyError(error.message, hint=error.hint) from None


def rule_names(model: ModelConfig) -> list[str]:
    """Returns what rules may match: modules, and parameters that the decoder itself holds."""
    return [*module_names(model), *(name for name in parameter_shapes(model) if "." not in name)]


def check_change(
    before: Policy, now: Policy, modules: Sequence[str], parameters: Iterable[str], when: str = ""
) -> None:
    """Refuses a policy that would round what was learned under another; rules may match `modules`."""
    parameters = list(parameters)
    was, will = (held(policy, modules, parameters) for policy in (before, now))
    if lossy := [key for key in was if not _fits(was[key], will[key])]:
        (parameter, role), more = lossy[0], len({name for name, _ in lossy}) - 1
        others = f", and so for {more} other parameters" if more else ""
        raise PolicyChangeError(
            f"the policy `{now}`{when} would round what `{before}` has learned: {role} of `{parameter}` is "
            f"{was[lossy[0]]} before and {will[lossy[0]]} after{others}",
            hint=f"keep them: `{now},param={before.param.format},moments={before.moments}`; or name a policy with "
            "fp32 masters, such as bf16-mixed, fp16-mixed or fp8-mixed",
        )


def held(policy: Policy, modules: Sequence[str], parameters: Iterable[str]) -> dict[tuple[str, str], Format]:
    """Returns the formats of masters and moments, by parameter and role; rules may match `modules`."""
    values: Mapping[str, Any] = policy.resolve(modules)
    formats: dict[tuple[str, str], Format] = {}
    for parameter in parameters:
        roles = values[owner(parameter)].values
        formats |= {(parameter, "param"): roles["param"].format, (parameter, "moments"): roles["moments"]}
    return formats


def _fits(narrow: Format, wide: Format) -> bool:
    """Whether one format holds every number of another."""
    return (
        narrow.mantissa_bits <= wide.mantissa_bits
        and narrow.max_exponent <= wide.max_exponent
        and narrow.smallest_subnormal >= wide.smallest_subnormal
    )
