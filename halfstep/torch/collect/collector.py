"""What a part of the audit must offer to be called while a script trains."""

from collections.abc import Mapping

from torch.nn import Module
from torch.optim import Optimizer

from halfstep.core.audit.record import Record


class Collector:
    """Sees something of a training and fills a part of the record; every method may be left out.

    None of them may change a number, draw from a random generator, or talk to other ranks. On a GPU `before_step`
    and `after_step` may wait for the device: they are called on a few updates only, so that together they take a
    small share of the script's time.
    """

    def install(self) -> None:
        """Called when torch has just been imported, before any model exists."""

    def start(self, models: Mapping[str, Module]) -> None:
        """Called before the first backward pass with the models that optimizers step, by name; usually one, "".

        Called again with all of them when an optimizer of another model appears.
        """

    def before_step(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Called right before an optimizer's step; `names` has the name of a parameter by its id."""

    def after_step(self, optimizer: Optimizer, names: Mapping[int, str], skipped: bool) -> None:
        """Called right after it, if `before_step` was. A skipped step has left every weight as it was."""

    def fill(self, record: Record) -> None:
        """Adds what was seen; called at the end, and sometimes earlier. Weights and buffers are there already."""

    def stop(self) -> None:
        """Takes away every hook."""
