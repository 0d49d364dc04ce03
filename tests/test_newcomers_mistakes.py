"""Mistakes of people who see halfstep for the first time, as they write them on each backend.

Each raises an error of halfstep's own that says what was given, what is expected, and what to write instead.
"""

import re
import shlex
from importlib.util import find_spec

import pytest

from halfstep.cli.main import run as command
from halfstep.core.errors import HalfstepError

# --- what a newcomer has before the mistake

START = {
    "torch": """
import copy, torch
from torch import nn
from torch.nn import functional as F
from halfstep import Policy
from halfstep.torch import prepare
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(6, 4), torch.randint(3, (6,))
batch = (x, y)
def loss_fn(batch):
    return F.cross_entropy(model(batch[0]), batch[1])
""",
    "jax": """
import jax, jax.numpy as jnp, numpy as np, optax
from halfstep.jax import init, load_state_dict, make_step, state_dict
params = {"w": jnp.ones((4, 8)), "b": jnp.zeros(8), "head": jnp.ones((8, 3))}
optimizer = optax.adamw(1e-3)
x, y = jnp.ones((6, 4)), jnp.zeros(6, jnp.int32)
batch, key = (x, y), jax.random.key(0)
def predict(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["head"]
def loss_fn(params, batch):
    x, y = batch
    logits = predict(params, x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
def with_dropout(params, batch, key):
    keep = jax.random.bernoulli(key, 0.9, batch[0].shape)
    return loss_fn(params, (batch[0] * keep, batch[1]))
def train(loss_fn, batch=batch, **options):
    return make_step(loss_fn, optimizer, **options)(init(params, optimizer, "bf16-mixed"), batch)
""",
    "mlx": """
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np
from halfstep.mlx import prepare
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
optimizer = optim.AdamW(learning_rate=1e-3)
x, y = mx.ones((6, 4)), mx.zeros(6, mx.int32)
batch = (x, y)
def loss_fn(model, batch):
    return nn.losses.cross_entropy(model(batch[0]), batch[1], reduction="mean")
""",
}
PREPARED = {
    "torch": 'run = prepare(model, optimizer, "bf16-mixed")',
    "jax": 'state, step = init(params, optimizer, "bf16-mixed"), make_step(loss_fn, optimizer)',
    "mlx": 'run = prepare(model, optimizer, "bf16-mixed")',
}
FP16, SPLIT = (
    f'run = prepare(model, optimizer, "{policy}")\n' for policy in ("fp16-mixed", "bf16-mixed,param=fp32:split")
)

# --- the step: (mistake, backends, code, what was given, what is expected, what to write)

