"""The backends as the conformance suite sees them: numpy in, numpy out.

An adapter only carries arrays across and names what each framework spells its own way (gradients, a training
step). What is tested is halfstep's own functions, which have the same names on every backend.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from halfstep.core import philox, rounding, split
from halfstep.core.policy import Policy
from halfstep.core.scaling import ScaleState


@dataclass
class Result:
    """One step of the toy, read."""

    loss: float
    skipped: bool
    scale: float
    grad_norm: float
    stuck: bool


class Reference:
    """core: casts, words and halves in numpy."""

    name = "numpy"
    xp = np
    words = np.uint32

    def array(self, x):
        return np.asarray(x)

    def numpy(self, x):
        return np.asarray(x)

    def quantize(self, x, fmt, **rule):
        return rounding.cast(x, fmt, **rule)

    def random_bits(self, shape, **key):
        return philox.random_bits(shape, **key)

    def split(self, x):
        return split.split(x)

    def join(self, hi, lo):
        return split.join(hi, lo)

    def scalars(self, state):
        dtypes = (np.float32, np.int32, np.int32, np.bool_)
        return ScaleState(*(np.asarray(v, d) for v, d in zip(state, dtypes, strict=True)))


class Backend:
    """What the adapters of the three frameworks share."""

    name: str

    def __getattr__(self, part):
        """halfstep's own module of that name: cast, layers, dtypes, apply, step, model, session."""
        return import_module(f"halfstep.{self.name}.{part}")

    def quantize(self, x, fmt, *, bits=None, **rule):
        if bits is not None:
            rule["bits"] = self.array(bits.astype(self.words))
        return self.numpy(self.cast.quantize(self.array(x), fmt, **rule))

    def random_bits(self, shape, **key):
        return self.numpy(self.cast.random_bits(shape, **key)).astype(np.uint32)

    def carried(self, x, fmt):
        return self.numpy(self.cast.carried(self.array(x), fmt))

    def native(self, x, fmt, *, overflow):
        return self.numpy(self.cast.to_native(self.array(x), fmt, overflow=overflow))

    def scale_for(self, amax, fmt):
        return self.numpy(self.cast.scale_for(self.array(amax), fmt))

    def quantize_scaled(self, x, operand, **given):
        values, inv_scale = self.cast.quantize_scaled(self.array(x), operand, **given)
        return self.numpy(values), self.numpy(inv_scale)

    def split(self, x):
        hi, lo = self.cast.split(self.array(x))
        return self.patterns(hi), self.numpy(lo)

    def open(self, config, policy: str, schedule=None):
        return self.session.Session(config, Policy.parse(policy), "cpu", schedule)


class Torch(Backend):
    """PyTorch."""

    name = "torch"
    words = np.int64

    def __init__(self):
        import torch

        self.torch = self.xp = torch

    def array(self, x):
        return self.torch.from_numpy(np.array(x))

    def numpy(self, x):
        x = x.detach().cpu()
        return (x.float() if x.is_floating_point() else x).numpy()

    def patterns(self, x):
        return x.view(self.torch.int16).numpy().view(np.uint16)

    def join(self, hi, lo):
        hi = self.torch.from_numpy(hi.view(np.int16).copy()).view(self.torch.bfloat16)
        return self.numpy(self.cast.join(hi, self.array(lo)))

    def scalars(self, state):
        t = self.torch
        dtypes = (t.float32, t.int32, t.int32, t.bool)
        return ScaleState(*(t.tensor(v, dtype=d) for v, d in zip(state, dtypes, strict=True)))

    def as_dtype(self, x, fmt):
        return self.array(x).to(self.dtypes.dtype_of(fmt))

    def _told(self, x):
        return str(x.dtype).removeprefix("torch."), self.numpy(x)

    def _vjp(self, call, arrays, cotangent):
        inputs = [a if self.torch.is_tensor(a) else self.array(a) for a in arrays]
        leaves = [a.requires_grad_() if a.is_floating_point() else a for a in inputs]
        y = call(*leaves)
        g = self.torch.ones_like(y) if cotangent is None else self.array(cotangent).to(y.dtype)
        floats = [a for a in leaves if a.is_floating_point()]
        return self._told(y), [self._told(g) for g in self.torch.autograd.grad(y, floats, g)]

    def toy(self, policy, weight, *, rate, clip_norm=0.0):
        return TorchToy(self, policy, weight, rate, clip_norm)

    def decoder(self, config, policy, weights):
        t, parsed = self.torch, Policy.parse(policy)
        model = self.model.Decoder(config)
        with t.no_grad():
            for name, p in model.named_parameters():
                p.copy_(t.from_numpy(weights[name]))
        self.apply.apply(model, parsed, model.module_names())

        def run(tokens, targets):
            logits = model(t.from_numpy(tokens))
            loss = model.loss(t.from_numpy(tokens), t.from_numpy(targets))
            loss.backward()
            # None where a parameter is not used: the first block has no earlier values to mix
            grads = {
                n: self.numpy(t.zeros_like(p) if p.grad is None else p.grad) for n, p in model.named_parameters()
            }
            return self.numpy(logits), loss.item(), grads

        return run


