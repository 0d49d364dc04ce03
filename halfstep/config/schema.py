"""Turns tables that were read from a file into dataclasses: types are the checks.

Settings are read this way, and so is all else that halfstep reads back from a disk: manifests, indexes, events.
Of a setting, the string under the field is its help. It is written by hand for its errors: each names the dotted
key, what was given, what is allowed and the nearest legal key.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from halfstep.core.errors import ConfigError, SettingValueError, UnknownSettingError, did_you_mean, nearest, one_of

T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """The numbers a field may hold, in an `Annotated` type."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            math.isfinite(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        limits = [(name.replace("_", " "), limit) for name, limit in dataclasses.asdict(self).items()]
        texts = [(name, "2^63" if limit == 2**63 else f"{limit:g}") for name, limit in limits if limit is not None]
        return " and ".join(map(" ".join, texts))


Count = Annotated[int, Bounds(at_least=0)]
Positive = Annotated[int, Bounds(at_least=1)]
Rate = Annotated[float, Bounds(at_least=0)]
Share = Annotated[float, Bounds(at_least=0, at_most=1)]
Decay = Annotated[float, Bounds(at_least=0, below=1)]
Seed = Annotated[int, Bounds(at_least=0, below=2**63)]


_ENDLESS = 2**63  # arrays and frameworks cannot count that far


@dataclass(frozen=True)
class Row:
    """One setting, as help and docs show it."""

    key: str
    kind: str
    default: Any
    help: str

    @property
    def shown(self) -> str:
        """The default as a recipe or `--set` writes it."""
        return shown(self.default)


