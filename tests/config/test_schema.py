from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from halfstep.config.run import RunConfig
from halfstep.config.schema import Count, Positive, Share, build, rows
from halfstep.core.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    """A section."""

    steps: Positive = 5
    """How many."""
    share: Share = 0.5
    """What part,
    over two lines."""
    kind: Literal["fast", "slow"] = "fast"
    """Which."""
    pair: tuple[float, Count] = (0.5, 1)
    """Two."""
    on: bool = False
    """Whether."""


@dataclass(frozen=True)
class Outer:
    """All."""

    name: str = ""
    """A name."""
    inner: Inner = field(default_factory=Inner)
    either: Share | str = 0.5
    """A share or a name."""


def test_a_table_becomes_the_section():
    built = build(Outer, {"name": "x", "inner": {"steps": 7, "share": 1, "pair": [2, 3], "on": True}})
    assert built == Outer("x", Inner(7, 1.0, "fast", (2.0, 3), True))
    assert isinstance(built.inner.share, float)
    assert [build(Outer, {"either": value}).either for value in (1, 0.25, "0.25")] == [1.0, 0.25, "0.25"]


@pytest.mark.parametrize(
    ("table", "said", "hint"),
    [
        ({"name": "x", "iner": {}}, "unknown setting `iner`", "did you mean `inner`?"),
        ({"name": "x", "inner": {"stesp": 1}}, "unknown setting `inner.stesp`", "did you mean `inner.steps`?"),
        ({"name": "x", "inner": {"zzz": 1}}, "unknown setting `inner.zzz`", "inner.steps"),
        ({"name": "x", "inner": 3}, "`inner` is 3; it must be a table of settings", None),
        ({"name": 3}, "`name` is 3; it must be text", None),
        ({"name": "x", "inner": {"steps": "7"}}, '`inner.steps` is "7"; it must be a whole number', None),
        ({"name": "x", "inner": {"steps": 7.0}}, "`inner.steps` is 7.0; it must be a whole number", None),
        ({"name": "x", "inner": {"steps": True}}, "`inner.steps` is True; it must be a whole number", None),
        ({"name": "x", "inner": {"steps": 0}}, "it must be a whole number, at least 1", None),
        ({"name": "x", "inner": {"share": 1.5}}, "at least 0 and at most 1", None),
        ({"name": "x", "inner": {"share": float("nan")}}, "at least 0 and at most 1", None),
        ({"name": "x", "inner": {"on": 1}}, "`inner.on` is 1; it must be true or false", None),
        ({"name": "x", "inner": {"kind": "fats"}}, "it must be `fast` or `slow`", "did you mean `fast`?"),
        ({"name": "x", "inner": {"pair": [1]}}, "it must be a list of 2 numbers", None),
        ({"name": "x", "inner": {"pair": [1, -1]}}, "`inner.pair[1]` is -1", None),
        ({"either": True}, "`either` is True; it must be a number, at least 0 and at most 1, or text", None),
        ({"either": 2}, "`either` is 2.0; it must be a number, at least 0 and at most 1", None),
    ],
)
def test_a_mistake_is_named(table, said, hint):
    with pytest.raises(ConfigError) as caught:
        build(Outer, table)
    assert said in caught.value.message
    assert hint is None or hint in caught.value.hint


def test_rows_hold_key_type_default_and_help():
    listed = {row.key: row for row in rows(Outer)}
    inner = [f"inner.{name}" for name in ("steps", "share", "kind", "pair", "on")]
    assert list(listed) == ["name", *inner, "either"]
    assert (listed["inner.share"].help, listed["inner.steps"].default) == ("What part, over two lines.", 5)
    assert listed["inner.kind"].kind == "`fast` or `slow`"
    assert [row.key for row in rows(RunConfig) if not row.help] == []


@dataclass(frozen=True)
class Record:
    """What a file holds."""

    count: Count
    inner: Inner
    several: tuple[Inner, ...] = ()
    maybe: Count | None = None
    table: Mapping[str, Count] = field(default_factory=dict)
    whatever: Any = None


def test_records_have_lists_tables_and_what_may_be_absent():
    read = {"count": 3, "inner": {}, "several": [{"steps": 2}], "maybe": None, "table": {"a": 1}, "whatever": [[]]}
    assert build(Record, read) == Record(3, Inner(), (Inner(2),), None, {"a": 1}, [[]])
    assert build(Record, {**read, "new": 1}, others=True) == build(Record, read)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"count": None}, "`count` is None; it must be a whole number"),
        ({"count": "3"}, '`count` is "3"'),
        ({"count": int("f" * 6000, 16)}, "`count` is a int too long to print"),
        ({"inner": []}, r"`inner` is \[\]; it must be a table"),
        ({"several": [{}, 3]}, r"`several\[1\]` is 3"),
        ({"several": {}}, "`several` is {}; it must be a list"),
        ({"maybe": -1}, "`maybe` is -1"),
        ({"table": {"a": 1.5}}, r"`table\.a` is 1\.5"),
        ({"new": 1}, "unknown setting `new`"),
    ],
)
def test_a_record_with_a_value_of_another_kind_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        build(Record, {"count": 3, "inner": {}} | change)


@pytest.mark.parametrize("table", [{}, {"count": 3}, [], None])
def test_a_record_that_lacks_a_part_is_refused(table):
    with pytest.raises(ConfigError, match=r"is missing|must be a table"):
        build(Record, table)
