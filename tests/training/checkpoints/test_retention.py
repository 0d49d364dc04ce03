"""What stays: the last, every so many, the best, the protected, and whatever is not whole."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from halfstep.core.state_format import Stored
from halfstep.training.checkpoints.checkpoint import save
from halfstep.training.checkpoints.writer import (
    Candidate,
    Retention,
    best_step,
    due_step,
    good_step,
    prune,
    steps_to_keep,
    survey,
)


def make(folder, **losses):
    for name, loss in losses.items():
        step = int(name.removeprefix("s"))
        save(folder, step, {"w": Stored("U8", (1,), bytes([step]))}, {"held_out": loss})


def names(folder):
    return sorted(int(entry.name.removeprefix("step-")) for entry in folder.iterdir())


def test_the_last_ones_and_every_so_many_stay(tmp_path):
    make(tmp_path, **{f"s{step}": None for step in range(1, 9)})
    removed = prune(tmp_path, Retention(last=2, every=3))
    assert names(tmp_path) == [3, 6, 7, 8]
    assert [int(path.name[-1]) for path in removed] == [1, 2, 4, 5]
    assert prune(tmp_path, Retention(last=2, every=3)) == []


def test_the_best_stays_and_is_found_again(tmp_path):
    make(tmp_path, s1=2.0, s2=1.5, s3=None, s4=1.5, s5=3.0)
    assert best_step(survey(tmp_path)) == 2  # the earlier of two equal ones
    prune(tmp_path, Retention(last=1, best=True))
    assert names(tmp_path) == [2, 5]
    make(tmp_path, s6=1.0)
    prune(tmp_path, Retention(last=1, best=True))
    assert names(tmp_path) == [6]
    assert best_step(survey(tmp_path)) == 6
    prune(tmp_path, Retention(last=1))
    assert best_step(survey(tmp_path / "nowhere")) is None


def test_one_that_was_due_is_kept_before_one_that_a_stop_left(tmp_path):
    def made(*steps):
        for step in steps:
            config = {"training": {"save_every": 10}}
            save(tmp_path, step, {"w": Stored("U8", (1,), bytes([step]))}, {"held_out": None, "config": config})

    made(10, 20, 21, 30)
    prune(tmp_path, Retention(last=1), good=29)
    assert names(tmp_path) == [20, 30]
    made(33, 34)
    prune(tmp_path, Retention(last=1), good=29)
    assert names(tmp_path) == [20, 30, 34]  # the newest, and one that was due
    found = survey(tmp_path)
    assert [step for step, seen in found.items() if seen.due] == [20, 30]
    assert (due_step(found, 40), good_step(found, 40)) == (30, 30)
    assert (due_step(found, 29), due_step(found, 19), good_step(found, 19)) == (20, None, None)
    stopped = {34: found[34]}
    assert (due_step(stopped, 34), good_step(stopped, 34)) == (None, 34)  # for pruning better that than none


def test_the_last_step_is_due_whatever_the_schedule(tmp_path):
    config = {"training": {"save_every": 10, "steps": 25}}
    for step in (20, 25):
        save(tmp_path, step, {"w": Stored("U8", (1,), bytes([step]))}, {"held_out": None, "config": config})
    prune(tmp_path, Retention(last=1), good=25)
    assert names(tmp_path) == [25]


def test_what_is_not_whole_is_left_and_does_not_count(tmp_path):
    make(tmp_path, s1=None, s2=None, s3=None, s4=None)
    (tmp_path / "step-000004" / "manifest.json").unlink()
    (tmp_path / "step-000001" / "state.safetensors").write_bytes(b"")
    assert [path.name for path in prune(tmp_path, Retention(1))] == ["step-000002"]
    assert names(tmp_path) == [1, 3, 4]
    assert prune(tmp_path, Retention(5)) == []


def test_what_is_refused_on_load_stops_no_prune(tmp_path):
    make(tmp_path, s1=1.0, s2=2.0, s3=3.0, s4=4.0)
    (tmp_path / "step-000001" / "weights.pt").write_bytes(b"exported by hand")
    manifest = tmp_path / "step-000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 4'))
    assert [path.name for path in prune(tmp_path, Retention(1))] == ["step-000003"]
    assert names(tmp_path) == [1, 2, 4]
    assert best_step(survey(tmp_path)) == 4


@given(
    st.dictionaries(st.integers(0, 60), st.booleans(), min_size=1),
    st.integers(1, 4),
    st.integers(0, 7),
    st.booleans(),
    st.none() | st.integers(0, 60),
)
def test_the_newest_always_stays_and_each_that_stays_has_a_reason(steps, last, every, by_best, good):
    seen = {step: Candidate(Path(), due, float(step)) for step, due in steps.items()}
    stay = steps_to_keep(seen, Retention(last, every, by_best), good)
    assert max(steps) in stay
    due = sorted(step for step in steps if steps[step])
    before = [step for step in sorted(steps) if good is not None and step <= good]
    protected = [step for step in before if steps[step]][-1:] or before[-1:]
    for step in steps:
        reasons = (step == max(steps), step in due[-last:], every > 0 and step % every == 0,
                   by_best and step == min(steps), step in protected)  # fmt: skip
        assert (step in stay) == any(reasons)