IN_LIST = "run.step(loss_fn, [batch])"
STEPS = [
    ("one batch for all", "torch mlx", "run.step(loss_fn, batch)",
     "the shapes (6, 4) and (6,)", "each is taken for a micro-batch", "run.step(loss_fn, [(x, y)])"),
    ("no batch at all", "torch mlx", "run.step(loss_fn, [])",
     "micro_batches is empty", "nothing to make an update of", IN_LIST),
    ("an array of numpy for all", "torch", "run.step(loss_fn, x.numpy())",
     "one `ndarray`", "its rows or keys would be the batches", "run.step(loss_fn, ["),
    ("an array of numpy for all", "mlx", "run.step(loss_fn, np.array(x))",
     "one `ndarray`", "its rows or keys would be the batches", "run.step(loss_fn, ["),
    ("a model that is cast afterwards", "torch", "model.half(); run.step(loss_fn, [batch])",
     "is torch.float16 now", "was torch.float32 when the model was prepared", "prepare the model again"),
    ("one dict for all", "torch mlx", 'run.step(loss_fn, {"x": x, "y": y})',
     "one `dict`", "its rows or keys would be the batches", IN_LIST),
    ("one array for all", "torch mlx", "run.step(loss_fn, x)",
     "micro_batches is one `", "its rows or keys would be the batches", IN_LIST),
    ("a list of micro-batches", "jax", "step(state, [batch, batch])",
     "a list of 2 tuples", "a step takes one batch", "jnp.stack(leaves), *micro_batches)"),
    ("micro-batches in a list", "jax", "train(loss_fn, [batch, batch], micro_batches=2)",
     "leaf `0.0` of the batch has shape (6, 4)", "a leading axis of 2", "jnp.stack(leaves), *micro_batches)"),
    ("no micro-batch", "jax", "train(loss_fn, micro_batches=0)",
     "micro_batches=0", "at least one", "None takes the batch as it is"),
    ("arguments swapped", "torch mlx", "run.step([batch], loss_fn)",
     "loss_fn is one `list`", "called with each micro-batch", IN_LIST),
    ("arguments swapped", "jax", "step(batch, state)",
     "is a `tuple`", "not a state", "state, result = step(state, batch)"),
    ("the loss for its function", "torch", "run.step(loss_fn(batch), [batch])",
     "loss_fn is one `Tensor`", "called with each micro-batch", IN_LIST),
    ("the loss for its function", "mlx", "run.step(loss_fn(model, batch), [batch])",
     "loss_fn is one `array`", "called with each micro-batch", IN_LIST),
    ("the loss for its function", "jax", "train(loss_fn(params, batch))",
     "loss_fn is a `ArrayImpl`", "the function", "make_step(loss_fn, optimizer)"),
    ("a function of x and y", "torch", "run.step(lambda x, y: F.cross_entropy(model(x), y), [batch])",
     "takes (x, y)", "called with a micro-batch", "run.step(lambda batch: loss_fn("),
    ("a function of x and y", "mlx", "run.step(lambda model, x, y: model(x).sum(), [batch])",
     "takes (model, x, y)", "called with the model, a micro-batch", "run.step(lambda model, batch: loss_fn("),
    ("a function of x and y", "jax", "train(lambda params, x, y: loss_fn(params, (x, y)))",
     "takes (params, x, y)", "called with parameters, a batch", "make_step(lambda params, batch: loss_fn("),
    ("a criterion without the model", "torch", "run.step(nn.CrossEntropyLoss(), [batch])",
     "takes (input", "called with a micro-batch", "lambda batch: loss_fn(model, *batch)"),
    ("a function of the batch alone", "mlx", "run.step(lambda batch: loss_fn(model, batch), [batch])",
     "takes (batch)", "called with the model, a micro-batch", "run.step(lambda model, batch: loss_fn("),
    ("inputs on another device", "torch", 'run.step(loss_fn, [(x.to("meta"), y)])',
     "tensors on meta", "the model is on cpu", 'x.to("cpu")'),
    ("text in a batch", "jax", 'train(lambda params, b: loss_fn(params, b["xy"]), {"xy": batch, "text": "hi"})',
     "leaf `text` of the batch is a `str`", "not an array", "leave out what is none"),
    ("no key", "jax", "train(with_dropout)",
     "takes (params, batch, key)", "called with parameters, a batch", "step(state, batch, key)"),
    ("a seed for a key", "jax", "make_step(with_dropout, optimizer)(state, batch, 0)",
     "rng=0", "no key of a generator", "jax.random.key(0)"),
    ("a state that was used", "jax", "step(state, batch); step(state, batch)",
     "used up this state", "in the state that the step returned", "state, result = step(state, batch)"),
    ("a result for a state", "jax", "state = step(state, batch); step(state, batch)",
     "is a `tuple`", "not a state", "state, result = step(state, batch)"),
    ("parameters for a state", "jax", "step(params, batch)",
     "is a `dict`", "not a state", "state = init(params, optimizer, policy)"),
    ("a step inside of jit", "jax", "jax.jit(step)(state, batch)",
     "called inside another jit", "the step is compiled", "step.__wrapped__"),
    ("a step inside of mx.compile", "mlx", "mx.compile(lambda x: run.step(loss_fn, [(x, y)]).loss)(x)",
     "a step inside mx.compile", "would be traced", "prepare(..., compile=True)"),
    ("torch.autocast around", "torch", 'with torch.autocast("cpu", torch.bfloat16): run.step(loss_fn, [batch])',
     "used under torch.autocast", "casts by itself", "leave torch.autocast out"),
    ("a step after the end", "torch", "run.unprepare(); run.step(loss_fn, [batch])",
     "the run has ended", "its model was given back", "prepare the model again"),
    ("a step after the end", "mlx", "run.unprepare(); run.step(loss_fn, [batch])",
     "the run is over", "restored the model", "prepare it again"),
]  # fmt: skip

# --- the loss

