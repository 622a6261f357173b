"""The page on subscriptions has every field with its default and its doc line."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from enum import Enum

import pytest
from pydantic import BaseModel

from msgbus.subscriptions import (
    DeliveryCounts,
    Progress,
    StartAt,
    SubscriptionConfig,
    SubscriptionTuning,
)
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "reference" / "subscriptions.md").read_text(encoding="utf-8")


def doc_lines(model: type[BaseModel]) -> dict[str, str]:
    tree = ast.parse(inspect.getsource(inspect.getmodule(model) or model))
    (cls,) = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__
    ]
    found: dict[str, str] = {}
    for field, doc in zip(cls.body, cls.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(doc.value, ast.Constant)
            found[field.target.id] = " ".join(str(doc.value.value).split())
    return found


def shown(default: object) -> str:
    if isinstance(default, SubscriptionTuning):
        return "SubscriptionTuning()"
    if isinstance(default, StartAt):
        return "StartAt.EARLIEST"
    if isinstance(default, Enum):
        return f"{type(default).__name__}.{default.name}"
    if isinstance(default, int):
        return f"{default:_}" if not isinstance(default, bool) else str(default)
    return str(default)


@pytest.mark.parametrize("model", [SubscriptionConfig, SubscriptionTuning])
def test_every_setting_is_on_the_page(model: type[BaseModel]) -> None:
    docs = doc_lines(model)
    rows = [
        f"| `{name}` | `{shown(field.default)}` | {docs[name]} |"
        for name, field in model.model_fields.items()
    ]

    assert [row for row in rows if row not in PAGE] == []


def test_every_figure_is_on_the_page() -> None:
    names = [field.name for cls in (Progress, DeliveryCounts) for field in fields(cls)]

    assert [name for name in names if f"`{name}`" not in PAGE] == []
