"""How fast models are under a policy, however they are written: each against its own autocast, in turns.

    python benchmarks/measure/model_speed.py --models "plain" "custom norm" --arms autocast bf16 fp8 --save FILE
    python benchmarks/measure/model_speed.py --print --save FILE        # only the table so far
    python benchmarks/measure/model_speed.py --dry                      # tiny, on the CPU: whether it runs

Models are GPT-2 in several ways of writing (benchmarks/ways.py), and those of transformers and torchvision;
`NAME/logits` returns the whole output of a model of transformers instead of its loss alone. Arms:

    autocast   the unchanged model under autocast in bf16, torch's fused AdamW, clipped: the usual way
    bf16       prepare(model, AdamW, "bf16-mixed,param=fp32:split", clip_norm=1)
    whole      the same with whole fp32 masters
    fp8        "fp8-mixed,param=fp32:split"

Each arm is a process that holds its model, so that a peak of memory is its own. The arms of some models compile at
the same time, those of fp8 after them and one by one, because they time layers; then all take turns. A ratio is
that of median turns, with that of the fastest beside it. `--mode eager` does not compile. One JSON line for each
model, arm and mode is added to `--save` when it is measured; what is there is not measured again. What is not
ready within the `--seconds` is listed as not run. Losses are those of updates 71 to 80; beside an arm's stands how
far it is from autocast's, and how far three seeds of autocast lie apart.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks

import torch
from torch import Tensor, nn

from benchmarks import ways

ARMS = {
    "bf16": "bf16-mixed,param=fp32:split",
    "whole": "bf16-mixed",
    "fp8": "fp8-mixed,param=fp32:split",
}
GPT2 = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50304, "context": 1024}
TINY = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 64, "context": 16}
RATE, CLIP, FIRST, UPDATES = 1e-4, 1.0, 6, 10
COMPARED = 80  # updates after which losses are compared
SAME: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
_DECODER = {"num_hidden_layers": 6, "use_cache": False, "tie_word_embeddings": True}
# (package, configuration, model, sizes, sequences or images, tokens or pixels)
SHAPES: dict[str, tuple[str, str, str, dict[str, Any], int, int]] = {
    "hf gpt2": ("transformers", "GPT2Config", "GPT2LMHeadModel", _GPT2, 32, 1024),
    "llama": (
        "transformers", "LlamaConfig", "LlamaForCausalLM",
        {**_DECODER, "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
         "num_attention_heads": 32, "num_key_value_heads": 8}, 4, 2048,
    ),
    "qwen3": (
        "transformers", "Qwen3Config", "Qwen3ForCausalLM",
        {**_DECODER, "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}, 8, 1024,
    ),
    "mixtral": (
        "transformers", "MixtralConfig", "MixtralForCausalLM",
        {"num_hidden_layers": 6, "use_cache": False, "vocab_size": 32000, "hidden_size": 1024,
         "intermediate_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8},
        16, 1024,
    ),
    "bert": (
        "transformers", "BertConfig", "BertForMaskedLM",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, 64, 512,
    ),
    "t5": (
        "transformers", "T5Config", "T5ForConditionalGeneration",
        {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12,
         "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}, 32, 512,
    ),
    "whisper": (
        "transformers", "WhisperConfig", "WhisperForConditionalGeneration",
        {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
         "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "dropout": 0.0,
         "use_cache": False}, 16, 448,
    ),
    "vit": (
        "transformers", "ViTConfig", "ViTForImageClassification",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "image_size": 224, "num_labels": 1000},
        128, 224,
    ),
    "convnext": ("torchvision", "", "convnext_tiny", {}, 128, 224),
    "resnet50": ("torchvision", "", "resnet50", {}, 128, 224),
}  # fmt: skip
Step = Callable[[int], Tensor]


# --- an arm, in its process


def _build(
    name: str, device: str, *, dry: bool, seed: int = 0
) -> tuple[nn.Module, Callable[..., Tensor], Callable[[int], Any]]:
    """Returns a model, its loss of (model, batch), and what draws a batch from a seed."""
    torch.manual_seed(seed)
    if name in ways.WAYS:
        sizes, (count, length) = (TINY, (2, 16)) if dry else (GPT2, (32, 1024))
        with torch.device(device):
            model, loss = ways.make(name, **sizes)
        return (
            model,
            lambda m, b: loss(m, *b),
            lambda seed: _tokens(seed, sizes["vocabulary"], count, length, device),
        )
    base, _, form = name.partition("/")
    package, configuration, kind, sizes, count, length = SHAPES[base]
    if package == "torchvision":
        import torchvision

        with torch.device(device):
            model = getattr(torchvision.models, kind)().train()
        if device == "cuda":
            model = model.to(memory_format=torch.channels_last)
        return model, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), lambda s: _images(s, count, device)
    import transformers

    with torch.device(device):
        model = getattr(transformers, kind)(getattr(transformers, configuration)(**sizes)).train()
    key = {"vit": "pixel_values", "whisper": "input_features"}.get(base, "input_ids")

    def loss(m: Any, batch: Any) -> Any:
        made = m(**{key: batch[0], "labels": batch[1]})
        return made if form else made.loss

    if base == "vit":
        return model, loss, lambda seed: _images(seed, count, device)
    vocabulary = model.config.vocab_size
    if base == "whisper":
        sounds = lambda seed: torch.randn(count, 80, 3000, generator=_generator(seed, device), device=device)  # noqa: E731
        return model, loss, lambda seed: (sounds(seed), _tokens(seed, vocabulary, count, length, device)[1])
    return model, loss, lambda seed: _tokens(seed, vocabulary, count, length, device)


def _generator(seed: int, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _tokens(seed: int, vocabulary: int, count: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocabulary, (count, length + 1), generator=_generator(seed, device), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _images(seed: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    generator = _generator(seed, device)
    images = torch.randn(count, 3, 224, 224, generator=generator, device=device)
    images = images.to(memory_format=torch.channels_last) if device == "cuda" else images
    return images, torch.randint(1000, (count,), generator=generator, device=device)


def _step_of(arm: str, mode: str, model: nn.Module, loss: Callable[..., Any], draw: Any, device: str) -> Step:
    batches = [draw(seed) for seed in range(4)]
    if arm == "autocast":
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True, **SAME)
        call = torch.compile(loss) if mode == "compiled" else loss

        def usual(i: int) -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                made = call(model, batches[i % 4])
            value = made if isinstance(made, Tensor) else made.loss
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return usual
    from halfstep.torch import AdamW, prepare

    run = prepare(model, AdamW(model.parameters(), lr=RATE, **SAME), ARMS[arm], clip_norm=CLIP)
    call = torch.compile(loss) if mode == "compiled" else loss

    def of_batch(batch: Any) -> Tensor:
        made = call(model, batch)
        return made if isinstance(made, Tensor) else made.loss

    return lambda i: run.step(of_batch, [batches[i % 4]]).loss


def work(pipe: Any, name: str, arm: str, mode: str, device: str, dry: bool) -> None:
    """Runs an arm: first updates, then a turn whenever it is asked for one."""
    try:
        model, loss, draw = _build(name, device, dry=dry)
        step, losses = _step_of(arm, mode, model, loss, draw, device), []

        def train(updates: int) -> float:
            start = time.perf_counter()
            for _ in range(updates):
                losses.append(step(len(losses)))
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        first = train(1)
        train(FIRST - 1)
        pipe.send({"first": first})
        while pipe.recv():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = train(UPDATES) / UPDATES
            pipe.send({"seconds": seconds, "peak": torch.cuda.max_memory_allocated() if device == "cuda" else 0})
        train(max(0, COMPARED - len(losses)))
        seeds = [_last(losses)]
        for seed in (1, 2) if arm == "autocast" else ():
            model.load_state_dict(_build(name, device, dry=dry, seed=seed)[0].state_dict())
            step, losses = _step_of(arm, mode, model, loss, draw, device), []
            train(COMPARED)
            seeds.append(_last(losses))
        pipe.send({"losses": seeds, "fused": _fused() if arm != "autocast" else {}})
    except Exception:
        pipe.send({"error": traceback.format_exc()})


def _fused() -> dict[str, int]:
    from halfstep.torch import fusion

    return {**fusion.FUSED, **{f"not {name}: {why}": n for (name, why), n in fusion.APART.items()}}


def _last(losses: list[Tensor]) -> float:
    """Returns the mean loss of the last updates that are compared."""
    return torch.stack(losses[COMPARED - UPDATES : COMPARED]).mean().item()


# --- the comparison


def measure(names: list[str], arms: list[str], given: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Compiles the arms of some models at the same time, and lets them take turns; returns a row for each."""
    context, workers = multiprocessing.get_context("spawn"), {}
    keys = sorted(((name, arm) for name in names for arm in arms), key=lambda key: key[1] == "fp8")
    rows: dict[Any, Any] = {
        (name, arm): {"model": name, "arm": arm, "mode": given.mode, "seconds": [], "peak": 0}
        for name, arm in keys
    }
    ready: set[Any] = set()

    def receive_first(those: Any) -> None:
        for key in [key for key in those if key not in ready]:
            rows[key] |= _receive(workers[key][1], given.deadline)
            ready.add(key)

    try:
        for name, arm in keys:
            if arm == "fp8":
                receive_first(workers)
            ours, theirs = context.Pipe()
            options = (theirs, name, arm, given.mode, device, given.dry)
            process = context.Process(target=work, args=options, daemon=True)
            process.start()
            theirs.close()
            workers[name, arm] = (process, ours)
        receive_first(workers)
        for turn in range(given.turns):
            for key, (_, pipe) in [*workers.items()][:: 1 if turn % 2 else -1]:
                if "error" not in rows[key]:
                    pipe.send(True)
                    got = _receive(pipe, given.deadline)
                    rows[key]["seconds"].append(got.pop("seconds", float("nan")))
                    rows[key] |= got
        for key, (_, pipe) in workers.items():
            if "error" not in rows[key]:
                pipe.send(False)
                rows[key] |= _receive(pipe, given.deadline)
    finally:
        for process, _ in workers.values():
            process.terminate()
    return [*rows.values()]


