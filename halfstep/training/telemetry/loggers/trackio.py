"""trackio: a local database that its dashboard shows, or a Hugging Face Space.

Trackio's own variables decide where it goes: `TRACKIO_DIR`, `TRACKIO_SPACE_ID`, `TRACKIO_SERVER_URL`. A run is
named by its folder and its id. A resumed session adds to the run of that name; steps that are taken again are
there twice. trackio writes in a thread and reports its own failures without raising them.
"""

import math
from collections.abc import Mapping
from typing import Any

from halfstep.training.telemetry.loggers import Logger, Where

PROJECT = "halfstep"


class Trackio(Logger):
    """One run."""

    def __init__(self, where: Where):
        import trackio

        self._trackio, self._name = trackio, f"{where.folder.resolve().name}-{where.id}"
        self._run: Any = None

    def start(self, event: Mapping[str, Any]) -> None:
        """Begins, with the settings."""
        # The machine's own meters cost a thread each, and events have what matters.
        off = dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
        config = dict(event["config"])
        self._run = self._trackio.init(project=PROJECT, name=self._name, resume="allow", config=config, **off)

    def curve(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Adds a point to each curve; trackio takes only finite ones."""
        self._run.log({name: value for name, value in values.items() if math.isfinite(value)}, step=step)

    def close(self, totals: Mapping[str, float], *, failed: bool) -> None:
        """Waits until all is written."""
        if self._run is not None:
            self._trackio.finish()


open_logger = Trackio
