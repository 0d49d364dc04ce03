"""A callback of Lightning that audits the first updates of a run (halfstep/integrations/first_steps.py)."""

from typing import Any

import lightning

from halfstep.integrations.first_steps import FirstSteps


class AuditCallback(lightning.Callback):
    """Audits the first updates of any Trainer: `lightning.Trainer(callbacks=[AuditCallback()])`.

    It says on stderr what it found, and `findings` has it.
    """

    def __init__(self, steps: int | None = None):
        self.audit = FirstSteps(steps)

    @property
    def findings(self) -> list[Any]:
        """What was found, once the first updates are over."""
        return self.audit.findings

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to watch."""
        total = trainer.estimated_stepping_batches
        self.audit.begin(int(total) if total != float("inf") else 0)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Ends the watch after enough updates."""
        self.audit.look()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the watch of a short run."""
        self.audit.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the watch of a run that fails, and says what was seen until then."""
        self.audit.end()
