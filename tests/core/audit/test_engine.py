"""Records travel as JSON, every rule is known, and findings are chosen, merged and suppressed."""

import json
from dataclasses import fields, is_dataclass

import pytest

from halfstep.core.audit import record as record_module
from halfstep.core.audit.engine import Suppression, check, registry
from halfstep.core.audit.finding import Finding
from halfstep.core.audit.record import (
    Average,
    Buffer,
    Call,
    CheckpointFacts,
    Operation,
    Record,
    StoredTensor,
    Sync,
    UpdateCounts,
    Weight,
)
from halfstep.core.errors import OptionError


def full():
    """A record in which nothing has its default."""
    counts = UpdateCounts(3, 12, 9, 8, 7, 6, 0.5, 2.0, 9, True, False)
    stored = StoredTensor("a", "moment", "fp32", "norm", "m", 64, 1, 2, 3, 4, 1.0, "bf16", 5, 6, "b", 7, 8)
    return Record(
        source="script",
        framework="jax",
        rank=1,
        updates=20,
        weights=[
            Weight(
                "a.b", "bf16", False, "matrix", "AdamW", "fp32", {"m": "bf16"}, True, "fp16", "f:1", counts, "bf16"
            )
        ],
        buffers=[Buffer("rope", "bf16", "rope")],
        averages=[Average("a", "bf16", 5, 30, 20)],
        operations=[
            Operation("n", "norm", ["bf16"], ["fp32"], "fp32", 2, 1.5, 3, 4, "f:3", True, True, 9, "rsqrt", 5)
        ],
        calls=[Call("clip", 2, "0", True, "f:4", {"norm": 1.0}, "bf16", ["a"])],
        switches={"allow_tf32": True},
        losses=[1.0, None],
        logged=[1.0],
        syncs=[Sync("f:5", "cpu", 2.0)],
        checkpoints=[
            CheckpointFacts(
                *("c", 3, {"a": "bf16"}, {"a": "fp32"}, {"a/m": "fp32"}, True, "fp32", False, "torn"),
                *([stored], "b", "bfloat16"),
            )
        ],
        policy="bf16-mixed",
        unseen=["the joint graph"],
    )


def test_a_record_comes_back_from_json():
    data = json.loads(json.dumps(full().to_dict()))
    assert Record.from_dict(data) == full()
    assert Record.from_dict(data | {"of a newer version": 1}) == full()


def test_the_full_record_has_a_value_in_every_field():
    kinds = [kind for kind in vars(record_module).values() if isinstance(kind, type) and is_dataclass(kind)]
    record = full()
    parts = [record, *record.weights, record.weights[0].updates, *record.buffers, *record.operations]
    parts += [*record.calls, *record.syncs, *record.checkpoints, *record.checkpoints[0].tensors]
    parts += record.averages
    assert {type(part) for part in parts} == set(kinds)
    for part in parts:
        for field in fields(part):
            assert getattr(part, field.name) != field.default, (type(part), field.name)


def test_counts_merge():
    a, b = UpdateCounts(steps=2, lost=3, arrived_sum=1.0, intended_sum=2.0), UpdateCounts(steps=1, moved=True)
    assert a.merge(b) == UpdateCounts(steps=3, lost=3, arrived_sum=1.0, intended_sum=2.0, moved=True)
    assert a.applied_fraction == 0.5
    assert b.applied_fraction is None


@pytest.mark.parametrize("id", registry())
def test_a_rule_says_what_why_and_what_to_do(id):
    rule = registry()[id]
    assert rule.id == id
    assert rule.page == f"docs/audit.md#{id.lower()}"
    assert all(text.endswith(".") for text in (rule.what, rule.why, rule.shows, rule.fix))


def half(rank=0):
    weights = [Weight(name, "fp16", optimizer="SGD") for name in ("a.weight", "b.weight")]
    return Record("script", rank=rank, weights=weights)


def test_findings_are_chosen_by_rule():
    assert {f.rule for f in check(half(), select=["HS105"])} == {"HS105"}
    assert {f.rule for f in check(half(), select=["hs1"], ignore=["HS101"])} == {"HS105"}
    assert "HS105" not in {f.rule for f in check(half(), ignore=["HS1"])}


