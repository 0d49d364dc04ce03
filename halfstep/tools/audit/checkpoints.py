"""Checkpoints of other libraries, as an audit records them: what their files say of formats, and what is missing.

    model.safetensors, or shards and their index      names and formats of weights
    *.bin, *.pt, *.pth, *.ckpt                         read by torch, restricted to tensors and plain data
    trainer_state.json                                the last file that transformers writes: none is whole without

A folder of checkpoints (`checkpoint-500`, `step_500`, `epoch_3`) is read as all of them, in order.
"""

import re
from pathlib import Path

from halfstep.core.audit.record import CheckpointFacts, Record
from halfstep.core.errors import HalfstepError, TargetError
from halfstep.tools.audit.runs import FORMATS
from halfstep.training.weights.safetensors import INDEX, SINGLE, open_file, open_folder

_NUMBERED = re.compile(r"(?:checkpoint|step|epoch|ckpt|global_step)[-_=]?(\d+)")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS, _MOMENTS = ("pytorch_model", "model"), ("optimizer",)


def of_folder(folder: Path) -> Record:
    """Returns the record of a checkpoint folder, or of a folder of them."""
    record = Record("checkpoint")
    inside = sorted((int(match[1]), path) for path in folder.iterdir() if (match := _numbered(path)))
    if not inside and holds_checkpoint(folder):  # beside checkpoints, it is the finished model
        inside = [(0, folder)]
    if not inside:
        raise TargetError(
            f"`{folder}` holds no run and no checkpoint that halfstep knows",
            hint="name a run folder, or a folder with model.safetensors or an optimizer's state",
        )
    resumable = any(_has_state(path) for _, path in inside)
    for step, path in inside:
        record.checkpoints.append(_facts(path, step if path is not folder else _step(folder), record, resumable))
    return record


def of_file(file: Path) -> Record:
    """Returns the record of one file of weights or state."""
    record = Record("checkpoint")
    facts = CheckpointFacts(str(file))
    _read(file, facts, record)
    record.checkpoints.append(facts)
    return record


def holds_checkpoint(folder: Path) -> bool:
    """Whether a folder itself holds weights or state of another library."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    return bool(names & {SINGLE, INDEX}) or any(_is_state(name) for name in names)


def _numbered(path: Path) -> re.Match[str] | None:
    return _NUMBERED.fullmatch(path.name) if path.is_dir() else None


def _step(folder: Path) -> int | None:
    match = _NUMBERED.fullmatch(folder.name)
    return int(match[1]) if match else None


def _is_state(name: str) -> bool:
    return name.endswith((*PICKLES, ".safetensors")) and name.startswith((*_WEIGHTS, *_MOMENTS, "adapter_model"))


def _has_state(folder: Path) -> bool:
    return any(path.name.startswith(_MOMENTS) for path in folder.iterdir())


def _facts(folder: Path, step: int | None, record: Record, resumable: bool) -> CheckpointFacts:
    facts = CheckpointFacts(str(folder), step)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    names = {path.name for path in files}
    try:
        if names & {SINGLE, INDEX}:
            facts.weights = {name: _format(t.dtype) for name, t in open_folder(folder).items()}
            shapes = {name: list(t.shape) for name, t in open_folder(folder).items()}
        else:
            shapes = {}
        for file in files:
            if file.suffix in PICKLES and file.name.startswith((*_WEIGHTS, *_MOMENTS, "scaler")):
                _read(file, facts, record, shapes)
            elif file.suffix == ".safetensors" and file.name.startswith((*_MOMENTS, "adapter_model")):
                _read(file, facts, record)
    except HalfstepError as error:
        facts.complete, facts.problem = False, error.message
        return facts
    # A finished model has the arguments too, under another name; checkpoints of Accelerate have none of both.
    of_trainer = "training_args.bin" in names and folder.name.startswith("checkpoint-")
    if of_trainer and "trainer_state.json" not in names:
        facts.complete, facts.problem = False, "trainer_state.json, which is written last, is missing"
    elif resumable and not _has_state(folder):
        facts.complete, facts.problem = False, "the optimizer's state, which the others have, is missing"
    elif not (facts.weights or facts.moments) and any(path.is_dir() for path in folder.iterdir()):
        record.unseen.append(
            f"`{folder}` keeps its tensors in folders, as FSDP and DeepSpeed do; these are not read"
        )
    elif not (facts.weights or facts.moments or record.unseen):
        facts.complete, facts.problem = False, "it holds neither weights nor an optimizer's state"
    return facts


def _read(file: Path, facts: CheckpointFacts, record: Record, shapes: dict[str, list[int]] | None = None) -> None:
    if file.suffix == ".safetensors":
        for name, tensor in open_file(file).items():
            facts.weights[name] = _format(tensor.dtype)
        return
    try:
        from halfstep.torch.instruments.collect.weights import read_into
    except ImportError:
        record.unseen.append(f"`{file}` is read by torch, which is not installed")
        return
    problem = read_into(file, facts, shapes or {})
    if problem is not None:
        record.unseen.append(f"`{file}` cannot be read without running its code: {problem}")


def _format(dtype: str) -> str:
    return FORMATS.get(dtype, dtype.lower())
