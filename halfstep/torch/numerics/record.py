"""What a prepared model remembers of each of its modules: one record, in the attribute `halfstep`.

A record is replaced and never written to, so a shallow copy of a module keeps what it had. `copy.deepcopy` copies
the tensors in it, and shares the rest. `unprepare` removes it.
"""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn


@dataclass(eq=False)
class ModuleRecord:
    """What halfstep knows about a module, beside what the module has itself."""

    has_split: bool = False  # some parameters of the model are split masters
    lean: bool = False  # the functions that its own code calls are computed again if that is cheap
    # modules that run their own forward (convert/modules.py: Island, Leaf, Code)
    casts: Any = None  # a `Casts`
    role: str = ""  # of an island
    # It has fp32 parameters, which many torch functions refuse to combine with anything narrower.
    widen: bool = False
    mode: Any = None  # a `PolicyMode`, for the functions that its own code calls
    # the model itself (Root)
    model_casts: Any = None
    model_mode: Any = None
    prepared: Any = None  # True, or the integration that prepared it
    averaged: tuple[str, ...] = ()  # parameters whose gradients DDP leaves to the run (parallel/ranks.py)
    # layers
    recomputed: bool = False  # the backward pass computes cheap results again instead of keeping them
    history: Any = None  # a `History` of delayed operands
    loss_casts: Any = None  # of a head: how compiled code computes its loss, if not by `casts` (fp8_choice.py)
    remainders: dict[str, Tensor] = field(default_factory=dict)  # of split masters, by the parameter's name

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleRecord":
        history, remainders = copy.deepcopy((self.history, self.remainders), memo)
        return replace(self, history=history, remainders=remainders)


EMPTY = ModuleRecord()


def record_of(module: nn.Module) -> ModuleRecord:
    """Returns the record of a module; that of a module without a policy is empty."""
    return module.__dict__.get("halfstep", EMPTY)


def update_record(module: nn.Module, **changes: Any) -> None:
    """Gives a module a record with some fields changed."""
    module.__dict__["halfstep"] = replace(record_of(module), **changes)
