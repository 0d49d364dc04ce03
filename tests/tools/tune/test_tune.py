"""The search around a target that trains nothing: what is asked, kept, resumed and refused."""

import io
import itertools
import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from halfstep.cli.main import run
from halfstep.cli.tune import _Progress
from halfstep.config.load import read_policy
from halfstep.core.errors import ConfigError, PolicyError
from halfstep.core.policy import Policy
from halfstep.tools.tune.reasons import policy_file, summary
from halfstep.tools.tune.targets import base_of, target_of
from halfstep.tools.tune.tune import Settings, Tuner
from halfstep.torch.instruments.tuning import MatmulLayer
from halfstep.training.files import RunLock

NAMES = [f"blocks.{i}.mlp.{part}" for i in range(3) for part in ("up", "down")]
FRAGILE = "blocks.1.mlp.down"
SETTINGS = Settings("fake", "fp32", ("e4m3",), ("e5m2", "e4m3"), "same", 10, 4, 8, 12)


class Fake:
    """Losses by formula: the seed, and a rise for each narrow module."""

    compiled, named, note, device = False, None, "", None

    def __init__(self, rises=None, noise=0.0, spread=0.1):
        self.rises, self.noise, self.spread, self.trained = rises or {}, noise, spread, []

    def narrow(self, policy):
        values = policy.resolve(NAMES)
        return [name for name in NAMES if values[name].values["compute"] != policy.compute]

    def train(self, policy, seed, steps, report):
        self.trained.append((str(policy), seed))
        report(steps)
        narrow = self.narrow(policy)
        wiggle = self.noise * (-1) ** seed if narrow else 0.0
        return 2 + self.spread * (seed % 4) + wiggle + sum(self.rises.get(name, 0.0) for name in narrow)

    def study(self, base, seed, steps, report):
        def lost(policy):
            values, total = policy.resolve(NAMES), 0.0
            for name in NAMES:
                each = values[name].values
                grad = {"e5m2": 2e-4, "e4m3": 1e-4}.get(str(each["grad"].format), 0.0)
                total += grad + (self.rises.get(name, 0.0) + 1e-3 if each["compute"] != policy.compute else 0.0)
            return total

        return SimpleNamespace(
            layers=[MatmulLayer(n, ((64, 64),), 128) for n in NAMES], descent_lost=lost, names=NAMES
        )


def tuned(target, out, settings=SETTINGS, progress=lambda *_: None):
    return Tuner(target, settings, out, progress).run()


def test_fragile_module_stays_wide_and_the_rest_is_narrow(tmp_path):
    found = tuned(Fake({FRAGILE: 0.5}), tmp_path)
    assert found.met
    assert set(found.found.assignment) == set(NAMES) - {FRAGILE}
    assert str(found.policy) == (
        f"fp32,eval=fp32,emulate=true; **: compute=e4m3,grad=e4m3; {FRAGILE}: compute=fp32"
    )
    assert [each.verdict.kind for each in found.evaluations] == ["different", "same"]
    assert found.unit == "bytes"
    assert "e4m3" in found.lacking


def test_file_says_why_and_reads_back(tmp_path):
    found = tuned(Fake({FRAGILE: 0.5}), tmp_path)
    text = policy_file(found)
    (tmp_path / "p.toml").write_text(text)
    assert Policy.parse(read_policy(str(tmp_path / "p.toml"))) == found.policy
    assert f"# `{FRAGILE}` loses 50 % of a step's descent in e4m3" in text
    assert "held-out loss +0.5000" in text
    assert "different) with it" in text
    assert "# 5 matmuls: each alone loses 0.11 % of a step's descent" in text


def test_modules_that_stay_wide_for_the_same_reason_share_a_line(tmp_path):
    wide = {name: 0.5 for name in NAMES if name.endswith("down")}
    text = policy_file(tuned(Fake(wide), tmp_path))
    assert text.count("loses 50 % of a step's descent in e4m3") == 1
    assert "# each of 3 matmuls loses 50 % of a step's descent in e4m3" in text


def test_nothing_is_trained_twice(tmp_path):
    class Stops(Fake):
        def train(self, *args):
            if len(self.trained) == 9:
                raise KeyboardInterrupt
            return super().train(*args)

    first, second = Stops({FRAGILE: 0.5}), Fake({FRAGILE: 0.5})
    with pytest.raises(KeyboardInterrupt):
        tuned(first, tmp_path)
    found = tuned(second, tmp_path)
    assert not set(first.trained) & set(second.trained)
    whole = Fake({FRAGILE: 0.5})
    assert tuned(whole, tmp_path / "whole").policy == found.policy
    assert sorted(first.trained + second.trained) == sorted(whole.trained)
    third = Fake()
    assert tuned(third, tmp_path).policy == found.policy
    assert third.trained == []


