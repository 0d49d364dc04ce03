"""The PyTorch backend: how a policy runs on torch tensors.

    from halfstep.torch import prepare
    run = prepare(model, optimizer, "bf16-mixed")        # any nn.Module, any torch.optim optimizer, or a list
    result = run.step(loss_fn, micro_batches)            # loss_fn(batch)

After `prepare` a plain loop in bf16, `loss.backward(); optimizer.step()`, makes the same updates. Without
optimizers, `run = prepare(model, "bf16-mixed")`, a model is evaluated; `run.attach(optimizers)` lets it train.

To build with: `CastedLinear` multiplies in its own precision; `LayerNorm`, `RMSNorm`, `Softmax`,
`CrossEntropyLoss` and the functions `layer_norm`, `rms_norm`, `softmax`, `cross_entropy` are torch's, fp32 inside.
`linear` and `attention` take a `Casts` last: `linear(x, weight, None, casts_for("bf16-mixed"))`.

Importing this package imports no framework: each public name is loaded when it is used.
"""

import lazy_loader

from halfstep.core.errors import explain_missing

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = explain_missing(_load, __name__, "torch")
