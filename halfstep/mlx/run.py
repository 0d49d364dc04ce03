"""The run of a model: `prepare`, and all that can be done with what it returns.

Updates are update/step.py; what looks at them is instruments/.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from halfstep.core.arrays.measure import TOKENS, resolve_policy
from halfstep.core.audit import engine
from halfstep.core.audit.cause import Cause
from halfstep.core.audit.coverage import Coverage
from halfstep.core.audit.finding import Finding
from halfstep.core.averages import check_decay
from halfstep.core.errors import RunStateError, warn_renamed
from halfstep.core.observed import SLICE
from halfstep.core.policy import Policy
from halfstep.core.refusal import check_numbers
from halfstep.core.roles import print_value
from halfstep.core.scaling import stuck_error
from halfstep.mlx.convert.apply import apply, restore, set_precision
from halfstep.mlx.instruments import nonfinite
from halfstep.mlx.instruments.collect.audit import STEPS
from halfstep.mlx.instruments.coverage import record
from halfstep.mlx.instruments.monitor import Monitor
from halfstep.mlx.instruments.prepared import audit_updates, prepared_record
from halfstep.mlx.numerics.dtypes import describe
from halfstep.mlx.parallel.ranks import TIMEOUT, ranks_of
from halfstep.mlx.state import load_state, state_of
from halfstep.mlx.update.checks import check_parts, measured_choice, resolve_compile
from halfstep.mlx.update.step import Engine, LossFn, StepResult


def prepare(
    model: Module,
    optimizer: Optimizer,
    policy: Policy | str,
    *,
    clip_norm: float = 0.0,
    seed: int = 0,
    ema: float = 0.0,
    compile: bool | None = None,
    cast_inputs: bool = True,
    tokens: int = TOKENS,
    group: mx.distributed.Group | None = None,
    timeout: float = TIMEOUT,
) -> "Run":
    """Gives any MLX model and optimizer a policy, in place; `Run.unprepare` restores the model.

    `cast_inputs` casts the floating inputs of the model to compute, but not targets, which only the loss sees.
    Without it inputs arrive unchanged, and a layer that computes in a narrower format refuses fp32 ones. `ema` is
    the decay of an average of the masters, 0 for none.

    `compile=True` compiles the step, or says why it cannot; None does so on a GPU. Pass `step` the same `loss_fn`
    each time then: another one is compiled again.

    The policy `auto` is measured, as for a recipe, with micro-batches of `tokens`; `run.choice` has the answer and
    its reason.

    With `group=mx.distributed.init()` the processes of the group train one model: all start from the weights of
    rank 0, each gives `step` its own micro-batches, and gradients are summed in fp32 once per update, weighted by
    their tokens. A process that has waited `timeout` seconds for the others ends with an error.
    """
    check_numbers(clip_norm=clip_norm, seed=seed, tokens=tokens)
    if ema:
        check_decay(ema)
    ranks = ranks_of(group, timeout)
    check_parts(model, optimizer)
    compiled = resolve_compile(compile)
    device = describe(mx.default_device())
    policy, choice, note = resolve_policy(
        policy, lambda: measured_choice(model, tokens, alone=ranks is None), device
    )
    conversion = apply(model, policy, cast_inputs=cast_inputs)
    made: dict[str, Any] = {"seed": seed, "ema": ema, "compile": compiled, "choice": choice, "note": note}
    return Run(model, optimizer, conversion, clip_norm, **made, warns=True, ranks=ranks)


class Run(Engine):
    """A model, its optimizer and a policy: everything that one step needs."""

    @property
    def ema(self) -> dict[str, mx.array]:
        """The averages of the masters in fp32, by parameter name; empty without `ema`."""
        return {} if self.averages is None else dict(self.averages.arrays)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model computes with the averages of its masters; after, the masters are back, exactly."""
        self._check_open()
        if self.averages is None:
            raise RunStateError("there are no averages", hint="prepare(..., ema=0.999) keeps them")
        self.masters.check_writes()
        with self.averages.swap_in(), self._holding("its averages, inside run.averaged()"):
            yield

    @contextmanager
    def evaluation(self, names: Sequence[str] | None = None) -> Iterator[None]:
        """Inside, the model computes as the policy's `eval` role says. It does not call model.eval().

        `names` are the modules that rules may match; all by default.
        """
        if not self._holds:  # averages may be evaluated as well: formats and masters are two things
            self._check_open()
        evaluated = self.policy.evaluation()
        if evaluated == self.policy:
            yield
            return
        set_precision(self.model, evaluated, names)
        try:
            with self._holding("the formats of `eval`, inside run.evaluation()"):
                yield
        finally:
            set_precision(self.model, self.policy, names)

    @contextmanager
    def _holding(self, what: str) -> Iterator[None]:
        before, self._holds = self._holds, what
        try:
            yield
        finally:
            self._holds = before

    def weights(self) -> dict[str, mx.array]:
        """Returns the model's parameters by name, the fp32 master of those that have one."""
        self._check_open()
        self.masters.check_writes()
        held: dict[str, mx.array] = dict(tree_flatten(self.model.parameters()))
        return held | {name: array for name, array in self.masters.wide().items() if name in held}

    def check(
        self,
        result: StepResult,
        loss_fn: LossFn | None = None,
        micro_batches: Iterable[Any] | None = None,
        *,
        cause: str = "",
    ) -> None:
        """Raises if no loss scale can save the run, naming the cause if it is known. Reads from the device.

        With a loss function and micro-batches the cause is found by running the step again.
        """
        if not result.stuck.item():
            return
        if loss_fn is not None:
            cause = str(self.blame(loss_fn, micro_batches or []))
        rank = -1 if result.bad_rank is None else int(result.bad_rank)
        known = f"forward: the loss of rank {rank}" if rank >= 0 else ""
        raise stuck_error(float(result.scale), cause or known)

    def blame(self, loss_fn: LossFn, micro_batches: Iterable[Any], scale: float | None = None) -> Cause:
        """Finds the layer that made a step not finite by running it again; without a monitor, only the pass.

        Runs at a loss scale or the current one, and changes nothing.
        """
        self._check_open()
        factor = 1.0 if scale is None else scale / float(np.array(self.scalars["scale"]))
        return nonfinite.find(self, loss_fn, list(micro_batches), factor)

    def state_dict(self) -> dict[str, mx.array]:
        """Returns every array that the next step depends on, by name: mx.save_safetensors takes them."""
        self._check_held()
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, mx.array]) -> None:
        """Restores a state, bit for bit. One of another model, optimizer or precision is refused whole."""
        self._check_open()
        load_state(self, state)
        self.forget()

    def monitor(self, every: int = 100, slice: int = SLICE) -> Monitor:
        """Watches every layer from now on: `slice` elements of what enters it and of the gradient of what leaves.

        Call it before the first step. Each `every` updates the numbers so far are copied: `print(monitor)` shows
        the last copy. `layer_numbers()` and `weight_numbers()` are the same by hand, and `monitor.sample(loss_fn,
        batch)` looks closely at a part of a batch. No bit of a step changes.
        """
        self._check_open()
        check_numbers(every=every, slice=slice)
        if self.watching is None:
            self.watching = Monitor(self, every, slice)
        if (self.watching.every, self.watching.slice) != (every, slice):
            raise RunStateError(
                f"the run is monitored already, with slices of {self.watching.slice}",
                hint="call run.monitor once, before the first step",
            )
        return self.watching  # type: ignore[no-any-return]

    def coverage(self, loss_fn: LossFn, batch: Any) -> Coverage:
        """Runs a batch once, without lasting effects, and lists how each function of the model's own code ran."""
        return record(lambda watched: self.replay(watched, batch), loss_fn)

    def reach(self, loss_fn: LossFn, batch: Any) -> Coverage:
        """The older name of `coverage`."""
        warn_renamed("reach", "coverage")
        return self.coverage(loss_fn, batch)

    def audit(
        self,
        select: Iterable[str] = (),
        ignore: Iterable[str] = (),
        *,
        loss_fn: LossFn | None = None,
        batch: Any = None,
        steps: int = STEPS,
    ) -> list[Finding]:
        """Returns what is wrong, worst first; an empty list if nothing is.

        `select` and `ignore` are ids of rules, such as `HS101`, or their beginnings. With a loss function and a
        batch, `steps` updates are made and taken back, and lost ones are counted.
        """
        self._check_open()
        record = prepared_record(self)
        if loss_fn is not None:
            audit_updates(self, record, loss_fn, batch, steps)
        return engine.check(record, select, ignore)

    def unprepare(self) -> Module:
        """Returns the model in its own classes again, with its exact masters in fp32. This ends the run."""
        self._check_open()
        wide = self.masters.wide()
        restore(self.conversion)
        self.masters.put(wide)
        self.forget()
        vars(self.optimizer).pop("update", None)
        self._open = False
        return self.model

    def summary(self) -> str:
        """Describes what was converted and what was not, with reasons."""
        return "\n".join(summarize(self))


