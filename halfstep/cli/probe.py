"""`halfstep probe`: measures what this machine runs natively, how fast, and which precision to train in."""

from typing import TYPE_CHECKING

from halfstep.cli.arguments import Json
from halfstep.cli.output import print_json, print_table, print_words

if TYPE_CHECKING:
    from halfstep.core.choice import Timing
    from halfstep.tools.probe import BackendResult


def probe(
    *, backend: str | None = None, device: str | None = None, budget: float = 3.0, json: Json = False
) -> None:
    """Measure matmuls in each number format, and recommend a precision to train in, with the reason.

    A supported format is not always faster: some devices run bf16 hundreds of times slower than fp32. A size
    that would exceed the time budget is not started.

    Parameters
    ----------
    backend
        torch, jax or mlx; by default, all that are installed.
    device
        The device, as the backend names it (cpu, cuda, cuda:1, mps); by default, the fastest kind.
    budget
        Total seconds to measure.
    """
    from halfstep.tools.probe import run

    result = run(None if backend is None else [backend], budget, device=device)
    if json:
        print_json(result.to_dict())
        return
    for each in result.backends:
        _print_backend(each)


def _print_backend(backend: "BackendResult") -> None:
    if backend.missing:
        print_words(f"{backend.missing}: {backend.install}")
        return
    for result in backend.devices:
        print_words(f"{backend.name} {backend.version}, {result.device}: {result.description}")
        columns = ("format", "shape", "ms", "TFLOP/s", "times fp32")
        rows = [_row(timing, result.ratio(timing)) for timing in result.compared()]
        print_table(columns, rows, right=columns[2:])
        support = [(str(fmt), "yes" if native else "no", native.reason) for fmt, native in result.support]
        print_table(("format", "runs", "why"), support)
        print_table(("choice", "why"), [(result.choice.preset, result.choice.reason)])
    if backend.others:
        print_words(f"also available: {', '.join(backend.others)}; measure another with --device")


def _row(timing: "Timing", ratio: float | None) -> tuple[str, ...]:
    return (
        str(timing.format),
        "x".join(map(str, timing.shape)),
        f"{timing.typical * 1e3:.3g}",
        f"{timing.flops / 1e12:.3g}",
        "" if ratio is None else f"{ratio:.3g}",
    )
