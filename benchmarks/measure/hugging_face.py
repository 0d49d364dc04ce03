"""Compares models of transformers under a policy with the same models under autocast, compiled, in one run.

    python benchmarks/measure/hugging_face.py --section plain --model gpt2      # or qwen3
    python benchmarks/measure/hugging_face.py --section trainer --model gpt2    # --mask: with masks of ones
    python benchmarks/measure/hugging_face.py --section shapes                  # --model llama: one of them
    python benchmarks/measure/hugging_face.py --tiny                            # on a CPU: whether it runs

    plain     autocast   the unchanged model under autocast in bf16, torch's fused AdamW, clipped: the usual way
              causal     the same, but attention gets no mask, as you would write it after a look at the profile
              halfstep   prepare(model, AdamW, "bf16-mixed,param=fp32:split", clip_norm=1)
    trainer   stock      transformers.Trainer with bf16=True, torch_compile=True, logging_nan_inf_filter=False
              halfstep   our Trainer with policy="bf16-mixed" instead of bf16=True
    shapes    autocast and halfstep, as in `plain`, for six models with few layers; no bars

Each arm is a process of its own: its peak memory is its own, and Trainer's loop can be an arm. Arms compile one
after the other, then take turns of `--steps` updates, in reverse order every other time, while the others wait. A
turn is timed from one synchronized device to the next, and the updates that compile are in none. Ratios are of the
medians of turns, and of the fastest turns. All arms start from the same weights and see the same random tokens;
their losses must agree to 1 %. Exit code 1 if a bar is missed or an arm failed.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn

from halfstep.torch import AdamW, prepare

RATE, CLIP = 1e-4, 1.0
SPLIT = "bf16-mixed,param=fp32:split"
NO_MASK = "benchmark_without_mask"
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Section:
    """Arms that are compared, the last with the others."""

    arms: tuple[str, ...]
    models: tuple[str, ...]
    policy: str
    bars: dict[str, tuple[float, float | None]]  # against an arm: the least speed, the most memory
    layers: int | None = None


SECTIONS = {
    "plain": Section(
        ("autocast", "causal", "halfstep"),
        ("gpt2", "qwen3"),
        SPLIT,
        {"autocast": (1.18, 0.95), "causal": (1.03, 0.95)},
    ),
    "trainer": Section(("stock", "halfstep"), ("gpt2", "qwen3"), "bf16-mixed", {"stock": (1.12, None)}),
    "shapes": Section(
        ("autocast", "halfstep"), ("gpt2", "llama", "qwen3", "mixtral", "bert", "vit"), SPLIT, {}, layers=4
    ),
}


@dataclass(frozen=True)
class Shape:
    """A model, the size of its batches, and a small stand-in for it."""

    config: str
    kind: str
    sizes: dict[str, Any]
    small: dict[str, Any]
    batch: tuple[int, int]  # sequences and tokens in each; images and the pixels of a side
    depth: str = "num_hidden_layers"

    def make(self, given: argparse.Namespace, layers: int | None) -> Any:
        """Returns the model with its random weights."""
        torch.manual_seed(0)
        sizes = {
            **self.sizes,
            **({} if layers is None else {self.depth: layers}),
            **(self.small if given.tiny else {}),
        }
        config = getattr(transformers, self.config)(**sizes)
        with torch.device(given.device):
            return getattr(transformers, self.kind)(config).train()

    def draw(self, model: Any, seed: int, given: argparse.Namespace, device: str) -> Batch:
        """Returns a batch of random tokens or images, and its labels."""
        generator = torch.Generator(device).manual_seed(seed)
        count, size = self.batch_size(given)
        options: Any = {"generator": generator, "device": device}
        if "image_size" in self.sizes:
            labels = torch.randint(model.config.num_labels, (count,), **options)
            return {"pixel_values": torch.randn(count, 3, size, size, **options), "labels": labels}
        tokens = torch.randint(model.config.vocab_size, (count, size), **options)
        return {"input_ids": tokens, "labels": tokens}

    def batch_size(self, given: argparse.Namespace) -> tuple[int, int]:
        """Returns how many sequences a batch has, and their length."""
        count, size = (2, 16) if given.tiny else self.batch
        return given.batch or count, size

    def units(self, given: argparse.Namespace) -> int:
        """Returns how many tokens or images an update takes."""
        count, size = self.batch_size(given)
        return count if "image_size" in self.sizes else count * size


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
        "n_layer",
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


# -- an arm, in its process


class Turns:
    """An arm's side of the pipe: it counts updates, reports a turn when it is over, and waits for the next."""

    def __init__(self, pipe: Any, given: argparse.Namespace):
        self._pipe, self._given = pipe, given
        self._left, self._start = 0, 0.0

    def wait(self) -> bool:
        """Waits until it is this arm's turn; returns whether the arm ends instead."""
        self._left = self._pipe.recv()
        self._start = time.perf_counter()
        return not self._left

    def count(self) -> bool:
        """Counts an update; returns whether the arm ends."""
        self._left -= 1
        if self._left:
            return False
        taken = {"seconds": 0.0, "peak": 0}
        if self._given.device == "cuda":
            torch.cuda.synchronize()
            taken["peak"] = torch.cuda.max_memory_allocated()
        taken["seconds"] = time.perf_counter() - self._start
        self._pipe.send(taken)
        stop = self.wait()
        if self._given.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return stop


