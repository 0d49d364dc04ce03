"""`halfstep probe` as people see it, with a faked machine."""

import json

import pytest

from halfstep.cli.main import run
from halfstep.config.load import load
from halfstep.core.choice import Choice, Support, Timing
from halfstep.core.devices import Device
from halfstep.core.errors import how_to_install
from halfstep.core.formats import BF16, E4M3, E5M2, FP32
from halfstep.tools import probe
from halfstep.tools.probe import BackendResult, DeviceResult, ProbeResult

SHAPE = (256, 256, 1024)


@pytest.fixture
def asked(monkeypatch):
    device = DeviceResult(
        "cpu",
        Device("cpu", "Neoverse-N1", architecture="aarch64"),
        (Timing(FP32, SHAPE, (2e-3,)), Timing(BF16, SHAPE, (0.574,))),
        (Timing(FP32, SHAPE, (2e-3,)), Timing(E5M2, SHAPE, (1e-3,))),
        ((FP32, Support(True, "every CPU multiplies fp32")), (E4M3, Support(False, "no CPU multiplies e4m3"))),
        Choice("fp32", "bf16 matmuls are 287x slower than fp32"),
    )
    torch = BackendResult("torch", "2.13.0", (device,), ("cuda",))
    jax = BackendResult("jax", missing="jax is not installed", install=how_to_install("jax"))
    calls = []

    def played(backends, budget, *, device, config, say):
        calls.append((backends, budget, device, config.title, config.model.width))
        return ProbeResult((torch, jax))

    monkeypatch.setattr(probe, "run", played)
    return calls


def test_tables_for_people(asked, capsys):
    assert run(["probe"]) == 0
    out, err = capsys.readouterr()
    assert [line.rstrip() for line in out.splitlines() if line.strip()] == [
        " format  timed   shape          ms  fp32 ms  times fp32",
        " " + "─" * 54,
        " bf16    matmul  256x256x1024  574        2     0.00348",
        " e5m2    matmul  256x256x1024    1        2           2",
        " format  runs  why",
        " " + "─" * 39,
        " fp32    yes   every CPU multiplies fp32",
        " e4m3    no    no CPU multiplies e4m3",
        " choice  why",
        " " + "─" * 46,
        " fp32    bf16 matmuls are 287x slower than fp32",
    ]
    assert err.splitlines() == [
        "torch 2.13.0, cpu: Neoverse-N1 (aarch64)",
        "also available: cuda; choose one with --device",
        "jax is not installed: in the checkout of halfstep, run: pip install '.[jax]'",
    ]
    tiny = load("tiny")
    assert asked == [(None, 3.0, None, tiny.title, tiny.model.width)]


def test_data_for_programs(asked, capsys):
    sizes = ["gpt2", "--set", "model.width=96"]
    assert run(["probe", *sizes, "--backend", "torch", "--device", "cuda:1", "--budget", "0.5", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["backends"][0]["devices"][0]["choice"]["preset"] == "fp32"
    assert asked == [(["torch"], 0.5, "cuda:1", load("gpt2").title, 96)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["probe", "--backend", "torhc"],
         "error: unknown backend `torhc`; it may be `torch`, `jax` or `mlx`\n\nhint: did you mean `torch`?\n"),
        (["probe", "--backend", "torch", "--device", "gpu"],
         "error: `gpu` is not a torch device\n\nhint: write `cpu`, `cuda`, `cuda:1`, `xpu` or `mps`\n"),
        (["probe", "--backend", "torch", "--budget", "0"],
         "error: the time budget is 0 seconds; it must be above 0 and at most 3600\n\nhint: 3 is usual\n"),
        (["probe", "--width", "64"],
         "error: unknown option: --width\n\nhint: it is a setting: `--set model.width=64`\n"),
        (["probe", "--steps", "5"],
         "error: unknown option: --steps. Did you mean --set?\n\nhint: see `halfstep probe --help`\n"),
        *(
            (["probe", "--set", f"{key}={value}"],
             f"error: --set {key}={value} changes nothing here: only sizes do, model.* and training.batch\n\n"
             "hint: leave it out; --backend names a framework\n")
            for key, value in {"policy": "bf16", "training.steps": 5, "backend": "jax", "policy.norm": "bf16"}.items()
        ),
    ],
)  # fmt: skip
def test_mistakes(arguments, expected, capsys):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.removeprefix("loading torch\n")) == ("", expected)
