import pytest

from halfstep.core.devices import CPU_FEATURES, MULTIPLIED, Device, native
from halfstep.core.formats import Format, parse


def nvidia(name, major, minor):
    return Device("nvidia", name, capability=(major, minor))


def cpu(machine, *flags):
    return Device("cpu", "a CPU", architecture=machine, features=frozenset(flags))


H100, N1 = nvidia("H100", 9, 0), cpu("aarch64", "asimdhp")
MI300 = Device("amd", "MI300X", architecture="gfx942")
# What each device multiplies natively; everything else must be refused.
TABLE = [
    (nvidia("GTX 1080", 6, 1), "fp32"),
    (nvidia("V100", 7, 0), "fp32 fp16"),
    (nvidia("T4", 7, 5), "fp32 fp16"),
    (nvidia("A100", 8, 0), "fp32 tf32 bf16 fp16"),
    (nvidia("Jetson Orin", 8, 7), "fp32 tf32 bf16 fp16"),
    (nvidia("L4", 8, 9), "fp32 tf32 bf16 fp16 e4m3 e5m2"),
    (H100, "fp32 tf32 bf16 fp16 e4m3 e5m2"),
    (nvidia("B200", 10, 0), "fp32 tf32 bf16 fp16 e4m3 e5m2"),
    (nvidia("RTX 5090", 12, 0), "fp32 tf32 bf16 fp16 e4m3 e5m2"),
    (Device("amd", "MI50", architecture="gfx906"), "fp32"),
    (Device("amd", "MI100", architecture="gfx908"), "fp32 bf16 fp16"),
    (Device("amd", "MI250", architecture="gfx90a"), "fp32 bf16 fp16"),
    (MI300, "fp32 tf32 bf16 fp16 e4m3fnuz e5m2fnuz"),
    (Device("amd", "MI355X", architecture="gfx950"), "fp32 bf16 fp16 e4m3 e5m2"),
    (Device("amd", "RX 6900", architecture="gfx1030"), "fp32"),
    (Device("amd", "RX 7900", architecture="gfx1100"), "fp32 bf16 fp16"),
    (Device("amd", "RX 9070", architecture="gfx1201"), "fp32 bf16 fp16 e4m3 e5m2"),
    (Device("amd", "unnamed"), "fp32"),
    (Device("intel", "Max 1550", architecture="xe-hpc"), "fp32 tf32 bf16 fp16"),
    (Device("intel", "Arc B580", architecture="xe2"), "fp32 tf32 bf16 fp16"),
    (Device("intel", "Arc A770", architecture="arc"), "fp32 bf16 fp16"),
    (Device("intel", "Meteor Lake", architecture="xe-lpg"), "fp32"),
    (Device("intel", "unnamed"), "fp32"),
    (Device("apple", "Apple M1", architecture="m1"), "fp32 fp16"),
    (Device("apple", "Apple M2 Max", architecture="m2"), "fp32 fp16"),
    (Device("apple", "Apple M3", architecture="m3"), "fp32 bf16 fp16"),
    (Device("apple", "Apple M10", architecture="m10"), "fp32 bf16 fp16"),
    (Device("apple", "Apple GPU"), "fp32 fp16"),
    (Device("tpu", "TPU v3", architecture="v3"), "bf16"),
    (Device("tpu", "TPU v5 lite", architecture="v5e"), "bf16"),
    (Device("tpu", "TPU v6 lite", architecture="v6e"), "bf16"),
    (Device("tpu", "TPU7x", architecture="v7x"), "bf16 e4m3 e5m2"),
    (Device("tpu", "TPU"), "bf16"),
    (N1, "fp32"),  # Neoverse-N1
    (cpu("aarch64", "asimdhp", "asimdfhm", "bf16", "i8mm"), "fp32 bf16 fp16"),  # Neoverse-V1
    (cpu("x86_64"), "fp32"),
    (cpu("x86_64", "avx512_bf16"), "fp32 bf16"),  # Zen 4
    (cpu("x86_64", "avx512_bf16", "amx_bf16", "avx512_fp16"), "fp32 bf16"),  # Sapphire Rapids
    (cpu("x86_64", "amx_bf16", "amx_fp16"), "fp32 bf16 fp16"),  # Granite Rapids
]


@pytest.mark.parametrize(("device", "formats"), TABLE, ids=lambda value: getattr(value, "name", ""))
def test_what_each_device_multiplies(device, formats):
    result = {fmt: native(fmt, device) for fmt in MULTIPLIED}
    assert {str(fmt) for fmt, support in result.items() if support} == set(formats.split())
    for support in result.values():
        assert support.reason
        assert "\n" not in support.reason
        assert not support.reason.endswith(".")


@pytest.mark.parametrize("device", [device for device, _ in TABLE], ids=str)
@pytest.mark.parametrize("name", ["e2m1", "e3m2", "e2m3", "e4m3ieee", "e3m4ieee", "e8m7fnuz"])
def test_other_formats_are_emulated_everywhere(name, device):
    support = native(Format.parse(name), device)
    assert not support
    assert f"{name}; it can only be emulated" in support.reason


@pytest.mark.parametrize(
    ("fmt", "device", "reason"),
    [
        ("bf16", nvidia("T4", 7, 5), "compute capability 7.5; bf16 needs 8.0"),
        ("bf16", nvidia("A100", 8, 0), "compute capability 8.0; bf16 needs 8.0"),
        ("e4m3", nvidia("A100", 8, 0), "compute capability 8.0; e4m3 needs 8.9"),
        (
            "e4m3fnuz",
            H100,
            "compute capability 9.0; NVIDIA multiplies e4m3, which is a different format from e4m3fnuz",
        ),
        ("e4m3", MI300, "the matrix units of gfx942 multiply fp32, bf16, fp16, tf32, e4m3fnuz, e5m2fnuz"),
        ("bf16", Device("apple", "M1", architecture="m1"), "m1 converts bf16 in software; bf16 needs m3"),
        ("fp32", Device("tpu", "TPU"), "a TPU's matrix unit makes an fp32 product of several bf16 products"),
        ("bf16", N1, "the CPU lacks `amx_bf16`, `avx512_bf16`, `bf16` or `svebf16`"),
        ("fp16", N1, "the CPU's asimdhp sums in fp16; fp16 with fp32 sums needs `amx_fp16` or `asimdfhm`"),
        ("bf16", cpu("x86_64", "avx512_bf16"), "the CPU has avx512_bf16, which multiplies bf16 and sums in fp32"),
        ("bf16", Device("intel", "Xe"), "the architecture of Xe is not known, and so whether it multiplies bf16"),
    ],
)
def test_the_reason_names_the_fact(fmt, device, reason):
    assert native(parse(fmt), device).reason == reason


def test_a_device_reads_well_and_keeps_the_flags_that_decide():
    assert (str(nvidia("T4", 7, 5)), str(MI300)) == ("T4 (compute capability 7.5)", "MI300X (gfx942)")
    assert str(Device("tpu", "TPU")) == "TPU"
    assert {"avx512_bf16", "amx_bf16", "avx512_fp16", "bf16", "asimdhp", "i8mm"} <= CPU_FEATURES
