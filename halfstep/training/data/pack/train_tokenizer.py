"""Trains a byte-level BPE tokenizer with the `tokenizers` library; `<|endoftext|>` is token 0.

Text is first cut into words as GPT-2 does, and no merge crosses a cut. Documents that packing holds out at the
same share are left out here too, so that the tokenizer never sees the text that evaluates it. The same text gives
the same file on any number of cores: the library merges by count, with ties broken by the pair itself.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from halfstep.training.data.pack.blocks import Position, blocks
from halfstep.training.data.pack.encode import documents
from halfstep.training.data.pack.pack import Meter, check_share
from halfstep.training.data.pack.sources import Source
from halfstep.training.data.tokenizer_base import import_optional
from halfstep.training.data.types import DataContentError, PackingError
from halfstep.training.files import write_whole

END_OF_TEXT = "<|endoftext|>"
SMALLEST = 257  # the bytes and <|endoftext|>
LARGEST = 1 << 22  # sixteen times the largest in use; the library sets memory aside for each token


def train_tokenizer(
    sources: Sequence[Source],
    out: Path,
    vocabulary: int,
    *,
    field: str = "text",
    validation: float = 0.01,
    meter: Meter | None = None,
) -> int:
    """Writes a tokenizer.json of at most `vocabulary` tokens and returns how many it has."""
    library = import_optional("tokenizers", "training a tokenizer")
    if vocabulary < SMALLEST:
        raise PackingError(
            f"--vocabulary is {vocabulary}, but the bytes and {END_OF_TEXT} alone take {SMALLEST} tokens"
        )
    if vocabulary > LARGEST:
        raise PackingError(
            f"--vocabulary is {vocabulary}; it must be at most {LARGEST}", hint="usual are 32,000 to 256,000"
        )
    check_share(validation)
    if out.suffix != ".json":
        raise PackingError(f"--out must end in .json, and is `{out}`", hint="the name says what a tokenizer is")
    if out.exists():
        raise PackingError(f"`{out}` exists already", hint="choose another file with --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)  # before hours of reading
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    files, num_texts = list(chain.from_iterable(source.files for source in sources)), 0
    total = sum(file.size for file in files)

    def read() -> Iterator[list[str]]:
        """Yields the documents of a block together: the library counts the words of a list in parallel."""
        nonlocal num_texts
        for block in blocks(files, Position(), field):
            texts = [each.text for each in documents(block, field, validation, Counter()) if not each.held_out]
            num_texts += len(texts)
            yield texts
            if meter is not None:
                meter(block.done, total, 0)

    tokenizer.train_from_iterator(read(), trainer)
    if not num_texts:
        raise DataContentError("the sources hold no text to learn from", hint="choose other sources")
    write_whole(out, json.dumps(json.loads(tokenizer.to_str()), indent=1, ensure_ascii=False).encode())
    return int(tokenizer.get_vocab_size())