def shown(value: object) -> str:
    """Returns a value as a recipe or `--set` writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {shown(each)}' for key, each in value.items())}}}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def build(cls: type[T], table: Any, prefix: str = "", *, others: bool = False) -> T:
    """Builds a dataclass from a table. Keys that are missing, values of another type and, unless `others` may
    be there, unknown keys are errors."""
    if not isinstance(table, Mapping):
        raise wrong(prefix.removesuffix(".") or "it", table, "a table")
    hints = {key_of(name): (name, hint) for name, hint in _hints(cls).items()}  # type: ignore[arg-type]
    for key in table:
        if key not in hints and not others:
            raise unknown_key(prefix + key, [prefix + name for name in hints])
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if key_of(field.name) not in table and field.default is field.default_factory is dataclasses.MISSING:
            raise UnknownSettingError(f"`{prefix}{key_of(field.name)}` is missing")
    known = ((*hints[key], prefix + key, value) for key, value in table.items() if key in hints)
    return cls(**{name: _check(hint, value, key, others) for name, hint, key, value in known})


def key_of(name: str) -> str:
    """Returns the key of a field: `from` of `from_`, because Python has the word itself."""
    return name.rstrip("_")


def to_table(value: Any) -> Any:
    """Returns a dataclass as the table that `build` reads back."""
    if dataclasses.is_dataclass(value):
        return {key_of(field.name): to_table(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return tuple(map(to_table, value))
    return value


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested tables under their dotted keys, in order."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def check(hints: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    """Refuses a table with a value of the wrong type under one of the keys; each key may be missing."""
    for key, hint in hints.items():
        if key in table and type(table[key]) not in _exact_types(hint):  # most are: tables may come by the million
            _check(hint, table[key], key, others=True)


@cache
def _exact_types(hint: Any) -> frozenset[type]:
    """Returns types whose every value fits a hint."""
    if get_origin(hint) in (Union, UnionType):
        return frozenset().union(*map(_exact_types, get_args(hint)))
    return frozenset([hint] if hint in (float, str, bool, NoneType) else [])


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def unknown_key(key: str, legal: list[str]) -> ConfigError:
    """Returns the error for a key that is not in the schema."""
    section, _, last = key.rpartition(".")
    # If the section is right, only the last part can be wrong: a shared prefix does not make names similar.
    siblings = {name.rpartition(".")[2]: name for name in legal if name.rpartition(".")[0] == section}
    match = nearest(last, siblings) if siblings else nearest(key, legal)
    if match is None:
        known = ", ".join(siblings.values() or legal)
        return UnknownSettingError(f"unknown setting `{key}`", hint=f"the settings are {known}")
    return UnknownSettingError(f"unknown setting `{key}`", hint=f"did you mean `{siblings.get(match, match)}`?")


def rows(cls: type, prefix: str = "") -> Iterator[Row]:
    """Yields every setting of a section, depth first, in the order of declaration."""
    hints, helps = _hints(cls), field_help(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from rows(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            yield Row(prefix + field.name, describe(hint), field.default, helps[field.name])


@cache
def field_help(cls: type) -> dict[str, str]:
    """Returns the string under each field."""
    from docstring_parser import parse_from_object

    params = parse_from_object(cls).params
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def describe(hint: Any) -> str:
    """Describes a type."""
    kind, bounds = _unwrap(hint)
    if get_origin(kind) is Literal:
        return one_of(str(value) for value in get_args(kind))
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if kind in words:
        return words[kind] + (f", {bounds}" if bounds else "")
    if get_origin(kind) in (Union, UnionType):
        return ", or ".join(describe(each) for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is tuple:
        first, *_, last = get_args(kind)
        if last is not Ellipsis:
            return f"a list of {len(get_args(kind))} numbers"
        if dataclasses.is_dataclass(first):
            return f"a list of tables with {' and '.join(map(key_of, _hints(first)))}"  # type: ignore[arg-type]
        return f"a list of any of {describe(first)}" if get_origin(first) is Literal else "a list"
    return "a table"


def section_of(cls: type, name: str) -> type | None:
    """Returns the dataclass of a field, or None if the field is a plain setting."""
    kind, _ = _unwrap(_hints(cls)[name])
    return kind if dataclasses.is_dataclass(kind) else None  # type: ignore[return-value]


def is_text(cls: type, name: str) -> bool:
    """Whether a field holds text, which needs no quotes on a command line."""
    kind, _ = _unwrap(_hints(cls)[name])
    return kind is str or get_origin(kind) is Literal


def _unwrap(hint: Any) -> tuple[Any, Bounds | None]:
    if get_origin(hint) is Annotated:
        kind, *extras = get_args(hint)
        return kind, next((extra for extra in extras if isinstance(extra, Bounds)), None)
    return hint, None


def _check(hint: Any, value: Any, key: str, others: bool) -> Any:
    """Returns a value converted to what its field holds; refuses a value of another type."""
    kind, _ = _unwrap(hint)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise wrong(key, value, "a table of settings")
        return build(kind, value, key + ".", others=others)  # type: ignore[arg-type]
    check_generic = _CHECKS.get(get_origin(kind))
    return check_generic(kind, value, key, others) if check_generic else _check_plain(hint, value, key, others)


def _check_union(kind: Any, value: Any, key: str, others: bool) -> Any:
    """Checks against the member of the union that the value resembles, so that an error names what is wrong."""
    kinds = get_args(kind)
    if value is None and NoneType in kinds:
        return None
    options = [each for each in kinds if each is not NoneType]
    fitting = [each for each in options if _is_like(each, value)] if len(options) > 1 else options
    if not fitting:
        raise wrong(key, value, describe(kind))
    return _check(fitting[0], value, key, others)


def _check_mapping(kind: Any, value: Any, key: str, others: bool) -> Any:
    if not isinstance(value, Mapping):
        raise wrong(key, value, "a table")
    _, inner = get_args(kind)
    return {name: _check(inner, item, f"{key}.{name}", others) for name, item in value.items()}


def _check_literal(kind: Any, value: Any, key: str, others: bool) -> Any:
    legal = get_args(kind)
    if value not in legal:
        words = [str(allowed) for allowed in legal]
        raise wrong(key, value, one_of(words), did_you_mean(str(value), words))
    return value


def _check_tuple(kind: Any, value: Any, key: str, others: bool) -> Any:
    if not isinstance(value, list | tuple):
        raise wrong(key, value, describe(kind), hint=f"write {key} = [...]")
    kinds = get_args(kind)
    if kinds[-1] is Ellipsis:  # any number of them
        if set(map(type, value)) <= _exact_types(kinds[0]) | {int} and float in _exact_types(kinds[0]):
            with suppress(OverflowError):  # a list of numbers may be long: one by one would take a while
                return tuple(float(item) if type(item) is int else item for item in value)
        kinds = (kinds[0],) * len(value)
    if len(value) != len(kinds):
        raise wrong(key, value, describe(kind))
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_check(inner, item, f"{key}[{i}]", others) for i, (inner, item) in pairs)


def _check_plain(hint: Any, value: Any, key: str, others: bool) -> Any:
    kind, bounds = _unwrap(hint)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise wrong(key, value, describe(hint)) from None
    if kind is int and isinstance(value, int) and not -_ENDLESS <= value < _ENDLESS:
        limit = "" if bounds is not None and bounds.below is not None else ", and below 2^63"
        raise wrong(key, value, describe(hint) + limit)
    # bool is an int in Python, but `steps = true` is a mistake
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise wrong(key, value, describe(hint))
    if bounds is not None and value not in bounds:
        raise wrong(key, value, describe(hint))
    if kind is str and not others and not _is_unicode(value):  # a setting is written to run.toml
        raise wrong(key, value, "text that UTF-8 has characters for")
    return value


# How a value of a generic type is checked, by the type's origin.
_CHECKS: dict[Any, Callable[[Any, Any, str, bool], Any]] = {
    Union: _check_union,
    UnionType: _check_union,
    Mapping: _check_mapping,
    Literal: _check_literal,
    tuple: _check_tuple,
}


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_like(hint: Any, value: Any) -> bool:
    """Whether a value has the form that one type of a union expects: a table, text or a number."""
    kind, _ = _unwrap(hint)
    if dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, float | int if kind is float else kind)


def wrong(key: str, value: Any, allowed: str, hint: str | None = None) -> ConfigError:
    """Returns the error for a value that a key cannot have."""
    try:
        shown = f"{value!r}" if not isinstance(value, str) else f'"{value}"'
    except (ValueError, RecursionError):  # Python prints neither a number of 5,000 digits nor a list 1,000 deep
        shown = f"a {type(value).__name__} too long to print"
    return SettingValueError(f"`{key}` is {shown}; it must be {allowed}", hint=hint)
