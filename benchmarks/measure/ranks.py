"""Times a step under DDP and FSDP2, on one rank, against the same step without them, compiled.

    python benchmarks/measure/ranks.py [--size 32] [--rounds 12]
    python benchmarks/measure/ranks.py --tiny                      # on a CPU: whether it runs

GPT-2 124M at `size` x 1024 tokens, clipped. The arms take turns in one process, in reverse order every other round:

    plain         prepare(model, AdamW, "bf16-mixed"), compiled
    plain split   the same with split masters
    DDP           DDP around the prepared model, compiled as a whole
    DDP split     the same with split masters, which are averaged over ranks by halfstep
    FSDP2         each block and the whole sharded; each block compiled, and the head with the loss

What several ranks would wait for each other is not in it: one rank has nobody to talk to. It shows what the engine's
bookkeeping costs, and that what is gathered is narrow: `gathered` is the bytes of all weights as layers see them
under FSDP2, `fp32` what they would be in fp32. Exit code 1 if an arm has less than 0.97 of the speed of its plain one.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from autocast_arms import Update, take_turns
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from halfstep.tools.bench.arms.model import GPT2
from halfstep.torch import AdamW, prepare

BAR = 0.97
PLAIN = {"DDP": "plain", "DDP split": "plain split", "FSDP2": "plain"}


def build(given: argparse.Namespace) -> GPT2:
    torch.manual_seed(0)
    if given.tiny:
        return GPT2(layers=2, width=32, heads=2, vocabulary=96, context=16)
    return GPT2(layers=12, width=768, heads=12, vocabulary=50304, context=1024).cuda()


def make(name: str, given: argparse.Namespace) -> tuple[Update, GPT2]:
    model = build(given)
    run = prepare(model, "bf16-mixed,param=fp32:split" if "split" in name else "bf16-mixed", clip_norm=1.0)
    forward: Callable[..., Tensor] = model
    backend = "aot_eager" if given.tiny else "inductor"
    if name == "FSDP2":
        mesh = init_device_mesh("cpu" if given.tiny else "cuda", (1,))
        for block in model.h:
            fully_shard(block, mesh=mesh).compile(backend=backend)
        fully_shard(model, mesh=mesh)
        model.loss = torch.compile(model.loss, backend=backend)  # type: ignore[method-assign]
    if name.startswith("DDP"):
        forward = DistributedDataParallel(model)
    run.attach(AdamW(model.parameters(), lr=1e-4))
    if name != "FSDP2":
        forward = torch.compile(forward, backend=backend)
    return lambda batches: run.step(lambda batch: forward(*batch), batches), model


def timed(update: Update, batches: list[tuple[Tensor, Tensor]], wait: Callable[[], None]) -> float:
    wait()
    started = time.perf_counter()
    for _ in range(4):
        update(batches)
    wait()
    return (time.perf_counter() - started) / 4 * 1e3


def gathered(model: GPT2) -> tuple[int, int]:
    """Returns the bytes of the weights as layers see them, and of as many fp32 numbers."""
    model.unshard()
    for block in model.h:
        block.unshard()
    seen = [getattr(p, "numbers", p) for p in model.parameters()]
    found = sum(t.nbytes for t in seen), sum(t.numel() * 4 for t in seen)
    for part in (*model.h, model):
        part.reshard()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU: whether it runs")
    given = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    dist.init_process_group("gloo" if given.tiny else "nccl")
    length, words, rounds = (16, 96, 1) if given.tiny else (1024, 50304, given.rounds)
    device, wait = ("cpu", lambda: None) if given.tiny else ("cuda", torch.cuda.synchronize)
    tokens = torch.randint(0, words, (given.size, length + 1), device=device)
    batches = [(tokens[:, :-1], tokens[:, 1:])]
    names = ("plain", "plain split", *PLAIN)
    built = {name: make(name, given) for name in names}
    arms = {name: update for name, (update, _) in built.items()}
    times = take_turns(arms, rounds, partial(timed, batches=batches, wait=wait))
    losses = {name: float(update(batches).loss) for name, update in arms.items()}
    worst = 2.0
    print(f"torch {torch.__version__}, {given.size} x {length}, one rank, {dist.get_backend()}")
    for name, taken in times.items():
        reference = times[PLAIN.get(name, name)]
        speed = statistics.median(reference) / statistics.median(taken)
        fastest = min(reference) / min(taken)
        print(
            f"{name:12} median {statistics.median(taken):8.2f} ms, fastest {min(taken):8.2f}; speed {speed:5.3f}, "
            f"by the fastest turns {fastest:5.3f}; loss {losses[name]:.4f}"
        )
        worst = min(worst, speed)
    narrow, wide = gathered(built["FSDP2"][1])
    print(f"gathered {narrow:,} bytes, fp32 {wide:,}")
    dist.destroy_process_group()
    print(f"slowest: {worst:.3f} of the plain step's speed (at least {BAR})")
    return 0 if given.tiny or worst >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
