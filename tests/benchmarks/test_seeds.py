"""One compiled model serves all seeds of an arm, and nothing of a seed is left for the next."""

from dataclasses import replace

import pytest
import torch

from benchmarks.race import seeds
from benchmarks.race.seeds import Setting, make_arm
from halfstep.training.data.load import load_corpus

TINY = Setting(
    layers=1,
    width=32,
    heads=2,
    context=16,
    vocabulary=256,
    batch=2,
    steps=4,
    rate=1e-2,
    end=0.0,
    ema=0.5,
    held_out=4,
    device="cpu",
)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus("stdlib", 0.1, 256)


def ended(arm, seed, corpus):
    """The last event of a run, without its time."""
    *_, last = arm.train(seed, corpus)
    return {key: value for key, value in last.items() if key != "seconds"}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fp32", {}),
        ("fp16-mixed,param=fp32:split", {}),
        ("bf16-mixed,emulate=true", {"optimizer": "muon"}),
        ("bf16-true,param=bf16:stochastic,emulate=true", {}),
        ("autocast", {}),
        ("pure-bf16", {}),
    ],
)
def test_a_seed_after_another_is_the_seed_alone(corpus, name, more):
    both, alone = (make_arm(name, replace(TINY, **more)) for _ in range(2))
    first = ended(both, 0, corpus)
    assert ended(both, 1, corpus) == ended(alone, 1, corpus) != first
    assert ended(both, 0, corpus) == first
    assert first["held_out"] != first["held_out_last"]


def test_arms_begin_with_the_same_weights_and_see_the_same_data(corpus):
    """In fp32 a policy of ours and torch alone are the same training, averages included."""
    ours = ended(make_arm("fp32", TINY), 3, corpus)
    library = seeds.Library.__new__(seeds.Library)
    library.__init__("autocast", TINY)
    library.stock.context = seeds.ExitStack  # no autocast: fp32
    theirs = ended(library, 3, corpus)
    assert theirs["held_out"] == pytest.approx(ours["held_out"], rel=1e-5)
    assert theirs["held_out_last"] == pytest.approx(ours["held_out_last"], rel=1e-5)


def test_a_nudge_moves_each_weight_by_one_unit_in_its_last_place(corpus):
    plain, nudged, other = (replace(TINY, nudge=nudge).first_weights(0) for nudge in (0, 1, 2))
    for weights, moved in zip(plain, nudged, strict=True):
        lower, upper = (torch.nextafter(weights, torch.tensor(end)) for end in (-torch.inf, torch.inf))
        assert bool(((moved == lower) | (moved == upper)).all())
        assert not bool((moved == weights).any())
    assert any(bool((a != b).any()) for a, b in zip(nudged, other, strict=True))
    arms = [make_arm("bf16-mixed,param=fp32:split,emulate=true", replace(TINY, nudge=nudge)) for nudge in (0, 1)]
    assert ended(arms[0], 0, corpus).keys() == ended(arms[1], 0, corpus).keys()
    trained = [arm.run.weights()["h.0.mlp.c_fc.weight"] for arm in arms]
    assert bool((trained[0] != trained[1]).float().mean() > 0.5)  # the nudge is in the masters


def test_fine_tuning_begins_with_a_file_rounded_or_not(corpus, tmp_path):
    from safetensors.torch import save_file

    base = make_arm("fp32", TINY)
    ended(base, 0, corpus)
    weights = {name: w for name, w in base.run.weights().items() if name != "lm_head.weight"}
    save_file(weights, tmp_path / "base.safetensors")
    setting = replace(TINY, init=str(tmp_path / "base.safetensors"), rate=1e-6)
    exact = list(make_arm("fp32", setting).train(7, corpus))[-1]
    assert exact["before"] == pytest.approx(base.held_out(corpus, averaged=False), rel=1e-6)
    rounded = replace(setting, rounded=True)
    assert all(bool((w == w.bfloat16()).all()) for w in rounded.first_weights(7))
    lost = ended(make_arm("pure-bf16", rounded), 7, corpus)["lost"]
    assert 0.9 < lost <= 1  # at such a rate bf16 weights hardly move


def test_rates_go_up_and_down_to_the_end_that_is_asked_for():
    steps = replace(TINY, steps=100)
    factors = [steps.factor(step) for step in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[99] == pytest.approx(1 / 95)
    assert replace(steps, end=0.1).factor(99) == pytest.approx(0.1 + 0.9 / 95)


def test_pairs_are_judged_by_compare_and_not_by_their_spread(capsys):
    """What the older rule called inside the spread."""
    fp32, bf16 = [2.3549, 2.3875, 2.3645], [2.3756, 2.3918, 2.3689]
    assert seeds.judge({"fp32": fp32, "bf16-mixed": bf16}) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "CANNOT TELL, about" in line
    assert seeds.judge({"fp32": fp32, "worse": [loss + 0.1 for loss in fp32]}) == 1
