"""What a page says of the precision of a run: which, why, its rules and its loss scale."""

import pytest

from halfstep.core.errors import RunFolderError
from halfstep.report.page import render
from tests.report.page.made_up_runs import BEGAN, FP16, REASON, RUNS, run, step
from tests.report.page.parsed_page import Page


def test_an_fp16_run_shows_its_rules_its_scale_and_marks_skipped_steps():
    page = Page(render(FP16, "x"))
    assert "trained in fp16-mixed with 1 rule for" in page.headline
    assert "The run used fp16-mixed; lm_head: compute=fp32, as requested." in page.text
    assert "Rules: other formats for some modules" in page.text
    assert "lm_head" in page.text
    assert "No rules: the table holds for every module." in Page(render(RUNS["fp32"], "x")).text
    scale = page.line("scale", "scale")
    assert [scale[s] for s in (1, 3, 4, 5, 6, 180, 181)] == [65536, 65536, 32768, 16384, 8192, 8192, 4096]
    assert page.line("scale", "skipped steps") == {3: 65536, 4: 32768, 5: 16384, 180: 8192}
    caption = next(c for c in page.parts["figcaption"] if "loss scale" in c)
    assert "from 65,536 (2^16) at step 1 to 4,096 (2^12) at step 200" in caption
    assert "4 steps were skipped" in caption
    assert "the first by step 3 and the last by step 180" in caption


def test_a_resumed_run_keeps_the_reason_it_was_started_with():
    chosen = run(20, choice={"preset": "fp32", "reason": REASON}, finished=False)
    assert Page(render([*chosen, *run(20, first=21, resumed_from=20)], "x")).parts["blockquote"] == [REASON]
    # A reason for another precision is no reason for this one.
    assert "blockquote" not in Page(render([*chosen, *run(20, "bf16-mixed", resumed_from=20)], "x")).parts


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("fp32", "No loss scale: everything is computed in fp32, where no gradient is lost to range."),
        ("bf16-mixed", "No loss scale: bf16 has fp32's range."),
        ("fp8-mixed", "No loss scale: bf16 has fp32's range and e4m3 and e5m2 operands have their own scales."),
        ("fp16-mixed", None),
    ],
)
def test_a_run_without_a_loss_scale_says_why(policy, reason):
    page = Page(render(run(20, policy), "x"))
    assert ("scale" in page.data) == (reason is None)
    assert ("No loss scale" in page.text) == (reason is not None)
    if reason:
        assert reason in page.text


def test_a_policy_of_another_version_is_not_guessed_and_events_without_a_start_are_no_run():
    events = [event | ({"policy": "int4-mixed"} if event["event"] == "start" else {}) for event in run(20)]
    text = Page(render(events, "x")).text
    assert "The run used int4-mixed" in text
    assert "this version of halfstep cannot read the policy: in policy `int4-mixed`: unknown preset" in text
    with pytest.raises(RunFolderError):
        render([step(1, BEGAN)], "x")
