from dataclasses import replace

import pytest

from halfstep.config.load import load
from halfstep.config.model import ModelConfig, is_matmul, module_names, owner, parameter_shapes

SPEEDRUN = ModelConfig(
    vocabulary=50304,
    context=1024,
    layers=12,
    width=768,
    heads=6,
    mlp="relu2",
    norm_gain=False,
    qk_norm="plain",
    softcap=30,
    value_residual=True,
    embedding_shortcut="scalar",
    tied=False,
)
GOLF = ModelConfig(
    vocabulary=1024,
    context=1024,
    layers=9,
    width=512,
    heads=8,
    kv_heads=4,
    mlp="relu2",
    mlp_width=1024,
    norm_gain=False,
    qk_norm="plain",
    q_gain=True,
    softcap=30,
    unet_skips=True,
    embedding_shortcut="channel",
    branch_scale=True,
)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (SPEEDRUN, 12 * 12 * 768**2 + 2 * 50304 * 768 + 36),
        (SPEEDRUN, 162_201_636),
        (GOLF, 17_059_912),
        # OpenAI's GPT-2 small has 124,439,808 with 50,257 tokens; 47 rows more make 50,304
        (load("gpt2").model, 124_439_808 + 47 * 768),
        (load("qwen3").model, 596_049_920),  # Qwen3-0.6B
    ],
)
def test_parameter_counts_of_known_models(model, count):
    assert model.num_parameters == count


def test_modules_own_the_parameters_and_gainless_norms_are_modules_too():
    for model in (SPEEDRUN, GOLF, load("gpt2").model, replace(GOLF, norm_gain=True, bias=True)):
        names = module_names(model)
        assert len(set(names)) == len(names)
        for parameter in parameter_shapes(model):
            assert owner(parameter) in [*names, "skip_weights"]
        assert "final_norm" in names
        assert "lm_head" in names
        assert "blocks.0.attn_norm" in names


def test_matmuls_are_the_matrices_that_multiply():
    shapes = parameter_shapes(SPEEDRUN)
    matrices = [name for name in shapes if is_matmul(name)]
    assert len(matrices) == 12 * 6 + 1
    assert all(len(shapes[name]) == 2 for name in matrices)
    assert "embed.weight" not in matrices
