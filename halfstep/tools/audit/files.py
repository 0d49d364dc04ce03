"""Files and folders of weights and optimizer state, of any library, as an audit records them.

    model.safetensors, or shards and their index     names and formats of weights
    any other *.safetensors                          an adapter, an optimizer's state, pieces of a model
    *.bin, *.pt, *.pth, *.ckpt                       files of torch, read without running anything (pickled.py)
    .metadata and *.distcp                           a folder of torch.distributed.checkpoint, or one inside
    config.json                                      the format and the ties that the model declares
    trainer_state.json                               the last file that transformers writes: none is whole without

A folder of checkpoints (`checkpoint-500`, `step_500`, `epoch_3`) is read as all of them, in order: formats of
each, numbers of the newest.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from halfstep.core.audit.record import CheckpointFacts, Record, StoredTensor, weight_kind
from halfstep.core.errors import HalfstepError, TargetError
from halfstep.training.weights.disk import (
    DiskTensor,
    Numbers,
    comparable,
    differences,
    first_numbers,
    numbers_of,
    safetensor,
    value_of,
)
from halfstep.training.weights.pickled import METADATA, read_dcp, read_torch
from halfstep.training.weights.safetensors import INDEX, SINGLE, open_file, open_folder, read_json

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NUMBERED = re.compile(r"(?:checkpoint|step|epoch|ckpt|global_step|iter)[-_=]?(\d+)")
_WEIGHTS, _MOMENTS = ("pytorch_model", "model", "consolidated", "adapter_model"), ("optimizer", "optim")

# Where things are in what loops save, and what names say of tensors.
_SCALER = {"scale", "growth_factor", "growth_interval"}
_MODELS = ("state_dict", "model", "module", "model_state_dict")
_OPTIMIZERS = ("optimizer", "optimizer_states", "optimizer_state_dict", "optimizers", "optim")
_OPTIMIZER = re.compile(r"^(?:optim\w*|opt)(?:\.\d+)?(?:\.state)?\.")
_MOMENT = re.compile(r"(?:^|\.)(exp_avg_sq|exp_avg|max_exp_avg_sq|momentum_buffer)(?=\.|$)")
_MASTER = re.compile(r"(?:^|\.)(master_params?|master_weights?|masters?|fp32_params?|fp32)(?=\.|$)")
_WRAPPER = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_ROOT = re.compile(r"^(?:(?:model|module|state_dict|app)\.)+")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|output|embed_out|head)\.weight$")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|shared|embed_in|embed)\.weight$"
)

SAMPLE = 256  # numbers that show which weight a master is of

_Role = Literal["weight", "master", "moment", "step"]


@dataclass
class Contents:
    """The tensors of a file or a folder, by what they are for. Masters and moments have the names of weights."""

    weights: dict[str, DiskTensor] = field(default_factory=dict)
    masters: dict[str, DiskTensor] = field(default_factory=dict)
    moments: dict[tuple[str, str], DiskTensor] = field(default_factory=dict)
    steps: dict[str, DiskTensor] = field(default_factory=dict)
    remainders: dict[str, DiskTensor] = field(default_factory=dict)  # of halfstep's split masters
    scaler: bool | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def add(self, tensors: Mapping[str, DiskTensor]) -> None:
        """Adds tensors by their names, in which dots separate parts."""
        for name, tensor in tensors.items():
            own = _OPTIMIZER.sub("", name)
            if (match := _MOMENT.search(own)) is not None:
                self.moments[own[: match.start()] + own[match.end() :].lstrip("."), match[1]] = tensor
            elif (match := _MASTER.search(own)) is not None:
                self.masters[(own[: match.start()] + own[match.end() :]).lstrip(".")] = tensor
            elif own != name:
                if own.endswith(".step"):
                    self.steps[own.removesuffix(".step")] = tensor
            elif name.startswith("remainder."):
                self.remainders[name.removeprefix("remainder.")] = tensor
            else:
                self.weights[name] = tensor

    def add_saved(self, content: Any) -> None:
        """Adds what a loop has saved: dictionaries of tensors, of optimizers, of a scaler, inside others."""
        if not isinstance(content, Mapping):
            return
        if content.keys() >= _SCALER:
            self.scaler = True
        elif "state" in content and "param_groups" in content:
            self._add_states(content["state"])
        elif content and all(isinstance(value, DiskTensor) for value in content.values()):
            self.add({str(name): tensor for name, tensor in content.items()})
        else:
            for key, value in sorted(content.items(), key=lambda item: item[0] in _OPTIMIZERS):  # weights first
                if key in _MODELS or key in _OPTIMIZERS or "scaler" in str(key):
                    for each in value if isinstance(value, list | tuple) else [value]:
                        self.add_saved(each)

    def _add_states(self, state: Any) -> None:
        """Adds the state of a torch optimizer, whose numbers stand for weights in their order, by their shapes."""
        states = {
            str(index): {str(key): value for key, value in held.items() if isinstance(value, DiskTensor)}
            for index, held in (state.items() if isinstance(state, Mapping) else ())
            if isinstance(held, Mapping)
        }
        names = self._names_by_shape(states)
        for index, tensors in states.items():
            name = names[index]
            for key, tensor in tensors.items():
                if key == "step":
                    self.steps[name] = tensor
                elif _MASTER.search(key):
                    self.masters[name] = tensor
                elif tensor.shape:
                    self.moments[name, key] = tensor

    def _names_by_shape(self, states: Mapping[str, Mapping[str, DiskTensor]]) -> dict[str, str]:
        """Returns the weight that each number stands for: what is like its master, or the next of its shape."""
        left, names = dict(self.weights), {}
        for index, tensors in states.items():
            master = next((tensor for key, tensor in tensors.items() if _MASTER.search(key)), None)
            shape = next((tensor.shape for tensor in tensors.values() if tensor.shape), None)
            fitting = [name for name, tensor in left.items() if tensor.shape == shape]
            if len(fitting) > 1 and master is not None and master.is_readable:
                fitting.sort(key=lambda name: _distance(left[name], master))
            names[index] = fitting[0] if fitting and index.isdigit() else index
            left.pop(names[index], None)
        return names

    def name_by_weights(self) -> None:
        """Gives masters and moments the names that the weights have, which may be wrapped otherwise."""
        numbered: dict[str, dict[str, DiskTensor]] = {}
        for (name, key), tensor in sorted(self.moments.items(), key=lambda item: (len(item[0][0]), item[0])):
            numbered.setdefault(name, {})[key] = tensor
        known = {bare(name): name for name in self.weights}
        known |= self._names_by_shape({name: each for name, each in numbered.items() if name.isdigit()})
        self.masters = {known.get(bare(name), name): tensor for name, tensor in self.masters.items()}
        self.moments = {(known.get(bare(name), name), key): tensor for (name, key), tensor in self.moments.items()}
        self.remainders = {known.get(bare(name), name): tensor for name, tensor in self.remainders.items()}


def _distance(weight: DiskTensor, master: DiskTensor) -> float:
    """Returns how far the first numbers of two tensors are from each other."""
    if not weight.is_readable:
        return math.inf
    first, second = (first_numbers(tensor, SAMPLE) for tensor in (weight, master))
    return float(np.nan_to_num(np.abs(first - second), nan=math.inf).sum())


def bare(name: str) -> str:
    """Returns the name of a tensor without the wrappers of a model."""
    return _ROOT.sub("", _WRAPPER.sub("", name))


def of_folder(folder: Path) -> tuple[Record, Contents]:
    """Returns the record of a checkpoint folder, or of a folder of them, and what the newest holds."""
    record, contents = Record("checkpoint"), Contents()
    numbered = ((_step(path), path) for path in folder.iterdir() if path.is_dir())
    inside = sorted((step, path) for step, path in numbered if step is not None)
    if not inside and holds_checkpoint(folder):  # beside checkpoints, it is the finished model
        inside = [(0, folder)]
    if not inside:
        raise TargetError(
            f"`{folder}` holds no run and no checkpoint that halfstep knows",
            hint="name a run folder, or a folder with model.safetensors or an optimizer's state",
        )
    resumable = any(_has_state(path) for _, path in inside)
    for step, path in inside:
        facts = CheckpointFacts(str(path), step if path is not folder else _step(folder))
        contents = _read_folder(path, facts, record, resumable)
        record.checkpoints.append(facts)
    return record, contents


def of_file(file: Path) -> tuple[Record, Contents]:
    """Returns the record of one file of weights or state, and what it holds."""
    record, facts, contents = Record("checkpoint"), CheckpointFacts(str(file)), Contents()
    _read_file(file, contents)
    _set_formats(facts, contents)
    if not (facts.weights or facts.moments):
        record.unseen.append(f"`{file}` holds neither weights nor an optimizer's state by a name that is known")
    record.checkpoints.append(facts)
    return record, contents


def holds_checkpoint(folder: Path) -> bool:
    """Whether a folder itself holds weights or state of another library."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    inside = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    return any((path / METADATA).exists() for path in inside) or any(
        name.endswith(".safetensors") or _is_state(name) for name in names
    )


