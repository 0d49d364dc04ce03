"""Updates that an audit makes, counts and takes back."""

from typing import Any

from halfstep.core.audit.record import Record
from halfstep.mlx.collect.weights import PART, counts_of, finite_or_none
from halfstep.mlx.observe.updates import UpdateNumbers


def audit_updates(run: Any, record: Record, loss_fn: Any, batch: Any, steps: int) -> None:
    """Makes `steps` updates of a run, adds to the record what each weight lost, and restores the run."""
    saved, record.updates = run.state_dict(), steps
    weights = {weight.name: weight for weight in record.weights if weight.name in run.masters.places}
    try:
        for _ in range(steps):
            numbers = UpdateNumbers([list(weights)], PART)
            run.measure_next(numbers)
            result = run.step(loss_fn, [batch])
            record.losses.append(finite_or_none(result.loss))
            for name, update in numbers.updates.items() if not result.skipped.item() else ():
                counts = counts_of(update, str(run.masters.held[name].format))
                before = weights[name].updates
                weights[name].updates = counts if before is None else before.merge(counts)
    finally:
        run.load_state_dict(saved)
