"""`halfstep eval` and `halfstep sample`, and how every command opens a trained model."""

import dataclasses
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from halfstep.cli.arguments import AS_TRAINED, Json, OtherBackend, OtherPolicy, Source, Trained
from halfstep.cli.output import print_json, print_table, print_words, rest
from halfstep.config.run import Backend
from halfstep.core.errors import OptionError
from halfstep.core.policy import read_as
from halfstep.training import paths

if TYPE_CHECKING:
    from halfstep.training.data.corpus import Corpus
    from halfstep.training.run.trained import Trained as TrainedModel


def evaluate(
    run: Trained,
    /,
    *,
    policy: OtherPolicy = None,
    backend: OtherBackend = None,
    source: Source = AS_TRAINED,
    json: Json = False,
) -> None:
    """Evaluate a trained model on held-out text, in the precision and on the backend of its training or others."""
    from halfstep.training import memory
    from halfstep.training.evaluation import evaluate as measure

    trained = open_model(run, policy, backend, source)
    corpus = held_out_text(trained)
    print_words(f"evaluating on {trained.config.data.held_out}")
    with memory.convert_oom(trained.session.is_out_of_memory, lambda: memory.oom_while_scoring(trained.config)):
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
    source: Source = AS_TRAINED,
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
    from halfstep.training.data.load import run_tokenizer
    from halfstep.training.data.types import DataError, HeldOutError
    from halfstep.training.run.trained import check_sampling, decode_stream, first_line, generate, prompt_tokens

    if prompt is not None and source.validation is not None:
        raise OptionError("--prompt and --validation both say how the text begins", hint="leave one of them out")
    check_sampling(length, temperature, top_k, seed)
    trained = open_model(run, policy, backend, source)
    tokenizer = run_tokenizer(trained.config.data.source, trained.saved.manifest["data"])
    if prompt is None:
        try:
            given = first_line(tokenizer, held_out_text(trained).validation)
        except DataError as error:
            raise HeldOutError(
                f"there is no held-out text to begin with: {error.message}", hint="give a beginning with --prompt"
            ) from None
    else:
        given = prompt.encode(errors="surrogateescape") or b"\n"
    start = prompt_tokens(tokenizer, given)
    rest()  # the text itself is one
    sys.stdout.buffer.write(given)
    begin = perf_counter()
    tokens = generate(trained.session, start, length, temperature, top_k, seed, alphabet=tokenizer.vocabulary)
    for text in decode_stream(tokenizer, tokens):
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    seconds = perf_counter() - begin
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    print_words(f"{length:,} tokens in {seconds:.1f} s: {length / seconds:,.1f} tokens per second")


def open_model(run: Path, policy: str | None, backend: Backend | None, source: Source) -> "TrainedModel":
    """Loads a trained model, and says so."""
    from halfstep.training.run.trained import open_trained

    if note := read_as(policy or ""):
        print_words(note)
    print_words(f"loading `{run}`")
    where = source.device, source.data, source.validation
    return open_trained(run, *where, policy=policy, backend=backend, weights=source.weights)


def held_out_text(trained: "TrainedModel") -> "Corpus":
    """Opens the held-out text of a model; the text that it was trained on only if that is a part of it."""
    from halfstep.training.data.load import load_corpus, load_held_out

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
        print_table(
            ("", "value"), [(name.replace("_", " "), _format_value(value)) for name, value in data.items()]
        )


def _format_value(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or abs(value) >= 1e-2 else f"{value:.1e}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def home_of(run: Path) -> Path:
    """Returns the run folder, also for a checkpoint in it; for a checkpoint elsewhere, the folder it is in."""
    from halfstep.training.checkpoints import checkpoint

    here = Path(os.path.abspath(run))  # also of `.`; a folder of checkpoints that is a link stays in its run
    if not checkpoint.is_checkpoint(run):
        return run
    return here.parent.parent if here.parent.name == paths.CHECKPOINTS else here.parent
