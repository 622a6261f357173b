"""The table of `make stress`: rows add up, and a run replaces its own sections only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.evidence import Table


def note(area: str, what: str, amounts: dict[str, int], **faults: int) -> tuple[str, Any]:
    return "evidence", {"area": area, "what": what, "amounts": amounts, "faults": faults}


def test_tests_that_say_the_same_are_one_row_with_their_numbers_added_up() -> None:
    table = Table()
    table.take([note("journal", "kill -9", {"kills": 20, "messages": 900}, lost=0)], 2.0)
    table.take([note("journal", "kill -9", {"kills": 20, "messages": 400}, lost=1)], 3.0)

    (row,) = table.sections()["journal"].splitlines()[2:]

    assert row == "| kill -9 | 40 kills, 1,300 messages | 1 | - | - | 5 |"


def test_what_is_no_evidence_is_not_taken() -> None:
    table = Table()
    table.take([("other", 3)], 2.0)

    assert table.sections() == {}


def test_a_run_of_one_area_leaves_the_sections_of_the_others(tmp_path: Path) -> None:
    page = tmp_path / "evidence.md"
    first, second = Table(), Table()
    first.take([note("spark", "replay", {"rows": 7})], 1.0)
    first.take([note("journal", "cuts", {"images": 1}, lost=0)], 1.0)
    second.take([note("journal", "cuts", {"images": 2}, lost=0)], 1.0)

    first.write(page)
    before = page.read_text()
    second.write(page)
    after = page.read_text()

    assert after == before.replace("| 1 images |", "| 2 images |")
    assert after.index("## journal") < after.index("## spark")
