"""Pictures of the layers: what their captions say, and that packed numbers come back."""

import base64
import json
import math

import numpy as np
import pytest

from halfstep.report.history import History
from halfstep.report.incidents import findings
from halfstep.report.layers import OCTAVE, codes, figures, headroom_in
from halfstep.report.what_if import as_data, what_if
from halfstep.training.telemetry.events import EventsError, read_events
from tests.report.page.made_up_runs import layer_names, monitored, read_history, run, sampled, watched_run
from tests.report.test_layer_history import layers, monitor


def read(events):
    return read_history(events).layers


def unpacked(text, kind):
    return np.frombuffer(base64.b64decode(text), kind)


def test_captions_name_the_layer_the_number_and_the_steps():
    shown = figures(read(watched_run()))
    hot, weak = layer_names(26)[13], layer_names(26)[26 // 3]
    assert f"of the activations was 4 bits beyond fp16, at `{hot}`, in steps 191 to 200." in shown.headroom
    assert f"Up to 9.77 % of the activations of `{hot}` overflowed" in shown.headroom
    assert "The least headroom of gradients:" in shown.headroom
    assert shown.updates.startswith(
        f"The most updates were lost at `{weak}`: 98.6 %, in steps 191 to 200. 1 of 26 layers"
    )
    assert "4 samples from step 50 to step 200" in shown.exponents
    assert "1 sample followed an alarm." in shown.exponents
    assert shown.data["first"] == 13


def test_maps_come_back_as_they_were_and_a_map_of_zeros_is_left_out():
    events = [run(1)[0], monitor("a", "b"), layers(1, [0.25, None]), layers(2, [0.0, 0.125])]
    for event in events[2:]:
        event["gradient"]["overflow"] = [0.0, 0.0]
    data = figures(read(events)).data
    lost = unpacked(data["views"]["weight.lost"], "<f4").reshape(2, 2)
    assert np.nan_to_num(lost, nan=-1).tolist() == [[0.25, 0.0], [-1.0, 0.125]]
    assert "gradient.overflow" in data["watched"]
    assert "gradient.overflow" not in data["views"]


def test_codes_of_shares_are_logarithms():
    counts = np.array([[1.0, 0, 7, 8], [0, 0, 0, 3]])
    got = codes(counts).astype(float)
    assert (got == 0).tolist() == (counts == 0).tolist()
    back = np.where(got > 0, 2 ** ((got - 65535) / OCTAVE), 0)
    # Half a code of rounding.
    assert back == pytest.approx(counts / counts.sum(1, keepdims=True), rel=2 ** (0.5 / OCTAVE) - 1 + 1e-9)


def test_histograms_have_their_exponents():
    data = figures(read(watched_run())).data
    first = data["histograms"]["weight"][0]
    assert (first["low"], first["width"]) == (-17, 17)
    shares = unpacked(first["codes"], "<u2").reshape(4, 17)
    assert shares.argmax(axis=1).tolist() == [11] * 4  # the center, 2^-6


def test_only_an_unscaled_format_has_headroom():
    assert headroom_in("fp16") == math.log2(65504)
    assert headroom_in("bf16") > 127
    assert math.isnan(headroom_in("e4m3:row"))
    assert math.isnan(headroom_in("int4"))


def test_a_run_that_was_not_watched_has_no_pictures():
    assert figures(read(run(20))) is None
    assert what_if(read(run(20))) is None
    assert figures(read([run(1)[0], monitor("a")])) is None


def specs(role, found):
    return {row.name: row.choices[role] and row.choices[role].spec for row in found.rows}


def test_the_narrowest_format_that_loses_little_is_named():
    history = read(watched_run())
    found = what_if(history)
    names = layer_names(26)
    activations, gradients = specs("activation", found), specs("gradient", found)
    assert activations[names[0]] == "e4m3"
    assert activations[names[13]] == "e4m3:row"  # a scale for the whole tensor loses 9 dB
    assert gradients[names[6]] == "bf16"  # all others turn 6 % into zero
    assert "Activations: e4m3 in 25, e4m3:row in 1." in found.summary
    lines = as_data(found, history.newest)
    assert len(lines) == 26 * 3 * 6
    assert [names[6], "gradient", "e4m3", 31.5, 0.0, 0.06] in lines


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ({"e4m3": {"sqnr": 28.7, "overflow": 0.0, "underflow": 0.0}}, "e4m3"),
        ({"e4m3": {"sqnr": 28.4, "overflow": 0.0, "underflow": 0.0}}, "fp32"),
        ({"e4m3": {"sqnr": 31.0, "overflow": 1e-9, "underflow": 0.0}}, "fp32"),
        ({"e4m3": {"sqnr": 31.0, "overflow": 0.0, "underflow": 0.011}}, "fp32"),
        ({"e4m3": {"sqnr": None, "exact": True, "overflow": 0.0, "underflow": 0.0}}, "e4m3"),
        ({"e4m3": {"sqnr": None, "exact": False, "overflow": 0.0, "underflow": 0.0}}, "fp32"),
        ({"int4": {"sqnr": 99.0, "overflow": 0.0, "underflow": 0.0}}, "fp32"),
        ({"bf16": {"sqnr": 54, "overflow": 0, "underflow": 0},
          "fp16": {"sqnr": 73, "overflow": 0, "underflow": 0}}, "fp16"),
        ({}, None),
    ],
)  # fmt: skip
def test_what_loses_little(lost, expected):
    sample = sampled(0, 0.0, False)
    sample["activation"]["what_if"] = lost
    event = {"event": "sample", "time": 1.0, "step": 1, "why": "schedule", "layers": {"a": sample}}
    found = what_if(read([run(1)[0], monitor("a"), event]))
    assert specs("activation", found)["a"] == expected


