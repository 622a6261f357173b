"""The page on architecture lists the files that messages pass, in the order in which they do."""

from __future__ import annotations

import re

import pytest

from benchmarks.walk import LINE, LIST, PAGE, listed, walk
from tests.docs.pages import ROOT

WALKS = [("command", True), ("command", False), ("event", False)]
"""Name, and whether it is that of the first message on a bus."""

SPARK = ("spark", False)
"""Compared in tests/spark/test_guides.py, on the session of the tests."""


def test_the_page_has_the_walks_that_are_compared() -> None:
    found = LIST.finditer(PAGE.read_text(encoding="utf-8"))

    assert [(one["name"], bool(one["first"])) for one in found] == [*WALKS, SPARK]


@pytest.mark.parametrize(("name", "first"), WALKS)
def test_the_page_lists_the_files_of_a_walk_in_order(name: str, *, first: bool) -> None:
    assert list(listed(name, first=first)) == list(walk(name, first=first))


@pytest.mark.parametrize(("name", "first"), [*WALKS, SPARK])
def test_what_the_page_says_of_a_file_is_a_sentence(name: str, *, first: bool) -> None:
    said = listed(name, first=first)

    assert [text for text in said.values() if not text.endswith(".")] == []


def test_a_durable_event_passes_the_files_of_its_steps() -> None:
    """Others too, in an order that varies: two threads and what else is due take part."""
    steps = re.search(r"<!-- steps: durable -->\n\n((?:\d+\. .+\n)*)", PAGE.read_text("utf-8"))
    assert steps is not None
    files = [file for file, _ in LINE.findall(steps[1])]

    assert len(files) > 10
    assert set(files) - set(walk("durable")) == set()


def test_every_file_that_the_page_names_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`", PAGE.read_text(encoding="utf-8"))

    assert [file for file in named if not (ROOT / file).is_file()] == []
