"""The MLX backend: how a policy runs on MLX arrays.

    from halfstep.mlx import prepare
    run = prepare(model, optimizer, "bf16-mixed")        # any mlx.nn model, any mlx optimizer
    result = run.step(loss_fn, micro_batches)            # loss_fn(model, batch)

Importing this package imports no framework: each public name is loaded when it is used.
"""

import lazy_loader

from halfstep.core.errors import explain_missing

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = explain_missing(_load, __name__, "mlx.core")