def _step(folder: Path) -> int | None:
    match = _NUMBERED.fullmatch(folder.name)
    return int(match[1]) if match else None


def _is_state(name: str) -> bool:
    return name == INDEX or (name.endswith(PICKLES) and name.startswith((*_WEIGHTS, *_MOMENTS)))


def _has_state(folder: Path) -> bool:
    return any(path.name.startswith(_MOMENTS) for path in folder.iterdir())


def _read_folder(folder: Path, facts: CheckpointFacts, record: Record, resumable: bool) -> Contents:
    contents = Contents()
    files = sorted(path for path in folder.iterdir() if path.is_file())
    names = {path.name for path in files}
    folders = [path for path in folder.iterdir() if path.is_dir()]
    try:
        if names & {SINGLE, INDEX}:
            contents.add({name: safetensor(tensor) for name, tensor in open_folder(folder).items()})
            files = [file for file in files if file.suffix != ".safetensors" or file.name.startswith(_MOMENTS)]
        for file in files:
            is_state = file.name.startswith((*_WEIGHTS, *_MOMENTS, "scaler"))
            if file.suffix == ".safetensors" or (file.suffix in PICKLES and is_state):
                _read_file(file, contents)
        for path in [folder, *sorted(folders)]:
            if (path / METADATA).exists():
                contents.add(read_dcp(path))
        if "config.json" in names:
            contents.config = read_json(folder / "config.json")
    except HalfstepError as error:
        facts.complete, facts.problem = False, error.message
    _set_formats(facts, contents)
    if not facts.complete:
        return contents
    # A finished model has the arguments too, under another name; checkpoints of Accelerate have none of both.
    of_trainer = "training_args.bin" in names and folder.name.startswith("checkpoint-")
    if of_trainer and "trainer_state.json" not in names:
        facts.complete, facts.problem = False, "trainer_state.json, which is written last, is missing"
    elif resumable and not _has_state(folder):
        facts.complete, facts.problem = False, "the optimizer's state, which the others have, is missing"
    elif not (facts.weights or facts.moments) and folders:
        record.unseen.append(f"`{folder}` keeps its tensors in folders, as DeepSpeed does; these are not read")
    elif not (facts.weights or facts.moments or record.unseen):
        facts.complete, facts.problem = False, "it holds neither weights nor an optimizer's state"
    return contents


