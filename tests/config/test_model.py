import math
import threading
from dataclasses import replace

import numpy as np
import pytest

from halfstep.config import weights
from halfstep.config.load import load
from halfstep.config.model import (
    ModelConfig,
    flops_per_token,
    is_matmul,
    matmul_parameters,
    module_names,
    owner,
    parameter_shapes,
)
from halfstep.config.weights import initial_weights
from halfstep.core.errors import SettingConflictError

SPEEDRUN, GOLF = load("speedrun").model, load("golf").model


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (SPEEDRUN, 12 * 12 * 768**2 + 2 * 50304 * 768 + 36),
        (SPEEDRUN, 162_201_636),
        (GOLF, 17_039_360 + 9 * (512 + 512 + 1024 + 8) + 4 * 512),
        (GOLF, 17_059_912),
        # OpenAI's GPT-2 small has 124,439,808 with 50,257 tokens; 47 rows more make 50,304
        (load("gpt2").model, 124_439_808 + 47 * 768),
        (load("qwen3").model, 596_049_920),  # Qwen3-0.6B
    ],
)
def test_parameter_counts_of_known_models(model, count):
    assert model.num_parameters == count


def test_modules_own_the_parameters_and_matmuls_are_the_matrices_that_multiply():
    for model in (SPEEDRUN, GOLF, load("gpt2").model, replace(GOLF, norm_gain=True, bias=True)):
        names = module_names(model)
        assert len(set(names)) == len(names)
        for parameter in parameter_shapes(model):
            assert owner(parameter) in [*names, "skip_weights"]
        for words in ("final_norm", "lm_head", "blocks.0.attn_norm"):
            assert words in names
    shapes = parameter_shapes(SPEEDRUN)
    matrices = [name for name in shapes if is_matmul(name)]
    assert len(matrices) == 12 * 6 + 1
    assert all(len(shapes[name]) == 2 for name in matrices)
    assert "embed.weight" not in matrices


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "speedrun", "golf"])
def test_a_recipe_sees_half_a_million_tokens_per_step(name):
    training, model = load(name).training, load(name).model
    assert training.batch * training.micro_batches * model.context == 524_288


@pytest.mark.parametrize(("name", "steps", "warmdown"), [("speedrun", 3242, 926), ("golf", 13780, 1200)])
def test_schedules_are_those_of_the_sources(name, steps, warmdown):
    training, optimizer = load(name).training, load(name).optimizer
    assert (training.steps, round(training.warmdown * steps), training.warmup) == (steps, warmdown, 0)
    assert (optimizer.muon_momentum_start, optimizer.muon_momentum, optimizer.muon_momentum_warmup) == (
        0.85,
        0.95,
        500,
    )


@pytest.mark.parametrize(
    ("layers", "pairs"), [(9, {4: 3, 5: 2, 6: 1, 7: 0}), (4, {2: 1, 3: 0}), (3, {1: 0}), (1, {})]
)
def test_skips_go_from_the_first_half_to_the_second_last_in_first_out(layers, pairs):
    model = ModelConfig(layers=layers, unet_skips=True)
    result = {layer: model.skip_into(layer) for layer in range(layers)}
    assert {layer: source for layer, source in result.items() if source is not None} == pairs
    assert not any(ModelConfig(layers=layers).skip_into(layer) is not None for layer in range(layers))


def test_first_weights_are_those_of_the_sources_and_a_tied_head_is_not_zero():
    speedrun = dict(initial_weights(replace(SPEEDRUN, vocabulary=512, width=96, layers=1), 0))
    assert not speedrun["lm_head.weight"].any()
    assert speedrun["embed.weight"].std() == pytest.approx(1.0, rel=0.02)
    golf = dict(initial_weights(replace(GOLF, width=64, layers=1), 0))
    assert golf["embed.weight"].std() == pytest.approx(0.005, rel=0.02)
    assert (golf["blocks.0.attn.q_gain"] == 1.5).all()
    assert not golf["blocks.0.attn.o.weight"].any()
    assert golf["blocks.0.attn.q.weight"].std() == pytest.approx((3 * 64) ** -0.5, rel=0.05)
    with pytest.raises(SettingConflictError, match="zero_head"):
        ModelConfig(tied=True, zero_head=True)


def test_initial_weights_are_drawn_by_several_threads_in_order_and_few_wait_for_the_caller(monkeypatch):
    model, draw = ModelConfig(layers=3, width=64), weights._initial
    alone = {name: draw(model, 5, name, shape) for name, shape in parameter_shapes(model).items()}
    together, begun = threading.Barrier(3), []

    def draw_together(*given):
        begun.append(given[3])
        if len(begun) <= 3:
            together.wait(timeout=60)
        return draw(*given)

    monkeypatch.setattr(weights.host, "threads", lambda: 3)
    monkeypatch.setattr(weights, "_initial", draw_together)
    monkeypatch.setattr(weights, "MOST_WAITING", most := 64 * 256 * 2)
    drawn = {}
    for name, value in initial_weights(model, 5):
        drawn[name] = value
        sizes = [math.prod(shape) for shape in begun]
        assert sum(sizes) - max(sizes) - sum(v.size for v in drawn.values()) <= most
    assert [*drawn] == [*alone]
    assert all(np.array_equal(drawn[name], value) for name, value in alone.items())


def tiny(*overrides):
    return load("tiny", [f"model.{o}" for o in overrides]).model


def test_gpt2_is_what_its_measurements_say_and_each_matrix_counts_once():
    gpt2 = load("gpt2").model
    assert matmul_parameters(gpt2) == 12 * 12 * 768**2 + 50304 * 768
    assert flops_per_token(gpt2) == 854_654_976  # 854.7 million
    assert flops_per_token(tiny("tied=true")) == flops_per_token(tiny("tied=false"))
    more = flops_per_token(tiny("vocabulary=257")) - flops_per_token(tiny("vocabulary=256"))
    assert more == 6 * tiny().width
    base = ("width=128", "heads=4", "context=64", "layers=2")
    wide = flops_per_token(tiny(*base, "head_width=64")) - flops_per_token(tiny(*base, "head_width=32"))
    assert wide == 6 * 2 * 4 * 128 * 128 + 12 * 2 * 128 * 64  # four projections, and the scores
    fewer = flops_per_token(tiny(*base, "kv_heads=4")) - flops_per_token(tiny(*base, "kv_heads=1"))
    assert fewer == 6 * 2 * 2 * 96 * 128  # keys and values are smaller; every query meets as many keys


@pytest.mark.parametrize("what", ["bias=true", "qk_norm=gain", "unet_skips=true", "value_residual=true"])
def test_what_multiplies_no_matrix_does_not_count(what):
    assert flops_per_token(tiny(what)) == flops_per_token(tiny())
