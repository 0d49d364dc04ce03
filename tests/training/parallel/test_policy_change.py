"""A policy that changes during a run of several ranks."""

import os

import pytest

from tests.training.parallel.ranks import train, words
from tests.training.runs import at_step, events_of, final_state, stop

FP8, BF16 = "fp8-mixed,emulate=true", "bf16-mixed,param=fp32:split,emulate=true"


def stop_rank_1_at_2(loop):
    at_step(loop, 2, stop if os.environ["RANK"] == "1" else lambda: None)


@pytest.mark.prove
@pytest.mark.parametrize("shard", ["none", "full"])
def test_ranks_change_it_together_and_resume_at_the_change(text, tmp_path, shard):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = (f"parallel.shard={shard}", "optimizer.name=adamw", f'schedule=[{{from=3,policy="{BF16}"}}]')
    ends = train(words(text, whole, *settings, policy=FP8))
    assert [code for code, *_ in ends] == [0, 0], ends
    assert ends[0][2] == ends[1][2]
    stopped = train(words(text, cut, *settings, policy=FP8), stop_rank_1_at_2)
    assert [event["step"] for event in events_of(cut, "stop")] == [3], stopped
    resumed = train(words(text, cut, *settings, policy=FP8, resume=True))
    assert [code for code, *_ in resumed] == [0, 0], resumed
    assert [(event["step"], event["policy"]) for event in events_of(cut, "policy")] == [(3, BF16)]
    assert final_state(cut)[0] == final_state(whole)[0]
