"""Policies: text and table forms read back, what means the same prints the same, mistakes are named."""

import dataclasses
import re
import tomllib

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.core.errors import AutoPolicyError, HalfstepError, PolicyError, RoleValueError
from halfstep.core.formats import BF16, E4M3, FP16, FP32, NAMED, parse
from halfstep.core.policy import NOT_OFFERED, OTHER_NAMES, PRESETS, Policy, as_policy, read, read_as
from halfstep.core.roles import ROLES, Accumulator, Evaluation, Operand, Param, needs_loss_scale, print_value
from halfstep.core.rules import Rule, merge
from halfstep.core.scaling import DynamicScale, NoScale, StaticScale

FORMATS = [*NAMED.values(), parse("e3m4ieee"), parse("e5m6ieee"), parse("e4m3b11fnuz")]
NARROW = [fmt for fmt in FORMATS if fmt.bits <= 8]
WIDE = [fmt for fmt in FORMATS if fmt.bits > 8]


wide_operands = st.sampled_from(WIDE).map(Operand)
narrow_operands = st.builds(
    Operand,
    st.sampled_from(NARROW),
    st.sampled_from(["tensor", "row"]),
    st.sampled_from(["current", "delayed"]),
    st.booleans(),
)
PARAMS = [Param(FP32), Param(FP32, split=True), Param(BF16), Param(BF16, stochastic=True)]


def powers(low, high):
    return st.integers(low, high).map(lambda e: 2.0**e)


scales = st.one_of(
    st.builds(StaticScale, st.one_of(powers(-30, 30), st.floats(2.0**-126, 2.0**126))),
    st.builds(
        DynamicScale,
        init_scale=powers(0, 24),
        growth=powers(1, 4),
        backoff=powers(-4, -1),
        interval=st.integers(1, 10**7),
        hysteresis=st.integers(1, 100),
        floor=powers(-20, 0),
        ceiling=powers(24, 60),
    ),
)


def values_of(role, *, in_rule):
    spec = ROLES[role]
    if role in ("compute", "grad"):
        return st.one_of(wide_operands, narrow_operands) if in_rule else wide_operands
    if spec.kind is Param:
        return st.sampled_from(PARAMS)
    if spec.kind is Accumulator:
        return st.booleans().map(lambda fast: Accumulator(FP32, fast))
    if spec.kind is Evaluation:
        return st.sampled_from([None, *spec.allowed]).map(lambda n: Evaluation(n and parse(n)))
    if spec.kind is bool:
        return st.booleans()
    return st.sampled_from([parse(name) for name in spec.allowed])


globs = st.lists(st.sampled_from(["*", "**", "blocks", "0", "mlp", "w*", "lm_head"]), min_size=1, max_size=4).map(
    ".".join
)


@st.composite
def rules(draw):
    roles = [role for role in ROLES if ROLES[role].in_rules]
    chosen = draw(st.lists(st.sampled_from(roles), min_size=1, max_size=4, unique=True))
    return Rule(draw(globs), tuple((role, draw(values_of(role, in_rule=True))) for role in chosen))


@st.composite
def policies(draw):
    given = {role: draw(values_of(role, in_rule=False)) for role in ROLES if role != "scale"}
    given["rules"] = merge(draw(st.lists(rules(), max_size=3)))  # of two rules for one glob the later counts
    operands = [given["compute"], given["grad"]]
    operands += [v for rule in given["rules"] for _, v in rule.changes if isinstance(v, Operand)]
    weak = any(needs_loss_scale(operand.format) for operand in operands)
    return Policy(**given, scale=draw(scales if weak else st.one_of(st.builds(NoScale), scales)))


@given(policies())
@settings(max_examples=60)
def test_text_and_toml_read_back(policy):
    assert Policy.parse(str(policy)) == policy
    assert str(Policy.parse(str(policy))) == str(policy)
    document = tomli_w.dumps({"policy": policy.to_table()})
    assert Policy.from_table(tomllib.loads(document)["policy"]) == policy


