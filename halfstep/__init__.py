"""halfstep trains transformers in half precision and proves that nothing was lost.

Importing it imports no framework: each public name is loaded when it is used. The backends are
`halfstep.torch`, `halfstep.jax` and `halfstep.mlx`.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
