"""trackio: a local database that its dashboard shows, or a Hugging Face Space.

Where it goes is trackio's own matter and that of its variables: `TRACKIO_DIR` (a folder of the user's cache
without it), `TRACKIO_SPACE_ID`, `TRACKIO_SERVER_URL`. The project is `halfstep`; a run is named by its folder
and its id. A session that goes on adds to the run of that name; steps that are taken again are there twice.

trackio writes in a thread and tells of its own failures without raising them.
"""

from collections.abc import Mapping
from typing import Any, final

from halfstep.training.telemetry.loggers import Where, finite

PROJECT = "halfstep"


def open_logger(where: Where) -> "Trackio":
    """The run of that name, new or gone on with."""
    return Trackio(where)


@final
class Trackio:
    """One run."""

    def __init__(self, where: Where):
        import trackio

        self._trackio, self._name = trackio, f"{where.folder.resolve().name}-{where.id}"
        self._run: Any = None

    def start(self, event: Mapping[str, Any]) -> None:
        """Begins, with the settings."""
        # The machine's own meters cost a thread each, and events have what counts.
        self._run = self._trackio.init(
            project=PROJECT,
            name=self._name,
            resume="allow",
            config=dict(event["config"]),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def curve(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """A point of each curve; trackio has none that are not finite."""
        self._run.log(finite(values), step=step)

    def went_back(self, step: int) -> None:
        """Nothing can be taken back."""

    def close(self, totals: Mapping[str, float], *, failed: bool) -> None:
        """Waits until all is written."""
        if self._run is not None:
            self._trackio.finish()
