"""What gradients notice of a format, and short runs of a model that a factory makes."""

import gc
import math
import weakref

import pytest
import torch

from halfstep.core.errors import ConfigError
from halfstep.core.formats import BF16, E4M3, FP32
from halfstep.core.policy import Policy
from halfstep.tools.tune.targets import FactoryTarget
from halfstep.torch.instruments.tuning import MatmulLayer, Trial, call_seeded, time_options, unsupported_formats
from tests.torch.instruments.tuning import models

BASE = "fp32,emulate=true"


def trial(factory, policy=BASE, seed=0):
    return Trial(lambda: call_seeded(factory, seed), Policy.parse(policy), seed)


def test_the_base_itself_loses_nothing():
    study = trial(models.net).study()
    assert study.descent_lost(Policy.parse(BASE)) == 0
    assert [layer.name for layer in study.layers] == ["0", "2", "4"]
    assert study.layers[0] == MatmulLayer("0", ((16, 32),), 64, bias=True)


def test_noise_of_independent_roundings_adds_up():
    study = trial(models.net).study()
    alone = [study.descent_lost(Policy.parse(f"{BASE}; {name}: compute=e4m3")) for name in "024"]
    both = study.descent_lost(Policy.parse(f"{BASE}; **: compute=e4m3"))
    assert all(0 < each < 0.01 for each in alone)
    assert both == pytest.approx(sum(alone), rel=0.5)  # each e^2 / 2, and cross terms of a few thousand elements


def test_a_fragile_layer_stands_out_and_only_in_the_format_that_breaks_it():
    study = trial(models.fragile).study()
    lost = {name: study.descent_lost(Policy.parse(f"{BASE}; {name}: compute=e4m3")) for name in "024"}
    assert lost["2"] > 10 * max(lost["0"], lost["4"])
    assert study.descent_lost(Policy.parse(f"{BASE}; 2: compute=bf16")) < lost["2"] / 1000


def test_a_study_leaves_the_training_as_it_was():
    run, other = trial(models.net), trial(models.net)
    run.train(2)
    other.train(2)
    run.study().descent_lost(Policy.parse(f"{BASE}; 0: compute=e4m3"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.run.model.modules())
    assert run.train(2) == other.train(2)


def test_a_gradient_that_is_not_finite_is_all_lost():
    run = trial(models.net)
    study, run.loss_fn = run.study(), None
    study._loss_fn = lambda batch: run.run.model(batch[0]).sum() * torch.inf
    assert study.descent_lost(Policy.parse(BASE)) == math.inf


def test_runs_of_a_seed_are_the_same_and_others_differ():
    losses = [trial(models.net, seed=seed).train(6) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert trial(models.net).score() > losses[0]


def test_training_reports_each_step_and_scores_held_out_batches():
    seen = []
    run = trial(models.net)
    loss = run.train(3, seen.append)
    assert seen == [1, 2, 3]
    with torch.no_grad():
        expected = sum(float(run.loss_fn(batch)) for batch in run.held_out) / len(run.held_out)
    assert loss == expected


def test_one_batch_is_trained_on_and_judged_by_and_said():
    target = FactoryTarget("tests.torch.instruments.tuning.models:one_batch")
    assert "no held-out loss" in target.note
    assert target.train(Policy.parse(BASE), 0, 3, lambda step: None) < trial(models.one_batch).score()


def test_empty_batches_are_refused():
    with pytest.raises(ConfigError, match="an empty list for the batches to train on"):
        trial(models.no_batches)


def test_formats_that_the_hardware_lacks_have_a_reason():
    assert unsupported_formats([FP32], "cpu") == {}
    assert E4M3 in unsupported_formats([E4M3, FP32], "cpu")
    assert all(unsupported_formats([BF16, E4M3], "cpu").values())


def test_options_are_timed_and_what_no_kernel_runs_is_never_chosen(monkeypatch):
    study = trial(models.net, "fp32").study()
    policies = {"base": Policy.parse("fp32"), "narrow": Policy.parse("fp32; 0: compute=e4m3,grad=e5m2")}
    times = time_options(study, study.layers[0], policies, compiled=False)
    assert 0 < times["base"] < math.inf
    assert times["narrow"] > 0

    def timer(work, precisions):
        if any(precision.narrow for precision in precisions):
            raise RuntimeError("no kernel")
        return [0.5 for _ in precisions]

    monkeypatch.setattr("halfstep.torch.instruments.tuning.time_layer", timer)
    times = time_options(study, study.layers[0], policies, compiled=False)
    assert times == {"base": 0.5, "narrow": math.inf}


def test_bytes_and_sizes_that_no_fp8_kernel_takes():
    layer = MatmulLayer("a", ((16, 32),), 10)
    assert layer.num_bytes(8, 8) == 2 * (10 * 16 + 16 * 32) + 2 * 10 * 32
    assert layer.num_bytes(32, 8) - layer.num_bytes(8, 8) == 3 * 2 * (10 * 16 + 16 * 32)
    assert not layer.misfit
    assert "200 features" in MatmulLayer("b", ((200, 16),), 1).misfit


def test_a_new_trial_frees_what_earlier_ones_held():
    gc.disable()
    try:
        first = trial(models.net)
        first.train(1)
        held = weakref.ref(first.run.model)
        del first
        trial(models.net)
        assert held() is None
    finally:
        gc.enable()
