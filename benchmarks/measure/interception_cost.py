"""Measures what intercepting torch functions costs an eager training step: with the function mode, and without.

    python benchmarks/measure/interception_cost.py [--device cuda] [--width 768] [--layers 12]
        [--tokens 1024] [--batch 8]

Times steps of Hugging Face's GPT-2 and Llama under bf16-mixed, in turns, the best of 15 each. "without" disables
the mode: layers still cast, functions run in the dtypes they are given. The difference is work on the host; a
busy GPU hides it behind its kernels. Compiled code pays none of it.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

from halfstep.torch import AdamW, prepare
from halfstep.torch.convert import modules
from halfstep.torch.convert.functions.mode import WATCHERS, run_in_mode

ROUNDS = 15


def models(options: argparse.Namespace) -> dict[str, nn.Module]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    heads = max(options.width // 64, 2)
    gpt2 = {"n_embd": options.width, "n_layer": options.layers, "n_head": heads, "n_positions": options.tokens}
    llama = {"hidden_size": options.width, "num_hidden_layers": options.layers, "num_attention_heads": heads}
    llama |= {"num_key_value_heads": heads, "intermediate_size": 8 * options.width // 3, "vocab_size": 1024}
    return {
        "GPT-2": GPT2LMHeadModel(GPT2Config(**gpt2, vocab_size=1024, use_cache=False)),
        "Llama": LlamaForCausalLM(LlamaConfig(**llama, use_cache=False)),
    }


def without(mode: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def measure(model: nn.Module, options: argparse.Namespace) -> tuple[float, float, int]:
    """Returns seconds per step with and without the mode, and how many functions it intercepts."""
    model.to(options.device)
    run = prepare(model, AdamW(model.parameters(), lr=1e-4), "bf16-mixed")
    tokens = torch.randint(0, 1024, (options.batch, options.tokens), device=options.device)

    def step() -> float:
        begun = time.perf_counter()
        run.step(lambda t: model(input_ids=t, labels=t).loss, [tokens])
        if options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    seen: list[Any] = []
    WATCHERS.append(lambda *event: seen.append(event[1]))
    step()
    WATCHERS.pop()
    times: dict[Any, list[float]] = {run_in_mode: [], without: []}
    for _ in range(ROUNDS):
        for way, taken in times.items():
            modules.within = way
            taken.append(step())
    modules.within = run_in_mode
    return min(times[run_in_mode]), min(times[without]), len(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args()
    for name, model in models(options).items():
        on, off, calls = measure(model, options)
        each = (on - off) / calls * 1e6
        print(
            f"{name}: {on * 1e3:.1f} ms per step, {off * 1e3:.1f} without; {calls} functions, {each:.1f} us each"
        )


if __name__ == "__main__":
    main()