def _read_file(file: Path, contents: Contents) -> None:
    if file.suffix == ".safetensors":
        contents.add({name: safetensor(tensor) for name, tensor in open_file(file).items()})
    else:
        contents.add_saved(read_torch(file))


def _set_formats(facts: CheckpointFacts, contents: Contents) -> None:
    contents.name_by_weights()
    facts.weights = {n: t.format for n, t in contents.weights.items() if not t.format.startswith(("int", "bool"))}
    facts.masters = {name: tensor.format for name, tensor in contents.masters.items()}
    facts.moments = {f"{name}/{key}": tensor.format for (name, key), tensor in contents.moments.items()}
    facts.scaler = contents.scaler
    if not contents.config.get("quantization_config"):
        declared = contents.config.get("dtype") or contents.config.get("torch_dtype")
        facts.declared = declared if isinstance(declared, str) else None


# The numbers


def read_numbers(record: Record, contents: Contents, before: Contents | None = None, path: str = "") -> None:
    """Adds to the newest checkpoint of a record what its numbers show, and how they differ from those before."""
    facts = record.checkpoints[-1]
    if not facts.complete:
        return
    held = [*_in_order(contents)]
    odd = [each.name for each, tensor in held if tensor.elements and not tensor.is_readable]
    if odd:
        record.unseen.append(f"the numbers of {len(odd)} tensors of `{facts.path}`, such as `{odd[0]}`")
    held = [(each, tensor) for each, tensor in held if tensor.is_readable]
    for (each, tensor), numbers in zip(held, numbers_of(tensor for _, tensor in held), strict=True):
        _set_numbers(each, tensor, numbers)
    _compare_partners(held, contents)
    if before is not None:
        facts.before = path
        _compare_before(held, contents, before, record)
    facts.tensors = [each for each, _ in held]


