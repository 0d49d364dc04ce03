"""A run: the one object that users hold. `prepare` makes it, and its methods are the verbs of a training loop.

The updates are the engine's (update/), of which it is a kind. What looks at a run is an instrument's
(instruments/): an audit, a monitor, a shadow, the search for the first bad tensor. Neither knows the
other: they meet here.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core.arrays.measure import TOKENS, resolve_policy
from halfstep.core.audit.cause import Cause
from halfstep.core.audit.coverage import Coverage
from halfstep.core.audit.engine import check as check_rules
from halfstep.core.audit.finding import Finding
from halfstep.core.choice import Choice
from halfstep.core.compare.shadow import Shadow
from halfstep.core.errors import HalfstepError, ParallelError, RunStateError, ScaleFloorError, warn_renamed
from halfstep.core.formats import parse
from halfstep.core.observed import SLICE
from halfstep.core.policy import Policy
from halfstep.core.scaling import overflow_hint
from halfstep.torch import state
from halfstep.torch.convert.apply import apply, restore
from halfstep.torch.instruments import nonfinite
from halfstep.torch.instruments.audit import record_of
from halfstep.torch.instruments.coverage import record
from halfstep.torch.instruments.monitor import Monitor
from halfstep.torch.instruments.observe.slots import unwatch
from halfstep.torch.instruments.sensitivity import sensitivity
from halfstep.torch.instruments.shadow import shadow
from halfstep.torch.numerics.dtypes import describe
from halfstep.torch.numerics.split.parameter import copying_run
from halfstep.torch.optim.adamw import Optimizer
from halfstep.torch.parallel.ranks import exclude_from_ddp
from halfstep.torch.update.from_amp import State, take_over
from halfstep.torch.update.graph import why_not
from halfstep.torch.update.prepare import carry_state, check_changed, measured_choice, prepare_as
from halfstep.torch.update.step import AVERAGES, WHOLE, Engine, LossFn, Optimizers, StepResult
from halfstep.torch.update.summary import summarize
from halfstep.torch.update.switches import check_fp32


def prepare(
    model: nn.Module,
    optimizer: Optimizers | Policy | str | None = None,
    policy: Policy | str | None = None,
    *,
    clip_norm: float = 0.0,
    seed: int = 0,
    ema: float = 0.0,
    tokens: int = TOKENS,
    memory: str = "fast",
    graph: bool = False,
) -> "Run":
    """Applies a policy to any model and any torch optimizers, in place; `Run.unprepare` undoes it.

    `prepare(model, policy)` takes the model alone: it can be evaluated, and `Run.attach` gives it optimizers when
    they exist. `prepare(model, optimizer, policy)` does both at once.

    Load weights and move the model to its device first, and create the optimizers that are given here; compile
    and wrap (DDP) after.
    Existing gradients are dropped: their scale is unknown. `seed` is for stochastic rounding; all replicas must
    use the same one. `ema` is the decay of an average of the masters, 0 for none. The policy `auto` is measured,
    as for a recipe; `run.choice` has the answer and its reason. `tokens` is the size of a micro-batch, for `auto`
    and for layers that are timed because rules say `measured`. With the memory `lean`, the backward pass computes
    norms and activation functions again instead of keeping their results, compiled or not. `graph` makes
    each `run.step` one CUDA graph: at small batches the host would be the limit. The bits are the same; what
    cannot be captured is refused.
    """
    settings: dict[str, Any] = {"clip_norm": clip_norm, "seed": seed, "ema": ema, "graph": graph}
    return prepare_as(Run, model, optimizer, policy, tokens=tokens, memory=memory, **settings)


class Run(Engine):
    """A model, its optimizers and a policy, with the verbs of a training loop and of its instruments."""

    def check(
        self, result: StepResult, loss_fn: LossFn | None = None, micro_batches: Iterable[Any] | None = None
    ) -> None:
        """Raises if no loss scale can save the run, naming the first bad tensor and its pass. Reads the device.

        The tensor is found by running the step again: the last one that `step` made, or the one that is given.
        """
        if not bool(result.stuck):
            return
        error = f"gradients are not finite although the loss scale is at its floor, {float(result.scale):g}"
        given = (loss_fn, micro_batches or []) if loss_fn is not None else self._last
        if given is None:
            raise ScaleFloorError(
                error, hint="run.check(result, loss_fn, micro_batches) runs the step again and names the tensor"
            )
        cause = nonfinite.find(self.model, *given, result.scale)
        rule = f"`{cause.module}: compute=fp32`" if cause.module else "a rule with `compute=fp32`"
        raise ScaleFloorError(f"{error}; {cause}", hint=overflow_hint(cause.where, rule))

    def scheduler_step(self, scheduler: Any, *args: Any) -> bool:
        """Steps a torch scheduler if the last update was applied; returns whether it was. Reads the flag: a sync.

        Our optimizers count applied updates on the device and need none: `Optimizer.set_factor`.
        """
        if self.skipped is None:
            raise RunStateError("no update was made yet", hint="call it after step() or update()")
        applied = not bool(self.skipped)
        if applied:
            scheduler.step(*args)
        return applied

    @property
    def ema(self) -> dict[str, Tensor]:
        """The averages of the masters in fp32, by parameter name; empty without `ema`."""
        if self._decay:
            self._check_trains()
        return {} if self.averages is None else self.averages.named()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model computes with the averages of its masters; after, the masters are back, exactly."""
        if not self._decay:
            raise RunStateError("there are no averages", hint="prepare(..., ema=0.999) keeps them")
        self._check_trains()
        assert self.averages is not None
        self.masters.check_writes()
        with self._hold(AVERAGES), self.averages.swap_in(self.num_applied):
            yield

    @contextmanager
    def edit(self) -> Iterator[None]:
        """Inside, each parameter is its whole fp32 master, to read and to write by any code.

        After, masters are held again as the policy says, split ones exactly. This is needed only if the policy
        splits or narrows masters: whole ones may be written to at any time.
        """
        self._check_open()
        with self._hold(WHOLE), self.masters.edit(self.num_applied):
            yield

    @contextmanager
    def _hold(self, what: str) -> Iterator[None]:
        self._holds = what
        try:
            yield
        finally:
            self._holds = ""

    def weights(self) -> dict[str, Tensor]:
        """Returns copies of the model's parameters by name, the fp32 master of those that have one."""
        named = list(self.model.named_parameters())
        if self._holds == WHOLE:
            return {name: p.detach().clone() for name, p in named}
        self.masters.check_writes()
        wide = self.masters.wide([p for _, p in named])
        return {name: w.detach().clone() for (name, _), w in zip(named, wide, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Returns everything the next step depends on, and the policy. The tensors are live, as in torch."""
        self._check_trains()
        return state.to_dict(self)

    def load_state_dict(self, given: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Restores a state bit for bit. One of another policy, model or optimizer is refused entirely.

        The list of what all ranks of a sharded run saved, by rank, loads on any number of them and in one process.
        """
        self._check_trains()
        state.from_dict(self, given)
        if self.scale_watch is not None:
            self.scale_watch.forget()

    def load_torch_amp(
        self, optimizer_state: State | Sequence[State | None], scaler_state: State | None = None
    ) -> str:
        """Loads what training with autocast saved, state_dict() of torch's AdamW and GradScaler; describes it."""
        self._check_trains()
        return take_over(self, optimizer_state, scaler_state)

    def unprepare(self) -> nn.Module:
        """Returns the model in its own classes, with its masters in fp32, exactly. Ends the run."""
        self._check_open()
        if self.sharded is not None:
            raise ParallelError(
                "the model is sharded, and FSDP has put a class of its own in front of the model's",
                hint="run.weights() has the masters: each is a DTensor, whose full_tensor() gathers it",
            )
        self.masters.check_writes()
        masters = dict(zip(self.masters.names, self.masters.wide([*self.masters.names]), strict=True))
        self.forget()
        if self.watching is not None:
            self.watching.stop()
        exclude_from_ddp(self.model, [])
        restore(self.conversion)
        for p, w in masters.items():
            if w is not p:
                p.data = w
        for hook in self.hooks:
            hook.remove()
        self.switches.restore()
        for driver in self.drivers:
            if isinstance(driver.optimizer, Optimizer):
                driver.optimizer.release()
            else:
                driver.cast_moments(widen=True)
        self.weight_casts.unmark()
        self._open = False
        return self.model

    @torch.no_grad()
    def change_policy(self, policy: Policy | str, *, tokens: int = TOKENS) -> "Run":
        """Trains under another policy from the next step on; returns the run.

        Masters, moments, averages and the number of updates keep every bit, and so does the loss scale if both
        policies scale alike. A policy that would round any of them is refused, and nothing has changed then. The
        optimizers stay. A monitor ends, and compiled code is compiled again. `tokens` is that of `prepare`.
        """
        self._check_trains()
        now, choice, note = resolve_policy(
            policy, lambda: measured_choice(self.model, tokens), describe(self.device)
        )
        check_fp32(check_changed(self, now).wanted)
        before = self.policy, self.choice, self.note
        with carry_state(self):
            try:
                self._begin(now, choice, note, tokens)
            except HalfstepError:  # the model or its device cannot run it
                self._begin(*before, tokens)
                raise
        return self

    def _begin(self, policy: Policy, choice: Choice | None, note: str, tokens: int) -> None:
        """Applies a policy to the model, which was given back, and begins with the same optimizers."""
        lean = self.conversion.recomputed is not None
        conversion = apply(self.model, policy, tokens=tokens, memory="lean" if lean else "fast")
        exclude_from_ddp(self.model, conversion.reduced_by_run())
        options: dict[str, Any] = {"conversion": conversion, "seed": self._seed, "ema": self._decay}
        options |= {"choice": choice, "note": note, "warns": self._warns, "graph": self.graph is not None}
        Run.__init__(self, self.model, self.optimizers, policy, self.clip_norm, **options)

    def blame(self, loss_fn: LossFn, micro_batches: Iterable[Any], scale: float | None = None) -> Cause:
        """Finds the first operation of a step that made something not finite, even if the model hides it (T5).

        Runs the step again, eagerly, at a loss scale or the current one, and changes nothing.
        """
        self._check_open()
        return nonfinite.find(
            self.model, loss_fn, micro_batches, self.scale_state.scale if scale is None else scale
        )

    def monitor(self, every: int = 100, slice: int = SLICE) -> Monitor:
        """Watches every layer from the next step on: amax, overflow, underflow, norms of updates, lost updates.

        Call it before the first step: code that was compiled before is compiled again. Nothing that is trained
        depends on it, and no step waits. `slice` is how many elements of each tensor are counted, `every` how many
        updates lie between two copies to the host. `print(monitor)` shows the last; `monitor.sample` runs part of
        a batch again.
        """
        self._check_trains()
        if self.graph is not None:
            raise RunStateError(
                "a run with graph=True has no monitor: it sends numbers to the host within a step",
                hint="prepare(..., graph=False)",
            )
        if self.watching is not None:
            raise RunStateError("the run has a monitor already", hint="run.watching is it; its stop() ends it")
        self.watching = Monitor(self, every, slice)
        return self.watching

    def shadow(self, loss_fn: LossFn, batches: Iterable[Any]) -> Shadow:
        """Compares a step, which is not made, with the same step in fp32: the loss, and each layer's gradient.

        Beside them is what noise of half an ulp on every operand of a matmul does: `result.outside` names layers
        that it does not explain, `result.causes` the modules that alone lead there, and `print` shows all of them.
        Casts in the model's own code are left out of the fp32 pass; `result.unwidened` has what could not be.
        Nothing that is trained depends on it. Runs the micro-batches ten times, eagerly, and waits for the device.
        """
        self._check_trains()
        return shadow(self, loss_fn, batches)

    def sensitivity(self, loss_fn: LossFn, batches: Iterable[Any], format: str = "bf16") -> dict[str, float]:
        """Returns how much each kind of operation loses in a format, the rest in fp32, the most sensitive first.

        It is a share of a step's descent, for matmuls, look-ups, norms, softmax, the loss, sums of the residual
        stream, and weights that an update rounds. Runs the batches seven times; nothing that is trained changes.
        """
        self._check_trains()
        return sensitivity(self, loss_fn, batches, parse(format))

    def coverage(self, loss_fn: LossFn, batch: Any) -> Coverage:
        """Lists how each function in the model's own code runs, and why, by one forward pass without effects."""
        self._check_open()
        self.last_coverage = record(self.model, loss_fn, batch)
        return self.last_coverage

    def reach(self, loss_fn: LossFn, batch: Any) -> Coverage:
        """The older name of `coverage`."""
        warn_renamed("reach", "coverage")
        return self.coverage(loss_fn, batch)

    def summary(self) -> str:
        """Describes what was converted and what was not, with reasons; masters; what each optimizer costs."""
        if self.graph is not None:
            steps = ["  steps: one CUDA graph each, from the second of a kind on"]
        elif finding := self.host_watch.finding:
            why = why_not(self)
            advice = f"torch.compile, as a step cannot be a CUDA graph: {why}" if why else "graph=True"
            steps = [f"  {finding}; faster: {advice}"]
        else:
            steps = []
        return "\n".join([*summarize(self), *steps])

    def audit(self, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> list[Finding]:
        """Returns what is wrong with the run's formats, masters and moments, by the rules of `halfstep audit`.

        `select` and `ignore` are ids of rules, such as `HS101`, or their beginnings.
        """
        self._check_open()
        return check_rules(record_of(self), select, ignore)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Run":
        if self.sharded is not None:
            raise ParallelError(
                "the model is sharded, and FSDP does not copy what it keeps for it",
                hint="run.state_dict() holds this rank's part: load it into a second model, prepared and sharded",
            )
        twin = memo[id(self)] = type(self).__new__(type(self))
        if self.watching is not None:
            memo[id(self.watching)] = None  # a copy is not watched
        with copying_run():
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for module in twin.model.modules():
            unwatch(module)
        if twin._open:
            twin.watch_optimizers()
        return twin
