"""Tables, tiles and badges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgbus.pipeline.report.bars import colour_of
from msgbus.pipeline.report.formats import NOTHING
from msgbus.pipeline.report.markup import Child, Markup, el


class Head(NamedTuple):
    """The head of a column."""

    label: str
    is_number: bool = False


def words(*labels: str) -> list[Head]:
    """Columns of text."""
    return [Head(label) for label in labels]


def numbers(*labels: str) -> list[Head]:
    """Columns of numbers, on the right."""
    return [Head(label, is_number=True) for label in labels]


def table(caption: str, heads: Sequence[Head], rows: Iterable[Sequence[Child]]) -> Markup:
    """A table; `caption` is for those who cannot see what is around it."""
    head = el("tr", *(el("th", one.label, scope="col", class_=_class(one)) for one in heads))
    body = [
        el(
            "tr",
            *(el("td", cell, class_=_class(one)) for one, cell in zip(heads, row, strict=True)),
        )
        for row in rows
    ]
    inner = el("table", el("thead", head), el("tbody", *body), aria_label=caption)
    return el("div", inner, class_="wide")


def folded(summary: str, *children: Child) -> Markup:
    """What is shown when it is asked for."""
    return el("details", el("summary", summary), *children)


def badge(outcome: str | None) -> Markup:
    """An outcome in its colour."""
    label = "nobody tried it" if outcome is None else outcome.replace("_", " ")
    return el("span", label, class_=f"badge {colour_of(outcome)}")


def identifier(text: str | None) -> Markup:
    """An id, in letters of one width."""
    return el("span", text or NOTHING, class_="id")


def tile(value: str, label: str, *, is_bad: bool = False) -> Markup:
    """A number that matters, with its name."""
    return el("div", el("b", value), el("span", label), class_="tile bad" if is_bad else "tile")


def _class(head: Head) -> str | None:
    return "n" if head.is_number else None
