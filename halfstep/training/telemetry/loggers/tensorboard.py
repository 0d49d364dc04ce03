"""TensorBoard: event files in RUN/tensorboard, by the package's own writer, which loads no framework.

A resumed session writes another file, which begins with a mark that voids what was written of later steps.
TensorBoard then shows each step once, as it was taken last.
"""

import time
from collections.abc import Mapping

from halfstep.training.telemetry.loggers import Logger, Where

SECONDS_BETWEEN_FLUSHES = 10.0


class TensorBoard(Logger):
    """One event file."""

    def __init__(self, where: Where):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._session_log = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        self._writer = EventFileWriter(str(where.folder / "tensorboard"))
        self._flushed = time.monotonic()
        if where.resumed_from is not None:
            self.rolled_back(where.resumed_from)

    def curve(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time, step=step, summary=self._summary(value=points)))
        self._flush_now_and_then()

    def rolled_back(self, step: int) -> None:
        """Voids what was written of later steps."""
        mark = self._session_log(status=self._session_log.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step + 1, session_log=mark))

    def close(self, totals: Mapping[str, float], *, failed: bool) -> None:
        """Writes the rest."""
        self._writer.close()

    def _flush_now_and_then(self) -> None:
        """A kill loses what was not flushed; flushing every step would wait for the disk."""
        if time.monotonic() - self._flushed >= SECONDS_BETWEEN_FLUSHES:
            self._writer.flush()
            self._flushed = time.monotonic()


open_logger = TensorBoard
