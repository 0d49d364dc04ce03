"""A run's tokenizer as the tokenizer.json that transformers reads.

    bytes           byte-level characters without merges: token = byte
    tokenizer.json  as it is
    tiktoken        ranks become merges: a token of rank r is the pair that merging by lower ranks leaves of it
    sentencepiece   refused: its normalization has no exact form there

What was written is loaded by transformers and must encode held-out text as the run did.
"""

import base64
import json
from collections.abc import Mapping
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from halfstep.config.model import ModelConfig
from halfstep.tools.export.folder import ExportError
from halfstep.training.data.tokenizer_base import BytesTokenizer, Tokenizer
from halfstep.training.data.tokenizers import BYTE_OF, HuggingFace, LibraryTokenizer, Tiktoken

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