# (what is returned, {backend: (the expression, what was given)}, what to write)
RETURNED = [
    ("logits", {
        "torch": ("model(b[0])", "shape (6, 3)"),
        "jax": ("predict(p, b[0]).astype(jnp.float32)", "float32 of shape (6, 3)"),
        "mlx": ("m(b[0])", "float32 of shape (6, 3)"),
    }, "mean"),
    ("a loss of each row", {
        "torch": ('F.cross_entropy(model(b[0]), b[1], reduction="none")', "shape (6,)"),
        "jax": ("optax.l2_loss(predict(p, b[0]).astype(jnp.float32)).sum(1)", "float32 of shape (6,)"),
        "mlx": ("nn.losses.cross_entropy(m(b[0]), b[1])", "float32 of shape (6,)"),
    }, "mean"),
    ("loss and logits", {
        "torch": ("(loss_fn(b), model(b[0]))", "weight=a tensor of shape (6, 3)"),
        "mlx": ("(loss_fn(m, b), m(b[0]))", "has the shape (6, 3)"),
    }, "the mean loss alone"),
    ("a dict", {
        "torch": ('{"loss": loss_fn(b)}', "a dict"), "jax": ('{"loss": loss_fn(p, b)}', "returned dict"),
        "mlx": ('{"loss": loss_fn(m, b)}', "a dict"),
    }, "mean"),
    ("three values", {
        "torch": ("(loss_fn(b), 1, 2)", "(Tensor, int, int)"), "jax": ("(loss_fn(p, b), 1, 2)", "returned tuple"),
        "mlx": ("(loss_fn(m, b), 1, 2)", "a tuple"),
    }, "mean"),
    ("nothing", {"torch": ("None", "a NoneType"), "jax": ("None", "NoneType"), "mlx": ("None", "a NoneType")},
     "mean"),
    ("a number of Python", {
        "torch": ("loss_fn(b).item()", "a float"), "jax": ("loss_fn(p, b).item()", "a number while it is traced"),
        "mlx": ("loss_fn(m, b).item()", "a float"),
    }, "without"),
    ("numpy", {
        "torch": ("loss_fn(b).detach().numpy()", "a ndarray"), "mlx": ("np.array(loss_fn(m, b))", "a ndarray"),
        "jax": ("np.asarray(loss_fn(p, b))", "numpy.ndarray conversion"),
    }, "item()"),
    ("an accuracy", {
        "torch": ("(model(b[0]).argmax(-1) == b[1]).sum()", "needs no gradient"),
        "jax": ("(predict(p, b[0]).argmax(-1) == b[1]).sum()", "int32 of shape ()"),
        "mlx": ("(m(b[0]).argmax(-1) == b[1]).sum()", "int32 of shape ()"),
    }, "mean"),
    ("gradients too", {"mlx": ("nn.value_and_grad(m, loss_fn)(m, b)", "weight=a `dict`")}, "the mean loss alone"),
]  # fmt: skip
CALLS = {
    "torch": "run.step(lambda b: {}, [batch])",
    "jax": "train(lambda p, b: {})",
    "mlx": "run.step(lambda m, b: {}, [batch])",
}
LOSSES = [
    ("a detached loss", "torch", "run.step(lambda batch: loss_fn(batch).detach(), [batch])",
     "needs no gradient", "depends on parameters", "without detach()"),
    ("a detached loss", "jax", "train(lambda params, batch: jax.lax.stop_gradient(loss_fn(params, batch)))",
     "does not depend", "the parameters that the function is given", "without jax.lax.stop_gradient"),
    ("parameters from outside", "jax", "train(lambda _, batch: loss_fn(params, batch))",
     "does not depend", "the parameters that the function is given", "loss_fn(params, batch)"),
    ("a loss under no_grad", "torch", "with torch.no_grad(): run.step(loss_fn, [batch])",
     "needs no gradient", "depends on parameters", "outside of no_grad()"),
    ("Python's if", "jax", "train(lambda p, batch: loss_fn(p, batch) if loss_fn(p, batch) > 0 else 0.0)",
     "shape bool[]", "traced", "jnp.where"),
    ("backward twice", "torch", "loss = loss_fn(batch); loss.backward(); run.backward(loss)",
     "a backward pass of this loss before", "its graph is gone", "leave loss.backward() out"),
    ("loss.backward() before run.update()", "torch", "loss_fn(batch).backward(); run.update()",
     "no gradients", "to update with", "run.backward(loss), and not loss.backward()"),
    ("gradients of nn.value_and_grad", "mlx", "run.update(nn.value_and_grad(model, loss_fn)(model, batch)[1])",
     "a `dict`", "which scale they carry", "run.value_and_grad(loss_fn)(batch)"),
    ("loss and gradients to update", "mlx", "run.update(run.value_and_grad(loss_fn)(batch))",
     "a `array`", "which scale they carry", "run.value_and_grad(loss_fn)(batch)"),
    ("optimizer.step() of an unscaled loss", "torch", FP16 + "loss_fn(batch).backward(); optimizer.step()",
     "step() was called directly", "this policy scales the loss", "run.backward(loss) and run.update()"),
    ("optimizer.update", "mlx", "run; optimizer.update(model, nn.value_and_grad(model, loss_fn)(model, batch)[1])",
     "optimizer.update steps without masters", "the loss scale", "run.step(loss_fn, [batch])"),
    ("optimizer.step() after run.backward()", "torch", "run.backward(loss_fn(batch)); optimizer.step()",
     "step() was called directly", "summed by run.backward()", "run.update()"),
    ("zero_grad() before run.update()", "torch",
     "run.backward(loss_fn(batch)); optimizer.zero_grad(); run.update()",
     "no parameter of the optimizers", "has a gradient", "zero_grad() dropped them: omit it"),
    ("clipping of scaled gradients", "torch",
     FP16 + "run.backward(loss_fn(batch)); nn.utils.clip_grad_norm_(model.parameters(), 1.0); run.update()",
     "`0.weight` was changed", "times the loss scale", "run.unscale()"),
    ("never the last micro-batch", "torch", "run.backward(loss_fn(batch), last=False); run.update()",
     "last=False", "the last micro-batch", "last=True"),
    ("a schedule before the step", "torch",
     "run.scheduler_step(torch.optim.lr_scheduler.StepLR(optimizer, 1))",
     "no update was made", "yet", "after step() or update()"),
]  # fmt: skip
LOSSES += [
    (f"{name} for a loss", backend, CALLS[backend].format(code), given, "loss", write)
    for name, codes, write in RETURNED
    for backend, (code, given) in codes.items()
]

