"""events.jsonl: reads back as written, survives a killed writer, refuses damage."""

import errno
import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.training.telemetry import events as module
from halfstep.training.telemetry.events import (
    Events,
    EventsError,
    Follower,
    check_writable,
    newest_first,
    read_events,
    stream_events,
)


def write(path, *events, clock=lambda: 12.5):
    with Events(path, clock=clock) as log:
        for kind, fields in events:
            log.write(kind, **fields)


def test_a_line_is_what_the_table_says_and_is_on_its_way_before_write_returns(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, ("step", {"step": 1, "loss": 5.5, "memory": None}), ("warning", {"message": "naïve"}))
    assert path.read_text(encoding="utf-8") == (
        '{"event": "step", "time": 12.5, "step": 1, "loss": 5.5, "memory": null}\n'
        '{"event": "warning", "time": 12.5, "message": "naïve"}\n'
    )
    with Events(tmp_path / "e.jsonl") as log:
        for number in range(3):
            log.write("step", step=number)
            assert len(read_events(tmp_path / "e.jsonl")) == number + 1
    with pytest.raises(EventsError, match="nowhere"):
        Events(tmp_path / "nowhere" / "events.jsonl").__enter__()
    with pytest.raises(EventsError, match="gone"):
        read_events(tmp_path / "gone.jsonl")


def test_non_finite_numbers_are_words_and_numpy_scalars_are_numbers(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, ("other", {"loss": math.nan, "scale": [math.inf, {"x": -math.inf}], "f32": np.float32("inf")}))
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (line["loss"], line["scale"]) == ("nan", ["inf", {"x": "-inf"}])
    (event,) = read_events(path)
    assert math.isnan(event["loss"])
    for number in (math.nan, math.inf, -math.inf):
        write(
            tmp_path / f"{number}.jsonl",
            ("step", {"step": 1, "loss": number}),
            ("x", {"where": [{"loss": number}]}),
        )
        one, two = stream_events(tmp_path / f"{number}.jsonl")
        assert repr(one["loss"]) == repr(two["where"][0]["loss"]) == repr(number)
    assert (event["scale"], event["f32"]) == ([math.inf, {"x": -math.inf}], math.inf)
    write(tmp_path / "e.jsonl", ("x", {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}))
    (event,) = read_events(tmp_path / "e.jsonl")
    assert (event["a"], event["b"], event["c"]) == (0.5, 3, True)


texts = st.text() | st.sampled_from(
    ["nan", "inf", "-inf", "'nan", "''-inf", "NaN", "infinity", "\ud800", "a\nb\r"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
fields = st.dictionaries(st.text().filter(lambda n: n not in ("event", "time")), values, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(), fields), max_size=4))
def test_everything_reads_back(tmp_path_factory, events):
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    write(path, *events)
    assert read_events(path) == [{"event": kind, "time": 12.5} | given for kind, given in events]


def test_a_kill_at_any_byte_loses_the_last_event_at_most(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, ("step", {"step": 1}), ("warning", {"message": "größer"}))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        known = (size >= first - 1) + (size >= len(whole) - 1)  # a whole object counts, newline or not
        assert len(read_events(path)) == known
        # The next writer appends to a file that reads to the end.
        write(path, ("start", {"resumed_from": 1}))
        assert [event["event"] for event in read_events(path)] == [*["step", "warning"][:known], "start"]
        assert path.read_bytes().endswith(b"\n")


@pytest.mark.parametrize(
    "line",
    [
        b'{"event": "st',
        b"",
        b"\x00\x00",
        b"[1]",
        b'{"step": 1}',
        b'{"event": 1}',
        b"\xff",
        b'{"event": "x", "y": NaN}',
        b'{"event": "step", "step": 1' + b"0" * 400 + b"}",
        b'{"event": "start", "changes": [{"step": 1}]}',
        b'{"event": "start", "changes": [{"step": 1, "settings": {"policy": "fp32"}}]}',
    ],
)
def test_damage_in_the_middle_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / "events.jsonl"
    write(path, ("step", {"step": 1}), ("step", {"step": 2}))
    one, two, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([one, line, two, b""]))
    with pytest.raises(EventsError, match=r"events\.jsonl:2: "):
        read_events(path)
    for events in (stream_events(path, skip_damage=True), Follower(path).new()):
        kinds = [event["event"] for event in events]
        assert kinds == ["step", "warning", "step"]
    path.write_bytes(b"\n".join([one, two, line, b""]))  # last, but its newline was written: no torn line
    with pytest.raises(EventsError, match=r"events\.jsonl:3: "):
        read_events(path)


