"""AdamW and Muon with explicit formats for masters and moments.

**AdamW** (Loshchilov and Hutter), with g the gradient, t the updates applied so far and decay decoupled:

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
    w <- w (1 - rate decay) - rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

**Muon** (Jordan et al.), for matrices: the update is the momentum with its singular values pushed to one by
five Newton-Schulz steps X <- a X + (b A + c A^2) X, A = X X^T, times sqrt(max(1, rows / columns)). The steps
are the one part that is not fp32: they run in the policy's compute format, emulated where that is.

Otherwise the arithmetic is fp32. A master that is held narrower (bf16) is widened, updated and rounded back, to
nearest or stochastically; torch's own optimizers would compute in bf16. `found_inf`, a device scalar that is 1
where gradients were not finite, makes the whole update a no-op without asking the device; the fused AdamW
kernel of torch takes it as it is, which is why that kernel does the arithmetic here.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from halfstep.core.formats import FP32, Format
from halfstep.core.philox import tensor_id
from halfstep.core.roles import Param
from halfstep.core.rounding import Rounding
from halfstep.torch.cast import carried, quantize, random_bits
from halfstep.torch.dtypes import dtype_of

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al., 2024
# The gradient of each parameter; it may be wider than the parameter, which `.grad` may not.
Grads = Mapping[Tensor, Tensor]


class Optimizer(torch.optim.Optimizer):
    """What both share: named parameters, masters, moments, and rates that live on the device."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        masters: Mapping[str, Param] | None = None,
        moments: Mapping[str, Format] | None = None,
        seed: int = 0,
    ):
        names = [[name for name, _ in group["params"]] for group in groups]
        super().__init__(
            [{**group, "params": [p for _, p in group["params"]]} for group in groups],
            defaults,
        )
        self.names = {
            p: name
            for group, labels in zip(self.param_groups, names, strict=True)
            for p, name in zip(group["params"], labels, strict=True)
        }
        self.masters = masters or {}
        self.moments = moments or {}
        self.seed = seed
        for group in self.param_groups:
            # A tensor: a changing Python float would make compiled code anew, and would be read on the host.
            group["rate"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)

    def step(self, grads: Grads, *, found_inf: Tensor | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient, unless `found_inf` is 1."""
        raise NotImplementedError

    def set_factor(self, factor: Tensor) -> None:
        """Sets every group's rate to its base rate times a device scalar."""
        for group in self.param_groups:
            group["rate"] = group["lr"] * factor

    def _moment(self, parameter: Tensor) -> Tensor:
        """A moment of a parameter, zero, in its own format."""
        fmt = self.moments.get(self.names[parameter], FP32)
        return torch.zeros(parameter.shape, dtype=dtype_of(fmt), device=parameter.device)

    def _write(self, parameter: Tensor, wide: Tensor, step: Tensor) -> None:
        """Stores an fp32 result in the format its master is held in."""
        name = self.names[parameter]
        param = self.masters.get(name, Param(FP32))
        if param.format == FP32:
            if wide is not parameter:
                parameter.copy_(wide)
            return
        bits = None
        if param.stochastic:
            bits = random_bits(
                wide.shape,
                seed=self.seed,
                step=step.to(torch.int64),
                tensor=tensor_id(name),
                device=wide.device,
            )
        rounding: Rounding = "stochastic" if param.stochastic else "nearest-even"
        parameter.copy_(quantize(wide, param.format, overflow="inf", rounding=rounding, bits=bits))

    def _widened(self, parameter: Tensor) -> Tensor:
        """What to update: the parameter itself where it is an fp32 master, else a copy that is rounded back."""
        held = self.masters.get(self.names[parameter], Param(FP32))
        # A copy even where the dtype is fp32: an emulated bf16 master is carried in one.
        whole = held.format == FP32 and parameter.dtype == torch.float32
        return parameter if whole else parameter.to(torch.float32, copy=True)


class AdamW(Optimizer):
    """AdamW; each group may have its own `lr` and `weight_decay`."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **formats: Any,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults, **formats)
        for group in self.param_groups:
            for p in group["params"]:
                count = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = {"step": count, "exp_avg": self._moment(p), "exp_avg_sq": self._moment(p)}

    @torch.no_grad()
    def step(self, grads: Grads, *, found_inf: Tensor | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient, unless `found_inf` is 1."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p in grads]
            if not params:
                continue
            states = [self.state[p] for p in params]
            wide = [self._widened(p) for p in params]
            # .float() is the tensor itself where it is fp32 already.
            first = [state["exp_avg"].float() for state in states]
            second = [state["exp_avg_sq"].float() for state in states]
            adamw(
                wide,
                [grads[p].float() for p in params],
                first,
                second,
                [],
                [state["step"] for state in states],
                fused=True,
                found_inf=found_inf,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["rate"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for p, w, state, m, v in zip(params, wide, states, first, second, strict=True):
                if w is not p:
                    self._write(p, w, state["step"])
                if m is not state["exp_avg"]:
                    state["exp_avg"].copy_(m)
                    state["exp_avg_sq"].copy_(v)


class Muon(Optimizer):
    """Muon with Nesterov momentum, for matrices; those of one shape are updated in one batch."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        iteration: Format = FP32,
        emulate: bool = False,
        **formats: Any,
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(groups, defaults, **formats)
        self.iteration, self.emulate = iteration, emulate
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"Muon updates matrices; `{self.names[p]}` has {p.ndim} dimensions")
                count = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = {"step": count, "momentum": self._moment(p)}

    @torch.no_grad()
    def step(self, grads: Grads, *, found_inf: Tensor | None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient, unless `found_inf` is 1."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p in grads:
                    by_shape.setdefault(p.shape, []).append(p)
            for params in by_shape.values():
                self._update(params, torch.stack([grads[p].float() for p in params]), group, found_inf)

    def _update(
        self, params: list[Tensor], grads: Tensor, group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        old = torch.stack([self.state[p]["momentum"].float() for p in params])
        momentum = group["momentum"] * old + grads
        update = orthogonalize(grads + group["momentum"] * momentum, self.iteration, emulate=self.emulate)
        rows, columns = params[0].shape
        update = update.float() * max(1.0, rows / columns) ** 0.5
        applied = torch.ones((), device=grads.device) if found_inf is None else 1 - found_inf
        # where, not a product: zero times NaN is NaN
        momentum = torch.where(applied > 0, momentum, old)
        update = torch.where(applied > 0, update, 0.0)
        decay = 1 - applied * group["rate"] * group["weight_decay"]
        for index, p in enumerate(params):
            state = self.state[p]
            state["step"] += applied
            state["momentum"].copy_(momentum[index])
            wide = self._widened(p)
            wide.mul_(decay).sub_(group["rate"] * update[index])
            if wide is not p:
                self._write(p, wide, state["step"])


def orthogonalize(matrices: Tensor, iteration: Format, steps: int = 5, *, emulate: bool = False) -> Tensor:
    """Each matrix of a batch with its singular values pushed to about one, by Newton-Schulz."""
    a, b, c = NEWTON_SCHULZ

    def held(x: Tensor) -> Tensor:
        if not emulate:
            return x.to(dtype_of(iteration))
        return carried(x, iteration)

    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = held(x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7))
    for _ in range(steps):
        product = held(x @ x.mT)
        x = held(a * x + held(b * product + c * held(product @ product)) @ x)
    return x.mT if tall else x
