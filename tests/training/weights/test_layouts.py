"""GPT-2 and Qwen3 as transformers lays them out, made by hand: what fits is read, all else is refused by name."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from halfstep.config.load import load
from halfstep.config.model import parameter_shapes
from halfstep.config.weights import initial_weights
from halfstep.core.errors import HalfstepError
from halfstep.training.weights import layouts
from halfstep.training.weights.pretrained import open_pretrained
from halfstep.training.weights.safetensors import WeightsFitError
from tests.refusals import refuses

LAYERS, VOCABULARY = 2, 128
SIZES = [f"vocabulary={VOCABULARY}", "context=16", f"layers={LAYERS}", "width=32", "heads=4"]
SMALL = [f"model.{size}" for size in SIZES]
TINY = load("gpt2", SMALL).model
TINY_QWEN3 = load("qwen3", [*SMALL, "model.kv_heads=2", "model.head_width=16", "model.mlp_width=64"]).model


def tensors_of(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"wte.weight": (VOCABULARY, 32), "wpe.weight": (16, 32), "ln_f.weight": (32,), "ln_f.bias": (32,)}
    sizes = {"attn.c_attn": 96, "attn.c_proj": 32, "mlp.c_fc": 128, "mlp.c_proj": 32}
    for layer in range(LAYERS):
        for part in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{part}.{kind}": (32,) for kind in ("weight", "bias")}
        for part, outputs in sizes.items():
            inputs = 128 if part == "mlp.c_proj" else 32
            shapes |= {f"h.{layer}.{part}.weight": (inputs, outputs), f"h.{layer}.{part}.bias": (outputs,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


CONFIG = {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": 32, "n_head": 4, "n_positions": 16}
CONFIG |= {"vocab_size": VOCABULARY}


def write(path, tensors=None, config=CONFIG, name="model.safetensors"):
    path.mkdir(exist_ok=True)
    save_file(tensors or tensors_of(), path / name)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def weights_at(path, model=TINY):
    return dict(open_pretrained(str(path), model).weights())


def test_every_parameter_is_found_whatever_the_prefix_and_in_a_single_file(tmp_path):
    tensors = tensors_of()
    bare = weights_at(write(tmp_path / "bare", tensors))
    assert {name: value.shape for name, value in bare.items()} == parameter_shapes(TINY)
    prefixed = weights_at(write(tmp_path / "with", {f"transformer.{name}": t for name, t in tensors.items()}))
    assert all((bare[name] == prefixed[name]).all() for name in bare)
    assert (bare["blocks.0.attn.v.weight"] == tensors["h.0.attn.c_attn.weight"][:, 64:].T).all()
    path = write(tmp_path, config=None) / "model.safetensors"
    found = open_pretrained(str(path), TINY)
    assert any("no config.json describes it" in note and "unchecked" in note for note in found.notes)
    assert found.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "n_head": 8}))  # one next to it is believed
    with pytest.raises(WeightsFitError, match=r"model\.heads is 8 there and 4 here"):
        open_pretrained(str(path), TINY)


def test_masks_and_a_repeated_head_are_skipped_with_a_note(tmp_path):
    tensors = tensors_of()
    tensors["lm_head.weight"] = tensors["wte.weight"].copy()
    for layer in range(LAYERS):
        tensors[f"h.{layer}.attn.bias"] = np.ones((1, 1, 16, 16), np.uint8)
        tensors[f"h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    found = open_pretrained(str(write(tmp_path, tensors, {**CONFIG, "attn_pdrop": 0.1})), TINY)
    assert "4 tensors are skipped: attention masks, not weights" in found.notes
    assert "config.json has dropout (attn_pdrop 0.1), and our decoder has none" in found.notes
    assert {name for name, _ in found.weights()} == parameter_shapes(TINY).keys()


def test_contexts_vocabularies_and_formats_are_made_to_fit_with_a_note(tmp_path):
    found = open_pretrained(str(write(tmp_path)), replace(TINY, context=10))
    assert (dict(found.weights())["positions.weight"] == tensors_of()["wpe.weight"][:10]).all()
    assert "the first 10 of 16 positions are used" in found.notes
    embedding = weights_at(write(tmp_path), replace(TINY, vocabulary=130))["embed.weight"]
    mean = np.float64(tensors_of()["wte.weight"]).mean(0).astype(np.float32)
    assert (embedding[:VOCABULARY] == tensors_of()["wte.weight"]).all()
    assert (embedding[VOCABULARY:] == mean).all()
    narrow = {name: t.astype(np.float16) for name, t in tensors_of().items()}
    found = open_pretrained(str(write(tmp_path, narrow)), TINY)
    assert any("held in fp16 and widened to fp32, exactly" in note for note in found.notes)
    assert (dict(found.weights())["embed.weight"] == narrow["wte.weight"].astype(np.float32)).all()


# (what is changed in config.json, what is said, what the hint says)
CONFIGS = [
    ({"n_layer": 3, "n_embd": 48, "n_head": 6}, "layers is 3 there and 2 here, .*width is 48 .* 32 here, .*6",
     "use --set model.layers=3 --set model.width=48 --set model.heads=6"),
    ({"n_inner": 100}, "mlp_width is 100 there and 128 here", "use --set model.mlp_width=100"),
    ({"vocab_size": 200}, "vocabulary is 200 there and 128", "use --set model.vocabulary=200"),
    ({"n_positions": 8}, "context is 8 there and 16 here", "use --set model.context=8"),
    ({"activation_function": "relu"}, "activation_function = 'relu', which no setting", "prepare"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True", "prepare"),
    ({"scale_attn_weights": False}, "scale_attn_weights = False", "prepare"),
    ({"model_type": "llama"}, "is a model of type `llama`; weights are read of gpt2, qwen3", "any"),
    ({"quantization_config": {}}, "are quantized", "use the unquantized ones"),
    ({"n_embd": "wide"}, "does not describe a model", "fetch"),
    ({"n_embd": None}, "does not describe a model", "fetch"),
    ({"n_head": 7}, "does not describe a model: model.width is 32, which 7 heads do not divide", "fetch"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said", "hint"), CONFIGS)
def test_a_description_that_does_not_fit_is_refused(changes, said, hint, tmp_path):
    write(tmp_path, config={**CONFIG, **changes})
    with refuses(HalfstepError, said, hint):
        open_pretrained(str(tmp_path), TINY)


def set_tensor(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


NAN = np.full((32,), np.nan, np.float32)
FAULTS = [
    (lambda t: t.pop("h.1.mlp.c_fc.bias"), "no tensor `h.1.mlp.c_fc.bias`, which is `blocks.1.mlp.up.bias`"),
    (set_tensor("score.weight", np.zeros((2, 32), np.float32)), "`score.weight` of .* has no place"),
    (set_tensor("h.1.ln_1.bias", np.zeros(31, np.float32)), r"shape \(31,\), expected \(32,\)"),
    (set_tensor("h.1.mlp.c_fc.weight", np.zeros((128, 32), np.float32)), r"\(128, 32\), expected \(32, 128\)"),
    (set_tensor("ln_f.bias", np.zeros(32)), "`ln_f.bias` in .* is held in F64"),
    (set_tensor("ln_f.bias", np.zeros(32, np.int8)), "is held in I8"),
    (set_tensor("ln_f.bias", NAN), "`ln_f.bias` of .* numbers that are not finite: 32 of 32"),
    (set_tensor("lm_head.weight", np.zeros((VOCABULARY, 32), np.float32)), "ties head and embedding"),
]


@pytest.mark.parametrize(("change", "said"), FAULTS)
def test_tensors_that_do_not_fit_are_refused_by_name(change, said, tmp_path):
    tensors = tensors_of()
    change(tensors)
    with pytest.raises(HalfstepError, match=said):
        weights_at(write(tmp_path, tensors))


def test_shapes_alone_name_the_settings_too(tmp_path):
    write(tmp_path, config=None)
    with pytest.raises(WeightsFitError) as caught:
        open_pretrained(str(tmp_path), load("gpt2").model)
    asked = caught.value.hint.removeprefix("use --set model.").split(" --set model.")
    # Of heads a file says nothing; the recipe's 12 do not divide 32, so that one setting is the user's to add.
    fitted = load("gpt2", [*(f"model.{setting}" for setting in [*asked, "heads=4", "vocabulary=128"])]).model
    open_pretrained(str(tmp_path), fitted)
    with pytest.raises(WeightsFitError) as caught:
        open_pretrained(str(tmp_path), load("tiny").model)
    assert caught.value.hint.startswith(
        f"begin with the recipe, `halfstep train gpt2 --init {tmp_path}`, or use --set"
    )
    assert "--set model.positions=learned" in caught.value.hint
    assert "--set model.norm=layer" in caught.value.hint


QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
QWEN3 |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6}
QWEN3 |= {"tie_word_embeddings": True, "rope_theta": 1000000, "rope_scaling": None}
BAD_QWEN3 = [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),  # of older versions
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}}, "rope_type = 'yarn'"),
    ({"use_sliding_window": True}, "use_sliding_window = True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"rope_theta": 10000}, "rope_base is 10000.0 there and 1000000.0 here"),
    ({"max_position_embeddings": 8}, "context is 8 there and 16 here"),
    ({"num_key_value_heads": 4}, "kv_heads is 4 there and 2 here"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
    ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ({"rope_scaling": ["yarn"]}, "does not describe a model"),
]


def qwen3_tensors():
    names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    names |= {f"attn.{part}": f"self_attn.{part}_proj" for part in "qkvo"}
    names |= {f"mlp.{part}": f"mlp.{part}_proj" for part in ("up", "gate", "down")}
    tensors = {}
    for name, shape in parameter_shapes(TINY_QWEN3).items():
        value = np.random.default_rng(len(tensors)).standard_normal(shape).astype(np.float32)
        if name.startswith("blocks."):
            _, layer, part = name.removesuffix(".weight").split(".", 2)
            theirs = names.get(part, part.replace("attn.", "self_attn."))
            tensors[f"model.layers.{layer}.{theirs}.weight"] = value
        else:
            tensors[
                {"embed.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}[name]
            ] = value
    return tensors


@pytest.mark.parametrize(("changes", "said"), BAD_QWEN3)
def test_what_qwen3_can_be_and_our_decoder_not_is_refused(changes, said, tmp_path):
    model = TINY_QWEN3
    write(tmp_path, qwen3_tensors(), QWEN3)
    assert {name: w.shape for name, w in weights_at(tmp_path, model).items()} == parameter_shapes(model)
    write(tmp_path, qwen3_tensors(), {**QWEN3, **changes})
    with pytest.raises(HalfstepError, match=said):
        open_pretrained(str(tmp_path), model)


def renamed(name):
    return lambda path: (write(path) / "model.safetensors").rename(path / name)


def described(content):
    return lambda path: (write(path) / "config.json").write_text(content) and path


TWICE = tensors_of() | {"transformer.wpe.weight": tensors_of()["wpe.weight"] + 1}
# (what is named, what is said, what the hint says)
ODD = [
    (lambda path: path / "gpt2", "there is no file or folder", "hf download"),
    (lambda path: "a" * 5000, "cannot be read", "write the path out"),
    (lambda path: path / f"{'a' * 300}.safetensors", "File name too long", "write the path"),
    (lambda path: "~nobody-of-that-name/x", "cannot be read", "write the path out"),
    (lambda path: "", "the path to take weights from is empty", "name a file"),
    (lambda path: " ", "the path to take weights from is empty", "name a file"),
    (lambda path: write(path) / "config.json", "config.json` describes weights but holds none", "holds both, `"),
    (renamed("model.safetensors.index.json"), "index.json` describes weights but holds none", "holds both, `"),
    (renamed("pytorch_model.bin"), "pytorch_model.bin` is a pickle", "again as safetensors"),
    (lambda path: renamed("consolidated.00.pth")(path).parent, "as a pickle, `consolidated.00.pth`", "again"),
    (lambda path: write(path, TWICE), "`(transformer.)?wpe.weight` of .* has no place", "more than one"),
    (lambda path: write(path, {"x": NAN}, None), "no tensor that identifies its model", "prepare"),
    (lambda path: write(path, {"x": NAN}, {"n_head": 4}), "no tensor that identifies", "prepare"),
    (described("{"), "is not JSON", "again"),
    (described("[1]"), "holds no table", "again"),
]


@pytest.mark.parametrize(("make", "said", "hint"), ODD)
def test_what_is_not_a_model_is_refused_with_the_remedy(make, said, hint, tmp_path):
    with refuses(HalfstepError, said, hint):
        open_pretrained(str(make(tmp_path)), TINY)


def test_other_weights_than_the_digest_names_are_refused_and_a_head_rotated_whole_is_ours(tmp_path):
    write(tmp_path)
    found = open_pretrained(str(tmp_path), TINY).digest
    assert open_pretrained(str(tmp_path), TINY, found.upper()).digest == found
    with pytest.raises(WeightsFitError, match=f"has the SHA-256 {found}, and init_digest is 00") as caught:
        open_pretrained(str(tmp_path), TINY, "0" * 64)
    assert "--set init_digest=" in caught.value.hint
    whole = {"rope_parameters": {**QWEN3.get("rope_parameters", {}), "partial_rotary_factor": 1.0}}
    write(tmp_path, qwen3_tensors(), {**QWEN3, **whole, "partial_rotary_factor": 1})
    assert weights_at(tmp_path, TINY_QWEN3).keys() == parameter_shapes(TINY_QWEN3).keys()


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (layouts.GPT2, TINY),
        (layouts.GPT2, replace(TINY, tied=False, mlp="gelu_exact", norm_epsilon=3e-4, mlp_width=48)),
        (layouts.QWEN3, TINY_QWEN3),
        (layouts.QWEN3, replace(TINY_QWEN3, tied=False, rope_base=5e5, norm_epsilon=1e-5)),
    ],
)
def test_what_is_laid_out_is_read_back_bit_for_bit(tmp_path, layout, model):
    assert layouts.hugging_face(model) is layout
    weights = dict(initial_weights(replace(model, zero_init=False), seed=3))
    tensors = dict(layout.lay_out(model, weights.items()))
    assert ("lm_head.weight" in tensors) == (not model.tied)
    found = weights_at(write(tmp_path, tensors, layout.to_config(model)), model)
    assert found.keys() == weights.keys()
    assert all((found[name] == weights[name]).all() for name in weights)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"qk_norm": "plain"}, "gpt2 has no qk_norm = plain"), ({"mlp": "relu2"}, "gpt2 has no mlp = relu2"),
     ({"softcap": 30.0}, "softcap = 30.0"), ({"kv_heads": 2}, "kv_heads = 2"), ({"bias": False}, "bias = false"),
     ({"unet_skips": True}, "unet_skips = true"), ({"value_residual": True}, "value_residual = true"),
     ({"head_width": 16}, "head_width = 16"), ({"positions": "none"}, "positions = none"),
     ({"embedding_norm": True}, "embedding_norm = true"), ({"norm_gain": False}, "norm_gain = false")],
)  # fmt: skip
def test_a_model_that_transformers_has_no_name_for_is_refused(change, said):
    with pytest.raises(WeightsFitError, match=f"has no Hugging Face layout: .*{said}"):
        layouts.hugging_face(replace(TINY, **change))
