"""Damage anywhere in the file: whatever answer it changes, `verify` has found it."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from msgbus.errors import MsgBusError
from msgbus.journal.sqlite import columns, messages, schema
from tests.counts import FLIPPED_BITS, some
from tests.evidence import Evidence
from tests.integration.journal.everything import Answers, answers, fill_everything, opened

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio_only("what is read does not depend on the loop"),
]

TABLES: Final = (
    *("messages", "blocks", "subscriptions", "pending", "members", "results", "letters"),
    *("deliveries", "instances", "meta"),
)
UNCHECKED: Final = ("members.renewals",)
"""A wrong counter of renewals costs at most a TTL."""


@dataclass
class Outcome:
    """What damage to one file led to."""

    changed: tuple[str, ...] = ()
    """Questions that were answered otherwise, or with an error."""
    is_found: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether something changed that nobody would know of."""
        return bool(self.changed) and not self.is_found


async def judge(path: Path, truth: Answers) -> Outcome:
    """Ask everything, and compare; then verify."""
    try:
        journal = opened(path)
    except MsgBusError:
        return Outcome(("open",), is_found=True)
    async with journal:
        found = await answers(journal)
        changed = tuple(what for what in truth if found[what] != truth[what])
        return Outcome(changed, not (await journal.verify()).is_sound)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.db"
    anyio.run(fill_everything, path)
    return path


async def truth_of(whole: Path) -> Answers:
    async with opened(whole) as journal:
        assert (await journal.verify()).is_sound
        found = await answers(journal)
    assert sum(value is not None for value in found.values()) > 60
    return found


def copies(whole: Path, count: int) -> Iterator[tuple[Path, bytearray]]:
    """Paths for copies, and what the whole file holds."""
    data = whole.read_bytes()
    for number in range(count):
        yield whole.with_name(f"{number}.db"), bytearray(data)


async def flipped(
    whole: Path, truth: Answers, seed: int, count: int, *, loud: type[Exception] | tuple[()] = ()
) -> list[tuple[str, Outcome]]:
    """Change one bit of the file, so often, each time in a fresh copy.

    Args:
        whole: The file.
        truth: What it answers.
        seed: Which bits.
        count: How many.
        loud: Errors that count as found.
    """
    chance = random.Random(seed)
    found: list[tuple[str, Outcome]] = []
    for copy, data in copies(whole, count):
        at, bit = chance.randrange(len(data)), chance.randrange(8)
        data[at] ^= 1 << bit
        write(copy, data)
        try:
            outcome = await judge(copy, truth)
        except loud:
            outcome = Outcome(("an error",), is_found=True)
        found.append((f"bit {bit} of byte {at}", outcome))
        remove(copy)
    return found


def remove(path: Path) -> None:
    path.unlink()


def write(path: Path, data: bytearray) -> None:
    path.write_bytes(data)


@pytest.mark.stress("journal")
async def test_a_flipped_bit_that_changes_any_answer_is_found(
    whole: Path, evidence: Evidence
) -> None:
    outcomes = await flipped(whole, await truth_of(whole), 11, FLIPPED_BITS)

    assert [where for where, one in outcomes if one.is_silent] == []
    assert sum(bool(one.changed) for _, one in outcomes) > FLIPPED_BITS / 5
    evidence("one bit of the file flipped, everything asked", flips=FLIPPED_BITS, lost=0)


class _Anything:
    """Equal to every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def _fits(*_: object) -> Any:
    return _Anything()


@pytest.mark.stress("journal")
async def test_without_checksums_flipped_bits_change_answers_in_silence(
    whole: Path, monkeypatch: pytest.MonkeyPatch, evidence: Evidence
) -> None:
    truth = await truth_of(whole)
    for module, name in (
        (messages, "_checksum"),
        (columns, "_pending_checksum"),
        (columns, "crc32"),
        (columns, "checksum"),
        (schema, "checksum"),
    ):
        monkeypatch.setattr(module, name, _fits)

    # What no checksum has let through may be no JSON, say.
    outcomes = await flipped(whole, truth, 12, FLIPPED_BITS // 3, loud=Exception)

    silent = sum(one.is_silent for _, one in outcomes)
    assert silent > FLIPPED_BITS / 30
    evidence("control: the same without checksums", flips=FLIPPED_BITS // 3, lost=silent)


def columns_of(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """All columns of our tables: table, column, and the columns of its key."""
    with closing(sqlite3.connect(path)) as connection:
        for table in TABLES:
            info = connection.execute(f"PRAGMA table_info(msgbus_{table})").fetchall()
            key = [row[1] for row in info if row[5]]
            for row in info:
                yield table, row[1], key


def other(value: Any) -> Any:
    """Another value of the type, where there is one."""
    if isinstance(value, str):
        return str(int(value) + 1) if value.isdecimal() else f"x{value}"
    if isinstance(value, bytes):
        return value + b"x"
    return "other" if value is None else value + 1


def change(path: Path, table: str, column: str, key: list[str], chance: random.Random) -> bool:
    """Change one value by SQL; tell whether SQLite lets it be."""
    where = " AND ".join(f"{one} = ?" for one in key)
    with closing(sqlite3.connect(path)) as connection, connection:
        rows = connection.execute(f"SELECT {', '.join(key)} FROM msgbus_{table}").fetchall()
        row = chance.choice(rows)
        query = f"SELECT {column} FROM msgbus_{table} WHERE {where}"
        (value,) = connection.execute(query, row).fetchone()
        update = f"UPDATE msgbus_{table} SET {column} = ? WHERE {where}"
        try:
            connection.execute(update, (other(value), *row))
        except sqlite3.IntegrityError:
            return False
    return True


async def test_a_changed_column_of_any_table_is_found(whole: Path) -> None:
    truth, chance = await truth_of(whole), random.Random(13)
    missed: list[str] = []
    every = [one for one in columns_of(whole) if f"{one[0]}.{one[1]}" not in UNCHECKED]
    places = some(every, 45)
    for (copy, data), (table, column, key) in zip(copies(whole, len(places)), places, strict=True):
        write(copy, data)
        if change(copy, table, column, key, chance):
            outcome = await judge(copy, truth)
            if not outcome.is_found:
                missed.append(f"{table}.{column}")

    assert missed == []


DELETED: Final = {
    "messages": "offset = 40",
    "blocks": "value = 'shop.Event1'",
    "letters": "subscription = 'ship'",
    "pending": "subscription = 'ship' AND state = 'dead'",
    "members": "id = 1",
    "meta": "key = 'codec'",
}
"""Rows that others show to be missing.

A row that nothing else speaks of, such as a result, is gone when it was deleted: checksums cannot
tell it from one that was dropped as it should be.
"""


@pytest.mark.parametrize("table", DELETED)
async def test_a_deleted_row_that_others_speak_of_is_found(whole: Path, table: str) -> None:
    async with opened(whole) as journal:
        with closing(sqlite3.connect(whole)) as connection, connection:
            deleted = connection.execute(f"DELETE FROM msgbus_{table} WHERE {DELETED[table]}")
            assert deleted.rowcount >= 1

        report = await journal.verify()

    assert not report.is_sound
