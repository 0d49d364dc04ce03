"""What tuning measures: what a format does to a model's gradients, losses of short runs, the time a format saves.

The same batches run again, forward and backward, with one module in other formats and everything else unchanged.
With g the gradient of a weight and h the gradient after rounding, an optimizer whose steps do not depend on the
size of a gradient (Adam, Muon) descends by |g| cos(g, h) instead of |g|. Over all weights:

    damage = sum |g| (1 - cos(g, h)) / sum |g|         the share of a step's descent that is lost

For noise of relative size e, independent of g, that is e^2 / 2, so the damage of two modules that are rounded is
about the sum of the damage of each. It is 1 where nothing is left of the gradient, infinite where a number is not
finite.
"""

import gc
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.devices import native
from halfstep.core.errors import FactoryError
from halfstep.core.formats import FP32, TF32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import Precision, precisions
from halfstep.torch.convert.apply import set_precision
from halfstep.torch.convert.plan import matmuls, plans_of
from halfstep.torch.convert.resolve import names_of
from halfstep.torch.fp8.linear import MULTIPLE
from halfstep.torch.instruments.replay import precisions_of, replay, switch_formats
from halfstep.torch.measure import LayerWork, devices, time_layer
from halfstep.torch.numerics.dtypes import as_device, describe
from halfstep.torch.update.parts import device_of
from halfstep.torch.update.prepare import prepare_as
from halfstep.torch.update.step import Engine


@dataclass(frozen=True)
class MatmulLayer:
    """A module that multiplies by matrices, and how much it multiplies in a step."""

    name: str
    sizes: tuple[tuple[int, int], ...]  # inputs and outputs of each matrix
    rows: int  # tokens, or whatever passes through it
    bias: bool = False

    @property
    def misfit(self) -> str:
        """Why it cannot be multiplied in fp8; empty if it can."""
        odd = [f"{n} features" for size in self.sizes for n in size if n % MULTIPLE]
        return f"{odd[0]}, and an fp8 matmul needs a multiple of {MULTIPLE}" if odd else ""

    def num_bytes(self, compute: int, grad: int) -> float:
        """Returns the bytes that its three matmuls read, given the bits of operands and of gradients."""
        forward = sum(self.rows * inputs + inputs * outputs for inputs, outputs in self.sizes)
        backward = sum(self.rows * outputs for _, outputs in self.sizes)
        return (2 * forward * compute + 2 * backward * grad) / 8


