"""Writes a trained model as a target, loads it back, and keeps it if it is the model that it came from.

Two measures, both in fp32 and against the source's own session:

    logits          The same weights, rounded to the format, give the same logits in the library that loaded
                    them. Sums differ in their order: each of the S results that follow one another carries the
                    error of a sum of at most L terms, and errors of random sign add up as the root of their
                    number, so that
                        |theirs - ours| <= sqrt(S L) 2^-24 |ours|, in norm, with S = 16 layers + 4
                    transformers computes rotary angles itself, in fp32: position * rate is off by context * 2^-24.
    bits per byte   The rounded model predicts held-out text as the source does, to one rounding of the format.
                    What int8, int4 and int2 cost has no such bound: 1 % or 2 %, or what the caller allows.

int8 rounds activations too, so its logits are not compared; those of int4 and int2 are compared with our decoder,
whose matrices have the same rounded numbers.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halfstep import __version__
from halfstep.config.model import ModelConfig
from halfstep.core.errors import OptionError, RoundingError, one_of
from halfstep.core.formats import BF16, FP32, Format, parse
from halfstep.core.policy import Policy
from halfstep.core.rounding import cast
from halfstep.core.state_format import Stored
from halfstep.tools.export.blocks import round_matrices
from halfstep.tools.export.folder import ExportError, finish, partial
from halfstep.tools.export.targets import TARGETS, Floats, Job, untie
from halfstep.training.data.corpus import Corpus
from halfstep.training.data.tokenizer_base import Tokenizer
from halfstep.training.evaluation import Evaluation, evaluate
from halfstep.training.run.trained import Trained
from halfstep.training.session import open_session
from halfstep.training.weights.artifact import describe_origin, masters

NUM_WINDOWS, TEXT_TOKENS = 3, 2048  # of held-out text: to compare logits on, and to try the tokenizer with
# How far bits per byte may be from the source's, relative to them.
SCORE_BOUNDS = {"fp32": 1e-4, "bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 0.01, "int4": 0.02, "int2": 0.02}
MOST_ALLOWED = 10.0  # that a caller may ask for


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compares with its source."""

    path: Path
    to: str
    format: str
    bytes: int | None  # None if it was not kept
    before: Evaluation
    after: Evaluation
    bound: float
    bytes_fp32: int  # of the source's weights
    blocks: Mapping[str, Any]  # what was rounded by blocks; empty if the target has none
    logits_error: float | None  # None if the target rounds more than the weights
    logits_bound: float | None

    @property
    def error(self) -> float:
        """How far the score is from the source's, relative to it."""
        before, after = _score(self.before), _score(self.after)
        return abs(after - before) / before if before else math.inf

    @property
    def problem(self) -> str:
        """Why the export is not the model that it came from; empty if it is."""
        if wrong := self._wrong_logits():
            return wrong
        if not self.error <= self.bound:  # also if it is NaN
            what = "held-out loss" if self.before.bits_per_byte is None else "bits per byte"
            return (
                f"it does not score like its source: {what} {_score(self.before):.4f} -> "
                f"{_score(self.after):.4f}, {self.error:.2%} apart, and {self.bound:.2%} is allowed"
            )
        return ""

    @property
    def hint(self) -> str | None:
        """What to write if it was rounded too far; None if that is not what is wrong."""
        too_far = self.bound < self.error < MOST_ALLOWED
        if not TARGETS[self.to].rounds_to or not too_far or self._wrong_logits():
            return None
        allow = f"`--allow {math.ceil(self.error * 100) / 100}` keeps it anyway"
        if not self.blocks:
            return allow
        better = "`--to int4` and `--to int8` lose" if self.to == "int2" else "`--to int8` loses"
        return f"{allow}; {better} less" + (", and so does `--block 32`" if self.blocks["block"] > 32 else "")

    def _wrong_logits(self) -> str:
        error, bound = self.logits_error, self.logits_bound
        if error is None or bound is None or error <= bound:
            return ""
        return f"its logits are {error:.1e} of their norm away from its source's; allowed are {bound:.1e}"

    def record(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {
            "path": str(self.path),
            "to": self.to,
            "format": self.format,
            "kept": not self.problem,
            "bytes_fp32": self.bytes_fp32,
            "bytes": self.bytes,
            "loss_before": self.before.loss,
            "loss_after": self.after.loss,
            "perplexity_before": _perplexity(self.before),
            "perplexity_after": _perplexity(self.after),
            "bits_per_byte_before": self.before.bits_per_byte,
            "bits_per_byte_after": self.after.bits_per_byte,
            "error": self.error,
            "bound": self.bound,
            "logits_error": self.logits_error,
            "logits_bound": self.logits_bound,
            **self.blocks,
        }


def choose_format(to: str, asked: str | None, policy: Policy) -> Format:
    """Returns the format to write: what was asked for, or what the run's policy says under `export`."""
    target, fmt = TARGETS[to], policy.export if asked is None else parse(asked)
    if target.rounds_to:
        return FP32
    if str(fmt) not in target.formats:
        said = f"the run's policy says export={fmt}" if asked is None else f"--format {asked}"
        raise OptionError(
            f"{said}, and `--to {to}` writes {one_of(target.formats)}",
            hint=f"write `--format {target.formats[0]}`" + (", which holds bf16 exactly" if fmt == BF16 else ""),
        )
    return fmt


def check_allowed(allow: float | None) -> None:
    """Refuses a loss to accept that is out of range, as one meant in per cent is."""
    if allow is not None and not 0 <= allow <= MOST_ALLOWED:
        raise OptionError(
            f"--allow {allow:g}: it must be from 0 to {MOST_ALLOWED:g}",
            hint="`--allow 0.2` accepts 20 % more bits per byte",
        )


def run(
    trained: Trained,
    corpus: Corpus,
    tokenizer: Tokenizer | None,
    to: str,
    fmt: Format,
    place: Path,
    say: Callable[[str], None],
    *,
    device: str | None = None,
    tokens: int,
    block: int,
    allow: float | None,
) -> Exported:
    """Exports a trained model that runs in fp32. `place` was checked; the model's session is used up."""
    target, config, session = TARGETS[to], trained.config, trained.session
    limit = min(tokens, config.training.validation_tokens)
    config = replace(config, training=replace(config.training, validation_tokens=limit))
    weights = round_weights(masters(trained.state, config.model, averaged=False), fmt)
    size, errors = sum(x.nbytes for x in weights.values()), dict[str, float]()
    if target.bits:
        model, weights = untie(config.model, weights)
        weights, errors = round_matrices(weights, target.bits, block)
    text = "" if tokenizer is None else _text(tokenizer, corpus)
    job = Job(config.model, weights, fmt, session, device, tokenizer, text, block)
    target.check(job)
    windows = _windows(corpus, config.model)
    with partial(place, size * fmt.bits // 32) as folder:
        before = evaluate(session, corpus, config, averaged=False)
        say(f"before: {before}")
        if target.bits:
            session = open_session(replace(config, model=model), trained.policy, device, train=False)
        session.load_weights({f"model.{name}": Stored("F32", x.shape, x.tobytes()) for name, x in weights.items()})
        ours = np.array([session.logits(window) for window in windows], np.float64)
        target.write(job, folder)
        loaded = target.load(job, folder)
        theirs = np.array([loaded.logits(window) for window in windows], np.float64)
        error = float(np.linalg.norm(theirs - ours) / (np.linalg.norm(ours) or 1.0))
        after = evaluate(loaded, corpus, config, averaged=False)
        name = target.rounds_to or str(fmt)
        logits = (None, None) if name == "int8" else (error, logits_bound(config.model, to))
        bound = SCORE_BOUNDS[name] if allow is None else allow
        blocks = _describe_blocks(weights, errors, block) if errors else {}
        result = Exported(place, to, name, None, before, after, bound, size, blocks, *logits)
        if result.problem:
            return result
        manifest = trained.saved.manifest
        origin = describe_origin(manifest, manifest["step"], trained.weights)
        kept = {key: value for key, value in result.record().items() if key not in ("path", "bytes", "kept")}
        record = {"halfstep": __version__, **origin, "to": to, "format": name, "score": kept}
        record |= {"matrix_errors": errors} if errors else {}
        return replace(result, bytes=finish(folder, place, record))


def round_weights(weights: Iterable[tuple[str, Floats]], fmt: Format) -> dict[str, Floats]:
    """Returns weights as numbers of a format, to nearest; refuses what is not finite there."""
    result = {}
    for name, value in weights:
        if not np.isfinite(value).all():
            raise ExportError(f"`{name}` holds numbers that are not finite", hint="use an earlier checkpoint")
        try:
            result[name] = value if fmt == FP32 else cast(value, fmt, overflow="raise")
        except RoundingError as error:
            raise ExportError(
                f"`{name}` does not fit {fmt}: {error.message}", hint="use `--format bf16`"
            ) from None
    return result


def _describe_blocks(weights: Mapping[str, Floats], errors: Mapping[str, float], block: int) -> dict[str, Any]:
    inside, worst = sum(weights[name].size for name in errors), max(errors, key=lambda name: errors[name])
    outside = sum(x.size for x in weights.values()) - inside
    sizes = {"block": block, "parameters_rounded": inside, "parameters_fp32": outside}
    return {**sizes, "worst_matrix": worst, "worst_matrix_error": errors[worst]}


def logits_bound(model: ModelConfig, to: str) -> float:
    """Returns how far a target's logits may be from ours, in norm, of the same weights in fp32."""
    longest = max(model.width, model.size_of_mlp, model.heads * model.size_of_head, model.context)
    rotary = TARGETS[to].own_angles and model.positions == "rotary"
    angles = model.context * 2.0**-24 if rotary else 0.0
    return math.sqrt((16 * model.layers + 4) * longest) * 2.0**-24 + angles


def _windows(corpus: Corpus, model: ModelConfig) -> list[list[int]]:
    """Returns pieces of the held-out text from its beginning, middle and end."""
    most = max(0, len(corpus.validation) - model.context)
    starts = sorted({most * part // max(1, NUM_WINDOWS - 1) for part in range(NUM_WINDOWS)})
    return [[int(token) for token in corpus.validation[start : start + model.context]] for start in starts]


def _text(tokenizer: Tokenizer, corpus: Corpus) -> str:
    tokens = [int(token) for token in corpus.validation[:TEXT_TOKENS] if token != tokenizer.separator]
    return tokenizer.decode(tokens).decode(errors="ignore")


def _perplexity(evaluation: Evaluation) -> float:
    return math.exp(evaluation.loss) if evaluation.loss < 700 else math.inf


def _score(evaluation: Evaluation) -> float:
    return evaluation.loss if evaluation.bits_per_byte is None else evaluation.bits_per_byte
