"""FLOPs per token: the number that measurements elsewhere in the repository use, and what enters it."""

import pytest

from halfstep.config.load import load
from halfstep.config.model import flops_per_token, matmul_parameters


def model(*overrides):
    return load("tiny", [f"model.{o}" for o in overrides]).model


def test_gpt2_is_what_its_measurements_say_and_each_matrix_counts_once():
    gpt2 = load("gpt2").model
    assert matmul_parameters(gpt2) == 12 * 12 * 768**2 + 50304 * 768
    assert flops_per_token(gpt2) == 854_654_976  # 854.7 million
    assert flops_per_token(model("tied=true")) == flops_per_token(model("tied=false"))
    more = flops_per_token(model("vocabulary=257")) - flops_per_token(model("vocabulary=256"))
    assert more == 6 * model().width
    base = ("width=128", "heads=4", "context=64", "layers=2")
    wide = flops_per_token(model(*base, "head_width=64")) - flops_per_token(model(*base, "head_width=32"))
    assert wide == 6 * 2 * 4 * 128 * 128 + 12 * 2 * 128 * 64  # four projections, and the scores
    fewer = flops_per_token(model(*base, "kv_heads=4")) - flops_per_token(model(*base, "kv_heads=1"))
    assert fewer == 6 * 2 * 2 * 96 * 128  # keys and values are smaller; every query meets as many keys


@pytest.mark.parametrize("what", ["bias=true", "qk_norm=gain", "unet_skips=true", "value_residual=true"])
def test_what_multiplies_no_matrix_does_not_count(what):
    assert flops_per_token(model(what)) == flops_per_token(model())
