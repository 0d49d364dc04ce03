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
from tests.conformance.fp8_device import Device

SIZES = {"up": (16, 64), "down": (64, 16), "again": (16, 64), "head": (16, 16)}  # (in, out)
DIMS = (((1,), (0,)), ((), ()))
POLICIES = [
    "bf16-mixed,compute=e4m3:measured,grad=e5m2",
    "bf16-mixed; up: compute=e4m3:measured; head: compute=e4m3",
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "seconds",
    [
        {(16, 64): 0.4e-3, (64, 16): 0.99e-3, (16, 16): 2e-3},
        {(16, 64): 0.1e-3, (64, 16): 0.1e-3, (16, 16): 0.1e-3},
        {(16, 64): 1e-3 / 1.02, (64, 16): 1e-3, (16, 16): RuntimeError("no kernel")},
    ],
)
def test_torch_and_jax_choose_alike_and_say_so_in_the_same_words(policy, seconds):
    ruled = precisions(Policy.parse(policy), [*SIZES])
    model = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in SIZES.items()})
    torch = measure_all(plans_of(model), ruled, {}, 64, compiled=True, timer=Device(seconds), clock=lambda: 0.0)
    cpu = jax.devices("cpu")[0]
    found = {
        name: [(Product((64, size[0]), size, DIMS, False, cpu), ruled[name])]
        for name, size in SIZES.items()
        if ruled[name].measured
    }
    ours = measure_products(found, timer=Device(seconds), clock=lambda: 0.0)
    assert ours == torch
    assert ours.notes == torch.notes
    assert ours.description == torch.description.replace("timed eager", "timed compiled")  # torch compiles on GPUs
    given = dict.fromkeys(ours.narrow, True)
    assert ours.adopt(given).notes == torch.adopt(given).notes
