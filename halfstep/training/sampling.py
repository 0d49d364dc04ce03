"""Samples text from a model, token by token. numpy draws, so one seed gives one text wherever the logits agree."""

from collections.abc import Iterable, Iterator

import numpy as np

from halfstep.config.session import Session
from halfstep.core.errors import OptionError
from halfstep.training.data.tokenizer_base import BytesTokenizer, Tokenizer
from halfstep.training.data.types import Tokens

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
