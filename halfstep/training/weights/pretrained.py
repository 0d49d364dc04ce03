"""Initial weights from elsewhere: a transformers model, or one of our runs, as our decoder's parameters in fp32.

    halfstep train gpt2 --init openai-gpt2/             config.json and model.safetensors, or its shards
    halfstep train gpt2 --init weights.safetensors      a file alone; what it does not state is the recipe's
    halfstep train gpt2 --init runs/earlier             the weights of the newest checkpoint of a run
    halfstep train gpt2 --init model.int8z              the rounded weights that `halfstep artifact` wrote

The file must hold the recipe's model. config.json is compared with the recipe, setting by setting; then each of
our parameters must be there in its shape, and each of their tensors must be used or be skipped on purpose. What
does not fit is refused by name, with the `--set` that makes it fit. Only the number of rows may differ: a
vocabulary may be padded (layouts.resized), and learned positions beyond the context are cut.

Only headers are read until `weights()` is iterated, one parameter at a time.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfstep.config.load import load, recipe_names
from halfstep.config.model import ModelConfig, parameter_shapes
from halfstep.config.schema import build
from halfstep.core.errors import ConfigError
from halfstep.training import paths
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.tensors import MANIFEST, DamagedCheckpointError
from halfstep.training.session import backend_module
from halfstep.training.weights import safetensors
from halfstep.training.weights.artifact import is_artifact, read_artifact
from halfstep.training.weights.layouts import (
    LAYOUTS,
    OWN,
    Layout,
    Settings,
    Tensors,
    format_setting,
    resolve_settings,
)
from halfstep.training.weights.safetensors import DecodedTensor, Tensor, WeightsFileError, WeightsFitError

CONFIG = "config.json"
ROUNDED = "it is an artifact: its matrices were rounded to int8 and the rest to fp16"
# Settings whose zero stands for a number that follows from others.
FOLLOWING = ("kv_heads", "head_width", "mlp_width", "norm_epsilon")


@dataclass(frozen=True)
class Pretrained:
    """Weights that fit a model."""

    path: str
    digest: str
    notes: tuple[str, ...]
    layout: Layout
    model: ModelConfig
    tensors: Tensors

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yields the name and value of every parameter, reading one at a time."""
        sources = self.layout.sources(self.model)
        for name, shape in parameter_shapes(self.model).items():
            numbers = self.layout.read(self.tensors, sources[name].name)
            finite = np.isfinite(numbers)
            if not finite.all():
                raise WeightsFitError(
                    f"`{self.tensors[sources[name].name].name}` of `{self.path}` holds numbers that are not "
                    f"finite: {int((~finite).sum()):,} of {numbers.size:,}",
                    hint="the run diverged, or the file is damaged: fetch or write it again",
                )
            yield name, sources[name].extract(numbers, shape)

    def record(self) -> dict[str, Any]:
        """Returns where the weights came from, for events and checkpoints."""
        return {"path": self.path, "layout": self.layout.name, "sha256": self.digest, "notes": list(self.notes)}

    @property
    def description(self) -> str:
        """Where the weights came from, and what was done to them."""
        return "; ".join([f"of {self.layout.name}, `{self.path}`, SHA-256 {self.digest[:12]}…", *self.notes])


class _File(NamedTuple):
    place: Path
    tensors: dict[str, Tensor]
    config: dict[str, Any] | None  # what describes the model
    sha256: str = ""  # the digest it must have
    notes: tuple[str, ...] = ()


def open_pretrained(path: str, model: ModelConfig, digest: str = "") -> Pretrained:
    """Opens the weights at a path, checked against the model and, if given, against a digest."""
    file = _open(path)
    layout = _layout_of(file)
    tensors = layout.without_prefix(file.tensors)
    _check_settings(file.place, layout, model, _expected_settings(file, layout, tensors))
    used = _check_tensors(file, layout, model, tensors)
    notes = [*file.notes, *(layout.notes(file.config) if file.config else [])]
    if file.config is None and layout is not OWN:
        unchecked = "heads, activation, epsilon and rope base are the recipe's, unchecked"
        notes.append(f"no {CONFIG} describes it: {unchecked}")
    notes += _describe_rows(layout, model, tensors) + _describe_formats(tensors, used)
    reasons = Counter(layout.skip_reason(name) for name in tensors if name not in used)
    notes += [f"{count} tensors are skipped: {reason}" for reason, count in reasons.items()]
    sha256 = safetensors.digest(file.tensors.values())
    _check_digest(file, sha256, digest)
    return Pretrained(path, sha256, tuple(notes), layout, model, tensors)


def load_model(
    recipe: str, weights: str | PathLike[str], *, backend: str = "", settings: Sequence[str] = ()
) -> Any:
    """Returns the fp32 model of a recipe (a name or a TOML file) with the weights at a path, for your own loop.

    For JAX it is a pair, with the pytree. The weights may be anything `halfstep train --init` takes. `settings`
    change the recipe, as `--set` does: `["model.vocabulary=50257"]`. The backend is the recipe's unless named.
    What was padded, skipped or widened is a Python warning.
    """
    config = load(recipe, [*settings, *([f"backend={backend}"] if backend else [])])
    found = open_pretrained(fspath(weights), config.model)
    for note in found.notes:
        warnings.warn(f"{found.path}: {note}", stacklevel=2)
    model = backend_module(config.backend, "model").Decoder(config.model)
    params = model.set_weights(found.weights())
    return (model, params) if config.backend == "jax" else model