class Study:
    """A prepared model as it is now, and batches that run again and again."""

    def __init__(
        self, run: Any, loss_fn: Callable[[Any], Any], batches: Sequence[Any], names: Sequence[str] | None = None
    ):
        self.run, self.names = run, names_of(run.model, names)
        self._loss_fn, self._batches = loss_fn, batches
        self._base, self._ruled = precisions_of(run.model), precisions(run.policy, self.names)
        plans, rows = [plan for plan in matmuls(plans_of(run.model)) if not plan.router], Counter[nn.Module]()
        count = partial(_count_rows, rows)
        hooks = [plan.module.register_forward_pre_hook(count, with_kwargs=True) for plan in plans]
        self._reference = self._gradients({})
        for hook in hooks:
            hook.remove()
        used = [plan for plan in plans if plan.module in rows]
        self.layers = [_layer_of(plan, rows[plan.module] // len(batches)) for plan in used]

    def descent_lost(self, policy: Policy) -> float:
        """Returns the share of a step's descent that is lost under a policy instead of the run's."""
        wanted = precisions(policy, self.names)
        changed = {n: p for n, p in wanted.items() if n in self._base and p != self._ruled[n]}
        return share_lost(self._reference, self._gradients(changed))

    def _gradients(self, changed: dict[str, Precision]) -> dict[str, Tensor]:
        with switch_formats(self.run, {**self._base, **changed}):
            torch.manual_seed(0)  # the same dropout each time
            return replay(self.run, self._loss_fn, self._batches).gradients


def share_lost(references: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> float:
    """Returns the share of a step's descent that is lost with these gradients."""
    lost, whole, rows = 0.0, 0.0, []
    for name, reference in references.items():
        other = grads[name] if name in grads else torch.zeros_like(reference)
        # In fp64, of sums in fp32 that are relative to the norm: 1 - cos is as small as e^2 / 2.
        norm, size = reference.norm(), other.norm()
        apart = (reference / norm - other / size).norm()
        rows.append(torch.stack([norm.double(), size.double(), apart.double()]))
    for norm, size, apart in torch.stack(rows).tolist():
        if not all(map(math.isfinite, (norm, size))):
            return math.inf
        whole += norm
        lost += 0.0 if norm == 0 else norm if size == 0 else norm * apart**2 / 2
    return lost / whole if whole else 0.0


def _count_rows(rows: Counter[nn.Module], module: nn.Module, args: Any, kwargs: Any) -> None:
    """A hook that counts the rows that pass through a module."""
    x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim()), None)
    if x is not None:
        rows[module] += x.numel() // x.shape[-1]


def _layer_of(plan: Any, rows: int) -> MatmulLayer:
    bias = any(p.dim() == 1 for p in plan.module.parameters(recurse=False))
    return MatmulLayer(plan.name, tuple(plan.kind.matrix_sizes(plan.module)), rows, bias)


STUDY_BATCHES = 2  # batches that a study runs again
FACTORY_HINT = (
    "return model, optimizer, loss_fn, batches, held_out: two lists of batches, to train on and to judge by; or "
    "model, optimizer, loss_fn, batch, as for `halfstep audit`"
)


class Trial:
    """A model that a factory made for one seed, its optimizers and its data, prepared with a policy."""

    def __init__(self, make: Callable[[], Sequence[Any]], policy: Policy, seed: int):
        gc.collect()  # a run and its model refer to each other: what earlier trials held is not freed otherwise
        made = make()
        model, optimizer, self.loss_fn = made[:3]
        self.batches, self.held_out = _batches_of(made)
        self.policy, self.seed = policy, seed
        self.run: Engine = prepare_as(Engine, model, optimizer, policy, seed=seed)

    def train(self, steps: int, report: Callable[[int], None] = lambda step: None) -> float:
        """Makes `steps` updates, on batches in an order that the seed decides; returns the held-out loss."""
        order = torch.Generator().manual_seed(self.seed)
        picks: list[int] = []
        for step in range(steps):
            picks = picks or torch.randperm(len(self.batches), generator=order).tolist()
            self.run.step(self.loss_fn, [self.batches[picks.pop()]])
            report(step + 1)
        return self.score()

    @torch.no_grad()
    def score(self) -> float:
        """Returns the mean loss over the held-out batches; infinite if it is not finite."""
        total, count, was = 0.0, 0.0, self.run.model.training
        self.run.model.eval()
        with self.run.evaluation():
            for batch in self.held_out:
                given = self.loss_fn(batch)
                loss, weight = given if isinstance(given, tuple) else (given, 1.0)
                total, count = total + float(loss), count + float(weight)
        self.run.model.train(was)
        return total / count if math.isfinite(total) else math.inf

    def study(self) -> Study:
        """Returns a study of the model at this point of its training."""
        return Study(self.run, self.loss_fn, self.batches[:STUDY_BATCHES])


def device_of_factory(made: Sequence[Any]) -> str:
    """Returns the device of a factory's model; refuses anything but a model with a loss function and batches."""
    model, _, loss_fn = made[:3]
    if not isinstance(model, nn.Module) or not callable(loss_fn):
        kinds = f"{type(model).__name__} and {type(loss_fn).__name__}"
        raise FactoryError(f"the factory returned {kinds} for a model and a loss function", hint=FACTORY_HINT)
    _batches_of(made)
    return str(device_of(model))


def _batches_of(made: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    if len(made) == 4:
        return [made[3]], [made[3]]
    for what, batches in (("train on", made[3]), ("judge by", made[4])):
        if not isinstance(batches, Sequence) or isinstance(batches, str) or not len(batches):
            kind = f"an empty {type(batches).__name__}" if hasattr(batches, "__len__") else type(batches).__name__
            raise FactoryError(f"the factory returned {kind} for the batches to {what}", hint=FACTORY_HINT)
    return made[3], made[4]


def call_seeded(factory: Callable[[], Any], seed: int) -> Any:
    """Calls a factory with the random state of a seed."""
    torch.manual_seed(seed)
    return factory()


def unsupported_formats(formats: Sequence[Format], device: torch.device | str | None = None) -> dict[Format, str]:
    """Returns the formats that the hardware does not multiply, each with the reason."""
    hardware = describe(as_device(device or devices()[0]))
    support = {fmt: native(fmt, hardware) for fmt in dict.fromkeys(formats) if fmt not in (FP32, TF32)}
    return {fmt: each.reason for fmt, each in support.items() if not each}


def time_options(
    study: Study, layer: MatmulLayer, policies: Mapping[Any, Policy], *, compiled: bool
) -> dict[Any, float]:
    """Returns the seconds of a training pass of a layer under each policy; infinite where no kernel runs it."""
    wanted = {key: precisions(policy, study.names)[layer.name] for key, policy in policies.items()}
    device = device_of(study.run.model)
    split = any(policy.param.split for policy in policies.values())
    seconds = dict.fromkeys(wanted, 0.0)
    for inputs, outputs in layer.sizes:
        work = LayerWork(inputs, outputs, layer.rows, layer.bias, split, device, compiled)
        try:
            times = time_layer(work, list(wanted.values()))
        except RuntimeError:  # some format has no kernel: time each alone
            times = [_time_alone(work, precision) for precision in wanted.values()]
        for key, each in zip(wanted, times, strict=True):
            seconds[key] += each
    return seconds


def _time_alone(work: LayerWork, precision: Any) -> float:
    try:
        return time_layer(work, [precision])[0]
    except RuntimeError:
        return math.inf


def study_of(session: Any, batches: Sequence[Any], base: Policy) -> Study:
    """Returns a study of a session's model in the formats of training, on tokens of shape (batch, context + 1)."""
    names, run = session.model.module_names(), session.run
    set_precision(session.model, base, names)
    run.policy = base
    return Study(run, session._sum_and_count, [session._to_device(batch) for batch in batches], names)
