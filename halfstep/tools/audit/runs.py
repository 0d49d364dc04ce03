"""Run folders and checkpoints of halfstep, as an audit records them: manifests, events, and where tensors are.

A folder may be incomplete, or be written while it is read. What is missing is said in `unseen`; a checkpoint that
is not whole is a fact for the rules. Only what a newer halfstep wrote is an error: nothing of it can be judged.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from halfstep.config.groups import parameter_groups
from halfstep.config.load import load
from halfstep.config.model import module_names, owner, parameter_shapes
from halfstep.config.run import RunConfig
from halfstep.config.schema import build
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.record import (
    Buffer,
    CheckpointFacts,
    Operation,
    OperationKind,
    Record,
    Weight,
    weight_kind,
)
from halfstep.core.errors import ConfigError, HalfstepError
from halfstep.core.policy import Policy, read
from halfstep.core.roles import Operand, Param
from halfstep.core.rules import Resolved
from halfstep.tools.audit.files import Contents
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.tensors import CheckpointError, DamagedCheckpointError
from halfstep.training.paths import CHECKPOINTS, CONFIG, EVENTS
from halfstep.training.telemetry.events import EventsError, stream_events
from halfstep.training.weights.disk import FORMATS, DiskTensor, safetensor
from halfstep.training.weights.safetensors import open_file

CHOICES = ("fp32", "bf16-mixed", "fp16-mixed")  # what `auto` chooses among, by measuring


def of_recipe(name: str) -> list[Record]:
    """Returns the record of a recipe; one for each precision that `auto` may choose, and that takes over later."""
    config = load(name)
    spelling = read(config.policy)
    chosen = [Policy.parse(each) for each in CHOICES] if spelling.base == "auto" else [None]
    policies = [spelling.build(auto) for auto in chosen]
    policies += [Policy.parse(entry.policy) for entry in config.schedule]
    return [fill(Record("recipe"), policy, config) for policy in policies]


def of_run(folder: Path) -> tuple[Record, list[Finding]]:
    """Returns the record of a run folder, and the findings that the run itself has written down."""
    record, found = Record("run"), list[Finding]()
    events = _events(folder, record)
    for path in checkpoint.step_folders(folder / CHECKPOINTS):
        if path.exists():  # retention may remove one meanwhile
            record.checkpoints.append(facts_of(path))
    config, policy = _settings(folder, events, record)
    if config is not None and policy is not None:
        fill(record, policy, config)
    _read_events(events, record, found)
    return record, found


def of_checkpoint(path: Path) -> Record:
    """Returns the record of one of our checkpoints."""
    record = Record("checkpoint", checkpoints=[facts_of(path)])
    if record.checkpoints[0].complete:
        manifest = checkpoint.read_manifest(path)
        try:
            config, policy = build(RunConfig, manifest["config"]), Policy.parse(manifest["policy"])
        except (HalfstepError, KeyError) as error:
            record.unseen.append(f"the settings of the checkpoint cannot be read: {error}")
        else:
            fill(record, policy, config)
    return record


def facts_of(path: Path) -> CheckpointFacts:
    """Returns what one of our checkpoints holds; refuses one that a newer halfstep wrote."""
    try:
        manifest = checkpoint.check_complete(path)
    except (DamagedCheckpointError, FileNotFoundError) as error:
        problem = error.message if isinstance(error, HalfstepError) else "a file is missing"
        named = path.name.removeprefix("step-")
        return CheckpointFacts(str(path), int(named) if named.isdigit() else None, complete=False, problem=problem)
    except CheckpointError as error:
        if path.name.endswith((".partial", ".removed")):
            return CheckpointFacts(str(path), complete=False, problem=error.message)
        raise
    held = {name: FORMATS.get(t["dtype"], t["dtype"].lower()) for name, t in manifest["tensors"].items()}
    facts = CheckpointFacts(str(path), manifest["step"], policy=manifest.get("policy"))
    for name, fmt in held.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            facts.weights[rest] = fmt
            # The master of a split weight is both halves; of any other, it is what the checkpoint holds.
            facts.masters[rest] = "fp32" if f"remainder.{rest}" in held else fmt
        elif kind == "optimizer" and fmt in FORMATS.values():
            parameter, _, moment = rest.partition(".")[2].rpartition(".")
            if parameter and moment != "step":
                facts.moments[f"{parameter}/{moment}"] = fmt
    return facts


def contents_of(record: Record) -> Contents | None:
    """Returns the tensors of the newest of our checkpoints in a record; None if there is no whole one."""
    if not record.checkpoints or not record.checkpoints[-1].complete:
        return None
    path = Path(record.checkpoints[-1].path)
    try:
        manifest = checkpoint.check_complete(path)
        opened = {file: open_file(path / file) for file in manifest["files"]}
    except (FileNotFoundError, HalfstepError) as error:  # retention may have removed it meanwhile
        record.unseen.append(f"the numbers of `{path}`: {getattr(error, 'message', error)}")
        return None
    tensors = {}
    for name, entry in manifest["tensors"].items():
        rows = sorted(checkpoint.rows_in_files(entry).items(), key=lambda item: tuple(item[1]))
        pieces = [safetensor(opened[file][name]) for file, _ in rows]
        spans = tuple(span for piece in pieces for span in piece.spans)
        tensors[name.removeprefix("model.")] = DiskTensor(pieces[0].format, tuple(entry["shape"]), spans)
    contents = Contents()
    contents.add(tensors)
    contents.name_by_weights()
    return contents


def _settings(
    folder: Path, events: list[dict[str, Any]], record: Record
) -> tuple[RunConfig | None, Policy | None]:
    """Returns settings and policy of a run: of run.toml, or of the last start."""
    config: RunConfig | None = None
    starts = [event for event in events if event["event"] == "start"]
    try:
        if (folder / CONFIG).exists():
            config = load(str(folder / CONFIG))
        elif starts:
            config = build(RunConfig, starts[-1]["config"])
    except ConfigError as error:
        record.unseen.append(f"the settings of the run cannot be read: {error.message}")
    else:
        if not (folder / CONFIG).exists():
            record.unseen.append(f"there is no {CONFIG}: settings are those of the record, if there is one")
    recorded = [event.get("policy") for event in events if event["event"] in ("start", "policy")]
    texts = [facts.policy for facts in record.checkpoints] + recorded
    text = next((each for each in reversed(texts) if isinstance(each, str)), None)
    if text is None and config is not None and read(config.policy).base != "auto":
        text = config.policy
    if text is None:
        record.unseen.append("the run has not started: its precision is not known")
        return config, None
    return config, Policy.parse(text)


def _events(folder: Path, record: Record) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    if not (folder / EVENTS).exists():
        record.unseen.append(f"there is no {EVENTS}: what happened in the run is not known")
        return events
    try:
        events.extend(stream_events(folder / EVENTS))
    except EventsError as error:
        record.unseen.append(f"events are read up to a damaged line: {error.message}")
    if events and events[-1]["event"] not in ("end", "stop"):
        record.unseen.append("the run has not ended, or was killed: what follows is not known")
    return events


def _read_events(events: Iterable[Mapping[str, Any]], record: Record, found: list[Finding]) -> None:
    layers: list[Mapping[str, Any]] = []
    numbers: dict[tuple[str, str], Operation] = {}
    for event in events:
        match event["event"]:
            case "step":
                record.updates += 1
                record.losses.append(_finite(event.get("loss")))
            case "monitor":
                layers = list(event["layers"])
            case "layers":
                for role in ("activation", "gradient"):
                    _add_layers(numbers, layers, event.get(role, {}), role)
            case "finding":
                if (finding := _finding(event)) is not None:
                    found.append(finding)
    record.operations += numbers.values()


def _add_layers(
    numbers: dict[tuple[str, str], Operation],
    layers: list[Mapping[str, Any]],
    columns: Mapping[str, Any],
    role: str,
) -> None:
    """Adds what the monitor saw of each layer: how many numbers, how many beyond the range of their format."""
    for index, layer in enumerate(layers):
        name, formats = str(layer.get("name", "")), layer.get("formats", {})
        fmt = str(formats.get(role, "fp32"))
        kind: OperationKind = "norm" if layer.get("kind") == "norm" else "matmul"
        op = numbers.setdefault((name, role), Operation(name, kind, [fmt], [fmt], backward=role == "gradient"))
        values = {key: column[index] for key, column in columns.items() if index < len(column)}
        op.count += 1
        op.elements += int(values.get("count") or 0)
        op.overflow += int(values.get("overflow") or 0)
        op.underflow += int(values.get("underflow") or 0)
        op.amax = max(op.amax or 0.0, float(values.get("amax") or 0.0))


def _finding(event: Mapping[str, Any]) -> Finding | None:
    try:
        return Finding.from_dict({k: v for k, v in event.items() if k not in ("event", "time", "step")})
    except TypeError:  # of another version
        return None


def _finite(loss: Any) -> float | None:
    return float(loss) if isinstance(loss, int | float) and loss == loss and abs(loss) != float("inf") else None


# What a policy makes of one of our models; nothing has to run for it.


def fill(record: Record, policy: Policy, config: RunConfig) -> Record:
    """Adds the weights, buffers and operations of a run under a policy."""
    names = [*dict.fromkeys([*module_names(config.model), *map(owner, parameter_shapes(config.model))])]
    resolved = policy.resolve(names)
    groups = parameter_groups(config.model, config.optimizer)
    optimizer = {name: "Muon" if group.muon else "AdamW" for group in groups for name in group.names}
    record.framework, record.policy = config.backend, str(policy)
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
