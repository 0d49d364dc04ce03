"""The picture of a race: for each arm a bar for speed, one for peak memory, and the loss next to them.

One SVG that needs nothing: no script, no font, no other file. A thin line over the end of a bar spans from the
slowest round to the fastest.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, FileSystemLoader

from benchmarks.race.standings import ArmResult, BenchResult
from halfstep.report.number_format import count
from halfstep.report.template import environment

# The rows begin below the title, and the columns at these places.
TOP, ROW = 92, 34
SPEED_LENGTH, MEMORY_LENGTH = 250, 130  # of the longest bar


@dataclass(frozen=True)
class Row:
    """One arm, as the picture draws it: lengths in pixels, numbers as text."""

    name: str
    look: str
    y: int
    speed_length: float
    slowest: float
    fastest: float
    speed: str
    speed_ratio: float
    memory_length: float | None
    memory: str
    memory_ratio: float
    held_out: str

    def sentence(self, base: str) -> str:
        """Describes the row."""
        text = f"{self.name}: {self.speed} tokens per second, {self.speed_ratio:.3f} times {base}"
        text += f", {self.memory} at the peak" if self.memory else ""
        return text + (f", held-out loss {self.held_out}." if self.held_out else ".")


def svg(result: BenchResult) -> str:
    """Returns the picture."""
    base, rows = result.baseline, []
    if base is not None:
        rows = [_row(arm, place, result, base) for place, arm in enumerate(result.raced)]
    s = result.setting
    return _fill(
        "race.svg",
        title=_title(result),
        subtitle=(
            f"{f'{s.micro_batches} x ' if s.micro_batches > 1 else ''}{s.batch} x {s.context} tokens per step; "
            f"median of {result.rounds} rounds of {result.steps} steps each, arms interleaved"
        ),
        top=TOP,
        bottom=TOP + ROW * len(result.raced),
        base=base,
        rows=rows,
        base_length=next((row.speed_length for row in rows if base and row.name == base.name), 0.0),
        note=_note(result),
    )


def html(result: BenchResult) -> str:
    """Returns the picture as a page."""
    return _fill("race.html", title=_title(result), picture=svg(result))


def _fill(name: str, **values: Any) -> str:
    """Fills a template of the race with the filters and macros of the reports."""
    pages = environment()
    here = FileSystemLoader(Path(__file__).with_name("templates"))
    own = pages.overlay(loader=ChoiceLoader([here, pages.loader]))
    return own.get_template(name).render(values)


def _title(result: BenchResult) -> str:
    s = result.setting
    return f"GPT-2 of {s.layers} layers and width {s.width}, trained on {result.device}"


def _row(arm: ArmResult, place: int, result: BenchResult, base: ArmResult) -> Row:
    fastest, tokens = result.speed(result.raced[0]), result.setting.tokens_per_step()
    per_speed = SPEED_LENGTH / fastest
    memory_length, memory, memory_ratio = None, "", 0.0
    if arm.memory:
        memory = f"{arm.memory / 2**30:.2f} GiB"
        if base.memory:
            largest = max(other.memory or 0 for other in result.raced)
            memory_length, memory_ratio = MEMORY_LENGTH * arm.memory / largest, arm.memory / base.memory
    return Row(
        name=arm.name,
        look="ours" if arm.ours else "base" if arm is base else "theirs",
        y=TOP + ROW * place,
        speed_length=per_speed * result.speed(arm),
        slowest=per_speed * tokens / max(arm.seconds),
        fastest=per_speed * tokens / min(arm.seconds),
        speed=count(result.speed(arm)),
        speed_ratio=base.typical / arm.typical,
        memory_length=memory_length,
        memory=memory,
        memory_ratio=memory_ratio,
        held_out="" if arm.held_out is None else f"{arm.held_out:.4f}",
    )


def _note(result: BenchResult) -> str:
    absent = [f"{arm.name}: {arm.missing or arm.failed}" for arm in result.arms if arm.missing or arm.failed]
    if result.stopped:
        absent.append(f"stopped {result.stopped}")
    text = "; ".join(absent) if absent else f"halfstep's arms in color; text: {result.data}"
    return text if len(text) <= 140 else text[:137] + "..."
