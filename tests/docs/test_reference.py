"""The reference pages say what the code says: no name is missing, none is made up."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module

import pytest
from pydantic import BaseModel

import msgbus
import msgbus.errors
import msgbus.middleware
from msgbus import (
    BackpressureStrategy,
    BusConfig,
    MessageBus,
    MsgBusError,
    QueueConfig,
    SystemEvent,
)
from msgbus.resilience import MESSAGE_ERRORS, CircuitBreakerConfig, RetryConfig
from msgbus.telemetry.prometheus import BusCollector
from tests.docs.pages import ROOT, prose

REFERENCE = ROOT / "docs" / "reference"


def rows(page: str) -> list[list[str]]:
    """The cells of every table row on a page, without headings."""
    lines = (REFERENCE / page).read_text(encoding="utf-8").splitlines()
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in cells if not row[0].startswith("---")]


def names_in(text: str) -> list[str]:
    """Everything in backticks."""
    return re.findall(r"`([^`]+)`", text)


def field_docs(
    model: type[BaseModel | BackpressureStrategy],
) -> dict[str, str]:
    """The text under each field of a class."""
    tree = ast.parse(inspect.getsource(import_module(model.__module__)))
    (cls,) = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__
    ]
    found: dict[str, str] = {}
    for field, doc in zip(cls.body, cls.body[1:], strict=False):
        target: ast.expr | None = None
        if isinstance(field, ast.AnnAssign):
            target = field.target
        elif isinstance(field, ast.Assign):
            target = field.targets[0]
        if isinstance(target, ast.Name) and isinstance(doc, ast.Expr):
            assert isinstance(doc.value, ast.Constant)
            found[target.id] = str(doc.value.value)
    return found


def shown(default: object) -> str:
    """A default value as the page writes it."""
    if isinstance(default, QueueConfig):
        return "QueueConfig()"
    if isinstance(default, str):
        return f'"{default}"'
    if isinstance(default, int):
        return f"{default:_}"
    return str(default)


# -- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", msgbus.__all__)
def test_the_page_of_public_names_has_every_name(name: str) -> None:
    assert name in names_in(prose(REFERENCE / "api.md"))


def test_the_page_of_public_names_makes_none_up() -> None:
    tables = [row[0] for row in rows("api.md") if len(row) == 2]
    single = [found[0] for found in map(names_in, tables) if len(found) == 1]
    plain = {name for name in single if name.isidentifier()}

    assert plain
    assert plain - set(msgbus.__all__) == set()


# -- errors --------------------------------------------------------------------------------


def test_the_page_of_errors_shows_the_tree_of_the_module() -> None:
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    tree = re.search(r"```text\nMsgBusError\n(.*?)```", page, re.DOTALL)
    assert tree is not None
    path = ["MsgBusError"]
    shown = {"MsgBusError": {"Exception"}}
    for line in tree[1].splitlines():
        row = re.fullmatch(r"([│├└─ ]+)(\w+) .*?(?: \((\w+)\))?", line)
        assert row is not None, line
        path[len(row[1]) // 3 :] = [row[2]]
        shown[row[2]] = {path[-2], row[3]} - {None}

    assert shown == {
        name: {base.__name__ for base in cls.__bases__}
        for name, cls in vars(msgbus.errors).items()
        if isinstance(cls, type) and issubclass(cls, MsgBusError)
    }


# -- configuration -------------------------------------------------------------------------


@pytest.mark.parametrize("model", [BusConfig, QueueConfig])
def test_the_page_of_configuration_has_every_field_with_its_default(model: type[BaseModel]) -> None:
    docs = field_docs(model)
    expected = [
        [f"`{name}`", f"`{shown(field.default)}`", docs[name]]
        for name, field in model.model_fields.items()
    ]

    written = [row for row in rows("config.md") if len(row) == 3]

    assert [row for row in expected if row not in written] == []


@pytest.mark.parametrize("model", [RetryConfig, CircuitBreakerConfig])
def test_the_page_of_resilience_has_every_field_with_its_default(model: type[BaseModel]) -> None:
    docs = field_docs(model)
    named = {(Exception,): "(Exception,)", MESSAGE_ERRORS: "MESSAGE_ERRORS"}
    defaults = {
        name: named.get(field.default, repr(field.default))
        for name, field in model.model_fields.items()
    }
    expected = [
        [f"`{name}`", f"`{default}`", " ".join(docs[name].split())]
        for name, default in defaults.items()
    ]

    written = [row for row in rows("resilience.md") if len(row) == 3]

    assert [row for row in expected if row not in written] == []


def test_the_page_of_configuration_has_every_strategy() -> None:
    docs = field_docs(BackpressureStrategy)
    expected = [
        [f"`{strategy.name}`", f'`"{strategy.value}"`', docs[strategy.name]]
        for strategy in BackpressureStrategy
    ]

    assert [row for row in expected if row not in rows("config.md")] == []


# -- lifecycle events ------------------------------------------------------------------------


def test_the_page_of_lifecycle_events_has_each_with_its_fields() -> None:
    public = [getattr(msgbus, name) for name in msgbus.__all__]
    expected = {
        cls.__name__: list(cls.model_fields)
        for cls in public
        if isinstance(cls, type) and issubclass(cls, SystemEvent) and cls is not SystemEvent
    }

    table = [row for row in rows("lifecycle-events.md") if len(row) == 3 and row[0] != "Event"]

    assert {names_in(row[0])[0]: names_in(row[2]) for row in table} == expected


# -- middleware ------------------------------------------------------------------------------


def test_the_page_of_middleware_has_a_section_for_each() -> None:
    page = (REFERENCE / "middleware.md").read_text(encoding="utf-8")
    ready = {name for name in dir(msgbus.middleware) if name.endswith("Middleware")}

    assert set(re.findall(r"^## (\w+Middleware)$", page, re.MULTILINE)) == ready
    assert {names_in(row[0])[0] for row in rows("middleware.md") if row[0].startswith("`")} == ready


# -- metrics ---------------------------------------------------------------------------------


def test_the_page_of_metrics_has_each_with_its_type_and_help() -> None:
    suffix = {"counter": "_total", "info": "_info"}
    given = {
        (f"{metric.name}{suffix.get(metric.type, '')}", metric.type, metric.documentation)
        for metric in BusCollector(MessageBus()).collect()
    }

    written = {(names_in(row[0])[0], row[1], row[3]) for row in rows("metrics.md")[1:]}

    assert written == given