def summarize(run: Any) -> Iterator[str]:
    """Yields the lines of `Run.summary`."""
    yield from run.conversion.lines()
    if run.note:
        yield f"  {run.note}"
    if run.ranks is not None:
        size = sum(place.array.size for place in run.conversion.places.values()) * mx.float32.size
        rank = f"  rank {run.ranks.rank} of {run.ranks.size}"
        yield f"{rank}: each update sums {size:,} bytes of fp32 gradients over ranks"
    clip = f"clipped to {run.clip_norm:g}" if run.clip_norm else "not clipped"
    summed = f"accumulated in {run.policy.accumulate} and {clip}"
    yield f"  gradients are {summed}; loss scale: {print_value(run.policy.scale)}"
    kinds = ", ".join(type(optimizer).__name__ for optimizer in run.optimizers)
    yield f"  {kinds}: fp32 masters and gradients; a skipped step costs no sync"
    if run.averages is not None:
        yield f"  averages of the masters in fp32, decay {run.averages.decay:g}"
    yield f"  the step is {'compiled' if run.compile else 'not compiled'}"
    yield (
        "  softmax, norms, attention and losses that the model calls as functions follow the policy; other "
        "functions compute in the dtype of their inputs: run.coverage(loss_fn, batch) lists them"
    )
