"""`measured` means the same on the backends that time layers: from the same times the same layers and words."""

import jax
import pytest
from torch import nn

from halfstep.core.policy import Policy
from halfstep.core.precision import precisions
from halfstep.jax.convert.fp8_choice import measure_products
from halfstep.jax.measure import Product
from halfstep.torch.convert.fp8_choice import measure_all
from halfstep.torch.convert.plan import plans_of

SIZES = {"up": (16, 64), "down": (64, 16), "again": (16, 64), "head": (16, 16)}  # (in, out)
DIMS = (((1,), (0,)), ((), ()))
POLICIES = [
    "bf16-mixed,compute=e4m3:measured,grad=e5m2",
    "bf16-mixed; up: compute=e4m3:measured; head: compute=e4m3",
]


def timer(seconds):
    """Returns a timer for a device where fp8 takes so many milliseconds by (in, out), and bf16 one."""

    def time(work, precisions):
        size = work.matrix if isinstance(work, Product) else (work.inputs, work.outputs)
        found = seconds[size]
        if isinstance(found, Exception):
            raise found
        return [1e-3, found * 1e-3]

    return time


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "seconds",
    [
        {(16, 64): 0.4, (64, 16): 0.99, (16, 16): 2.0},
        {(16, 64): 0.1, (64, 16): 0.1, (16, 16): 0.1},
        {(16, 64): 1 / 1.02, (64, 16): 1.0, (16, 16): RuntimeError("no kernel")},
    ],
)
def test_torch_and_jax_choose_alike_and_say_so_in_the_same_words(policy, seconds):
    ruled = precisions(Policy.parse(policy), [*SIZES])
    model = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in SIZES.items()})
    torch = measure_all(plans_of(model), ruled, {}, 64, compiled=True, timer=timer(seconds), clock=lambda: 0.0)
    cpu = jax.devices("cpu")[0]
    found = {
        name: [(Product((64, size[0]), size, DIMS, False, False, cpu), ruled[name])]
        for name, size in SIZES.items()
        if ruled[name].measured
    }
    ours = measure_products(found, timer=timer(seconds), clock=lambda: 0.0)
    assert ours == torch
    assert ours.notes == torch.notes
    assert ours.description == torch.description.replace("timed eager", "timed compiled")  # torch compiles on GPUs
    given = dict.fromkeys(ours.narrow, True)
    assert ours.adopt(given).notes == torch.adopt(given).notes
