"""Draws the figures of the lessons; tests keep them current.

python docs/figures.py          # all
python docs/figures.py NAME...  # some of them
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from json import loads
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from halfstep import Format, cast
from halfstep.core.scaling import DynamicScale

HERE = Path(__file__).parent / "learn"
WIDTH = 820
STYLE = """
text { font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #1c2127 }
.title { font-size: 15px; font-weight: 600 } .note { font-size: 12px; fill: #5f6b7a } .inside { fill: #ffffff }
.right { text-anchor: end } .middle { text-anchor: middle } .ground { fill: #ffffff } .grid { stroke: #dfe4ea }
.a { fill: #2f6fdb; stroke: #2f6fdb } .b { fill: #c2541b; stroke: #c2541b } .c { fill: #6c7886; stroke: #6c7886 }
.d { fill: #1d8a5b; stroke: #1d8a5b } .e { fill: #8b5bc9; stroke: #8b5bc9 } .faint { opacity: 0.35 }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e8ed } .note { fill: #97a3b1 } .inside { fill: #15191e }
  .ground { fill: #15191e } .grid { stroke: #2f3742 }
  .a { fill: #5b93f0; stroke: #5b93f0 } .b { fill: #ec8246; stroke: #ec8246 } .c { fill: #93a0af; stroke: #93a0af }
  .d { fill: #43bd88; stroke: #43bd88 } .e { fill: #b08be8; stroke: #b08be8 }
}
rect, circle { stroke-width: 0 } .curve { fill: none; stroke-width: 2 }
"""


def svg(height: int, title: str, parts: Iterator[str]) -> str:
    """Returns a figure on a ground of its own, which follows the reader's light or dark scheme."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"><style>{STYLE}</style>'
    )
    ground = f'<title>{title}</title><rect class="ground" width="{WIDTH}" height="{height}" rx="6"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


def words(x: float, y: float, text: str, kind: str = "") -> str:
    """Returns a text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{text}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Returns a filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"/>'


def line(x0: float, y0: float, x1: float, y1: float, kind: str = "grid") -> str:
    """Returns a straight line."""
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" class="{kind}"/>'


def curve(points: list[tuple[float, float]], kind: str) -> str:
    """Returns a line through points."""
    return f'<polyline class="{kind} curve" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def number_lines() -> str:
    """The range of each format, and its numbers from 1 to 2."""
    left, right = 70, WIDTH - 24
    kinds = {"fp32": "c", "bf16": "a", "fp16": "b", "e5m2": "d", "e4m3": "e"}

    def at(power: float) -> float:
        return left + (power + 150) / 280 * (right - left)

    def ranges() -> Iterator[str]:
        yield words(24, 30, "From the smallest number to the largest (pale: subnormal, with fewer bits)", "title")
        for power in range(-140, 121, 20):
            yield line(at(power), 46, at(power), 226)
            yield words(at(power), 244, f"2<tspan dy='-5' font-size='10'>{power}</tspan>", "note middle")
        for place, (name, kind) in enumerate(kinds.items()):
            y, fmt = 54 + 35 * place, Format.parse(name)
            low, normal, high = (float(np.log2(v)) for v in (fmt.smallest_subnormal, fmt.smallest_normal, fmt.max))
            yield words(24, y + 16, name)
            yield box(at(low), y, at(normal) - at(low), 22, f"{kind} faint")
            yield box(at(normal), y, at(high) - at(normal), 22, kind)

    def steps() -> Iterator[str]:
        yield words(24, 284, "The numbers from 1 to 2", "title")
        for place, (name, kind) in enumerate(kinds.items()):
            y, count = 300 + 35 * place, 2 ** Format.parse(name).mantissa_bits
            yield words(24, y + 16, name)
            if count > 1000:
                yield box(left, y, right - left, 22, kind)
                inside = f"{count:,} steps: too close together to draw"
                yield words((left + right) / 2, y + 16, inside, "middle inside")
            else:
                for step in range(count + 1):
                    yield box(left + step / count * (right - left) - 0.75, y, 1.5, 22, kind)
        yield words(left, 488, "1", "note middle")
        yield words(right, 488, "2", "note middle")

    def parts() -> Iterator[str]:
        yield from ranges()
        yield from steps()

    return svg(504, "Range and precision of fp32, bf16, fp16, e5m2 and e4m3", parts())


def scale_course() -> Iterator[tuple[float, bool]]:
    """Trains a linear model with activation gradients in fp16; yields scale and skip of each step."""
    rng = np.random.default_rng(0)
    x, truth, weight = rng.normal(size=(512, 8)), 20 * rng.normal(size=8), np.zeros(8)
    law = DynamicScale(interval=40)
    state = law.init()
    for _ in range(600):
        rows = rng.integers(0, 512, 16)
        error = (x[rows] * (weight - truth)).sum(1) + 0.3 * rng.normal(size=16)
        gradient = cast((error / 8 * float(state.scale)).astype(np.float32), "fp16", overflow="inf")
        finite = bool(np.isfinite(gradient).all())
        yield float(state.scale), not finite
        verdict = law.judge(state, np.bool_(finite), np)
        if finite:
            weight -= 0.02 * (x[rows] * (gradient * float(verdict.inv_scale))[:, None]).sum(0)
        state = verdict.state


def scale_history() -> str:
    """The loss scale of a small training, step by step."""
    course = list(scale_course())
    powers = [float(np.log2(scale)) for scale, _ in course]
    low, high = min(powers) - 1, max(powers) + 1
    left, right, top, bottom = 84, WIDTH - 24, 52, 280

    def spot(step: float, power: float) -> tuple[float, float]:
        return left + step / len(course) * (right - left), bottom - (power - low) / (high - low) * (bottom - top)

    def parts() -> Iterator[str]:
        yield words(24, 30, "The loss scale by step; a dot is a step that overflowed and was skipped", "title")
        for power in range(int(np.ceil(low)), int(high) + 1, 2):
            _, y = spot(0, power)
            yield line(left, y, right, y)
            yield words(left - 8, y + 4, f"{2**power:,}", "note right")
        for step in range(0, len(course) + 1, 100):
            yield words(spot(step, 0)[0], bottom + 20, f"{step}", "note middle")
        yield curve([spot(s, p) for step, p in enumerate(powers) for s in (step, step + 1)], "a")
        for step, (_, skipped) in enumerate(course):
            if skipped:
                x, y = spot(step + 0.5, powers[step])
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="b"/>'

    return svg(312, "History of a dynamic loss scale", parts())


def share_lost(weights: NDArray[np.float32], rate: float, name: str) -> float:
    """Returns the share of weights that an update of one learning rate, as Adam makes it, leaves as they were."""
    held = cast(weights, name, overflow="inf")
    moved = cast((held - np.float32(rate) * np.sign(weights[::-1])).astype(np.float32), name, overflow="inf")
    return float(np.mean(moved == held))


def lost_updates() -> str:
    """The share of updates that rounding takes, by learning rate and by the format that weights are held in."""
    usual = np.random.default_rng(0).normal(0, 0.02, 5_000).astype(np.float32)
    gains = (1 + np.random.default_rng(1).normal(0, 0.02, 5_000)).astype(np.float32)
    gains *= np.sign(usual)  # so that half of the updates go each way
    rates = 10 ** np.linspace(-6, -2.5, 141)
    curves = [
        ("bf16, gains of norms (near 1)", "e", gains, "bf16"),
        ("bf16, matrices (near 0.02)", "a", usual, "bf16"),
        ("fp16, matrices", "b", usual, "fp16"),
        ("fp32, matrices and gains", "c", usual, "fp32"),
    ]
    left, right, top, bottom = 64, WIDTH - 24, 92, 320

    def spot(rate: float, share: float) -> tuple[float, float]:
        return left + (np.log10(rate) + 6) / 3.5 * (right - left), bottom - share * (bottom - top)

    def parts() -> Iterator[str]:
        yield words(
            24,
            30,
            "Updates lost in one step of Adam, by learning rate and format of the weights",
            "title",
        )
        for share in (0, 0.25, 0.5, 0.75, 1):
            _, y = spot(1, share)
            yield line(left, y, right, y)
            yield words(left - 8, y + 4, f"{share:.0%}", "note right")
        for place, (label, kind, weights, name) in enumerate(curves):
            x = (24, 236, 430, 556)[place]
            yield box(x, 50, 12, 12, kind)
            yield words(x + 18, 61, label, "note")
            points = [spot(rate, share_lost(weights, rate, name)) for rate in rates]
            yield curve(points, kind)
        for power in range(-6, -2):
            yield words(spot(10.0**power, 0)[0], bottom + 20, f"1e{power}", "note middle")

    return svg(352, "Lost updates by learning rate", parts())


def plans() -> dict[str, dict[str, int]]:
    """Returns the memory of GPT-2 at its peak, by policy and role, as `halfstep plan` follows a step."""
    policies = ("fp32", "bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true")
    options = [word for policy in policies for word in ("--policy", policy)]
    options += ["--set", "training.compile=false", "--set", "training.batch=8", "--json"]
    command = [sys.executable, "-m", "halfstep", "plan", "gpt2", "--gpu", "h200", *options]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    memory = {plan["policy"]: plan["memory_bytes"] for plan in loads(said)["plans"]}
    for roles in memory.values():
        roles["other"] = roles.pop("buffers") + roles.pop("workspace")
    return memory


def memory_by_role() -> str:
    """The memory of a step at its peak, by role, under four policies."""
    planned = plans()
    kinds = {"weights": "a", "masters": "a faint", "gradients": "b", "moments": "d", "activations": "c"}
    kinds |= {"logits": "c faint", "other": "e"}
    left, right = 214, WIDTH - 84
    most = max(sum(memory.values()) for memory in planned.values())

    def parts() -> Iterator[str]:
        yield words(24, 30, "Memory of a training step of GPT-2 (124M), 8 x 1024 tokens, at its peak", "title")
        for place, role in enumerate(kinds):
            x = 24 + 104 * place
            yield box(x, 48, 12, 12, kinds[role])
            yield words(x + 17, 59, role, "note")
        for place, (policy, memory) in enumerate(planned.items()):
            y, x = 84 + 46 * place, float(left)
            name = policy.replace("bf16-mixed,param=fp32:split", "bf16-mixed, split masters")
            yield words(24, y + 20, name)
            for role in kinds:
                width = memory[role] / most * (right - left)
                yield box(x, y, width, 30, kinds[role])
                x += width
            yield words(x + 8, y + 20, f"{sum(memory.values()) / 2**30:.1f} GiB", "note")

    return svg(84 + 46 * len(planned) + 12, "Memory of a training step by role and policy", parts())


FIGURES: dict[str, Callable[[], str]] = {
    "number_lines": number_lines,
    "scale_history": scale_history,
    "lost_updates": lost_updates,
    "memory_by_role": memory_by_role,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or FIGURES:
        (HERE / f"{name}.svg").write_text(FIGURES[name](), encoding="utf-8")