def work(pipe: Any, section: str, model: str, arm: str, given: argparse.Namespace) -> None:
    """Runs an arm until it has to end; sends its turns, then its mean loss, or what went wrong."""
    try:
        run = train_by_trainer if section == "trainer" else train
        loss = run(SECTIONS[section], SHAPES[model], arm, Turns(pipe, given), given)
        pipe.send({"loss": loss})
    except Exception:
        pipe.send({"error": traceback.format_exc()})


def train(section: Section, shape: Shape, arm: str, turns: Turns, given: argparse.Namespace) -> float:
    """Trains in a plain loop; returns the mean of its first losses."""
    model = shape.make(given, given.layers or section.layers)
    step = _make_step(arm, model, given.policy or section.policy, given)
    batches = [shape.draw(model, seed, given, given.device) for seed in range(4)]
    losses: list[Tensor] = []
    stop = turns.wait()
    while not stop:
        loss = step(batches[len(losses) % 4]).detach()
        losses.append(loss)
        stop = turns.count()
    return _mean(losses[: given.warmup])


def _mean(losses: list[Tensor]) -> float:
    return float(torch.stack(losses).mean())


def _make_step(arm: str, model: Any, policy: str, given: argparse.Namespace) -> Callable[[Batch], Tensor]:
    if arm == "halfstep":
        run = prepare(model, AdamW(model.parameters(), lr=RATE), policy, clip_norm=CLIP)
        forward = torch.compile(model, backend=given.backend)
        return lambda batch: run.step(lambda b: forward(**b).loss, [batch]).loss
    if arm == "causal":
        _leave_masks_out(model)
    return partial(_autocast_step, model, torch.compile(model, backend=given.backend), _stock_adamw(model), given)


