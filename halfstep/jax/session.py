"""One run on JAX, as the training loop calls it (config/session.py).

The step is always compiled, whatever `training.compile` says: JAX has no other form of it. And sampling pads its
window to the context, so that one program serves every length; causal attention does not look ahead, but the amax
of a narrow operand does see the padding.

On several devices each has the whole state and its rows of every micro-batch (parallel.py). The update is that of
the same batch on one device, and so is the state that is saved. What is not worth sharing runs on the first one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from numpy.typing import NDArray

from halfstep.config.model import parameter_shapes, reach
from halfstep.config.run import RunConfig
from halfstep.config.session import Session as Shell
from halfstep.config.session import Tokens
from halfstep.config.weights import Weights
from halfstep.core import host
from halfstep.core.audit.cause import Cause
from halfstep.core.choice.layers import Measured
from halfstep.core.errors import BatchError
from halfstep.core.observed import LayerInfo, Sample
from halfstep.core.policy import Policy
from halfstep.core.state_format import Snapshot, Stored, widen
from halfstep.jax.convert.apply import Applied, apply, find_halves
from halfstep.jax.convert.fp8_choice import Products, first_choice, measure_products
from halfstep.jax.fp8 import scaling_amaxes
from halfstep.jax.instruments.monitor import Monitor
from halfstep.jax.instruments.nonfinite import find_cause
from halfstep.jax.layers import COMPILER_OPTIONS
from halfstep.jax.measure import Product, devices
from halfstep.jax.model import Decoder
from halfstep.jax.numerics import memory
from halfstep.jax.numerics.dtypes import as_device, as_devices, describe
from halfstep.jax.optim.masters import hold, widen_masters
from halfstep.jax.optim.optimizers import build_optimizers, names_in_state
from halfstep.jax.parallel import check_divides, map_devices, place_rows
from halfstep.jax.run import StepResult, Weighted, check, compile_step, first_state, make_step
from halfstep.jax.state import bytes_of, load_state_dict, restored, state_dict, stored

version = jax.__version__


def num_shards(config: RunConfig) -> int:
    """Returns how many processes share the state of a run: one, since each process holds all of it."""
    return 1


class Session(Shell):
    """A model, its optimizer and a policy on one device, or on several that share each micro-batch."""

    device_memory = memory
    asynchronous = True
    untimed = "JAX times no steps on the device"

    def _open_device(self, device: str | None) -> None:
        device = device or devices()[0]
        self.device, every = as_device(device), as_devices(device)
        self.num_devices = len(every)
        self.mesh = Mesh(np.array(every), ("data",)) if len(every) > 1 else None
        self.description = describe(device)
        training = self.config.training
        check_divides(training.batch, len(every), "a micro-batch", "set training.batch to")
        self.micro_batches = training.micro_batches
        self._base_model = Decoder(
            self.config.model, recompute=training.recompute_blocks, lean=training.memory == "lean"
        )

    def _build(self, policy: Policy, weights: Weights | None) -> None:
        config, plain, self.policy = self.config, self._base_model, policy
        if weights is None:  # for another policy, around what was learned
            params: Mapping[str, Any] = _fp32_weights(self.state())
            del self.run
        else:
            params = plain.set_weights(weights)
        optimizer = build_optimizers(config.model, config.optimizer, self.schedule, self.momentum)
        names = plain.module_names()
        with self._on_device():
            params = jax.device_put(params, self.device)
            self._check_policies(policy, lambda later: apply(params, later, names))
            measured = first_choice(policy)
            if measured is None:
                measured = measure_products(self._products(apply(params, policy, names)))
            given: dict[str, Any] = {"names": names, "mesh": self.mesh, "ema": config.training.ema}
            self.run = first_state(params, optimizer, policy, seed=config.seed, measured=measured, **given)
        self._optimizer, self._moments = optimizer, names_in_state(config.model, config.optimizer)
        self._build_functions(self.run.measured)
        self._build_step()

    def _products(self, applied: Applied) -> Products:
        """Returns the matmuls of the decoder that rules call `measured`, as one device runs them."""
        config, shapes = self.config, parameter_shapes(self.config.model)
        tokens = config.training.batch * config.model.context // self.num_devices
        found: Products = {}
        for name, precision in applied.by_module(reach(config.model)["operand"]).items():
            weight = f"{name}.weight" if f"{name}.weight" in shapes else "embed.weight"
            if precision.measured and precision.narrow:
                sizes = (tokens, shapes[weight][1]), shapes[weight]
                work = Product(*sizes, (((1,), (1,)), ((), ())), weight in applied.halves, self.device)
                found[name] = [(work, precision)]
        return found

    def _build_functions(self, measured: Measured | None) -> None:
        """Builds the model's functions under the policy; `measured` layers that are faster wide stay wide."""
        plain, policy = self._base_model, self.policy
        self.model = plain.with_policy(policy, measured)
        evaluated = partial(_call_in_fp32, plain.with_policy(policy.evaluation(), measured).loss)
        shared = evaluated if self.mesh is None else _sum_over_rows(evaluated, self.mesh)
        self._evaluated = jax.jit(shared, compiler_options=COMPILER_OPTIONS)
        self._evaluated_by_one = jax.jit(evaluated, compiler_options=COMPILER_OPTIONS)
        self._next = jax.jit(partial(_call_in_fp32, self._logits_at), compiler_options=COMPILER_OPTIONS)

    def _build_step(self, monitor: Monitor | None = None) -> None:
        """Makes the step, which is compiled when it is first called."""
        self._monitor = monitor
        self._made = make_step(
            self._loss,
            self._optimizer,
            clip_norm=self.config.training.clip_norm,
            micro_batches=None if self.micro_batches == 1 else self.micro_batches,
            cast=False,
            mesh=self.mesh,
            monitor=monitor,
        )
        self._step = compile_step(self._made.__wrapped__, self.mesh)  # without its warning: the run has its own

    @property
    def notes(self) -> list[str]:
        description = "" if self.run.measured is None else self.run.measured.description
        return [f"measured: {description}"] if description else []

    @property
    def outcome(self) -> str:
        return "" if self.run.measured is None else self.run.measured.outcome

    @property
    def threads(self) -> int | None:
        # XLA has one per core
        return host.threads() if self.device.platform == "cpu" else None

    def step(self, micro_batches: Tokens) -> StepResult:
        if len(micro_batches) != self.micro_batches:
            raise BatchError(
                f"{len(micro_batches)} micro-batches were given, but the step is for {self.micro_batches}",
                hint=f"set training.micro_batches={len(micro_batches)}",
            )
        count = None if self.micro_batches == 1 else self.micro_batches
        tokens = self._to_devices(micro_batches if count else micro_batches[0], count)
        with self._on_device():
            self.run, result = self._step(self.run, tokens)
            if self._monitor is not None:
                self._monitor.add(result.layers, result.updates)
        return result

    def watch(self, slice: int) -> Sequence[LayerInfo]:
        monitor = Monitor(slice)
        self._build_step(monitor)
        counted = () if self.micro_batches == 1 else (self.micro_batches,)
        shape = (*counted, self.config.training.batch, self.config.model.context + 1)
        with self._on_device():
            self._step.eval_shape(self.run, jax.ShapeDtypeStruct(shape, jnp.int32))
        return monitor.layers

    def sample(self, micro_batches: Tokens, share: float = 1 / 16) -> Mapping[str, Mapping[str, Sample]]:
        tokens = micro_batches[0] if self.micro_batches == 1 else micro_batches
        with self._on_device():
            return self._made.sample(self.run, self._to_device(tokens), share=share)

    def read(self, result: StepResult) -> dict[str, float]:
        names = ("loss", "skipped", "scale", "grad_norm", "stuck")
        values = jax.device_get([getattr(result, name) for name in names])
        return {name: float(value) for name, value in zip(names, values, strict=True)}

    def check(self, result: StepResult, micro_batches: Tokens) -> None:
        check(result, str(self.blame(micro_batches)))

    def evaluate(self, batches: Iterable[Tokens], *, averaged: bool = True) -> tuple[float, int]:
        losses, count = [], 0
        params = self.run.ema if averaged and self.run.ema else self._policy_parameters(self.policy.evaluation())
        params = {**params, **scaling_amaxes(self.run.amaxes)}
        for batch in batches:
            with self._on_device():
                losses += self._losses(params, batch)
            count += batch[:, 1:].size
        # Summed in fp64 on the host: JAX has it only if it is enabled everywhere.
        return sum(map(float, jax.device_get(losses))), count

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        window = list(tokens[-self.config.model.context :])
        padded = np.zeros((1, self.config.model.context), np.int32)
        padded[0, : len(window)] = window
        with self._on_device():
            params = self._first_copies(
                {**self._policy_parameters(self.policy), **scaling_amaxes(self.run.amaxes)}
            )
            return np.asarray(self._next(params, self._to_device(padded), len(window) - 1))

    def state(self) -> dict[str, Stored]:
        state = jax.device_get(self._state())
        return {name: stored(array) for name, array in state.items()}

    def snapshot(self) -> Snapshot:
        """Starts a copy of the state without waiting for it: the next step consumes the arrays themselves."""
        with self._on_device():
            state = self._first_copies(self._state())
            copies = {name: jnp.copy(array) for name, array in state.items()}
        return lambda: {name: bytes_of(array) for name, array in jax.device_get(copies).items()}

    def blame(self, micro_batches: Tokens, scale: float | None = None) -> Cause:
        """Finds what made a step not finite by evaluating it again, operation by operation."""
        rows = micro_batches.reshape(self.num_devices * len(micro_batches), -1, micro_batches.shape[-1])

        def loss(params: Any, tokens: Array) -> Array:
            return self.model.loss({**params, **amaxes}, tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].size

        with self._on_device(), jax.default_matmul_precision("highest"):
            params = self._first_copies(self._policy_parameters(self.policy))
            amaxes = self._first_copies(scaling_amaxes(self.run.amaxes))
            used = float(self.run.scale.scale) if scale is None else scale
            return find_cause(loss, params, (self._to_device(tokens) for tokens in rows), used)

    def load(self, state: Mapping[str, Stored]) -> None:
        given = {name: restored(record) for name, record in state.items()}
        ours = {self._moments.get(name, name): name for name in state_dict(self.run)}
        given |= {name: given["applied"] for name in self._counts() if "applied" in given}
        before = self.run.measured
        self.run = load_state_dict(self.run, {ours.get(name, name): array for name, array in given.items()})
        if self.run.measured != before:
            self._build_functions(self.run.measured)
            self._build_step(self._monitor)

    def load_weights(self, state: Mapping[str, Stored]) -> None:
        ours = state_dict(self.run)
        wide, of_weights = _fp32_weights(state), ("model.", "remainder.")
        with self._on_device():
            applied = self.run.applied()
            known = {name: jnp.asarray(x) for name, x in wide.items() if name in applied.masters}
            held, remainders = hold(known, applied)
        given = {f"model.{name}": x for name, x in (wide | held).items()}
        given |= {f"remainder.{name}": x for name, x in remainders.items()}
        self.run = load_state_dict(
            self.run, {n: x for n, x in ours.items() if not n.startswith(of_weights)} | given
        )

    def _state(self) -> dict[str, Array]:
        """Returns the live arrays by the names of a checkpoint, without counts: all equal `applied`."""
        counts, arrays = self._counts(), state_dict(self.run)
        return {self._moments.get(name, name): array for name, array in arrays.items() if name not in counts}

    def _counts(self) -> set[str]:
        return {n for n in state_dict(self.run) if n.startswith("optimizer.") and n not in self._moments}

    def _policy_parameters(self, policy: Policy) -> Mapping[str, Array]:
        """Returns the parameters for functions under a policy: whole masters where halves will not do."""
        if not self.run.remainders:
            return self.run.params
        applied = self.run.applied()
        halves = find_halves(policy, applied.masters, applied.modules)
        return widen_masters(self.run.params, self.run.remainders, halves)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Traces for this device: a program for another, such as a kernel of attention, would not run here."""
        return jax.default_device(self.device)

    def _loss(self, params: Mapping[str, Array], tokens: Array) -> Weighted:
        return Weighted(self.model.loss(params, tokens[:, :-1], tokens[:, 1:]), float(tokens[:, 1:].size))

    def _losses(self, params: Mapping[str, Array], batch: Tokens) -> list[Array]:
        """Returns sums of losses: of the rows that devices share, then of those left, which the first one takes.

        The last batch may be smaller than others. No device gets more rows at once than its share of a whole one.
        """
        shared, size = len(batch) - len(batch) % self.num_devices, self.config.training.batch // self.num_devices
        parts = [(self._evaluated, params, self._to_devices(batch[:shared]))] if shared else []
        for start in range(shared, len(batch), size):
            left = self._to_device(batch[start : start + size])
            parts.append((self._evaluated_by_one, self._first_copies(params), left))
        return [score(weights, tokens[:, :-1], tokens[:, 1:]) for score, weights, tokens in parts]

    def _logits_at(self, params: Mapping[str, Array], tokens: Array, last: Array) -> Array:
        return self.model.capped(self.model(params, tokens)[0, last])

    def _to_device(self, tokens: Tokens) -> Array:
        return jax.device_put(np.ascontiguousarray(tokens, np.int32), self.device)

    def _to_devices(self, tokens: Tokens, micro_batches: int | None = None) -> Array:
        """Sends each device its rows."""
        if self.mesh is None:
            return self._to_device(tokens)
        rows: Array = place_rows(np.ascontiguousarray(tokens, np.int32), self.mesh, micro_batches)
        return rows

    def _first_copies(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the arrays of the first device, without a copy: all devices hold the same."""
        return {name: array.addressable_data(0) for name, array in arrays.items()}


def _fp32_weights(state: Mapping[str, Stored]) -> dict[str, Any]:
    """Returns the fp32 numbers of the weights in a state, by name."""
    names = [name.removeprefix("model.") for name in state if name.startswith("model.")]
    return {name: widen(state[f"model.{name}"], state.get(f"remainder.{name}")) for name in names}


def _call_in_fp32(fn: Callable[..., Array], params: Mapping[str, Array], *rest: Any) -> Array:
    with jax.default_matmul_precision("highest"):
        return fn({name: master.astype(jnp.float32) for name, master in params.items()}, *rest)


def _sum_over_rows(loss: Callable[..., Array], mesh: Mesh) -> Callable[..., Array]:
    """Returns a function of the same sum of losses, to which each device adds that of its rows."""

    def total(params: Mapping[str, Array], tokens: Sequence[Array], _: Any) -> tuple[Array, None]:
        return lax.psum(loss(params, *tokens), mesh.axis_names), None

    mapped = map_devices(total, mesh, micro_batches=None)
    return lambda params, *tokens: mapped(params, tokens, None)[0]
