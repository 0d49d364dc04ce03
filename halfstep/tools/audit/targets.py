"""What `halfstep audit TARGET` may be, and what is recorded of each.

a run folder                    settings, events, manifests of checkpoints
a checkpoint, or a file of one  formats of weights, moments, masters; what is missing; what the numbers show
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
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.config.load import recipe_names
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.record import Record
from halfstep.core.errors import ConfigError, FactoryError, HalfstepError, TargetError, did_you_mean
from halfstep.tools.audit import runs
from halfstep.tools.audit.files import PICKLES, Contents, of_file, of_folder, read_numbers
from halfstep.training.checkpoints.checkpoint import is_checkpoint, step_folders
from halfstep.training.run.folder import holds_run


@dataclass
class Collected:
    """What was seen of a target, and findings that were made earlier, while it ran."""

    records: list[Record] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def unseen(self) -> list[str]:
        """What could not be seen, each once."""
        return list(dict.fromkeys(text for record in self.records for text in record.unseen))


def collect(target: str, steps: int = 20, before: str | None = None) -> Collected:
    """Returns what can be seen of a target; of files, also what differs from those `before`."""
    path = Path(target)
    if path.is_dir() or (path.suffix in (".safetensors", *PICKLES) and path.exists()):
        collected, contents = _of_path(path)
        if contents is not None:
            earlier = _contents_before(before) if before is not None else None
            read_numbers(collected.records[0], contents, earlier, before or "")
            return collected
        if before is None:
            return collected
    if before is not None:
        raise TargetError(f"`{target}` holds no tensors to compare with `{before}`", hint="leave out --before")
    if target in recipe_names() or (path.suffix == ".toml" and path.exists()):
        return Collected(runs.of_recipe(target))
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


def _of_path(path: Path) -> tuple[Collected, Contents | None]:
    """Returns what a file or a folder says of formats, and its tensors if it holds any."""
    if path.is_file():
        record, contents = of_file(path)
        return Collected([record]), contents
    if is_checkpoint(path) or path.name.endswith((".partial", ".damaged")):
        record = runs.of_checkpoint(path)
        return Collected([record]), runs.contents_of(record)
    if holds_run(path):
        record, findings = runs.of_run(path)
        return Collected([record], findings), runs.contents_of(record)
    if inside := step_folders(path):
        record = Record("checkpoint", checkpoints=[*map(runs.facts_of, inside)])
        return Collected([record]), runs.contents_of(record)
    record, contents = of_folder(path)
    return Collected([record]), contents


def _contents_before(before: str) -> Contents:
    path = Path(before)
    contents = _of_path(path)[1] if path.exists() else None
    if contents is None or not contents.weights:
        raise TargetError(
            f"`{before}` holds no weights to compare with", hint="--before takes a file or a folder of weights"
        )
    return contents


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
