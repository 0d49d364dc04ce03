"""Errors that help: what was given, where, what is allowed, and as a hint what to do next.

Every mistake a user can make raises a `HalfstepError`. `assert` is for what cannot happen, so that `python -O`
changes nothing a user can see.
"""

import difflib
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Self

# Characters that move a cursor, change colors, reverse the text or end a line, and halves of surrogate pairs: what
# a file or an argument brings is shown by their escapes.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*_CONTROLS, *range(0xD800, 0xE000))}
_LINES_KEPT = {code: escape for code, escape in _ESCAPES.items() if chr(code) not in "\n\t"}
LONGEST, LONGEST_PART = 4000, 500  # characters of a message, and of a part of it in quotes
_LONG = f"{{{LONGEST_PART},}}"
_QUOTED = re.compile(rf"""`[^`]{_LONG}`|"[^"]{_LONG}"|'[^']{_LONG}'|\S{_LONG}""")


def printable(text: str, *, lines: bool = False) -> str:
    """Returns text that is safe to print: control characters are escaped, newlines and tabs unless `lines`."""
    return text.translate(_LINES_KEPT if lines else _ESCAPES)


def shortened(text: str, longest: int = LONGEST_PART) -> str:
    """Returns a text without its middle if it is long, and says how much of it is left out."""
    if len(text) <= longest:
        return text
    head, tail = longest // 2, longest // 4
    return f"{text[:head]}... ({len(text) - head - tail:,} more characters) ...{text[-tail:]}"


def as_message(text: str) -> str:
    """Returns a message as one printable line: what it quotes, and the whole of it, in reasonable length."""
    return shortened(_QUOTED.sub(lambda match: shortened(match[0]), printable(text)), LONGEST)


def code_of(name: str) -> str:
    """Returns the code of a family of errors by the name of its class: `policy-syntax` of `PolicySyntaxError`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name.removesuffix("Error")).lower()


# The packages that stand between a line of the user's and ours.
OURS = ("halfstep", "torch", "jax", "mlx")


class HalfstepError(Exception):
    """Something that a user gave cannot be used.

    `message` says what and where, `hint` what to do next. `code` names the family of the error: it stays the same
    from version to version, while the wording may change. A family is a class, and its code is the name of the
    class: `PolicySyntaxError` has the code `policy-syntax`.
    """

    code = "halfstep"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.code = code_of(cls.__name__)

    def __init__(self, message: str, *, hint: str | None = None):
        self.message = as_message(message)
        self.hint = None if hint is None else as_message(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} (hint: {self.hint})"

    def within(self, place: str) -> Self:
        """Returns the same error with `place` in front of the message."""
        return type(self)(f"{place}: {self.message}", hint=self.hint)


# Arguments, devices and packages


class ArgumentError(HalfstepError):
    """An argument of a function has a type or a value that it cannot have."""


class DeviceError(HalfstepError):
    """A device that does not exist here, or that halfstep does not know."""


class MissingPackageError(HalfstepError):
    """A package or a backend that is needed cannot be imported."""


class LoggerError(HalfstepError):
    """A logger that cannot start."""


# Models, optimizers and what they are called with


class UnsupportedModelError(HalfstepError):
    """A model that no policy can be given to: the form of a module or of a parameter is not supported."""


class AlreadyPreparedError(HalfstepError):
    """A model or an optimizer that halfstep or another library has prepared, wrapped or compiled before."""


class ModelChangedError(HalfstepError):
    """The parameters of a model were replaced, resized, cast or moved after the model was prepared."""


class UnsupportedOptimizerError(HalfstepError):
    """An optimizer whose steps a run cannot make, or that is not an optimizer."""


class OptimizerParametersError(HalfstepError):
    """The optimizers and the model do not hold the same parameters, or hold one of them twice."""


class SplitMasterError(HalfstepError):
    """A half of a split master was read, written to or replaced where the other half would be lost."""


class LossError(HalfstepError):
    """A loss, its weight or the arguments of a loss function are not what a step can use."""


class BatchError(HalfstepError):
    """Micro-batches have the wrong form, number, shape or device."""


class GradientsError(HalfstepError):
    """There are no gradients to update with, or they were changed, or their scale is not known."""


class RunStateError(HalfstepError):
    """A call that a run or a step cannot answer now: something has to come first, or it has ended."""


class UnsupportedTransformError(HalfstepError):
    """A second derivative, or a transform of the framework, that does not reach what halfstep computes."""


class CudaGraphError(HalfstepError):
    """A step that cannot be captured or repeated as a CUDA graph."""


class ReplayError(HalfstepError):
    """A step that cannot be run again in fp32 for comparison."""


class AutocastError(HalfstepError):
    """Something else would cast or scale as well: autocast, a GradScaler, or a framework's own precision."""


# Several processes, and states


class ParallelError(HalfstepError):
    """A way to train on several devices or processes that is not possible or not implemented."""


class RankError(HalfstepError):
    """The processes of one training differ, or one of them does not answer."""


class StateError(HalfstepError):
    """A saved state that is damaged, incomplete, or not of this run."""


# Formats and rounding


class FormatError(HalfstepError):
    """A number format that does not exist or cannot do what was asked."""


class UnknownFormatError(FormatError):
    """The name of a number format that does not exist, or that is not complete."""


class FormatDtypeError(FormatError):
    """A format has no dtype in the framework, or a dtype is not a format."""


class UnsupportedFormatError(FormatError):
    """A format that a layer or a device cannot compute in."""


class RoundingError(HalfstepError):
    """A cast that is impossible under the given rule."""


class CastInputError(RoundingError):
    """An array, a number or a rule given to a cast that it does not take."""


