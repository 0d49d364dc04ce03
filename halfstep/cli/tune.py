"""`halfstep tune`: finds the narrowest formats that a run tolerates, module by module."""

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter

from halfstep.cli.arguments import Device, Json, Overrides
from halfstep.cli.output import print_json, print_table, print_words
from halfstep.training.telemetry.progress import Clock, RunsProgress

if TYPE_CHECKING:
    from halfstep.tools.tune.tune import TuneResult

Formats = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")]
SHOWN = 10  # modules in the table; the page has all


class _Progress(RunsProgress):
    """How far a search is, in steps of training; how many there will be depends on what they show."""

    def __init__(self, stream: TextIO | None = None, *, clock: Clock = time.monotonic):
        super().__init__(math.inf, stream=stream, clock=clock)

    __call__ = RunsProgress.update

    def _label(self, done: int) -> str:
        return f"tuning, {done} step{'s' * (done != 1)} trained"


def tune(
    target: str,
    /,
    *,
    budget: str = "same",
    base: str | None = None,
    compute: Formats = ("e4m3",),
    grad: Formats = ("e5m2", "e4m3"),
    steps: int = 60,
    seeds: int = 4,
    most_seeds: int = 12,
    policies: int = 12,
    out: Path | None = None,
    set_: Overrides = (),
    device: Device = None,
    json: Json = False,
) -> int:
    """Find which modules tolerate narrow formats, and write the policy that gives them those.

    Each matmul is tried in each format by what its gradients notice; then short runs confirm how many may be
    narrow at once, with the same weights and data as runs of the base. The same command continues one that was
    interrupted. The exit code is 1 if no policy meets the budget.

    Parameters
    ----------
    target
        A recipe, a .toml file, or `module:factory`: a function that returns model, optimizer, loss_fn, batches and
        held_out.
    budget
        `same` for a held-out loss that `halfstep compare` calls the same as the base's, or how much higher it may
        be.
    base
        The policy to start from and to compare with; by default the recipe's, else bf16-mixed where the device
        multiplies bf16, else fp32.
    compute
        Formats to try for matmul operands.
    grad
        Formats to try for the gradients that enter a matmul.
    steps
        Steps of each short run.
    seeds
        Pairs of runs that a policy is compared by.
    most_seeds
        Pairs that it may take where the first ones cannot tell.
    policies
        Policies that may be compared.
    out
        The folder for policy.toml, the page and what was trained; by default tuned/TARGET.
    set_
        A setting of the recipe, such as `--set model.layers=2`. May be repeated.
    """
    from halfstep.report.tune import html
    from halfstep.tools.tune.reasons import policy_file, summary
    from halfstep.tools.tune.targets import base_of, target_of
    from halfstep.tools.tune.tune import Settings, Tuner
    from halfstep.training.files import RunLock, make_folder, write_whole

    where = out or Path("tuned") / Path(target.replace(":", ".")).name.removesuffix(".toml")
    print_words("loading torch")
    made = target_of(target, set_, where, device)
    text = " ".join([target, *(f"--set {each}" for each in set_), *([f"--device {device}"] if device else [])])
    settings = Settings(text, str(base_of(made, base)), compute, grad, budget, steps, seeds, most_seeds, policies)
    make_folder(where)
    lock = RunLock(where)  # two searches would write over what the other has trained
    with _Progress() as bar:
        tuner = Tuner(made, settings, where, bar)
        lacking = tuner.lacking and f"gains are in bytes: {tuner.lacking}"
        for note in filter(None, (lock.warning, made.note, lacking)):
            bar.note(note)
        tuned = tuner.run()
    page, policy = where / "tune.html", where / "policy.toml"
    write_whole(page, html(tuned).encode())
    policy.unlink(missing_ok=True)
    if tuned.met:
        write_whole(policy, policy_file(tuned).encode())
    lock.release()
    if json:
        print_json(_data(tuned, policy, page))
    else:
        _print(tuned, policy, page)
    if not tuned.met:
        print_words(summary(tuned))
    return 0 if tuned.met else 1


def _print(tuned: "TuneResult", policy: Path, page: Path) -> None:
    from halfstep.tools.tune.reasons import describe_verdict, format_cost, percent, summary

    worst = sorted(tuned.rows.items(), key=lambda row: -max(option.damage for option in row[1]))[:SHOWN]
    formats = [(o.compute, o.grad) for o in worst[0][1][1:]]
    columns = ("module", *(f"{c} / {g or 'as before'}" for c, g in formats))
    print_words(f"the share of a step's descent that formats lose, by module (the {len(worst)} that lose most):")
    print_table(
        columns, [(n, *(percent(o.damage) for o in options[1:])) for n, options in worst], right=columns[1:]
    )
    columns = ("narrow matmuls", "cost", "of the base", "compared with the base", "meets the budget")
    rows = [
        (
            f"{len(each.modules)} of {len(tuned.rows)}",
            format_cost(each.cost, tuned.unit),
            f"{each.cost / tuned.base_cost:.2f}",
            describe_verdict(each),
            "yes" if each.met else "no",
        )
        for each in tuned.evaluations
    ]
    print_table(columns, rows, right=columns[1:3])
    if tuned.met:
        print_table(("", ""), [("found", summary(tuned)), ("policy", str(policy)), ("page", str(page))])
    else:
        print_table(("", ""), [("page", str(page))])


def _data(tuned: "TuneResult", policy: Path, page: Path) -> dict[str, Any]:
    return {
        "policy": str(tuned.policy) if tuned.met else None,
        "file": str(policy) if tuned.met else None,
        "page": str(page),
        "met": tuned.met,
        "finished": tuned.found.finished,
        "settings": asdict(tuned.settings),
        "unit": tuned.unit,
        "unit_reason": tuned.lacking,
        "reference_losses": list(tuned.reference),
        "delta": tuned.delta,
        "base_cost": tuned.base_cost,
        "modules": {name: [asdict(option) for option in options] for name, options in tuned.rows.items()},
        "untouched": tuned.kept,
        "policies": [asdict(each) for each in tuned.evaluations],
    }
