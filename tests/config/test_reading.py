"""Files of any kind, size and content: what cannot be read is an error with a reason, at once."""

import os

import pytest

from halfstep.config import reading
from halfstep.config.reading import open_regular, parse_json, parse_toml, read_bytes


def make(path, kind):
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "odd"
    make(path, kind)
    for act in (open_regular, lambda path: read_bytes(path, 10)):
        with pytest.raises(OSError, match=f"it is {kind}, not a file"):
            act(path)


def test_a_file_is_read_up_to_its_limit_and_no_further(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == read_bytes(path) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(path, 4)
    os.truncate(path, 1 << 40)  # it takes no room on the disk
    with pytest.raises(OSError, match="which is too large"):
        read_bytes(path)
    assert read_bytes("/proc/self/status", 1 << 20)  # it states no size
    monkeypatch.setattr(reading.host, "memory", lambda: None)
    assert reading.fits_in_memory(1 << 60)


@pytest.mark.parametrize("text", ["[" * 2000, "[" * 100_000 + "]" * 100_000, '{"a":' * 5000, "9" * 5000, "nul"])
def test_what_is_not_json_is_one_kind_of_error(text):
    with pytest.raises(ValueError, match=r"nested|digits|Expecting"):
        parse_json(text)


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 2000, "x = " + "{a=" * 2000, "x = " + "9" * 5000, "a." * 200_000 + "a = 1", "["]
)
def test_what_is_not_toml_is_one_kind_of_error_and_takes_no_time(text):
    with pytest.raises(ValueError, match=r"nested|digits|Expected|Invalid"):
        parse_toml(text)


def test_a_long_text_with_many_dots_is_toml():
    rules = "; ".join(f"blocks.{n}.attn.q: compute=fp32" for n in range(200))
    assert parse_toml(f'policy = "{rules}"\na.b.c = 1') == {"policy": rules, "a": {"b": {"c": 1}}}