# --- policies and settings, which every backend reads: `{}` is the call that makes a run

PREPARE = "prepare(model, optimizer, {})"
MAKE = {"torch": PREPARE, "jax": "init(params, optimizer, {})", "mlx": PREPARE}
EVERYWHERE = "torch jax mlx"
POLICIES = [
    ("a misspelled policy", EVERYWHERE, '"bf16-mxied"',
     "`bf16-mxied`", "presets are fp32, bf16-mixed", "did you mean `bf16-mixed`?"),
    ("a policy of two meanings", EVERYWHERE, '"bfloat16"',
     "`bfloat16`", "it has two meanings", "write `bf16-mixed` for fp32 weights"),
    ("`mixed`", EVERYWHERE, '"mixed"',
     "`mixed` is not a preset", "which format", "write `bf16-mixed`"),
    ("float16 weights", EVERYWHERE, '"float16"',
     "`float16`", "weights in fp16 lose updates", "write `fp16-mixed`"),
    ("a policy as a dict", EVERYWHERE, '{"compute": "bf16"}',
     "the policy is a `dict`", "a Policy, or its text", "`bf16-mixed,norm=bf16`"),
    ("a dtype for a policy", "torch", "torch.bfloat16",
     "the policy is a `dtype`", "a Policy, or its text", "`bf16-mixed`"),
    ("a dtype for a policy", "jax", "jnp.dtype(jnp.bfloat16)",
     "the policy is a `", "a Policy, or its text", "`bf16-mixed`"),
    ("a dtype for a policy", "mlx", "mx.bfloat16",
     "the policy is a `Dtype`", "a Policy, or its text", "`bf16-mixed`"),
    ("an unknown role", EVERYWHERE, '"bf16-mixed,norms=fp32"',
     "unknown role `norms`", "roles are param, compute", "did you mean `norm`?"),
    ("fp16 without a scale", EVERYWHERE, '"compute=fp16"',
     "`compute=fp16` without a scale", "gradients below 6e-08 would become zero", "start from `fp16-mixed`"),
    ("a rule that matches nothing", EVERYWHERE, '"bf16-mixed; blocks.*: compute=fp32"',
     "`blocks.*: compute=fp32`", "matches none of the 3 names", "names look like"),
    ("a yes that is 1", EVERYWHERE, '"bf16-mixed,emulate=1"',
     "emulate=1", "neither `true` nor `false`", "write `emulate=true`"),
    ("fp8 where it is not", "jax mlx", '"fp8-mixed"',
     "e4m3 cannot run on cpu", "`emulate=true` runs it emulated", "add `emulate=true` to the policy"),
    ("a seed that is None", EVERYWHERE, '"bf16-mixed", seed=None',
     "seed=None", "a whole number", "seed=0"),
    ("an average that stands still", EVERYWHERE, '"bf16-mixed", ema=1.0',
     "ema=1.0", "between 0 and 1", "0.999"),
    ("a negative clip_norm", "torch mlx", '"bf16-mixed", clip_norm=-1.0',
     "clip_norm=-1.0", "a number, 0 or more", "0 clips nothing"),
    ("clip_norm=None", "torch mlx", '"bf16-mixed", clip_norm=None',
     "clip_norm=None", "a number, 0 or more", "0 clips nothing"),
]  # fmt: skip
PREPARING = [
    ("a negative clip_norm", "jax", "train(loss_fn, clip_norm=-1.0)",
     "clip_norm=-1.0", "a number, 0 or more", "0 clips nothing"),
    ("a text for a Policy", "torch", 'prepare(model, optimizer, Policy("bf16-mixed"))',
     "'bf16-mixed'", "is a text", 'Policy.parse("bf16-mixed")'),
    ("no policy", "torch", "prepare(model, optimizer)",
     "no policy", "was given", 'prepare(model, optimizer, "bf16-mixed")'),
    ("prepared twice", "torch", 'run; prepare(model, optimizer, "bf16-mixed")',
     "a Sequential", "has a policy already", "run.unprepare()"),
    ("prepared twice", "mlx", 'run; prepare(model, optim.SGD(0.1), "bf16-mixed")',
     "`Sequential` casts", "has a policy already", "run.unprepare()"),
    ("prepared twice", "jax", 'init(state, optimizer, "bf16-mixed")',
     "a state", "that `init` returned", "init(state.masters(), optimizer, policy)"),
    ("an optimizer of another run", "mlx", 'run; prepare(nn.Linear(4, 3), optimizer, "bf16-mixed")',
     "a `AdamW`", "belongs to another run", "give each model its own"),
    ("an optimizer of a copy", "torch", 'prepare(copy.deepcopy(model), optimizer, "bf16-mixed")',
     "a parameter of shape (8, 4)", "that the model does not", "from model.parameters() of this model"),
    ("another optimizer in the step", "jax", "make_step(loss_fn, optax.sgd(0.1))(state, batch)",
     "another optimizer", "than the step uses", "the same transform to init and make_step"),
    ("the class of an optimizer", "torch", 'prepare(model, torch.optim.AdamW, "bf16-mixed")',
     "the class `AdamW`", "not a torch.optim.Optimizer", "torch.optim.AdamW(model.parameters(), lr=3e-4)"),
    ("the class of an optimizer", "mlx", 'prepare(model, optim.AdamW, "bf16-mixed")',
     "the class `AdamW`", "not an `mlx.optimizers.Optimizer`", "mlx.optimizers.AdamW(3e-4)"),
    ("the class of an optimizer", "jax", 'init(params, optax.adamw, "bf16-mixed")',
     "a `function`", "not an optax transform", "optax.adamw(1e-3)"),
    ("the name of an optimizer", "torch", 'prepare(model, "adamw", "bf16-mixed")',
     "a `str`", "not a torch.optim.Optimizer", "torch.optim.AdamW("),
    ("the name of an optimizer", "mlx", 'prepare(model, "adamw", "bf16-mixed")',
     "a `str`", "not an `mlx.optimizers.Optimizer`", "mlx.optimizers.AdamW("),
    ("the name of an optimizer", "jax", 'init(params, "adamw", "bf16-mixed")',
     "a `str`", "not an optax transform", "optax.adamw("),
    ("the class of a model", "torch", 'prepare(nn.Linear, "bf16-mixed")',
     "the class `Linear`", "not an nn.Module", "prepare(model, optimizer, policy)"),
    ("the class of a model", "mlx", 'prepare(nn.Linear, optimizer, "bf16-mixed")',
     "the class `Linear`", "not an `mlx.nn.Module`", "prepare(model, optimizer, policy)"),
    ("a model for its parameters", "jax", 'init(predict, optimizer, "bf16-mixed")',
     "`params` is a `function`", "not an array", "`model.init(key, x)`"),
    ("parameters for the model", "torch", 'prepare(model.parameters(), optimizer, "bf16-mixed")',
     "a `generator`", "not an nn.Module", "prepare(model, optimizer, policy)"),
    ("parameters for the model", "mlx", 'prepare(model.parameters(), optimizer, "bf16-mixed")',
     "a `dict`", "not an `mlx.nn.Module`", "prepare(model, optimizer, policy)"),
    ("a GradScaler beside", "torch", 'prepare(model, [optimizer, torch.amp.GradScaler("cpu")], "bf16-mixed")',
     "a GradScaler", "a run scales the loss itself", "omit it"),
    ("compiled before", "torch", 'prepare(torch.compile(model), optimizer, "bf16-mixed")',
     "a OptimizedModule", "is compiled already", "prepare(model, ...), torch.compile(model)"),
    ("wrapped before", "torch", 'prepare(nn.DataParallel(model), optimizer, "bf16-mixed")',
     "wrapped by DataParallel already", "the modules as they were", "torch.compile(model), DDP(model)"),
    ("all frozen", "torch", 'model.requires_grad_(False); prepare(model, optimizer, "bf16-mixed")',
     "no parameters", "to train", "model.requires_grad_(True)"),
    ("all frozen", "mlx", 'model.freeze(); prepare(model, optimizer, "bf16-mixed")',
     "no parameters", "to train", "model.unfreeze()"),
    ("nothing to train", "jax", 'init({"w": jnp.ones(3, jnp.int32)}, optimizer, "bf16-mixed")',
     "none of the 1 leaves", "is a floating array", "pass the parameters of the model"),
    ("float64", "torch", 'prepare(model.double(), optimizer, "bf16-mixed")',
     "`0.weight` is float64", "no policy has a format for that", "model.float()"),
    ("float64", "jax", 'init({"w": np.ones(3)}, optimizer, "bf16-mixed")',
     "`w` is float64", "float32, bfloat16 or float16", "astype(jnp.float32)"),
]  # fmt: skip

