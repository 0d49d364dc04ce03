"""What a model can be exported to: how each target is written, and how it is loaded back.

    safetensors   our own names, in one file: `halfstep train --init` and `load_model` read it
    hf            the layout of transformers, for a model that is a GPT-2 or a Qwen3, with its tokenizer
    onnx          model.onnx in fp32, from `tokens` (rows, tokens) to `logits`, through torch's exporter
    int8          the same with every weight matrix in int8, one scale per output: onnxruntime rounds activations
                  at run time, multiplies in int8 and sums in int32. The head is a matrix of its own there. The
                  embedding, norms, softmax and the products of attention stay fp32.
    int4, int2    the same matrices in 4 or 2 bits by blocks (blocks.py), for MatMulNBits of onnxruntime, which
                  widens them as it multiplies; activations, products and sums are fp32

Weights in int8 use 7 bits: x86 without VNNI adds two products of a byte and a weight in 16 bits, which 8 bits
silently overflow, and a file that scored well here would be wrong there.
"""

import base64
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.config.model import ModelConfig, is_matmul, parameter_shapes
from halfstep.config.run import Backend
from halfstep.config.session import Session
from halfstep.core.errors import how_to_install
from halfstep.core.formats import Format
from halfstep.core.rounding import encode
from halfstep.core.state_format import Stored
from halfstep.tools.export.folder import ExportError
from halfstep.training.checkpoints.tensors import write_tensors
from halfstep.training.data.tokenizer_base import BytesTokenizer, Tokenizer
from halfstep.training.data.tokenizers import BYTE_OF, HuggingFace, LibraryTokenizer, Tiktoken
from halfstep.training.session import backend_module
from halfstep.training.weights.layouts import HEAD, OWN, hugging_face
from halfstep.training.weights.pretrained import CONFIG, open_pretrained
from halfstep.training.weights.safetensors import SINGLE

# A run's tokenizer as the tokenizer.json that transformers reads.
#
#     bytes           byte-level characters without merges: token = byte
#     tokenizer.json  as it is
#     tiktoken        ranks become merges: a token of rank r is the pair that merging by lower ranks leaves of it
#     sentencepiece   refused: its normalization has no exact form there
#
# What was written is loaded by transformers and must encode held-out text as the run did.

FILE, DESCRIPTION = "tokenizer.json", "tokenizer_config.json"
CHARACTER_OF = {value: character for character, value in BYTE_OF.items()}


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """Returns the content of a tokenizer.json; refuses a tokenizer that has none."""
    if isinstance(tokenizer, HuggingFace):
        return tokenizer.content
    if isinstance(tokenizer, BytesTokenizer):
        return _bpe({character: value for value, character in sorted(CHARACTER_OF.items())}, [], {}, None)
    if isinstance(tokenizer, Tiktoken):
        written = json.loads(tokenizer.content)
        ranks = {base64.b64decode(word): rank for word, rank in written["ranks"]}
        vocabulary = {_characters(word): rank for word, rank in ranks.items()}
        merges = [_halves(ranks, word, rank) for word, rank in sorted(ranks.items(), key=lambda pair: pair[1])]
        pairs = [[_characters(half) for half in pair] for pair in merges if len(pair) == 2]
        return _bpe(vocabulary, pairs, written["special"], written["pattern"])
    raise ExportError(
        f"the run's tokenizer is of kind {tokenizer.kind}, and `--to hf` writes it as tokenizer.json",
        hint="export `--to safetensors`; or pack the data with a tokenizer.json",
    )


