"""What people do with a model of Hugging Face once it is prepared: right, or refused with the remedy."""

import sys

import pytest
import torch
from torch import nn

from benchmarks import zoo
from halfstep.core.errors import HalfstepError
from halfstep.torch.run import prepare
from tests.torch.nets import same

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SPLIT = "bf16-mixed,param=fp32:split"
DELAYED = "bf16-mixed,compute=e4m3:delayed,grad=e5m2:delayed,emulate=true"


def prepared(name, policy="bf16-mixed", kind=torch.optim.AdamW, attention="sdpa"):
    family = zoo.FAMILIES[name]
    pytest.importorskip(family.package, reason=f"{family.package} is not installed")
    model, loss = family.make(attention)
    return prepare(model, kind(model.parameters(), lr=1e-3), policy), lambda _: loss(model)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, SPLIT) for name in ("gpt2", "llama", "qwen3", "mixtral")),
        *(pytest.param(name, "fp16-mixed", marks=pytest.mark.prove) for name in ("gpt2", "mixtral")),
        *(pytest.param(name, "fp8-mixed,emulate=true", marks=pytest.mark.prove) for name in ("llama", "qwen3")),
    ],
)
def test_generation_is_the_same_with_every_cache_and_scores_are_fp32(name, policy):
    run, _ = prepared(name, policy)
    model = run.model.eval()
    model.config.output_router_logits = False
    asked = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": -1}
    with torch.no_grad(), run.evaluation():
        found = model.generate(zoo.tokens(), **asked, return_dict_in_generate=True, output_scores=True)
        whole = model.generate(zoo.tokens(), **asked, use_cache=False)
        static = model.generate(zoo.tokens(), **asked, cache_implementation="static", disable_compile=True)
        beams = model.generate(zoo.tokens(), **asked, num_beams=2)
    assert {score.dtype for score in found.scores} == {torch.float32}
    assert same((found.sequences, found.sequences), (whole, static))
    assert beams.shape == whole.shape == (2, 11)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_an_encoder_and_decoder_generates(name):
    run, _ = prepared(name, SPLIT)
    given = zoo._noise(2, 8, 16) if name == "whisper" else zoo.tokens()
    with torch.no_grad():
        assert run.model.eval().generate(given, max_new_tokens=3, do_sample=False).shape[0] == 2


@pytest.mark.prove
@pytest.mark.parametrize("policy", [SPLIT, "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_what_save_pretrained_writes_is_loaded_again_exactly_as_it_is_by_default(name, policy, tmp_path):
    """Hazard: a configuration that says bf16 although masters are fp32, which loading would then round."""
    run, loss = prepared(name, policy)
    run.step(loss, [0])
    run.model.save_pretrained(tmp_path)
    package = transformers if hasattr(transformers, type(run.model).__name__) else sys.modules["diffusers"]
    again = getattr(package, type(run.model).__name__).from_pretrained(tmp_path)
    weights = run.weights()
    frozen = {n for n, p in run.model.named_parameters() if not p.requires_grad}  # Whisper's positions stay fp32
    assert all(torch.equal(p.float(), weights[n]) for n, p in again.named_parameters() if n not in frozen)
    if package is transformers:
        assert again.dtype == run.model.dtype == (torch.bfloat16 if policy == "bf16-true" else torch.float32)


def test_tying_again_changes_nothing_and_untying_and_later_adapters_are_refused():
    run, loss = prepared("gpt2", SPLIT)
    run.step(loss, [0])
    before = run.weights()
    run.model.tie_weights()
    assert all(torch.equal(w, before[n]) for n, w in run.weights().items())
    assert run.model.lm_head.weight is run.model.transformer.wte.weight
    run.step(loss, [0])
    run.model.lm_head.weight = nn.Parameter(run.model.lm_head.weight.detach().float())
    with pytest.raises(HalfstepError, match=r"`lm_head.weight` was not there when the model was prepared"):
        run.step(loss, [0])
    peft = pytest.importorskip("peft", reason="peft is not installed")
    run, loss = prepared("llama")
    peft.get_peft_model(run.model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(HalfstepError, match=r"lora_A.default.weight` was not there .* \(4 such parameters\)"):
        run.step(loss, [0])


@pytest.mark.prove
def test_attention_may_be_chosen_after_and_a_frozen_bf16_base_says_that_it_is_bf16():
    run, loss = prepared("llama", SPLIT)
    other, _ = prepared("llama", SPLIT, attention="eager")
    run.model.set_attn_implementation("eager")
    batch = zoo.tokens()
    with torch.no_grad():
        assert torch.equal(run.model(batch).logits, other.model(batch).logits)
    run.step(loss, [0])
    run, _ = prepared("llama", SPLIT)
    assert run.model.model.dtype == torch.float32  # a part of it too
    assert type(run.unprepare()).dtype is transformers.PreTrainedModel.dtype
    model, _ = zoo.FAMILIES["llama"].make()
    model.bfloat16().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    prepare(model, torch.optim.SGD(model.lm_head.parameters(), lr=0.1), SPLIT)
    assert model.dtype == torch.bfloat16


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, SPLIT) for name in ("mixtral", "unet", "t5")),
        *((name, DELAYED) for name in ("mixtral", "llama", "dit")),
    ],
)
def test_checkpointing_that_is_turned_on_after_changes_no_bit(name, policy):
    """With torch's own attention it may: torch chooses the kernel by whether a mask has a gradient."""
    found = []
    for on in (False, True):
        run, loss = prepared(name, policy, attention="eager")
        if on and hasattr(run.model, "gradient_checkpointing_enable"):
            run.model.gradient_checkpointing_enable()
        elif on:
            run.model.enable_gradient_checkpointing()
        result = run.step(loss, [0])
        found.append((result.loss, run.weights()))
    (first, weights), (second, again) = found
    assert torch.equal(first, second)
    assert all(torch.equal(w, again[n]) for n, w in weights.items())
