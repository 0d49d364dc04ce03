"""Times a linear layer with its cross-entropy, forward and backward, and a step of GPT-2 124M with and without it.

    python benchmarks/measure/loss.py [--repeats 12] [--no-step]
    python benchmarks/measure/loss.py --sweep
    python benchmarks/measure/loss.py --head

    torch       bf16 matmul of an fp32 weight, `F.cross_entropy` of widened logits, compiled
    rows        halfstep's linear layer, then its kernel on the logits, which stay as they are, compiled
    linear      `linear_cross_entropy`: the gradient is written over the logits, compiled
    4 chunks    the same in four chunks
    eager ...   without a compiler

Arms of one shape take turns; the median of their milliseconds, and the peak of memory beyond what the inputs take.
`--sweep` only times the kernel alone for several blocks and warps, beside a copy of the same bytes, each time of
the same logits; `off` is how far losses are from fp64. Some 20 seconds.
`--head` only compares a head with its loss in bf16 and fp8, compiled, as `fp8-mixed` times it to choose, and
times the kernels that make both layouts of the gradient's codes; some 30 seconds.
Needs an NVIDIA GPU; `--tiny` runs small shapes on any machine, only to show that it runs; `--sweep` then with
TRITON_INTERPRET=1.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.core.precision import precisions
from halfstep.torch import casts_for, layers, linear, linear_cross_entropy
from halfstep.torch.layers import casts_of, cross_entropy
from halfstep.torch.loss import coded as coded_loss
from halfstep.torch.loss import plain as losses
from halfstep.torch.measure import LayerWork, time_layer
from halfstep.torch.session import Session

SHAPES = [
    (32768, 768, 50304),
    (32768, 768, 50257),
    (16384, 2048, 50304),
    (16384, 2048, 128256),
    (8192, 4096, 128256),
]
TINY = [(64, 16, 48)]
HEADS = [(32768, 768, 50304), (16384, 2048, 50304)]
FP8 = precisions(Policy.parse("bf16-mixed,compute=e4m3,grad=e5m2"), ["head"])["head"]
FORMS = [(8192, 16), (8192, 8), (8192, 32), (4096, 8), (16384, 16), (16384, 32)]  # blocks and warps
CASTS = casts_for("bf16-mixed")
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def of_torch(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight.to(x.dtype)).float(), targets)


def of_rows(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(linear(x, weight, None, CASTS), targets, CASTS) / targets.shape[0]


def in_chunks(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, targets, chunks=4)


def arms() -> dict[str, Loss]:
    eager = {"torch": of_torch, "rows": of_rows, "linear": linear_cross_entropy, "4 chunks": in_chunks}
    compiled = {name: torch.compile(loss, fullgraph=True) for name, loss in eager.items()}
    return {**compiled, "eager torch": of_torch, "eager linear": linear_cross_entropy}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], object], device: str) -> float:
    """Returns milliseconds from launch to end, of work that keeps the device busy."""
    wait(device)
    begun = time.perf_counter()
    work()
    wait(device)
    return 1000 * (time.perf_counter() - begun)


def measure(shape: tuple[int, int, int], repeats: int, device: str) -> dict[str, tuple[float, float, float]]:
    """Returns ms, peak MiB and loss of each arm."""
    tokens, width, vocabulary = shape
    x = torch.randn(tokens, width, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) * 0.02).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    torch.compiler.reset()
    times: dict[str, list[float]] = {}
    peaks, found = {}, {}

    def passes(loss: Loss) -> Tensor:
        x.grad = weight.grad = None
        total = loss(x, weight, targets)
        total.backward()
        return total.detach()

    given = arms()
    for each in range(repeats + 2):
        for name, loss in list(given.items())[:: 1 if each % 2 else -1]:
            if device == "cuda":
                x.grad = weight.grad = None
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            taken = timed(partial(passes, loss), device)
            if each < 2:
                found[name] = float(passes(loss))
            else:
                times.setdefault(name, []).append(taken)
                if device == "cuda":
                    peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {name: (statistics.median(times[name]), peaks.get(name, 0.0), found[name]) for name in given}


def measure_step(repeats: int, device: str) -> dict[str, tuple[float, float, float]]:
    """Returns ms, peak MiB and the last loss of a step of 124M, compiled, with and without our kernel."""
    sizes = [
        "model.layers=1",
        "model.width=32",
        "model.heads=2",
        "model.context=32",
        "training.batch=2",
        "model.vocabulary=64",
    ]
    extra = [] if device == "cuda" else [*sizes, "training.compile=false"]
    config = load("gpt2", ["training.micro_batches=1", "training.measure_ceiling=false", *extra])
    shape = (repeats, 1, config.training.batch, config.model.context + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocabulary, shape).astype(np.int32)
    real, results = losses.has_kernel, {}
    ways: dict[str, tuple[Callable[[Tensor], bool], int]] = {
        "step, torch's loss": (lambda _: False, 1),
        "step, linear": (real, 1),
        "step, 4 chunks": (real, 4),
    }
    for name, (losses.has_kernel, chunks) in ways.items():
        torch.compiler.reset()
        session = Session(config, Policy.parse("bf16-mixed,param=fp32:split"), device)
        session.model.loss_chunks = chunks
        for batch in tokens[:4]:
            result = session.step(batch)
        wait(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = [timed(partial(session.step, batch), device) for batch in tokens]
        result = session.step(tokens[0])
        peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
        results[name] = (statistics.median(taken), peak, session.read(result)["loss"])
        del session, result
    losses.has_kernel = real
    return results


def sweep(repeats: int, device: str, rows: int, width: int, forms: list[tuple[int, int]]) -> None:
    """Prints ms of the kernel without terms, with a softcap, and writing codes, for each form."""
    from halfstep.torch.kernels import cross_entropy as kernel

    torch.manual_seed(0)
    given = torch.randn(rows, width, device=device).bfloat16()
    logits, targets = given.clone(), torch.randint(width, (rows,), device=device)
    codes = logits.view(torch.float8_e5m2)[:, :width]
    right = F.cross_entropy(given[:64].double(), targets[:64], reduction="none")
    plain, capped = (-100, 0.0, 0.0, 0.0), (-100, 0.0, 15.0, 0.0)
    runs = {
        "gradient": partial(kernel.losses_and_gradients, logits, targets, width, plain, 1.0),
        "codes": partial(kernel.losses_and_codes, logits, codes, targets, width, plain, 1.0, 2.0**15),
        "softcap": partial(kernel.losses_and_gradients, logits, targets, width, capped, 1.0),
        "loss alone": partial(kernel.losses, logits, targets, width, plain),
    }
    again = partial(logits.copy_, given)
    print(f"{rows} x {width}: a copy takes {median_ms(again, repeats, device):.3f} ms")
    for kernel.BLOCK, kernel.WARPS in forms:
        times = [f"{name} {median_ms(run, repeats, device, again):.3f} ms" for name, run in runs.items()]
        again()
        off = (runs["gradient"]()[:64].double() - right).abs().max()
        print(f"  block {kernel.BLOCK}, {kernel.WARPS} warps: {', '.join(times)}, off {off:.1e}", flush=True)


def compare_heads(shapes: list[tuple[int, int, int]], repeats: int, device: str) -> None:
    """Prints ms of a training pass in bf16 and fp8, the eager peak of each, and ms of each kernel of the codes."""
    precisions = (FP8.widened(), FP8)
    for tokens, width, vocabulary in shapes:
        work = LayerWork(width, vocabulary, tokens, False, True, torch.device(device), device == "cuda", loss=1)
        bf16, fp8 = (1000 * seconds for seconds in time_layer(work, precisions))
        print(f"{tokens} x {width} x {vocabulary}: bf16 {bf16:.2f} ms, fp8 {fp8:.2f} ms, {bf16 / fp8:.3f} times")
        x = torch.randn(tokens, width, device=device).bfloat16().requires_grad_()
        weight = (torch.randn(vocabulary, width, device=device) * 0.02).bfloat16().float().requires_grad_()
        targets = torch.randint(vocabulary, (tokens,), device=device)
        for name, precision in zip(("bf16", "fp8"), precisions, strict=True):
            peak, loss = peak_of(x, weight, targets, casts_of(precision), device)
            print(f"  {name}: eager peak {peak:,.0f} MiB, loss {loss:.5f}")
        logits = losses._logits(x.detach(), weight.detach().bfloat16(), None)
        given, casts = (targets, vocabulary, *losses.PLAIN, 1.0), casts_of(FP8)
        codes, other = coded_loss._codes(logits, casts), torch.empty_like(logits).view(torch.float8_e5m2)
        kernels = {
            "copy of the logits": logits.clone,
            "loss, bf16 gradient": partial(losses.row_losses_, logits, *given),
            "loss, codes": partial(coded_loss.coded_row_losses_, logits, targets, casts.words, *losses.PLAIN[:3]),
            "transpose of codes": partial(
                coded_loss._transposed, codes, other.view(-1)[: codes.numel()].view(vocabulary, tokens)
            ),
        }
        again = partial(logits.copy_, logits.clone())
        for name, run in kernels.items():
            print(f"  {name}: {median_ms(run, repeats, device, again):.3f} ms", flush=True)


def median_ms(
    run: Callable[[], object], repeats: int, device: str, before: Callable[[], object] = lambda: None
) -> float:
    """Returns the median of milliseconds, on a GPU by its own clock, after a first run that compiles.

    `before` restores what a run writes over: codes are no logits, and a row of numbers far apart is added twice.
    """
    times = []
    for _ in range(repeats + 1):
        before()
        if device != "cuda":
            times.append(timed(run, device))
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def peak_of(x: Tensor, weight: Tensor, targets: Tensor, casts: Any, device: str) -> tuple[float, float]:
    """Returns the MiB that a pass takes beyond its inputs, and the mean loss."""
    x.grad = weight.grad = None
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    total, _ = layers.linear_cross_entropy(x, weight, None, targets, casts)
    total.backward()
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return peak / 2**20, float(total.detach()) / targets.shape[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--sweep", action="store_true", help="only time the kernel alone")
    parser.add_argument("--no-step", action="store_true", help="leave the steps of 124M out")
    parser.add_argument("--head", action="store_true", help="only compare a head in bf16 and fp8")
    parser.add_argument("--tiny", action="store_true", help="use small shapes on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    begun, lines = time.perf_counter(), []
    if options.head:
        compare_heads([(32, 16, 48), (64, 16, 48)] if options.tiny else HEADS, options.repeats, device)
        print(f"done after {time.perf_counter() - begun:.0f} s")
        return
    if options.sweep:
        shape = (5, 300, [(64, 1), (512, 2)]) if options.tiny else (32768, 50304, FORMS)
        sweep(options.repeats, device, *shape)
        print(f"done after {time.perf_counter() - begun:.0f} s")
        return
    results = {} if options.no_step else {"124M, 32 x 1024": measure_step(options.repeats, device)}
    for shape in TINY if options.tiny else SHAPES:
        results["{} x {} x {}".format(*shape)] = measure(shape, options.repeats, device)
        print(f"{shape} after {time.perf_counter() - begun:.0f} s", flush=True)
    for name, rows in results.items():
        first = next(iter(rows.values()))[0]
        for arm, (ms, mib, loss) in rows.items():
            lines.append(f"| {name} | {arm} | {ms:.2f} | {first / ms:.2f} | {mib:,.0f} | {loss:.5f} |")
    print("| tokens x width x vocabulary | arm | ms | speed | peak MiB | loss |\n|---|---|---|---|---|---|")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
