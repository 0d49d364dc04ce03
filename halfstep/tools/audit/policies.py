"""What a policy makes of one of our models, as an audit records it: nothing has to run for it."""

from halfstep.config.groups import parameter_groups
from halfstep.config.model import module_names, owner, parameter_shapes
from halfstep.config.run import RunConfig
from halfstep.core.audit.kinds import weight_kind
from halfstep.core.audit.record import Buffer, Operation, Record, Weight
from halfstep.core.policy import Policy
from halfstep.core.roles import Operand, Param
from halfstep.core.rules import Resolved


def fill(record: Record, policy: Policy, config: RunConfig) -> Record:
    """Adds the weights, buffers and operations of a run under a policy."""
    names = [*dict.fromkeys([*module_names(config.model), *map(owner, parameter_shapes(config.model))])]
    resolved = policy.resolve(names)
    groups = parameter_groups(config.model, config.optimizer)
    optimizer = {name: "Muon" if group.muon else "AdamW" for group in groups for name in group.names}
    record.policy = str(policy)
    record.weights = [
        _weight(name, shape, resolved[owner(name)], optimizer[name])
        for name, shape in parameter_shapes(config.model).items()
    ]
    record.operations = _operations(policy, resolved)
    if config.model.positions == "rotary":
        record.buffers = [Buffer("rope", str(policy.rope), "rope")]
    return record


def _weight(name: str, shape: tuple[int, ...], at: Resolved, optimizer: str) -> Weight:
    param, compute = at.values["param"], at.values["compute"]
    assert isinstance(param, Param)
    assert isinstance(compute, Operand)
    kind = weight_kind(name, shape)
    return Weight(
        name=name,
        format=str(compute.format),
        shape=list(shape),
        kind=kind,
        optimizer=optimizer,
        master=str(param.format),
        moments={"moments": str(at.values["moments"])},
        stochastic=param.stochastic,
        grad_format=str(at.values["grad_weight"]),
    )


def _operations(policy: Policy, resolved: dict[str, Resolved]) -> list[Operation]:
    found = []
    for name, at in resolved.items():
        outside = str(at.values["compute"].format)  # type: ignore[union-attr]
        for kind, ending in (("norm", "norm"), ("softmax", ".attn")):
            if name.endswith(ending):
                inside = str(at.values[kind])
                found.append(Operation(name, kind, [outside], [outside], inside))  # type: ignore[arg-type]
    return [*found, Operation("", "loss", [str(policy.compute.format)], [str(policy.loss)], str(policy.loss))]
