"""Every rule fires on its reproducer and is silent on its clean twin."""

from pathlib import Path

import pytest

from halfstep.core.audit.engine import check, registry
from halfstep.core.audit.record import Buffer, Call, CheckpointFacts, Operation, Record, UpdateCounts, Weight
from halfstep.core.rules import Rule

# Updates and checkpoints


LOST = UpdateCounts(
    steps=20, elements=2000, intended=2000, lost=1976, arrived_sum=0.1, intended_sum=1.0, moved=True
)
DECAY = UpdateCounts(steps=20, intended=10, moved=True, decay_intended=1000, decay_lost=1000)
STILL = UpdateCounts(steps=20, intended=100, lost=100, gradient=100)


def live(*weights, calls=(), checkpoints=()):
    return Record("script", updates=20, weights=list(weights), calls=list(calls), checkpoints=list(checkpoints))


def weight(format="bf16", master=None, kind="matrix", updates=None, **more):
    return Weight("blocks.3.up", format, kind=kind, optimizer="AdamW", master=master, updates=updates, **more)


def saved(path="checkpoint-20", *, weights="fp32", moments="fp32", **more):
    moments = {"up/exp_avg": moments} if moments else {}
    return CheckpointFacts(path, 20, {"up": weights}, moments=moments, **more)


def loads(**numbers):
    return [Call("load", target="weights", numbers=numbers), Call("load", target="moments", numbers=numbers)]


UNFINISHED = saved("checkpoint-40", complete=False, problem="there is no trainer_state.json")
# rule -> (what it must find, a twin that it must not), pairs
CASES = {
    "HS101": [
        (live(weight(updates=LOST)), live(weight("fp32", updates=LOST))),
        (live(weight()), live(weight(master="fp32"))),
        (live(weight("fp16")), live(weight(trainable=False))),
        (live(weight(updates=LOST)), live(weight(updates=LOST, stochastic=True))),
    ],
    "HS102": [
        (live(weight(updates=DECAY)), live(weight(master="fp32", updates=DECAY))),
        (live(weight(updates=DECAY)), live(weight(updates=UpdateCounts(decay_intended=1000, decay_lost=10)))),
    ],
    "HS103": [
        (live(weight(kind="adapter", updates=STILL)), live(weight(kind="adapter", updates=LOST))),
        (
            live(weight("fp32", kind="adapter", updates=STILL)),
            live(weight(kind="adapter", updates=UpdateCounts(1))),
        ),
        (
            live(Weight("lora_A", "fp32", kind="adapter"), weight()),
            live(Weight("lora_A", "fp32", kind="adapter", trainable=False), weight()),
        ),
    ],
    "HS104": [
        (live(weight(moments={"exp_avg": "bf16"})), live(weight(moments={"exp_avg": "fp32", "q": "uint8"})))
    ],
    "HS105": [(live(weight("fp16")), live(weight("fp16", master="fp32")))],
    "HS601": [
        (live(checkpoints=[saved(weights="bf16")]), live(checkpoints=[saved()])),
        (live(checkpoints=[saved(weights="bf16")]), live(checkpoints=[saved(weights="bf16", moments="bf16")])),
        (
            live(checkpoints=[saved(weights="bf16")]),
            live(checkpoints=[saved(weights="bf16", masters={"up": "fp32"})]),
        ),
        (live(calls=loads(rounded=3)), live(calls=loads(rounded=3)[:1])),  # alone it is the start of a fine-tuning
    ],
    "HS602": [
        (
            live(checkpoints=[saved(), saved(weights="bf16")]),
            live(checkpoints=[saved(policy="a"), saved(weights="bf16", policy="b")]),
        ),
    ],
    "HS603": [
        (live(calls=loads(narrowed=2)), live(calls=loads(narrowed=0))),
        (live(checkpoints=[saved(), saved(moments="bf16")]), live(checkpoints=[saved(), saved()])),
    ],
    "HS604": [
        (live(checkpoints=[saved(scaler=False)]), live(checkpoints=[saved(scaler=True)])),
        (live(checkpoints=[saved(scaler=False)]), live(checkpoints=[saved(moments=None, scaler=False)])),
    ],
    "HS605": [(live(checkpoints=[saved(), UNFINISHED]), live(checkpoints=[UNFINISHED, saved()]))],
}
PAIRS = [(id, *pair) for id, pairs in CASES.items() for pair in pairs]


@pytest.mark.parametrize(("id", "broken", "clean"), PAIRS)
def test_a_rule_fires_on_its_reproducer_and_not_on_its_twin(id, broken, clean):
    found = check(broken, select=[id])
    assert {f.rule for f in found} == {id}
    assert all(f.message and f.fix for f in found)
    assert check(clean, select=[id]) == []


def test_every_rule_is_named_in_a_test():
    """A rule without a reproducer and a clean twin is not a rule."""
    tests = Path(__file__).parents[2]
    others = (path for path in tests.rglob("test_*.py") if path != Path(__file__))
    text = "\n".join(path.read_text(encoding="utf-8") for path in others)
    known = {*CASES, *(name.split()[0] for name in HAZARDS)}
    assert [id for id in registry() if id not in known and f'"{id}' not in text] == []


def test_the_numbers_are_in_the_evidence_and_in_the_message():
    (found,) = check(live(weight(updates=LOST)), select=["HS101"])
    assert found.evidence == {"updates": 2000, "lost": 1976, "lost_share": 0.988, "arrived": 0.1}
    assert found.message == (
        "`blocks.3.up` is stepped in bf16 by AdamW, without an fp32 master: 98.8% of its intended updates were "
        "lost, and 10.0% of what was intended arrived"
    )
    assert (found.severity, found.confidence, found.where) == ("error", "certain", ["blocks.3.up"])


def test_what_an_unknown_optimizer_lost_is_weaker():
    counts = UpdateCounts(steps=3, intended=10, lost=9, exact=False)
    (found,) = check(live(weight(updates=counts)), select=["HS101"])
    assert (found.confidence, found.evidence["lost_share"]) == ("weak", 0.9)
    assert "nonzero gradient" in found.message


# Sums and formats


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

HAZARDS = {  # rule: what it must find, what it must not, and the names that the finding has
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
        record(buffers=[Buffer("bn.running_mean", "fp16", "running")]),
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
    "HS412": (
        record(Operation("embed", "positions", inside="bf16", function="cumsum", rounded=700, elements=1024)),
        record(Operation("embed", "positions", inside="bf16", function="cumsum", elements=1024)),
        ["embed"],
    ),
    "HS410": (record(gradient(90)), record(gradient(10)), ["blocks.2.up"]),
}


@pytest.mark.parametrize("case", HAZARDS)
def test_a_rule_finds_its_hazard_alone_with_a_policy_rule_that_can_be_read(case):
    broken, clean, names = HAZARDS[case]
    (found,) = check(broken)
    assert (found.rule, found.where) == (case.split()[0], names)
    assert check(clean) == []
    if found.policy_rule is not None:
        glob, _, changes = found.policy_rule.replace('"', "").partition(" = ")
        assert Rule.parse(glob, changes).glob == found.where[0]


def test_sums_in_fp16_are_worse_than_parts_of_them():
    found = [check(HAZARDS[f"HS303 {format}"][0])[0].severity for format in ("bf16", "fp16")]
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
