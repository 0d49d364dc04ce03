"""Public signatures, options, keys of JSON, events and manifest are those of the files in this folder."""

import pytest

from tests.snapshots.write import HERE, SNAPSHOTS


@pytest.mark.parametrize("group", SNAPSHOTS)
def test_what_users_rely_on_is_unchanged(group):
    for framework in ("jax", "mlx", "accelerate", "transformers", "lightning") if group == "signatures" else ():
        pytest.importorskip(framework)
    for name, text in SNAPSHOTS[group]().items():
        was = (HERE / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        now = text.splitlines()
        gone, new = [line for line in was if line not in now], [line for line in now if line not in was]
        advice = "if this is meant, run `python tests/snapshots/write.py`, and tell users in CHANGELOG.md"
        assert (gone, new) == ([], []), f"{name}.txt: gone {gone}; new {new}; {advice}"
