"""`halfstep`: the commands, how their errors look, and what the exit code means.

Data goes to stdout and messages to stderr; with `--json` an error is data too, with its code. Exit codes: 0
success, 1 found a problem, 2 wrong usage, 130 interrupted. If a full disk or a closed pipe refuses messages, they
are lost and the command continues.

The parser and every `--help` are derived from the signatures and docstrings of the commands. A command's module
imports what it needs when it runs, so that `halfstep --help` loads no framework, not even numpy.
"""

import sys
import warnings
from itertools import pairwise, takewhile
from typing import Any

import cyclopts
from cyclopts import App, CoercionError, CycloptsError, Parameter

from halfstep import __version__
from halfstep.cli import audit, compare, data, export, plan, policy, probe, runs, train, trained, tune
from halfstep.cli.output import discard, drop_refused_output, print_error, print_failure
from halfstep.core.errors import HalfstepError, OptionError


def _check_number(_: Any, value: Any) -> None:
    """Refuses a number so long that Python does not print it, which an error about it would have to."""
    if isinstance(value, int) and abs(value) >= 2**256:
        raise OptionError(
            "a number among the arguments has more than 256 bits", hint="no option takes as many as 64"
        )


app = App(
    name="halfstep",
    default_parameter=Parameter(validator=_check_number),
    version=__version__,
    help="Train transformers in half precision, and prove that nothing was lost.",
    suppress_keyboard_interrupt=False,  # main.py reports Ctrl-C; this would exit silently
)
app.command(train.train)
app.command(trained.evaluate, name="eval")
app.command(trained.sample)
app.command(export.export)
app.command(export.artifact)
app.command(data.app)
app.command(probe.probe)
app.command(plan.plan)
app.command(policy.formats)
app.command(policy.policy)
app.command(runs.runs)
app.command(runs.watch)
app.command(runs.report)
app.command(audit.audit)
app.command(compare.compare)
app.command(tune.tune)


# Commands that are gone, and where to find what they did.
MOVED = {"bench": "the race is a script of the repository: run `python benchmarks/race/bench.py` in a clone of it"}
# What an option that a command lacks is as a setting.
SETTINGS = {"train": train.as_setting, "probe": probe.as_size}


def run(arguments: list[str]) -> int:
    """Runs the command line and returns its exit code."""
    trains = arguments[:1] == ["train"]
    with drop_refused_output(stdout=trains), warnings.catch_warnings():
        # torch's trace of a CPU without bf16 instructions, about which we warn in one line.
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        # A block returns a view of its values, which nothing changes in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        # Its new name came with torch 2.13, and 2.11 works too.
        warnings.filterwarnings("ignore", ".*all_gather_into_tensor. is deprecated")
        return _run(arguments, trains)


def _run(arguments: list[str], trains: bool) -> int:
    json = "--json" in takewhile(lambda argument: argument != "--", arguments)
    try:
        if arguments and arguments[0] in MOVED:
            raise OptionError(f"`halfstep {arguments[0]}` is no command anymore", hint=MOVED[arguments[0]])
        _check_empty(arguments)
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        print_error(*_explain(error, arguments), code="usage", json=json)
        return 2
    except (HalfstepError, OSError) as error:
        if isinstance(error, BrokenPipeError) and not trains:
            # The reader of our output has seen enough (`| head`); the rest has nowhere to go.
            discard(sys.stdout)
            return 0
        print_failure(error, json=json)
        return 2
    return code if isinstance(code, int) else 0


def _check_empty(arguments: list[str]) -> None:
    """Refuses an empty argument, which usually is an unset shell variable. A prompt may be empty."""
    for option, value in pairwise(["", *arguments]):
        name, equals, given = value.partition("=")
        if not value or (name.startswith("--") and equals and not given):
            option = name or option
            if option != "--prompt":
                what = option if option.startswith("--") else "an argument"
                raise OptionError(f"{what} is empty", hint="is a variable not set? The current folder is `.`")


def _explain(error: CycloptsError, arguments: list[str]) -> tuple[str, str]:
    """Returns what is wrong on the command line and what to do; for a missing argument, what it means."""
    command = " ".join(["halfstep", *(error.command_chain or ())])
    if isinstance(error, cyclopts.UnusedCliTokensError) and error.unused_tokens:
        return f"`{error.unused_tokens[0]}` is one argument too many", f"see `{command} --help`"
    if isinstance(error, cyclopts.UnknownOptionError) and arguments[0] in SETTINGS:
        option = error.token.keyword or error.token.value or ""
        if hint := SETTINGS[arguments[0]](option, arguments):
            return f"unknown option: {option}", hint
    if isinstance(error, CoercionError) and (hint := _option_with(error)):
        return _lower_first(str(error)), hint
    if not isinstance(error, cyclopts.MissingArgumentError) or error.argument is None or error.app is None:
        return _lower_first(str(error)), f"see `{command} --help`"
    name = error.argument.name
    known = {
        each.name: each.parameter.help for each in error.app.assemble_argument_collection(parse_docstring=True)
    }
    meaning = _lower_first(" ".join((known.get(name) or "").split()).removesuffix("."))
    problem = f"{error.keyword} needs a value" if error.keyword else f"`{command}` needs {name}"
    return problem, f"{name} is {meaning}; see `{command} --help`"


def _option_with(error: CoercionError) -> str:
    """Returns how a value is written that the option takes in small letters, or that another option takes."""
    if error.token is None or error.argument is None or error.app is None:
        return ""
    value = error.token.value.lower()
    options = [error.argument, *error.app.assemble_argument_collection()]
    names = [option.name for option in options if value in (option.get_choices() or ())]
    return f"write `{names[0]} {value}`" if names else ""


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
