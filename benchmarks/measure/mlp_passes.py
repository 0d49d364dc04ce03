"""Times what compiled code does between the fp8 matmuls of an MLP: GELU, amax, codes, and the sum for a bias.

    python benchmarks/measure/mlp_passes.py [--rounds 7]

Each pass is compiled by itself, for 16,384 rows of 8,192 bf16 numbers, in the forms that were compared:

    tanh, sigmoid      GELU as torch has it, and as halfstep/torch/kernels/activations.py computes it
    at once, by rows   the amax of all numbers, and of each row first (halfstep/torch/numerics/cast.py)

A time is the median of rounds in alternating order, on the device alone. Needs a GPU; `--tiny` shows that it runs.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.torch.kernels.activations import by_sigmoid
from halfstep.torch.measure import device_seconds

Pass = Callable[[Tensor, Tensor], Any]
FORMS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": partial(F.gelu, approximate="tanh"), "sigmoid": by_sigmoid}
LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "at once": lambda x: x.abs().float().amax(),
    "by rows": lambda x: x.abs().float().amax(dim=-1).amax(),
}


def codes(x: Tensor) -> Tensor:
    return (x.float() * 4.0).clamp(-448, 448).to(torch.float8_e4m3fn)


def passes() -> dict[str, Pass]:
    """Returns each pass by its name, of a gradient g and the hidden numbers h."""
    found: dict[str, Pass] = {f"amax, {name}": lambda g, h, look=look: look(h) for name, look in LOOKS.items()}
    for name, form in FORMS.items():

        def slope(g: Tensor, h: Tensor, form: Callable[[Tensor], Tensor] = form) -> Tensor:
            h = h.detach().requires_grad_()
            return torch.autograd.grad(form(h), h, g)[0]

        found[f"GELU, {name}"] = lambda g, h, form=form: form(h)
        found[f"GELU and codes, {name}"] = lambda g, h, form=form: codes(form(h))
        found[f"its gradient and codes, {name}"] = lambda g, h, slope=slope: codes(slope(g, h))
        found[f"its gradient and sum, {name}"] = lambda g, h, slope=slope: slope(g, h).sum(0, dtype=torch.float32)
        for (way, look), (what, of) in product(LOOKS.items(), (("GELU", form), ("its gradient", slope))):
            arguments = (lambda g, h, of=of: of(h)) if what == "GELU" else of
            found[f"{what} and amax, {name}, {way}"] = lambda g, h, of=arguments, look=look: look(of(g, h))
    return found


def main() -> None:
    """Prints a line for each pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device, shape = ("cpu", (8, 16)) if options.tiny else ("cuda", (16384, 8192))
    torch.manual_seed(0)
    g, h = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    runs = {name: torch.compile(each, dynamic=False) for name, each in passes().items()}
    for run in runs.values():
        run(g, h)
    if options.tiny:
        print(f"{len(runs)} passes run")
        return
    taken: dict[str, list[float]] = {name: [] for name in runs}

    def repeat(run: Pass, count: int) -> None:
        for _ in range(count):
            run(g, h)

    for i in range(options.rounds):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            taken[name].append(device_seconds(partial(repeat, runs[name]), 5))
    for name in sorted(runs):
        print(f"{1e6 * statistics.median(taken[name]):8.1f} us  {name}")


if __name__ == "__main__":
    main()
