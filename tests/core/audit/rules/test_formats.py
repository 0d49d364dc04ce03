"""Rules HS3xx and HS4xx: each finds its hazard in a record and is silent on the same record without it."""

import pytest

from halfstep.core.audit.engine import check
from halfstep.core.audit.record import Buffer, Call, Operation, Record
from halfstep.core.rules import Rule


def norm(module, inside="fp32", inputs=("bf16", "fp32")):
    return Operation(module, "norm", list(inputs), ["bf16"], inside, 4, place="model.py:3")


def product(module, inside="bf16", **more):
    return Operation(module, "matmul", [inside] * 2, [inside], inside, 4, **more)


def gradient(underflow, elements=100):
    return Operation(
        "blocks.2.up", "matmul", outputs=["fp16"], backward=True, underflow=underflow, elements=elements
    )


def record(*operations, **more):
    return Record("script", operations=list(operations), **more)


def reduced(format):
    return record(calls=[Call("reduce", target="reduce_scatter", format=format, numbers={"ranks": 8.0})])


def autocast(format, switch, device="cuda"):
    return record(calls=[Call("autocast", format=format)], switches={"device": device, switch: True})


layers = [product(f"blocks.{i}.up") for i in range(8)]
loss = Operation("", "loss", ["bf16"], ["bf16"], "bf16", 1, function="cross_entropy", place="train.py:9")
wide_loss = Operation("", "loss", ["bf16"], ["fp32"], "fp32", 1, function="cross_entropy", place="train.py:9")
fp32 = [product(f"blocks.{i}.up", "fp32") for i in range(8)]

CASES = {  # rule: what it must find, what it must not, and the names that the finding has
    "HS302": (reduced("bf16"), reduced("fp32"), []),
    "HS303 bf16": (autocast("bf16", "bf16_reduced_sums"), autocast("bf16", "fp16_reduced_sums"), []),
    "HS303 a GPU": (autocast("bf16", "bf16_reduced_sums"), autocast("bf16", "bf16_reduced_sums", "cpu"), []),
    "HS303 fp16": (autocast("fp16", "fp16_sums"), autocast("bf16", "fp16_sums"), []),
    "HS401 statistics": (record(norm("a"), norm("b", "bf16")), record(norm("a"), norm("b")), ["b"]),
    "HS401 one of many": (
        record(norm("a"), norm("b"), norm("c", inputs=("bf16", "bf16"))),
        record(*(norm(name, inputs=("bf16", "bf16")) for name in "abc")),  # all of them: that is HS101
        ["c"],
    ),
    "HS402": (
        record(Operation("attn", "softmax", ["bf16"], ["bf16"], "bf16", 1)),
        record(Operation("attn", "softmax", ["bf16"], ["bf16"], "fp32", 1)),
        ["attn"],
    ),
    "HS403": (
        record(Operation("moe.router", "router", ["bf16"], ["bf16"], "bf16", 1)),
        record(Operation("moe.router", "router", ["fp32"], ["fp32"], "fp32", 1)),
        ["moe.router"],
    ),
    "HS404 function": (record(loss), record(wide_loss), []),
    "HS404 backward": (record(Operation("", "loss", ["fp16"], ["fp16"], "fp16", 1)), record(wide_loss), []),
    "HS405 frequencies": (
        record(buffers=[Buffer("rope.inv_freq", "bf16", "rope")]),
        record(buffers=[Buffer("rope.inv_freq", "fp32", "rope"), Buffer("mask", "bf16")]),
        ["rope.inv_freq"],
    ),
    "HS405 running": (
        record(buffers=[Buffer("bn.running_mean", "fp16", "running", was="fp32")]),
        record(buffers=[Buffer("bn.running_mean", "fp32", "running")]),
        ["bn.running_mean"],
    ),
    "HS406": (
        record(*layers, product("blocks.3.attn", "fp32", promoted=True)),
        record(*layers, product("lm_head", "fp32")),  # asked for
        ["blocks.3.attn"],
    ),
    "HS407": (
        record(*fp32, switches={"fp32_matmul": "tf32"}),
        record(*layers, switches={"fp32_matmul": "tf32"}),  # nothing is fp32
        [op.module for op in fp32],
    ),
    "HS408": (
        record(switches={"fp8_asked": "accelerate", "fp8_layers": 0}),
        record(switches={"fp8_asked": "accelerate", "fp8_layers": 3}),
        [],
    ),
    "HS409": (
        record(Operation("blocks.2.up", "matmul", outputs=["fp16"], overflow=3, elements=9)),
        record(Operation("blocks.2.up", "matmul", outputs=["fp16"], amax=65504.0, elements=9)),
        ["blocks.2.up"],
    ),
    "HS411": (
        record(product("moe.router", "fp32"), Operation("moe.router", "matmul", inside="bf16", backward=True)),
        record(product("moe.up"), Operation("moe.up", "matmul", inside="bf16", backward=True)),
        ["moe.router"],
    ),
    "HS410": (record(gradient(90)), record(gradient(10)), ["blocks.2.up"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rule_finds_its_hazard_and_nothing_else(case):
    broken, clean, names = CASES[case]
    (found,) = check(broken)
    assert (found.rule, found.where) == (case.split()[0], names)
    assert check(clean) == []


@pytest.mark.parametrize("case", CASES)
def test_a_policy_rule_of_a_finding_can_be_read(case):
    (found,) = check(CASES[case][0])
    if found.policy_rule is not None:
        glob, _, changes = found.policy_rule.replace('"', "").partition(" = ")
        assert Rule.parse(glob, changes).glob == found.where[0]


def test_sums_in_fp16_are_worse_than_parts_of_them():
    found = [check(CASES[f"HS303 {format}"][0])[0].severity for format in ("bf16", "fp16")]
    assert found == ["note", "warning"]


def test_fp32_matmuls_are_fp32_where_nothing_rounds_them():
    assert check(record(*fp32, switches={"fp32_matmul": "ieee"})) == []


def test_promotion_is_no_finding_in_a_model_that_computes_in_fp32():
    assert check(record(*fp32, product("a", "fp32", promoted=True))) == []


def test_a_table_of_cosines_is_a_warning_because_its_angles_are_not_rounded():
    (found,) = check(record(buffers=[Buffer("rope.cos_cached", "bf16", "rope")]))
    assert (found.severity, found.confidence) == ("warning", "likely")


def test_two_ways_to_see_one_narrow_loss_are_one_finding():
    (found,) = check(record(loss, Operation("", "loss", ["bf16"], ["bf16"], "bf16", 1)))
    assert found.place == "train.py:9"
