"""Times the parts of an MLP around its GELU and its biases: what compiled code ran against cuBLASLt's epilogues.

    python benchmarks/measure/mlp.py [--seconds 40] [--rounds 5]

    forward          h = x up^T + bias and gelu(h): linear, then a compiled GELU | GELU_AUX_BIAS
    backward         dh = (dy down) gelu'(h) and the sum of dh: matmul, then compiled | DGELU and a compiled sum
                     | DGELU_BGRAD; `lean` computes gelu(h) again as well, which the gradient of `down` reads
    weight gradient  g^T x in fp32 and the sum of g in fp32: matmul, then a compiled sum | BGRADB

`halfstep` is what compiled code runs since (halfstep/torch/kernels/epilogue.py): the same matmuls, by algorithms
that are chosen without timing. Arms with the name of an epilogue run the fastest algorithm that cuBLASLt
proposes, and `matmul alone` is what a perfect epilogue would cost. Arms of one part take turns, in reverse order
every other time, as CUDA graphs; printed are the median ms, the speed relative to the first arm, the relative
error of each result against fp64, and whether two runs have the same bits. A part that would not begin within
`--seconds` is left out. Needs an NVIDIA GPU; `--tiny` runs small shapes of what needs none, only to show that it
runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cublaslt as lt
import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.torch.kernels import epilogue

Results = tuple[Tensor, ...]
Work = Callable[[], Results]


class Shape(NamedTuple):
    """Rows, width and hidden width."""

    name: str
    rows: int
    width: int
    hidden: int


SHAPES = [Shape("124M", 32768, 768, 3072), Shape("1.3B", 16384, 2048, 8192)]


def draw(device: str, *size: int, scale: float = 1.0) -> Tensor:
    """Returns random numbers in bf16."""
    return (torch.randn(size, device=device) * scale).bfloat16()


def gelu(h: Tensor) -> Tensor:
    """Returns the tanh approximation."""
    return F.gelu(h, approximate="tanh")


def gelu_backward(product: Tensor, h: Tensor) -> Tensor:
    """Returns the gradient of h."""
    return torch.ops.aten.gelu_backward(product, h, approximate="tanh")  # type: ignore[no-any-return]


def with_sum(product: Tensor, h: Tensor) -> Results:
    """Returns the gradient of h, and that of the bias."""
    dh = gelu_backward(product, h)
    return dh, dh.sum(0, dtype=torch.float32)


def with_sum_and_gelu(product: Tensor, h: Tensor) -> Results:
    """Returns the gradient of h, that of the bias, and gelu(h)."""
    return *with_sum(product, h), gelu(h)


def summed(g: Tensor) -> Tensor:
    """Returns the gradient of a bias."""
    return g.sum(0, dtype=torch.float32)


class Part:
    """The arms of one part, in the order in which they are printed, and what they should return."""

    def __init__(self, name: str, device: str, expected: Results):
        self.name, self.device, self.expected, self.arms = name, device, expected, dict[str, Work]()
        print(name, flush=True)

    def add(self, name: str, make: Callable[[], Work]) -> None:
        """Adds an arm, unless it fails: then the others still count."""
        begun = time.perf_counter()
        try:
            work = make()
            first = [t.clone() for t in work()]
            same = all(torch.equal(a, b) for a, b in zip(first, work(), strict=True))
            self.arms[name] = captured(work, self.device)
        except Exception as error:
            print(f"    {name}: failed: {type(error).__name__}: {str(error)[:150]}", flush=True)
            return
        errors = [distance(a, b) for a, b in zip(first, self.expected, strict=False)]
        shown = " ".join(f"{error:.1e}" for error in errors)
        taken = time.perf_counter() - begun
        print(f"    {name}: error {shown}, {'same bits' if same else 'OTHER BITS'}, {taken:.1f} s", flush=True)

    def add_lt(self, name: str, matmul: Callable[[], lt.LtMatmul], results: Callable[[], Results]) -> None:
        """Adds an arm whose first part is cuBLASLt's; `results` does the rest."""

        def make() -> Work:
            made = matmul()
            print(f"    {name}: {made.choose_algorithm(milliseconds)}", flush=True)

            def work() -> Results:
                made()
                return results()

            return work

        self.add(name, make)

    def race(self, rounds: int) -> None:
        """Times the arms in turns and prints them."""
        times: dict[str, list[float]] = {name: [] for name in self.arms}
        for each in range(rounds + 1):
            for name in [*self.arms][:: 1 if each % 2 else -1]:
                taken = milliseconds(self.arms[name], 10 if self.device == "cuda" else 1, self.device)
                if each:  # the first round warms up
                    times[name].append(taken)
        first = next(iter(times), None)
        for name, taken in times.items():
            ms = statistics.median(taken)
            print(f"| {self.name} | {name} | {ms:.3f} | {statistics.median(times[first]) / ms:.3f} |", flush=True)


def distance(found: Tensor, expected: Tensor) -> float:
    """Returns the relative distance of a result from its reference."""
    return float((found.double() - expected).norm() / expected.norm())


def captured(work: Work, device: str) -> Work:
    """Returns the function as a CUDA graph, so that the host's time to launch it does not count."""
    if device == "cpu":
        return work
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = work()

    def replay() -> Results:
        graph.replay()
        return results

    return replay


