"""Steps that a plain loop makes itself: `loss.backward(); optimizer.step(); optimizer.zero_grad()`.

With whole fp32 masters and no loss scale, autograd leaves in `p.grad` what `Run.backward` would, and the optimizer
finds its masters, gradients and moments as it expects them. What `Run.update` adds is done by two hooks of torch's
around `optimizer.step`:

    before      are all gradients finite? The optimizer learns it as in an update (`Driver.begin`); buffers go back
                to what they were if they are not
    after       `Driver.end`

A closure is run before the gradients are looked at: torch's optimizers would call it once, first. Others might
call it again, and are refused.

So the update is the run's, bit for bit, skipped or not. Where it would not be, the step is refused (`why_not`). A
schedule that the loop steps itself moves after a skipped update too, as in torch; `Run.scheduler_step` waits. What
stays unseen is the loss: that it is in the policy's format, which `Run.backward` checks, and that it is finite,
which `Run.update` does.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from halfstep.core.errors import ArgumentError, AutocastError, GradientsError, RunStateError
from halfstep.core.formats import FP32
from halfstep.core.scaling import NoScale
from halfstep.torch.numerics.shards import local_parts
from halfstep.torch.optim.drivers import Driver, GradNorm, StockDriver, label
from halfstep.torch.parallel.ranks import agree
from halfstep.torch.update.parts import RunParts

_HINT = (
    "run.step(loss_fn, micro_batches) makes the update; in your own loop run.backward(loss) and run.update() do"
)


def why_not(run: RunParts) -> str:
    """Returns why steps by hand could not be the run's own; empty if they are."""
    scaled = not isinstance(run.policy.scale, NoScale)
    whole = all(map(run.masters.is_whole, run.parameters))
    stock = any(isinstance(driver, StockDriver) for driver in run.drivers)
    narrow = any(fmt != FP32 for fmt in run.conversion.moments.values())
    reasons = {
        "this policy scales the loss: its gradients are not scaled, or never unscaled": scaled,
        "its masters are split or narrower than fp32: gradients or updates would be rounded": not whole,
        f"clip_norm={run.clip_norm:g} would be ignored": bool(run.clip_norm),
        "the averages would not follow": run.averages is not None,
        "the amaxes of its delayed operands would not follow": run.amaxes is not None,
        "its moments are narrower than fp32, and so would be the optimizer's arithmetic": stock and narrow,
        f"autograd sums gradients in fp32, not in accumulate={run.policy.accumulate}": run.policy.accumulate
        != FP32,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class OwnSteps:
    """The hooks around the steps of a run's optimizers that the run does not make."""

    def __init__(self, run: RunParts):
        self.run, self._norm = run, GradNorm()
        self._for: tuple[Any, float] = (None, 0.0)  # what `_why` was found for
        self._why = ""

    def hooks(self) -> list[Any]:
        """Registers the hooks; returns their handles."""
        befores = [d.optimizer.register_step_pre_hook(partial(self._begin, d)) for d in self.run.drivers]
        return befores + [d.optimizer.register_step_post_hook(partial(self._end, d)) for d in self.run.drivers]

    @torch.no_grad()
    def _begin(self, driver: Driver, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if driver.is_stepping:
            return None
        closure = self.check(driver, args, kwargs)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (args[0], lambda: loss), {}
        run = self.run
        run.check_parameters()
        run.accumulation.check_none_new()
        grads = [p.grad for p in run.parameters if p.grad is not None]
        if not grads:
            return args, kwargs
        norm = self._norm(local_parts(grads) if run.num_copies else grads)
        if run.num_copies:
            norm = agree(norm, run.num_copies, 1.0, 0.0)[0]
        finite = norm < math.inf
        if driver is run.drivers[0]:
            run.num_applied += finite
        run.buffers.restore_unless(finite)
        run.skipped = ~finite
        return args, {**kwargs, **driver.begin(run.skipped.float())}

    def _end(self, driver: Driver, *_: Any) -> None:
        if not driver.is_stepping:
            driver.end()

    def check(self, driver: Driver, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """Refuses a step that would not be an update of the run; returns its closure, if it has one."""
        run = self.run
        if self._for[0] is not run.parameters or self._for[1] != run.clip_norm:
            self._for, self._why = (run.parameters, run.clip_norm), why_not(run)
        called = f"{label(driver.optimizer)}.step() was called directly, and"
        if self._why:
            raise RunStateError(f"{called} {self._why}", hint=_HINT)
        if run.accumulation.begun:
            raise GradientsError(
                f"{called} gradients were summed by run.backward()", hint="run.update() makes the step with them"
            )
        if vars(driver.optimizer).pop("grad_scale", None) is not None:
            raise AutocastError(
                f"{called} its gradients are scaled by a GradScaler, which this policy does not need",
                hint="omit it: loss.backward(), then optimizer.step()",
            )
        given = [each for each in (*args[1:], *kwargs.values()) if each is not None]  # Accelerate passes None
        if not given:
            return None
        if not type(driver.optimizer).__module__.startswith("torch.optim."):
            raise ArgumentError(
                f"{called} it was given arguments: the gradients of a closure would not be checked",
                hint=f"call loss.backward() before it; {_HINT}",
            )
        (closure,) = given
        return closure  # type: ignore[no-any-return]
