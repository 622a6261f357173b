"""The benchmark of the pipeline: its journal, its tables and its bars. Never how fast."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.spark.data import Customers, groups, write_journal
from benchmarks.spark.runner import BEGIN, END, parse, refresh
from benchmarks.spark.table import Figures, markdown, tables
from msgbus.journal import Record, SqliteJournal
from msgbus.journal.operations import Append
from msgbus.pipeline import fold
from msgbus.testing.conformance.journal.kit import EVENTS

GOOD = {
    "read.parquet": 10.0,
    "read.source": 20.0,
    "read.tail": 2.0,
    "lake.parquet": 10.0,
    "lake.union": 11.0,
    "replay.spark": 30.0,
    "replay.loop": 40.0,
}


def figures(**changes: float) -> Figures:
    found = Figures()
    seconds = {**GOOD, **{name.replace("_", "."): value for name, value in changes.items()}}
    data = {name: {"rows": 1000, "seconds": [value]} for name, value in seconds.items()}
    found.add(1000, 2, data)
    return found


def test_the_journal_is_the_same_in_one_piece_or_in_two(tmp_path: Path) -> None:
    whole = [one.record for group in groups(0, 5_100) for one in group if isinstance(one, Append)]
    write_journal(tmp_path / "journal.db", 0, 5_000)
    write_journal(tmp_path / "journal.db", 5_000, 5_100)

    async def look() -> tuple[int, list[str], int]:
        async with SqliteJournal(tmp_path / "journal.db", reserve=0) as journal:
            head = await journal.head()
            scan = await journal.read(5_089, 100, EVENTS)
            last = [one.message_id for one in scan.records if isinstance(one, Record)]
            rows = await fold(journal, Customers)
            return head, last, sum(row.orders + row.seen for row in rows)

    head, last, folded = asyncio.run(look())
    assert head == folded == len(whole) == 5_100
    assert last == [one.message_id for one in whole[5_089:]]
    assert max(one.depth for one in whole) == 6


def test_bars_are_ratios_of_rates_and_for_a_part_of_seconds() -> None:
    found = figures()

    assert found.missed(1000) == []
    assert found.ratio(1000, "read.source", "read.parquet") == pytest.approx(0.5)
    assert found.ratio(1000, "read.tail", "read.source") == pytest.approx(10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"read_source": 26.0}, "journal / Parquet"),
        ({"lake_union": 13.0}, "lake and tail"),
        ({"read_tail": 6.0}, "last 1 %"),
        ({"replay_spark": 41.0}, "replay / plain loop"),
    ],
)
def test_a_bar_that_is_missed_is_named(change: dict[str, float], words: str) -> None:
    (missed,) = figures(**change).missed(1000)

    assert missed.startswith(words)


def test_what_was_not_measured_is_missed() -> None:
    assert len(Figures().missed(1000)) == 4


def test_tables_show_what_there_is() -> None:
    found = figures()
    found.add(1000, 2, {"memory.java": {"rows": 1, "seconds": [900.0]}})
    found.add(1000, 2, {"memory.java": {"rows": 1, "seconds": [300.0]}})
    found.add(1000, 2, {"job.throughput": {"rows": 1000, "seconds": [4.0]}})

    shown = "\n".join(map(str, tables(found, 1000, [])))

    assert "journal / Parquet, full rows 0.50x 0.40x met" in " ".join(shown.split())
    assert "throughput" in shown
    assert "900" in shown
    assert "| journal, ADBC | 0.000 | 0.50x | 20.0 |" in markdown(tables(found, 1000, []))


def test_tables_are_put_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    refresh(page, "new")

    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="bench-spark: begin"):
        refresh(page, "new")


def test_sizes_to_show_growth_with_may_be_given() -> None:
    assert parse(["--rows", "100", "--growth", "5", "20"]).growth == [5, 20]
