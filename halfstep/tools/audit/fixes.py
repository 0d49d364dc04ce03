"""Fixes that are an edit of the script: what to take out at a line, and what to put in.

They are made where a finding names a line, and where the names that the edit needs are in the same file: of the
scaler, of the optimizer. An edit replaces whole lines, so that any program can apply it:

    lines[line - 1 : line - 1 + remove] = insert
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.config.reading import MOST_SETTINGS, read_bytes
from halfstep.core.audit.finding import Finding


@dataclass(frozen=True)
class Edit:
    """Lines of a file, counted from 1, and what replaces them."""

    file: str
    line: int
    remove: int
    insert: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the edit as plain data."""
        return {**asdict(self), "insert": [*self.insert]}


@dataclass(frozen=True)
class _Place:
    finding: Finding
    lines: list[str]
    tree: ast.Module
    statement: ast.stmt

    @property
    def indent(self) -> str:
        line = self.lines[self.statement.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def calls(self, method: str) -> Iterator[ast.Call]:
        """Yields the calls of a method in the file, `x.method(...)`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
                yield node

    def scaler(self) -> tuple[str, str] | None:
        """Returns the names of the scaler and of the optimizer that it steps: `scaler.step(optimizer)`."""
        steps = [call for call in self.calls("step") if call.args]
        return (_owner(steps[0]), ast.unparse(steps[0].args[0])) if steps else None

    def before(self, *new: str) -> tuple[int, int, tuple[str, ...]]:
        """Returns an edit that puts lines before the statement."""
        return self.statement.lineno, 0, tuple(self.indent + line for line in new)


_Lines = tuple[int, int, tuple[str, ...]] | None


def edit_of(finding: Finding) -> Edit | None:
    """Returns the edit that mends a finding; None if there is none."""
    file, _, line = (finding.place or "").rpartition(":")
    make = MECHANICAL.get(finding.rule)
    if make is None or not line.isdigit() or not file.endswith(".py"):
        return None
    try:
        text = read_bytes(Path(file), MOST_SETTINGS).decode("utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return None
    statement = _statement_at(tree, int(line))
    made = make(_Place(finding, text.splitlines(), tree, statement)) if statement is not None else None
    return Edit(file, *made) if made is not None else None


def _statement_at(tree: ast.Module, line: int) -> ast.stmt | None:
    """Returns the innermost statement that covers a line and is not a block."""
    for node in ast.walk(tree):
        simple = isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return)
        if simple and node.lineno <= line <= (node.end_lineno or line):  # type: ignore[attr-defined]
            return node  # type: ignore[return-value]
    return None


def _owner(call: ast.Call) -> str:
    return ast.unparse(call.func.value)  # type: ignore[attr-defined]


def _insert_in(place: _Place, line: int, column: int, *parts: tuple[int, str]) -> _Lines:
    text = place.lines[line - 1]
    for at, new in sorted(parts, reverse=True):
        text = text[:at] + new + text[at:]
    return line, 1, (text,)


def _disable_scaler(place: _Place) -> _Lines:
    for node in ast.walk(place.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("GradScaler"):
            if any(keyword.arg == "enabled" for keyword in node.keywords) or node.end_lineno is None:
                return None
            end, comma = (node.end_col_offset or 1) - 1, ", " if node.args or node.keywords else ""
            return _insert_in(place, node.end_lineno, end, (end, f"{comma}enabled=False"))
    return None


def _unscale_first(place: _Place) -> _Lines:
    names = place.scaler()
    return place.before(f"{names[0]}.unscale_({names[1]})") if names else None


def _step_with_scaler(place: _Place) -> _Lines:
    optimizer = next((_owner(call) for call in place.calls("step") if _inside(call, place.statement)), None)
    if optimizer is None or place.statement.end_lineno != place.statement.lineno:
        return None
    scaler = next((_owner(call) for call in place.calls("scale")), None)
    if scaler is None:  # the script multiplies by itself
        scale = place.finding.evidence.get("scale", 1.0)
        divide = (
            "for group in {}.param_groups:",
            "    for p in group['params']:",
            "        if p.grad is not None:",
        )
        return place.before(*(line.format(optimizer) for line in divide), f"            p.grad.div_({scale})")
    updates = [f"{scaler}.update()"] if not any(_owner(call) == scaler for call in place.calls("update")) else []
    new = (f"{scaler}.step({optimizer})", *updates)
    return place.statement.lineno, 1, tuple(place.indent + line for line in new)


def _widen_logits(place: _Place) -> _Lines:
    for node in ast.walk(place.statement):
        if isinstance(node, ast.Call) and len(node.args) >= 2:
            name, given = ast.unparse(node.func).lower(), node.args[0]
            if any(word in name for word in ("loss", "entropy", "criterion")) and given.lineno == given.end_lineno:
                start, end = given.col_offset, given.end_col_offset or given.col_offset
                simple = isinstance(given, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
                around = ((start, ""), (end, ".float()")) if simple else ((start, "("), (end, ").float()"))
                return _insert_in(place, given.lineno, start, *around)
    return None


def _inside(call: ast.Call, statement: ast.stmt) -> bool:
    return any(node is call for node in ast.walk(statement))


# The rules whose fix is an edit.
MECHANICAL: dict[str, Callable[[_Place], _Lines]] = {
    "HS201": _disable_scaler,
    "HS202": _unscale_first,
    "HS203": _step_with_scaler,
    "HS404": _widen_logits,
}
