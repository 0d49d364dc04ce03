"""Who updates what: every parameter once, each kind at its own rate."""

import pytest

from halfstep.config.groups import parameter_groups
from halfstep.config.load import load
from halfstep.config.model import ModelConfig, parameter_shapes
from halfstep.config.run import OptimizerConfig, RunConfig
from halfstep.core.errors import SettingConflictError

UNTIED = ModelConfig(layers=2, width=16, heads=2, tied=False, positions="learned", bias=True, norm="layer")
RATES = {"rate": 9.0, "embedding_rate": 0.1, "head_rate": 0.2, "scalar_rate": 0.3, "muon_rate": 0.5}


def rates(model, config):
    return {name: group for group in parameter_groups(model, config) for name in group.names}


@pytest.mark.parametrize("recipe", ["tiny", "gpt2", "qwen3", "speedrun", "golf"])
def test_every_parameter_is_in_one_group(recipe):
    config = load(recipe)
    names = [name for group in parameter_groups(config.model, config.optimizer) for name in group.names]
    assert sorted(names) == sorted(parameter_shapes(config.model))


def test_each_kind_has_its_own_rate_or_the_common_one():
    result = rates(UNTIED, OptimizerConfig(name="muon", weight_decay=0.1, muon_weight_decay=0.2, **RATES))
    expected = {
        "embed.weight": (False, 0.1, 0.1),
        "positions.weight": (False, 0.1, 0.1),
        "lm_head.weight": (False, 0.2, 0.1),
        "final_norm.weight": (False, 0.3, 0.0),
        "blocks.1.mlp.up.bias": (False, 0.3, 0.0),
        "blocks.1.mlp.up.weight": (True, 0.5, 0.2),
    }
    for name, settings in expected.items():
        assert (result[name].muon, result[name].rate, result[name].weight_decay) == settings, name
    plain = rates(UNTIED, OptimizerConfig(name="adamw", **RATES))
    assert (plain["blocks.1.mlp.up.weight"].muon, plain["blocks.1.mlp.up.weight"].rate) == (False, 9.0)
    first, second = parameter_groups(UNTIED, OptimizerConfig(rate=0.7, weight_decay=0.0))
    assert (first.rate, second.rate) == (0.7, 0.7)
    assert {"embed.weight", "lm_head.weight", "blocks.0.attn.q.weight"} <= set(first.names)


def test_the_recipes_of_the_sources():
    speedrun, golf = load("speedrun"), load("golf")
    result = rates(speedrun.model, speedrun.optimizer)
    assert [result[name].rate for name in ("embed.weight", "lm_head.weight", "blocks.3.residual_mix")] == [
        0.3,
        0.002,
        0.02,
    ]
    assert (result["blocks.3.attn.q.weight"].muon, result["blocks.3.attn.q.weight"].rate) == (True, 0.02)
    result = rates(golf.model, golf.optimizer)
    # two-dimensional, but still a factor
    for name in ("skip_weights", "blocks.3.residual_mix", "blocks.3.attn.q_gain"):
        assert (result[name].muon, result[name].rate) == (False, 0.04)
    assert result["embed.weight"].rate == 0.05
    assert {group.weight_decay for group in result.values()} == {0.0}


def test_a_rate_for_a_head_that_is_the_embedding_is_refused():
    with pytest.raises(SettingConflictError):
        RunConfig(optimizer=OptimizerConfig(head_rate=0.1))