# --- after `prepare`

LATER = [
    ("half() after", "mlx", "model.set_dtype(mx.float16); run.step(loss_fn, [batch])",
     "`layers.0.bias`", "cast", "change the model before you prepare it"),
    ("a layer that is added", "torch", "model.append(nn.Linear(3, 3)); run.step(loss_fn, [batch])",
     "`3.weight`", "was not there when the model was prepared", "run.unprepare(), change the model"),
    ("a layer that is added", "mlx", "model.layers.append(nn.Linear(3, 3)); run.step(loss_fn, [batch])",
     "`layers.3.bias`", "the model changed since it was prepared", "change the model before you prepare it"),
    ("a parameter of another size", "torch",
     "model[0].weight.data = torch.zeros(9, 4); run.step(loss_fn, [batch])",
     "has (9, 4) now", "had the shape (8, 4)", "run.unprepare(), change the model"),
    ("a write to split masters", "torch", SPLIT + "model[0].weight.data.mul_(0.5); run.step(loss_fn, [batch])",
     "`0.weight` was written to", "the bf16 half of a split master", "with run.edit():"),
    ("a write to split masters", "mlx",
     SPLIT + "model.layers[0].weight = mx.zeros((8, 4)); run.step(loss_fn, [batch])",
     "`layers.0.weight` was written", "the bf16 half of a split master", "model.load_weights("),
    ("weights for a state", "torch", "run.load_state_dict(model.state_dict())",
     "a `OrderedDict`", "not a state of a run", "run.state_dict()"),
    ("weights for a state", "mlx", "run.load_state_dict(model.parameters())",
     "a `dict`", "MLX's arrays by name", "run.load_state_dict(mx.load(file))"),
    ("weights for a state", "jax", "load_state_dict(state, params)",
     "lacks `applied`", "from another run", "resume with the model and optimizer it was saved with"),
    ("a path for a state", "torch", 'run.load_state_dict("run.pt")',
     "a `str`", "not a state of a run", "run.state_dict()"),
    ("a path for a state", "mlx", 'run.load_state_dict("run.safetensors")',
     "a `str`", "MLX's arrays by name", "run.load_state_dict(mx.load(file))"),
    ("a path for a state", "jax", 'load_state_dict(state, "run.npz")',
     "a str", "from arrays by name", "load_state_dict(state, np.load(file))"),
    ("the state of another policy", "torch",
     'given = run.state_dict(); run.unprepare(); prepare(model, optimizer, "fp16-mixed").load_state_dict(given)',
     "`bf16-mixed`", "this run has `fp16-mixed`", 'prepare(model, optimizer, "bf16-mixed")'),
    ("the state of another policy", "jax",
     'load_state_dict(init(params, optimizer, "bf16-true"), state_dict(state))',
     "is float32", "bfloat16", "resume with the model and policy it was saved with"),
    ("the state of another policy", "mlx",
     'given = run.state_dict(); run.unprepare(); prepare(model, optimizer, "bf16-true").load_state_dict(given)',
     "is float32", "bfloat16", "resume with the model and policy it was saved with"),
    ("torch.save of a model", "torch", 'run; torch.save(model, "model.pt")',
     "a Sequential with a policy", "cannot be pickled", "save model.state_dict()"),
    ("averages that nobody keeps", "torch mlx", "with run.averaged(): pass",
     "there are no averages", "keeps them", "prepare(..., ema=0.999)"),
    ("a monitor of no update", "torch mlx", "run.monitor(every=0)",
     "every=0", "a number of updates, at least 1", "every=100"),
    ("a rule that does not exist", "torch mlx", 'run.audit(select="HS9")',
     "`HS9`", "there is no rule", "did you mean `HS409`?"),
]  # fmt: skip

