"""20.7: the page of log events has every event with its level and its fields.

The calls are found in the source; the page is written by hand. A failure says which row to write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "reference" / "log-events.md"
PACKAGE = ROOT / "msgbus"
LEVELS = ("debug", "info", "warning", "error")
DOOR = PACKAGE / "telemetry" / "logging.py"
MAKERS = PACKAGE / "messages" / "message.py"
MAKERS_TREE = ast.parse(MAKERS.read_text(encoding="utf-8"))
"""Its functions make fields for others, such as `**ids_of(message)`."""


@dataclass(frozen=True)
class LogCall:
    """One call of the library's log."""

    place: str
    event: str
    level: str
    fields: tuple[str, ...]
    optional: frozenset[str]
    """Those that are only there under a condition."""

    def row(self, when: str = "...") -> str:
        """The row of the page that says the same."""
        fields = ", ".join(f"`{field}`" for field in self.fields)
        return f"| `{self.event}` | {self.level} | {when} | {fields} |"


def methods(tree: ast.Module) -> dict[str, str]:
    """The level of each name assigned a method of the log: `self._log_success = log.debug`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        levels = [level for one in ast.walk(node.value) if (level := level_of(one))]
        for target in node.targets:
            if levels and isinstance(target, ast.Attribute | ast.Name):
                name = target.attr if isinstance(target, ast.Attribute) else target.id
                found[name] = " or ".join(sorted(levels, key=LEVELS.index))
    return found


def level_of(node: ast.AST) -> str | None:
    """The level of `log.warning`, `self._log.warning` or the like."""
    if not isinstance(node, ast.Attribute):
        return None
    owner = ast.unparse(node.value)
    return node.attr if owner in ("log", "self._log") and node.attr in LEVELS else None


def keys_behind(stars: ast.expr, tree: ast.Module) -> tuple[list[str], set[str]]:
    """The keys of `**name` or `**function(...)`: of the dict displays it is made of, and others.

    Others are set one by one, `facts["count"] = ...`, so they may be missing.
    """
    called = stars.func if isinstance(stars, ast.Call) else stars
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    makers = [
        node
        for node in (*ast.walk(tree), *ast.walk(MAKERS_TREE))
        if (isinstance(node, ast.FunctionDef) and node.name == name)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
    ]
    inside = [one for maker in makers for one in ast.walk(maker)]
    keys = [
        key.value
        for one in inside
        if isinstance(one, ast.Dict)
        for key in one.keys
        if isinstance(key, ast.Constant)
    ]
    inner = [
        value
        for one in inside
        if isinstance(one, ast.Dict)
        for key, value in zip(one.keys, one.values, strict=True)
        if key is None
    ]
    for one in inner:
        keys += keys_behind(one, tree)[0]
    set_later = {
        one.slice.value
        for one in inside
        if isinstance(one, ast.Subscript)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.slice, ast.Constant)
    }
    assert keys, f"no dict display was found for **{ast.unparse(stars)}; write one"
    return [str(key) for key in keys], {str(key) for key in set_later}


def log_calls(file: Path) -> Iterator[LogCall]:
    """All log events of a module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    known = methods(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        level = level_of(node.func) or known.get(name)
        if level is None:
            continue
        place = f"{file.relative_to(ROOT)}:{node.lineno}"
        event = node.args[0]
        assert isinstance(event, ast.Constant), f"{place}: write the name of the event as text"
        fields: list[str] = []
        optional: set[str] = set()
        for keyword in node.keywords:
            if keyword.arg is not None:
                fields.append(keyword.arg)
                continue
            keys, set_later = keys_behind(keyword.value, tree)
            fields += keys
            optional |= set_later
        yield LogCall(place, str(event.value), level, tuple(fields), frozenset(optional))


FILES = sorted(PACKAGE.rglob("*.py"))
CALLS = [call for file in FILES if file != DOOR for call in log_calls(file)]


def rows() -> dict[str, tuple[str, str, str, list[str]]]:
    """Of each event on the page: the row, its level, when it comes, and its fields."""
    found: dict[str, tuple[str, str, str, list[str]]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"\| `(\w+)` \| ([\w ]+) \| (.+) \| (.+) \|", line)
        if match is not None:
            event, level, when, fields = match.groups()
            assert event not in found, f"{event} has two rows"
            found[event] = (line, level, when, re.findall(r"`([^`]+)`", fields))
    return found


def faults() -> Iterator[str]:
    """What has to be changed on the page."""
    page = rows()
    for call in CALLS:
        if call.event not in page:
            yield f"{call.place}: not on the page. Write: {call.row()}"
            continue
        _, level, when, fields = page[call.event]
        missing = set(call.fields) ^ set(fields)
        if level != call.level or missing - call.optional:
            yield f"{call.place}: the page says otherwise. Write: {call.row(when)}"
    gone = set(page) - {call.event for call in CALLS}
    yield from (f"{event}: nothing logs it. Remove: {page[event][0]}" for event in sorted(gone))


def test_the_page_has_every_event_with_its_level_and_fields() -> None:
    assert len(CALLS) > 60
    assert "\n".join(faults()) == ""


def test_every_event_is_logged_through_the_one_log() -> None:
    others = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in FILES
        if file != DOOR and "testing" not in file.parts
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\bgetLogger\(|\bget_logger\(|import log as|logging import _Log", line)
    ]

    assert others == []
