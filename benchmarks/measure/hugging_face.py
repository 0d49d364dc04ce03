"""Compares models of transformers under `prepare` with the same models under autocast, compiled, in one run.

    python benchmarks/measure/hugging_face.py [gpt2 qwen3 ...] [--rounds 20] [--json FILE]
    python benchmarks/measure/hugging_face.py gpt2 --tiny [--backend aot_eager]     # on a CPU: whether it runs

Three arms take turns, in reverse order every other time, each with its own copy of the model:

    autocast    the model as it is, autocast to bf16, torch's fused AdamW, clipped to 1: what most people run
    causal      the same, and its attention keeps no mask, as somebody who looked at a profile would have it
    halfstep    prepare(model, AdamW, "bf16-mixed,param=fp32:split", clip_norm=1)

All start from the same weights, see the same random batches and are compiled by torch.compile(model). The ratio of
two arms compares their median times. Memory is the peak of an update, less what the other arms hold meanwhile.
The losses of the first updates must agree to 1 %. Exit code 1 if one of the bars is missed: `BARS` is for gpt2 and
qwen3; what is measured of the others is printed.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from autocast_arms import take_turns
from torch import Tensor, nn

from halfstep.torch import AdamW, prepare

POLICY, RATE, CLIP = "bf16-mixed,param=fp32:split", 1e-4, 1.0
BARS = {"speed of autocast": 1.18, "speed of causal": 1.03, "memory of autocast": 0.95}
BARRED = ("gpt2", "qwen3")
NO_MASK = "benchmark_without_mask"
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """A model, the size of its batches, and a small stand-in for both."""

    config: str
    kind: str
    sizes: dict[str, Any]
    small: dict[str, Any]
    batch: tuple[int, int]  # sequences and tokens in each; images and the pixels of a side

    def make(self, *, tiny: bool, device: torch.device) -> nn.Module:
        """Returns the model with its random weights."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**{**self.sizes, **(self.small if tiny else {})})
        with device:
            return getattr(transformers, self.kind)(config).train()

    def draw(self, model: Any, seed: int, *, tiny: bool, device: torch.device) -> Batch:
        """Returns a batch of random tokens or images, and its labels."""
        generator = torch.Generator(device).manual_seed(seed)
        count, size = (2, 16) if tiny else self.batch
        options = {"generator": generator, "device": device}
        if "image_size" in self.sizes:
            labels = torch.randint(model.config.num_labels, (count,), **options)
            return {"pixel_values": torch.randn(count, 3, size, size, **options), "labels": labels}
        tokens = torch.randint(model.config.vocab_size, (count, size), **options)
        return {"input_ids": tokens, "labels": tokens}


_SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
_SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
_ENCODER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHAPES = {
    "gpt2": Shape(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False},
        {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2},
        (32, 1024),
    ),
    "qwen3": Shape(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "use_cache": False,
        },
        _SMALL,
        (8, 1024),
    ),
    "llama": Shape(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "use_cache": False,
        },
        _SMALL,
        (4, 2048),
    ),
    "mixtral": Shape(
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "use_cache": False,
        },
        _SMALL,
        (16, 1024),
    ),
    "bert": Shape("BertConfig", "BertForMaskedLM", _NO_DROPOUT, {**_ENCODER, "vocab_size": 64}, (64, 512)),
    "vit": Shape(
        "ViTConfig",
        "ViTForImageClassification",
        {**_NO_DROPOUT, "image_size": 224, "num_labels": 1000},
        {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 5},
        (128, 224),
    ),
}