TABLE = [
    (name, backend, MAKE[backend].format(code) if rows is POLICIES else code, *said)
    for rows in (STEPS, LOSSES, POLICIES, PREPARING, LATER)
    for name, backends, code, *said in rows
    for backend in backends.split()
]
KINDS = {name for name, *_ in TABLE}


def test_the_table_has_fifty_mistakes_and_each_is_listed_once():
    assert len(KINDS) >= 50
    assert len({row[:2] for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize(
    ("backend", "code", "said"),
    [pytest.param(backend, code, said, id=f"{backend}-{name}") for name, backend, code, *said in TABLE],
)
def test_a_mistake_is_told_what_was_given_what_is_expected_and_what_to_write(
    backend, code, said, tmp_path, monkeypatch
):
    if find_spec("mlx.core" if backend == "mlx" else backend) is None:
        pytest.skip(f"{backend} is not installed")
    monkeypatch.chdir(tmp_path)
    newcomer = {"__name__": "newcomer"}
    exec(START[backend], newcomer)
    if re.search(r"\b(run|state|step)\b", code) and "run = " not in code:
        exec(PREPARED[backend], newcomer)
    with pytest.raises(HalfstepError) as caught:
        exec(code, newcomer)
    for words in said:
        assert words in str(caught.value)
    assert said[-1] in (caught.value.hint or "")


# --- the command line: what is written after `halfstep`, and the same three; `run` is a run of three steps

NEW = "train --out new --device cpu"
COMMANDS = [
    ("train gpt3", "unknown recipe `gpt3`", "recipes are tiny, golf, gpt2", "did you mean `gpt2`?"),
    ("train mine.toml", "no file `mine.toml`", "recipes are tiny", "tiny, golf, gpt2"),
    ("train script.py", "unknown recipe `script.py`", "recipes are tiny", "the name of a file must end in .toml"),
    ("trian", 'unknown command "trian"', "Available commands: train", 'Did you mean "train"?'),
    (f"{NEW} --polcy bf16-mixed", "unknown option: --polcy", "Did you mean --policy?", "halfstep train --help"),
    (f"{NEW} --policy bf61-mixed", "bf61-mixed", "presets are fp32, bf16-mixed", "did you mean `bf16-mixed`?"),
    (f"{NEW} --precision bf16", "unknown option: --precision", "the precision is a policy", "`--policy bf16`"),
    (f"{NEW} --lr 3e-4", "unknown option: --lr", "AdamW's learning rate", "`optimizer.rate`"),
    (f"{NEW} --epochs 3", "unknown option: --epochs", "there are no epochs", "`training.steps`"),
    (f"{NEW} --batch-size 8", "unknown option: --batch-size", "it is a setting", "--set training.batch=8"),
    (f"{NEW} --data text.txt", "unknown option: --data", "it is a setting", "--set data.source=text.txt"),
    (f"{NEW} --set trainig.batch=8", "`trainig.batch`", "unknown setting", "did you mean `training.batch`?"),
    (f"{NEW} --set training.accumulate=0", "`training.accumulate`", "unknown setting", "`training.micro_batches`"),
    (f"{NEW} --set training.steps=0", "`training.steps` is 0", "a whole number", "at least 1"),
    (f"{NEW} --set optimizer.rate=None", '`optimizer.rate` is "None"', "must be a number", "above 0"),
    (f"{NEW} --set training.clip_norm=-1", "`training.clip_norm` is -1", "must be a number", "at least 0"),
    (f"{NEW} --set training.steps", "`--set training.steps`", "key=value", "--set training.steps=100"),
    (f"{NEW} --set model.heads=3", "3 heads", "do not divide", "change model.heads or model.width"),
    (f"{NEW} --set data.source=nope.txt", "`nope.txt`", "no file or folder", "--set data.source=PATH"),
    (f"{NEW} --set data.source=empty", "folder `empty`", "no text", "UTF-8"),
    ("train --out new --device gpu", "`gpu` is not a torch device", "write `cpu`", "`cuda:1`"),
    (f"{NEW} --backend pytorch", '"pytorch"', 'Choose from: "torch", "jax", "mlx"', 'Did you mean "torch"?'),
    (f"{NEW} --backend jax --policy fp8-mixed", "e4m3 cannot run on cpu", "runs it emulated", "`emulate=true`"),
    ("train --resume --out nope", "`nope` holds no run", "run.toml", "`halfstep train --out nope` starts one"),
    ("train --out run", "`run` already holds a run", "name another folder", "`halfstep train --resume --out run`"),
    ("train --resume --out run --set training.steps=6 --set model.width=32", "model.width was 16 and is now 32",
     "it cannot change", "`halfstep train --resume --out run`"),
    ("train --out text.txt", "`text.txt`", "is not a folder", "name another folder with --out"),
    ("compare run", "needs B", "B is the reference", "halfstep compare --help"),
    ("compare run nope", "`nope` a policy to train", "two run folders", "name two policies"),
    ("audit", "needs a target", "a run folder, a checkpoint", "`halfstep audit -- python train.py`"),
    ("audit script.py", "`script.py` is a script", "it must run to be audited", "audit -- python script.py"),
    ("audit empty", "`empty` holds no run", "no checkpoint that halfstep knows", "name a run folder"),
    ("report empty", "`empty` holds no run", "no events.jsonl", "`halfstep runs` lists them"),
    ("report nope", "`nope` holds no run", "no events.jsonl", "name the folder of a run"),
    ("sample nope", "`nope`", "no such folder", "name a run folder"),
    ("sample run hello", "`hello`", "one argument too many", "halfstep sample --help"),
    ("eval run --policy float16", "`float16`", "weights in fp16 lose updates", "write `fp16-mixed`"),
    ("export run --to pytorch --out x", '"pytorch"', 'Choose from: "hf", "safetensors"', "halfstep export --help"),
    ("probe --device nope", "`nope` is not a torch device", "write `cpu`", "`cuda:1`"),
    ("plan tiny --gpu h1000", "`h1000`", "there are a100-40", "did you mean `h100`?"),
    ("policy bf16-mixed,nrom=fp32", "unknown role `nrom`", "roles are param", "did you mean `norm`?"),
    ("data pack text.txt --out packed --tokenizer gpt5", "`gpt5`", "a tokenizer is `bytes`", "train-tokenizer"),
]  # fmt: skip
RUN = ["model.context=16", "model.layers=1", "model.width=16", "model.heads=2", "training.batch=2",
       "training.steps=3", "training.validation_tokens=64", "training.measure_ceiling=false",
       "monitor.on=false", "data.source=text.txt"]  # fmt: skip


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with a run, a text, a script and an empty folder."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "empty").mkdir()
    (desk / "script.py").write_text("print(1)")
    (desk / "text.txt").write_text("\n\n".join(f"def f{i}(x): return x * {i} + {i * i}" for i in range(400)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        settings = (word for setting in RUN for word in ("--set", setting))
        assert command(["train", "--out", "run", "--device", "cpu", "--policy", "fp32", *settings]) == 0
    return desk


@pytest.mark.parametrize(("line", "said"), [pytest.param(line, said, id=line) for line, *said in COMMANDS])
def test_a_mistake_on_the_command_line_is_told_the_same(line, said, desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    for backend in ("torch", "jax"):
        if f"--backend {backend}" in line and find_spec(backend) is None:
            pytest.skip(f"{backend} is not installed")
    capsys.readouterr()
    assert command(shlex.split(line)) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in message
    for words in said:
        assert words in message[message.index("error: ") :]
    assert not (desk / "new").exists()