def _in_order(contents: Contents) -> Iterable[tuple[StoredTensor, DiskTensor]]:
    groups: list[tuple[_Role, Iterable[tuple[str, str, DiskTensor]]]] = [
        ("weight", ((name, "", tensor) for name, tensor in contents.weights.items())),
        ("master", ((name, "", tensor) for name, tensor in contents.masters.items())),
        ("moment", ((name, key, tensor) for (name, key), tensor in contents.moments.items())),
        ("step", ((name, "", tensor) for name, tensor in contents.steps.items())),
    ]
    for role, group in groups:
        for name, key, tensor in group:
            if "int" not in tensor.format and "bool" not in tensor.format:
                kind = weight_kind(name, tensor.shape)
                yield StoredTensor(name, role, tensor.format, kind, key, tensor.elements), tensor


def _set_numbers(each: StoredTensor, tensor: DiskTensor, numbers: Numbers) -> None:
    each.zeros, each.nonfinite = numbers.zeros, numbers.nonfinite
    each.subnormal, each.saturated = numbers.subnormal, numbers.saturated
    if numbers.lowest == numbers.highest:
        each.constant = value_of(tensor, numbers.lowest)
    elif tensor.format == "fp32":
        low = {"bf16": 0xFFFF, "fp16": 0x1FFF}  # the bits of the mantissa that the format lacks
        each.holds = next((name for name, bits in low.items() if not numbers.bits & bits), None)


def _compare_partners(held: list[tuple[StoredTensor, DiskTensor]], contents: Contents) -> None:
    """Compares masters with their weights, and a head with the embedding that it is tied to."""
    pairs = [
        (e, t, e.name, contents.weights[e.name])
        for e, t in held
        if e.role == "master" and e.name in contents.weights
    ]
    if contents.config.get("tie_word_embeddings") is True:
        embedding = next((n for n in contents.weights if _EMBEDDING.search(n)), None)
        heads = [(e, t) for e, t in held if e.role == "weight" and _HEAD.search(e.name)]
        if embedding is not None:
            pairs += [(e, t, embedding, contents.weights[embedding]) for e, t in heads]
    pairs = [pair for pair in pairs if comparable(pair[1], pair[3])]
    for (each, _, partner, _), found in zip(pairs, differences((a, b) for _, a, _, b in pairs), strict=True):
        each.partner, each.differs, each.far = partner, found.changed, found.changed - found.by_one


def _compare_before(
    held: list[tuple[StoredTensor, DiskTensor]], contents: Contents, before: Contents, record: Record
) -> None:
    earlier = {(each.role, bare(each.name), each.moment): tensor for each, tensor in _in_order(before)}
    pairs = []
    for each, tensor in held:
        other = earlier.get((each.role, bare(each.name), each.moment))
        if other is not None and other.format == tensor.format and comparable(other, tensor):
            pairs.append((each, other, tensor))
    for (each, *_), found in zip(pairs, differences((a, b) for _, a, b in pairs), strict=True):
        each.changed, each.by_one = found.changed, found.by_one
        if each.role == "weight" and each.name in contents.remainders:
            each.changed = None  # its lower half moves by itself, and is no number
    if not pairs:
        record.unseen.append("what training has changed: no tensor has name, shape and format of one before")