def test_everything_of_the_monitor_may_be_malformed():
    events = list(monitored(40, 4, every=10, sample_every=20))
    for event in events:
        if event["event"] == "sample":
            event["layers"] = {
                "embedding": None,
                "lm_head": {"activation": {"exponents": {"0": 0}, "what_if": []}},
            }
    assert figures(read([run(1)[0], *events])).data["histograms"]["activation"] == [None] * 4


ODD = (None, True, -1, 2.5, 1e300, "nan", "<b>", [], [[]], {}, {"x": {}})


def paths(value, path=()):
    """Every place in nested data."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*path, key))


def replaced(value, path, odd):
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], odd)
    return copy


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["monitor", "layers", "sample", "finding", "cause"])
def test_a_value_of_another_type_is_damage_or_is_passed_over(kind, tmp_path):
    """Whatever stands at any one place of an event, the page is made or the line is named."""
    kept = ("start", "monitor", "layers", "sample", "finding", "cause")
    events = [event for event in watched_run(20, 2, every=20, sample_every=20) if event["event"] in kept]
    spec = {"e4m3": {"sqnr": 31.0, "exact": False, "overflow": 0.0, "underflow": 0.0}}
    role = {"format": "fp16", "sqnr": 70.0, "exponents": {"-3": 4}, "what_if": spec}
    for event in events:
        if event["event"] == "sample":
            event["layers"] = {"embedding": {"activation": role}}
    at = max(place for place, event in enumerate(events) if event["event"] == kind)
    made = 0
    for path in paths(events[at]):
        for odd in ODD if path and path[0] not in ("event", "time") else ():
            spoiled = replaced(events[at], path, odd)
            (tmp_path / "events.jsonl").write_text(json.dumps(spoiled) + "\n")
            try:
                (event,) = read_events(tmp_path / "events.jsonl")
            except EventsError:
                continue
            seen = History()
            for each in [*events[:at], event, *events[at + 1 :]]:
                seen.take(each)
            shown, found = figures(seen.layers), what_if(seen.layers)
            embedded = [shown and shown.data, found and as_data(found, seen.layers.newest)]
            json.dumps(embedded, allow_nan=False)
            findings(seen.findings)
            made += 1
    assert made > 5


def test_the_keys_of_a_sample_may_be_anything():
    sample = {"event": "sample", "time": 1.0, "step": 1, "why": "x",
              "layers": {"a": {"activation": {"exponents": {"x": 1, "-3": 2, "9e9": 1, "5000": 3}}}}}  # fmt: skip
    data = figures(read([run(1)[0], monitor("a"), sample])).data
    assert (data["histograms"]["activation"][0]["low"], data["histograms"]["activation"][0]["width"]) == (-3, 1)