@given(policies(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_written_out_in_any_order_it_is_the_same_policy_and_prints_the_same(policy, random):
    items = [f"{role}={print_value(value)}" for role, value in policy.roles().items()]
    written = [str(rule) for rule in policy.rules]
    random.shuffle(items)
    random.shuffle(written)
    again = Policy.parse(" ; ".join([" , ".join(items), *written]))
    assert again == policy
    assert str(again) == str(policy)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_prints_as_itself(name):
    assert str(PRESETS[name]) == name
    assert Policy.parse(name) == PRESETS[name]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bf16-mixed", "compute=bf16"),
        ("bf16-mixed", "param=fp32,compute=bf16,grad=bf16"),
        ("bf16-mixed", "fp16-mixed,scale=none,compute=bf16"),
        ("bf16-mixed,eval=bf16", "bf16-mixed"),
        ("fp16-mixed", "compute=fp16,scale=dynamic:init=65536:growth=2:backoff=0.5:interval=2000:floor=1"),
        ("bf16-mixed,compute=e4m3", "bf16-mixed; **: compute=e4m3"),
        ("bf16-mixed,compute=e4m3:measured,grad=e5m2,eval=bf16", "fp8-mixed"),
        ("bf16-mixed,compute=e4m3,grad=e5m2,eval=bf16", "fp8-mixed,compute=e4m3"),
        ("fp8-mixed,compute=e4m3:row:delayed", "fp8-mixed; **: compute=e4m3:delayed:row"),
        ("bf16-mixed,compute=e4m3:tensor:current", "bf16-mixed; **: compute=e4m3fn"),
        ("bf16-mixed; a: compute=fp32; b: norm=bf16", "bf16-mixed; b: norm=bf16; a: compute=fp32"),
        ("norm=bfloat16", "norm=bf16"),
        ("bf16-mixed; a: compute=fp32", "bf16-mixed; a: compute=fp32,grad=fp32"),
        ("fp8-mixed; **: compute=fp32,grad=e5m2", "fp8-mixed; **: grad=e5m2,compute=fp32"),
    ],
)
def test_what_means_the_same_is_equal_and_prints_the_same(one, other):
    assert Policy.parse(one) == Policy.parse(other)
    assert str(Policy.parse(one)) == str(Policy.parse(other))


def test_a_wide_compute_takes_grad_along_and_auto_is_a_base_where_something_was_measured():
    names = ["lm_head", "mlp"]
    result = Policy.parse("fp8-mixed; lm_head: compute=bf16").resolve(names)["lm_head"].values
    assert result["grad"] == Operand(BF16)  # and not the e5m2 of the rule `**`
    kept = Policy.parse("fp8-mixed; lm_head: compute=bf16,grad=e5m2").resolve(names)["lm_head"].values
    assert kept["grad"] == Operand(parse("e5m2"))
    forward = Policy.parse("bf16-mixed; mlp: compute=e4m3").resolve(names)["mlp"].values
    assert forward["grad"] == Operand(BF16)
    explicit = Policy.parse("fp8-mixed; **: compute=fp32,grad=e5m2")
    assert explicit.resolve(names)["mlp"].values["grad"] == Operand(parse("e5m2"))
    assert Policy.parse(str(explicit)) == explicit
    assert Policy.parse("auto,norm=bf16", auto=PRESETS["bf16-mixed"]) == Policy.parse("bf16-mixed,norm=bf16")
    assert str(read("auto,norm=bf16")) == "auto,norm=bf16"
    with pytest.raises(AutoPolicyError):
        Policy.parse("auto")
    with pytest.raises(RoleValueError, match="compute=e4m3"):
        Policy(compute=Operand(E4M3))
    with pytest.raises(RoleValueError, match="`router=bf16`"):
        Policy(router=BF16)  # what cannot be written cannot be built either