class RandomBitsError(RoundingError):
    """Stochastic rounding lacks its random bits, or they were given where none are used."""


class MissingAmaxError(RoundingError):
    """A delayed scale has no largest value of earlier steps to be computed from."""


class CastOverflowError(RoundingError):
    """A cast that must not round or overflow met a number that the format does not have."""


# Policies


class PolicyError(HalfstepError):
    """A policy that is misspelled, contradicts itself, or does not fit the model."""


class PolicySyntaxError(PolicyError):
    """A text or a table that does not read as a policy."""


class UnknownPresetError(PolicyError):
    """The name of a policy that is not a preset."""


class UnknownRoleError(PolicyError):
    """A role that policies do not have, or that cannot differ between modules."""


class RoleValueError(PolicyError):
    """A role was given a value that it cannot have."""


class PolicyConflictError(PolicyError):
    """Two parts of a policy, or a policy and a layer, contradict each other."""


class UnmatchedRuleError(PolicyError):
    """A rule that matches nothing in the model, or that changes nothing there."""


class UnsupportedRoleError(PolicyError):
    """A value of a role that this backend or this device cannot run."""


class PolicyFitError(PolicyError):
    """A policy that a parameter or a layer of this model cannot follow."""


class PolicyReachError(PolicyError):
    """An operation that the policy should change but does not reach, or that follows another policy."""


class DelayedScaleError(PolicyError):
    """Delayed scaling of an operand that has no scale of its own from one update to the next."""


class AutoPolicyError(PolicyError):
    """`auto` or `measured` where nothing can be measured."""


class LossFormatError(PolicyError):
    """The loss came out in another format than the policy says."""


class PolicyChangeError(PolicyError):
    """A policy that a run cannot change to, because what it has learned would be rounded or lost."""


# Loss scales


class ScalingError(HalfstepError):
    """A loss scale that cannot work."""


class ScaleValueError(ScalingError):
    """A loss scale, or one of its settings, has a value that it cannot have."""


class ScaleStateError(ScalingError):
    """A saved loss scale that the policy of the run does not have."""


class ScaleFloorError(ScalingError):
    """The gradients stay infinite or NaN although the loss scale has fallen as far as it may."""


# Settings, options and files


class ConfigError(HalfstepError):
    """A recipe, a configuration file or a `--set` that cannot be used."""


class UnknownSettingError(ConfigError):
    """A setting that does not exist, is missing, or is a section."""


class SettingValueError(ConfigError):
    """A setting has a type or a value that it cannot have."""


class SettingConflictError(ConfigError):
    """Two settings contradict each other, or one changes nothing beside the other."""


class SettingPolicyError(ConfigError):
    """A setting names a policy that cannot be used."""


class UnknownRecipeError(ConfigError):
    """A recipe or a machine that does not exist."""


class ConfigFileError(ConfigError):
    """A file of settings or of a machine that does not exist, cannot be read, or lacks what is needed."""


class OptionError(ConfigError):
    """An option of the command line that is empty, has a wrong value, or changes nothing."""


class TargetError(ConfigError):
    """What a command was to work on does not exist, or is not what the command takes."""


class FactoryError(ConfigError):
    """A factory that cannot be imported or called, or that returns something else than is needed."""


class StudyError(ConfigError):
    """A search for formats that cannot begin, or whose folder holds another one."""


class RunFolderError(ConfigError):
    """A folder that holds no run, holds another run, or cannot be written to."""


class ResumeError(ConfigError):
    """A run that cannot continue with these settings, on this backend or from this checkpoint."""


def one_of(names: Iterable[str]) -> str:
    """`a, b or c`, each in backquotes."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def type_name(given: object) -> str:
    """Says what was given: a `dict`, or the class `AdamW`, which is a mistake of its own."""
    return f"the class `{given.__name__}`" if isinstance(given, type) else f"a `{type(given).__name__}`"


def nearest(name: str, legal: Iterable[str]) -> str | None:
    """Returns the legal name that a typo was probably meant to be, or None if nothing is close."""
    if len(name) > LONGEST_PART:
        return None  # nobody typed it, and comparing takes the product of the lengths
    # 0.6 is difflib's own cutoff; it accepts one or two slips in a word of five letters or more.
    matches = difflib.get_close_matches(name, list(legal), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, legal: Iterable[str], otherwise: str | None = None) -> str | None:
    """Returns a hint for a name that is not legal."""
    match = nearest(name, legal)
    return f"did you mean `{match}`?" if match else otherwise


def warn_caller(message: str) -> None:
    """Warns at the line of the user's own code that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def warn_renamed(old: str, new: str) -> None:
    """Warns at the line of the user's own code that uses a name from before."""
    warn_caller(f"`{old}` is called `{new}` now; the old name will be removed in the next version")


def how_to_install(extra: str, options: str = "") -> str:
    """Returns the hint for a package that an extra of halfstep brings: halfstep itself is on no index."""
    return f"in the checkout of halfstep, run: pip install {options}'.[{extra}]'"


def explain_missing(load: Callable[[str], Any], package: str, *frameworks: str) -> Callable[[str], Any]:
    """Wraps a backend's `__getattr__`: without its framework, the error names the extra to install."""

    def load_or_explain(name: str) -> Any:
        try:
            return load(name)
        except ImportError:
            for framework in frameworks:
                try:
                    import_module(framework)
                except ImportError as error:  # it is missing, or it is there without the library of a device
                    needed = framework.partition(".")[0]
                    raise MissingPackageError(
                        f"`{package}.{name}` needs {needed}, which cannot be imported: {error}",
                        hint=how_to_install(package.rpartition(".")[2]),
                    ) from error
            raise

    return load_or_explain