def test_study_that_was_interrupted_continues(tmp_path):
    class Stops(Fake):
        def study(self, *args):
            made, asked = super().study(*args), []

            def lost(policy):
                if len(asked) == 7:
                    raise KeyboardInterrupt
                asked.append(policy)
                return 5e-3

            return SimpleNamespace(**{**vars(made), "descent_lost": lost})

    with pytest.raises(KeyboardInterrupt):
        tuned(Stops(), tmp_path)
    found = tuned(Fake(), tmp_path)
    # Two modules in three formats were known; of the third, nothing was kept.
    assert [found.rows[name][1].damage for name in NAMES[:3]] == [5e-3, 5e-3, 1e-3]


def test_layer_that_no_fp8_kernel_takes_is_left_alone(tmp_path):
    class Odd(Fake):
        def study(self, *args):
            made = super().study(*args)
            made.layers[0] = MatmulLayer(NAMES[0], ((200, 64),), 128)
            return made

    found = tuned(Odd(), tmp_path)
    assert "200 features" in found.kept[NAMES[0]]
    assert NAMES[0] not in found.found.assignment


def test_folder_of_other_settings_is_refused(tmp_path):
    tuned(Fake(), tmp_path)
    with pytest.raises(ConfigError, match="holds a search with steps = 10, and this one has 20") as caught:
        tuned(Fake(), tmp_path, replace(SETTINGS, steps=20))
    assert "--out" in caught.value.hint


def test_second_search_in_a_folder_is_refused_while_one_runs(tmp_path, capsys):
    lock = RunLock(tmp_path)
    assert run(["tune", "tiny", "--base", "fp32", "--out", str(tmp_path)]) == 2
    assert f"`{tmp_path}` is in use" in " ".join(capsys.readouterr().err.split())
    assert [each.name for each in tmp_path.iterdir()] == ["lock"]
    lock.release()


def test_damaged_folder_is_refused(tmp_path):
    (tmp_path / "tune.json").write_text("[1")
    with pytest.raises(ConfigError, match="damaged"):
        tuned(Fake(), tmp_path)


def test_another_budget_uses_what_was_trained(tmp_path):
    tuned(Fake({FRAGILE: 0.5}), tmp_path)
    again = Fake({FRAGILE: 0.5})
    found = tuned(again, tmp_path, replace(SETTINGS, budget="0.6"))
    assert set(found.found.assignment) == set(NAMES)
    assert again.trained == []


def test_budget_that_no_policy_meets_names_the_best(tmp_path):
    found = tuned(Fake(dict.fromkeys(NAMES, 0.5)), tmp_path, replace(SETTINGS, budget="0.01"))
    assert not found.met
    assert found.best is min(found.evaluations, key=lambda each: each.verdict.mean)
    text = summary(found)
    assert "no policy with a narrow matmul meets the budget, a gap of 0.01; the best found" in text
    assert found.best.policy in text


def test_module_that_destroys_the_gradient_is_never_trained(tmp_path):
    found = tuned(Fake({FRAGILE: math.inf}), tmp_path)
    assert set(found.found.assignment) == set(NAMES) - {FRAGILE}
    assert f"`{FRAGILE}` loses all of a step's descent in e4m3" in policy_file(found)


def test_run_that_diverges_is_different_and_kept_as_such(tmp_path):
    class Diverges(Fake):
        def train(self, policy, *rest):
            return math.inf if FRAGILE in self.narrow(policy) else super().train(policy, *rest)

    found = tuned(Diverges({"blocks.0.mlp.up": 1e-4}), tmp_path)
    assert found.evaluations[0].verdict.diverged == 4
    assert FRAGILE not in found.found.assignment
    losses = json.loads((tmp_path / "tune.json").read_text())["losses"][found.evaluations[0].policy]
    assert losses == dict.fromkeys("0123")


def test_more_seeds_are_trained_where_the_first_cannot_tell(tmp_path):
    target = Fake(noise=0.05)
    found = tuned(target, tmp_path)
    assert found.met
    assert len(found.evaluations[0].gaps) > 4
    assert {seed for _, seed in target.trained} == set(range(len(found.evaluations[0].gaps)))


