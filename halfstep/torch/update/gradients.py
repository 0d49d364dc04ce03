"""Gradients between `backward` and `update`, where users look for them: in `p.grad`.

After the last backward pass of an update each gradient is in `p.grad`, in the accumulate format, also those that
are summed elsewhere (accumulation.py). It is the sum over micro-batches, times the loss scale. `unscale` makes it
the gradient of the mean loss: for clipping by hand, norms of layers, noise. `update` then divides no more, and
skips the step if gradients were not finite before `unscale` or are not now.

A change to gradients that are still sums or scaled is refused at the next `backward` or `update`: torch counts
writes. Without a scale and with one micro-batch, `p.grad` is the gradient already, and may be changed at once.
`Run.step` publishes nothing: no user code runs between its passes.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import is_

import torch
from torch import Tensor

from halfstep.core.errors import GradientsError
from halfstep.core.scaling import NoScale
from halfstep.torch.optim.adamw import Grads
from halfstep.torch.optim.drivers import numbers_of
from halfstep.torch.update.accumulation import Accumulation, is_one, times


class UserGradients:
    """What `p.grad` was after the last backward pass, and whether it has been unscaled since."""

    def __init__(self, accumulation: Accumulation, names: Mapping[Tensor, str]):
        self.accumulation, self.names = accumulation, names
        self.clear()

    def clear(self) -> None:
        """Forgets everything, and leaves `p.grad` unchanged."""
        self._seen: tuple[Sequence[Tensor], list[Tensor | None], list[int]] | None = None
        self.finite: Tensor | None = None  # before `unscale`; None if that was not called
        self._norm: tuple[Tensor, list[Tensor], list[int]] | None = None

    def detach(self) -> None:
        """Takes sums that are not autograd's out of its way, before a backward pass."""
        if self._seen is None:
            return
        if self.finite is not None:
            raise GradientsError(
                "the gradients so far have been unscaled, and those of another backward pass are scaled",
                hint="call unscale() after the last backward() of an update; run.forget() drops the gradients",
            )
        if changed := self._changed():
            raise GradientsError(
                f"the gradient of `{changed}` was changed or dropped between two backward passes of an update",
                hint="change gradients after the last of them and run.unscale(); run.forget() drops them all",
            )
        for p in self.accumulation.summed:
            p.grad = None
        self.clear()

    def publish(self, parameters: Sequence[Tensor], *, last: bool) -> None:
        """Shows the sums in `p.grad` after the last backward pass, and remembers what is there after each."""
        if last:
            for p in self.accumulation.summed:
                if (total := self.accumulation.sums.get(id(p))) is not None:
                    _set_grad(p, total)
        grads = [p.grad for p in parameters]
        self._seen = parameters, grads, [-1 if g is None else g._version for g in grads]

    def collect(self, parameters: Sequence[Tensor]) -> Grads:
        """Returns the gradients of an update as they are now; refuses those that were changed while scaled."""
        if self._seen is not None and self.accumulation.complete:
            scaled = not isinstance(self.accumulation.policy.scale, NoScale)
            # Without a scale and with one micro-batch they are the gradient of the mean loss already.
            is_mean = not scaled and is_one(self.accumulation.weights)
            if self.finite is None and not is_mean and (changed := self._changed()):
                state = "times the loss scale" if scaled else "a sum over micro-batches"
                raise GradientsError(
                    f"the gradient of `{changed}` was changed or dropped between backward and update, where it is "
                    f"still {state}",
                    hint="call run.unscale() after the last backward(), then change gradients, then run.update()",
                )
            self.accumulation.sums.clear()  # what is in `p.grad` counts
        return self.accumulation.gradients(parameters)

    def note_norm(self, norm: Tensor, grads: Grads) -> None:
        """Remembers the norm of gradients."""
        held = [*grads.values()]
        self._norm = norm, held, [g._version for g in held]

    def known_norm(self, grads: Grads) -> Tensor | None:
        """Returns the norm that was noted, if these are the same gradients, not written to since."""
        if self._norm is None:
            return None
        (norm, held, versions), now = self._norm, [*grads.values()]
        same = len(now) == len(held) and all(map(is_, now, held)) and [g._version for g in now] == versions
        return norm if same else None

    @torch.no_grad()
    def unscale(
        self, parameters: Sequence[Tensor], inv_scale: Tensor | float, norm_of: Callable[[Grads], Tensor]
    ) -> None:
        """Makes `p.grad` the gradients of the mean loss; a second call changes nothing.

        The norm of the sums says whether they are finite. Times the same factor it is the norm that `update`
        reports, as it would be without `unscale`, unless a gradient is changed in between.
        """
        if self.finite is not None:
            return
        sums, weights = self.collect(parameters), self.accumulation.weights
        held = [p for p in parameters if id(p) in sums]
        # Narrow ones would be rounded again.
        grads = Grads({id(p): g.float() if (g := sums[id(p)]).dtype.itemsize < 4 else g for p in held})
        norm, factor = norm_of(grads), inv_scale / weights
        self.finite = torch.isfinite(norm / weights)
        if not is_one(factor):
            torch._foreach_mul_(numbers_of([*grads.values()]), factor)
        self.accumulation.sums.clear()
        for p in held:
            _set_grad(p, grads[id(p)])
        self.note_norm(times(norm, factor), grads)
        self._seen = parameters, [], []

    def _changed(self) -> str:
        """Returns the name of a parameter whose gradient is no longer what it was; empty if there is none."""
        assert self._seen is not None
        parameters, grads, versions = self._seen
        now = [p.grad for p in parameters]
        if all(map(is_, now, grads)) and [-1 if g is None else g._version for g in now] == versions:
            return ""
        rows = zip(parameters, now, grads, versions, strict=True)
        return next(self.names[p] for p, g, old, n in rows if g is not old or (g is not None and g._version != n))


def _set_grad(parameter: Tensor, grad: Tensor) -> None:
    if parameter.grad is grad:
        return
    if grad.dtype != parameter.dtype and parameter.grad_dtype not in (None, grad.dtype):
        parameter.grad = None
        parameter.grad_dtype = None  # any: a sum may be wider than its parameter
    parameter.grad = grad
