"""The sum of gradients over the micro-batches of one update.

It is that of core/scaling.py, with the weights w_i relative to the newest micro-batch, whose own backward pass
sees S and no weight: one row beside 512 must not cost the scale nine bits.

    accumulated  G <- G * w_(i-1) / w_i + S g_i           in the accumulate format, fp32
    gradient       = G * inv_scale * w_n / sum_i w_i      unscaled with the S that was used

A loss that was normalized before it came here, such as a sum over tokens divided by those of all micro-batches,
has no weight: w_i = 1, and the sum is divided by nothing.

The pass over the sums is made only if weights differ or are on the device. JAX and MLX add (w_i / w_1) S g_i
instead, the same sum, in the pass that adds. torch cannot: autograd adds to `p.grad` itself, and taking every
gradient away from it first would hold a second copy of them all. Without a scale no gradient is near the end of
its range: there w_i / w_1 multiplies the loss, and the sum stays.

autograd sums in the dtype of the parameter, and a bf16 sum of 256 and ones stays at 256: there each gradient is
taken away after its backward pass and added to a sum kept here. So are those wider than their parameter
(split/). Sparse gradients stay sparse; summing the entries of a row waits for the device, as torch's sparse
optimizers do.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.core.errors import GradientsError, LossError, LossFormatError, ModelChangedError, type_name
from halfstep.core.policy import Policy
from halfstep.core.scaling import NoScale
from halfstep.torch.numerics.dtypes import FLOATS, dtype_of
from halfstep.torch.numerics.shards import is_shard
from halfstep.torch.numerics.split.operand import is_split
from halfstep.torch.numerics.split.parameter import drop_grads, take_grad
from halfstep.torch.optim.adamw import Grads
from halfstep.torch.optim.masters import PREPARE_AGAIN
from halfstep.torch.parallel.ranks import average, mean, num_ranks
from halfstep.torch.update.buffers import Contents


def check_device(parameters: Sequence[Tensor], device: torch.device) -> None:
    """Refuses a model that was moved away from its run: moments, sums and the loss scale do not follow."""
    if parameters[0].device != device:
        raise ModelChangedError(
            f"the model is on {parameters[0].device}, and the loss scale and its optimizers' state on {device}",
            hint=f'model.to("{device}") moves it back, exactly; to train it elsewhere, {PREPARE_AGAIN}',
        )


class Accumulation:
    """The gradients that `backward` adds and `update` uses up."""

    def __init__(self, policy: Policy, contents: Contents):
        self.policy, self.contents = policy, contents
        self.format = dtype_of(policy.accumulate)
        self._scaled = not isinstance(policy.scale, NoScale)
        self._loss_bytes = (torch.float32 if policy.emulate else dtype_of(policy.loss)).itemsize
        self._listed = contents.parameters
        self._several_devices = _on_several_devices(self._listed)
        self._known = {id(p): p for p in self._listed}  # when the model was prepared
        self._joined: list[Tensor] = []  # parameters that are in the model since
        self._new: list[Tensor] = []  # those of them that have a gradient
        self._listed_for: Sequence[Tensor] = ()
        self.summed: list[Tensor] = []  # of those parameters: the ones whose sums are kept here
        self._summed_by_autograd: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Drops everything, autograd's own gradients of the model included."""
        for p in self.contents.parameters:
            p.grad = None
        self.sums: dict[int, Tensor] = {}  # by the id of the parameter: hashing a tensor is a Python call
        self._reference: Tensor | float | None = None  # the weight that all others are relative to
        self._normalized = False  # whether losses are shares of the update's loss
        self.complete = True
        self.weights: Tensor | float = 0.0  # summed, relative to the reference
        self.losses: Tensor | float = 0.0  # summed, weighted in the same way

    def _look_for_new(self) -> None:
        self.contents.refresh()
        if self.contents.parameters is not self._listed:
            self._listed = self.contents.parameters
            self._several_devices = _on_several_devices(self._listed)
            self._joined = [p for p in self._listed if id(p) not in self._known]
        self._new += [p for p in self._joined if p.grad is not None]

    def add(
        self,
        loss: Tensor,
        weight: Tensor | float | None,
        scale: Tensor,
        parameters: Sequence[Tensor],
        *,
        last: bool,
        normalized: bool = False,
        retain_graph: bool = False,
    ) -> None:
        """Adds the gradient of a micro-batch's mean loss, times the scale; `weight` is None or was checked.

        A loss that is `normalized` is a share of the update's loss: the sum is divided by nothing.
        """
        loss = self._check_loss(loss)
        check_device(parameters, scale.device)
        self._check_normalized(weight, normalized)
        self.complete = last
        alone = num_ranks() == 1
        if alone and not isinstance(weight, Tensor) and weight == 0.0:
            return  # no tokens, no gradient
        first = self._reference is None
        if first:
            self._reference = divisor(1.0 if weight is None else weight if alone else mean(weight, scale.device))
            for p in parameters:
                p.grad = None  # from a backward pass that was not this run's, at an unknown scale
        weight = 1.0 if weight is None else weight
        if alone and self._scaled:
            share = self._weigh_sums(weight, scale, parameters)
        else:
            # Among ranks, sums that are not exchanged yet are the engine's: this micro-batch is weighted, not what
            # is there. A number stays a number: putting it on the device would wait.
            share = weight / cast(float, self._reference)
        scaled = loss.float() * (share * scale) if self._scaled else times(loss.float(), share)
        self._backward(scaled, retain_graph)
        shown = loss.detach().float()
        weighted = share * (torch.where(share > 0, shown, 0.0) if isinstance(share, Tensor) else shown)
        self.losses = weighted if first else self.losses + weighted
        self.weights = 1.0 if normalized else self.weights + share
        self._take(parameters)
        if last and not alone:
            # DDP reduces the gradients that are parameters' own, and leaves these to us.
            sums = [self.sums[id(p)] for p in self.summed if id(p) in self.sums and not is_shard(p)]
            average(sums, dtype_of(self.policy.reduce))

    @contextmanager
    def without_strays(self) -> Iterator[None]:
        """Inside, a loss function may run backward passes of its own: what they leave in `p.grad` is dropped."""
        if self._reference is None:  # before the first micro-batch `add` drops it
            yield
            return
        sums = [p.grad for p in self._summed_by_autograd]
        for p in self._summed_by_autograd:
            p.grad = None
        yield
        drop_grads(self.summed)
        for p, total in zip(self._summed_by_autograd, sums, strict=True):
            p.grad = total

    def _check_normalized(self, weight: Tensor | float | None, normalized: bool) -> None:
        if normalized and weight is not None:
            raise LossError(
                "a normalized loss has no weight: it is already its share of the update's loss",
                hint="omit `weight`; or pass the mean loss with its number of tokens, without normalized=True",
            )
        if self._reference is not None and normalized != self._normalized:
            raise LossError(
                "the losses of one update are normalized or not, all of them",
                hint="pass `normalized` to each backward() of an update, or to none; run.forget() drops the sum",
            )
        self._normalized = normalized

    def _backward(self, loss: Tensor, retain_graph: bool) -> None:
        """Runs the backward pass in this thread, unless the model is on several devices, each of which gets one.

        Autograd has a thread for each GPU. To wake it and to hand Python over takes a fifth of a small pass.
        """
        try:
            with torch.autograd.set_multithreading_enabled(self._several_devices):
                loss.backward(retain_graph=retain_graph)
        except RuntimeError as error:
            if "through the graph a second time" not in str(error):
                raise
            raise LossError(
                "there was a backward pass of this loss before: its graph is gone",
                hint="run.step and run.backward make it: leave loss.backward() out; run.backward(loss, "
                "retain_graph=True) keeps the graph",
            ) from error

    def _weigh_sums(self, weight: Tensor | float, scale: Tensor, parameters: Sequence[Tensor]) -> Tensor | float:
        """Makes a micro-batch's weight the reference of all sums; returns its own: 1, or 0 without tokens."""
        share: Tensor | float = 1.0
        before, reference = self._reference, weight
        assert before is not None
        if isinstance(weight, Tensor):
            share, reference = (weight > 0).float(), torch.where(weight > 0, weight, torch.as_tensor(before))
        self._reference, ratio = reference, before / reference
        if isinstance(ratio, Tensor):
            ratio = torch.ones_like(scale) * ratio  # on the device of the sums
        elif ratio == 1.0:
            return share
        self.weights, self.losses = self.weights * ratio, self.losses * ratio
        if sums := [g for p in parameters if (g := self.sums.get(id(p), p.grad)) is not None]:
            torch._foreach_mul_(sums, ratio)
        return share

    def _take(self, parameters: Sequence[Tensor]) -> None:
        """Moves gradients that autograd would sum in another format to sums kept here."""
        if self._listed_for is not parameters:
            own = [p for p in parameters if p.dtype in FLOATS and (p.dtype != self.format or is_split(p))]
            self._listed_for, self.summed, ours = parameters, own, {*map(id, own)}
            self._summed_by_autograd = [p for p in parameters if id(p) not in ours]
        sums, added = list[Tensor](), list[Tensor]()
        for p in self.summed:
            grad = take_grad(p)
            if grad is None:
                continue
            if grad.dtype is not self.format:
                grad = grad.to(self.format)
            if (total := self.sums.setdefault(id(p), grad)) is not grad:
                sums.append(total)
                added.append(grad)
        if sums:
            torch._foreach_add_(sums, added)

    def gradients(self, parameters: Sequence[Tensor]) -> Grads:
        """Returns the sum of each parameter that has one, by its id; refuses those that joined since `prepare`."""
        if self._reference is None:
            raise GradientsError(
                "there are no gradients to update with",
                hint="run.backward(loss), and not loss.backward(), comes before run.update(); run.step does both",
            )
        if not self.complete:
            raise GradientsError(
                "the last micro-batch was passed with last=False", hint="pass it with backward(loss, last=True)"
            )
        sum_of, grads = self.sums.get, Grads()
        for p in parameters:  # of a split master, asking for `p.grad` is a Python call
            if (grad := sum_of(id(p))) is not None or (grad := p.grad) is not None:
                grads[id(p)] = grad
        if not grads.plain:
            grads = Grads({key: g.coalesce() if g.is_sparse else g for key, g in grads.items()})
        if not grads:
            self._check_still_there(parameters)
        self.check_none_new()
        if not grads:
            raise GradientsError(
                "no parameter of the optimizers has a gradient",
                hint="the loss does not depend on them, they are frozen, or zero_grad() dropped them: omit it",
            )
        return grads

    def _check_still_there(self, parameters: Sequence[Tensor]) -> None:
        self.contents.refresh()
        if {id(p) for p in parameters}.isdisjoint(map(id, self.contents.parameters)):
            raise ModelChangedError(
                "the model holds none of the parameters that it was prepared with: they were replaced since, "
                "as FSDP's fully_shard does",
                hint="run = prepare(model, policy), then fully_shard, then run.attach(optimizers)",
            )

    @property
    def begun(self) -> bool:
        """Whether there are gradients that no update has used."""
        return self._reference is not None

    def check_none_new(self) -> None:
        """Refuses gradients of parameters that joined the model since it was prepared."""
        self._look_for_new()
        if not self._new:
            return
        names: dict[Tensor, str] = {p: name for name, p in self.contents.model.named_parameters()}
        self._new, new = [], self._new
        if left := [names[p] for p in new if p in names]:
            raise ModelChangedError(
                f"`{left[0]}` was not there when the model was prepared, and is not trained "
                f"({len(left)} such parameters)",
                hint=PREPARE_AGAIN,
            )

    def _check_loss(self, loss: Tensor) -> Tensor:
        if not isinstance(loss, Tensor):
            raise LossError(
                f"the loss is a {type(loss).__name__}; it must be a tensor of one number",
                hint="return the mean loss, without .item(), or (the sum of losses, the number of tokens)",
            )
        if loss.numel() != 1 or not loss.requires_grad:
            wrong = f"has the shape {tuple(loss.shape)}" if loss.numel() != 1 else "needs no gradient"
            raise LossError(
                f"the loss {wrong}; it must be one number that depends on parameters",
                hint="take its mean, or return (sum, count); compute it outside of no_grad(), without detach()",
            )
        if loss.dtype.itemsize < self._loss_bytes:
            raise LossFormatError(
                f"the loss came out in {loss.dtype}, and the policy says loss={self.policy.loss}",
                hint="widen its inputs, such as F.cross_entropy(logits.float(), targets); nn.CrossEntropyLoss() "
                "that is built inside a compiled forward is out of reach: compute it from the logits outside",
            )
        return loss.reshape(())


