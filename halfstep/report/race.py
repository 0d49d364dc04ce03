"""The picture of a race: a bar an arm for speed, one for peak memory, and the loss beside them.

One SVG that needs nothing: no script, no font, no other file. It has a light and a dark look and says in words
what it shows. A thin line over the end of a bar goes from the slowest round to the fastest. As HTML, the same SVG
is a page of its own.
"""

from halfstep.report.markup import Html, join, raw_element, tag
from halfstep.report.number_format import count
from halfstep.tools.bench.standings import ArmResult, BenchResult

WIDTH, ROW, BAR = 980, 34, 20
TOP, BOTTOM = 92, 44
# Where the columns begin, and how long their longest bar is.
NAMES, SPEED, MEMORY, LOSS = 180, 192, 600, 970
SPEED_LENGTH, MEMORY_LENGTH = 250, 130

STYLE = """
text {
  font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #1c2127; font-variant-numeric: tabular-nums
}
.title { font-size: 17px; font-weight: 600 }
.note { font-size: 12px; fill: #5f6b7a }
.ground { fill: #ffffff }
.theirs { fill: #aab4c0 }
.base { fill: #6c7886 }
.ours { fill: #2f6fdb }
.spread { stroke: #1c2127; stroke-width: 1.5 }
.base-line { stroke: #6c7886; stroke-dasharray: 3 3 }
.strong { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e8ed } .note { fill: #97a3b1 } .ground { fill: #15191e } .theirs { fill: #4b5663 }
  .base { fill: #7f8c9b } .ours { fill: #5b93f0 } .spread { stroke: #e4e8ed } .base-line { stroke: #7f8c9b }
}
"""


def svg(result: BenchResult) -> Html:
    """The picture."""
    arms, base = result.raced, result.baseline
    height = TOP + ROW * len(arms) + BOTTOM
    title = _title(result)
    parts: list[str | None] = [
        raw_element("style", STYLE),
        tag("title", title),
        tag("desc", " ".join(_sentence(arm, result) for arm in arms)),
        tag("rect", class_="ground", width=str(WIDTH), height=str(height)),
        _text(16, 28, title, "title"),
        _text(16, 48, _subtitle(result), "note"),
    ]
    if base is not None:
        parts += [_heads(result, base), *[_row(arm, place, result, base) for place, arm in enumerate(arms)]]
        x = _number(SPEED + SPEED_LENGTH * result.speed(base) / result.speed(arms[0]))
        low, high = str(TOP - 4), str(TOP + ROW * len(arms) - 4)
        parts.append(tag("line", class_="base-line", x1=x, x2=x, y1=low, y2=high))
    parts.append(_text(16, height - 16, _absent(result), "note"))
    return tag(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        width=str(WIDTH),
        height=str(height),
        role="img",
    )


def html(result: BenchResult) -> str:
    """The picture as a page."""
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", _title(result)),
        raw_element("style", "body { margin: 2rem } svg { max-width: 100%; height: auto }"),
    )
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', svg(result)), lang='en')}\n"


def _title(result: BenchResult) -> str:
    s = result.setting
    return f"GPT-2 of {s.layers} layers and width {s.width}, trained on {result.device}"


def _subtitle(result: BenchResult) -> str:
    s = result.setting
    micro = f"{s.micro_batches} x " if s.micro_batches > 1 else ""
    rounds = f"{result.rounds} rounds of {result.steps} steps each, arms interleaved"
    return f"{micro}{s.batch} x {s.context} tokens a step; median of {rounds}"


def _heads(result: BenchResult, base: ArmResult) -> Html:
    heads = [
        _text(SPEED, TOP - 14, f"tokens a second, and times {base.name}", "note"),
        _text(LOSS, TOP - 14, "held-out loss", "note", "end"),
    ]
    if base.memory:
        heads.append(_text(MEMORY, TOP - 14, f"peak memory, and times {base.name}", "note"))
    return join(*heads)


def _row(arm: ArmResult, place: int, result: BenchResult, base: ArmResult) -> Html:
    y = TOP + ROW * place
    look = "ours" if arm.ours else "base" if arm is base else "theirs"
    fastest, tokens = result.speed(result.raced[0]), result.setting.tokens_per_step()
    ends = [_number(SPEED + SPEED_LENGTH * tokens / t / fastest) for t in (max(arm.seconds), min(arm.seconds))]
    middle = str(y + BAR // 2)
    length = SPEED_LENGTH * result.speed(arm) / fastest
    parts = [
        _text(NAMES, y + 15, arm.name, "strong" if arm.ours else "", "end"),
        _bar(SPEED, y, length, look),
        tag("line", class_="spread", x1=ends[0], x2=ends[1], y1=middle, y2=middle),
        *_figures(SPEED + SPEED_LENGTH, y, count(result.speed(arm)), base.typical / arm.typical),
    ]
    if arm.memory and base.memory:
        largest = max(other.memory or 0 for other in result.raced)
        parts.append(_bar(MEMORY, y, MEMORY_LENGTH * arm.memory / largest, look))
        parts += _figures(MEMORY + MEMORY_LENGTH, y, _gib(arm.memory), arm.memory / base.memory)
    if arm.held_out is not None:
        parts.append(_text(LOSS, y + 15, f"{arm.held_out:.4f}", anchor="end"))
    return tag("g", *parts)


def _figures(x: float, y: float, told: str, ratio: float) -> list[Html]:
    """A number and its ratio to the baseline, right of a bar."""
    return [_text(x + 70, y + 15, told, anchor="end"), _text(x + 130, y + 15, f"{ratio:.3f}x", anchor="end")]


def _gib(memory: int) -> str:
    return f"{memory / 2**30:.2f} GiB"


def _bar(x: float, y: float, length: float, look: str) -> Html:
    return tag("rect", class_=look, x=_number(x), y=_number(y), width=_number(length), height=str(BAR), rx="2")


def _text(x: float, y: float, text: str, look: str = "", anchor: str | None = None) -> Html:
    return tag("text", text, x=_number(x), y=_number(y), class_=look or None, text_anchor=anchor)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _sentence(arm: ArmResult, result: BenchResult) -> str:
    base = result.baseline
    assert base is not None, "an arm that raced is a baseline if no other is"
    ratio = base.typical / arm.typical
    told = f"{arm.name}: {count(result.speed(arm))} tokens a second, {ratio:.3f} times {base.name}"
    if arm.memory:
        told += f", {_gib(arm.memory)} at the peak"
    if arm.held_out is not None:
        told += f", held-out loss {arm.held_out:.4f}"
    return told + "."


def _absent(result: BenchResult) -> str:
    """What is not in the picture, and why."""
    told = [f"{arm.name}: {arm.missing or arm.failed}" for arm in result.arms if arm.missing or arm.failed]
    if result.stopped:
        told.append(f"stopped {result.stopped}")
    text = "; ".join(told) if told else f"halfstep's arms in color; text: {result.data}"
    return text if len(text) <= 140 else text[:137] + "..."
