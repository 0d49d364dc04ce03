"""What made a step that is not finite: the first operation whose inputs were finite and whose output was not."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Cause:
    """Where a NaN or an infinity came from, as far as it is known.

    The passes need different cures: the loss scale acts on gradients alone, and an activation beyond the format's
    range is beyond it at every scale. A reduction sums what each micro-batch, or each rank, computed.
    """

    where: Literal["forward", "backward", "reduction", "nowhere"]
    what: str
    module: str = ""  # the qualified name to write a rule for, where there is one
    operation: str = ""  # as the framework names it; empty if only the module is known
    micro_batch: int | None = None  # counted from 0, of those of the rank
    rank: int | None = None  # of several processes, the first that has such a tensor
    loss_alone: bool = False  # whether all gradients are finite, and the loss is not

    def __str__(self) -> str:
        if self.where == "nowhere":
            return self.what
        made = f"; made by `{self.operation}`" if self.operation else ""
        alone = "; the loss was not finite, its gradients were" if self.loss_alone else ""
        return f"{'' if self.rank is None else f'rank {self.rank}: '}{self.where}: {self.what}{made}{alone}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of a `cause` event; what is not known is None."""
        return {
            "pass": None if self.where == "nowhere" else self.where,
            "operation": self.operation or None,
            "module": self.module or None,
            "micro_batch": self.micro_batch,
            "rank": self.rank,
            "message": str(self),
        }
