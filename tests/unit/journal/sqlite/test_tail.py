"""What a process has just appended is read from memory, and is what the file has."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from msgbus.errors import StaleError
from msgbus.journal.operations import Append, Drop, Operation
from msgbus.journal.records import Kind, Order, Record, Selection
from msgbus.journal.reports import Retention
from msgbus.journal.sqlite import transactions
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import EVENTS, append, join, make_record, make_row
from msgbus.testing.conformance.journal.participants import CommitRecorder
from tests import counts

SELECTIONS = (
    (EVENTS, None),
    (Selection(names={"shop.Paid"}), None),
    (Selection(matches=lambda record: record.version > 1), None),
    (Selection(order=Order.KEY, partitions=4), (1, 3)),
    (Selection(order=Order.KEY, partitions=4, key=lambda record: record.name), (0, 2)),
    (Selection(kind=Kind.CONTROL), None),
)


@asynccontextmanager
async def fed(path: Path) -> AsyncGenerator[SqliteJournal]:
    """A journal with a participant, for which what is appended is kept."""
    async with SqliteJournal(path, reserve=0) as journal:
        journal.attach([CommitRecorder()], await join(journal))
        yield journal


def some_records(chance: random.Random, number: int) -> list[Record]:
    return [
        make_record(
            place,
            name=chance.choice(["shop.OrderPlaced", "shop.Paid"]),
            version=chance.choice([1, 2]),
            key=chance.choice([None, "a", "b", "c"]),
            kind=chance.choice([Kind.EVENT, Kind.EVENT, Kind.CONTROL]),
            headers=chance.choice([{}, {"tenant": "one"}]),
            payload=b"x" * chance.choice([1, 50]),
        )
        for place in range(number)
    ]


def is_in_memory(journal: SqliteJournal, after: int) -> bool:
    kept = journal._tail.scan(after, 1, EVENTS, None)  # pyright: ignore[reportPrivateUsage]
    return kept is not None


async def same_as_in_file(journal: SqliteJournal, path: Path, chance: random.Random) -> int:
    """Compare what the journal reads with what another one finds in the file."""
    from_memory = 0
    async with SqliteJournal(path, reserve=0) as other:
        head = await other.head()
        for _ in range(20):
            after, limit = chance.randint(0, head + 1), chance.choice([1, 3, 1000])
            selection, partitions = chance.choice(SELECTIONS)
            from_memory += is_in_memory(journal, after)
            await compare(journal, other, after, limit, selection, partitions)
    return from_memory


async def compare(
    journal: SqliteJournal,
    other: SqliteJournal,
    after: int,
    limit: int,
    selection: Selection,
    partitions: Collection[int] | None,
) -> None:
    found = await journal.read(after, limit, selection, partitions)
    expected = await other.read(after, limit, selection, partitions)
    assert list(found.records) == list(expected.records)[: len(found.records)]
    assert len(found.records) == len(expected.records) or found.upto < expected.upto
    between = [one for one in expected.records if offset_of(one) <= found.upto]
    assert between == list(found.records), "a message before `upto` was not read"


def offset_of(one: Record | int) -> int:
    return one if isinstance(one, int) else one.offset


@pytest.mark.parametrize("seed", range(1, counts.count(5, 50) + 1))
async def test_what_is_read_from_memory_is_what_is_in_the_file(tmp_path: Path, seed: int) -> None:
    chance, path, from_memory = random.Random(seed), tmp_path / "journal.db", 0
    async with fed(path) as journal, SqliteJournal(path, reserve=0) as other:
        for _ in range(12):
            whose = other if chance.random() < 0.15 else journal
            await append(whose, *some_records(chance, chance.randint(1, 9)))
            if chance.random() < 0.1:
                await journal.trim(Retention(max_count=5))
            from_memory += await same_as_in_file(journal, path, chance)
    assert from_memory > 0


async def test_nothing_that_was_undone_is_read(tmp_path: Path) -> None:
    async with fed(tmp_path / "journal.db") as journal:
        refused: list[Operation] = [Append(make_record(1)), Drop(make_row("orders", 7))]
        with pytest.raises(StaleError):
            await journal.commit(refused)
        await append(journal, make_record(2))

        scan = await journal.read(0, 10, EVENTS)
        assert [one.json() for one in records(scan.records)] == [{"number": 2}]
        assert is_in_memory(journal, 0)


async def test_a_commit_of_another_process_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with fed(path) as journal, SqliteJournal(path, reserve=0) as other:
        await append(journal, make_record(1))
        await append(other, make_record(2))
        await append(journal, make_record(3))

        assert not is_in_memory(journal, 0)
        assert is_in_memory(journal, 2)
        scan = await journal.read(0, 10, EVENTS)
        assert [one.offset for one in records(scan.records)] == [1, 2, 3]


async def test_few_commits_and_bytes_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "MOST_BYTES", 100)
    async with fed(tmp_path / "journal.db") as journal:
        for number in range(transactions.COMMITS + 4):
            await append(journal, make_record(number, payload=b"1"))
        assert [is_in_memory(journal, after) for after in (3, 4)] == [False, True]

        await append(journal, make_record(payload=b"x" * 90))
        await append(journal, make_record(payload=b"x" * 90))
        assert [is_in_memory(journal, after) for after in (20, 21)] == [False, True]


async def test_without_participants_nothing_is_kept(tmp_path: Path) -> None:
    async with SqliteJournal(tmp_path / "journal.db", reserve=0) as journal:
        await append(journal, make_record(1))
        assert not is_in_memory(journal, 0)


def records(found: Sequence[Record | int]) -> list[Record]:
    return [one for one in found if isinstance(one, Record)]
