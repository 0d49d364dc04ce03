"""Weights & Biases: files in RUN/wandb, which `wandb sync` sends; or a server, if the environment says so.

Offline unless `WANDB_MODE` names another mode: a run uses the network only if its user asked for it. The x axis of
the curves is our own `step`: W&B's counter refuses to go back, and would drop the steps that are taken again after
a kill. Those are there twice.
"""

import os
from collections.abc import Mapping
from typing import Any

from halfstep.training.telemetry.loggers import Logger, Where

PROJECT = "halfstep"


class WandB(Logger):
    """One session of a run."""

    def __init__(self, where: Where):
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=where.id,
            name=where.folder.resolve().name,
            dir=str(where.folder),
            mode=mode,
            # Offline nobody knows whether the run exists.
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(console="off", silent=True),  # what we print is ours to keep
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def start(self, event: Mapping[str, Any]) -> None:
        """Records the settings."""
        self._run.config.update(dict(event["config"]), allow_val_change=True)

    def curve(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        self._run.log({"step": step, **values})

    def close(self, totals: Mapping[str, float], *, failed: bool) -> None:
        """Records the totals, and ends the run."""
        self._run.summary.update(dict(totals))
        self._run.finish(exit_code=1 if failed else 0)


open_logger = WandB
