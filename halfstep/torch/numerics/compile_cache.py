"""What torch.compile keeps between processes: nothing of ours may prevent it, and nothing stale may come back.

torch keeps two things in its folder (TORCHINDUCTOR_CACHE_DIR): the code of a graph, by the graph (FxGraphCache),
and the graphs of a forward and backward pass, by what dynamo captured (AOTAutogradCache). A process that finds the
second does not trace autograd again. By default torch keeps no graph with an autograd.Function in it, such as our
emulated layers. What a Function does is in dynamo's graph, so the key has it
(https://github.com/pytorch/pytorch/pull/149751).

Some code of ours is not in that graph: custom operations, and functions that dynamo does not open, such as linear
layers (matmul.py, fp8/linear.py). So a digest of all our code is part of every key.

Both are settings of the process. TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD=0 overrules the first.
"""

from collections.abc import Callable
from typing import Any

import torch._functorch.config
import torch.compiler.config

from halfstep.core.cache import code_digest


def keep_compiled() -> None:
    """Lets torch keep what it compiles from now on, for this version of our code."""
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    ours, tag = f"halfstep-{code_digest('torch')}", torch.compiler.config.cache_key_tag
    if ours not in tag:
        torch.compiler.config.cache_key_tag = f"{tag} {ours}".strip()


def allow_in_graph(*functions: Callable[..., Any]) -> None:
    """Makes dynamo put calls of functions into its graph unopened, and torch keep such graphs.

    What they return must follow from their arguments and our code, and they must be importable by their names.
    """
    import torch._inductor.config as inductor  # imports dynamo, which takes seconds

    names = {f"{function.__module__}.{function.__name__}": "halfstep" for function in functions}
    inductor.unsafe_marked_cacheable_functions = {**inductor.unsafe_marked_cacheable_functions, **names}
    for function in functions:
        torch.compiler.allow_in_graph(function)