def test_presets_expand_to_the_table_of_the_design():
    table = {role: [getattr(PRESETS[name], role) for name in PRESETS] for role in ROLES}
    operand = lambda *fmts: [Operand(fmt) for fmt in fmts]  # noqa: E731
    assert table["param"] == [Param(FP32), Param(FP32), Param(BF16), Param(FP32), Param(FP32)]
    assert table["compute"] == operand(FP32, BF16, BF16, FP16, BF16)
    assert table["grad"] == operand(FP32, BF16, BF16, FP16, BF16)
    assert table["grad_weight"] == [FP32, FP32, BF16, FP32, FP32]
    for role in ("accumulate", "reduce", "moments", "norm", "softmax", "loss", "router", "rope", "buffers"):
        assert table[role] == [FP32] * 5
    assert table["export"] == [FP32, FP32, BF16, FP32, FP32]
    assert table["eval"] == [*[Evaluation()] * 4, Evaluation(BF16)]
    assert table["scale"] == [NoScale(), NoScale(), NoScale(), DynamicScale(), NoScale()]
    assert [str(rule) for rule in PRESETS["fp8-mixed"].rules] == ["**: compute=e4m3:measured,grad=e5m2"]
    assert [field.name for field in dataclasses.fields(Policy)] == [*ROLES, "rules"]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_name_of_another_library_is_read_as_what_it_means_there(name):
    preset, where = OTHER_NAMES[name]
    assert Policy.parse(name) == PRESETS[preset] == Policy.from_table({"preset": name})
    assert read_as(f" {name} ,norm=bf16; lm_head: compute=fp32").endswith(f"in {where}")
    assert Policy.parse(f"{name},norm=bf16") == Policy.parse(f"{preset},norm=bf16")
    assert str(Policy.parse(name)) == preset
    assert not read_as(preset)


def test_numbers_of_lightning_are_policies():
    assert (as_policy(16), as_policy(32)) == (PRESETS["fp16-mixed"], PRESETS["fp32"])


@pytest.mark.parametrize(
    ("written", "preset"),
    [
        ("BF16", "bf16-mixed"),
        ("BF16_Mixed", "bf16-mixed"),
        ("FP8", "fp8-mixed"),
        ("No", "fp32"),
        ("mixed-bfloat16", "bf16-mixed"),
        ("AMP_BF16", "bf16-mixed"),
        ("16_mixed", "fp16-mixed"),
    ],
)
def test_case_and_underscores_make_no_other_name(written, preset):
    assert Policy.parse(f"{written},loss=fp32") == PRESETS[preset] == Policy.from_table({"preset": written})
    assert read(written).base == preset
    assert bool(read_as(written)) == (written.lower().replace("_", "-") != preset)
    assert read("AUTO").base == "auto"


@pytest.mark.parametrize("name", ["BF16x", "b16", "fp61", "mixed_float61", "half-precision", "torch.bfloat16"])
def test_a_hint_names_only_what_works_and_no_name_of_another_library(name):
    with pytest.raises(PolicyError) as caught:
        Policy.parse(name)
    (first, *_) = re.findall("`([^`]+)`", caught.value.hint)
    assert read(first).base in PRESETS
    assert first.partition(",")[0] in PRESETS


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_a_name_that_is_refused_has_its_reason_and_a_hint_that_works(name):
    with pytest.raises(PolicyError, match=f"`{name}`") as caught:
        Policy.parse(name)
    named = re.findall("`([^`]+)`", caught.value.hint)
    assert named
    assert all(Policy.parse(each) for each in named)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bf16-mixed,scale=dynamic", ["has nothing to protect: bf16 has fp32's range"]),
        ("fp32,scale=static:value=64", ["has nothing to protect: only fp16 needs a loss scale"]),
        ("fp16-mixed,scale=static:value=1000", ["1000 is not a power of two, 1024 is"]),
        ("bf16,scale=static:value=100", ["nothing to protect", "not a power of two"]),
        ("fp16-mixed", []),
        ("bf16-mixed,scale=static; lm_head: compute=fp16", []),
    ],
)
def test_a_scale_that_is_probably_not_wanted_runs_as_asked_with_a_warning(text, said):
    warnings = Policy.parse(text).warnings
    assert len(warnings) == len(said)
    assert all(words in warning for words, warning in zip(said, warnings, strict=True))


