"""Times `gpt2` on JAX in bf16-mixed against the same model in bf16 written by hand, and a stock Flax GPT likewise.

    python benchmarks/measure/jax_speed.py [--batch 16] [--rounds 12] [--steps 20] [--arms jax by-hand ...]
    python benchmarks/measure/jax_speed.py --tiny           a small model on the CPU, only to see that it runs

    jax                 the recipe's step: halfstep.jax layers, our AdamW
    by-hand             the same parameters in plain JAX: fp32 masters, all of them cast to bf16, norms and loss in
                        fp32, cuDNN's attention where ours has it, optax.adamw, one jit that donates the state
    torch               the recipe's step on torch, compiled
    flax                a GPT of Flax nnx's own modules that knows of no precision, through halfstep.jax.make_step
    flax-by-hand        the same modules with dtype=bfloat16, optax.adamw, one jit that donates the state
    flax-cudnn, flax-cudnn-by-hand      the same two, with cuDNN's attention as `attention_fn`

Every arm clips the norm of the gradient and decays matrices; ours also check that gradients are finite. Tokens are
random, the same in every arm, and so are first weights wherever the model is the same: losses must agree.

Each arm is a process of its own, so its peak memory is its own too: what the framework's allocator counts, without
preallocation. A group (a pair, or three with torch) compiles one by one, then takes turns in rounds, in reverse
order every other round, and ends before the next group compiles. The first step of a turn is not timed: the device
was another's before, and rested. A ratio is the median over rounds of the time by hand over our time in the same
round; beside it are the middle half of those ratios and the ratio of the fastest rounds, which other work of the
machine does not touch. If an arm fails, the others continue. Exits with 1 if a ratio is below 1.0 or an arm has
failed.
"""

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

GROUPS = (("jax", "by-hand", "torch"), ("flax", "flax-by-hand"), ("flax-cudnn", "flax-cudnn-by-hand"))
BARS = {
    ("jax", "by-hand"): 1.0,
    ("flax", "flax-by-hand"): 1.0,
    ("flax-cudnn", "flax-cudnn-by-hand"): 1.0,
    ("jax", "torch"): None,
}
TINY = (
    "training.batch=2",
    "training.compile=false",
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.context=16",
    "model.vocabulary=128",
)
WARM, BATCHES = 3, 4
Train = Callable[[list[Any]], list[float]]
"""Takes a step for each batch of tokens (rows, context + 1), and returns the losses, read at the end."""


def work(arm: str, overrides: list[str], tiny: bool, pipe: Any) -> None:
    """Runs one arm: gets the number of steps to train, sends what they took."""
    try:
        import numpy as np

        from halfstep.config.load import load

        name = "torch" if arm == "torch" else "jax"
        config = load("gpt2", [*overrides, f"backend={name}", "policy=bf16-mixed"])
        draw, shape = np.random.default_rng(0), (config.training.batch, config.model.context + 1)
        batches = [draw.integers(0, config.model.vocabulary, shape).astype(np.int32) for _ in range(BATCHES)]
        train, memory, about, done = None, None, "", 0
        while count := pipe.recv():
            if train is None:
                train, memory, about = MAKERS[arm](config, tiny)
            ready = [batches[(done + i) % BATCHES] for i in range(count + 1)]
            losses = train(ready[:1])
            begun = time.perf_counter()
            losses += train(ready[1:])
            seconds = (time.perf_counter() - begun) / count
            done += len(ready)
            pipe.send({"seconds": seconds, "losses": losses, "memory": memory(), "about": about})
    except Exception:
        pipe.send({"error": traceback.format_exc()})


def make_session(config: Any, tiny: bool) -> tuple[Train, Callable[[], int], str]:
    """Makes the step of the recipe on its backend."""
    from halfstep.core.policy import Policy
    from halfstep.training.session import backend_version, open_session

    # torch multiplies in bf16 hundreds of times slower on a CPU that has none
    policy = "fp32" if tiny and config.backend == "torch" else config.policy
    session = open_session(config, Policy.parse(policy), "cpu" if tiny else None)

    def train(batches: list[Any]) -> list[float]:
        results = [session.step(batch[None]) for batch in batches]
        return [session.read(result)["loss"] for result in results]

    return train, session.memory, f"{config.backend} {backend_version(config)}, {session.description.name}"


