"""Keeps an error of the collector away from the script that it watches.

The first error is reported and ends the watching: from then on every hook calls torch and does nothing else. What
the script itself raises passes through, and so does `SystemExit`, by which an audit ends it.
"""

import traceback
from collections.abc import Callable
from functools import wraps
from types import GeneratorType
from typing import Any

import torch

# Arguments that can be read once only, such as `filter(..., model.parameters())`: a hook may have read them.
_ONCE = (GeneratorType, filter, map, zip)


class Guard:
    """The state of a watch: `failure` says what ended it. `on_failure` is told once."""

    def __init__(self, on_failure: Callable[[str], None] = lambda failure: None):
        self.failure: str | None = None
        self.on_failure = on_failure

    def fail(self, error: Exception) -> None:
        """Ends the watching."""
        if self.failure is None:
            self.failure = describe(error)
            self.on_failure(self.failure)

    def call(self, around: Callable[..., Any], original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns `around(original, *args, **kwargs)`, or what `original` alone returns if `around` fails."""
        args = tuple(list(each) if isinstance(each, _ONCE) else each for each in args)
        kwargs = {name: list(each) if isinstance(each, _ONCE) else each for name, each in kwargs.items()}
        returned: list[Any] = []
        raised: list[BaseException] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                returned.append(original(*args, **kwargs))
            except BaseException as error:
                raised.append(error)
                raise
            return returned[-1]

        try:
            return around(run, *args, **kwargs)
        except Exception as error:
            if raised and error is raised[-1]:
                raise
            self.fail(error)
            if raised:
                raise raised[-1] from None
            return returned[-1] if returned else original(*args, **kwargs)
        finally:
            raised.clear()  # its traceback holds this frame, and with it the script's tensors

    def hook(self, function: Callable[..., None]) -> Callable[..., None]:
        """Returns a hook of torch's that does nothing once anything has failed."""

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            if self.failure is None and not torch.compiler.is_compiling():
                try:
                    function(*args, **kwargs)
                except Exception as error:
                    self.fail(error)

        return guarded


class Unguarded(Guard):
    """Keeps nothing away: errors are raised."""

    def fail(self, error: Exception) -> None:
        """Raises the error."""
        raise error

    def call(self, around: Callable[..., Any], original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns what `around` returns."""
        return around(original, *args, **kwargs)

    def hook(self, function: Callable[..., None]) -> Callable[..., None]:
        """Returns the hook."""
        return function


def describe(error: Exception) -> str:
    """Returns an error in a line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}{at}"
