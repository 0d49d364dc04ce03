"""Packing through power cuts: what was not flushed is gone, and what comes out in the end is the same."""

import json
import os
import stat
from contextlib import ExitStack
from itertools import count

import pytest

from halfstep.training.data.pack import blocks
from halfstep.training.data.pack import pack as packing
from halfstep.training.data.pack.pack import PackRequest, pack
from halfstep.training.data.pack.sources import find_sources
from halfstep.training.data.tokenizer_base import BytesTokenizer


class PowerCutError(BaseException):
    """The machine is off. No code of the process can act on it."""


class Disk:
    """What a folder would hold after a power cut: contents and names as they were last flushed.

    Of the renames since then, the newest may have come through without those before it: nothing keeps them in
    order. The power goes at call `fatal` of what flushes or renames. Each file that was seen is kept open, so that
    no other file gets its number.
    """

    def __init__(self, folder, fatal):
        self.folder, self.fatal, self.calls = folder, fatal, 0
        self.contents, self.names, self.renamed = {}, {}, None
        self._open = ExitStack()

    def __enter__(self):
        self._rename, patch = os.replace, self._open.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(os, "fsync", self.flush)
        patch.setattr(os, "replace", self.rename)
        return self

    def __exit__(self, *_):
        self._open.close()

    def flush(self, descriptor):
        self._call()
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self.names, self.renamed = {path.name: self._number(path) for path in self.folder.iterdir()}, None
            return
        (path,) = [path for path in self.folder.iterdir() if path.stat().st_ino == found.st_ino]
        self.contents[self._number(path)] = path.read_bytes()

    def rename(self, old, new):
        self._call()
        self.renamed = old.name, new.name, self._number(old)
        self._rename(old, new)

    def left(self, renamed):
        """The files that a machine finds when it starts again; with the newest rename, or as they were flushed."""
        names = dict(self.names)
        if renamed:
            old, new, number = self.renamed
            names.pop(old, None)
            names[new] = number
        return {name: self.contents.get(number, b"") for name, number in names.items() if name != "lock"}

    def _call(self):
        if self.calls == self.fatal:
            raise PowerCutError
        self.calls += 1

    def _number(self, path):
        return os.fstat(self._open.enter_context(open(path, "rb")).fileno()).st_ino


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source of some blocks, after each of which there is a commit. Outside of a Disk nothing is flushed."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(packing, "SECONDS_BETWEEN_COMMITS", 0.0)
    monkeypatch.setattr(blocks, "BLOCK", 600)
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} times " * 5}) + "\n" for n in range(80)))
    return find_sources([str(path)])


def packed(source, out):
    pack(source, out, BytesTokenizer(), PackRequest(validation=0.3, shard_tokens=400), workers=0)
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "lock"}


@pytest.mark.prove
def test_a_power_cut_at_any_write_of_a_packing_loses_nothing(source, tmp_path):
    whole = packed(source, tmp_path / "whole")
    assert {"train_000001.bin", "val_000001.bin"} <= whole.keys()
    for fatal in count():
        with Disk(tmp_path / f"out-{fatal}", fatal) as disk:
            try:
                packed(source, disk.folder)
                break
            except PowerCutError:
                pass
        for renamed in (False, True) if disk.renamed else (False,):
            after = tmp_path / f"after-{fatal}-{renamed}"
            after.mkdir()
            for name, content in disk.left(renamed).items():
                (after / name).write_bytes(content)
            assert packed(source, after) == whole, (fatal, renamed)
    assert fatal > 50
    found = disk.left(renamed=False)
    found.pop("packing.json", None)  # that it is gone may be lost: with the index there, it means nothing
    assert found == whole
