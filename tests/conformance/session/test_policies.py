"""Every value that a policy may have changes what a session computes, or is refused with the reason."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import Format
from halfstep.core.roles import ROLES
from halfstep.core.scaling import LAWS, DynamicScale, NoScale, Scale
from tests.conformance.session.sessions import prove, session
from tests.token_batches import batch

HONORED = [
    ("bf16-mixed", "bf16-mixed,param=bf16,grad_weight=bf16"),
    ("bf16-true", "bf16-true,param=bf16:stochastic"),
    ("bf16-true", "bf16-true,grad_weight=fp32"),
    ("bf16-mixed", "bf16-mixed,param=fp32:split"),
    ("fp32", "bf16-mixed"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,compute=tf32"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,compute=e6m9ieee,scale=dynamic"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,grad=fp32"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true; blocks.0.mlp.up: grad=e5m2"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,compute=e4m3"),
    ("bf16-mixed,emulate=true; **: compute=e4m3", "bf16-mixed,emulate=true; **: compute=e4m3:row"),
    ("bf16-mixed,emulate=true,grad=e4m3", "bf16-mixed,emulate=true,grad=e4m3:row"),
    ("bf16-mixed", "bf16-mixed,emulate=true"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,grad_weight=fp16"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,norm=fp16"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,softmax=fp16"),
    ("bf16-mixed", "bf16-mixed,grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed; embed: grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed; final_norm: grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed; blocks.0.mlp.up: grad_weight=bf16"),
    ("bf16-mixed", "bf16-mixed,accumulate=bf16"),
    ("bf16-mixed", "bf16-mixed,moments=bf16"),
    ("bf16-mixed", "bf16-mixed; embed: moments=bf16"),
    ("bf16-mixed", "bf16-mixed,norm=bf16"),
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,norm=bf16"),
    ("bf16-mixed", "bf16-mixed; final_norm: norm=bf16"),
    ("bf16-mixed", "bf16-mixed,softmax=bf16"),
    ("bf16-mixed", "bf16-mixed,loss=bf16"),
    ("bf16-mixed", "bf16-mixed; lm_head: compute=fp32"),
    ("bf16-mixed", "bf16-mixed; embed: param=bf16,grad_weight=bf16"),
    ("fp16-mixed,emulate=true", "fp16-mixed,emulate=true,scale=static:value=2"),
]
# What one backend refuses, with a part of the reason.
REFUSED_BY = {
    ("torch", "bf16-true,grad_weight=fp32"): "torch keeps its gradient in that too",
    ("mlx", "fp8-mixed"): "MLX has no fp8 type",
    ("jax", "bf16-mixed,reduce=bf16"): "reduce=bf16",
    ("mlx", "bf16-mixed,reduce=bf16"): "reduce=bf16",
}
FINGERPRINTS = {}


def fingerprint(backend, policy):
    if (backend, policy) not in FINGERPRINTS:
        one = ["training.micro_batches=1"] if backend.name == "jax" else []
        s = session(backend, policy, "model.zero_init=false", *one)
        FINGERPRINTS[backend, policy] = backend.fingerprint(s, batch(0, s))
    return FINGERPRINTS[backend, policy]


# JAX compiles for seconds: all but a few are part of `make prove` there.
EVERYWHERE = [
    pytest.param(name, *pair, marks=prove if name == "jax" and place % 12 else ())
    for name in ("torch", "jax", "mlx")
    for place, pair in enumerate(HONORED)
]


@pytest.mark.parametrize(("backend", "base", "policy"), EVERYWHERE, indirect=["backend"])
def test_an_accepted_value_changes_what_is_computed(backend, base, policy):
    if said := REFUSED_BY.get((backend.name, policy)):
        with pytest.raises(HalfstepError, match=said):
            session(backend, policy)
    else:
        assert fingerprint(backend, policy) != fingerprint(backend, base)


EVALUATED = [
    ("bf16-mixed,emulate=true", "bf16-mixed,emulate=true,eval=fp32"),
    ("fp32,emulate=true", "fp32,emulate=true,eval=bf16"),
    ("fp32,emulate=true", "fp32,emulate=true,eval=fp16"),
]


@pytest.mark.parametrize(("base", "policy"), EVALUATED)
def test_an_accepted_value_changes_how_it_evaluates(slow_backend, base, policy):
    losses = []
    for each in (base, policy):
        s = session(slow_backend, each, "model.zero_init=false")
        losses.append(s.evaluate(iter([batch(0, s)[0]])))
    assert losses[0] != losses[1]


# What other tests show, with the file.
ELSEWHERE = {
    **{(role, "delayed"): "torch/fp8/test_delayed.py" for role in ("compute", "grad")},
    **{(role, "measured"): "torch/convert/test_fp8_choice.py" for role in ("compute", "grad")},
    ("reduce", "bf16"): "torch/parallel/test_reduce.py",
    **{("export", fmt): "tools/export/test_export.py" for fmt in ("bf16", "fp16")},
    **{("scale", field.name.removesuffix("_scale")): "core/test_scaling.py" for field in fields(DynamicScale)},
}


def _words(kind):
    """The modifiers that a kind of value has."""
    for each in fields(kind) if kind not in (Format, bool) else ():
        hint = get_type_hints(kind)[each.name]
        if get_origin(hint) is Literal:
            yield from (word for word in get_args(hint) if word != each.default)
        elif each.name != "format":
            yield each.name.removesuffix("_scale")


def _offered():
    """Every role with each format and each modifier that it may have besides the default."""
    for role, spec in ROLES.items():
        kinds = LAWS if spec.kind is Scale else [spec.kind]
        yield from ((role, word) for kind in kinds for word in _words(kind))
        yield from ((role, law.word) for law in kinds if spec.kind is Scale and law is not NoScale)
        yield from ((role, name) for name in spec.allowed or () if name != "fp32" or role == "eval")


def test_every_role_with_every_value_it_offers_is_shown_to_change_something_or_refused():
    """A new role, format or modifier needs a pair of policies above, or the file of a test that shows it."""
    shown = {
        (role, word.partition("=")[0])
        for policy in [policy for pairs in (HONORED, EVALUATED) for _, policy in pairs] + [p for p, _ in REFUSED]
        for role, value in re.findall(r"(\w+)=([\w:=]+)", policy)
        for word in value.split(":")
    }
    assert [offered for offered in _offered() if offered not in shown | ELSEWHERE.keys()] == []
    assert {("emulate", "true"), ("compute", "fp32"), ("grad", "fp32")} <= shown
    for name in ELSEWHERE.values():
        assert (Path(__file__).parents[2] / name).exists()


REFUSED = [
    ("bf16-mixed,buffers=bf16", "buffers=bf16"),
    ("bf16-mixed,router=bf16", "router=bf16"),
    ("bf16-mixed,reduce=fp16", "reduce=fp16"),
    ("bf16-mixed; blocks.0.mlp: compute=fp32", r"names no module that computes.*add `\.\*\*`"),
    ("bf16-mixed; blocks: grad_weight=bf16", r"names no module that holds a parameter.*add `\.\*\*`"),
    ("bf16-mixed,emulate=true; blocks.0.mlp: grad=fp32", "names no module that computes"),
    ("bf16-mixed; blocks.0.mlp.up: norm=bf16", "names no norm"),
    ("bf16-mixed; final_norm: softmax=bf16", "names no softmax"),
    ("bf16-mixed,matmul=fp32:fast", "fast"),
    ("bf16-mixed,emulate=true,compute=e4m3:row:delayed", "delayed"),
    ("bf16-mixed,compute=e3m2", "emulate=true"),
    ("bf16-mixed; nowhere.*: compute=fp32", "nowhere"),
    ("bf16-mixed; blocks.0.mlp.up: grad=fp32; lm_head: compute=fp32", "activation's own (dtype|format)"),
    ("bf16-mixed,emulate=true; blocks.0.mlp: compute=e4m3", "names no matmul"),
    ("bf16-mixed,emulate=true; **.attn: compute=e4m3", "names no matmul"),
    ("bf16-mixed; blocks.0.attn_norm: compute=e4m3", "names no matmul|emulate=true"),
    ("bf16-mixed; lm_head: param=bf16", "holds a parameter"),
    ("bf16-mixed; lm_head: moments=bf16", "holds a parameter"),
    ("compute=tf32", "tf32 cannot run"),
]


@pytest.mark.parametrize(("policy", "said"), REFUSED)
def test_what_would_change_nothing_is_refused_with_the_reason(backend, policy, said):
    with pytest.raises(HalfstepError, match=said) as caught:
        session(backend, policy)
    assert caught.value.hint


def test_what_one_backend_lacks_is_refused_with_the_reason(backend):
    for (name, policy), said in REFUSED_BY.items():
        if name == backend.name:
            with pytest.raises(HalfstepError, match=said):
                session(backend, policy)