def test_what_lives_on_a_device_is_refused_and_nothing_is_written(tmp_path):
    class Tensor:
        pass

    with Events(tmp_path / "e.jsonl") as log:
        with pytest.raises(TypeError, match=r"step\.loss\[0\] is a Tensor"):
            log.write("step", loss=[Tensor()])
        with pytest.raises(TypeError, match="key 1"):
            log.write("step", loss={1: 2})
        with pytest.raises(ValueError, match="`time` is a field of every event"):
            log.write("step", time=3)
    assert read_events(tmp_path / "e.jsonl") == []


class Disk:
    """A file that takes `room` bytes and then refuses, until there is room again."""

    closed = False

    def __init__(self, path, room):
        self.file, self.room = open(path, "ab", buffering=0), room  # noqa: SIM115

    def write(self, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: self.room]
        self.room -= len(part)
        return self.file.write(part)

    def close(self):
        self.closed = True
        self.file.close()


@pytest.mark.parametrize("room", [0, 1, 40, 60])
def test_a_full_disk_delays_events_and_loses_none(tmp_path, room):
    path = tmp_path / "e.jsonl"
    log = Events(path, clock=lambda: 1.0).__enter__()
    log._file.close()
    log._file = Disk(path, room)
    for step in range(4):
        log.write("step", step=step)
    assert log.failure is not None
    assert not log.retry()
    assert len(read_events(path)) == min(1, room // 44)  # a torn line is passed over
    log._file.room = 10**6
    log.write("step", step=4)
    assert log.failure is None
    assert [event["step"] for event in read_events(path)] == [0, 1, 2, 3, 4]
    log._file.room = 0
    log.write("step", step=5)
    log._file.room = 10**6
    log.__exit__()  # the last try
    assert read_events(path)[-1]["step"] == 5


@pytest.mark.parametrize("block", [1, 7, 60, 1 << 16])
@pytest.mark.parametrize("tail", [b"", b'{"event": "st', b'{"event": "whole"}'])
def test_from_the_end_they_are_the_same_in_the_other_order(tmp_path, monkeypatch, block, tail):
    monkeypatch.setattr(module, "BLOCK", block)
    path = tmp_path / "events.jsonl"
    write(path, *[("other", {"step": number, "loss": [math.nan, "a\nb"]}) for number in range(12)])
    path.write_bytes(path.read_bytes() + tail)
    assert repr([*newest_first(path)]) == repr(read_events(path)[::-1])
    path.write_bytes(tail)
    assert [*newest_first(path)] == read_events(path)


def test_a_tail_longer_than_a_block_is_removed_or_kept_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)
    path = tmp_path / "events.jsonl"
    write(path, ("step", {"step": 1}))
    one = path.read_bytes()
    path.write_bytes(one + b'{"event": "warning", "message": "' + b"x" * 100)
    with Events(path):
        pass
    assert path.read_bytes() == one
    path.write_bytes(one + one.rstrip(b"\n"))
    with Events(path):
        pass
    assert path.read_bytes() == one + one


def test_no_more_is_read_than_is_asked_for(tmp_path):
    """The record of ten days is 300 MB; reading its first or last event must not take long."""
    path = tmp_path / "events.jsonl"
    write(path, ("step", {"step": 1}))
    line = path.read_bytes()
    path.write_bytes(line + b"damaged\n" + line * 5000)
    assert next(stream_events(path))["step"] == 1
    assert next(newest_first(path))["step"] == 1
    with Events(path):
        pass
    assert len(list(newest_first(path))) == 5001  # what is damaged stops no resume
    with pytest.raises(EventsError, match="gone"):
        next(newest_first(tmp_path / "gone.jsonl"))


def test_a_line_without_end_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, ("step", {"step": 1}))
    os.truncate(path, 1 << 40)
    with pytest.raises(EventsError, match=r"cannot be written to .*its last line has more than"):
        check_writable(path)
    assert list(newest_first(path)) == []
    with pytest.raises(EventsError, match=r"events\.jsonl:2: this line is not JSON"):
        read_events(path)


def test_a_known_event_whose_fields_are_of_another_type_is_refused(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, ("layers", {"step": 1, "since": 0, "activation": {"amax": "large"}}))
    with pytest.raises(EventsError, match=r"activation\.amax"):
        read_events(path)


def test_a_sample_of_two_thousand_layers_is_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    layers = {f"blocks.{n}.attn.q": "4 kB of exponents and formats".ljust(4000) for n in range(2000)}
    write(path, ("sample", {"step": 1, "why": "schedule", "layers": layers}), ("step", {"step": 2}))
    assert [event["event"] for event in read_events(path)] == ["sample", "step"]
    assert [event["event"] for event in newest_first(path)] == ["step", "sample"]