def milliseconds(work: Callable[[], Any], repeats: int, device: str = "cuda") -> float:
    """Returns ms per call, by the device's own clock if it has one."""
    if device == "cpu":
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        return 1000 * (time.perf_counter() - begun) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Returns the function as inductor compiles it."""
    return torch.compile(function, fullgraph=True, dynamic=False) if device == "cuda" else function


def forward(shape: Shape, device: str) -> Part:
    """Returns the arms of the forward pass."""
    x, up = draw(device, shape.rows, shape.width), draw(device, shape.hidden, shape.width, scale=shape.width**-0.5)
    bias = draw(device, shape.hidden)
    h64 = F.linear(x.double(), up.double(), bias.double())
    part = Part(f"{shape.name} forward", device, (h64, gelu(h64)))
    act = compiled(gelu, device)

    def today() -> Results:
        h = F.linear(x, up, bias)
        return h, act(h)

    part.add("linear, GELU", lambda: today)
    part.add("matmul alone", lambda: lambda: (F.linear(x, up, bias),))
    if device == "cuda":
        h, out = (torch.empty_like(h64, dtype=x.dtype) for _ in range(2))
        part.add_lt(
            "GELU_AUX_BIAS",
            lambda: lt.LtMatmul(x, up, out, lt.GELU_AUX_BIAS, h, bias, turned="right"),
            lambda: (h, out),
        )
        part.add("halfstep", lambda: lambda: epilogue.linear_gelu(x, up.t(), bias))
    return part


def backward(shape: Shape, device: str) -> Part:
    """Returns the arms of the backward pass up to the gradient of h."""
    dy, down = (
        draw(device, shape.rows, shape.width),
        draw(device, shape.width, shape.hidden, scale=shape.hidden**-0.5),
    )
    h = draw(device, shape.rows, shape.hidden)
    dh64 = gelu_backward(dy.double() @ down.double(), h.double())
    part = Part(f"{shape.name} backward", device, (dh64, dh64.sum(0), gelu(h.double())))
    pair, lean, act, total = (compiled(f, device) for f in (with_sum, with_sum_and_gelu, gelu, summed))
    part.add("matmul, compiled", lambda: lambda: pair(dy @ down, h))
    part.add("matmul alone", lambda: lambda: (dy @ down,))
    part.add("matmul, compiled, lean", lambda: lambda: lean(dy @ down, h))
    if device == "cpu":
        return part
    out, sums = torch.empty_like(h), h.new_empty(shape.hidden)

    def plain() -> lt.LtMatmul:
        return lt.LtMatmul(dy, down, out, lt.DGELU, h)

    def with_bias() -> lt.LtMatmul:
        return lt.LtMatmul(dy, down, out, lt.DGELU_BGRAD, h, sums)

    part.add_lt("DGELU", plain, lambda: (out,))
    part.add_lt("DGELU, compiled sum", plain, lambda: (out, total(out)))
    part.add_lt("DGELU_BGRAD", with_bias, lambda: (out, sums))

    def ours() -> Results:
        dh = epilogue.linear_gelu_grad(h, dy, down)
        return dh, total(dh)

    part.add("halfstep, compiled sum", lambda: ours)
    part.add("halfstep, compiled sum and GELU, lean", lambda: lambda: (*ours(), act(h)))
    return part


def weight(name: str, rows: int, outputs: int, inputs: int, device: str) -> Part:
    """Returns the arms of the gradients of a weight and its bias."""
    g, x = draw(device, rows, outputs), draw(device, rows, inputs)
    expected = (g.double().t() @ x.double(), g.double().sum(0))
    part, total = Part(f"{name} weight gradient {outputs} x {inputs}", device, expected), compiled(summed, device)

    def product() -> Tensor:
        return torch.mm(g.t(), x, out_dtype=torch.float32) if device == "cuda" else g.t().float() @ x.float()

    part.add("matmul, compiled sum", lambda: lambda: (product(), total(g)))
    part.add("matmul alone", lambda: lambda: (product(),))
    if device == "cuda":
        out, sums = (torch.empty(size, device=device) for size in ((outputs, inputs), (outputs,)))
        part.add_lt("matmul alone by cuBLASLt", lambda: lt.LtMatmul(g, x, out, lt.DEFAULT, turned="left"),
                    lambda: (out,))  # fmt: skip
        part.add_lt("BGRADB", lambda: lt.LtMatmul(g, x, out, lt.BGRADB, None, sums, turned="left"),
                    lambda: (out, sums))  # fmt: skip
    return part


def parts_of(shape: Shape, device: str) -> list[Callable[[], Part]]:
    """Returns the function that makes each part, by the part's name."""
    sizes = [(shape.hidden, shape.width), (shape.width, shape.hidden), (3 * shape.width, shape.width)]
    weights = [lambda size=size: weight(shape.name, shape.rows, *size, device) for size in sizes]  # type: ignore[misc]
    return [lambda: forward(shape, device), lambda: backward(shape, device), *weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="after which nothing more begins")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="use small shapes on the CPU")
    options = parser.parse_args()
    device, begun = "cpu" if options.tiny else "cuda", time.perf_counter()
    torch.manual_seed(0)
    for shape in [Shape("tiny", 64, 16, 32)] if options.tiny else SHAPES:
        for make in parts_of(shape, device):
            if time.perf_counter() - begun > options.seconds:
                print(f"{shape.name}: the rest is left out, no time is left")
                return
            print(f"after {time.perf_counter() - begun:.0f} s", flush=True)
            make().race(options.rounds)
    print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
