"""One process, three backends: the same decoder, policy and batch through PyTorch, JAX and MLX.

    python examples/three_backends.py [POLICY] [--width 64] [--layers 2]

Weights come from one seed and have the same bits everywhere. What differs is the order in which sums are added,
and in half precision the ties that this decides. Differences are relative to PyTorch in fp32, so the table shows
what precision costs next to what a backend costs.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from halfstep.config.model import ModelConfig
from halfstep.config.weights import initial_weights
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.core.precision import base_precision, precisions

Arrays = dict[str, np.ndarray]
# (tokens, targets) -> the sum of losses, and the gradient of every parameter
Pass = Callable[[np.ndarray, np.ndarray], tuple[float, Arrays]]


def on_torch(config: ModelConfig, policy: Policy, weights: Arrays) -> Pass:
    """Returns the decoder's forward and backward pass on PyTorch."""
    import torch

    from halfstep.torch.convert.apply import apply
    from halfstep.torch.model import Decoder

    model = Decoder(config)
    model.load_state_dict({name: torch.from_numpy(weight.copy()) for name, weight in weights.items()})
    apply(model, policy, model.module_names())

    def run(tokens: np.ndarray, targets: np.ndarray) -> tuple[float, Arrays]:
        model.zero_grad()
        loss = model.loss(torch.from_numpy(tokens), torch.from_numpy(targets))
        loss.backward()
        return loss.item(), {name: p.grad.float().numpy().copy() for name, p in model.named_parameters()}

    return run


def on_jax(config: ModelConfig, policy: Policy, weights: Arrays) -> Pass:
    """Returns the decoder's forward and backward pass on JAX."""
    import jax

    from halfstep.jax.model import Decoder

    formats, base = precisions(policy, Decoder(config).module_names()), base_precision(policy)
    model = Decoder(config, lambda name: formats.get(name, base))
    params = {name: jax.numpy.asarray(weight) for name, weight in weights.items()}
    compiled = jax.jit(jax.value_and_grad(model.loss))

    def run(tokens: np.ndarray, targets: np.ndarray) -> tuple[float, Arrays]:
        loss, grads = compiled(params, tokens, targets)
        return float(loss), {name: np.asarray(grad, np.float32) for name, grad in grads.items()}

    return run


def on_mlx(config: ModelConfig, policy: Policy, weights: Arrays) -> Pass:
    """Returns the decoder's forward and backward pass on MLX."""
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten, tree_unflatten

    from halfstep.mlx.convert.apply import apply
    from halfstep.mlx.model import Decoder

    model = Decoder(config)
    model.update(tree_unflatten([(name, mx.array(weight)) for name, weight in weights.items()]))
    apply(model, policy, model.module_names())
    both = nn.value_and_grad(model, lambda tokens, targets: model.loss(tokens, targets))

    def run(tokens: np.ndarray, targets: np.ndarray) -> tuple[float, Arrays]:
        loss, grads = both(mx.array(tokens), mx.array(targets))
        return loss.item(), {name: np.array(grad.astype(mx.float32)) for name, grad in tree_flatten(grads)}

    return run


BACKENDS = {"torch": on_torch, "jax": on_jax, "mlx": on_mlx}


def difference(grads: Arrays, expected: Arrays) -> float:
    """Returns the norm of the difference of all gradients, relative to the norm of the expected ones."""
    off = sum(np.square(np.float64(grads[name]) - expected[name]).sum() for name in expected)
    whole = sum(np.square(np.float64(grad)).sum() for grad in expected.values())
    return float(np.sqrt(off / whole))


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", nargs="?", default="bf16-mixed")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args(arguments)

    config = ModelConfig(
        vocabulary=256, context=32, layers=options.layers, width=options.width, heads=4, zero_init=False
    )
    weights = dict(initial_weights(config, seed=0))
    text = np.frombuffer((__doc__ or "").encode()[: 4 * 33], np.uint8).reshape(4, 33).astype(np.int64)
    tokens, targets = np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])

    exact_loss, exact = on_torch(config, Policy(), weights)(tokens, targets)
    print(f"{config.num_parameters} parameters, {tokens.size} tokens; differences are from fp32 on torch")
    print(f"{'backend':<9}{'policy':<14}{'loss':>10}{'loss - fp32':>13}{'gradients':>11}{'ms':>8}")
    for spec in dict.fromkeys(["fp32", options.policy]):
        for name, make in BACKENDS.items():
            try:
                run = make(config, Policy.parse(spec), weights)
                run(tokens, targets)  # compiles
                start = time.perf_counter()
                loss, grads = run(tokens, targets)
                took = time.perf_counter() - start
            except (HalfstepError, ImportError) as error:
                print(f"{name:<9}{spec:<14}  {error}")
                continue
            off = (loss - exact_loss) / tokens.size
            print(
                f"{name:<9}{spec:<14}{loss / tokens.size:>10.6f}{off:>13.1e}{difference(grads, exact):>11.1e}"
                f"{took * 1e3:>8.1f}"
            )


if __name__ == "__main__":
    main()
