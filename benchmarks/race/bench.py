"""Races the usual training recipes and halfstep's on one GPU.

python benchmarks/race/bench.py [--arms autocast halfstep] [--rounds 6] [--bars] [--save FILE] [--picture FILE]
python benchmarks/race/bench.py --help
"""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
from benchmarks.race import race as races
from benchmarks.race.bars import Verdict, check_applicable, judge
from benchmarks.race.contract import Options
from benchmarks.race.picture import html, svg
from benchmarks.race.standings import ArmResult, BenchResult
from halfstep.cli.arguments import Flag, Json
from halfstep.cli.output import json_text, print_error, print_failure, print_json, print_table, print_words
from halfstep.core.errors import HalfstepError, OptionError

Arms = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", show_default=False)]
PICTURES = (".svg", ".html")
app = App(name="bench.py", help_flags=["--help", "-h"], version_flags=[])


@app.default
def bench(
    *,
    arms: Arms = (),
    race: Annotated[Options, Parameter(name="*")] = Options(),
    save: Path | None = None,
    picture: Path | None = None,
    bars: Flag = False,
    json: Json = False,
) -> int:
    """Race training recipes against each other: speed, peak memory, and the loss on held-out text.

    Each recipe (an arm of the race) trains the same GPT-2 on the same text in its own process, and they take
    turns. The exit code is 1 if an arm fails or, with --bars, if a bar is missed.

    Parameters
    ----------
    arms
        fp32, tf32, autocast-eager, autocast (the usual recipe), autocast-fp16, accelerate, fabric, hf, torchao,
        casted, pure-bf16, halfstep, halfstep-lean, halfstep-graph, halfstep-fp32-masters, halfstep-stock,
        halfstep-fp16, halfstep-fp8, halfstep-fp8-all; by default, casted and those that the bars compare.
    save
        Also write the data as JSON to this file.
    picture
        Also draw the result, to a file that ends in .svg or .html.
    bars
        Check what halfstep promises about its speed and memory.
    """
    names = races.checked_arms(arms)
    if bars:
        check_applicable(names, race.device, vars(race))
    _check_files(save, picture)
    result = races.run(names, log=print_words, **vars(race))
    verdicts = judge(result) if bars else ()
    data = result.to_dict() | ({"bars": [verdict.to_dict() for verdict in verdicts]} if bars else {})
    _write(result, data, save, picture)
    if json:
        print_json(data)
    else:
        _print(result, verdicts)
    missed = any(verdict.reached is False for verdict in verdicts)
    unchecked = bars and not any(verdict.reached is not None for verdict in verdicts)
    failed = any(arm.failed for arm in result.arms)
    return 1 if missed or unchecked or failed or not result.raced else 0


def _check_files(save: Path | None, picture: Path | None) -> None:
    if picture is not None and picture.suffix not in PICTURES:
        raise OptionError(f"--picture must end in `.svg` or `.html`: `{picture}`")
    for path in (save, picture):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise OptionError(
                f"cannot write `{path}`: "
                + ("it is a folder" if path.is_dir() else f"there is no folder `{path.parent}`")
            )


def _write(result: BenchResult, data: dict[str, object], save: Path | None, picture: Path | None) -> None:
    if save is not None:
        save.write_text(json_text(data) + "\n", encoding="utf-8")
    if picture is not None:
        text = html(result) if picture.suffix == ".html" else f"{svg(result)}\n"
        picture.write_text(text, encoding="utf-8")


def _print(result: BenchResult, verdicts: tuple[Verdict, ...]) -> None:
    base = result.baseline
    if base is not None:
        columns = ["arm", "tokens/s", "ms/step", "spread", f"x {base.name}", "peak MiB", "x its memory"]
        columns += ["share", "held-out loss", "waits"]
        print_table(columns, [_row(arm, result, base) for arm in result.raced], right=columns[1:])
    absent = [(arm.name, arm.missing or arm.failed) for arm in result.arms if not arm.raced]
    if absent:
        print_table(("did not race", "why"), [(name, why or "it was not timed") for name, why in absent])
    if verdicts:
        print_table(("bar", "ratio", "reached"), [_verdict(verdict) for verdict in verdicts], right=("ratio",))
    for arm in result.raced:
        if arm.kernels:
            print_words(f"attention of {arm.name}: {', '.join(arm.kernels)}")


def _row(arm: ArmResult, result: BenchResult, base: ArmResult) -> tuple[str, ...]:
    share = result.share(arm)
    return (
        arm.name,
        f"{result.speed(arm):,.0f}",
        f"{arm.typical * 1e3:.2f}",
        f"{arm.spread:.1%}",
        f"{base.typical / arm.typical:.3f}",
        f"{arm.memory / 2**20:,.0f}" if arm.memory else "",
        f"{arm.memory / base.memory:.3f}" if arm.memory and base.memory else "",
        "" if share is None else f"{share:.2f}",
        "" if arm.held_out is None else f"{arm.held_out:.4f}",
        "" if arm.syncs is None else f"{arm.syncs}",
    )


def _verdict(verdict: Verdict) -> tuple[str, str, str]:
    reached = {True: "yes", False: "no", None: f"not checked: {verdict.why}"}[verdict.reached]
    return str(verdict.bar), "" if verdict.ratio is None else f"{verdict.ratio:.3f}", reached


def main(arguments: list[str]) -> int:
    """Runs the race that the arguments ask for; returns the exit code, 2 for wrong usage."""
    try:
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        print_error(str(error), "see --help")
        return 2
    except (HalfstepError, OSError) as error:
        print_failure(error)
        return 2
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
