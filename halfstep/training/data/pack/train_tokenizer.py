"""A new byte-level BPE tokenizer, learned from text by the `tokenizers` library.

Any text can be encoded and comes back byte for byte: the alphabet is the 256 bytes. Text is first cut into words
as GPT-2 cuts it, and no merge crosses a cut. `<|endoftext|>` is token 0. Documents that packing holds out with the
same share are left out here too, so that the tokenizer has not seen the text it is judged by.

The same text gives the same file, whatever the number of cores: the library counts words in parallel and merges by
count, ties by the pair itself.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from halfstep.training.data.corpus import DataError
from halfstep.training.data.pack.blocks import Position, blocks
from halfstep.training.data.pack.encode import documents
from halfstep.training.data.pack.pack import Meter, check_share
from halfstep.training.data.pack.sources import Source
from halfstep.training.data.tokenizers import needed
from halfstep.training.files import write_whole

END_OF_TEXT = "<|endoftext|>"
SMALLEST = 257  # the bytes and <|endoftext|>


def train_tokenizer(
    sources: Sequence[Source],
    out: Path,
    vocabulary: int,
    *,
    field: str = "text",
    validation: float = 0.01,
    meter: Meter | None = None,
) -> int:
    """Writes a tokenizer.json of at most so many tokens; how many it has comes back."""
    library = needed("tokenizers", "training a tokenizer")
    if vocabulary < SMALLEST:
        raise DataError(f"--vocabulary is {vocabulary}; the bytes and {END_OF_TEXT} alone are {SMALLEST}")
    check_share(validation)
    if out.exists():
        raise DataError(f"`{out}` exists already", hint="name another file by --out, or remove it")
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
    texts = _Texts(sources, field, validation, meter or (lambda done, total, tokens: None))
    tokenizer.train_from_iterator(texts.read(), trainer)
    if not texts.number:
        raise DataError("there is no text to learn from in the sources", hint="name other sources")
    write_whole(out, json.dumps(json.loads(tokenizer.to_str()), indent=1, ensure_ascii=False).encode())
    return int(tokenizer.get_vocab_size())


class _Texts:
    """The documents to learn from, and how many there were."""

    def __init__(self, sources: Sequence[Source], field: str, validation: float, meter: Meter):
        self.files = list(chain.from_iterable(source.files for source in sources))
        self.field, self.validation, self.meter, self.number = field, validation, meter, 0

    def read(self) -> Iterator[list[str]]:
        """A block's documents at a time: the library counts the words of a list in parallel."""
        total = sum(file.size for file in self.files)
        for block in blocks(self.files, Position(), self.field):
            found = documents(block, self.field, self.validation, Counter())
            texts = [each.text for each in found if not each.held_out]
            self.number += len(texts)
            yield texts
            self.meter(block.done, total, 0)
