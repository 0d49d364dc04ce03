"""Times a step under DDP and FSDP2, on one rank, against the same step without them, compiled.

    python benchmarks/measure/ranks.py [--shapes 700M 124M] [--size 32] [--rounds 8]
    python benchmarks/measure/ranks.py --tiny                      # on a CPU: whether it runs

GPT-2 at `size` x 1024 tokens, clipped: 12 blocks of width 2048, or those of the 124M. The arms take turns in one
process, in reverse order every other round:

    plain         prepare(model, AdamW, "bf16-mixed"), compiled
    plain split   the same with split masters
    DDP           DDP ring_share the prepared model, compiled
    DDP split     the same with split masters, which halfstep averages over ranks
    FSDP2         each block and the whole sharded; each block compiled, and the head with the loss
    torch's own   the same with torch's MixedPrecisionPolicy and fused AdamW, without halfstep

The time that ranks wait for each other is not included: there is only one rank. The script shows what the engine's
bookkeeping costs, and that what is gathered is narrow: `gathered` is the bytes of all weights as layers see them
under FSDP2. Exit code 1 if, at the larger shape, an arm of ours has less than 0.97 of the speed of its plain one.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks
from benchmarks.gpt2 import GPT2
from benchmarks.measure.autocast_arms import Update, take_turns
from halfstep.torch import AdamW, prepare

BAR = 0.97
PLAIN = {"DDP": "plain", "DDP split": "plain split", "FSDP2": "plain", "torch's own": "plain"}
SHAPES = {"700M": (2048, 16), "124M": (768, 12)}
SPLIT = "bf16-mixed,param=fp32:split"


def build(shape: str) -> GPT2:
    torch.manual_seed(0)
    if shape == "tiny":
        return GPT2(layers=2, width=32, heads=2, vocabulary=96, context=16)
    width, heads = SHAPES[shape]
    return GPT2(layers=12, width=width, heads=heads, vocabulary=50304, context=1024).cuda()


def shard(model: GPT2, backend: str, **options: MixedPrecisionPolicy) -> None:
    mesh = init_device_mesh(next(model.parameters()).device.type, (1,))
    for block in model.h:
        fully_shard(block, mesh=mesh, **options).compile(backend=backend)
    fully_shard(model, mesh=mesh, **options)
    model.loss = torch.compile(model.loss, backend=backend)  # type: ignore[method-assign]


def make(name: str, shape: str) -> tuple[Update, GPT2]:
    model, backend = build(shape), "aot_eager" if shape == "tiny" else "inductor"
    if name == "torch's own":
        shard(model, backend, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        return by_torch_alone(model), model
    run = prepare(model, SPLIT if "split" in name else "bf16-mixed", clip_norm=1.0)
    forward: Callable[..., Tensor] = model
    if name == "FSDP2":
        shard(model, backend)
    else:
        wrapped = DistributedDataParallel(model) if "DDP" in name else model
        forward = torch.compile(wrapped, backend=backend)
    run.attach(AdamW(model.parameters(), lr=1e-4))
    return lambda batches: run.step(lambda batch: forward(*batch), batches).loss, model


def by_torch_alone(model: nn.Module) -> Update:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update(batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        loss = model(*batches[0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return update


def timed(update: Update, batches: list[tuple[Tensor, Tensor]]) -> float:
    float(update(batches))  # waits
    started = time.perf_counter()
    for _ in range(4):
        loss = update(batches)
    float(loss)
    return (time.perf_counter() - started) / 4 * 1e3


def gathered(model: GPT2) -> tuple[int, int]:
    """Returns the bytes of the weights as layers see them, and of as many fp32 numbers."""
    parts = (model, *model.h)
    for part in parts:
        part.unshard()
    seen = [getattr(p, "numbers", p) for p in model.parameters()]
    found = sum(t.nbytes for t in seen), sum(t.numel() * 4 for t in seen)
    for part in parts:
        part.reshard()
    return found


def compare(shape: str, names: list[str], size: int, rounds: int) -> float:
    """Prints what the arms of a shape take; returns the lowest speed of ours against their plain arms."""
    length, words = (16, 96) if shape == "tiny" else (1024, 50304)
    built = {name: make(name, shape) for name in names}
    tokens = torch.randint(0, words, (size, length + 1), device=next(built["plain"][1].parameters()).device)
    batches = [(tokens[:, :-1], tokens[:, 1:])]
    arms = {name: update for name, (update, _) in built.items()}
    times = take_turns(arms, rounds, partial(timed, batches=batches))
    worst = 1.0
    for name, taken in times.items():
        reference = times[PLAIN.get(name, name)]
        median, speed = statistics.median(taken), statistics.median(reference) / statistics.median(taken)
        fastest = min(reference) / min(taken)
        print(
            f"{shape}  {name:12} median {median:8.2f} ms, fastest {min(taken):8.2f}; speed {speed:5.3f}, by the "
            f"fastest turns {fastest:5.3f}; loss {float(arms[name](batches)):.3f}",
            flush=True,
        )
        worst = worst if name == "torch's own" else min(worst, speed)
    narrow, wide = gathered(built["FSDP2"][1])
    print(f"{shape}  gathered {narrow:,} bytes; in fp32 {wide:,}", flush=True)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--arms", nargs="+", choices=["plain split", *PLAIN], default=["plain split", *PLAIN])
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU: whether it runs")
    given = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    dist.init_process_group("gloo" if given.tiny else "nccl")
    names = ["plain", *given.arms]
    print(f"torch {torch.__version__}, {given.size} sequences, one rank, {dist.get_backend()}", flush=True)
    if given.tiny:
        compare("tiny", names, given.size, 1)
        worst = 1.0
    else:
        lowest = {}
        for shape in given.shapes:
            lowest[shape] = compare(shape, names, given.size, given.rounds)
            gc.collect()
            torch.cuda.empty_cache()
        worst = lowest[given.shapes[0]]
    print(f"slowest: {worst:.3f} of the plain step's speed (at least {BAR})")
    gc.collect()
    dist.destroy_process_group()
    return 0 if worst >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
