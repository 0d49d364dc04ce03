"""`halfstep`: the commands, how their errors look, and what the exit code says.

Data goes to stdout and words to stderr. Exit codes: 0 fine, 1 found something, 2 misused, 130 interrupted. Words
may be lost, to a full disk or a pipe that nobody reads, and the command goes on. So may the data of `halfstep
train`, which are in the run's folder too: its exit code tells what became of the run alone (outcome.py).

The parser and every `--help` are derived from the signatures and docstrings of the commands; a command's module
imports what it needs when it runs, so that `halfstep --help` loads no framework and not even numpy.
"""

import sys

from cyclopts import App, CycloptsError, MissingArgumentError

from halfstep import __version__
from halfstep.cli import artifact, bench, data, formats, policy, probe, train
from halfstep.cli.main import interrupted
from halfstep.cli.output import leave, losing_words, print_error, print_failure
from halfstep.core.errors import HalfstepError

app = App(
    name="halfstep",
    version=__version__,
    help="Train transformers in half precision, and prove that nothing was lost.",
    suppress_keyboard_interrupt=False,  # it would leave without a word
)
app.command(train.train)
app.command(train.evaluate, name="eval")
app.command(train.sample)
app.command(artifact.artifact)
app.command(data.app)
app.command(probe.probe)
app.command(formats.formats)
app.command(policy.policy)
app.command(bench.bench)


def run(arguments: list[str]) -> int:
    """Runs the command line; the exit code comes back."""
    trains = arguments[:1] == ["train"]
    if trains and {"--help", "-h"} & set(arguments):
        app["train"].help_epilogue = train.settings()  # made when asked for: it reads the whole schema
    with losing_words(data=trains):
        return _run(arguments, trains)


def _run(arguments: list[str], trains: bool) -> int:
    try:
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        print_error(*_misused(error))
        return 2
    except (HalfstepError, OSError) as error:
        if isinstance(error, BrokenPipeError) and not trains:
            # Whoever read our output has seen enough; what is still buffered has nowhere to go.
            leave(sys.stdout)
            return 0
        print_failure(error)
        return 2
    except KeyboardInterrupt:
        return interrupted()
    return code if isinstance(code, int) else 0


def _misused(error: CycloptsError) -> tuple[str, str]:
    """What was given wrong, and what to do next; of what was not given, what it is."""
    command = " ".join(["halfstep", *(error.command_chain or ())])
    if not isinstance(error, MissingArgumentError) or error.argument is None or error.app is None:
        return _lower_first(str(error)), f"`{command} --help` says what can be given"
    name = error.argument.name
    known = {
        each.name: each.parameter.help for each in error.app.assemble_argument_collection(parse_docstring=True)
    }
    told = _lower_first((known.get(name) or "").removesuffix("."))
    said = f"{error.keyword} is given without a value" if error.keyword else f"`{command}` needs {name}"
    return said, f"{name}: {told}; `{command} --help` says more"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
