"""Which layers are narrow because they are faster so (`compute=e4m3:measured`): the verdict, and its words.

An fp8 matmul takes about half the time of a bf16 one, but its casts and transposed copies take time too. So each
layer that a rule names is timed, forward and backward, by its size, in both precisions, and the whole layer stays
wide if it is not faster by WORTH. The sizes in which a model works most are timed first; what is not timed within
BUDGET seconds, or does not fit into memory, stays wide too. Emulated layers are not timed. What an earlier run has
timed on this machine is not timed again (core/cache.py).

A backend says which layers there are and times one of them; the rest is here.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from halfstep.core.arrays.ladder import Clock
from halfstep.core.precision import Precision
from halfstep.core.roles import is_narrow

_TIMED, AS_THERE = "measured: ", "as in the run that is resumed"
BUDGET = 90.0  # seconds that measuring may take; a size that was started is finished
WORTH = 1.02  # how many times faster a narrow layer must be: timings of the same work differ by about as much


class Work(Protocol):
    """A layer to time, as a dataclass of a backend describes it: equal ones are timed once."""

    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def amount(self) -> int: ...  # noqa: D102  # of numbers in its weight
    @property
    def compiled(self) -> bool: ...  # noqa: D102
    @property
    def place(self) -> str: ...  # noqa: D102  # its device, in words that hold in another process
    def __hash__(self) -> int: ...


W = TypeVar("W", bound=Work)

# (a layer, its two precisions: wide and narrow) -> seconds of a training pass in each
Timer = Callable[[W, Sequence[Precision]], list[float]]
Job = tuple[W, tuple[Precision, Precision]]  # what a timer takes
Ahead = Callable[[Sequence[Job[W]]], None]  # is told all that a timer will be asked for


class Earlier(list[float]):
    """Seconds that an earlier run has measured, from a file."""

    def __init__(self, seconds: Sequence[float], path: Path):
        super().__init__(seconds)
        self.path = path


@dataclass(frozen=True)
class Measured:
    """The layers whose rules say `measured`: by name, whether each is narrow, and why.

    Two that run the same layers narrow are equal, whatever was measured.
    """

    narrow: Mapping[str, bool] = field(default_factory=dict)  # what runs
    notes: Mapping[str, str] = field(default_factory=dict, compare=False)
    here: str = field(default="", compare=False)  # how it was measured here and the outcome, in a line
    # layers as a resumed run had them: their notes here
    adopted: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __hash__(self) -> int:
        return hash(frozenset(self.narrow.items()))

    @property
    def description(self) -> str:
        """Describes what runs and why, in a line; empty if no rule says `measured`."""
        if not self.adopted:
            return self.here
        count, total, others = sum(self.narrow.values()), len(self.narrow), len(self.adopted)
        runs = f"{count} of the {total} matmuls that rules name are narrow, adopted from the run that is resumed"
        return f"{runs}; timed here, {others} of them would differ: {self.here}"

    @property
    def outcome(self) -> str:
        """Says how many matmuls are narrow, and why the others are not; empty if all are, or none was measured."""
        wide = [self.notes.get(name, "") for name, narrow in self.narrow.items() if not narrow]
        if not wide:
            return ""
        count, total = len(self.narrow) - len(wide), len(self.narrow)
        (why, _), *_ = Counter(map(_short, wide)).most_common()
        return f"{count} of {total} matmuls in fp8: {why}"

    def adopt(self, narrow: Mapping[str, bool]) -> "Measured":
        """Returns the layers as a resumed run had them."""
        notes, adopted = dict(self.notes), dict(self.adopted)
        for name in self.changed_by(narrow):
            before = adopted.pop(name, None)  # it changed before, so now it is back to what was measured here
            if before is None:
                adopted[name] = notes[name]
            notes[name] = before or f"{AS_THERE}; here {notes[name]}"
        return replace(self, narrow={**self.narrow, **narrow}, notes=notes, adopted=adopted)

    def changed_by(self, narrow: Mapping[str, bool]) -> list[str]:
        """Returns the layers that would change."""
        return [name for name, value in narrow.items() if self.narrow[name] != value]

    def widen(self, ruled: Mapping[str, Precision]) -> dict[str, Precision]:
        """Returns the precisions that rules give, wide for the layers that stay wide."""
        return {name: p if self.narrow.get(name, True) else p.widened() for name, p in ruled.items()}


def _short(note: str) -> str:
    """Returns why a layer stays wide, in a few words."""
    if note.startswith(_TIMED):
        return f"{note.rpartition(' in ')[2].partition(',')[0]} is faster here"
    return AS_THERE if note.startswith(AS_THERE) else note.partition(",")[0]


def with_outcome(policy: object, outcome: object) -> str:
    """Returns the name of a policy, and what measuring made of it if that is less than the name says."""
    return f"{policy} ({outcome})" if outcome else str(policy)


NO_LAYERS = Measured()  # of a policy whose rules do not say `measured`


def not_measured(count: int | None = None) -> Measured:
    """Returns the layers of an emulated policy, all of them narrow; their number, where it is known."""
    matmuls = "matmuls" if count is None else f"{count} matmuls"
    return Measured(here=f"nothing, since it is emulated: all {matmuls} of the rules are narrow")


def resumed(narrow: Mapping[str, bool]) -> Measured:
    """Returns the layers as a resumed run had them, where nothing was timed."""
    count, total = sum(narrow.values()), len(narrow)
    here = f"{count} of the {total} matmuls that rules name are narrow, {AS_THERE}"
    return Measured(dict(narrow), dict.fromkeys(narrow, AS_THERE), here)


def measure_layers(
    works: Mapping[str, Sequence[tuple[W, Precision]]],
    timer: Timer[W],
    is_out_of_memory: Callable[[BaseException], bool],
    clock: Clock = time.perf_counter,
    ahead: Ahead[W] = lambda jobs: None,
) -> Measured:
    """Times layers, given by name what each multiplies and in which narrow precision, size by size."""
    amounts: Counter[tuple[W, Precision]] = Counter()
    for keys in works.values():
        for key in keys:
            amounts[key] += key[0].amount
    if not amounts:
        return NO_LAYERS
    start = clock()
    ahead([(work, (precision.widened(), precision)) for (work, precision), _ in amounts.most_common()])
    times: dict[tuple[W, Precision], list[float] | str] = {}
    for (work, precision), _ in amounts.most_common():
        late = clock() - start >= BUDGET
        times[work, precision] = (
            f"not timed within {BUDGET:g} s" if late else _time_layers(timer, work, precision, is_out_of_memory)
        )
    verdicts = {name: _verdict([times[key] for key in keys], keys[0][1]) for name, keys in works.items()}
    narrow = {name: faster for name, (faster, _) in verdicts.items()}
    earlier = [seconds for seconds in times.values() if isinstance(seconds, Earlier)]
    here = _outcome(narrow, list(amounts), clock() - start, earlier)
    return Measured(narrow, {name: note for name, (_, note) in verdicts.items()}, here)


def narrow_formats(precision: Precision) -> str:
    """Returns the formats of narrow operands, in words."""
    return " and ".join(dict.fromkeys(str(o.format) for o in precision.operands if is_narrow(o.format)))


def _time_layers(
    timer: Timer[W], work: W, precision: Precision, is_out_of_memory: Callable[[BaseException], bool]
) -> list[float] | str:
    try:
        return timer(work, (precision.widened(), precision))
    except (MemoryError, RuntimeError) as error:  # of a kernel, or of the compiler
        if is_out_of_memory(error):
            return f"not timed: {work.tokens} tokens take more memory than there is"
        return f"not timed: {(str(error).strip() or type(error).__name__).splitlines()[0]}"


def _verdict(times: Sequence[list[float] | str], precision: Precision) -> tuple[bool, str]:
    failures = [failure for failure in times if isinstance(failure, str)]
    if failures:
        return False, f"{failures[0]}, so it stays {precision.compute}"
    wide, narrow = (sum(seconds[side] for seconds in times if not isinstance(seconds, str)) for side in (0, 1))
    first = f"{narrow * 1e3:.3g} ms in {narrow_formats(precision)}"
    return narrow * WORTH <= wide, f"{_TIMED}{first}, {wide * 1e3:.3g} ms in {precision.compute}"


def _outcome(
    narrow: Mapping[str, bool], keys: Sequence[tuple[Any, Precision]], seconds: float, earlier: Sequence[Earlier]
) -> str:
    work, precision = keys[0]
    formats, wide = narrow_formats(precision), precision.compute
    count, total = sum(narrow.values()), len(narrow)
    form = "compiled" if work.compiled else "eager"
    taken = "" if len(earlier) == len(keys) else f" in {seconds:.1f} s of at most {BUDGET:g} s"
    how = f"{len(keys)} sizes timed {form}{taken}, at {work.tokens} tokens"
    if earlier:
        how += f", {'all' if not taken else len(earlier)} of them by an earlier run: {earlier[0].path}"
    if count == total:
        return f"all {total} matmuls that rules name are faster in {formats} than in {wide} ({how})"
    if count == 0:
        return f"none of the {total} matmuls that rules name is faster in {formats}, so all stay {wide} ({how})"
    some = f"{count} of the {total} matmuls that rules name are faster in {formats}"
    return f"{some}, the others stay {wide} ({how})"
