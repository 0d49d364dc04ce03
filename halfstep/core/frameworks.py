"""A framework is optional: a backend's public names load it when they are used, and say how to install it."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from halfstep.core.errors import HalfstepError


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
                    raise HalfstepError(
                        f"`{package}.{name}` needs {needed}, which cannot be imported: {error}",
                        hint=f"pip install 'halfstep[{package.rpartition('.')[2]}]'",
                    ) from error
            raise

    return load_or_explain
