"""Every kernel compiles for NVIDIA GPUs, which Triton does without one; in a process that does not interpret."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"), pytest.mark.prove]
ADAMW = {
    **dict.fromkeys(("table", "sizes"), "*i64"),
    **dict.fromkeys(("owners", "chunks"), "*i32"),
    **dict.fromkeys(("paces", "roots", "rate", "factor", "found_inf", "partial"), "*fp32"),
    **dict.fromkeys(("b1", "rest1", "b2", "rest2", "eps", "decay"), "fp32"),
    "tensors": "i32",
}
ROWS = {
    **dict.fromkeys(("xs", "ys", "gs", "dxs"), "*bf16"),
    **dict.fromkeys(("stats", "gains", "biases", "partial"), "*fp32"),
    "rows": "i32",
    "eps": "fp32",
}
PRODUCT = {
    **dict.fromkeys(("xs", "outs"), "*bf16"),
    **dict.fromkeys(("size", "inner"), "i32"),
    "b": "fp32",
    "c": "fp32",
}
LOSS = {
    **dict.fromkeys(("logits", "grads"), "*bf16"),
    **dict.fromkeys(("losses", "lses", "factors"), "*fp32"),
    **dict.fromkeys(("smoothing", "cap", "z_loss", "factor", "scale"), "fp32"),
    "targets": "*i64",
    "ignored": "i32",
}
PADDED = {"WIDTH": 50257, "PADDED": 50264, "STRIDE": 50264, "GRAD_STRIDE": 50264, "BLOCK": 8192}
PADDED |= {"CODES": False, "KEPT": 0, **dict.fromkeys(("MANTISSA", "LOWEST", "CODE_MANTISSA", "CODE_LOWEST"), 0)}
CODED = {**PADDED, **dict.fromkeys(("WIDTH", "PADDED", "STRIDE"), 50304), "GRAD_STRIDE": 100608}
CODED |= {"CODES": True, "KEPT": 2}
WORDS = {**dict.fromkeys(("xs", "ys"), "*i32"), "groups": "i32"}
WIDE, NARROW = {"width": 768, "COLUMNS": 1024, "ROWS": 1}, {"width": 64, "COLUMNS": 64, "ROWS": 16}
CASES = [
    ("adamw", "_count", ADAMW, {"COUNTED": 128}),
    ("adamw", "_adamw", ADAMW, {"NARROW": False, "CHUNK": 512}),
    ("adamw", "_adamw", ADAMW, {"NARROW": True, "CHUNK": 512}),
    ("norm", "_squares", ADAMW, {"CHUNK": 4096}),
    ("normalize", "_forward", ROWS, {**WIDE, "GAIN": True, "BIAS": True, "CENTERED": True}),
    ("normalize", "_forward", ROWS, {**NARROW, "GAIN": False, "BIAS": False, "CENTERED": False}),
    ("normalize", "_backward", ROWS, {**WIDE, "GAIN": True, "CENTERED": True}),
    ("normalize", "_backward", ROWS, {**NARROW, "GAIN": False, "CENTERED": False}),
    ("symmetric", "_symmetric", PRODUCT, {"ADDS": False, "BLOCK": 128, "DEPTH": 64}),
    ("symmetric", "_symmetric", PRODUCT, {"ADDS": True, "BLOCK": 128, "DEPTH": 64}),
    (
        "cross_entropy",
        "_row",
        LOSS,
        {**PADDED, **dict.fromkeys(("LOSS", "GRAD", "CAP", "SMOOTHING", "Z_LOSS"), True)},
    ),
    (
        "cross_entropy",
        "_row",
        LOSS,
        {**PADDED, "LOSS": False, "GRAD": True, "CAP": False, "SMOOTHING": False, "Z_LOSS": False},
    ),
    (
        "cross_entropy",
        "_row",
        LOSS,
        {**PADDED, "KEPT": 3, "LOSS": True, "GRAD": True, "CAP": False, "SMOOTHING": False, "Z_LOSS": True},
    ),
    (
        "cross_entropy",
        "_row",
        {**LOSS, "grads": "*fp8e5"},
        {**CODED, "LOSS": True, "GRAD": True, "CAP": False, "SMOOTHING": False, "Z_LOSS": False},
    ),
    ("transpose", "_transpose", WORDS, {"WORDS": 12576, "STRIDE": 25152, "OUT_STRIDE": 25152, "BLOCK": 32}),
]
COMPILE = """
import importlib, inspect, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for module, name, types, constants in json.load(sys.stdin):
    kernel = getattr(importlib.import_module(f"halfstep.torch.kernels.{module}"), name)
    names = inspect.signature(kernel.fn).parameters
    signature = {p: "constexpr" if p in constants else types[p] for p in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    for capability in (80, 90):
        target = GPUTarget("cuda", capability, 32)
        # As many warps as a row is given.
        options = {"enable_fp_fusion": False, "num_warps": 16 if name == "_row" else 4}
        code = triton.compile(source, target=target, options=options)
        assert code.asm["ptx"]
"""


def test_kernels_compile_for_the_gpus_that_we_name():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    given = {"input": json.dumps(CASES), "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", COMPILE], check=False, **given)
    assert done.returncode == 0, done.stderr[-2000:]
