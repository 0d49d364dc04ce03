"""Text out of a model: the next token, drawn from its logits, one at a time.

Drawn in numpy, so that one seed writes one text on every backend, as far as their logits agree.
"""

from collections.abc import Iterator

import numpy as np

from halfstep.training.session import Session


def generate(
    session: Session, prompt: list[int], count: int, temperature: float, top_k: int, seed: int, alphabet: int
) -> Iterator[int]:
    """Tokens below `alphabet` that follow a prompt, one at a time."""
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