def test_what_never_becomes_clear_does_not_meet(tmp_path):
    found = tuned(Fake(noise=0.5), tmp_path, replace(SETTINGS, policies=3))
    assert not found.met
    assert not found.found.finished
    assert {each.verdict.kind for each in found.evaluations} == {"cannot tell"}


def test_base_that_diverges_or_does_not_depend_on_the_seed_is_refused(tmp_path):
    class Diverges(Fake):
        def train(self, *_):
            return math.inf

    with pytest.raises(ConfigError, match="itself diverges"):
        tuned(Diverges(), tmp_path / "a")
    with pytest.raises(ConfigError, match="seeds make no difference"):
        tuned(Fake(spread=0), tmp_path / "b")


def test_a_format_that_no_policy_can_have_is_refused_before_anything_is_trained(tmp_path):
    target = Fake()
    with pytest.raises(PolicyError, match="without a scale"):
        tuned(target, tmp_path, replace(SETTINGS, compute=("fp16",)))
    assert target.trained == []


def test_rules_of_the_base_are_kept(tmp_path):
    found = tuned(Fake(), tmp_path, replace(SETTINGS, base=f"fp32; {FRAGILE}: compute=bf16"))
    assert FRAGILE not in found.found.assignment
    assert "the base has a rule" in found.kept[FRAGILE]
    assert str(found.policy.resolve(NAMES)[FRAGILE].values["compute"].format) == "bf16"


def test_progress_counts_steps_and_names_the_most_policies_but_no_total_that_would_grow(tmp_path):
    stream, now = io.StringIO(), itertools.count(0.0, 60.0)  # each line is late enough to be shown
    with _Progress(stream, clock=lambda: next(now)) as bar:
        tuned(Fake({FRAGILE: 0.5}), tmp_path, progress=bar)
    shown = stream.getvalue().splitlines()
    steps = [int(re.match(r"tuning, (\d+) steps? trained  [a-z]", line)[1]) for line in shown]
    assert steps == sorted(steps)
    assert steps[-1] == 3 * 4 * SETTINGS.steps  # the base and two policies
    assert any("the base, seed 0" in line for line in shown)
    assert any(f"matmul 2 of {len(NAMES)}: {NAMES[1]} with grad in e5m2" in line for line in shown)
    assert any("policy 2 of at most 12: 5 of 6 modules narrow, seed 3" in line for line in shown)
    assert not any("left" in line for line in shown)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"budget": "soon"}, "--budget soon is not a budget"),
        ({"budget": "-1"}, "--budget -1 is not a budget"),
        ({"budget": "nan"}, "is not a budget"),
        ({"seeds": 1}, "from two seeds on"),
        ({"most_seeds": 2}, "--most-seeds 2"),
        ({"steps": 0}, "--steps 0"),
        ({"compute": ("e4m3:delayed",)}, "delayed"),
        ({"compute": ("e9m9",)}, "e9m9"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(change, says, tmp_path):
    with pytest.raises(Exception, match=says):
        Tuner(Fake(), replace(SETTINGS, **change), tmp_path, lambda *_: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("tinny", (), "neither a recipe nor module:factory"),
        ("tiny", ("backend=jax",), "runs on torch"),
        ("no_such_module:f", (), "there is no module `no_such_module`"),
        ("tests.torch.instruments.tuning.models:net", ("seed=1",), "--set seed=1 is for recipes"),
        ("tests.torch.instruments.tuning.models:without_data", (), "returned 2 values, and no data to train on"),
        ("tests.torch.instruments.tuning.models:alone", (), "returned a Linear"),
        ("tests.torch.instruments.tuning.models:no_batches", (), "an empty list for the batches to train on"),
    ],
)
def test_targets_that_cannot_be_tuned_are_refused(name, overrides, says, tmp_path):
    with pytest.raises(ConfigError, match=says) as caught:
        target_of(name, overrides, tmp_path, None)
    assert caught.value.hint


def test_base_is_what_is_named_else_what_the_device_multiplies():
    assert str(base_of(Fake(), None)) in ("fp32", "bf16-mixed")
    assert str(base_of(Fake(), "bf16-mixed")) == "bf16-mixed"
    with pytest.raises(ConfigError, match="measures which precision is fastest") as caught:
        base_of(Fake(), "auto")
    assert "--base" in caught.value.hint
