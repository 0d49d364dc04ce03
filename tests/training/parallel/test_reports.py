"""What ranks say of each other: who hangs, who differs, and who does not see the folder."""

import json

import pytest

from halfstep.training.job import UNHEARD, Job, RankError, Row, describe


def row(beats, number, what="step 3", line="all_reduce (distributed_c10d.py:1)"):
    return Row(beats, number, what, line, "process 7 on node")


def test_a_report_names_the_rank_that_is_silent_behind_or_elsewhere():
    before = [row(4, 9), row(4, 9)]
    frozen = describe(0, before, [row(7, 9), row(4, 9)], 2.0)
    assert frozen.startswith("rank 1 (process 7 on node) does not answer; the last it did was `step 3`")
    late = describe(0, before, [row(7, 9), row(7, 8, "reading its data for step 3", "read (disk.py:1)")], 2.0)
    assert late.startswith(
        "rank 1 (process 7 on node) is still at `reading its data for step 3`, in read (disk.py:1)"
    )
    assert late.endswith("rank 0 has waited for 2 s at `step 3`")
    hung = describe(0, [*before, row(4, 9)], [row(7, 9), row(7, 9, line="loop (mine.py:2)"), row(7, 9)], 2.0)
    assert "rank 1 (process 7 on node) is in loop (mine.py:2); ranks 0, 2 are in all_reduce" in hung
    assert "rank 1 (no process yet)" in describe(0, [row(4, 9), UNHEARD], [row(7, 9), UNHEARD], 2.0)


class Other:
    """A host whose other rank answers what it is given."""

    backend, launcher, has_notes, rank, ranks = "torch", "torchrun", True, 0, 2

    def __init__(self, *answers):
        self.answers = list(answers)

    def broadcast(self, text):
        return text

    def note(self, key, text):
        pass

    def gather(self, text):
        return [text, json.dumps(self.answers.pop(0))]


def test_a_rank_with_other_data_is_refused():
    with pytest.raises(RankError, match="rank 1 is not the same run as rank 0: data is 'b' there, and 'a'"):
        Job(Other({"data": "b"})).check_same({"data": "a"}, "give it the same")


def test_a_rank_that_does_not_see_the_folder_is_refused(out):
    out.mkdir()
    with pytest.raises(RankError, match="rank 1 does not see the run folder"):
        Job(Other(None, False)).check_folder(out)
    assert not [*out.iterdir()]
    Job(Other(None, True)).check_folder(out)