BAD = [
    ("bf16-mxied", "unknown preset `bf16-mxied`", "bf16-mixed"),
    ("", "unknown preset", "bf16-mixed"),
    ("bf16-mixed,nrom=bf16", "unknown role `nrom`", "norm"),
    ("bf16-mixed,norm", "`norm` is not of the form role=value", "norm=bf16"),
    ("bf16-mixed,norm=fp32,norm=bf16", "`norm` is given twice", "one"),
    ("param=fp32:splt", "unknown modifier `splt`", "split"),
    ("param=bf16:split", "only fp32 splits", "fp32:split"),
    ("param=fp32:stochastic", "is not rounded to anything narrower", "bf16:stochastic"),
    ("param=fp16", "`param=fp16` is not offered", "param=fp32"),
    ("loss=fp16", "an fp16 loss times 65536 is inf", "loss=fp32"),
    ("rope=bf16", "positions above 256", "rope=fp32"),
    ("norm=bf16:row", "modifier `row` means nothing here", None),
    ("compute=bf16:row", "bf16 operands are not scaled", "e4m3:row"),
    ("bf16-mixed,compute=e4m3:row:tensor", "contradicts or repeats", "once"),
    ("bf16-mixed,compute=e4m3:rwo", "unknown modifier `rwo`", "row"),
    ("compute=fp16", "`compute=fp16` without a scale", "scale=dynamic"),
    ("bf16-mixed; lm_head: compute=fp16", "`compute=fp16` without a scale", "scale=dynamic"),
    ("Float16,norm=fp32", "weights in fp16 lose updates below 6e-8", "`fp16-mixed`"),
    ("bf17", "unknown preset `bf17`", "such as `bf16-mixed`"),
    ("fp16-mixed,scale=static:value=0", "it must be from 2^-126 to 2^126", "65536"),
    ("fp16-mixed,scale=dynmic", "unknown loss scaling `dynmic`", "dynamic"),
    ("fp16-mixed,scale=dynamic:growt=2", "unknown modifier `growt=2`", "growth"),
    ("fp16-mixed,scale=dynamic:growth=3", "not a power of two", "4"),
    ("fp16-mixed,scale=dynamic:growth=x", "is not a number", None),
    ("fp16-mixed,scale=dynamic:interval=1.5", "is not a whole number", None),
    ("fp16-mixed,scale=dynamic:interval=nan", "is not a whole number", None),
    ("fp16-mixed,scale=none:init=2", "unknown modifier `init=2`", None),
    ("emulate=yes", "neither `true` nor `false`", None),
    ("bf16-mixed; lm_head", "`lm_head` is not a rule", "lm_head: compute=fp32"),
    ("bf16-mixed; lm_head: scale=none", "applies to the whole run", "outside the rules"),
    ("bf16-mixed; lm_head: nrom=fp32", "in rule `lm_head`: unknown role `nrom`", "norm"),
    ("bf16-mixed; a..b: compute=fp32", "is not a glob on module names", None),
    ("bf16-mixed; a**: compute=fp32", "is not a glob on module names", None),
    ("bf16-mixed; a: norm=bf16; a: loss=bf16", "two rules for `a`", None),
    ("bf16-mixed,compute=e4m3; **: compute=e5m2", "twice", "one"),
]


@pytest.mark.parametrize(("text", "said", "hint"), BAD)
def test_a_mistake_is_named_with_its_remedy(text, said, hint):
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text)
    assert said in caught.value.message
    assert f"`{text}`" in caught.value.message  # where
    assert hint is None or hint in caught.value.hint


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"preset": "bf61"}, "unknown preset"),
        ({"nrom": "bf16"}, "unknown role"),
        ({"norm": 16}, "must be a string"),
        ({"rules": ["lm_head"]}, "must be a table"),
        ({"rules": {"lm_head": 1}}, "must be a string"),
    ],
)
def test_a_mistake_in_a_table_is_named(table, said):
    with pytest.raises(HalfstepError, match=said):
        Policy.from_table(table)


@pytest.mark.parametrize(
    "text",
    [*PRESETS, "bf16-mixed,param=fp32:split,moments=bf16", "fp32,compute=bf16,grad=fp32",
     "bf16-true,param=bf16:stochastic",
     "bf16-mixed; blocks.*: param=fp32:split,moments=bf16; lm_head: compute=fp32,param=fp32:split"],
)  # fmt: skip
def test_a_policy_without_training_computes_the_same_and_holds_plain_weights(text):
    policy = Policy.parse(text)
    plain = policy.without_training()
    assert plain.without_training() == plain
    before, after = (each.resolve(["blocks.0", "lm_head"]) for each in (policy, plain))
    for name, resolved in after.items():
        values, was = resolved.values, before[name].values
        assert values["grad"] == values["compute"] == was["compute"]
        assert values["param"] == Param(was["param"].format)
        assert (values["moments"], values["grad_weight"]) == (FP32, was["param"].format)
        for role in ("norm", "softmax", "loss", "eval", "matmul", "scale", "emulate"):
            assert values[role] == was[role]
