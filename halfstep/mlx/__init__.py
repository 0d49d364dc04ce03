"""The MLX backend: how a policy runs on MLX arrays. Each public name is loaded when it is used, and MLX with it.

run = prepare(model, optimizer, "bf16-mixed")        # any mlx.nn model, any mlx optimizer
result = run.step(loss_fn, micro_batches)            # loss_fn(model, batch)
"""

import lazy_loader

from halfstep.core.errors import explain_missing

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = explain_missing(_load, __name__, "mlx.core")
