"""What `halfstep audit TARGET` may be, and what is recorded of each.

a run folder                    settings, events, manifests of checkpoints
a checkpoint, ours or others'    formats of weights, moments, masters; what is missing
a recipe                        what its policy makes of its model
module:factory                  a model and its optimizer, stepped a few times if there are a loss and a batch
"""

from dataclasses import dataclass, field
from pathlib import Path

from halfstep.config.load import recipe_names
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.record import Record
from halfstep.core.errors import ConfigError, did_you_mean
from halfstep.tools.audit import checkpoints, runs
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


def collect(target: str, steps: int = 20) -> Collected:
    """Returns what can be seen of a target."""
    path = Path(target)
    if path.is_dir():
        return _folder(path)
    if target in recipe_names() or (path.suffix == ".toml" and path.exists()):
        return Collected(runs.of_recipe(target))
    if path.suffix in (".safetensors", *checkpoints.PICKLES) and path.exists():
        return Collected([checkpoints.of_file(path)])
    if path.suffix == ".py":
        raise ConfigError(
            f"`{target}` is a script: it must run to be audited", hint=f"halfstep audit -- python {target}"
        )
    module, colon, factory = target.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), *factory.split("."))):
        from halfstep.tools.audit.factory import of_factory

        return Collected([of_factory(module, factory, steps)])
    raise ConfigError(
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
    return Collected([checkpoints.of_folder(path)])
