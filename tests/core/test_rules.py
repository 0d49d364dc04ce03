import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core.errors import PolicyError
from halfstep.core.policy import Policy
from halfstep.core.roles import print_value
from halfstep.core.rules import Rule

NAMES = ["embed", "blocks.0.attn.q", "blocks.0.mlp.up", "blocks.1.attn.q", "blocks.1.mlp.up", "lm_head"]


def compute(spec, name, names=NAMES):
    return print_value(Policy.parse(spec).resolve(names)[name].values["compute"])


@pytest.mark.parametrize(
    ("glob", "name", "matches"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "a.lm_head", False),
        ("*", "lm_head", True),
        ("*", "a.b", False),
        ("blocks.*.mlp.*", "blocks.0.mlp.up", True),
        ("blocks.*.mlp.*", "blocks.0.attn.q", False),
        ("blocks.*.mlp.*", "blocks.0.mlp.up.weight", False),
        ("blocks.*", "blocks.0.mlp", False),
        ("blocks.**", "blocks.0.mlp.up", True),
        ("blocks.**", "blocks", True),
        ("**", "anything.at.all", True),
        ("**.up", "up", True),
        ("**.up", "blocks.0.mlp.up", True),
        ("**.mlp.**", "blocks.0.mlp.up", True),
        ("h.*.attn_*", "h.3.attn_norm", True),
        ("h.*.attn_*", "h.3.mlp_norm", False),
        ("a.b", "aXb", False),
    ],
)
def test_globs(glob, name, matches):
    assert Rule.parse(glob, "compute=fp32").matches(name) is matches


segments = st.text(alphabet="ab01_", min_size=1, max_size=3)


@given(st.lists(segments, min_size=1, max_size=4), st.lists(segments, min_size=1, max_size=4))
def test_a_star_is_a_shell_star_within_each_segment(pattern, name):
    pattern = [segment.replace("0", "*") for segment in pattern]
    pattern = [segment if "**" not in segment else "x" for segment in pattern]
    expected = len(pattern) == len(name) and all(
        fnmatch.fnmatchcase(n, p) for p, n in zip(pattern, name, strict=True)
    )
    assert Rule.parse(".".join(pattern), "norm=bf16").matches(".".join(name)) is expected


def test_roles_are_decided_one_by_one_and_narrow_operands_reach_matmuls_alone():
    policy = Policy.parse("bf16-mixed; blocks.0.mlp.up: norm=bf16; **.mlp.up: compute=fp32")
    result = policy.resolve(NAMES)["blocks.0.mlp.up"]
    assert (print_value(result.values["norm"]), print_value(result.values["compute"])) == ("bf16", "fp32")
    assert (result.sources["norm"], result.sources["compute"]) == ("blocks.0.mlp.up", "**.mlp.up")
    assert result.sources["param"] is None
    policy = Policy.parse("fp8-mixed")
    result = policy.resolve(NAMES)["embed"].without_matmul(policy.roles())
    assert (print_value(result.values["compute"]), print_value(result.values["grad"])) == ("bf16", "bf16")
    assert result.sources["compute"] is None


def test_a_tie_that_disagrees_is_an_error_unless_something_stands_above_it():
    with pytest.raises(PolicyError) as caught:
        compute("bf16-mixed; *.0.mlp.up: compute=fp32; blocks.0.mlp.*: compute=tf32", "embed")
    for part in ("`*.0.mlp.up: compute=fp32`", "`blocks.0.mlp.*: compute=tf32`", "`blocks.0.mlp.up`"):
        assert part in caught.value.message
    assert "more literal segments" in caught.value.hint
    agrees = "bf16-mixed; *.0.mlp.up: compute=fp32; blocks.0.mlp.*: compute=fp32"
    assert compute(agrees, "blocks.0.mlp.up") == "fp32"
    spec = "bf16-mixed; *.0.mlp.up: compute=fp32; blocks.0.mlp.*: compute=tf32; blocks.0.mlp.up: compute=bf16"
    assert compute(spec, "blocks.0.mlp.up") == "bf16"


def test_a_rule_must_match_and_more_literal_segments_win_whatever_the_order():
    with pytest.raises(PolicyError) as caught:
        compute("bf16-mixed; lm_haed: compute=fp32", "embed")
    assert "matches none of the 6 names" in caught.value.message
    assert "lm_head" in caught.value.hint
    loose, tight = "blocks.**: compute=fp32", "blocks.0.mlp.*: compute=tf32"
    for spec in (f"bf16-mixed; {loose}; {tight}", f"bf16-mixed; {tight}; {loose}"):
        assert compute(spec, "blocks.0.mlp.up") == "tf32"
        assert (compute(spec, "blocks.1.mlp.up"), compute(spec, "embed")) == ("fp32", "bf16")
