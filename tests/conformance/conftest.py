"""The backends as the conformance suite sees them: numpy in, numpy out.

An adapter carries arrays across and names what each framework spells its own way (gradients, a training step).
What is tested is halfstep's own functions, which have the same names on every backend.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from halfstep.core import philox, rounding, split
from halfstep.core.policy import Policy
from halfstep.core.scaling import ScaleState, Verdict

ROOMS = {"cast": "numerics.cast", "dtypes": "numerics.dtypes", "apply": "convert.apply"}
KINDS = {"loss": float, "skipped": bool, "scale": float, "grad_norm": float, "stuck": bool}


def read(result):
    """What one step of the toy model did, as numbers of Python."""
    return SimpleNamespace(**{name: kind(getattr(result, name)) for name, kind in KINDS.items()})


def scalars(make, xp, state):
    dtypes = (xp.float32, xp.int32, xp.int32, getattr(xp, "bool_", None) or xp.bool)
    return ScaleState(*(make(v, dtype=d) for v, d in zip(state, dtypes, strict=True)))


class Reference:
    """core: casts, random words, split masters and the scaling law in numpy."""

    name = "numpy"
    xp = np
    words = np.uint32

    quantize = staticmethod(rounding.cast)
    random_bits = staticmethod(philox.random_bits)
    split, join = staticmethod(split.split), staticmethod(split.join)

    def scalars(self, state):
        return scalars(np.asarray, np, state)


class Backend:
    """What the adapters of the three frameworks share."""

    name: str
    toys: type
    make_scalar = "array"
    words = np.uint32  # the dtype of random words

    def __getattr__(self, part):
        """Imports halfstep's own module of that name: cast, layers, dtypes, apply, run, model, session."""
        return import_module(f"halfstep.{self.name}.{ROOMS.get(part, part)}")

    def casts(self, precision):
        return self.layers.casts_of(precision)

    def as_dtype(self, x, fmt):
        return self.array(x).astype(self.dtypes.dtype_of(fmt))

    def named(self, x):
        """The name of an array's dtype, and its numbers in numpy."""
        return str(x.dtype).rpartition(".")[2], self.numpy(x)

    def quantize(self, x, fmt, *, bits=None, **rule):
        if bits is not None:
            rule["bits"] = self.array(bits.astype(self.words))
        return self.numpy(self.cast.quantize(self.array(x), fmt, **rule))

    def random_bits(self, shape, **key):
        return self.numpy(self.cast.random_bits(shape, **key)).astype(np.uint32)

    def carried(self, x, fmt):
        return self.numpy(self.cast.carried(self.array(x), fmt))

    def quantize_scaled(self, x, operand, *, amax=None, **given):
        if amax is not None:
            given["amax"] = self.array(amax)
        values, inv_scale = self.cast.quantize_scaled(self.array(x), operand, **given)
        return self.numpy(values), self.numpy(inv_scale)

    def split(self, x):
        hi, lo = self.cast.split(self.array(x))
        return self.patterns(hi), self.numpy(lo)

    def scalars(self, state):
        return scalars(getattr(self.xp, self.make_scalar), self.xp, state)

    def toy(self, policy, weight, *, rate, clip_norm=0.0):
        return self.toys(self, policy, weight, rate, clip_norm)

    def open(self, config, policy: str, schedule=None):
        return self.session.Session(config, Policy.parse(policy), "cpu", schedule)

    def fingerprint(self, session, batch):
        """What shows that two policies compute differently: losses and weights after a step."""
        return session.read(session.step(batch)), session.state()


class Toy:
    """A linear layer that a run trains; `step` keeps its result as `last`.

    A micro-batch is (x, t, weight), and may have a fourth number that is added to its loss.
    """

    def check(self):
        self.run.check(self.last)

    def weight(self):
        return self.backend.named(self.model.layer.weight)

    def num_applied(self):
        return int(self.run.num_applied)

    def prepared(self):
        return self.run