def make_by_hand(config: Any, tiny: bool) -> tuple[Train, Callable[[], int], str]:
    """Makes the recipe's model as plain functions of the same parameters."""
    import jax.numpy as jnp

    from halfstep.config.weights import initial_weights

    params = {name: jnp.asarray(value) for name, value in initial_weights(config.model, config.seed)}
    loss = partial(gpt_by_hand, config.model, "xla" if tiny else "cudnn")
    return trained_by_hand(config, params, loss)


def gpt_by_hand(model: Any, implementation: str, params: Any, tokens: Any) -> Any:
    """Returns the mean loss of GPT-2 in bf16: the casts are written where they are needed."""
    import jax
    import jax.numpy as jnp
    import optax  # type: ignore[import-untyped]

    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def linear(x: Any, name: str) -> Any:
        return x @ half[f"{name}.weight"].T + half[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        wide = x.astype(jnp.float32)
        mean, variance = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
        y = (wide - mean) * jax.lax.rsqrt(variance + model.norm_epsilon)
        return y.astype(jnp.bfloat16) * half[f"{name}.weight"] + half[f"{name}.bias"]

    def heads(x: Any) -> Any:
        return x.reshape(*x.shape[:2], model.heads, -1)

    x = half["embed.weight"][inputs] + half["positions.weight"][: inputs.shape[1]]
    for layer in range(model.layers):
        block = f"blocks.{layer}"
        h = norm(x, f"{block}.attn_norm")
        q, k, v = (heads(linear(h, f"{block}.attn.{part}")) for part in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        x = x + linear(y.reshape(x.shape), f"{block}.attn.o")
        h = jax.nn.gelu(linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.up"))
        x = x + linear(h, f"{block}.mlp.down")
    logits = norm(x, "final_norm") @ half["embed.weight"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def trained_by_hand(config: Any, params: Any, loss_fn: Callable[..., Any]) -> tuple[Train, Callable[[], int], str]:
    """Makes the step of a good JAX user: optax, one jit, parameters and moments donated."""
    import jax
    import optax

    optimizer = optax.chain(optax.clip_by_global_norm(config.training.clip_norm), adamw(config.optimizer))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, tokens: Any) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    held = [params, jax.jit(optimizer.init)(params)]

    def train(batches: list[Any]) -> list[float]:
        losses = []
        for batch in batches:
            *held[:], loss = step(*held, jax.device_put(batch))
            losses.append(loss)
        return [float(loss) for loss in jax.device_get(losses)]

    return train, jax_memory, jax_versions()


def make_flax(config: Any, tiny: bool, *, cudnn: bool, by_hand: bool) -> tuple[Train, Callable[[], int], str]:
    """Makes a GPT of Flax's own modules, with a dtype or through make_step."""
    import jax
    from flax import nnx

    import halfstep.jax

    model = flax_gpt(config.model, cudnn=cudnn and not tiny, by_hand=by_hand)
    graph, params = nnx.split(model)
    del model

    def loss_fn(params: Any, tokens: Any) -> Any:
        import jax.numpy as jnp
        import optax

        logits = nnx.merge(graph, params)(tokens[:, :-1])
        logits = logits.astype(jnp.float32) if by_hand else logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    if by_hand:
        return trained_by_hand(config, params, loss_fn)
    optimizer = adamw(config.optimizer)
    step = halfstep.jax.make_step(loss_fn, optimizer, clip_norm=config.training.clip_norm)
    state = [halfstep.jax.init(params, optimizer, config.policy)]
    del params

    def train(batches: list[Any]) -> list[float]:
        losses = []
        for batch in batches:
            state[0], result = step(state[0], jax.device_put(batch))
            losses.append(result.loss)
        return [float(loss) for loss in jax.device_get(losses)]

    return train, jax_memory, jax_versions()


def flax_gpt(config: Any, *, cudnn: bool, by_hand: bool) -> Any:
    """Returns GPT-2 of nnx.Embed, nnx.LayerNorm, nnx.MultiHeadAttention and nnx.Linear."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rngs, dtype = nnx.Rngs(0), {"dtype": jnp.bfloat16} if by_hand else {}

    def flash(query: Any, key: Any, value: Any, **_: Any) -> Any:
        q, k, v = (x.astype(jnp.bfloat16) for x in (query, key, value))  # cuDNN takes no fp32
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    class Block(nnx.Module):
        def __init__(self) -> None:
            width, choice = config.width, {"attention_fn": flash} if cudnn else {}
            self.first, self.second = (nnx.LayerNorm(width, rngs=rngs, **dtype) for _ in range(2))
            self.attend = nnx.MultiHeadAttention(config.heads, width, decode=False, rngs=rngs, **dtype, **choice)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs, **dtype)
            self.down = nnx.Linear(4 * width, width, rngs=rngs, **dtype)

        def __call__(self, x: Any, mask: Any) -> Any:
            x = x + self.attend(self.first(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    class GPT(nnx.Module):
        def __init__(self) -> None:
            small = nnx.initializers.normal(0.02)
            self.embed = nnx.Embed(config.vocabulary, config.width, embedding_init=small, rngs=rngs, **dtype)
            self.position = nnx.Embed(config.context, config.width, embedding_init=small, rngs=rngs, **dtype)
            self.blocks = nnx.List([Block() for _ in range(config.layers)])
            self.norm = nnx.LayerNorm(config.width, rngs=rngs, **dtype)

        def __call__(self, tokens: Any) -> Any:
            mask = None if cudnn else nnx.make_causal_mask(tokens)
            x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x, mask)
            return self.embed.attend(self.norm(x))

    return GPT()


def adamw(config: Any) -> Any:
    """Returns optax.adamw with the recipe's numbers, which lets matrices decay."""
    import jax
    import optax

    def decayed(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    b1, b2 = config.betas
    return optax.adamw(
        config.rate, b1=b1, b2=b2, eps=config.epsilon, weight_decay=config.weight_decay, mask=decayed
    )


def jax_memory() -> int:
    import jax

    from halfstep.jax.numerics.memory import peak

    return peak(jax.local_devices()[0])


def jax_versions() -> str:
    import flax
    import jax
    import optax

    device = jax.local_devices()[0].device_kind
    return f"jax {jax.__version__}, flax {flax.__version__}, optax {optax.__version__}, {device}"


MAKERS = {
    "jax": make_session,
    "by-hand": make_by_hand,
    "torch": make_session,
    "flax": partial(make_flax, cudnn=False, by_hand=False),
    "flax-by-hand": partial(make_flax, cudnn=False, by_hand=True),
    "flax-cudnn": partial(make_flax, cudnn=True, by_hand=False),
    "flax-cudnn-by-hand": partial(make_flax, cudnn=True, by_hand=True),
}


class Arm:
    """A worker process, seen from its parent. A failed arm has its error, and trains no more."""

    def __init__(self, name: str, overrides: list[str], tiny: bool):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(name, overrides, tiny, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.name, self.about, self.error = name, "", ""
        self.seconds, self.losses, self.memory = list[float](), list[float](), 0

    def train(self, steps: int) -> float:
        """Makes the arm train, waits, and returns seconds per step."""
        try:
            self.pipe.send(steps)
            answer = self.pipe.recv()
        except (EOFError, OSError):
            answer = {"error": "the process ended without a word"}
        if "error" in answer:
            self.error = answer["error"]
            return 0.0
        self.losses += answer["losses"]
        self.memory, self.about = answer["memory"], answer["about"]
        return float(answer["seconds"])

    def end(self) -> None:
        """Lets the process end, and waits: the next group has its memory then."""
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                self.pipe.send(0)
        self.process.join(30)


def race(arms: list[Arm], rounds: int, steps: int) -> None:
    """Compiles arms one by one, then lets them take turns."""
    for arm in arms:
        begun = time.perf_counter()
        arm.train(WARM)
        state = arm.error or f"ready after {time.perf_counter() - begun:.0f} s, {arm.about}"
        print(f"{arm.name}: {state}", flush=True)
    for turn in range(rounds):
        ready = [arm for arm in arms if not arm.error]
        for arm in ready if turn % 2 == 0 else ready[::-1]:
            arm.seconds.append(arm.train(steps))
    for arm in arms:
        arm.end()
        shown = ", ".join(f"{loss:.4f}" for loss in (*arm.losses[:BATCHES], *arm.losses[-BATCHES:]))
        print(f"{arm.name}: first and last losses {shown}", flush=True)


def report(arms: list[Arm], tokens: int) -> bool:
    """Prints the table and the ratios; returns whether every bar is reached."""
    found = {arm.name: arm for arm in arms if not arm.error}
    print(
        f"\n{'arm':<20}{'ms/step':>9}{'lowest':>9}{'highest':>9}{'tokens/s':>11}{'peak GiB':>10}{'last loss':>11}"
    )
    for arm in found.values():
        middle = statistics.median(arm.seconds)
        row = f"{arm.name:<20}{1e3 * middle:>9.2f}{1e3 * min(arm.seconds):>9.2f}{1e3 * max(arm.seconds):>9.2f}"
        print(f"{row}{tokens / middle:>11,.0f}{arm.memory / 2**30:>10.2f}{arm.losses[-1]:>11.4f}")
    reached = len(found) == len(arms)
    for (ours, other), bar in BARS.items():
        if ours in found and other in found:
            one, two = found[ours], found[other]
            ratios = [b / a for a, b in zip(one.seconds, two.seconds, strict=True)]
            ratio, memory = statistics.median(ratios), one.memory / two.memory
            lower, _, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            verdict = "" if bar is None else f", bar {bar}{'' if ratio >= bar else '   MISSED'}"
            print(f"{ours} against {other}: {ratio:.3f} times the speed{verdict}; {memory:.2f} of the memory")
            fastest = min(two.seconds) / min(one.seconds)
            print(f"    middle half of the rounds {lower:.3f} to {upper:.3f}, fastest rounds {fastest:.3f}")
            reached &= bar is None or ratio >= bar
    for arm in arms:
        if arm.error:
            print(f"{arm.name}: FAILED, {arm.error.strip().splitlines()[-1]}")
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16, help="rows of 1,024 tokens in a step")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="of an arm in a round, after one not timed")
    parser.add_argument("--arms", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--tiny", action="store_true", help="use a small model on the CPU; no bar counts")
    options = parser.parse_args()
    # Otherwise JAX reserves three quarters of the device's memory at its first allocation.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if options.tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
    from halfstep.config.load import load

    # by hand there is no schedule
    overrides = [f"training.batch={options.batch}", "training.micro_batches=1", "training.warmup=0"]
    overrides += [*(TINY if options.tiny else ()), *options.overrides]
    config = load("gpt2", overrides)
    tokens = config.training.batch * config.model.context
    print(f"gpt2, {tokens} tokens per step, {options.rounds} rounds of {options.steps} steps", flush=True)
    begun, arms = time.perf_counter(), list[Arm]()
    for names in GROUPS:
        group = [Arm(name, overrides, options.tiny) for name in names if name in options.arms]
        race(group, options.rounds, options.steps)
        arms += group
    reached = report(arms, tokens)
    print(f"{time.perf_counter() - begun:.0f} s in all")
    failed = any(arm.error for arm in arms)
    return int(failed if options.tiny else not reached)


if __name__ == "__main__":
    sys.exit(main())
