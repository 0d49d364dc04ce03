"""Which kernel computes attention, and that it is reported: asked of torch, and compared with what then runs.

The CPU has one fused kernel, so that the choice can be tested here too; it is reported on GPUs only.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep.config.load import load
from halfstep.core.policy import Policy
from halfstep.torch.layers import casts_for
from halfstep.torch.numerics import attention
from halfstep.torch.numerics.attention import UNFUSED, attention_kernel, kernel_of
from halfstep.torch.run import prepare
from halfstep.torch.session import Session

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POLICY = "bf16-mixed" if DEVICE == "cuda" else "fp32"
SMALL = ["model.context=16", "model.layers=2", "model.width=32", "model.heads=2", "optimizer.name=adamw"]
SMALL += ["training.batch=2", "training.micro_batches=1", "training.compile=false"]
# A part of the name of the operation that torch runs, by the kernel's name.
OPERATIONS = {"flash": "flash_attention", "memory-efficient": "efficient_attention", "cuDNN": "cudnn_attention"}


@pytest.fixture(autouse=True)
def reported_here(monkeypatch):
    monkeypatch.setattr(attention, "FUSED_ON", (DEVICE,))


def heads(count=2):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    return torch.randn(2, 16, count, 16, device=DEVICE, dtype=dtype, requires_grad=True).transpose(1, 2)


def operations(work):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    return {event.key for event in profiler.key_averages()}


def test_the_kernel_that_is_named_is_the_one_that_runs():
    q, k, v = heads(), heads(), heads()
    name = kernel_of(q, k, v, causal=True).removeprefix("by torch's ").removesuffix(" kernel")
    ran = operations(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert any(OPERATIONS[name] in operation for operation in ran)
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_of(q, k, v, causal=True).startswith(UNFUSED)
        ran = operations(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert "aten::_scaled_dot_product_attention_math" in ran


def test_why_torch_takes_no_kernel_is_reported_once_for_each_reason(monkeypatch):
    def refuse(reason):
        return lambda given, debug: (
            debug and warnings.warn(f"{reason}. (Triggered internally at a.cpp:1.)", stacklevel=1)
        )

    reasons = {"flash": "heads are too wide", "efficient": "heads are too wide", "cudnn": "it is turned off"}
    for kernel, reason in reasons.items():
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{kernel}_attention", refuse(reason))
    with sdpa_kernel(SDPBackend.MATH):
        found = kernel_of(heads(), heads(), heads())
    assert found == f"{UNFUSED}: heads are too wide; it is turned off"


def test_a_softmax_that_no_kernel_has_is_the_reason():
    casts = casts_for("bf16-mixed,softmax=bf16")
    assert attention_kernel(heads(), heads(), heads(), casts).startswith(f"{UNFUSED}: softmax=bf16")


@pytest.mark.parametrize("groups", [1, 2])
def test_our_decoder_reports_it_and_warns_if_scores_are_stored(groups):
    config = load("tiny", [*SMALL, f"model.kv_heads={2 // groups}"])
    session = Session(config, Policy.parse(POLICY), DEVICE)
    (kernel,) = session.model.attention_kernels()
    assert kernel.removeprefix("by torch's ").removesuffix(" kernel") in OPERATIONS
    assert f"  attention: {kernel}" in session.run.summary().splitlines()
    assert not any(note.startswith("attention") for note in session.notes)
    with sdpa_kernel(SDPBackend.MATH):
        assert any(note.startswith(f"attention: {UNFUSED}: ") for note in session.notes)


def test_our_decoder_reports_how_its_loss_is_computed_and_why():
    wanted = "with the head, its gradient over the logits" if DEVICE == "cuda" else "of logits in fp32: it needs"
    for policy, expected in (("bf16-mixed", wanted), ("fp32", "of logits in fp32: logits are neither bf16 nor")):
        lines = Session(load("tiny", SMALL), Policy.parse(policy), DEVICE).run.summary().splitlines()
        assert [line for line in lines if line.startswith(f"  loss: {expected}")], lines


def test_our_decoder_reports_where_compiled_code_computes_its_gelu():
    on_gpu = "if compiled, by the matmuls around it"
    apart = "apart from the matmuls: "
    for settings, policy, expected in (
        ((), "bf16-mixed", on_gpu if DEVICE == "cuda" else f"{apart}it needs an NVIDIA GPU"),
        ((), "fp32", f"{apart}its layers are not native, or not in bf16"),
        (("model.mlp_width=60",), "bf16-mixed", f"{apart}a size of its layers is not a multiple of 8"),
        ((), "bf16-mixed; blocks.0.mlp.down: compute=fp32", f"{apart}its layers have formats of their own"),
    ):
        config = load("tiny", [*SMALL, "model.mlp=gelu", *settings])
        lines = Session(config, Policy.parse(policy), DEVICE).run.summary().splitlines()
        assert [line for line in lines if line.startswith(f"  GELU: {expected}")], lines


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.filterwarnings("ignore:.* attention has been runtime disabled")  # as asked, below
def test_of_a_prepared_model_the_list_of_functions_has_it():
    model = Attending().to(DEVICE)
    run = prepare(model, torch.optim.AdamW(model.parameters()), "bf16-mixed")
    x = torch.randn(2, 16, 32, device=DEVICE)
    for where, expected in ((nullcontext(), ", by torch's "), (sdpa_kernel(SDPBackend.MATH), f", {UNFUSED}: ")):
        with where:
            reached = run.coverage(lambda given: model(given).float().sum(), x)
        (row,) = [row for row in reached.rows if row.function.endswith("scaled_dot_product_attention")]
        assert expected in row.why
        assert row not in reached.uncovered