def _open(path: str) -> _File:
    if not path.strip():
        raise WeightsFileError("the path to take weights from is empty", hint="name a file, a folder, or a run")
    try:
        place = Path(path).expanduser()
        exists = place.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, ~nobody, a zero in it
        raise WeightsFileError(f"`{path}` cannot be read: {error}", hint="write the path out") from None
    if not exists:
        raise WeightsFileError(
            f"there is no file or folder `{path}` to take weights from",
            hint="download it from a hub first: `hf download openai-community/gpt2 --local-dir gpt2`",
        )
    if (place / paths.CONFIG).exists():
        if (newest := checkpoint.latest(place / paths.CHECKPOINTS)) is None:
            raise WeightsFileError(f"the run in `{place}` has no checkpoint", hint="name a run that has one")
        place = newest
    if checkpoint.is_state_file(place) and (place.parent / MANIFEST).exists():
        place = place.parent
    if (place / MANIFEST).exists():
        return _open_checkpoint(place)
    if is_artifact(place):
        return _open_artifact(place)
    tensors = safetensors.open_folder(place) if place.is_dir() else safetensors.open_file(place)
    description = (place if place.is_dir() else place.parent) / CONFIG
    config = safetensors.read_json(description) if description.exists() else {}
    return _File(place, tensors, config if "model_type" in config else None)


def _open_checkpoint(place: Path) -> _File:
    manifest = checkpoint.check_complete(place)
    config = {**manifest["config"]["model"], "model_type": OWN.name}
    sha256 = safetensors.digest_of_sums({name: file["sha256"] for name, file in manifest["files"].items()})
    parts = {name: safetensors.open_file(place / name) for name in manifest["files"]}
    tensors: dict[str, Tensor] = {}
    for name, entry in manifest["tensors"].items():
        held = checkpoint.rows_in_files(entry)
        names = sorted(held, key=lambda file: tuple(held[file]))
        if any(name not in parts[file] for file in names):
            checkpoint.verify(place)  # names what is damaged
        pieces = tuple(parts[file][name] for file in names)
        whole = (name, pieces[0].file, entry["dtype"], tuple(entry["shape"]), 0)
        tensors[name] = pieces[0] if len(pieces) == 1 else safetensors.SpreadTensor(*whole, pieces)
    return _File(place, tensors, config, sha256)


def _open_artifact(place: Path) -> _File:
    model, weights, _ = read_artifact(place)
    tensors: dict[str, Tensor] = {
        name: DecodedTensor(name, place, "F32", numbers.shape, 0, numbers) for name, numbers in weights.items()
    }
    return _File(place, tensors, {**asdict(model), "model_type": OWN.name}, notes=(ROUNDED,))


def _layout_of(file: _File) -> Layout:
    """Returns the layout that the description names; without one, the layout that the tensors' names reveal."""
    known = [layout for layout in LAYOUTS if layout is not OWN]
    if file.config is None:
        fitting = [layout for layout in LAYOUTS if layout.mark in layout.without_prefix(file.tensors)]
        what = f"has no tensor that identifies its model, such as `{known[0].mark}`"
    else:
        kind = file.config["model_type"]
        fitting = [layout for layout in LAYOUTS if layout.name == kind]
        what = f"is a model of type `{kind}`"
        if "quantization_config" in file.config:
            raise WeightsFitError(f"the weights of `{file.place}` are quantized", hint="use the unquantized ones")
    if not fitting:
        raise WeightsFitError(
            f"`{file.place}` {what}; weights are read of {', '.join(layout.name for layout in known)} and of our "
            "own decoder",
            hint="train any other model with its own library, through `prepare` of halfstep.torch",
        )
    return fitting[0]


def _expected_settings(file: _File, layout: Layout, tensors: Tensors) -> Settings:
    head, embedding = tensors.get("lm_head.weight"), tensors.get(layout.embedding)
    same = head is not None and embedding is not None and head.equals(embedding)
    shown = {**layout.from_shapes(tensors), "tied": head is None or same}
    if file.config is None:
        return shown
    try:
        stated = layout.from_config(file.config)
        model = build(ModelConfig, stated, "model.")
    except (TypeError, AttributeError, ConfigError) as error:
        reason = error.message if isinstance(error, ConfigError) else error
        raise WeightsFitError(
            f"{CONFIG} of `{file.place}` does not describe a model: {reason}", hint="fetch or write it again"
        ) from None
    if model.tied and not shown["tied"]:
        raise WeightsFitError(
            f"{CONFIG} of `{file.place}` ties head and embedding, but `lm_head.weight` differs from it",
            hint="write it again with tie_word_embeddings = false, and use --set model.tied=false",
        )
    return {**shown, **{key: getattr(model, key) for key in stated}}


