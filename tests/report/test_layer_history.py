"""What the page keeps of the monitor's events: every extreme, in bounded memory, of the steps that count."""

import itertools
import math

import numpy as np
import pytest

from halfstep.report import layer_history
from halfstep.report.history import History
from halfstep.report.layer_history import VIEWS, LayerHistory, coarse
from tests.report.page.made_up_runs import BEGAN, counted, monitored, run, sampled

LOST, AMAX = VIEWS.index("weight.lost"), VIEWS.index("activation.amax")


def monitor(*names, **formats):
    layers = [{"name": name, "kind": "matmul", "formats": {"activation": "bf16"} | formats} for name in names]
    return {"event": "monitor", "step": 0, "time": BEGAN, "layers": layers, "every": 1, "slice": 4096}


def layers(step, lost, since=None, amax=1.0):
    ones = [1.0] * len(lost)
    weight = {"norm": ones, "gradient_norm": ones, "update_norm": ones, "lost": lost}
    activation, gradient = (counted([amax] * len(lost), ones, ones) for _ in range(2))
    return {"event": "layers", "time": BEGAN, "step": step, "since": step - 1 if since is None else since,
            "activation": activation, "gradient": gradient, "weight": weight}  # fmt: skip


def test_a_long_run_keeps_few_columns_of_even_width_and_every_extreme():
    history = LayerHistory()
    history.monitor(monitor("a", "b"))
    for step in range(1, 5001):
        history.add(layers(step, [0.5 if step == 7 else 0.0, 0.9 if step == 4321 else None]))
    assert len(history.columns) < layer_history.KEPT
    columns = coarse(history.columns, 256)
    assert 128 < len(columns) <= 256
    assert len({column.last - column.after for column in columns[:-1]}) == 1
    assert (columns[0].after, columns[-1].last) == (0, 5000)
    assert all(one.last == other.after for one, other in itertools.pairwise(columns))
    lost = np.stack([column.values[LOST] for column in columns])
    assert np.nanmax(lost, axis=0).tolist() == pytest.approx([0.5, 0.9])
    (place,) = [c for c in columns if c.values[LOST, 1] > 0]
    assert place.after < 4321 <= place.last


def test_samples_merge_by_their_sums():
    history = LayerHistory()
    history.monitor(monitor("a"))
    for step in range(1, 1001):
        roles = {"activation": {"exponents": {"-3": 1, str(step % 2): 2}}}
        history.sample({"event": "sample", "step": step, "why": "schedule", "layers": {"a": roles, "unknown": {}}})
    assert len(history.samples) < layer_history.SAMPLES
    assert sum(one.histograms[0, "activation"][-3] for one in history.samples) == 1000
    assert history.samples[0].histograms[0, "activation"] == {-3: 16, 0: 16, 1: 16}
    assert history.newest["step"] == 1000


def test_steps_that_were_taken_again_are_those_of_the_later_session():
    first = run(20, finished=False)
    again = run(10, first=11, resumed_from=10, finished=False)
    early = [monitor("a"), layers(10, [0.1], 0), layers(20, [0.9], 10), {**sampled_event(20), "why": "early"}]
    late = [monitor("a"), layers(20, [0.2], 10)]
    history = History()
    for event in [first[0], *early[:1], *first[1:], *early[1:], again[0], late[0], *again[1:], *late[1:]]:
        history.take(event)
    assert [(c.after, c.last, round(float(c.values[LOST, 0]), 3)) for c in history.layers.columns] == [
        (0, 10, 0.1),
        (10, 20, 0.2),
    ]
    assert history.layers.samples == []
    assert history.layers.newest is None


def sampled_event(step):
    return {"event": "sample", "time": BEGAN, "step": step, "why": "x", "layers": {"a": sampled(0, 0.5, False)}}


def test_layers_are_known_by_name_and_what_is_missing_is_a_gap():
    history = LayerHistory()
    history.monitor(monitor("a", "b"))
    history.add(layers(1, [0.1, 0.2]))
    history.monitor(monitor("c", "a", activation="fp16"))  # another policy watches others
    history.add(layers(2, [0.3, 0.4]))
    history.add({"event": "layers", "step": 3, "activation": {"amax": [1.0]}, "weight": None})
    assert [layer.name for layer in history.layers] == ["a", "b", "c"]
    assert [layer.formats["activation"] for layer in history.layers] == ["fp16", "bf16", "fp16"]
    one, two, three = history.columns
    assert one.values[LOST].tolist() == pytest.approx([0.1, 0.2])
    assert np.nan_to_num(two.values[LOST], nan=-1).tolist() == pytest.approx([0.4, -1, 0.3])
    assert np.isnan(three.values).all()
    assert one.merge(two).values[LOST].tolist() == pytest.approx([0.4, 0.2, 0.3])


def test_a_layer_of_which_nothing_was_counted_has_no_numbers():
    history = LayerHistory()
    history.monitor(monitor("a"))
    event = layers(1, [0.0], amax=0.0)
    event["activation"]["count"] = [0.0]
    event["gradient"]["amax"] = [math.inf]
    history.add(event)
    (column,) = history.columns
    assert math.isnan(column.values[AMAX, 0])
    assert column.values[VIEWS.index("gradient.amax"), 0] == math.inf


def test_the_made_up_monitor_has_the_columns_that_are_read():
    event = next(each for each in monitored() if each["event"] == "layers")
    assert all(name in event[role] for role, name in layer_history.RECORDED)
