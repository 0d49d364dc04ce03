"""Every rule about updates and checkpoints fires on its reproducer and is silent on its clean twin."""

from pathlib import Path

import pytest

from halfstep.core.audit.engine import check, registry
from halfstep.core.audit.record import Call, CheckpointFacts, Record, UpdateCounts, Weight

LOST = UpdateCounts(
    steps=20, elements=2000, intended=2000, lost=1976, arrived_sum=0.1, intended_sum=1.0, moved=True
)
DECAY = UpdateCounts(steps=20, intended=10, moved=True, decay_intended=1000, decay_lost=1000)
STILL = UpdateCounts(steps=20, intended=100, lost=100, gradient=100)


def live(*weights, calls=(), checkpoints=()):
    return Record("script", updates=20, weights=list(weights), calls=list(calls), checkpoints=list(checkpoints))


def weight(format="bf16", master=None, kind="matrix", updates=None, **more):
    return Weight(
        "blocks.3.up", format, [4, 4], kind=kind, optimizer="AdamW", master=master, updates=updates, **more
    )


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
    assert [id for id in registry() if id not in CASES and f'"{id}' not in text] == []


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
