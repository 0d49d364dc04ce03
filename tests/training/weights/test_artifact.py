"""int8 + zlib: half a scale at most, the same bytes each time, and nothing damaged goes unseen."""

import hashlib
import json
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from halfstep.config.load import load
from halfstep.config.model import ModelConfig, parameter_shapes
from halfstep.config.weights import initial_weights
from halfstep.core.policy import Policy
from halfstep.core.split import split
from halfstep.training.checkpoints import checkpoint
from halfstep.training.loop import Loop
from halfstep.training.telemetry.events import read_events
from halfstep.training.weights import artifact
from halfstep.training.weights.artifact import (
    ArtifactError,
    DamagedArtifactError,
    decode,
    encode,
    masters,
    quantize,
)
from tests.training.runs import raising

MODEL = replace(
    load("golf").model, vocabulary=32, context=8, layers=3, width=16, heads=4, kv_heads=2, mlp_width=32
)
WEIGHTS = {
    name: np.asarray(value + np.float32(0.1) * np.random.default_rng(1).standard_normal(value.shape), np.float32)
    for name, value in initial_weights(MODEL, 0)
}
ORIGIN = {
    "step": 7,
    "policy": "bf16-mixed",
    "config": asdict(replace(load("golf"), model=MODEL)),
    "data": {"digest": "0" * 32, "description": "some text", "bytes_per_token": 1.0},
    "weights": "ema",
}
DATA = encode(WEIGHTS.items(), ORIGIN)


def test_it_comes_back_within_half_a_scale_and_fp16():
    model, found, origin = decode(DATA)
    assert origin == json.loads(json.dumps(ORIGIN))
    assert (model, found.keys()) == (MODEL, WEIGHTS.keys())
    for name, value in WEIGHTS.items():
        assert found[name].dtype == np.float32
        if name.endswith(".weight"):
            _, scale = quantize(value)
            assert (np.abs(found[name] - value) <= scale.astype(np.float64)[:, None] / 2).all(), name
        else:
            assert np.array_equal(found[name], value.astype(np.float16).astype(np.float32)), name


rows = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 6)),
    elements=st.floats(-8e6, 8e6, width=32, allow_subnormal=True),
)


@given(rows)
def test_no_weight_is_off_by_more_than_half_its_scale(matrix):
    numbers, scale = quantize(matrix)
    wide = scale.astype(np.float64)[:, None]
    assert np.abs(numbers.astype(np.int64)).max() <= 127
    back = numbers.astype(np.float32) * scale.astype(np.float32)[:, None]
    assert (np.abs(back.astype(np.float64) - matrix) <= wide / 2).all()
    # and the scale is no larger than it need be: a unit of fp16 above the largest magnitude over 127
    least = np.abs(matrix.astype(np.float64)).max(axis=1) / 127
    assert (scale <= np.maximum(least * (1 + 2.0**-10), least + 2.0**-24)).all()


def test_rows_have_scales_of_their_own_and_the_same_weights_are_the_same_bytes():
    numbers, scale = quantize(np.array([[0, 0, 0], [127, -63.5, 1], [1e-4, -2e-4, 1.5e-4]], np.float32))
    assert (scale[0], scale[1], numbers.tolist()[:2]) == (0, 1, [[0, 0, 0], [127, -64, 1]])
    assert abs(numbers[2]).max() > 100
    assert encode(iter(WEIGHTS.items()), ORIGIN) == DATA
    assert encode({**WEIGHTS, "embed.weight": -WEIGHTS["embed.weight"]}.items(), ORIGIN) != DATA


