"""What the tests of data share: folders of text, and packed data of several shards."""

import json
import shutil

import numpy as np
import pytest


@pytest.fixture(scope="session")
def tree():
    """A function that writes files into a folder, by name and content."""

    def write(folder, files):
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return folder

    return write


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "text.jsonl"
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(map(str, rng.integers(0, 10**6, 30)))}) for _ in range(400)]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="session")
def original(source, tmp_path_factory):
    """That text, packed as bytes into shards of 20,000 tokens."""
    from halfstep.training.data.pack.pack import PackRequest, pack
    from halfstep.training.data.pack.sources import find_sources
    from halfstep.training.data.tokenizer_base import BytesTokenizer

    out = tmp_path_factory.mktemp("packed") / "out"
    request = PackRequest(validation=0.2, shard_tokens=20_000)
    pack(find_sources([source]), out, BytesTokenizer(), request, workers=0)
    return out


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "out")


@pytest.fixture(scope="session")
def flip():
    """A function that flips bits of one byte in place: a file that is mapped stays the same file."""

    def change(path, at, bits=1):
        with open(path, "r+b") as file:
            file.seek(at)
            (value,) = file.read(1)
            file.seek(at)
            file.write(bytes([value ^ bits]))

    return change
