"""The audit of a prepared run: its formats are those of its policy, which its layers do not leave."""

from typing import Any

from mlx.nn.layers.base import Module

from halfstep.core.audit.record import Operation, Record, finite_or_none
from halfstep.mlx.convert.places import walk
from halfstep.mlx.instruments.collect.updates import PART, UpdateNumbers, count_update, describe_weights
from halfstep.mlx.instruments.monitor import layer_kind, layer_precision


def prepared_record(run: Any) -> Record:
    """Returns what is known without a step."""
    policy, masters = run.policy, run.masters
    record = Record("prepared", framework="mlx", policy=str(policy))
    record.weights, record.buffers = describe_weights(run.model, run.optimizers)
    for weight in record.weights:
        if weight.name in masters.held:
            held = masters.held[weight.name]
            weight.master, weight.stochastic = str(held.format), held.stochastic
    compute, loss = str(policy.compute.format), str(policy.loss)
    record.operations = [
        *_layers(run.model),
        Operation("", "softmax", [compute], [compute], str(policy.softmax), count=1),
        Operation("", "loss", [loss], [loss], loss, count=1),
    ]
    return record


def audit_updates(run: Any, record: Record, loss_fn: Any, batch: Any, steps: int) -> None:
    """Makes `steps` updates of a run, adds to the record what each weight lost, and restores the run."""
    saved, record.updates = run.state_dict(), steps
    weights = {weight.name: weight for weight in record.weights if weight.name in run.masters.places}
    try:
        for _ in range(steps):
            numbers = UpdateNumbers([list(weights)], PART)
            run.watch_update(numbers)
            result = run.step(loss_fn, [batch])
            record.losses.append(finite_or_none(result.loss))
            for name, update in numbers.updates.items() if not result.skipped.item() else ():
                counts = count_update(update, str(run.masters.held[name].format))
                before = weights[name].updates
                weights[name].updates = counts if before is None else before.merge(counts)
    finally:
        run.load_state_dict(saved)


def _layers(model: Module) -> list[Operation]:
    operations = []
    for name, module in walk(model):
        kind = layer_kind(module)
        if kind in ("norm", "matmul"):
            precision = layer_precision(module)
            inside = precision.norm if kind == "norm" else precision.operand.format
            compute = str(precision.compute)
            formats = [compute, *(["fp32"] if kind == "norm" else [])]  # a gain
            operations.append(Operation(name, kind, formats, [compute], str(inside), count=1))  # type: ignore[arg-type]
    return operations
