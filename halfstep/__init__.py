"""halfstep trains transformers in half precision and proves that nothing was lost.

Importing it imports no framework: each public name is loaded when it is used. The backends are
`halfstep.torch`, `halfstep.jax` and `halfstep.mlx`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from halfstep.core.choice import Choice as Choice
    from halfstep.core.choice import choose as choose
    from halfstep.core.errors import HalfstepError as HalfstepError
    from halfstep.core.formats import Format as Format
    from halfstep.core.policy import Policy as Policy
    from halfstep.core.rounding import cast as cast
    from halfstep.core.stats import TensorStats as TensorStats
    from halfstep.training.weights.decoders import load_model as load_model

_HOMES = {
    "Choice": "halfstep.core.choice",
    "Format": "halfstep.core.formats",
    "HalfstepError": "halfstep.core.errors",
    "Policy": "halfstep.core.policy",
    "TensorStats": "halfstep.core.stats",
    "cast": "halfstep.core.rounding",
    "choose": "halfstep.core.choice",
    "load_model": "halfstep.training.weights.decoders",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
