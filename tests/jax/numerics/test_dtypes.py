from types import SimpleNamespace

import jax
import pytest

from halfstep.core.choice import Support
from halfstep.core.devices import Device
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16, E4M3, FP32
from halfstep.jax.numerics.dtypes import answer, as_device, as_devices, describe

V5E = Device("tpu", "TPU v5 lite", architecture="v5e")
TPUS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5p": "v5p", "TPU7x": "v7x", "another": ""}


def test_the_generation_decides_on_a_tpu():
    assert answer(BF16, V5E) == Support(True, "the matrix unit of every TPU since v2 multiplies bf16")
    assert answer(E4M3, V5E) == Support(False, "TPU v5e; e4m3 needs v7; `emulate=true` runs it emulated")
    assert "several bf16 products" in answer(FP32, V5E).reason


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "expected"),
    [
        ("gpu", "NVIDIA H200", "9.0", Device("nvidia", "NVIDIA H200", capability=(9, 0))),
        ("gpu", "NVIDIA B200", "10.0", Device("nvidia", "NVIDIA B200", capability=(10, 0))),
        ("gpu", "MI250", "gfx90a:sramecc+:xnack-", Device("amd", "MI250", architecture="gfx90a")),
        ("rocm", "MI300X", "gfx942", Device("amd", "MI300X", architecture="gfx942")),
        *(("tpu", name, None, Device("tpu", name, architecture=generation)) for name, generation in TPUS.items()),
    ],
)
def test_a_device_by_what_jax_says_of_it(platform, kind, capability, expected):
    given = SimpleNamespace(platform=platform, device_kind=kind)
    if capability is not None:
        given.compute_capability = capability
    assert describe(given) == expected


def test_devices_by_name_and_those_of_others_are_refused(monkeypatch):
    assert as_device("cpu") == as_device("cpu:0") == jax.local_devices(backend="cpu")[0]
    assert as_device(jax.devices()[0]) is jax.devices()[0]
    for name in ("metal", "cuda0", "CUDA", "cuda:", "meta", "", "cuda:1-0", "cuda:-1", "cuda-1"):
        with pytest.raises(HalfstepError, match=f"`{name}` is not a JAX device") as caught:
            as_device(name)
        assert "`cuda:1`" in caught.value.hint
    with pytest.raises(HalfstepError, match="platform `METAL`") as caught:
        describe(SimpleNamespace(platform="METAL", device_kind="Apple M3"))
    assert caught.value.hint
    monkeypatch.setattr(jax, "local_devices", lambda backend: ["first", "second"])
    assert as_device("cuda:1") == "second"
    assert as_devices("cuda:0-1") == ["first", "second"]
    assert as_device("cuda:0-1") == "first"
    with pytest.raises(HalfstepError, match=r"no `cuda:2`; JAX sees 2 `cuda`") as caught:
        as_device("cuda:2")
    assert "cuda:0" in caught.value.hint
