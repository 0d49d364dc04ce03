import pytest

from halfstep.config.load import read_policy
from halfstep.core.policy import Policy
from halfstep.tools.tune.rules import apply_assignment, describe_formats, to_toml
from halfstep.tools.tune.search import Option

NAMES = [f"blocks.{i}.{part}" for i in range(4) for part in ("attn.q", "mlp.up", "mlp.down")] + ["lm_head"]
FP8 = Option("e4m3", "e5m2")
FORWARD = Option("e4m3")


def resolved(policy, names=NAMES):
    """What each module's operands and gradients are, by the policy's own resolution."""
    return {
        name: (str(each.values["compute"].format), str(each.values["grad"].format))
        for name, each in policy.resolve(names).items()
    }


CASES = {
    "nothing": {},
    "all": dict.fromkeys(NAMES, FP8),
    "all but one": {name: FP8 for name in NAMES if name != "blocks.1.mlp.down"},
    "one": {"blocks.1.mlp.down": FP8},
    "a kind": {name: FP8 for name in NAMES if "mlp.up" in name},
    "a kind but one": {name: FP8 for name in NAMES if "mlp" in name and name != "blocks.2.mlp.up"},
    "two formats": {name: FORWARD if "attn" in name else FP8 for name in NAMES},
    "half of a kind": {"blocks.0.mlp.up": FP8, "blocks.1.mlp.up": FORWARD, "lm_head": FP8},
    "a wide one": {name: Option("bf16", "bf16") if name == "lm_head" else FP8 for name in NAMES},
}


@pytest.mark.parametrize("base", ["fp32,emulate=true", "bf16-mixed"])
@pytest.mark.parametrize("assignment", CASES.values(), ids=CASES)
def test_policy_gives_each_module_what_was_chosen(base, assignment):
    policy, wanted = apply_assignment(Policy.parse(base), NAMES, assignment)
    wide = str(policy.compute.format)
    expected = dict.fromkeys(NAMES, (wide, wide))
    expected |= {name: (o.compute, o.grad or wide) for name, o in assignment.items()}
    assert resolved(policy) == expected
    if base.startswith("fp32"):
        decided = [name for each in wanted for name in each.modules]
        assert sorted(decided) == sorted(set(decided))
        assert set(decided) >= set(assignment)


def test_all_but_one_is_two_rules():
    policy, wanted = apply_assignment(Policy.parse("fp32,emulate=true"), NAMES, CASES["all but one"])
    assert [str(each.rule) for each in wanted] == ["**: compute=e4m3,grad=e5m2", "blocks.1.mlp.down: compute=fp32"]
    assert str(policy.eval.format) == "fp32"


def test_many_blocks_are_one_rule():
    _, wanted = apply_assignment(
        Policy.parse("bf16-mixed"), NAMES, {n: FP8 for n in NAMES if not n.endswith("attn.q")}
    )
    assert [each.rule.glob for each in wanted] == ["**", "blocks.*.attn.q"]
    assert wanted[1].modules == tuple(f"blocks.{i}.attn.q" for i in range(4))


@pytest.mark.parametrize("base", ["fp32,norm=bf16,emulate=true; lm_head: compute=bf16", "fp32", "bf16-mixed"])
def test_file_reads_back_as_the_policy_with_a_comment_for_each_rule(base, tmp_path):
    base = Policy.parse(base)
    policy, wanted = apply_assignment(base, NAMES[:-1], {n: FP8 for n in NAMES[:-1] if n != "blocks.1.mlp.down"})
    path = tmp_path / "policy.toml"
    path.write_text(to_toml(policy, wanted, lambda each: f"why {each.rule.glob}", ["found by tune", "2 lines"]))
    assert Policy.parse(read_policy(str(path))) == policy
    lines = path.read_text().splitlines()
    assert lines[:2] == ["# found by tune", "# 2 lines"]
    for each in wanted:
        at = next(i for i, line in enumerate(lines) if line.startswith(f'"{each.rule.glob}" ='))
        assert lines[at - 1] == f"# why {each.rule.glob}"


def test_numbers_alone_make_no_rule_that_catches_other_modules():
    names = ["0.0", "0.1", "1.0", "0.head"]
    policy, _ = apply_assignment(Policy.parse("fp32"), names, {"0.0": FP8, "0.1": FP8, "1.0": FORWARD})
    assert resolved(policy, names)["0.head"] == ("fp32", "fp32")
    policy, _ = apply_assignment(
        Policy.parse("fp32"), names, {"0.0": FORWARD, "0.1": FORWARD, "0.head": FP8, "1.0": FP8}
    )
    assert resolved(policy, names) == {
        "0.0": ("e4m3", "fp32"),
        "0.1": ("e4m3", "fp32"),
        "1.0": ("e4m3", "e5m2"),
        "0.head": ("e4m3", "e5m2"),
    }


def test_words():
    base = Policy.parse("fp32")
    assert describe_formats(base, "e4m3", "e5m2") == "e4m3 with gradients in e5m2"
    assert describe_formats(base, "", "") == "fp32"