def _receive(pipe: Any, deadline: float) -> dict[str, Any]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return {"error": "not ready in time"}
    try:
        got: dict[str, Any] = pipe.recv()
    except EOFError:
        return {"error": "its process died"}
    return got


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the ratios of each arm to its model's autocast."""
    known = {(row["model"], row["mode"], row["arm"]): row for row in rows}
    lines = [
        "| model | mode | arm | speed | fastest | memory | ms | MiB | first step | loss | gap of spread | fused |",
        "|" + "---|" * 12,
    ]
    for (model, mode, arm), row in known.items():
        base = known.get((model, mode, "autocast"), {})
        if "error" in row:
            lines.append(f"| {model} | {mode} | {arm} | not run: {row['error'].strip().splitlines()[-1]} |")
            continue
        speed = fastest = memory = first = ""
        if base.get("seconds") and arm != "autocast":
            speed = f"{statistics.median(base['seconds']) / statistics.median(row['seconds']):.3f}"
            fastest = f"{min(base['seconds']) / min(row['seconds']):.3f}"
            memory = f"{row['peak'] / base['peak']:.3f}" if base["peak"] else ""
            first = f"{row['first'] / base['first']:.2f}"
        seeds = base.get("losses", [])
        gap = abs(row["losses"][0] - seeds[0]) if seeds else 0.0
        spread = f"{gap:.4f} of {max(seeds) - min(seeds):.4f}" if seeds and arm != "autocast" else ""
        fused = ", ".join(f"{n} {what}" for what, n in row.get("fused", {}).items())
        lines.append(
            f"| {model} | {mode} | {arm} | {speed} | {fastest} | {memory} | "
            f"{1e3 * statistics.median(row['seconds']):.2f} | {row['peak'] / 2**20:,.0f} | {first} | "
            f"{row['losses'][0]:.4f} | {spread} | {fused} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measures what is asked for and not known yet, and prints all that is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*ways.WAYS, *SHAPES])
    parser.add_argument("--arms", nargs="+", choices=["autocast", *ARMS], default=["autocast", "bf16"])
    parser.add_argument("--mode", choices=["compiled", "eager"], default="compiled")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--together", type=int, default=2, help="models whose arms are in memory at the same time")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--print", action="store_true", dest="only_print")
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    given.deadline = time.monotonic() + given.seconds
    device = "cuda" if torch.cuda.is_available() and not given.dry else "cpu"
    rows = (
        [json.loads(line) for line in given.save.read_text().splitlines()]
        if given.save and given.save.exists()
        else []
    )
    done = {(row["model"], row["mode"]) for row in rows if "error" not in row}
    left = [] if given.only_print else [name for name in given.models if (name, given.mode) not in done]
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {where}", flush=True)
    while left and time.monotonic() < given.deadline:
        start = time.monotonic()
        names, left = left[: given.together], left[given.together :]
        found = measure(names, given.arms, given, device)
        rows += found
        if given.save:
            with given.save.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
        print(f"{', '.join(names)}: {time.monotonic() - start:.0f} s", flush=True)
        for row in found:
            if "error" in row:
                print(row["error"], flush=True)
    print(table(rows))
    for name in left:
        print(f"not run: {name}")
    return 1 if any("error" in row for row in rows) or left else 0


if __name__ == "__main__":
    sys.exit(main())
