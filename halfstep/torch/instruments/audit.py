"""A prepared run as an audit records it: what its policy makes of the model, and what its optimizers hold."""

from halfstep.core.audit.record import Operation, Record
from halfstep.core.formats import Format
from halfstep.core.roles import Param
from halfstep.torch.instruments.collect.weights import buffers_of, weights_of
from halfstep.torch.update.parts import RunParts


def record_of(run: RunParts) -> Record:
    """Returns what can be seen of a run between two steps; nothing is run, and nothing is read from the device."""
    record = Record("prepared", policy=str(run.policy))
    record.weights, record.buffers = weights_of(run.model, run.optimizers), buffers_of(run.model)
    modules = {name: type(module).__name__ for name, module in run.model.named_modules()}
    resolved = run.policy.resolve([*modules, *(w.name for w in record.weights)])
    for weight in record.weights:
        owner = weight.name.rpartition(".")[0] or weight.name
        param = resolved[owner].values["param"]
        weight.stochastic = isinstance(param, Param) and param.stochastic
    for name, kind in modules.items():
        if "norm" in kind.lower() and isinstance(fmt := resolved[name].values["norm"], Format):
            record.operations.append(Operation(name, "norm", inside=str(fmt)))
    record.operations.append(Operation("", "loss", inside=str(run.policy.loss), outputs=[str(run.policy.loss)]))
    record.unseen.append("steps: `halfstep audit -- python ...` watches them, and run.monitor() every layer")
    return record
