"""Short runs of a model of the user's, and what a format saves in its layers on this device."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from halfstep.core.devices import native
from halfstep.core.errors import ConfigError
from halfstep.core.formats import FP32, TF32, Format
from halfstep.core.policy import Policy
from halfstep.core.precision import precisions
from halfstep.torch.apply import set_precision
from halfstep.torch.dtypes import as_device, describe
from halfstep.torch.measure import LayerWork, devices, time_layer
from halfstep.torch.run.checks import device_of
from halfstep.torch.step import Run, prepare
from halfstep.torch.tuning.study import MatmulLayer, Study

STUDIED = 2  # batches that a study runs again
FORM = (
    "return model, optimizer, loss_fn, batches, held_out: two lists of batches, to train on and to judge by; or "
    "model, optimizer, loss_fn, batch, as for `halfstep audit`"
)


class Trial:
    """A model that a factory made for one seed, its optimizers and its data, prepared with a policy."""

    def __init__(self, make: Callable[[], Sequence[Any]], policy: Policy, seed: int):
        gc.collect()  # a run and its model refer to each other: what earlier trials held is not freed otherwise
        made = make()
        model, optimizer, self.loss_fn = made[:3]
        self.batches, self.held_out = _data(made)
        self.policy, self.seed = policy, seed
        self.run: Run = prepare(model, optimizer, policy, seed=seed)

    def train(self, steps: int, report: Callable[[int], None] = lambda step: None) -> float:
        """Makes so many updates, in an order of the batches that the seed decides; returns the held-out loss."""
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
        """Returns the model as it is now, to see what its gradients notice."""
        return Study(self.run, self.loss_fn, self.batches[:STUDIED])


def place_of(made: Sequence[Any]) -> str:
    """Returns the device of what a factory made; refuses what is not a model with a loss and batches."""
    model, _, loss_fn = made[:3]
    if not isinstance(model, nn.Module) or not callable(loss_fn):
        kinds = f"{type(model).__name__} and {type(loss_fn).__name__}"
        raise ConfigError(f"the factory returned {kinds} for a model and a loss function", hint=FORM)
    _data(made)
    return str(device_of(model))


def _data(made: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    if len(made) == 4:
        return [made[3]], [made[3]]
    for what, batches in (("train on", made[3]), ("judge by", made[4])):
        if not isinstance(batches, Sequence) or isinstance(batches, str) or not len(batches):
            kind = f"an empty {type(batches).__name__}" if hasattr(batches, "__len__") else type(batches).__name__
            raise ConfigError(f"the factory returned {kind} for the batches to {what}", hint=FORM)
    return made[3], made[4]


def seeded(factory: Callable[[], Any], seed: int) -> Any:
    """Calls a factory with the random state of a seed."""
    torch.manual_seed(seed)
    return factory()


def lacks(formats: Sequence[Format], device: torch.device | str | None = None) -> dict[Format, str]:
    """Returns which of some formats the hardware does not multiply, and why."""
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
        except RuntimeError:  # of one of them: find out which
            times = [_alone(work, precision) for precision in wanted.values()]
        for key, each in zip(wanted, times, strict=True):
            seconds[key] += each
    return seconds


def _alone(work: LayerWork, precision: Any) -> float:
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
