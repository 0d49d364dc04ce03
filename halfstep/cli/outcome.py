"""How a run of `halfstep train` ends: its report page, its summary, and its exit code.

    0    it finished, or it was stopped and its last step was saved
    1    steps were lost: they were trained, but no checkpoint holds them
    2    it could not start, or an error stopped it without losing a step

Messages that could not be printed do not change the code.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.cli.output import print_failure, print_json, print_table, print_words
from halfstep.core.errors import HalfstepError
from halfstep.training import paths
from halfstep.training.telemetry.meters import describe_totals

if TYPE_CHECKING:
    from halfstep.training.loop import Loop, Outcome

LATER = "left to the next session: the deadline after a signal leaves no time for it"


def run(loop: "Loop", *, json: bool) -> int:
    """Runs a loop to its end, prints the outcome, and returns the exit code, which no later SIGTERM changes."""
    with loop.stop:
        try:
            return _run(loop, json)
        finally:
            loop.stop.conclude()


def _run(loop: "Loop", json: bool) -> int:
    try:
        outcome = loop.run()
    except (HalfstepError, OSError) as error:
        if not loop.job.owner:
            raise
        if (page := _write_page(loop)) is not None:
            print_words(f"page {page}")
        if loop.tally.step <= (loop.saver.saved_step or 0):
            raise
        print_failure(error, json=json)  # steps were lost
        return 1
    if not loop.job.owner:
        return 0
    _print(outcome, loop, _write_page(loop), json)
    return 0 if (outcome.saved or 0) == outcome.step else 1


def _is_hurried(loop: "Loop") -> bool:
    """Whether a signal came whose deadline runs: a page of a long run takes longer than it may leave."""
    return loop.stop.seconds_left < math.inf


def _write_page(loop: "Loop") -> Path | None:
    from halfstep.report.page import write

    if _is_hurried(loop):
        return None
    page = loop.out / paths.REPORT
    try:
        write(loop.out / paths.EVENTS, page)
        return page
    except (HalfstepError, OSError) as error:  # the events may be incomplete or damaged
        why = error.message if isinstance(error, HalfstepError) else error.strerror or str(error)
    print_words(f"warning: cannot write `{page}`: {why}")
    return None


def _print(outcome: "Outcome", loop: "Loop", page: Path | None, json: bool) -> None:
    held_out, totals = outcome.held_out, outcome.totals
    steps = max(0, outcome.step - loop.start)  # of this session; a rollback can return to before its start
    if json:
        data = {
            "folder": str(outcome.folder),
            "step": outcome.step,
            "resumed_from": loop.start or None,
            "session_steps": steps,
            "finished": outcome.finished,
            "seconds": outcome.seconds,
            "tokens_per_second": outcome.tokens_per_second,
            "ceiling": loop.ceiling.record(),
            **(totals or {}),
            "validation_loss": held_out and held_out.loss,
            "bits_per_byte": held_out and held_out.bits_per_byte,
            "bigram_bits": held_out and held_out.bigram_bits,
            "ratio": held_out and held_out.ratio,
            "report": None if page is None else str(page),
        }
        print_json(data)
        return
    rows = [("trained", _describe_training(outcome, steps, resumed=loop.start > 0))]
    if totals is not None:
        rows.append(("model FLOPs utilization", describe_totals(totals, loop.ceiling)))
    if held_out is not None:
        rows.append(("held-out loss", f"{held_out.loss:.4f}"))
    if held_out is not None and held_out.ratio is not None:
        rows += [
            ("held-out bits per byte", f"{held_out.bits_per_byte:.4f}"),
            ("bigram entropy of the same text", f"{held_out.bigram_bits:.4f}"),
            ("ratio of the two", f"{held_out.ratio:.3f}; below 1 it uses more than the byte before"),
        ]
    if page is not None or _is_hurried(loop):
        rows.append(("page", LATER if page is None else str(page)))
    print_table(("", ""), [*rows, ("see what it learned", f"halfstep sample {outcome.folder}")])


def _describe_training(outcome: "Outcome", steps: int, *, resumed: bool) -> str:
    in_total = f"{outcome.step} step{'s' * (outcome.step != 1)}"
    if outcome.totals is None:
        return f"nothing: all {in_total} were already trained"
    text = f"{steps} step{'s' * (steps != 1)} in {outcome.seconds:.1f} s, "
    text += f"{outcome.tokens_per_second:,.0f} tokens/s"
    if steps > 2:
        text += f" after the first step ({outcome.totals['spent']['first_step']:.1f} s)"
    return f"{text}; {in_total} in total" if resumed else text
