"""Watches whatever trains in this process, by hooks that every torch script runs through.

    with Watch() as watch:
        train()
    record = watch.record()

No number of the script changes. Outside the `with` block nothing of it is left in torch.
"""

from collections.abc import Callable, Sequence

from halfstep.core.audit.record import Record
from halfstep.torch.collect import other_hooks, scaler_hooks, step_hooks
from halfstep.torch.collect.collector import Collector
from halfstep.torch.collect.formats import Formats
from halfstep.torch.collect.patches import Patches
from halfstep.torch.collect.seen import SHARE, Seen

# What sees more than the order of calls: each is made anew for a watch.
COLLECTORS: tuple[Callable[[], Collector], ...] = (Formats,)


class Watch:
    """The hooks, from `with` to its end.

    `end` is called at the beginning of update number `steps` + 1, `counted` after each update.
    """

    def __init__(
        self,
        collectors: Sequence[Collector] | None = None,
        *,
        steps: int | None = None,
        end: Callable[[], None] = lambda: None,
        counted: Callable[[int], None] = lambda updates: None,
        share: float = SHARE,
    ):
        chosen = [make() for make in COLLECTORS] if collectors is None else collectors
        self.seen = Seen(chosen, steps=steps, end=end, counted=counted, share=share)
        self.patches = Patches()

    def __enter__(self) -> "Watch":
        for collector in self.seen.collectors:
            collector.install()
        for hooks in (step_hooks, scaler_hooks, other_hooks):
            hooks.install(self.seen, self.patches)
        return self

    def __exit__(self, *_: object) -> None:
        self.patches.undo()
        for collector in self.seen.collectors:
            collector.stop()

    def record(self) -> Record:
        """Returns what was seen so far."""
        return self.seen.record()