class Arm:
    """One way to make an update of a model; it knows its memory at rest and at its peak."""

    def __init__(self, name: str, model: Any, backend: str):
        self.losses: list[float] = []
        device = next(model.parameters()).device
        self.cuda = device.type == "cuda"
        self.peak = self.resting = 0
        before = self._allocated()
        if name == "halfstep":
            run = prepare(model, AdamW(model.parameters(), lr=RATE), POLICY, clip_norm=CLIP)
            forward = torch.compile(model, backend=backend)
            self.step: Callable[[Batch], Tensor] = lambda batch: (
                run.step(lambda b: forward(**b).loss, [batch]).loss
            )
        else:
            if name == "causal":
                _leave_masks_out(model)
            self.step = _autocast(model, torch.compile(model, backend=backend), device.type)
        self.held_before = before

    def rest(self) -> None:
        """Notes what the arm holds between updates, once it has made one."""
        self.resting = self._allocated() - self.held_before

    def update(self, batch: Batch) -> None:
        """Makes an update."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        held = self._allocated()
        loss = self.step(batch)
        if len(self.losses) < 3:
            self.losses.append(float(loss.detach()))
        if self.cuda:
            torch.cuda.synchronize()
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - held + self.resting)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0


def _autocast(model: nn.Module, forward: Any, device: str) -> Callable[[Batch], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step(batch: Batch) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss: Tensor = forward(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _leave_masks_out(model: Any) -> None:
    """Gives a model attention without any mask: right for these batches, which nothing checks."""
    transformers.AttentionInterface.register(NO_MASK, transformers.AttentionInterface()["sdpa"])
    transformers.AttentionMaskInterface.register(NO_MASK, lambda **_: None)
    model.set_attn_implementation(NO_MASK)


def measure(name: str, *, rounds: int, tiny: bool, backend: str, device: torch.device) -> dict[str, Any]:
    """Returns what the arms of one model took, what they held, and their first losses."""
    shape, arms = SHAPES[name], dict[str, Arm]()
    torch._dynamo.reset()
    model = shape.make(tiny=tiny, device=device)
    first = shape.draw(model, 0, tiny=tiny, device=device)
    for arm in ("autocast", "causal", "halfstep"):
        arms[arm] = Arm(arm, copy.deepcopy(model), backend)
        for seed in range(3):
            arms[arm].update(shape.draw(model, seed, tiny=tiny, device=device))
        arms[arm].rest()
        arms[arm].peak = 0
    seeds = iter(range(3, 10**9))

    def timed(arm: Any) -> float:
        batch = shape.draw(model, next(seeds), tiny=tiny, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        arm.update(batch)
        return time.perf_counter() - start

    times = take_turns(arms, rounds, timed)  # type: ignore[arg-type]
    numbers = next(iter(first.values()))
    count = numbers.shape[0] if "pixel_values" in first else numbers.numel()
    median = {arm: statistics.median(taken) for arm, taken in times.items()}
    ratios = {
        "speed of autocast": median["autocast"] / median["halfstep"],
        "speed of causal": median["causal"] / median["halfstep"],
        "memory of autocast": arms["halfstep"].peak / max(arms["autocast"].peak, 1),
    }
    rows = {
        arm: {
            "milliseconds": [round(1e3 * t, 3) for t in taken],
            "per second": count / median[arm],
            "peak MiB": arms[arm].peak / 2**20,
            "losses": arms[arm].losses,
        }
        for arm, taken in times.items()
    }
    return {
        "name": name,
        "unit": "images" if "pixel_values" in first else "tokens",
        "arms": rows,
        "ratios": ratios,
    }


def show(result: dict[str, Any]) -> list[str]:
    """Prints a result; returns the bars that it misses."""
    print(f"{result['name']}:")
    for arm, row in result["arms"].items():
        taken = sorted(row["milliseconds"])
        middle, spread = statistics.median(taken), taken[-1] - taken[0]
        speed = f"{row['per second'] / 1e3:8.1f} thousand {result['unit']}/s"
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
        print(f"  {arm:9} {middle:9.2f} ms (spread {spread:.2f}) {speed} {row['peak MiB']:9,.0f} MiB  {losses}")
    missed = []
    for what, ratio in result["ratios"].items():
        bar = BARS[what] if result["name"] in BARRED else None
        sign = ">=" if what.startswith("speed") else "<="
        print(f"  {ratio:.3f} x the {what}" + ("" if bar is None else f" (bar: {sign} {bar})"))
        if bar is not None and not (ratio >= bar if sign == ">=" else ratio <= bar):
            missed.append(f"{result['name']}: {ratio:.3f} x the {what}, the bar is {bar}")
    reference = result["arms"]["autocast"]["losses"]
    for arm, row in result["arms"].items():
        if any(abs(a - b) > 0.01 * abs(b) for a, b in zip(row["losses"], reference, strict=True)):
            missed.append(f"{result['name']}: the losses of {arm} are {row['losses']}, of autocast {reference}")
    return missed


def main() -> int:
    """Measures the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*SHAPES])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="small stand-ins, without bars")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in SHAPES]
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not given.tiny:
        parser.error("there is no NVIDIA GPU here; --tiny tries the script on a CPU")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {where}, {given.rounds} rounds")
    options = {"rounds": given.rounds, "tiny": given.tiny, "backend": given.backend, "device": device}
    results, missed = [], list[str]()
    for name in given.names:
        results.append(measure(name, **options))
        missed += show(results[-1])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    if given.tiny:
        return 0
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