def write_tokenizer(folder: Path, tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Writes the files of a tokenizer."""
    separator = tokenizer.separator_name if isinstance(tokenizer, LibraryTokenizer) else None
    names = {} if separator is None else {"bos_token": separator, "eos_token": separator}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.context,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    (folder / FILE).write_bytes(tokenizer_json(tokenizer))
    (folder / DESCRIPTION).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def check_tokenizer(folder: Path, tokenizer: Tokenizer, text: str) -> None:
    """Refuses a written tokenizer that transformers reads otherwise than the run did."""
    loaded = import_module("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)
    expected = [int(token) for token in tokenizer.encode([text])[0]]
    found = loaded(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    if found != expected:
        pairs = zip(found, expected, strict=False)
        at = next((n for n, (theirs, ours) in enumerate(pairs) if theirs != ours), min(len(found), len(expected)))
        raise ExportError(
            f"tokenizer `{tokenizer.name}` encodes held-out text otherwise in transformers, from token {at} on",
            hint="export `--to safetensors`, and keep the tokenizer of the packed data next to it",
        )


def _bpe(
    vocabulary: Mapping[str, int], merges: list[list[str]], special: Mapping[str, int], pattern: str | None
) -> bytes:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    before: dict[str, Any] = byte_level
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        before = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": name, **plain, "special": True}
        for name, number in sorted(special.items(), key=lambda pair: pair[1])
    ]
    model = {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
        "ignore_merges": True,  # as tiktoken: a piece that is a token is not merged to it
        "vocab": vocabulary,
        "merges": merges,
    }
    table = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": added,
        "pre_tokenizer": before,
        "decoder": byte_level,
        "model": model,
    }
    return json.dumps(table, ensure_ascii=False).encode()


def _characters(word: bytes) -> str:
    return "".join(CHARACTER_OF[value] for value in word)


def _halves(ranks: Mapping[bytes, int], word: bytes, rank: int) -> list[bytes]:
    """Returns what merging by ranks below a word's own leaves of it: two parts, for a word that merging makes."""
    parts = [bytes([value]) for value in word]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        if (lowest := min(pairs)) >= rank:
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


Floats = NDArray[np.float32]
MOST_LOGITS = 2**26  # at once: 256 MiB


class OtherModel:
    """A model that another library runs, from tokens (rows, tokens) to logits, with the methods of a session."""

    def __init__(self, forward: Callable[[NDArray[np.int64]], Floats], model: ModelConfig):
        self._forward, self._model = forward, model

    def evaluate(self, batches: Iterable[NDArray[Any]], *, averaged: bool = True) -> tuple[float, int]:
        """Returns the sum of losses and the number of tokens."""
        total, count = 0.0, 0
        for batch in batches:
            rows = max(1, MOST_LOGITS // (batch.shape[1] * self._model.vocabulary))
            for start in range(0, len(batch), rows):
                tokens = batch[start : start + rows].astype(np.int64)
                total += _loss(self._forward(tokens[:, :-1]), tokens[:, 1:])
                count += tokens[:, 1:].size
        return total, count

    def logits(self, tokens: Sequence[int]) -> Floats:
        """Returns the logits of the token after the given ones."""
        logits: Floats = self._forward(np.array([tokens[-self._model.context :]], np.int64))[0, -1]
        return logits


def _loss(logits: Floats, targets: NDArray[np.int64]) -> float:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
    return float((np.log(np.exp(shifted).sum(axis=-1, dtype=np.float64)) - chosen).sum(dtype=np.float64))


EXPORTER = ("torch", "onnx", "onnxscript", "onnxruntime")
ONNX = "model.onnx"
MOST_PROTOBUF = 2**31 - 2**20  # bytes of one file, without the weights next to it
# A format in a safetensors header, and in config.json.
DTYPES = {"fp32": ("F32", "float32"), "bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16")}


Model = Session | OtherModel  # that was loaded back
Quantize = Callable[["Job", Path, Path, bool], object]


@dataclass(frozen=True)
class Job:
    """What is exported."""

    model: ModelConfig
    weights: Mapping[str, Floats]  # numbers of `format`
    format: Format
    session: Session  # of the source, in fp32
    device: str | None
    tokenizer: Tokenizer | None  # None if nobody knows it
    text: str  # some of the held-out text
    block: int = 0  # how many inputs share a scale, in int4 and int2


@dataclass(frozen=True)
class Target:
    """A way to export."""

    write: Callable[[Job, Path], None]
    load: Callable[[Job, Path], Model]
    packages: tuple[str, ...] = ()
    formats: tuple[str, ...] = tuple(DTYPES)  # that the weights may have
    rounds_to: str = ""  # a format of its own, which the target rounds to further
    bits: int = 0  # of that format, if its numbers are known before they are written: logits are compared then
    own_angles: bool = False  # whether its library computes rotary angles itself, instead of taking ours
    backend: Backend | None = None  # the one that must run the source; None is that of the run
    check: Callable[[Job], object] = lambda _: None  # refuses a model that the target cannot hold


def check_packages(to: str) -> None:
    """Refuses a target whose packages are not installed."""
    if missing := [package for package in TARGETS[to].packages if find_spec(package) is None]:
        raise ExportError(
            f"`--to {to}` needs what is not installed: {', '.join(missing)}",
            hint=how_to_install("torch,export" if "torch" in missing else "export"),
        )


def _write_safetensors(job: Job, folder: Path) -> None:
    write_tensors(folder / SINGLE, _stored(job.weights, job.format))
    _write_config(folder, OWN.to_config(job.model))
    _save_tokenizer(job, folder)


def _load_safetensors(job: Job, folder: Path) -> Model:
    weights = dict(open_pretrained(str(folder), job.model).weights())
    job.session.load_weights({f"model.{name}": Stored("F32", x.shape, x.tobytes()) for name, x in weights.items()})
    return job.session


def _check_hf(job: Job) -> None:
    hugging_face(job.model)
    if job.tokenizer is not None:
        tokenizer_json(job.tokenizer)


def _write_hf(job: Job, folder: Path) -> None:
    layout = hugging_face(job.model)
    laid_out = dict(layout.lay_out(job.model, job.weights.items()))
    write_tensors(folder / SINGLE, _stored(laid_out, job.format), {"format": "pt"})
    separator = None if job.tokenizer is None else job.tokenizer.separator
    ids = {"bos_token_id": separator, "eos_token_id": separator, "pad_token_id": None}
    _write_config(folder, {**layout.to_config(job.model), **ids, "dtype": DTYPES[str(job.format)][1]})
    if job.tokenizer is not None:
        write_tokenizer(folder, job.tokenizer, job.model)


def _load_hf(job: Job, folder: Path) -> Model:
    with _quiet():
        if job.tokenizer is not None:
            check_tokenizer(folder, job.tokenizer, job.text)
        forward = backend_module("torch", "export").open_transformers(folder, job.device)
    return OtherModel(forward, job.model)


def _write_onnx(job: Job, folder: Path) -> None:
    with _quiet():
        backend_module("torch", "export").write_onnx(job.model, job.weights.items(), folder / ONNX)
    _save_tokenizer(job, folder)


def _load_onnx(job: Job, folder: Path) -> Model:
    session = import_module("onnxruntime").InferenceSession(folder / ONNX, providers=["CPUExecutionProvider"])
    return OtherModel(lambda tokens: session.run(["logits"], {"tokens": tokens})[0], job.model)


def untie(model: ModelConfig, weights: Mapping[str, Floats]) -> tuple[ModelConfig, dict[str, Floats]]:
    """Returns a model whose head is a matrix of its own, which can be rounded while the embedding is not."""
    return replace(model, tied=False, zero_head=False), {HEAD: weights["embed.weight"], **weights}


def _write_quantized(quantize: Quantize, job: Job, folder: Path) -> None:
    """Writes the graph in fp32, has onnxruntime quantize it, and keeps the result."""
    model, weights = untie(job.model, job.weights)
    wide = folder / "wide"
    wide.mkdir()
    with _quiet():
        backend_module("torch", "export").write_onnx(model, weights.items(), wide / ONNX)
        quantize(job, wide / ONNX, folder / ONNX, sum(x.nbytes for x in weights.values()) > MOST_PROTOBUF)
    shutil.rmtree(wide)
    _save_tokenizer(job, folder)


def _quantize_int8(job: Job, wide: Path, file: Path, beside: bool) -> None:
    import_module("onnxruntime.quantization").quantize_dynamic(
        wide,
        file,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        reduce_range=True,
        use_external_data_format=beside,
    )


def _quantize_blocks(bits: int, job: Job, wide: Path, file: Path, beside: bool) -> None:
    """Packs weights that are numbers of these blocks already, which the quantizer finds again exactly."""
    quantizer = import_module("onnxruntime.quantization.matmul_nbits_quantizer").MatMulNBitsQuantizer(
        str(wide),
        bits=bits,
        block_size=job.block,
        is_symmetric=True,
        accuracy_level=1,  # products in fp32: a runtime that rounds activations would be another model
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(file), beside)


def _load_quantized(operator: str, job: Job, folder: Path) -> Model:
    graph = import_module("onnx").load(folder / ONNX, load_external_data=False).graph
    found = sum(node.op_type == operator for node in graph.node)
    expected = sum(map(is_matmul, parameter_shapes(replace(job.model, tied=False))))
    if found != expected:
        raise ExportError(f"{found} of {expected} matrices are {operator}; the quantizer left the others in fp32")
    return _load_onnx(job, folder)


def _quantized(quantize: Quantize, operator: str, name: str, bits: int = 0) -> Target:
    ways = partial(_write_quantized, quantize), partial(_load_quantized, operator)
    return Target(*ways, packages=EXPORTER, rounds_to=name, bits=bits, backend="torch")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences libraries, which warn of packages that they could use, and of their own changes.

    onnxruntime's quantizer of blocks configures the root logger when it is imported: that is undone.
    """
    root = logging.root
    before, handlers, level = root.manager.disable, root.handlers[:], root.level
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        root.handlers[:] = handlers
        root.setLevel(level)


def _save_tokenizer(job: Job, folder: Path) -> None:
    """Writes the tokenizer's own file as it is; bytes need none."""
    if job.tokenizer is not None:
        job.tokenizer.save(folder)


def _stored(weights: Mapping[str, Floats], fmt: Format) -> dict[str, Stored]:
    dtype = DTYPES[str(fmt)][0]
    return {name: Stored(dtype, x.shape, encode(x, fmt).tobytes()) for name, x in weights.items()}


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


TARGETS: dict[str, Target] = {
    "hf": Target(
        _write_hf,
        _load_hf,
        packages=("torch", "transformers", "tokenizers"),
        own_angles=True,
        backend="torch",
        check=_check_hf,
    ),
    "safetensors": Target(_write_safetensors, _load_safetensors),
    "onnx": Target(_write_onnx, _load_onnx, packages=EXPORTER, formats=("fp32",), backend="torch"),
    "int8": _quantized(_quantize_int8, "MatMulInteger", "int8"),
    "int4": _quantized(partial(_quantize_blocks, 4), "MatMulNBits", "int4", bits=4),
    "int2": _quantized(partial(_quantize_blocks, 2), "MatMulNBits", "int2", bits=2),
}