def _on_several_devices(parameters: Sequence[Tensor]) -> bool:
    return len({p.device for p in parameters}) > 1


def mark_last(micro_batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yields each micro-batch, and whether it is the last."""
    following = iter(micro_batches)
    for batch in following:
        for after in following:
            yield batch, False
            batch = after
        yield batch, True


def check_pair(given: tuple[Any, ...]) -> tuple[Tensor, Tensor | float]:
    """Checks what a loss function returned, (the sum of losses, the number of tokens)."""
    if len(given) != 2 or not isinstance(given[0], Tensor):
        kinds = ", ".join(type(item).__name__ for item in given)
        raise LossError(
            f"the loss function returned ({kinds}); a tuple is (the sum of losses, the number of tokens)",
            hint="return the mean loss alone, and keep other values elsewhere",
        )
    return given[0], check_weight(given[1])


def check_weight(weight: Any) -> Tensor | float:
    """Checks a number of tokens: a number that is not negative, or a tensor of one on the device."""
    if isinstance(weight, Tensor):
        if weight.numel() == 1 and not weight.is_complex():
            return weight.detach().reshape(())
    elif isinstance(weight, int | float) and weight >= 0.0:
        return weight
    given = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
    given = type_name(weight) if isinstance(weight, dict | tuple | list) else given
    raise LossError(
        f"weight={given}: a number of tokens is one number, 0 or more",
        hint="such as targets.numel(), or (y >= 0).sum(); or return the mean loss alone, without logits",
    )


def mean_loss(losses: Tensor | float, weights: Tensor | float) -> Tensor:
    """Returns the mean loss over the tokens of all micro-batches."""
    losses = torch.as_tensor(losses)
    return losses if is_one(weights) else losses / weights


def times(value: Tensor, factor: Tensor | float) -> Tensor:
    """Returns the product; a factor of 1 costs no launch."""
    return value if is_one(factor) else value * factor


def is_one(value: Tensor | float) -> bool:
    """Whether a factor is the number 1; one on the device is not read."""
    return not isinstance(value, Tensor) and value == 1.0


def divisor(weight: Tensor | float) -> Tensor | float:
    """Returns a weight to divide by: 1 if it is zero, because then there is nothing to divide."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, weight, 1)
    return weight or 1.0
