"""The tables of the page on topics are true."""

from __future__ import annotations

import re

import pytest

from msgbus.errors import InvalidTopicError
from msgbus.routing import TopicPattern, nats_subjects, to_nats
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "reference" / "topics.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[list[str]]]:
    """The rows of the first table below a heading: for each cell what is in backticks."""
    below = PAGE.split(f"# {heading}\n", 1)[1]
    found = re.search(r"(?m)^\|---.*\n((?:\|.*\n)+)", below)
    assert found is not None
    rows = [line.strip("|").split(" | ") for line in found.group(1).splitlines()]
    return [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows]


PAIRS = [
    (pattern, topic, expected)
    for [[pattern], matches, others] in table("What matches")
    for topics, expected in ((matches, True), (others, False))
    for topic in topics
]


def test_the_table_has_both_matches_and_others_in_every_row() -> None:
    rows = table("What matches")

    assert len(rows) > 20
    assert all(len(row) == 3 and all(row) for row in rows)


@pytest.mark.parametrize(("pattern", "topic", "expected"), PAIRS)
def test_a_pattern_of_the_table_matches_what_the_page_says(
    pattern: str, topic: str, expected: bool
) -> None:
    assert TopicPattern(pattern).matches(topic) is expected


def test_what_the_page_says_is_refused_is_refused_at_the_position_it_says() -> None:
    rows = re.findall(r"(?m)^\| `([^`]+)` \| (\d+) \|", PAGE)

    assert len(rows) == 9
    for pattern, position in rows:
        with pytest.raises(InvalidTopicError) as caught:
            TopicPattern(pattern)
        assert caught.value.position == int(position)


def test_the_subjects_are_what_the_page_says() -> None:
    for [[pattern], subjects, [subject]] in table("NATS subjects"):
        assert list(nats_subjects(pattern)) == subjects
        assert to_nats(pattern) == subject