class TorchToy:
    def __init__(self, backend, policy, weight, rate, clip_norm):
        t = backend.torch
        optim = import_module("halfstep.torch.optim.adamw")

        class Sgd(optim.Optimizer):
            def step(self, grads, *, found_inf=None, scale=None):
                for p, g in grads.items():
                    g = g * scale
                    (wide,) = self.masters.wide([p])
                    wide.sub_(t.where(found_inf > 0, 0.0, rate * g))
                    if wide is not p:
                        self.masters.put([p], [wide], [t.ones(())])

        class Model(t.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = backend.layers.CastedLinear(weight.shape[1], weight.shape[0], bias=False)

        self.backend, self.model = backend, Model()
        self.model.layer.weight.data = backend.array(weight)
        parsed = Policy.parse(policy)
        applied = backend.apply.apply(self.model, parsed, ["layer"])
        sgd = Sgd([{"params": list(self.model.named_parameters())}], {"lr": rate}, masters=applied.masters)
        self.run = backend.step.Run(self.model, [sgd], parsed, clip_norm)

    def step(self, micro_batches):
        def loss(batch):
            x, t, weight = batch
            y = self.model.layer(self.backend.array(x))
            return (y.float() * self.backend.array(t)).sum(), weight

        self.last = self.run.step(loss, micro_batches)
        return _read(self.last)

    def check(self):
        self.run.check(self.last)

    def weight(self):
        return self.backend._told(self.model.layer.weight)

    def applied(self):
        return int(self.run.num_applied)


class Jax(Backend):
    """JAX."""

    name = "jax"
    words = np.uint32

    def __init__(self):
        import jax

        self.jax, self.xp = jax, jax.numpy

    def array(self, x):
        return self.jax.numpy.asarray(x)

    def numpy(self, x):
        wide = self.jax.numpy.issubdtype(x.dtype, self.jax.numpy.floating)
        return np.asarray(x).astype(np.float32) if wide else np.asarray(x)

    def patterns(self, x):
        return np.asarray(x).view(np.uint16)

    def join(self, hi, lo):
        hi = self.jax.lax.bitcast_convert_type(self.array(hi), self.jax.numpy.bfloat16)
        return self.numpy(self.cast.join(hi, self.array(lo)))

    def scalars(self, state):
        j = self.jax.numpy
        dtypes = (j.float32, j.int32, j.int32, j.bool_)
        return ScaleState(*(j.asarray(v, d) for v, d in zip(state, dtypes, strict=True)))

    def as_dtype(self, x, fmt):
        return self.array(x).astype(self.dtypes.dtype_of(fmt))

    def _told(self, x):
        return str(x.dtype), self.numpy(x)

    def _vjp(self, call, arrays, cotangent):
        inputs = [self.array(a) for a in arrays]
        floats = [i for i, a in enumerate(inputs) if self.xp.issubdtype(a.dtype, self.xp.floating)]

        def of_floats(*given):
            full = list(inputs)
            for i, a in zip(floats, given, strict=True):
                full[i] = a
            return call(*full)

        y, back = self.jax.vjp(of_floats, *(inputs[i] for i in floats))
        g = self.xp.ones_like(y) if cotangent is None else self.array(cotangent).astype(y.dtype)
        return self._told(y), [self._told(grad) for grad in back(g)]

    def toy(self, policy, weight, *, rate, clip_norm=0.0):
        return JaxToy(self, policy, weight, rate, clip_norm)

    def decoder(self, config, policy, weights):
        apply, parsed = import_module("halfstep.core.precision"), Policy.parse(policy)
        names = [*self.model.Decoder(config).module_names(), *(n for n in weights if "." not in n)]
        model = self.model.Decoder(config, apply.precisions(parsed, names), apply.base_precision(parsed))
        params = {name: self.array(w) for name, w in weights.items()}

        def run(tokens, targets):
            def both(params, tokens, targets):
                return model(params, tokens), self.jax.value_and_grad(model.loss)(params, tokens, targets)

            logits, (loss, grads) = self.jax.jit(both)(params, tokens, targets)  # one program compiles once
            return self.numpy(logits), float(loss), {name: self.numpy(g) for name, g in grads.items()}

        return run


class JaxToy:
    def __init__(self, backend, policy, weight, rate, clip_norm):
        import optax

        self.backend, self.rate, self.clip_norm = backend, rate, clip_norm
        self.optimizer = optax.sgd(rate)
        self.state = backend.step.init({"layer": {"weight": backend.array(weight)}}, self.optimizer, policy)
        self.steps: dict[int, Any] = {}

    def step(self, micro_batches):
        jnp, count = self.backend.xp, len(micro_batches)
        if count not in self.steps:

            def loss(params, batch):
                y = batch["x"] @ params["layer"]["weight"].T
                total = (y.astype(jnp.float32) * batch["t"]).sum()
                return self.backend.step.Weighted(total, batch["weight"])

            self.steps[count] = self.backend.step.make_step(
                loss, self.optimizer, clip_norm=self.clip_norm, micro_batches=count, cast_batch=False
            )
        compute = self.backend.dtypes.dtype_of(self.state.policy.compute.format)
        x, t, weight = (np.stack([np.float32(batch[i]) for batch in micro_batches]) for i in range(3))
        batch = {"x": jnp.asarray(x).astype(compute), "t": jnp.asarray(t), "weight": jnp.asarray(weight)}
        self.state, self.last = self.steps[count](self.state, batch)
        return _read(self.last)

    def check(self):
        self.backend.step.check(self.last)

    def weight(self):
        return self.backend._told(self.state.params["layer"]["weight"])

    def applied(self):
        return int(self.state.num_applied)


class Mlx(Backend):
    """MLX."""

    name = "mlx"
    words = np.uint32

    def __init__(self):
        import mlx.core as mx

        self.mx = self.xp = mx

    def array(self, x):
        return self.mx.array(np.asarray(x))

    def numpy(self, x):
        floats = (self.mx.bfloat16, self.mx.float16)
        return np.array(x.astype(self.mx.float32) if x.dtype in floats else x)

    def patterns(self, x):
        return np.array(x.view(self.mx.uint16))

    def join(self, hi, lo):
        return self.numpy(self.cast.join(self.array(hi).view(self.mx.bfloat16), self.array(lo)))

    def scalars(self, state):
        m = self.mx
        dtypes = (m.float32, m.int32, m.int32, m.bool_)
        return ScaleState(*(m.array(v, dtype=d) for v, d in zip(state, dtypes, strict=True)))

    def as_dtype(self, x, fmt):
        return self.array(x).astype(self.dtypes.dtype_of(fmt))

    def _told(self, x):
        return str(x.dtype).removeprefix("mlx.core."), self.numpy(x)

    def _vjp(self, call, arrays, cotangent):
        mx = self.mx
        inputs = [a if isinstance(a, mx.array) else self.array(a) for a in arrays]
        floats = [i for i, a in enumerate(inputs) if mx.issubdtype(a.dtype, mx.floating)]

        def of_floats(*given):
            full = list(inputs)
            for i, a in zip(floats, given, strict=True):
                full[i] = a
            return call(*full)

        y = call(*inputs)
        g = mx.ones_like(y) if cotangent is None else self.array(cotangent).astype(y.dtype)
        _, grads = mx.vjp(of_floats, [inputs[i] for i in floats], [g])
        return self._told(y), [self._told(grad) for grad in grads]

    def toy(self, policy, weight, *, rate, clip_norm=0.0):
        return MlxToy(self, policy, weight, rate, clip_norm)

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

        return run


class MlxToy:
    def __init__(self, backend, policy, weight, rate, clip_norm):
        from mlx import nn, optimizers

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)

        self.backend, self.model = backend, Model()
        self.model.layer.weight = backend.array(weight)
        sgd = optimizers.SGD(learning_rate=rate)
        self.run = backend.step.prepare(self.model, sgd, policy, clip_norm=clip_norm)

    def step(self, micro_batches):
        mx = self.backend.mx
        compute = self.backend.layers.casts_of(self.model.layer.precision).compute

        def loss(model, batch):
            y = model.layer(batch["x"].astype(compute))
            return (y.astype(mx.float32) * batch["t"]).sum(), batch["weight"]

        # As integers where the loss wants them exact: floating leaves of a batch enter in the compute format.
        batches = [
            {"x": mx.array(np.float32(x)), "t": mx.array(np.float32(t)), "weight": mx.array(float(w))}
            for x, t, w in micro_batches
        ]
        self.last = self.run.step(loss, batches)
        return _read(self.last)

    def check(self):
        self.run.check(self.last)

    def weight(self):
        return self.backend._told(self.model.layer.weight)

    def applied(self):
        return int(self.run.num_applied.item())


def _read(result) -> Result:
    def number(x):
        return x.item() if hasattr(x, "item") else x

    return Result(
        loss=float(number(result.loss)),
        skipped=bool(number(result.skipped)),
        scale=float(number(result.scale)),
        grad_norm=float(number(result.grad_norm)),
        stuck=bool(number(result.stuck)),
    )


FRAMEWORKS = {"torch": Torch, "jax": Jax, "mlx": Mlx}
_made: dict[str, Any] = {}


def made(name: str):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'halfstep[{name}]'")
    if name not in _made:
        _made[name] = FRAMEWORKS[name]()
    return _made[name]


@pytest.fixture(params=["torch", "jax", "mlx"])
def backend(request):
    """Each framework."""
    return made(request.param)


@pytest.fixture(params=["numpy", "torch", "jax", "mlx"])
def implementation(request):
    """Each framework, and the reference itself."""
    return Reference() if request.param == "numpy" else made(request.param)


@pytest.fixture
def torch_backend():
    """The one that others are held against where there is no reference in numpy."""
    return made("torch")
