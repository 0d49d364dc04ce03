"""What `halfstep audit TARGET` may be, and what is recorded of each.

a run folder                    settings, events, manifests of checkpoints
a checkpoint, ours or another's formats of weights, moments, masters; what is missing
a recipe                        what its policy makes of its model
module:factory                  a model and its optimizer, stepped a few times if there are a loss and a batch

    def factory():
        return model, optimizer                          formats, masters and moments
        return model, optimizer, loss_fn, batch          and some steps, watched: loss = loss_fn(batch)

`optimizer` may be a list. On MLX it returns model, optimizer, loss_fn, batch, with loss = loss_fn(model, batch);
on JAX loss_fn, params, batch, optimizer, as `halfstep.jax.audit` takes them.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.config.load import recipe_names
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.record import CheckpointFacts, Record
from halfstep.core.errors import ConfigError, FactoryError, HalfstepError, TargetError, did_you_mean
from halfstep.tools.audit import runs
from halfstep.tools.audit.runs import FORMATS
from halfstep.training.checkpoints.checkpoint import is_checkpoint, step_folders
from halfstep.training.run.folder import holds_run
from halfstep.training.weights.safetensors import INDEX, SINGLE, open_file, open_folder

# Checkpoints of other libraries, as an audit records them: what their files say of formats, and what is missing.
#
#     model.safetensors, or shards and their index    names and formats of weights
#     *.bin, *.pt, *.pth, *.ckpt                       read by torch, restricted to tensors and plain data
#     trainer_state.json                              the last file that transformers writes: none is whole without
#
# A folder of checkpoints (`checkpoint-500`, `step_500`, `epoch_3`) is read as all of them, in order.

_NUMBERED = re.compile(r"(?:checkpoint|step|epoch|ckpt|global_step)[-_=]?(\d+)")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS, _MOMENTS = ("pytorch_model", "model"), ("optimizer",)


def of_folder(folder: Path) -> Record:
    """Returns the record of a checkpoint folder, or of a folder of them."""
    record = Record("checkpoint")
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
    if (problem := read_into(file, facts, shapes or {})) is not None:
        record.unseen.append(f"`{file}` cannot be read without running its code: {problem}")


def _format(dtype: str) -> str:
    return FORMATS.get(dtype, dtype.lower())


@dataclass
class Collected:
    """What was seen of a target, and findings that were made earlier, while it ran."""

    records: list[Record] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def unseen(self) -> list[str]:
        """What could not be seen, each once."""
        return list(dict.fromkeys(text for record in self.records for text in record.unseen))


def collect(target: str, steps: int = 20) -> Collected:
    """Returns what can be seen of a target."""
    path = Path(target)
    if path.is_dir():
        return _folder(path)
    if target in recipe_names() or (path.suffix == ".toml" and path.exists()):
        return Collected(runs.of_recipe(target))
    if path.suffix in (".safetensors", *PICKLES) and path.exists():
        return Collected([of_file(path)])
    if path.suffix == ".py":
        raise TargetError(
            f"`{target}` is a script: it must run to be audited", hint=f"halfstep audit -- python {target}"
        )
    if is_factory(target):
        return Collected([of_factory(target, steps)])
    raise TargetError(
        f"`{target}` is neither a folder, a recipe nor module:factory",
        hint=did_you_mean(
            target, recipe_names(), f"recipes are {', '.join(recipe_names())}; a script follows `--`"
        ),
    )


def _folder(path: Path) -> Collected:
    if is_checkpoint(path) or path.name.endswith((".partial", ".damaged")):
        return Collected([runs.of_checkpoint(path)])
    if holds_run(path):
        record, findings = runs.of_run(path)
        return Collected([record], findings)
    if inside := step_folders(path):
        return Collected([Record("checkpoint", checkpoints=[*map(runs.facts_of, inside)])])
    return Collected([of_folder(path)])


# Factories

COLLECTORS = {
    "torch": "halfstep.torch.instruments.collect.watch",
    "jax": "halfstep.jax.instruments.collect.record",
    "mlx": "halfstep.mlx.instruments.collect.audit",
}
RETURNS = "a factory takes no arguments and returns model, optimizer or model, optimizer, loss_fn, batch"


def is_factory(target: str) -> bool:
    """Whether a target reads as module:factory."""
    module, colon, factory = target.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *factory.split(".")))


def of_factory(target: str, steps: int) -> Record:
    """Returns the record of what a factory makes."""
    made = call(find(*target.split(":")), target)
    if not isinstance(made, tuple) or len(made) not in (2, 4):
        raise FactoryError(f"`{target}` returned {_describe(made)}", hint=RETURNS)
    if (framework := _framework(made)) is None:
        raise FactoryError(f"`{target}` returned {_describe(made)}, and none is a model of torch, JAX or MLX")
    if framework != "torch" and len(made) != 4:
        raise FactoryError(
            f"`{target}` returned {_describe(made)}; on {framework} a loss and a batch are needed",
            hint=RETURNS,
        )
    try:
        record: Record = importlib.import_module(COLLECTORS[framework]).record_of(*made, steps=steps)
    except HalfstepError:
        raise
    except Exception as error:  # of the user's loss function
        raise _error_of_user(f"a step of `{target}`", error) from error
    return record


def find(module: str, name: str) -> Callable[[], Any]:
    """Returns a function of the user's; the module is looked for in the current folder, as `python` does."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise FactoryError(
                f"there is no module `{module}`", hint="it is looked for in the current folder, as `python` does"
            ) from None
        raise _error_of_user(f"importing `{module}`", error) from error
    except Exception as error:
        raise _error_of_user(f"importing `{module}`", error) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise FactoryError(f"`{module}` has no function `{name}`", hint=RETURNS)
    return found  # type: ignore[no-any-return]


def call(factory: Callable[[], Any], where: str) -> Any:
    """Returns what a factory makes; an error of its code names the line."""
    try:
        return factory()
    except Exception as error:
        raise _error_of_user(f"`{where}`", error) from error


def _error_of_user(what: str, error: Exception) -> ConfigError:
    """Returns the error of code of the user's, with the last line of it that was run."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}")
        trace = trace.tb_next
    own = [place for place in frames if f"{os.sep}halfstep{os.sep}" not in place and "importlib" not in place]
    at = f" (at {own[-1]})" if own else ""
    return FactoryError(f"{what} raised {type(error).__name__}: {error}{at}", hint=RETURNS)


def _framework(made: tuple[Any, ...]) -> str | None:
    """Returns which framework's objects were made, by the modules that their classes come from."""
    for each in made:
        for kind in type(each).__mro__:
            name = kind.__module__.partition(".")[0]
            if name in ("torch", "mlx"):
                return name
    leaves = [leaf for each in made for leaf in _leaves(each)]
    return "jax" if any(type(leaf).__module__.startswith("jax") for leaf in leaves) else None


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list | tuple) else [value]


def _describe(made: Any) -> str:
    if isinstance(made, tuple):
        return "(" + ", ".join(type(each).__name__ for each in made) + ")"
    return f"a {type(made).__name__}"