def _stock_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def _autocast_step(
    model: nn.Module, forward: Any, optimizer: torch.optim.Optimizer, given: argparse.Namespace, batch: Batch
) -> Tensor:
    with torch.autocast(given.device, torch.bfloat16):
        loss: Tensor = forward(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _leave_masks_out(model: Any) -> None:
    """Gives a model attention without any mask: right for these batches, which nothing checks."""
    transformers.AttentionInterface.register(NO_MASK, transformers.AttentionInterface()["sdpa"])
    transformers.AttentionMaskInterface.register(NO_MASK, lambda **_: None)
    model.set_attn_implementation(NO_MASK)


class Rows(torch.utils.data.Dataset[Batch]):
    """A dataset of ready-made random sequences, as long as a Trainer needs."""

    def __init__(self, rows: Tensor, count: int, mask: bool):
        self._rows, self._count = rows, count
        self._mask = {"attention_mask": torch.ones_like(rows[0])} if mask else {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Batch:
        row = self._rows[i % len(self._rows)]
        return {"input_ids": row, "labels": row, **self._mask}


class TrainerTurns(transformers.TrainerCallback):
    """Takes turns inside of a Trainer's loop."""

    def __init__(self, turns: Turns):
        self._turns = turns

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Counts the update."""
        control.should_training_stop = self._turns.count()


def train_by_trainer(section: Section, shape: Shape, arm: str, turns: Turns, given: argparse.Namespace) -> float:
    """Trains by a Trainer; returns the mean of its losses."""
    model = shape.make(given, given.layers or section.layers)
    count, _ = shape.batch_size(given)
    steps = given.warmup + given.turns * given.steps + 1
    data = [shape.draw(model, seed, given, "cpu")["input_ids"] for seed in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=count,
            max_steps=steps,
            learning_rate=RATE,
            max_grad_norm=CLIP,
            bf16=arm == "stock",
            torch_compile=True,
            torch_compile_backend=given.backend,
            logging_nan_inf_filter=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=given.device == "cpu",
        )
        options = {
            "train_dataset": Rows(torch.cat(data), steps * count, given.mask),
            "callbacks": [TrainerTurns(turns)],
        }
        if arm == "stock":
            trainer = transformers.Trainer(model, settings, **options)
        else:
            from halfstep.integrations.transformers import Trainer

            trainer = Trainer(model, settings, policy=given.policy or section.policy, **options)
        if turns.wait():
            return float("nan")
        return float(trainer.train().training_loss)


# -- the comparison, in this process


class FailedError(Exception):
    """An arm failed, or its time was up."""


class Arm:
    """An arm's process, and what is known of its turns."""

    def __init__(self, section: str, model: str, name: str, given: argparse.Namespace):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.name, self.seconds, self.peaks = name, list[float](), list[int]()
        self.done = False
        self._process = context.Process(target=work, args=(theirs, section, model, name, given), daemon=True)
        self._process.start()
        theirs.close()

    def turn(self, steps: int, deadline: float) -> dict[str, Any]:
        """Has the arm make a number of updates; zero ends it."""
        self.start(steps)
        return self.result(deadline)

    def start(self, steps: int) -> None:
        """Begins a turn."""
        with contextlib.suppress(BrokenPipeError):  # it has failed, and sent why
            self._pipe.send(steps)

    def result(self, deadline: float) -> dict[str, Any]:
        """Waits for the end of a turn."""
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            raise FailedError(f"{self.name}: not done within the time limit")
        try:
            got: dict[str, Any] = self._pipe.recv()
        except EOFError:
            raise FailedError(f"{self.name}: its process has died") from None
        if "error" in got:
            raise FailedError(f"{self.name}: {got['error']}")
        self.done = "loss" in got
        return got

    def end(self) -> None:
        """Ends the process; one that has sent its loss ends by itself."""
        self._process.join(10.0 if self.done else 0.0)
        self._process.terminate()
        self._process.join()


def measure(section: str, model: str, given: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Races the arms on one model; returns their times, peaks of memory and losses."""
    arms = [Arm(section, model, name, given) for name in SECTIONS[section].arms]
    try:
        compiling, together = {}, given.together or not SECTIONS[section].bars
        if together:
            for arm in arms:
                arm.start(given.warmup)
        for arm in arms:
            taken = arm.result(deadline) if together else arm.turn(given.warmup, deadline)
            compiling[arm.name] = taken["seconds"]
            print(f"  {arm.name}: {given.warmup} first updates, compiled, {taken['seconds']:.1f} s", flush=True)
        for turn in range(given.turns):
            start = time.monotonic()
            for arm in arms[:: 1 if turn % 2 else -1]:
                taken = arm.turn(given.steps, deadline)
                arm.seconds.append(taken["seconds"] / given.steps)
                arm.peaks.append(taken["peak"])
            if turn >= 2 and 2 * time.monotonic() - start > deadline:
                print(f"  the time limit is near: {turn + 1} turns instead of {given.turns}")
                break
        losses = {arm.name: arm.turn(0, deadline)["loss"] for arm in arms}
    finally:
        for arm in arms:
            arm.end()
    units = SHAPES[model].units(given)
    rows = {
        arm.name: {
            "milliseconds": [round(1e3 * t, 3) for t in arm.seconds],
            "per second": units / statistics.median(arm.seconds),
            "peak MiB": max(arm.peaks) / 2**20,
            "first updates": compiling[arm.name],
            "loss": losses[arm.name],
        }
        for arm in arms
    }
    batch = " x ".join(map(str, SHAPES[model].batch_size(given)))
    return {"section": section, "model": model, "batch": batch, "arms": rows}


def show(result: dict[str, Any], *, judged: bool) -> list[str]:
    """Prints a result; returns the bars that it misses and the losses that disagree."""
    arms, section = result["arms"], SECTIONS[result["section"]]
    where = f"{result['section']} {result['model']}"
    print(f"{where}, {result['batch']}")
    for name, row in arms.items():
        times = row["milliseconds"]
        print(
            f"  {name:9} median {statistics.median(times):9.2f} ms, fastest {min(times):9.2f}, "
            f"{row['per second'] / 1e3:8.1f} k/s, peak {row['peak MiB']:9,.0f} MiB, loss {row['loss']:.4f}"
        )
    *others, ours = section.arms
    wrong = []
    for other in others:
        pair = arms[other]["milliseconds"], arms[ours]["milliseconds"]
        speed = statistics.median(pair[0]) / statistics.median(pair[1])
        memory = arms[ours]["peak MiB"] / max(arms[other]["peak MiB"], 1.0)
        result[f"{ours} of {other}"] = {"speed": speed, "fastest": min(pair[0]) / min(pair[1]), "memory": memory}
        least, most = section.bars.get(other, (None, None))
        for what, value, bar, sign in (("speed", speed, least, 1), ("memory", memory, most, -1)):
            text = "" if bar is None else f" (bar {bar})"
            fastest = f", by the fastest turns {min(pair[0]) / min(pair[1]):.3f}" if what == "speed" else ""
            print(f"  {value:.3f} x the {what} of {other}{text}{fastest}")
            if judged and bar is not None and sign * value < sign * bar:
                wrong.append(f"{where}: {value:.3f} x the {what} of {other}, the bar is {bar}")
        if not abs(arms[other]["loss"] - arms[ours]["loss"]) <= 0.01 * abs(arms[other]["loss"]):
            wrong.append(f"{where}: losses are {arms[ours]['loss']:.4f}, and {arms[other]['loss']:.4f} of {other}")
    return wrong


def main() -> int:
    """Measures what is asked for, each section within its time limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=[*SECTIONS], default=[*SECTIONS])
    parser.add_argument("--model", nargs="+", choices=[*SHAPES], help="those of the section")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="updates in a turn")
    parser.add_argument("--warmup", type=int, default=8, help="updates before the first turn, which compile")
    parser.add_argument("--limit", type=float, default=190.0, help="seconds for a section")
    parser.add_argument("--batch", type=int, help="sequences in a batch, if not the model's own number")
    parser.add_argument("--layers", type=int, help="layers, if not the section's own number")
    parser.add_argument("--policy", help="of the arm halfstep, if not the section's own")
    parser.add_argument("--mask", action="store_true", help="trainer: data have attention masks of ones")
    parser.add_argument(
        "--together",
        action="store_true",
        help="arms compile at the same time, as in `shapes`; tuning of kernels is then less exact",
    )
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--tiny", action="store_true", help="small stand-ins, which are not judged")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    given = parser.parse_args()
    given.device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.device == "cpu" and not given.tiny:
        parser.error("there is no NVIDIA GPU here; --tiny tries the script on a CPU")
    where = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {where}")
    results, wrong = [], list[str]()
    for section in given.section:
        deadline = time.monotonic() + given.limit
        for model in given.model or SECTIONS[section].models:
            print(f"{section} {model}:", flush=True)
            try:
                results.append(measure(section, model, given, deadline))
            except FailedError as error:
                wrong.append(f"{section} {model}: {error}")
    print()
    for result in results:
        wrong += show(result, judged=not given.tiny)
    for line in wrong:
        print(f"wrong: {line}")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
