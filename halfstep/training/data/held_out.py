"""A text to evaluate a trained model on, as the tokens that its run would have had.

The text that the model was trained on is not needed. Tokens of a run on text are bytes. A run on packed data has
its tokenizer in the folder of that data, whose shards are not read: the text is encoded as `halfstep data pack`
would have, so that a text that was held out in packing gives the same tokens again.
"""

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.training.data.corpus import Corpus
from halfstep.training.data.index import INDEX, Index, is_packed, read_index
from halfstep.training.data.load import load_text
from halfstep.training.data.pack.blocks import Position, blocks
from halfstep.training.data.pack.encode import Encoder
from halfstep.training.data.pack.sources import find_sources
from halfstep.training.data.tokenizer_base import BytesTokenizer, Tokenizer
from halfstep.training.data.tokenizers import open_saved
from halfstep.training.data.types import DataError


def load_held_out(text: str, source: str, recorded: Mapping[str, Any], vocabulary: int) -> Corpus:
    """Opens a text, with nothing to train on. `source` is the data of the run, and `recorded` its manifest's."""
    index = packed_index(source, recorded)
    if index is None:
        return load_text(text, vocabulary)
    tokenizer, (found,) = open_saved(Path(source).expanduser(), index.tokenizer), find_sources([text])
    encoder = Encoder(tokenizer, index.packing.field, 1.0)  # every document is below a share of 1
    parts = [encoder.encode(block).sides["val"] for block in blocks(found.files, Position(), encoder.field)]
    tokens = np.concatenate([part.tokens for part in parts])
    if not len(tokens):
        raise DataError(f"`{text}` holds no text", hint="name another with --validation")
    return Corpus(
        train=tokens[:0],
        validation=tokens,
        description=f"held-out text `{text}`: {len(tokens):,} tokens, tokenizer {tokenizer.name}",
        digest=blake2b(tokens.tobytes(), digest_size=16).hexdigest(),
        bytes_per_token=sum(part.text_bytes for part in parts) / len(tokens),
        num_documents=sum(len(part.starts) for part in parts),
        token_bytes=tokenizer.token_bytes,
    )


def run_tokenizer(source: str, recorded: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer of a run: that of its packed data, or bytes."""
    index = packed_index(source, recorded)
    return BytesTokenizer() if index is None else open_saved(Path(source).expanduser(), index.tokenizer)


def packed_index(source: str, recorded: Mapping[str, Any]) -> Index | None:
    """Returns the index of a run's packed data, or None if its tokens are bytes; refuses an unknown tokenizer."""
    folder = Path(source).expanduser()
    if folder.is_dir() and is_packed(folder):
        index = read_index(folder)
        if str(recorded["digest"]).startswith(index.digest):
            return index
        raise DataError(
            f"`{folder}` is not the data that the run learned from: {recorded['description']}",
            hint="name that data with --data: only its tokenizer reads what the model writes",
        )
    if recorded["bytes_per_token"] == 1:
        return None
    if recorded["bytes_per_token"] is None:
        raise DataError(
            "the model was trained on token shards without an index, and which tokenizer made them is unknown",
            hint="train on data that `halfstep data pack` wrote: it keeps its tokenizer",
        )
    gone = f"`{folder}` holds no packed data" if folder.exists() else f"there is no `{folder}`"
    raise DataError(
        f"the tokenizer of the run is not here: {gone}",
        hint=f"name the folder of the packed data with --data; its {INDEX} and its tokenizer are enough",
    )