def _check_settings(place: Path, layout: Layout, model: ModelConfig, expected: Settings) -> None:
    off = _mismatches(model, expected)
    # Some follow from others: an MLP of four times the width fits as soon as the width does.
    stated = {key: value for key, value in off.items() if key not in FOLLOWING or getattr(model, key)}
    with contextlib.suppress(ConfigError):
        off = stated | _mismatches(replace(model, **stated), expected)
    if off:
        here = {key: format_setting(value) for key, value in resolve_settings(model).items()}
        wanted = {key: format_setting(value) for key, value in off.items()}
        differ = [f"model.{key} is {there} there and {here[key]} here" for key, there in wanted.items()]
        # Another kind of model, not another size: there is a recipe of that kind.
        kind = {"norm", "positions"} & off.keys() and layout.name in recipe_names()
        better = f"begin with the recipe, `halfstep train {layout.name} --init {place}`, or " if kind else ""
        raise WeightsFitError(
            f"`{place}` does not fit the recipe: {', '.join(differ)}",
            hint=f"{better}use " + " ".join(f"--set model.{key}={there}" for key, there in wanted.items()),
        )


def _mismatches(model: ModelConfig, expected: Settings) -> Settings:
    """Returns the settings that keep a model from fitting. Its vocabulary may be larger, its context shorter."""
    here = resolve_settings(model)
    loose = {
        "vocabulary": here["vocabulary"] >= expected.get("vocabulary", 0),
        "context": here["context"] <= expected.get("context", here["context"]),
    }
    return {key: there for key, there in expected.items() if not loose.get(key, here[key] == there)}


def _check_tensors(file: _File, layout: Layout, model: ModelConfig, tensors: Tensors) -> set[str]:
    """Checks that our parameters are there and none of their tensors is left over; returns the names used."""
    place = file.place
    used = {"lm_head.weight"} if model.tied else set()  # equal to the embedding, else it was refused
    sources = layout.sources(model)
    for name, shape in parameter_shapes(model).items():
        if name not in sources:
            raise WeightsFitError(
                f"`{name}` of the recipe's model does not exist in {layout.name}",
                hint=f"start from a recipe of that model, such as `halfstep train {layout.name}`",
            )
        source = sources[name]
        if source.name not in tensors:
            raise WeightsFitError(
                f"`{place}` has no tensor `{source.name}`, which is `{name}` here",
                hint="if the model has several files, name the folder that holds them all with their index",
            )
        tensor = tensors[source.name]
        if not source.fits(tensor.shape, shape):
            raise WeightsFitError(
                f"`{tensor.name}` of `{place}` has the shape {tensor.shape}, expected {source.shape(shape)} for "
                f"`{name}`",
                hint="the file does not hold one whole model: fetch or write it again",
            )
        tensor.check_format()
        used.update(layout.pieces(tensors, source.name))
    # Of one parameter under two names, with the prefix of the layout and without, one is left over.
    known = {tensor.name for name, tensor in tensors.items() if name in used or layout.skip_reason(name)}
    if over := [name for name in file.tensors if name not in known]:
        raise WeightsFitError(
            f"`{over[0]}` of `{place}` has no place in our decoder ({len(over)} such tensors)",
            hint="the file holds more than one language model: write it again without the rest",
        )
    return used & tensors.keys()


def _check_digest(file: _File, sha256: str, wanted: str) -> None:
    if file.sha256 and file.sha256 != sha256:
        raise DamagedCheckpointError(
            f"`{file.place}` is damaged: the SHA-256 of {checkpoint.STATE} is {sha256}, expected {file.sha256}",
            hint="restore it, or name another checkpoint",
        )
    if wanted and wanted.lower() != sha256:
        raise WeightsFitError(
            f"`{file.place}` has the SHA-256 {sha256}, and init_digest is {wanted}",
            hint="these are other weights: fetch the right ones, or accept these with `--set init_digest=`",
        )


def _describe_rows(layout: Layout, model: ModelConfig, tensors: Tensors) -> list[str]:
    sources, notes = layout.sources(model), []
    rows = tensors[sources["embed.weight"].name].shape[0]
    if rows < model.vocabulary:
        notes.append(
            f"{model.vocabulary - rows:,} of {model.vocabulary:,} rows of the vocabulary are padding, each the "
            f"mean of the others (none with --set model.vocabulary={rows})"
        )
    if model.positions == "learned":
        rows = tensors[sources["positions.weight"].name].shape[0]
        if rows > model.context:
            notes.append(f"the first {model.context:,} of {rows:,} positions are used")
    return notes


def _describe_formats(tensors: Tensors, used: set[str]) -> list[str]:
    split = {name for name in used if f"remainder.{name}" in used}
    whole = [tensors[name].dtype for name in used - split if tensors[name].dtype in safetensors.WIDENED]
    words = Counter(safetensors.WIDENED[dtype][1] for dtype in whole if dtype != "F32")
    notes = [f"{count} tensors are held in {word} and widened to fp32, exactly" for word, count in words.items()]
    return notes + ([f"{len(split)} split masters are joined, exactly"] if split else [])
