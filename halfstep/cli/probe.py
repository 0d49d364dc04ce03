"""`halfstep probe`: measures what this machine runs natively, how fast, and which precision to train in."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.cli import train
from halfstep.cli.arguments import Device, Json, Overrides
from halfstep.cli.output import print_json, print_table, print_words
from halfstep.config.load import DEFAULT_RECIPE, load, setting_named
from halfstep.core.arrays.measure import BUDGET
from halfstep.core.choice import Gain
from halfstep.core.errors import OptionError

SIZES = ("model.", "training.batch")  # the settings that what is timed depends on

if TYPE_CHECKING:
    from halfstep.tools.probe import BackendResult


def probe(
    recipe: str | None = None,
    /,
    *,
    backend: str | None = None,
    device: Device = None,
    overrides: Overrides = (),
    budget: float = BUDGET,
    save: Path | None = None,
    json: Json = False,
) -> None:
    """Measure which precision is fastest to train in, with the reason: what `halfstep train` does for `auto`.

    A supported format is not always faster: some devices run bf16 hundreds of times slower than fp32. On a CPU a
    block of the recipe's model is trained for a moment in each format; on an accelerator matmuls decide. The sizes
    are the recipe's: name one, or change them with --set, such as model.width=1024 and training.batch=8.

    Parameters
    ----------
    recipe
        The recipe to choose for: tiny (the default), gpt2, qwen3, speedrun, golf, or a file that ends in .toml.
    backend
        torch, jax or mlx; by default, all that are installed.
    overrides
        A size, such as model.width=1024 or training.batch=8. May be repeated.
    budget
        Seconds to choose in, for each backend. A size that would exceed them is not started.
    save
        A .toml file to write: this machine for `halfstep plan --gpu FILE`, with the recipe's matmuls and attention
        timed on torch. Nothing else is measured then.
    """
    from halfstep.tools.probe import run

    config = load(recipe or DEFAULT_RECIPE, overrides)
    if other := [each for each in overrides if not setting_named(each).startswith(SIZES)]:
        raise OptionError(
            f"--set {other[0]} changes nothing here: only sizes do, model.* and training.batch",
            hint="leave it out; --backend names a framework",
        )
    if save is not None:
        from halfstep.tools.plan.machine import save as save_machine

        machine = save_machine(save, config, device)
        print_words(f"{save}: {machine.name}, {len(machine.timed)} kernels timed; `halfstep plan --gpu {save}`")
        return
    result = run(None if backend is None else [backend], budget, device=device, config=config, say=print_words)
    if json:
        print_json(result.to_dict())
        return
    for each in result.backends:
        _print_backend(each)


def as_size(option: str, arguments: Sequence[str]) -> str | None:
    """Returns how an option that does not exist is written with --set, if it means a size."""
    hint = train.as_setting(option, arguments)
    return hint if hint and any(f"--set {size}" in hint for size in SIZES) else None


def _print_backend(backend: "BackendResult") -> None:
    if backend.missing:
        print_words(f"{backend.missing}: {backend.install}")
        return
    for result in backend.devices:
        print_words(f"{backend.name} {backend.version}, {result.device}: {result.description}")
        columns = ("format", "timed", "shape", "ms", "fp32 ms", "times fp32")
        print_table(columns, [_row(known) for known in result.gains()], right=columns[3:])
        support = [(str(fmt), "yes" if native else "no", native.reason) for fmt, native in result.support]
        print_table(("format", "runs", "why"), support)
        print_table(("choice", "why"), [(result.choice.preset, result.choice.reason)])
    if backend.other_devices:
        print_words(f"also available: {', '.join(backend.other_devices)}; choose one with --device")


def _row(known: "Gain") -> tuple[str, ...]:
    return (
        str(known.format),
        "matmul" if known.work == "matmuls" else "block",
        "x".join(map(str, known.shape)),
        f"{known.seconds * 1e3:.3g}",
        f"{known.fp32_seconds * 1e3:.3g}",
        f"{known.ratio:.3g}",
    )
