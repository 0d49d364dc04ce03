"""What a [[schedule]] may say, and how a recipe and `--set` write it."""

import pytest

from halfstep.config.load import load, override, to_toml
from halfstep.config.policy_schedule import PolicySchedule
from halfstep.core.errors import ConfigError
from halfstep.core.policy import Policy

BAD = {
    '[{from=0.5,policy="bf16-mixed"},{from=0.4,policy="fp32"}]': "does not come after step 200",
    '[{from=0.5,policy="bf16-mixed"},{from=200,policy="fp32"}]': "does not come after step 200",
    '[{from=400,policy="bf16-mixed"}]': "leaves no step of 400",
    '[{from=0,policy="bf16-mixed"}]': "a share of the steps, above 0 and below 1, or a whole number",
    '[{from=1.0,policy="bf16-mixed"}]': "a share of the steps, above 0 and below 1, or a whole number",
    '[{from=0.5,policy="bf17"}]': r'schedule\[0\].policy = "bf17": unknown preset',
    '[{from=0.5,policy="auto"}]': "would be measured",
    '[{from=0.5,policy="fp8"},{from=0.6,policy="fp8-mixed"}]': "changes nothing: it is the policy before it",
    '[{from=0.5}]': r"`schedule\[0\].policy` is missing",
    "bf16-mixed": "must be a list of tables with from and policy",
}  # fmt: skip


@pytest.mark.parametrize("given", BAD)
def test_a_schedule_that_cannot_be_followed_is_refused(given):
    with pytest.raises(ConfigError, match=BAD[given]):
        load("tiny", [f"schedule={given}"])


def test_it_is_written_as_it_is_read(tmp_path):
    recipe = tmp_path / "own.toml"
    recipe.write_text('[[schedule]]\nfrom = 0.85\n[schedule.policy]\npreset = "bf16-mixed"\n')
    config = load(str(recipe), ["training.steps=20"])
    assert config == override(config, [])
    assert 'from = 0.85, policy = "bf16-mixed"' in to_toml(config)
    assert config.schedule == load("tiny", ['schedule=[{from=0.85, policy="bf16-mixed"}]']).schedule


def test_a_step_has_the_policy_of_its_phase():
    entries = load("tiny", ['schedule=[{from=0.5,policy="fp32"},{from=300,policy="bf16-true"}]']).schedule
    schedule = PolicySchedule.of(Policy.parse("bf16-true"), entries, 400)
    named = {step: str(schedule.of_step(step)) for step in (0, 1, 200, 201, 300, 301, 400)}
    narrow, wide = dict.fromkeys((0, 1, 200, 301, 400), "bf16-true"), dict.fromkeys((201, 300), "fp32")
    assert named == narrow | wide
    assert [step for step in range(400) if schedule.changes_after(step)] == [200, 300]
