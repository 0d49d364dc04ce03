"""`halfstep compare`: are two ways to train the same, or is it luck?"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from halfstep.cli import train
from halfstep.cli.arguments import Device, Flag, Json, Overrides
from halfstep.cli.output import print_error, print_json, print_table, print_words
from halfstep.core.errors import OptionError

if TYPE_CHECKING:
    from halfstep.tools.compare.curves import Curve
    from halfstep.tools.compare.judge import Comparison
    from halfstep.tools.compare.runs import Training

SetA = Annotated[tuple[str, ...], Parameter(name="--set-a", negative="", show_default=False)]
SetB = Annotated[tuple[str, ...], Parameter(name="--set-b", negative="", show_default=False)]
CODES = {"same": 0, "different": 1, "cannot tell": 3}
NO_VERDICT = 2


def compare(
    a: str,
    b: str,
    /,
    *,
    recipe: str = "tiny",
    seeds: int = 4,
    steps: int | None = None,
    overrides: Overrides = (),
    set_a: SetA = (),
    set_b: SetB = (),
    ranks_a: int = 1,
    ranks_b: int = 1,
    device: Device = None,
    delta: str | None = None,
    unpaired: Flag = False,
    column: str | None = None,
    out: Path | None = None,
    page: Path | None = None,
    json: Json = False,
) -> int:
    """Compare two ways to train: same, different, or cannot tell; and the first step where their curves part.

    B is the reference. Policies are trained here, from the same weights and on the same data, a pair of runs for
    each seed; each run has a folder, so that the same command continues what was interrupted. The exit code is 0
    if they are the same, 1 if they are different, 3 if these runs cannot tell, and 2 if they cannot be compared.

    Parameters
    ----------
    a
        A policy (as of `halfstep train --policy`), a run folder, a folder of runs with one for each seed, or loss
        logs: a CSV or JSONL file or a folder of them (`seed-0.csv`, `seed-1.csv`, ...), an export of W&B, a
        TensorBoard log, runs of a project of trackio (`PROJECT.db:bf16-*`).
    b
        The reference: the same.
    recipe
        What to train: a recipe, or a file that ends in .toml.
    seeds
        How many pairs to train; pairs of an earlier call count.
    steps
        How many steps each run trains; by default, those of the recipe.
    overrides
        A setting of both sides, such as model.layers=2. May be repeated.
    set_a
        A setting of A alone, such as training.compile=true or backend=jax. May be repeated.
    set_b
        A setting of B alone.
    ranks_a
        Processes that share each run of A, started by torchrun.
    ranks_b
        Processes that share each run of B.
    delta
        The gap of losses that does not matter, such as 0.01, or 0.5% of B's loss; by default, half the spread of
        B's losses over seeds.
    unpaired
        Compare the runs as two groups, even where they share seeds.
    column
        The column of a log that holds the loss.
    out
        The folder for the runs and the page; by default, runs/compare-RECIPE for policies, and no page otherwise.
    page
        The file to write the page to; by default, compare.html in the folder for the runs.
    """
    from halfstep.tools.compare.judge import judge
    from halfstep.tools.compare.runs import Training, names_existing_runs, read_side

    margin = _margin(delta)
    there = names_existing_runs(a), names_existing_runs(b)
    if there[0] != there[1]:
        raise OptionError(
            f"`{a if there[0] else b}` names a file or folder, and `{b if there[0] else a}` a policy to train: "
            "whether they would begin with the same weights and data is unknown",
            hint="name two policies, two run folders or two logs",
        )
    if there[0]:
        given = {"--recipe": recipe != "tiny", "--seeds": seeds != 4, "--steps": steps is not None}
        given |= {"--set": bool(overrides + set_a + set_b), "--ranks": (ranks_a, ranks_b) != (1, 1)}
        if unused := [name for name, is_given in given.items() if is_given]:
            raise OptionError(
                f"{unused[0]} is about training, and A and B name what is already trained",
                hint="leave it out, or name policies",
            )
        result = judge((a, b), read_side(a, column), read_side(b, column), paired=not unpaired, **margin)
    else:
        if column is not None:
            raise OptionError("--column is of loss logs, and A and B are policies", hint="leave it out")
        if not 2 <= seeds <= 1000:
            raise OptionError(
                f"--seeds {seeds}: a verdict needs 2 to 1,000 pairs of runs",
                hint="4 is the default, and the fewest that show where curves part",
            )
        training = Training(recipe, tuple(range(seeds)), steps, overrides, (set_a, set_b), (ranks_a, ranks_b))
        out = out or train.RUNS / f"compare-{Path(recipe).stem}"
        names, one, other = _train_sides((a, b), training, out, device)
        result = judge(names, one, other, paired=not unpaired, **margin)
    page = page or (None if out is None else out / "compare.html")
    if page is not None:
        _write_page(result, page)
    if json:
        print_json(result.to_dict() | {"page": None if page is None else str(page)})
    else:
        _print(result, page)
    if result.verdict is None:
        print_error("the losses cannot be compared", "; ".join(result.notes))
        return NO_VERDICT
    return CODES[result.verdict.kind]


def _margin(delta: str | None) -> dict[str, float]:
    """Returns the gap that does not matter, as a loss or as a share of one."""
    if delta is None:
        return {}
    try:
        margin = float(delta.removesuffix("%"))
    except ValueError:
        margin = math.nan
    if not 0 <= margin < math.inf:
        raise OptionError(f"--delta {delta} is not a gap", hint="name a loss of 0 or more, such as 0.01, or 0.5%")
    return {"share": margin / 100} if delta.endswith("%") else {"delta": margin}


def _train_sides(
    policies: tuple[str, str], training: "Training", out: Path, device: str | None
) -> "tuple[tuple[str, str], list[Curve], list[Curve]]":
    """Returns names and runs of both sides, once they are trained."""
    from halfstep.tools.compare.runs import check_alike, resolve_ways, train_ways
    from halfstep.training.telemetry.progress import RunsProgress

    if training.steps is not None and training.steps < 1:
        raise OptionError(f"--steps {training.steps} is no training", hint="name 1 or more")
    if min(training.ranks) < 1:
        raise OptionError(
            f"{min(training.ranks)} ranks train nothing", hint="--ranks-a and --ranks-b are 1 or more"
        )
    first, second = resolve_ways(policies, training)
    check_alike(first.config, second.config)
    steps, seeds = first.config.training.steps, training.seeds
    print_words(f"{len(seeds)} pairs of runs of {steps:,} steps in `{out}`: {first.name} against {second.name}")
    with RunsProgress(len(seeds) * (steps + second.config.training.steps)) as bar:
        curves = train_ways([first, second], seeds, bar.update, out=out, device=device, on_warning=bar.note)
    one, other = (list(curves[way.name].values()) for way in (first, second))
    return (first.name, second.name), one, other


def _write_page(result: "Comparison", page: Path) -> None:
    from halfstep.report.compare import html
    from halfstep.training.files import os_errors, write_whole

    with os_errors(OptionError, f"`{page}` cannot be written", "name another file with --page"):
        page.parent.mkdir(parents=True, exist_ok=True)
        write_whole(page, html(result).encode("utf-8", errors="backslashreplace"))


def _print(result: "Comparison", page: Path | None) -> None:
    from halfstep.report.compare import conclusion, evidence

    print(*conclusion(result), sep="\n")
    print_table(("", result.a.name, f"{result.b.name} (reference)"), evidence(result))
    print_words(*(f"note: {note}" for note in result.notes))
    if page is not None:
        print_words(f"page {page}")