@pytest.mark.parametrize("place", [0, 7, 8, 39, 40, 47, 48, 60, len(DATA) // 2, len(DATA) - 1])
def test_every_region_of_the_file_is_guarded(place):
    damaged = bytearray(DATA)
    damaged[place] ^= 0x10
    with pytest.raises(DamagedArtifactError):
        decode(bytes(damaged))


@pytest.mark.parametrize("size", [0, 6, 20, 47, 100, len(DATA) - 1])
def test_a_truncated_file_is_refused(size):
    with pytest.raises(DamagedArtifactError):
        decode(DATA[:size])


def sealed(plain: bytes, length: int | None = None) -> bytes:
    """A container around other contents, with a digest that is right."""
    rest = (len(plain) if length is None else length).to_bytes(8, "little") + zlib.compress(plain)
    return DATA[:8] + hashlib.sha256(rest).digest() + rest


def opened() -> bytes:
    return zlib.decompress(DATA[48:])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"PK\x03\x04" + DATA[4:], "is not an artifact"),
        (DATA[:7] + b"\x03" + DATA[8:], "version 3, and this halfstep reads version 2"),
        (DATA + b"\0", "digest"),
        (sealed(opened(), 10), "does not hold 10 bytes"),
        (sealed(opened(), len(opened()) + 1), "does not hold"),
        (sealed(b"nothing"), "cannot be read"),
        (sealed(opened().replace(b"kv_heads", b"kv_haeds")), "unknown setting"),
        (sealed(opened().replace(b'\\"layers\\": 3', b'\\"layers\\": 2')), "tensors of the model it describes"),
        (
            sealed(opened().replace(b'\\"weights\\": \\"ema', b'\\"weights\\": \\"eme')),
            '`weights` is "eme"; it must be `model` or `ema`',
        ),
        (sealed(opened().replace(b'\\"step\\": 7', b'\\"stop\\": 7')), "unknown setting `stop`"),
    ],
)
def test_what_is_not_an_artifact_is_refused_by_name(data, said):
    with pytest.raises(ArtifactError, match=said) as caught:
        decode(data, "x.int8z")
    assert "`x.int8z`" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("blocks.0.attn_scale", np.nan, "not finite"),
        ("blocks.0.attn_scale", 1e5, "fp16 ends at 65504"),
        ("embed.weight", 1e30, "beyond"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(name, value, said):
    bad = {**WEIGHTS, name: np.full_like(WEIGHTS[name], value)}
    with pytest.raises(ArtifactError, match=said) as caught:
        encode(bad.items(), ORIGIN)
    assert f"`{name}`" in caught.value.message


def test_masters_are_read_however_they_are_held():
    model = ModelConfig(vocabulary=8, context=4, layers=1, width=4, heads=1)
    exact = dict(initial_weights(model, 0))
    state = {}
    for name, value in exact.items():
        hi, lo = split(value)
        state[f"model.{name}"] = ("BF16", value.shape, hi.tobytes())
        state[f"remainder.{name}"] = ("I16", value.shape, lo.tobytes())
        state[f"average.{name}"] = ("F32", value.shape, (value / 2).tobytes())
    split_masters = dict(masters(state, model, averaged=False))
    assert all(np.array_equal(split_masters[name], value) for name, value in exact.items())
    averages = dict(masters(state, model, averaged=True))
    assert all(np.array_equal(averages[name], value / 2) for name, value in exact.items())
    narrow = {name: record for name, record in state.items() if name.startswith("model.")}
    bf16 = dict(masters(narrow, model, averaged=False))
    assert not np.array_equal(bf16["embed.weight"], exact["embed.weight"])
    assert np.allclose(bf16["embed.weight"], exact["embed.weight"], rtol=2**-8, atol=0)
    assert list(bf16) == list(parameter_shapes(model))
    deeper = replace(model, layers=model.layers + 1)
    with pytest.raises(ArtifactError, match=f"holds no `model.blocks.{model.layers}.attn_norm.weight`"):
        dict(masters(state, deeper, averaged=False))


SMALL = ["model.vocabulary=256", "model.context=16", "model.layers=2", "model.width=16", "model.heads=4",
         "model.kv_heads=2", "model.mlp_width=32", "training.batch=2", "training.micro_batches=1",
         "training.steps=2", "training.compile=false", "training.validation_tokens=64"]  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize("ema", [0.0, 0.5])
@pytest.mark.parametrize(
    ("policy", "backend"), [("fp32", "torch"), ("bf16-mixed,param=fp32:split", "torch"), ("fp32", "mlx")]
)
def test_golf_ends_with_an_artifact_that_was_loaded_and_scored(text, tmp_path, policy, backend, ema):
    given = [*SMALL, f"data.source={text}", f"training.ema={ema}", "artifact.limit=1000", f"backend={backend}"]
    loop = Loop(load("golf", given), Policy.parse(policy), tmp_path / "run", device="cpu")
    held = loop.run().held_out
    saved = loop.session.state()
    kept, _ = checkpoint.load(checkpoint.latest(tmp_path / "run" / "checkpoints"))
    # the session keeps its own weights, not the rounded ones
    assert all(bytes(kept[name].data) == bytes(data) for name, (_, _, data) in saved.items() if name != "rng.cpu")
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    (event,) = [event for event in events if event["event"] == "artifact"]
    data = (tmp_path / "run" / artifact.NAME).read_bytes()
    assert (event["bytes"], event["over"]) == (len(data), len(data) - 1000)
    assert event["loss_before"] == held.loss
    assert 0 < abs(event["loss_after"] - held.loss) < 0.02
    assert any("more than artifact.limit 1,000" in e["message"] for e in events if e["event"] == "warning")
    # of the weights that were evaluated, averages where there are any
    wanted = dict(masters(saved, loop.config.model, averaged=ema > 0))
    _, found, origin = decode(data)
    assert (origin["step"], origin["policy"], origin["weights"]) == (2, policy, "ema" if ema else "model")
    for name, value in found.items():
        assert np.abs(value - wanted[name]).max() <= np.abs(wanted[name]).max() / 127 + 1e-3
    assert encode(wanted.items(), origin) == data
    assert json.dumps(event)
    assert Path(event["path"]) == Path(artifact.NAME)


@pytest.mark.parametrize("words", ["can't allocate memory", "a defect"])
def test_a_run_whose_artifact_does_not_fit_into_memory_is_kept(text, tmp_path, monkeypatch, words):
    monkeypatch.setattr(artifact, "score", raising(RuntimeError(words)))
    config = load("golf", [*SMALL, f"data.source={text}"])
    loop = Loop(config, Policy.parse("fp32"), tmp_path / "run", device="cpu")
    if words == "a defect":
        with pytest.raises(RuntimeError, match=words):
            loop.run()
        return
    assert loop.run().finished
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert any(
        "no artifact: the device ran out of memory" in e["message"] for e in events if e["event"] == "warning"
    )
    assert events[-1]["event"] == "end"
