"""A trained model in a session that does not train: for `halfstep eval`, `sample` and `artifact`.

It comes from a run folder, a checkpoint or an artifact, and runs in the precision and on the backend of its
training or in others: weights are handed over whole, in fp32, whatever form they had in training. It needs no
lock. Text is sampled from it token by token: numpy draws, so one seed gives one text wherever the logits agree.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from halfstep.config.run import Backend, ParallelConfig, RunConfig
from halfstep.config.schema import build
from halfstep.config.session import Session
from halfstep.core.errors import OptionError, RunFolderError
from halfstep.core.policy import Policy
from halfstep.core.state_format import Stored
from halfstep.training import paths
from halfstep.training.checkpoints import checkpoint
from halfstep.training.checkpoints.checkpoint import Loaded
from halfstep.training.data.tokenizer_base import BytesTokenizer, Tokenizer
from halfstep.training.data.types import Tokens
from halfstep.training.run.manifest import Recorded, check_manifest
from halfstep.training.session import open_session
from halfstep.training.weights.artifact import is_artifact, load_artifact, masters

Kind = Literal["model", "ema"]
_HINT = "name a run folder, such as runs/tiny-..., a checkpoint's own, or a file that `halfstep artifact` wrote"


@dataclass(frozen=True)
class Trained:
    """A trained model in a session, and where it comes from."""

    config: RunConfig
    policy: Policy  # the session's is without what only training uses
    session: Session
    saved: Loaded  # its tensors are released; the manifest of an artifact is what it knows of its run
    weights: Kind
    state: dict[str, Stored]  # the weights as they were saved, whole and in fp32
    other_text: bool  # whether the text to hold out may be another than that of the run


def open_trained(
    place: Path,
    device: str | None = None,
    data: str | None = None,
    validation: str | None = None,
    *,
    policy: str | None = None,
    backend: Backend | None = None,
    weights: Kind | None = None,
) -> Trained:
    """Loads a run's newest checkpoint, a named one or an artifact.

    `data` is where the data moved to, and `validation` another text to hold out than the run's.
    """
    saved, config = _load(place)
    config = replace(config, parallel=ParallelConfig())  # it is read whole, by one process
    if backend is not None:
        config = replace(config, backend=backend)
    named: dict[str, Any] = {"source": data, "validation": validation}
    named = {setting: each for setting, each in named.items() if each is not None}
    config = replace(config, data=replace(config.data, **named))
    kind = _kind(saved, config, weights)
    averaged = kind == "ema" and "weights" not in saved.manifest
    state = {
        f"model.{name}": Stored("F32", value.shape, value.tobytes())
        for name, value in masters(saved.arrays, config.model, averaged=averaged)
    }
    saved.arrays.clear()
    asked = Policy.parse(saved.manifest["policy"] if policy is None else policy)
    session = open_session(config, asked, device, train=False)
    session.load_weights(state)
    return Trained(config, asked, session, saved, kind, state, other_text=validation is not None)


def _load(place: Path) -> tuple[Loaded, RunConfig]:
    if is_artifact(place):
        saved = load_artifact(place)
        return saved, build(RunConfig, saved.manifest["config"])
    if not place.is_dir():
        gone = f"there is no such folder: `{place}`"
        raise RunFolderError(f"`{place}` is a file, but not an artifact" if place.exists() else gone, hint=_HINT)
    found = checkpoint.load_named(place)
    if found is None and (place / paths.EXPORT_RECORD).is_file():
        raise RunFolderError(
            f"`{place}` is an export, which other libraries load", hint="name the run that it is from"
        )
    if found is None:
        inside = checkpoint.step_folders(place)
        hint = f"name one of those inside, such as `{inside[-1]}`" if inside else _HINT
        raise RunFolderError(f"`{place}` holds no checkpoint{' itself' if inside else ''}", hint=hint)
    return found, check_manifest(found.manifest, found.path, Recorded)


def _kind(saved: Loaded, config: RunConfig, asked: Kind | None) -> Kind:
    """Returns which weights to take: the average, if it was kept, unless others were asked for."""
    only: Kind | None = saved.manifest.get("weights")  # an artifact holds one of the two
    if only is not None and asked not in (None, only):
        raise OptionError(
            f"--weights {asked}: the artifact `{saved.path}` was made of its run's {only} weights",
            hint=f"name the run itself, or make another with `halfstep artifact RUN --weights {asked}`",
        )
    if asked == "ema" and not config.training.ema:
        raise OptionError(
            f"--weights ema: the run of `{saved.path}` kept no average of its weights",
            hint="use --weights model; `training.ema = 0.999` keeps one while training",
        )
    return only or asked or ("ema" if config.training.ema else "model")


# --- sampling -----------------------------------------------------------------------------------------------

FIRST_TOKENS = 64  # of the held-out text, whose first line is the default prompt


def check_sampling(length: int, temperature: float, top_k: int, seed: int) -> None:
    """Refuses options that are out of range, and names each."""
    is_warmth = temperature == 0 or 0.01 <= temperature <= 100
    wrong = [
        f"{name} {given}: it must be {allowed}"
        for name, given, allowed, right in (
            ("--length", length, "1 or more", length >= 1),
            ("--temperature", temperature, "0, or from 0.01 to 100", is_warmth),
            ("--top-k", top_k, "0 or more", top_k >= 0),
            ("--seed", seed, "from 0 to 2^63 - 1", 0 <= seed < 2**63),
        )
        if not right
    ]
    if wrong:
        raise OptionError("; ".join(wrong), hint="`halfstep sample --help` explains each and its default")


def prompt_tokens(tokenizer: Tokenizer, prompt: bytes) -> list[int]:
    """Returns a prompt as tokens, after the separator that documents begin with. A byte tokenizer takes any."""
    if isinstance(tokenizer, BytesTokenizer):
        return list(prompt)
    tokens = [int(token) for token in tokenizer.encode([prompt.decode(errors="replace")])[0]]
    return tokens if tokenizer.separator is None else [tokenizer.separator, *tokens]


def first_line(tokenizer: Tokenizer, held_out: Tokens) -> bytes:
    """Returns the first line of held-out text that is not blank, as far as its first tokens reach."""
    tokens = [int(token) for token in held_out[:FIRST_TOKENS] if token != tokenizer.separator]
    text = tokenizer.decode(tokens).decode(errors="ignore")  # they may end inside a character
    lines = text.lstrip("\r\n").splitlines(keepends=True)
    return next((line.encode() for line in lines if line.strip()), b"\n")


def decode_stream(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[bytes]:
    """Yields the text of tokens: of each as it comes if its bytes are known, otherwise of all at the end."""
    if tokenizer.pieces is None:
        yield tokenizer.decode(tokens)
        return
    for token in tokens:
        yield tokenizer.pieces[token]


def generate(
    session: Session, prompt: list[int], count: int, temperature: float, top_k: int, seed: int, alphabet: int
) -> Iterator[int]:
    """Yields tokens below `alphabet` that follow a prompt."""
    generator = np.random.default_rng(seed)
    tokens = list(prompt)
    for _ in range(count):
        logits = session.logits(tokens)[:alphabet].astype(np.float64)
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            if 0 < top_k < logits.size:
                logits[logits < np.partition(logits, -top_k)[-top_k]] = -np.inf
            chances = np.exp((logits - logits.max()) / temperature)
            tokens.append(int(generator.choice(logits.size, p=chances / chances.sum())))
        yield tokens[-1]
