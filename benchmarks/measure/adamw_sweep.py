"""Times our AdamW kernel on GPT-2's shapes for several chunk sizes and warps, next to torch's fused AdamW.

    python benchmarks/measure/adamw_sweep.py [--repeats 30] [--layers 12]

torch's kernel neither joins and splits masters nor unscales; `mul` is the cost of unscaling alone, and `norm`
the cost of the norm that clipping needs. Prints milliseconds on the device, and on the host in parentheses.
Needs an NVIDIA GPU. TRITON_INTERPRET=1 with `--tiny` runs it on any machine, only to show that it runs.
"""

import argparse
import time
from collections.abc import Callable

import torch

from halfstep.torch.kernels import adamw
from halfstep.torch.numerics.cast import split

FORMS = ((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8))  # chunk, warps


def shapes_of(layers: int, width: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Returns the shape of every tensor of a GPT-2."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    biases = [(3 * width,), (width,), (4 * width,), (width,)]
    block = [*matrices, *biases, *[(width,)] * 4]
    return [(vocabulary, width), (1024, width), *block * layers, (width,), (width,)]


def timed(work: Callable[[], object], repeats: int, device: str) -> str:
    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    work()
    wait()
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    launched = time.perf_counter() - begun
    wait()
    return f"{1000 * (time.perf_counter() - begun) / repeats:.3f} ms ({1000 * launched / repeats:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="use small tensors on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    shapes = shapes_of(options.layers, *((8, 32) if options.tiny else (768, 50304)))
    weights, grads = ([torch.randn(shape, device=device) for shape in shapes] for _ in range(2))
    first, second = ([torch.zeros(shape, device=device) for shape in shapes] for _ in range(2))
    steps = [torch.zeros((), device=device) for _ in shapes]
    halves, remainders = map(list, zip(*map(split, weights), strict=True))
    none = [None] * len(shapes)
    half = torch.tensor(0.5, device=device)
    settings = {"rate": half * 2e-4, "factor": half, "found_inf": torch.zeros((), device=device)}
    settings |= {"betas": (0.9, 0.95), "eps": 1e-8, "decay": 0.1}
    for adamw.CHUNK, adamw.WARPS in FORMS:
        results = []
        for name, held, left in (("split", halves, remainders), ("whole", weights, none)):
            update = adamw.Update(held, left, first, second, steps)

            def work(update=update) -> None:
                update(grads, **settings)

            results.append(f"{name} {timed(work, options.repeats, device)}")
        print(f"chunk {adamw.CHUNK}, {adamw.WARPS} warps: {', '.join(results)}", flush=True)
    parameters = [torch.nn.Parameter(w) for w in weights]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g
    fused = torch.optim.AdamW(parameters, fused=True)
    print(f"torch fused: {timed(fused.step, options.repeats, device)}")
    print(f"norm: {timed(lambda: torch._foreach_norm(grads), options.repeats, device)}")
    print(f"mul: {timed(lambda: torch._foreach_mul_(grads, half), options.repeats, device)}")


if __name__ == "__main__":
    main()
