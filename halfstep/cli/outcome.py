"""How a run of `halfstep train` ends: its report page, its summary, and its exit code.

    0    it finished, or it was stopped and its last step was saved
    1    steps were lost: they were trained, but no checkpoint holds them
    2    it could not start, or an error stopped it without losing a step

Messages that could not be printed do not change the code.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.cli.output import print_failure, print_json, print_table, print_words

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
    from halfstep.core.errors import HalfstepError

    try:
        outcome = loop.run()
    except (HalfstepError, OSError) as error:
        if not loop.job.owner:
            raise
        page = _write_page(loop)
        if page is not None:
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
    return loop.deadline is not None and loop.stop.requested is not None


def _write_page(loop: "Loop") -> Path | None:
    from halfstep.core.errors import HalfstepError
    from halfstep.report.page import write
    from halfstep.training import paths

    if _is_hurried(loop):
        return None
    page = loop.out / paths.REPORT
    try:
        write(loop.out / paths.EVENTS, page)
    except OSError as error:
        why = error.strerror or str(error)
    except HalfstepError as error:  # the events are incomplete or damaged
        why = error.message
    else:
        return page
    print_words(f"warning: cannot write `{page}`: {why}")
    return None


def _print(outcome: "Outcome", loop: "Loop", page: Path | None, json: bool) -> None:
    held_out = outcome.held_out
    data = {
        "folder": str(outcome.folder),
        "step": outcome.step,
        "resumed_from": loop.start or None,
        "session_steps": _session_steps(outcome, loop),
        "finished": outcome.finished,
        "seconds": outcome.seconds,
        "tokens_per_second": outcome.tokens_per_second,
        "ceiling": loop.ceiling.record(),
        **(outcome.totals or {}),
        "validation_loss": held_out and held_out.loss,
        "bits_per_byte": held_out and held_out.bits_per_byte,
        "bigram_bits": held_out and held_out.bigram_bits,
        "ratio": held_out and held_out.ratio,
        "report": None if page is None else str(page),
    }
    if json:
        print_json(data)
    else:
        print_table(("", ""), _rows(outcome, loop, page))


def _rows(outcome: "Outcome", loop: "Loop", page: Path | None) -> list[tuple[str, str]]:
    from halfstep.training.telemetry.meters import describe_totals

    held_out, totals = outcome.held_out, outcome.totals
    rows = [("trained", _describe_training(outcome, loop))]
    if totals is not None:
        rows.append(("model FLOPs utilization", describe_totals(totals, loop.ceiling)))
    if held_out is not None:
        rows.append(("held-out loss", f"{held_out.loss:.4f}"))
    if held_out is not None and held_out.ratio is not None:
        rows += [
            ("held-out bits per byte", f"{held_out.bits_per_byte:.4f}"),
            ("bigram entropy of the same text", f"{held_out.bigram_bits:.4f}"),
            ("ratio", f"{held_out.ratio:.3f}"),
        ]
    if page is not None or _is_hurried(loop):
        rows.append(("page", LATER if page is None else str(page)))
    rows.append(("see what it learned", f"halfstep sample {outcome.folder}"))
    return rows


def _describe_training(outcome: "Outcome", loop: "Loop") -> str:
    if outcome.totals is None:
        return f"nothing: all {_steps(outcome.step)} were already trained"
    text = f"{_steps(_session_steps(outcome, loop))} in {outcome.seconds:.1f} s, "
    text += f"{outcome.tokens_per_second:,.0f} tokens/s"
    if _session_steps(outcome, loop) > 2:
        text += f" after the first step ({outcome.totals['spent']['first_step']:.1f} s)"
    return f"{text}; {_steps(outcome.step)} in total" if loop.start else text


def _session_steps(outcome: "Outcome", loop: "Loop") -> int:
    return max(0, outcome.step - loop.start)  # a rollback can return to before the start


def _steps(number: int) -> str:
    return f"{number} step" if number == 1 else f"{number} steps"
