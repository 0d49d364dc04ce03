"""When the layers of a run are looked at, and what is recorded of them.

    every step                    the device counts (config/session.py); nothing is read
    every `monitor.every`         the counts since the last record are copied with a step, and read with that step:
                                  a `layers` event, with what the step's update did to the weights, and
                                  what the audit's rules say of it, once (`Findings`): a `finding` event
    every `monitor.sample_every`  part of the batch runs again after the update: a `sample` event; also at the end
    every `monitor.shadow_every`  the step runs before it is made, in fp32 and with noise (core.compare.shadow): a
                                  `shadow` event, and a `finding` of what noise does not explain, once
    after an alarm                records and samples are denser for WHILE steps; the next REST steps raise no
                                  alarm: a run that skips updates again and again is slowed down for a tenth of the
                                  time at most

An alarm is a loss or gradients that are not finite, a loss that jumps, a loss scale that is low and falling, or a
shadow outside of its band.
All ranks decide alike, because they decide on the job's numbers. Counts are those of all ranks: the largest amax,
and sums of the others. Weights and updates are rank 0's, where all have the same; of weights that ranks share, the
norms and the share of lost updates are over all parts. Samples are of rank 0's data.

The rules are

    HS101   updates that a narrow weight without a master lost
    HS409   the input of a layer is beyond the range of its format; only the first such layer is named, because it
            feeds the others
    HS410   half of the gradients of a layer's output are below the range of their format. What was computed in
            fp16 is zero by then, so all are too small if even the largest has less than 4 bits, or if all are zero
            for STEPS steps while others are not (weights that begin at zero move sooner)

bf16 has the range of fp32: what is not finite there is no matter of the format, and has a `cause` event.

No update and no checkpoint depends on any of this. What is not recorded yet when a run stops is lost; a resumed
run begins to count anew.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.config.run import RunConfig
from halfstep.config.session import Session, Tokens, Unread
from halfstep.core.audit.engine import check_each, group, registry
from halfstep.core.audit.finding import Finding, rule_for
from halfstep.core.audit.record import Operation, Record, is_narrow
from halfstep.core.compare.shadow import Shadow
from halfstep.core.formats import FP32
from halfstep.core.observed import (
    AMAX,
    COLUMNS,
    COUNT,
    OVERFLOW,
    ROLES,
    UNDERFLOW,
    WEIGHT_COLUMNS,
    LayerInfo,
    merge,
)
from halfstep.core.policy import Policy
from halfstep.core.roles import is_narrow as is_scaled
from halfstep.core.scaling import Scale, ScaleAlarm
from halfstep.training.job import Job
from halfstep.training.run.health import Spikes
from halfstep.training.telemetry.events import Events
from halfstep.training.telemetry.meters import Meters

# After an alarm, in steps: how long it lasts, from record to record, from sample to sample; how long none counts.
WHILE, RECORDS, SAMPLES, REST = 50, 5, 10, 500
JUMP = 1.0  # nats above the median of recent losses, if training.rollback does not say


class Alarms:
    """Notices what deserves a closer look."""

    def __init__(self, law: Scale, rollback: float):
        self._scale, self._spikes = ScaleAlarm(law), Spikes(rollback or JUMP)

    def observe(self, numbers: Mapping[str, float]) -> str:
        """Takes the numbers of a step; returns what is wrong with it, if anything."""
        low = self._scale.observe(numbers["scale"], falling=bool(numbers["skipped"]))
        jumped = self._spikes.observe(numbers["loss"])
        if not math.isfinite(numbers["loss"]):
            return "the loss was not finite"
        if low:
            return "the loss scale is low and falling"
        if numbers["skipped"]:
            return "gradients were not finite"
        return "the loss jumped" if jumped else ""


@dataclass(frozen=True)
class _Record:
    """Numbers of the steps after `since`, up to `step`, that were not read yet."""

    step: int
    since: int
    layers: Unread
    weights: Unread


class Monitor:
    """Watches the layers of one session of a run; does nothing if the run is not to be watched."""

    def __init__(
        self,
        config: RunConfig,
        session: Session,
        meters: Meters,
        job: Job,
        events: Events,
        note: Callable[[str], None],
        *,
        changes_after: Callable[[int], bool] = lambda step: False,
    ):
        """`changes_after` says after which steps the policy changes."""
        self.settings, self._last = config.monitor, config.training.steps
        self._session: Session | None = session if config.monitor.on else None
        self._meters, self._job, self._events, self._note = meters, job, events, note
        self._changes_after, self._rollback = changes_after, config.training.rollback
        self._alarms = Alarms(session.policy.scale, self._rollback)
        self._why = ""  # the last alarm
        self._until = self._rest = -1  # the last step that is watched closely, and the last that raises no alarm
        self._next = 0  # the first step to sample while watching closely
        self._since = 0
        self._unread: deque[_Record] = deque()
        self._shadowed: set[Any] = set()  # what shadows have found

    def start(self, step: int) -> None:
        """Begins to watch, before the first step of a session."""
        self._since = step
        if self._session is None:
            return
        layers = self._session.watch(self.settings.slice)
        self._findings = Findings(layers, self._session.policy)
        written = [layer.to_dict() for layer in layers]
        every, slice = self.settings.every, self.settings.slice
        self._events.write("monitor", step=step, layers=written, every=every, slice=slice)

    @contextmanager
    def observe_step(self, step: int) -> Iterator[None]:
        """Launches, where a record is due, the copies of the numbers of the step that the block launches."""
        if self._session is None or not self._is_due(step):
            yield
            return
        weights = self._session.weight_numbers()
        yield
        self._unread.append(_Record(step, self._since, self._session.layer_numbers(), weights))
        self._since = step

    def _is_due(self, step: int) -> bool:
        every = min(RECORDS, self.settings.every) if step <= self._until else self.settings.every
        return step % every == 0 or step == self._last or self._changes_after(step)

    def read(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of a step that is done, and records what was launched with it."""
        if self._session is None:
            return
        if why := self._alarms.observe(numbers):
            self._alarm(why, step)
        while self._unread and self._unread[0].step <= step:
            self._record(self._unread.popleft())

    def _alarm(self, why: str, step: int) -> None:
        if step > self._rest:
            self._why, self._until, self._rest, self._next = why, step + WHILE, step + WHILE + REST, step

    def _record(self, record: _Record) -> None:
        layers, weights = self._merge_ranks(record.layers.read(), record.weights.read())
        roles = {
            role: {column: _column(layers[:, at, i], column) for i, column in enumerate(COLUMNS)}
            for at, role in enumerate(ROLES)
        }
        known = [[None if math.isnan(x) else float(x) for x in column] for column in weights.T]
        weight = dict(zip(WEIGHT_COLUMNS, known, strict=True))
        self._events.write("layers", step=record.step, since=record.since, **roles, weight=weight)
        for finding in self._findings.new(layers, weights, record.step - record.since):
            self._events.write("finding", step=record.step, **finding.to_dict())
            self._note(f"step {record.step}: {finding.rule}: {finding.message}")

    def _merge_ranks(self, layers: NDArray[Any], weights: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        if self._job.ranks == 1:
            return layers, weights
        given = self._job.gather([layers.tolist(), weights.tolist()], "adding up the numbers of its layers")
        counts, parts = (np.array([each[i] for each in given], dtype=np.float64) for i in (0, 1))
        added = reduce(merge, counts)
        return added, _merge_parts(parts) if self._job.is_sharded else parts[0]

    def sample_due(self, step: int) -> str:
        """Returns why to sample after a step; nothing if not."""
        if self._session is None:
            return ""
        if self._next <= step <= self._until:
            return f"alarm: {self._why}"
        every = self.settings.sample_every
        return "schedule" if step == self._last or (every and step % every == 0) else ""

    def sample(self, step: int, micro_batches: Tokens, why: str) -> None:
        """Runs part of a step's tokens again and records what was seen."""
        assert self._session is not None
        self._job.set_activity(f"sampling its layers after step {step}", timed=False)
        self._next = step + SAMPLES
        with self._meters.part("monitor"):
            seen = self._session.sample(micro_batches)
            layers = {name: {role: each.to_dict() for role, each in roles.items()} for name, roles in seen.items()}
            self._events.write("sample", step=step, why=why, layers=layers)

    def shadow_due(self, step: int) -> bool:
        """Whether to compare a step with fp32 before it is made."""
        every = self.settings.shadow_every
        return self._session is not None and every > 0 and step % every == 0

    def shadow(self, step: int, micro_batches: Tokens) -> None:
        """Compares the step that these tokens will make with fp32, and records it."""
        session: Any = self._session  # of torch: other backends refuse the setting
        self._job.set_activity(f"comparing step {step} with fp32", timed=False)
        with self._meters.part("monitor"):
            result: Shadow = session.shadow(micro_batches)
            self._events.write("shadow", step=step, **result.to_event())
        if (finding := shadow_finding(result)) is None:
            return
        self._alarm("gradients differ from fp32 by more than noise", step)
        if finding.key not in self._shadowed:
            self._shadowed.add(finding.key)
            self._events.write("finding", step=step, **finding.to_dict())
            self._note(f"step {step}: shadow: {finding.message}")

    def change_policy(self, step: int) -> None:
        """Begins to watch the layers of another policy, whose formats differ."""
        self._unread.clear()
        self._shadowed.clear()
        if self._session is not None:
            self._alarms = Alarms(self._session.policy.scale, self._rollback)
        self.start(step)

    def roll_back(self, step: int) -> None:
        """Forgets what steps have counted that a rollback gave up."""
        self._since = step
        self._unread.clear()
        if self._session is not None:
            self._session.layer_numbers()


def _column(values: NDArray[Any], name: str) -> list[float]:
    return [float(x) if name == "amax" else int(x) for x in values]


def _merge_parts(parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Merges the weight numbers of ranks, each with its own part of the weights."""
    known = ~np.isnan(parts)
    norms = np.sqrt((np.where(known, parts, 0.0)[..., :-1] ** 2).sum(0))
    lost = np.where(known, parts, 0.0)[..., -1].sum(0) / np.maximum(1, known[..., -1].sum(0))
    merged = np.concatenate([norms, lost[:, None]], axis=1)
    return np.where(known.any(0), merged, math.nan)


PAGE = "docs/monitor.md#shadows"
LOST = 0.01  # a share of lost updates that is no accident
STEPS = 20
GRADIENT = ROLES.index("gradient")
_LOST = WEIGHT_COLUMNS.index("lost")


class Findings:
    """What was found in a session so far."""

    def __init__(self, layers: Sequence[LayerInfo], policy: Policy):
        self._layers = layers
        self._rounds_at_random = "stochastic" in str(policy)  # then no update is lost on average
        self._known: set[tuple[str, str]] = set()

    def new(self, counts: NDArray[Any], weights: NDArray[Any], steps: int) -> list[Finding]:
        """Returns the mistakes in the numbers of `steps` steps, by the layers that were not named before."""
        found = [*check_each(self._record(counts, steps), select=["HS409", "HS410"]), *self._lost_updates(weights)]
        fresh = [each for each in found if (each.rule, each.where[0]) not in self._known]
        self._known |= {(each.rule, each.where[0]) for each in fresh}
        return group(fresh)

    def _record(self, counts: NDArray[Any], steps: int) -> Record:
        smallest = 0.0 if steps >= STEPS and counts[:, GRADIENT, AMAX].any() else np.finfo(np.float32).tiny
        forward: list[Operation] = []
        backward: list[Operation] = []
        for layer, (entered, gradient) in zip(self._layers, counts, strict=True):
            if _is_short(layer, "activation") and entered[OVERFLOW] and not forward:
                forward.append(_operation(layer, "activation", entered))
            if _is_short(layer, "gradient"):
                operation = _operation(layer, "gradient", gradient)
                format = layer.format("gradient")
                if not is_scaled(format) and smallest <= gradient[AMAX] < 16 * format.smallest_subnormal:
                    operation.underflow = operation.elements
                backward.append(operation)
        return Record("run", operations=forward + backward)

    def _lost_updates(self, weights: NDArray[Any]) -> Iterator[Finding]:
        rule = registry()["HS101"]
        for layer, row in zip(self._layers, weights, strict=True):
            stepped, lost = layer.formats["weight"], float(row[_LOST])
            if is_narrow(stepped) and not self._rounds_at_random and lost > LOST:
                yield rule.finding(
                    f"weights of `{layer.name}` are stepped in {stepped} without an fp32 master: {lost:.1%} of "
                    "their updates were lost",
                    layer.name,
                    evidence={"lost_share": lost},
                    policy_rule=rule_for(f"{layer.name}.weight", "param=fp32"),
                    cause=f"layers with weights in {stepped}",
                )


def _is_short(layer: LayerInfo, role: str) -> bool:
    """Whether numbers of a role have less range than fp32."""
    return layer.format(role).max_exponent < FP32.max_exponent


def _operation(layer: LayerInfo, role: str, row: NDArray[Any]) -> Operation:
    backward, format = role == "gradient", layer.formats[role]
    counts = {"overflow": int(row[OVERFLOW]), "underflow": int(row[UNDERFLOW]), "elements": int(row[COUNT])}
    about = {"backward": backward, "function": "" if backward else "cast of what enters"}
    return Operation(layer.name, "other", outputs=[format], amax=float(row[AMAX]), **counts, **about)  # type: ignore[arg-type]


def shadow_finding(shadow: Shadow) -> Finding | None:
    """Returns what a shadow found outside of its band; None if nothing."""
    if not (message := shadow.describe()):
        return None
    where = list(shadow.causes or shadow.outside)
    own = [name for name in shadow.causes if name in shadow.casts]
    rule = f'"{shadow.causes[0]}" = "compute=fp32"' if shadow.causes and shadow.causes[0] and not own else None
    fix = "give it a wider format, or find out what else it does to its numbers"
    if own:
        fix = "take the casts out of its code, or cast to a wider format: no rule of a policy reaches them"
    evidence = {"loss": shadow.loss, "loss in fp32": shadow.reference, "layers outside": len(shadow.outside)}
    return Finding("shadow", message, "warning", "certain", fix, PAGE, None, where, evidence, rule)
