"""Times how long dynamo takes to trace a GPT-2 that is prepared, beside the same under autocast.

    python benchmarks/measure/tracing.py [--layers 12] [--rounds 3] [--policy bf16-mixed]

Before anything is compiled, dynamo interprets the Python code of the model and ours, instruction by instruction,
and every layer takes as long as the first. `instructions` are what it interprets for one layer, the same number in
every run. A time is the shortest of the rounds, in processor time.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._dynamo import symbolic_convert

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
from benchmarks.gpt2 import GPT2
from halfstep.torch import prepare


@contextmanager
def counting() -> Iterator[list[int]]:
    """Inside, the list's one number counts the instructions that dynamo interprets."""
    count, translator = [0], symbolic_convert.InstructionTranslatorBase
    step = translator.step

    def counted(self: symbolic_convert.InstructionTranslatorBase) -> bool:
        count[0] += 1
        return step(self)

    translator.step = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        translator.step = step  # type: ignore[method-assign]


def trace(layers: int, policy: str | None) -> tuple[int, float]:
    """Traces a model, with a policy or under autocast; returns the instructions and the seconds."""
    torch._dynamo.reset()
    model = GPT2(layers=layers, width=64, heads=2, vocabulary=256, context=16)
    if policy is not None:
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    compiled, tokens = torch.compile(model, backend="eager", fullgraph=True), torch.zeros(2, 16, dtype=torch.int64)
    with counting() as count, torch.autocast("cpu", torch.bfloat16, enabled=policy is None):
        began = time.process_time()
        compiled(tokens, tokens)
        return count[0], time.process_time() - began


def per_layer(policy: str | None) -> int:
    """Returns the instructions of one layer."""
    return trace(2, policy)[0] - trace(1, policy)[0]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", default="bf16-mixed")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.layers} layers")
    print(f"{'':36}{'seconds':>8}{'instructions per layer':>26}")
    arms = {"autocast": None, options.policy: options.policy}
    counts = {name: per_layer(policy) for name, policy in arms.items()}  # the first traces import much
    for name, policy in arms.items():
        seconds = min(trace(options.layers, policy)[1] for _ in range(options.rounds))
        print(f"{name:36}{seconds:8.2f}{counts[name]:26,}")


if __name__ == "__main__":
    main()
