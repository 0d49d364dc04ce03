"""Timings that are kept in a file: a second run times nothing, and whatever changes a timing makes a new one."""

import json
from dataclasses import dataclass

import pytest

from halfstep.core import cache
from halfstep.core.cache import CachedTimer
from halfstep.core.choice.layers import BUDGET, Earlier, measure_layers
from halfstep.core.policy import Policy
from halfstep.core.precision import precisions

NARROW = precisions(Policy.parse("bf16-mixed,compute=e4m3:measured,grad=e5m2"), ["up"])["up"]
OTHER = precisions(Policy.parse("bf16-mixed,compute=e4m3:row:measured,grad=e5m2"), ["up"])["up"]


@dataclass(frozen=True)
class Work:
    amount: int = 4096
    tokens: int = 64
    compiled: bool = True
    device: str = "NVIDIA H200"

    @property
    def place(self):
        return self.device


class Device:
    """A timer in which the narrow form takes 0.1 ms more with every question, and 1 ms is wide."""

    def __init__(self):
        self.asked = []

    def __call__(self, work, precisions):
        self.asked.append((work, *precisions))
        return [1e-3, 4e-4 + 1e-4 * len(self.asked)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def timed(device, works, version="2.11.0"):
    timer = CachedTimer(device, "torch", lambda: version)
    keys = {f"layer{i}": [(work, NARROW)] for i, work in enumerate(works)}
    return measure_layers(keys, timer, lambda error: False, clock=lambda: 0.0)


def test_a_second_run_takes_the_timings_of_the_first_and_says_so(folder):
    first, second = Device(), Device()
    works = [Work(4096), Work(8192)]
    fresh, again = timed(first, works), timed(second, works)
    (path,) = folder.iterdir()
    assert (len(first.asked), second.asked) == (2, [])
    assert (again.narrow, again.notes) == (fresh.narrow, fresh.notes)
    assert "earlier run" not in fresh.description
    assert fresh.description.endswith(f"(2 sizes timed compiled in 0.0 s of at most {BUDGET:g} s, at 64 tokens)")
    assert again.description.endswith(
        f"(2 sizes timed compiled, at 64 tokens, all of them by an earlier run: {path})"
    )


def test_what_is_timed_ahead_is_not_timed_again_and_what_is_known_or_failed_is_not_ahead(folder):
    timed(Device(), [Work(16)])
    device, asked = Device(), []
    timer = CachedTimer(device, "torch", lambda: "2.11.0")

    def several(jobs):
        asked.extend(jobs)
        return {jobs[0]: [1e-3, 1e-4]}

    keys = {f"layer{amount}": [(Work(amount), NARROW)] for amount in (16, 4096, 8192)}
    found = measure_layers(keys, timer, lambda error: False, lambda: 0.0, timer.time_ahead(several))
    assert asked == [(Work(amount), (NARROW.widened(), NARROW)) for amount in (8192, 4096)]
    assert [work for work, *_ in device.asked] == [Work(4096)]
    assert "0.1 ms in e4m3" in found.notes["layer8192"]
    assert (
        "3 sizes timed compiled in 0.0 s of at most 90 s, at 64 tokens, 1 of them by an earlier run" in found.here
    )
    assert "3 of them by an earlier run" in timed(Device(), [Work(16), Work(4096), Work(8192), Work(1)]).here


def test_what_is_new_is_timed_beside_what_is_known(folder):
    timed(Device(), [Work(4096)])
    timed(device := Device(), [Work(4096), Work(8192)])
    assert [work.amount for work, *_ in device.asked] == [8192]
    assert "1 of them by an earlier run: " in timed(Device(), [Work(4096), Work(16)]).description


@pytest.mark.parametrize(
    "work", [Work(tokens=128), Work(compiled=False), Work(amount=16), Work(device="NVIDIA H100")]
)
def test_another_layer_is_timed(folder, work):
    timed(Device(), [Work()])
    timed(device := Device(), [work])
    assert [work for work, *_ in device.asked] == [work]


def test_another_precision_framework_or_code_is_timed(folder, monkeypatch):
    device = Device()
    timer = CachedTimer(device, "torch", lambda: "2.11.0")
    pair = (NARROW.widened(), NARROW)
    first = timer(Work(), pair)
    assert timer(Work(), pair) == first
    assert isinstance(timer(Work(), pair), Earlier)
    assert timer(Work(), (OTHER.widened(), OTHER)) != first
    assert CachedTimer(device, "torch", lambda: "2.13.0")(Work(), pair) != first
    monkeypatch.setattr(cache, "code_digest", lambda backend: "other")
    assert timer(Work(), pair) != first
    assert len(device.asked) == 4


def test_failures_are_tried_again(folder):
    def broken(work, precisions):
        raise RuntimeError("no kernel")

    assert not any(timed(broken, [Work()]).narrow.values())
    timed(device := Device(), [Work()])
    assert len(device.asked) == 1


def test_off_keeps_and_reads_nothing(folder, monkeypatch):
    timed(Device(), [Work()])
    monkeypatch.setenv("HALFSTEP_CACHE", "off")
    assert cache.folder() is None
    assert "earlier run" not in timed(device := Device(), [Work(), Work(16)]).description
    assert len(device.asked) == 2
    monkeypatch.setenv("HALFSTEP_CACHE", str(folder))
    (path,) = folder.iterdir()
    assert len(json.loads(path.read_text())["seconds"]) == 1


def test_a_folder_that_cannot_be_written_is_said_and_stops_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "file" / "inside"))
    with pytest.warns(UserWarning, match="HALFSTEP_CACHE names another folder"):
        assert timed(Device(), [Work()]).narrow == {"layer0": True}


def test_the_folder_is_where_the_system_keeps_caches(tmp_path, monkeypatch):
    monkeypatch.delenv("HALFSTEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "halfstep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "halfstep"


def test_the_digest_is_of_every_file_of_core_and_the_backend(tmp_path, monkeypatch):
    def digest(**changed):
        for name, text in {"core/a.py": "1", "torch/b.py": "2", "jax/c.py": "3", **changed}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return cache.code_digest.__wrapped__("torch")

    monkeypatch.setattr(cache, "__file__", str(tmp_path / "core" / "cache.py"))
    first = digest()
    assert digest(**{"jax/c.py": "other"}) == first
    assert first not in (digest(**{"core/a.py": "other"}), digest(**{"torch/b.py": "other"}))
