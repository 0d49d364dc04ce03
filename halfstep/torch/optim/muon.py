"""Muon (Jordan et al.), for matrices, with explicit formats for masters and moments.

The update is the momentum with its singular values pushed to about one, times sqrt(max(1, rows / columns)). That
takes five Newton-Schulz steps, which are matrix products alone:

    A <- X X^T
    X <- a X + (b A + c A^2) X          from X = M / |M|; a tall M is transposed, so that A is small

Each product is rounded once: what is added is added to the fp32 sum. The first two are symmetric, and on an NVIDIA
GPU a kernel of ours computes half of them (kernels/symmetric.py); elsewhere torch's `bmm` and `baddbmm` compute
all of them. `why_torch` is the rule.

Matrices of one shape go through the steps in one batch, or in several of at most CHUNK numbers: what an update
needs beside the state does not grow with the model. Only the steps are not fp32: they run in the policy's compute
format, emulated if the policy is. The ranks of a job share them: each takes some of the matrices (owners.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.config.groups import NEWTON_SCHULZ
from halfstep.core.formats import FP32, Format, parse
from halfstep.torch.kernels import has_triton
from halfstep.torch.numerics.cast import carried
from halfstep.torch.numerics.dtypes import NARROW, dtype_of
from halfstep.torch.numerics.shards import is_shard, local_parts
from halfstep.torch.optim.adamw import Grads, Optimizer, Params
from halfstep.torch.optim.masters import Masters
from halfstep.torch.optim.owners import Work, work_on_owned

# Numbers of matrices that are updated at once, unless one has more: of each, some 25 bytes are held meanwhile.
CHUNK = 2**25
STEPS = 5  # of Newton-Schulz


class Muon(Optimizer):
    """Muon with Nesterov momentum, for matrices; those of one shape are updated in one batch."""

    slots = ("momentum",)
    _kept = (*Optimizer._kept, "own", "iteration", "emulate", "_momentum", "_shares")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        iteration: Format | str | None = None,
        emulate: bool = False,
        **formats: Any,
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self.own = parse(iteration) if isinstance(iteration, str) else iteration
        self.iteration, self.emulate = self.own or FP32, emulate
        self._momentum: Tensor | None = None
        self._shares = False  # whether several ranks take the same steps
        super().__init__(params, defaults, **formats)

    def _problem(self, parameter: Tensor) -> tuple[str, str] | None:
        if parameter.ndim == 2:
            return super()._problem(parameter)
        problem = f"has the shape {tuple(parameter.shape)}, and Muon updates matrices"
        return problem, "give it to AdamW: prepare(model, [Muon(matrices), AdamW(the_rest)], policy)"

    def bind(self, masters: Masters, moments: Mapping[str, Format], compute: Format, *, emulate: bool) -> None:
        """Sets the formats of a policy; the iteration runs in `compute` unless it was given its own format."""
        super().bind(masters, moments, compute, emulate=emulate)
        self.iteration, self.emulate = self.own or compute, emulate
        self._shares = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def release(self) -> None:
        super().release()
        self._shares = False

    def set_momentum(self, momentum: Tensor) -> None:
        """Sets every group's momentum to a device scalar: our schedules count updates on the device."""
        self._momentum = momentum

    @property
    def momentum_now(self) -> Any:
        """The device scalar that was set; None if groups have their own."""
        return self._momentum

    @property
    def note(self) -> str:
        device = self.param_groups[0]["params"][0].device
        why = "the policy emulates" if self.emulate else why_torch(device, dtype_of(self.iteration))
        by = f"torch: {why}" if why else "our kernel"
        return f"Newton-Schulz in {self.iteration}, symmetric products by {by}"

    @torch.no_grad()
    def update(self, grads: Grads, found_inf: Tensor | None, scale: Tensor | None) -> None:
        self.start()
        batches: list[tuple[list[Tensor], dict[str, Any]]] = []  # each with its group
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if id(p) in grads:
                    by_shape.setdefault(p.shape, []).append(p)
            batches += [(params, group) for alike in by_shape.values() for params in chunks(alike)]
        work = partial(orthogonalize, iteration=self.iteration, emulate=self.emulate)
        updates: Mapping[int, Tensor] = {}
        if batches and (self._shares or is_shard(batches[0][0][0])):
            out = torch.float32 if self.emulate else dtype_of(self.iteration)
            inputs = [lambda params, g=g: self._momenta(g, grads, scale, params)[1] for _, g in batches]
            updates = work_on_owned([params for params, _ in batches], inputs, work, out)
        for params, group in batches:
            self._update(params, group, grads, scale, found_inf, updates, work)

    def _momenta(
        self, group: dict[str, Any], grads: Grads, scale: Tensor | None, params: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns the momenta after this step, and where they point (Nesterov): of what this rank has."""
        kept = group["momentum"] if self._momentum is None else self._momentum
        given = torch.stack([g.float() for g in local_parts([grads[id(p)] for p in params])])
        if scale is not None:
            given *= scale
        momentum = torch.stack(local_parts([self.state[p]["momentum"] for p in params])).float()
        momentum.mul_(kept).add_(given)
        return momentum, given.add_(kept * momentum)

    def _update(
        self,
        params: list[Tensor],
        group: dict[str, Any],
        grads: Grads,
        scale: Tensor | None,
        found_inf: Tensor | None,
        updates: Mapping[int, Tensor],
        work: Work,
    ) -> None:
        """Updates matrices of one shape, whose directions are orthogonalized here unless `updates` has them."""
        momentum, direction = self._momenta(group, grads, scale, params)
        update = torch.stack([updates[id(p)] for p in params]) if updates else work(direction)
        del direction
        # Copied, not cast: what comes of a tall matrix is transposed, and the lists below want one layout.
        moved = torch.empty(update.shape, device=update.device).copy_(update)
        rows, columns = params[0].shape
        if rows > columns:
            moved *= (rows / columns) ** 0.5
        states = [self.state[p] for p in params]
        momenta, steps = local_parts([state["momentum"] for state in states]), [state["step"] for state in states]
        applied = torch.ones((), device=moved.device)
        if found_inf is not None:
            # Filled and chosen, not multiplied: zero times NaN is NaN.
            applied, skipped = 1 - found_inf, found_inf > 0
            moved.masked_fill_(skipped, 0.0)
            momentum = torch.where(skipped, torch.stack(momenta), momentum)
        torch._foreach_add_(steps, [applied] * len(steps))  # one tensor would be taken for a number, and read
        torch._foreach_copy_(momenta, momentum.unbind())
        wide, rate = local_parts(self.masters.wide(params)), self.rate_of(group)
        torch._foreach_mul_(wide, 1 - applied * rate * group["weight_decay"])
        torch._foreach_sub_(wide, moved.mul_(rate).unbind())
        self.masters.put(params, wide, steps)


def chunks(alike: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields matrices of one shape in lists of about one length, each of one matrix or at most CHUNK numbers."""
    parts = -(-len(alike) // max(1, CHUNK // max(1, alike[0].numel())))
    each = -(-len(alike) // parts)
    for start in range(0, len(alike), each):
        yield list(alike[start : start + each])


# --- Newton-Schulz


def orthogonalize(matrices: Tensor, iteration: Format, *, emulate: bool = False) -> Tensor:
    """Pushes the singular values of each matrix of a batch to about one."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    size = x.norm(dim=(-2, -1), keepdim=True) + 1e-7
    if emulate:  # rounds what hardware would store
        x = carried(x / size, iteration)
        for _ in range(STEPS):
            product = carried(x @ x.mT, iteration)
            x = carried(a * x + carried(b * product + c * (product @ product), iteration) @ x, iteration)
    else:
        # One pass: divided in fp32, and rounded and transposed as it is stored.
        x = torch.div(x, size, out=torch.empty(x.shape, dtype=dtype_of(iteration), device=x.device))
        by_kernel = not why_torch(x.device, x.dtype)
        for _ in range(STEPS):
            x = torch.baddbmm(x, (_by_kernel if by_kernel else _by_torch)(x, b, c), x, beta=a)
    return x.mT if tall else x


def why_torch(device: torch.device, dtype: torch.dtype) -> str:
    """Returns why torch computes the symmetric products of matrices; empty if our kernel does."""
    if device.type != "cuda":  # also meta that stands in for a GPU: a plan counts torch's products
        return f"no kernel for {device.type}"
    if not has_triton():
        return "Triton is not installed"
    if dtype not in NARROW:
        return f"the kernel multiplies bf16 and fp16, not {str(dtype).removeprefix('torch.')}"
    capable = torch.cuda.get_device_capability(device) >= (8, 0)
    return "" if capable else "the kernel needs an NVIDIA GPU of compute capability 8.0"


def _by_torch(x: Tensor, b: float, c: float) -> Tensor:
    """Returns b A + c A^2."""
    product = torch.bmm(x, x.mT)
    return torch.baddbmm(product, product, product, beta=b, alpha=c)


def _by_kernel(x: Tensor, b: float, c: float) -> Tensor:
    """Returns b A + c A^2, half of it computed and half mirrored."""
    from halfstep.torch.kernels.symmetric import quadratic, square  # Triton is installed, as `why_torch` knows

    return quadratic(square(x), b, c)