@pytest.mark.parametrize("name", ["HS150", "weights", ""])
def test_a_rule_that_does_not_exist_is_refused(name):
    for choice in ({"select": [name]}, {"ignore": [name]}, {"suppressed": [Suppression(name, "because")]}):
        with pytest.raises(OptionError, match=f"`{name}`"):
            check(half(), **choice)


def test_a_suppression_covers_the_names_it_matches():
    accepted = Suppression("HS105", "a study of fp16", ("a.*",))
    left = check(half(), select=["HS105"], suppressed=[accepted])
    assert [(f.where, "b.weight" in f.message, "a.weight" in f.message) for f in left] == [
        (["b.weight"], True, False)
    ]
    assert check(half(), select=["HS105"], suppressed=[Suppression("HS105", "all of it")]) == []


def test_ranks_that_show_the_same_are_one_finding():
    (found,) = check([half(0), half(1)], select=["HS105"])
    assert (found.where, found.ranks) == (["a.weight", "b.weight"], [0, 1])
    assert "on rank" not in found.message


def lossy(lost, rank=0, names=("a.weight", "b.weight"), **more):
    """A rank whose weights are bf16 and have lost some of 1,000 updates, the first of them one more."""
    counts = [UpdateCounts(steps=2, intended=1000, lost=lost + (not i)) for i in range(len(names))]
    weights = [Weight(n, "bf16", optimizer="AdamW", updates=c) for n, c in zip(names, counts, strict=True)]
    return Record("script", rank=rank, weights=weights, **more)


def test_numbers_that_differ_between_ranks_say_whose_they_are():
    (found,) = check([lossy(900), lossy(500, rank=1)], select=["HS101"])
    assert "90.1% of its intended updates were lost (on rank 0)" in found.message
    assert (found.ranks, found.evidence["lost"]) == ([0, 1], 901)
    assert "on rank" not in check([lossy(900), lossy(900, rank=1)], select=["HS101"])[0].message


def test_one_mistake_is_one_finding_that_names_the_worst_and_lists_all():
    names = [f"blocks.{i}.up.weight" for i in range(61)]
    (found,) = check(lossy(900, names=names), select=["HS101"])
    assert (found.rule, found.where, found.severity) == ("HS101", names, "error")
    assert found.message.startswith("`blocks.0.up.weight` is stepped in bf16 by AdamW")
    assert (
        "; the worst of 61 tensors in bf16: `blocks.0.up.weight` 90.1%, `blocks.1.up.weight` 90.0%, "
        in found.message
    )
    assert found.message.endswith(" and 57 more")
    assert (found.evidence["lost"], found.each["blocks.60.up.weight"]["lost"]) == (901, 900)
    assert found.policy_rule.splitlines()[60] == '"blocks.60.up" = "param=fp32"'


def test_a_tensor_that_lost_nothing_is_part_of_a_mistake_that_lost_much():
    record = lossy(900)
    record.weights[0].updates = None  # a warning by itself
    record.weights[1].optimizer = "Muon"
    (found,) = check(record, select=["HS101"])
    assert (found.severity, found.where) == ("error", ["a.weight", "b.weight"])
    assert found.message.startswith("`b.weight` is stepped in bf16 by Muon")


def test_two_mistakes_of_one_rule_stay_two():
    norms = [Operation(f"{i}.norm", "norm", inside="bf16", place=f"model.py:{3 + i % 2}") for i in range(6)]
    found = check(Record("script", operations=norms), select=["HS401"])
    assert [(f.place, f.where) for f in found] == [
        ("model.py:3", ["0.norm", "2.norm", "4.norm"]),
        ("model.py:4", ["1.norm", "3.norm", "5.norm"]),
    ]
    mixed = lossy(900)
    mixed.weights[1].format = "fp16"
    assert [f.where for f in check(mixed, select=["HS101"])] == [["a.weight"], ["b.weight"]]


def test_a_finding_comes_back_from_json():
    found = check(half(), select=["HS105"])[0]
    assert Finding.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_a_fix_is_in_the_words_of_the_framework():
    operations = [Operation("norm", "norm", inside="bf16", count=1)]
    torch, jax = (check(Record("script", framework, operations=operations)) for framework in ("torch", "jax"))
    assert "x.float()" in torch[0].fix
    assert "x.astype(jnp.float32)" in jax[0].fix
