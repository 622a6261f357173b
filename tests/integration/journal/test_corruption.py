"""Damage to the file is found or healed; what is read is never something else than was written."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from msgbus import JournalError, MsgBusError
from msgbus.errors import JournalCorruptError
from msgbus.journal import Letter, Pending, Record, SqliteJournal
from msgbus.journal.operations import Pass, Put
from msgbus.journal.records import State
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    append,
    cursor_of,
    fill as fill_plainly,
    join,
    make_record,
    make_row,
    read_all,
    take,
)
from tests.counts import CUT_FILES, DAMAGED_LOGS, FLIPPED_BITS
from tests.evidence import Evidence
from tests.unit.journal.sqlite.files import change

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

COUNT = 150


def opened(file: Path) -> SqliteJournal:
    return SqliteJournal(file, reserve=0, lock_timeout=0.5)


async def fill(file: Path) -> list[Record]:
    """A journal with messages of many shapes, and a cursor."""
    chance = random.Random(0)
    records = [
        make_record(
            number,
            key=f"k{number % 5}" if number % 2 else None,
            session_id="s" if number % 3 else None,
            headers={"tenant": "größe"} if number % 4 else {},
            payload=chance.randbytes(chance.choice([20, 300, 6_000])),
        )
        for number in range(COUNT)
    ]
    async with opened(file) as journal:
        offsets = await append(journal, *records)
        member = await join(journal)
        cursor = await take(journal, member, "ship", EVENTS)
        await journal.commit([Pass(cursor, 30, 30)], member)
    return [record._replace(offset=offset) for record, offset in zip(records, offsets, strict=True)]


@dataclass
class Verdict:
    """What one damaged file led to."""

    wrong: bool = False
    reported: bool = False
    incomplete: bool = False


async def judge(file: Path, truth: list[Record]) -> Verdict:
    """Read the whole file as a subscription would, stepping over what is reported."""
    verdict = Verdict()
    try:
        journal = opened(file)
    except MsgBusError:
        return Verdict(reported=True)
    try:
        found = await read_what_can_be_read(journal, verdict)
        verdict.wrong = any(record != truth[record.offset - 1] for record in found)
        verdict.incomplete = len(found) < len(truth)
        cursors = await journal.cursors("ship")
        verdict.wrong |= any(cursor.acked != 30 for cursor in cursors)
        verdict.incomplete |= len(cursors) != 1
        report = await journal.verify()
        verdict.reported |= not report.is_sound
    except MsgBusError:
        verdict.reported = True
    finally:
        await journal.close()
    return verdict


async def read_what_can_be_read(journal: SqliteJournal, verdict: Verdict) -> list[Record]:
    found: list[Record] = []
    after, head = 0, await journal.head()
    while after < head:
        scan = await journal.read(after, 7, EVENTS)
        verdict.reported |= any(isinstance(one, int) for one in scan.records)
        found += [one for one in scan.records if isinstance(one, Record)]
        after = scan.upto
    return found


def flip(source: Path, target: Path, chance: random.Random) -> None:
    """A copy with one bit changed."""
    data = bytearray(source.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    target.write_bytes(data)


def cut(source: Path, target: Path, chance: random.Random) -> None:
    """A copy that ends too early."""
    data = source.read_bytes()
    target.write_bytes(data[: chance.randrange(len(data))])


@pytest.mark.asyncio_only("what is read does not depend on the loop")
@pytest.mark.stress("journal")
async def test_a_flipped_bit_is_never_read_as_data(tmp_path: Path, evidence: Evidence) -> None:
    truth = await fill(tmp_path / "whole.db")
    chance = random.Random(1)
    verdicts: list[Verdict] = []
    for number in range(FLIPPED_BITS):
        damaged = tmp_path / f"{number}.db"
        flip(tmp_path / "whole.db", damaged, chance)
        verdicts.append(await judge(damaged, truth))

    assert not any(verdict.wrong for verdict in verdicts)
    assert not any(one.incomplete and not one.reported for one in verdicts)
    assert sum(verdict.reported for verdict in verdicts) > FLIPPED_BITS / 2
    evidence("one bit of the file flipped, messages read", flips=FLIPPED_BITS, lost=0)


def dead(number: int) -> tuple[Pending, Letter]:
    """A row that holds its message, and its letter."""
    body = make_record(number, message_id=f"m{number}")
    error = f"E: {number}"
    row = make_row(f"ship-{number % 3}", number + 1, State.DEAD, error=error, body=body)
    return row, Letter("E", "it failed", 1.5, 2.5, "x" * 300)


async def dead_letters(journal: SqliteJournal) -> list[tuple[Pending, Letter]]:
    found: list[tuple[Pending, Letter]] = []
    for row in await journal.find(None, [State.DEAD], limit=1_000):
        letter = await journal.letter(row)
        assert letter is not None
        found.append((row, letter))
    return found


@pytest.mark.asyncio_only("what is read does not depend on the loop")
@pytest.mark.stress("journal")
async def test_a_flipped_bit_is_never_read_as_a_dead_letter(
    tmp_path: Path, evidence: Evidence
) -> None:
    whole = tmp_path / "whole.db"
    given = [dead(number) for number in range(COUNT)]
    async with opened(whole) as journal:
        await journal.commit([Put(row, letter) for row, letter in given])
    chance = random.Random(4)
    reported = 0
    for number in range(FLIPPED_BITS):
        damaged = tmp_path / f"{number}.db"
        flip(whole, damaged, chance)
        try:
            async with opened(damaged) as journal:
                is_sound = (await journal.verify()).is_sound
                found = await dead_letters(journal) if is_sound else given
        except MsgBusError:
            is_sound, found = False, given
        assert found == given
        reported += not is_sound

    assert reported > FLIPPED_BITS / 5  # much of so small a file is empty
    evidence("one bit of the file flipped, dead letters read", flips=FLIPPED_BITS, lost=0)


@pytest.mark.asyncio_only("what is read does not depend on the loop")
@pytest.mark.stress("journal")
async def test_a_file_that_was_cut_off_is_reported(tmp_path: Path, evidence: Evidence) -> None:
    truth = await fill(tmp_path / "whole.db")
    chance = random.Random(2)
    for number in range(CUT_FILES):
        damaged = tmp_path / f"{number}.db"
        cut(tmp_path / "whole.db", damaged, chance)
        verdict = await judge(damaged, truth)

        # An empty file is a new journal; anything else is seen to be less than it was.
        assert not verdict.wrong
        assert verdict.reported or damaged.stat().st_size == 0 or not verdict.incomplete
    evidence("file cut off at a random byte, and reported", files=CUT_FILES)


@pytest.mark.asyncio_only("what is read does not depend on the loop")
@pytest.mark.stress("journal")
@pytest.mark.parametrize("damage", [flip, cut], ids=["flip", "cut"])
async def test_damage_to_the_log_leaves_a_beginning_of_the_truth(
    tmp_path: Path, damage: object, evidence: Evidence
) -> None:
    """SQLite drops the log from the first damaged frame on, as it would after a crash.

    It cannot tell the two apart, so acknowledged messages at the end may be gone; but what is
    left is a beginning, whole and in order.
    """
    truth, source = await leave_a_log(tmp_path)
    chance = random.Random(3)
    shorter = 0
    for number in range(DAMAGED_LOGS):
        damaged = tmp_path / f"{number}.db"
        shutil.copy(source, damaged)
        change = flip if damage is flip else cut
        change(tmp_path / "left.db-wal", tmp_path / f"{number}.db-wal", chance)
        journal = opened(damaged)
        found = await read_all(journal)
        assert found == truth[: len(found)]
        assert (await journal.verify()).is_sound
        shorter += len(found) < len(truth)
        await journal.close()

    assert shorter > 0
    evidence(
        "write-ahead log damaged: a beginning is left, in order", logs=DAMAGED_LOGS, reordered=0
    )


async def leave_a_log(tmp_path: Path) -> tuple[list[Record], Path]:
    """A file and its log as a process leaves them that is killed."""
    journal = opened(tmp_path / "live.db")
    records: list[Record] = []
    for number in range(20):
        record = make_record(number)
        (offset,) = await append(journal, record)
        records.append(record._replace(offset=offset))
    for suffix in ("", "-wal"):
        shutil.copy(tmp_path / f"live.db{suffix}", tmp_path / f"left.db{suffix}")
    await journal.close()
    return records, tmp_path / "left.db"


async def test_reading_goes_on_behind_a_damaged_record(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    records = [make_record(n, payload=b"message %03d" % n) for n in range(5)]
    async with opened(file) as journal:
        await append(journal, *records)
    file.write_bytes(file.read_bytes().replace(b"message 002", b"massage 002"))

    async with opened(file) as journal:
        scan = await journal.read(0, 10, EVENTS)
        offsets = [one if isinstance(one, int) else one.offset for one in scan.records]
        assert (offsets, scan.records[2], scan.upto) == ([1, 2, 3, 4, 5], 3, 5)
        with pytest.raises(JournalCorruptError, match="Message 3 of the journal"):
            await journal.message(records[2].message_id)
        assert (await journal.verify()).damaged == (3,)


async def test_a_missing_record_is_found(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    async with opened(file) as journal:
        await fill_plainly(journal, 5)
        change(file, "DELETE FROM msgbus_messages WHERE offset = 3")

        scan = await journal.read(0, 9, EVENTS)
        assert [one if isinstance(one, int) else one.offset for one in scan.records] == [
            1,
            2,
            3,
            4,
            5,
        ]
        assert scan.records[2] == 3
        assert (await journal.verify()).damaged == (3,)


async def test_a_damaged_cursor_is_an_error_and_never_another_place(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    await fill(file)
    async with opened(file) as journal:
        member = await join(journal)
        before = await cursor_of(journal, "ship")
        change(file, "UPDATE msgbus_subscriptions SET acked = 31")

        with pytest.raises(JournalError, match="'ship' is damaged"):
            await journal.cursors("ship")
        with pytest.raises(JournalError, match="'ship' is damaged"):
            await journal.open("ship", EVENTS, 0)
        with pytest.raises(JournalError, match="'ship' is damaged"):
            await journal.acquire(member, "ship", 0, EVENTS)
        with pytest.raises(JournalError):
            await journal.commit([Pass(before, 40, 40)], member)
