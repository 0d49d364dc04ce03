"""What a prepared run is known to be: its formats are those of its policy, which its layers do not leave."""

from collections.abc import Sequence

from mlx.nn.layers.base import Module

from halfstep.core.audit.record import Operation, Record
from halfstep.core.policy import Policy
from halfstep.mlx.apply import walk
from halfstep.mlx.collect.weights import weights_of
from halfstep.mlx.observe.monitor import layer_kind, precision_of
from halfstep.mlx.optim.masters import Masters
from halfstep.mlx.optim.optimizers import Optimizer


def prepared_record(model: Module, masters: Masters, optimizers: Sequence[Optimizer]) -> Record:
    """Returns what is known without a step."""
    policy = masters.policy
    record = Record("prepared", framework="mlx", policy=str(policy))
    record.weights, record.buffers = weights_of(model, optimizers)
    for weight in record.weights:
        if weight.name in masters.held:
            held = masters.held[weight.name]
            weight.master, weight.stochastic = str(held.format), held.stochastic
    record.operations = [*_layers(model), *_functions(policy)]
    return record


def _layers(model: Module) -> list[Operation]:
    operations = []
    for name, module in walk(model):
        kind = layer_kind(module)
        if kind in ("norm", "matmul"):
            precision = precision_of(module)
            inside = precision.norm if kind == "norm" else precision.operand.format
            gain = ["fp32"] if kind == "norm" else []
            formats = [str(precision.compute), *gain]
            operations.append(
                Operation(name, kind, formats, [str(precision.compute)], str(inside), count=1)  # type: ignore[arg-type]
            )
    return operations


def _functions(policy: Policy) -> list[Operation]:
    compute, loss = str(policy.compute.format), str(policy.loss)
    return [
        Operation("", "softmax", [compute], [compute], str(policy.softmax), count=1),
        Operation("", "loss", [loss], [loss], loss, count=1),
    ]