class Torch(Backend):
    name, make_scalar = "torch", "tensor"
    words = np.int64

    def __init__(self):
        import torch

        self.torch = self.xp = torch

    def array(self, x):
        return x if self.torch.is_tensor(x) else self.torch.from_numpy(np.array(x))

    def numpy(self, x):
        x = x.detach().cpu()
        return (x.float() if x.is_floating_point() else x).numpy()

    def as_dtype(self, x, fmt):
        return self.array(x).to(self.dtypes.dtype_of(fmt))

    def patterns(self, x):
        return x.view(self.torch.int16).numpy().view(np.uint16)

    def join(self, hi, lo):
        hi = self.torch.from_numpy(hi.view(np.int16).copy()).view(self.torch.bfloat16)
        return self.numpy(self.cast.join(hi, self.array(lo)))

    def random_state(self):
        return self.torch.get_rng_state().tolist()

    def compiled(self, law):
        return self.torch.compile(law, backend="eager")

    def vjp(self, call, arrays, cotangent):
        """The result, and the gradients of all floating arrays."""
        inputs = [self.array(a) for a in arrays]
        floats = [a.requires_grad_() for a in inputs if a.is_floating_point()]
        y = call(*inputs)
        g = self.torch.ones_like(y) if cotangent is None else self.array(cotangent).to(y.dtype)
        return self.named(y), [self.named(g) for g in self.torch.autograd.grad(y, floats, g)]

    def decoder(self, config, policy, weights):
        """The reference decoder with a policy, and a function that runs it forward and backward."""
        t = self.torch
        model = self.model.Decoder(config)
        with t.no_grad():
            for name, p in model.named_parameters():
                p.copy_(t.from_numpy(weights[name]))
        self.apply.apply(model, Policy.parse(policy), model.module_names())

        def run(tokens, targets):
            logits = model(t.from_numpy(tokens))
            loss = model.loss(t.from_numpy(tokens), t.from_numpy(targets))
            loss.backward()
            # None where a parameter is not used: the first block has no earlier values to mix
            grads = {n: t.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
            return self.numpy(logits), loss.item(), {n: self.numpy(g) for n, g in grads.items()}

        return model, run


class TorchToy(Toy):
    def __init__(self, backend, policy, weight, rate, clip_norm):
        t = backend.torch

        class Model(t.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = backend.layers.CastedLinear(weight.shape[1], weight.shape[0], bias=False)

        self.backend, self.model = backend, Model()
        self.model.layer.weight.data = backend.array(weight)
        sgd = t.optim.SGD(self.model.parameters(), lr=rate)
        self.run = backend.run.prepare(self.model, sgd, policy, clip_norm=clip_norm)

    def step(self, micro_batches):
        def loss(batch):
            x, t, weight, *added = batch
            y = self.model.layer(self.backend.array(x))
            return (y.float() * self.backend.array(t)).sum() + sum(added), weight

        self.last = self.run.step(loss, micro_batches)
        return read(self.last)


Torch.toys = TorchToy


class Jax(Backend):
    name = "jax"

    def __init__(self):
        import jax

        self.jax, self.xp = jax, jax.numpy

    def array(self, x):
        return self.xp.asarray(x)

    def numpy(self, x):
        wide = self.xp.issubdtype(x.dtype, self.xp.floating)
        with np.errstate(invalid="ignore"):  # NaN
            return np.asarray(x).astype(np.float32) if wide else np.asarray(x)

    def quantize(self, x, fmt, **rule):
        with self.jax.disable_jit():  # op by op, each operation is compiled once for a shape
            return super().quantize(x, fmt, **rule)

    def patterns(self, x):
        return np.asarray(x).view(np.uint16)

    def join(self, hi, lo):
        return self.numpy(self.cast.join(self.array(hi).view(self.xp.bfloat16), self.array(lo)))

    def random_state(self):
        return None  # keys are passed on

    def compiled(self, law):
        return self.jax.jit(law, static_argnums=2)

    def vjp(self, call, arrays, cotangent):
        inputs = [self.array(a) for a in arrays]
        floats = [i for i, a in enumerate(inputs) if self.xp.issubdtype(a.dtype, self.xp.floating)]

        @self.jax.jit  # op by op, every operation of every shape would be compiled on its own
        def both(g, *given):
            full = list(inputs)
            y, back = self.jax.vjp(lambda *a: call(*_replaced(full, floats, a)), *given)
            return y, back(self.xp.ones_like(y) if g is None else g.astype(y.dtype))

        y, grads = both(cotangent, *(inputs[i] for i in floats))
        return self.named(y), [self.named(grad) for grad in grads]

    def decoder(self, config, policy, weights):
        model = self.model.Decoder(config).with_policy(Policy.parse(policy))
        params = {name: self.array(w) for name, w in weights.items()}

        @self.jax.jit  # one program compiles once
        def both(params, tokens, targets):
            return model(params, tokens), self.jax.value_and_grad(model.loss)(params, tokens, targets)

        def run(tokens, targets):
            logits, (loss, grads) = both(params, tokens, targets)
            return self.numpy(logits), float(loss), {name: self.numpy(g) for name, g in grads.items()}

        return model, run

    def fingerprint(self, session, batch):
        """The program that XLA gets: compiling it takes seconds, and two that differ compute differently."""
        tokens = batch if session.micro_batches > 1 else batch[0]
        return session._step.lower(session.run, tokens).as_text(), session.run.scale


def _replaced(full, places, given):
    for place, array in zip(places, given, strict=True):
        full[place] = array
    return full


class JaxToy:
    steps: ClassVar[dict[Any, Any]] = {}  # compiled, shared by all toys: the state carries the policy

    def __init__(self, backend, policy, weight, rate, clip_norm):
        import optax

        self.backend, self.key = backend, (rate, clip_norm)
        self.optimizer = self.steps.setdefault(rate, optax.sgd(rate))
        self.state = backend.run.init({"layer": {"weight": backend.array(weight)}}, self.optimizer, policy)

    def step(self, micro_batches):
        jnp, count = self.backend.xp, len(micro_batches)
        if (self.key, count) not in self.steps:

            def loss(params, batch):
                y = batch["x"] @ params["layer"]["weight"].T
                total = (y.astype(jnp.float32) * batch["t"]).sum() + batch["added"]
                return self.backend.run.Weighted(total, batch["weight"])

            self.steps[self.key, count] = self.backend.run.make_step(
                loss, self.optimizer, clip_norm=self.key[1], micro_batches=count, cast_batch=False
            )
        compute = self.backend.dtypes.dtype_of(self.state.policy.compute.format)
        x, t, weight = (np.stack([np.float32(batch[i]) for batch in micro_batches]) for i in range(3))
        batch = {"x": jnp.asarray(x).astype(compute), "t": jnp.asarray(t), "weight": jnp.asarray(weight)}
        batch["added"] = jnp.float32([sum(batch[3:]) for batch in micro_batches])
        self.state, self.last = self.steps[self.key, count](self.state, batch)
        return read(self.last)

    def check(self):
        self.backend.run.check(self.last)

    def weight(self):
        return self.backend.named(self.state.params["layer"]["weight"])

    def num_applied(self):
        return int(self.state.num_applied)

    def prepared(self):
        return self.state


Jax.toys = JaxToy


class Mlx(Backend):
    name = "mlx"

    def __init__(self):
        import mlx.core as mx

        self.mx = self.xp = mx

    def array(self, x):
        return x if isinstance(x, self.mx.array) else self.mx.array(np.asarray(x))

    def numpy(self, x):
        floats = (self.mx.bfloat16, self.mx.float16)
        return np.array(x.astype(self.mx.float32) if x.dtype in floats else x)

    def patterns(self, x):
        return np.array(x.view(self.mx.uint16))

    def join(self, hi, lo):
        return self.numpy(self.cast.join(self.array(hi).view(self.mx.bfloat16), self.array(lo)))

    def random_state(self):
        return self.mx.random.state[0].tolist()

    def compiled(self, law):
        def flat(scale, good, tolerance, stuck, finite):
            inv_scale, state = law(ScaleState(scale, good, tolerance, stuck), finite, self.mx)
            return inv_scale, *state

        traced = self.mx.compile(flat)

        def judge(state, finite, xp):
            inv_scale, *following = traced(*state, finite)
            return Verdict(inv_scale, ScaleState(*following))

        return judge

    def vjp(self, call, arrays, cotangent):
        mx = self.mx
        inputs = [self.array(a) for a in arrays]
        floats = [i for i, a in enumerate(inputs) if mx.issubdtype(a.dtype, mx.floating)]
        y = call(*inputs)
        g = mx.ones_like(y) if cotangent is None else self.array(cotangent).astype(y.dtype)
        _, grads = mx.vjp(lambda *a: call(*_replaced(list(inputs), floats, a)), [inputs[i] for i in floats], [g])
        return self.named(y), [self.named(grad) for grad in grads]

    def decoder(self, config, policy, weights):
        from mlx import nn
        from mlx.utils import tree_flatten, tree_unflatten

        model = self.model.Decoder(config)
        model.update(tree_unflatten([(name, self.array(w)) for name, w in weights.items()]))
        self.apply.apply(model, Policy.parse(policy), model.module_names())

        def run(tokens, targets):
            tokens, targets = self.array(tokens), self.array(targets)
            loss, grads = nn.value_and_grad(model, lambda x, y: model.loss(x, y))(tokens, targets)
            return self.numpy(model(tokens)), loss.item(), {n: self.numpy(g) for n, g in tree_flatten(grads)}

        return model, run


class MlxToy(Toy):
    def __init__(self, backend, policy, weight, rate, clip_norm):
        from mlx import nn, optimizers

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)

        self.backend, self.model = backend, Model()
        self.model.layer.weight = backend.array(weight)
        sgd = optimizers.SGD(learning_rate=rate)
        self.run = backend.run.prepare(self.model, sgd, policy, clip_norm=clip_norm)

    def step(self, micro_batches):
        mx = self.backend.mx

        def loss(model, batch):
            y = model.layer(batch["x"].astype(model.layer.casts.compute))
            return (y.astype(mx.float32) * batch["t"]).sum() + batch["added"], batch["weight"]

        numbers = [(x, t, w, sum(added)) for x, t, w, *added in micro_batches]
        batches = [
            dict(zip(("x", "t", "weight", "added"), map(mx.array, map(np.float32, each)), strict=True))
            for each in numbers
        ]
        self.last = self.run.step(loss, batches)
        return read(self.last)


Mlx.toys = MlxToy


@cache
def open_backend(name: str):
    return {"torch": Torch, "jax": Jax, "mlx": Mlx, "numpy": Reference}[name]()


def _backends(*names):
    """A fixture of these backends; a framework that is not installed is skipped."""

    def backend(request):
        if find_spec(request.param) is None:
            pytest.skip(f"{request.param} is not installed")
        return open_backend(request.param)

    return pytest.fixture(params=names)(backend)


backend = _backends("torch", "jax", "mlx")
implementation = _backends("numpy", "torch", "jax", "mlx")  # with the reference itself
fp8_backend = _backends("torch", "jax")  # those with types of 8 bits
splitting = _backends("numpy", "torch", "jax", "mlx")
# For what JAX would compile for many seconds: there it is part of `make prove`.
slow_backend = _backends("torch", pytest.param("jax", marks=pytest.mark.prove), "mlx")
torch_backend = _backends("torch")  # the one that others are compared with where numpy has no reference
