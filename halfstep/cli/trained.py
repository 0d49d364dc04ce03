"""`halfstep eval`, `halfstep sample` and `halfstep artifact`: what works on a trained model."""

import dataclasses
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from halfstep.cli.arguments import (
    Device,
    HeldOut,
    Json,
    MovedData,
    OtherBackend,
    OtherPolicy,
    Trained,
    Weights,
)
from halfstep.cli.output import print_json, print_table, print_words

if TYPE_CHECKING:
    from halfstep.training.data.corpus import Corpus
    from halfstep.training.run.trained import Trained as TrainedModel


def evaluate(
    run: Trained,
    /,
    *,
    policy: OtherPolicy = None,
    backend: OtherBackend = None,
    weights: Weights = None,
    data: MovedData = None,
    validation: HeldOut = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Evaluate a trained model on held-out text, in the precision and on the backend of its training or others."""
    from halfstep.training import memory
    from halfstep.training.evaluation import evaluate as measure

    trained = open_model(run, device, data, validation, policy=policy, backend=backend, weights=weights)
    corpus = held_out_text(trained)
    print_words(f"evaluating on {trained.config.data.held_out}")
    with memory.convert_oom(trained.session.ran_out, lambda: memory.in_scoring(trained.config)):
        result = measure(trained.session, corpus, trained.config)
    print_result(trained, dataclasses.asdict(result), json)


def sample(
    run: Trained,
    /,
    *,
    prompt: str | None = None,
    length: int = 300,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    policy: OtherPolicy = None,
    backend: OtherBackend = None,
    weights: Weights = None,
    data: MovedData = None,
    validation: HeldOut = None,
    device: Device = None,
) -> None:
    """Write text with a trained model.

    Parameters
    ----------
    prompt
        How the text begins; by default, as the run's held-out text does.
    length
        How many tokens to add.
    temperature
        0 always takes the likeliest token; 1 samples from the model's own distribution.
    top_k
        Sample only from this many of the likeliest tokens; 0 means all.
    seed
        The same seed gives the same text.
    """
    from halfstep.core.errors import ConfigError
    from halfstep.training.data.held_out import run_tokenizer
    from halfstep.training.data.types import DataError
    from halfstep.training.sampling import check_asked, first_line, generate, prompt_tokens, written

    if prompt is not None and validation is not None:
        raise ConfigError("--prompt and --validation both say how the text begins", hint="leave one of them out")
    check_asked(length, temperature, top_k, seed)
    trained = open_model(run, device, data, validation, policy=policy, backend=backend, weights=weights)
    tokenizer = run_tokenizer(trained.config.data.source, trained.saved.manifest["data"])
    if prompt is None:
        try:
            given = first_line(tokenizer, held_out_text(trained).validation)
        except DataError as error:
            raise DataError(
                f"there is no held-out text to begin with: {error.message}", hint="give a beginning with --prompt"
            ) from None
    else:
        given = prompt.encode(errors="surrogateescape") or b"\n"
    start = prompt_tokens(tokenizer, given)
    sys.stdout.buffer.write(given)
    begin = perf_counter()
    tokens = generate(trained.session, start, length, temperature, top_k, seed, alphabet=tokenizer.vocabulary)
    for text in written(tokenizer, tokens):
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    seconds = perf_counter() - begin
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    print_words(f"{length:,} tokens in {seconds:.1f} s: {length / seconds:,.1f} tokens per second")


def artifact(
    run: Trained,
    /,
    *,
    out: Path | None = None,
    limit: int | None = None,
    policy: OtherPolicy = None,
    backend: OtherBackend = None,
    weights: Weights = None,
    data: MovedData = None,
    validation: HeldOut = None,
    device: Device = None,
    json: Json = False,
) -> int:
    """Compress a trained model with int8 and zlib, read it back, and measure what that cost.

    Matrices are stored in int8 with a scale per row, the rest in fp16. The same held-out tokens are predicted
    before and after. The exit code is 1 if the file is larger than its limit.

    Parameters
    ----------
    out
        The file to write; by default model.int8z in the run folder. Replaces an older artifact, but no other
        file.
    limit
        The most bytes the file may have; by default the recipe's limit. 0 means no limit.
    """
    from halfstep.core.errors import ConfigError
    from halfstep.training import memory
    from halfstep.training.evaluation import evaluate as measure
    from halfstep.training.weights.artifact import NAME, check_place, is_artifact, masters, origin_of, score

    if limit is not None and not 0 <= limit < 2**63:
        raise ConfigError("--limit must be from 0 to 2^63 - 1 bytes", hint="0 means no limit")
    if is_artifact(run):
        raise ConfigError(f"`{run}` is an artifact already", hint="name the run that it is from")
    home = home_of(run)
    place = out or home / NAME
    check_place(place, home)
    trained = open_model(run, device, data, validation, policy=policy, backend=backend, weights=weights)
    config, session, corpus = trained.config, trained.session, held_out_text(trained)
    if limit is not None:
        config = dataclasses.replace(config, artifact=dataclasses.replace(config.artifact, limit=limit))
    print_words(f"evaluating on {config.data.held_out}, before and after")
    with memory.convert_oom(session.ran_out, lambda: memory.in_scoring(config)):
        before = measure(session, corpus, config)
        # From the checkpoint's own numbers: the session may hold them rounded, in the policy to evaluate in.
        weights_to_write = masters(trained.state, config.model, averaged=False)
        manifest = trained.saved.manifest
        origin = origin_of(manifest, manifest["step"], trained.weights)
        result = score(session, corpus, config, place, before, weights_to_write, origin)
    print_result(trained, result.record(), json)
    return 1 if result.over else 0


def open_model(run: Path, *where: str | None, policy: str | None, **others: Any) -> "TrainedModel":
    """Loads a trained model, and says so."""
    from halfstep.core.policy import read_as
    from halfstep.training.run.trained import open_trained

    if note := read_as(policy or ""):
        print_words(note)
    print_words(f"loading `{run}`")
    return open_trained(run, *where, policy=policy, **others)


def held_out_text(trained: "TrainedModel") -> "Corpus":
    """Opens the held-out text of a model; the text that it was trained on only if that is a part of it."""
    from halfstep.training.data.held_out import load_held_out
    from halfstep.training.data.load import load_corpus

    data, before, vocabulary = trained.config.data, trained.saved.manifest["data"], trained.config.model.vocabulary
    if isinstance(data.validation, str):
        corpus = load_held_out(data.validation, data.source, before, vocabulary)
        what, known = "held-out text", before.get("held_out_digest")
    else:
        corpus = load_corpus(data.source, data.validation, vocabulary)
        what, known = "data", before["digest"]
    if known and known != corpus.digest and not trained.other_text:
        print_words(f"warning: the {what} changed since the checkpoint; it was {before['description']}")
    return corpus


def print_result(trained: "TrainedModel", result: dict[str, Any], json: bool) -> None:
    """Prints what was measured of a model, and what ran."""
    manifest = trained.saved.manifest
    ran = {"policy": str(trained.policy), "backend": trained.config.backend}
    data = {"step": manifest["step"], **ran, "weights": trained.weights, **result}
    if json:
        print_json(data)
    else:
        print_table(("", "value"), [(name.replace("_", " "), _shown(value)) for name, value in data.items()])


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or abs(value) >= 1e-2 else f"{value:.1e}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def home_of(run: Path) -> Path:
    """Returns the run folder, also for a checkpoint in it; for a checkpoint elsewhere, the folder it is in."""
    from halfstep.training import paths
    from halfstep.training.checkpoints import checkpoint

    here = Path(os.path.abspath(run))  # also of `.`; a folder of checkpoints that is a link stays in its run
    if not checkpoint.is_checkpoint(run):
        return run
    return here.parent.parent if here.parent.name == paths.CHECKPOINTS else here.parent
