"""Damage to the file is found or healed; what is read is never something else than was written."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from msgbus import JournalError, MsgBusError
from msgbus.errors import CorruptRecordError
from msgbus.journal import DeadLetter, Record, SqliteJournal
from msgbus.journal.operations import AddDeadLetter, CreateCursor, MoveCursor
from msgbus.testing.conformance.journal import make_record
from tests.counts import CUT_FILES, DAMAGED_LOGS, FLIPPED_BITS
from tests.evidence import Evidence

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
        acks = await journal.append(records)
        await journal.commit([CreateCursor("ship", 0)])
        await journal.commit([MoveCursor("ship", 30)])
    return [record._replace(offset=ack.offset) for record, ack in zip(records, acks, strict=True)]


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
        cursor = await journal.cursor("ship")
        verdict.wrong |= cursor is not None and cursor.offset != 30
        verdict.incomplete |= cursor is None
        report = await journal.verify()
        verdict.reported |= not report.is_sound
    except MsgBusError:
        verdict.reported = True
    finally:
        await journal.close()
    return verdict


async def read_what_can_be_read(journal: SqliteJournal, verdict: Verdict) -> list[Record]:
    found: list[Record] = []
    start = 1
    while start <= COUNT:
        try:
            page = await journal.read(start, 7)
        except CorruptRecordError as error:
            verdict.reported = True
            start = error.offset + 1
            continue
        if not page:
            break
        found += page
        start = page.next
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


@pytest.mark.asyncio_only("what is read does not depend on the loop")
@pytest.mark.stress("journal")
async def test_a_flipped_bit_is_never_read_as_a_dead_letter(
    tmp_path: Path, evidence: Evidence
) -> None:
    whole = tmp_path / "whole.db"
    given = [
        DeadLetter(f"ship-{n % 3}", make_record(n), n, f"E: {n}", 1.5, traceback="x" * 300)
        for n in range(COUNT)
    ]
    async with opened(whole) as journal:
        await journal.commit([AddDeadLetter(letter) for letter in given])
    chance = random.Random(4)
    reported = 0
    for number in range(FLIPPED_BITS):
        damaged = tmp_path / f"{number}.db"
        flip(whole, damaged, chance)
        try:
            async with opened(damaged) as journal:
                is_sound = (await journal.verify()).is_sound
                found = await journal.dead_letters(limit=1_000) if is_sound else given
        except MsgBusError:
            is_sound, found = False, given
        assert [letter._replace(id=0) for letter in found] == given
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
        found = list(await journal.read(0, 1_000)) if await journal.head() else []
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
        (ack,) = await journal.append([record])
        records.append(record._replace(offset=ack.offset))
    for suffix in ("", "-wal"):
        shutil.copy(tmp_path / f"live.db{suffix}", tmp_path / f"left.db{suffix}")
    await journal.close()
    return records, tmp_path / "left.db"


async def test_a_damaged_record_ends_its_page_and_reading_goes_on_behind_it(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    async with opened(file) as journal:
        await journal.append([make_record(n, payload=b"message %03d" % n) for n in range(5)])
    file.write_bytes(file.read_bytes().replace(b"message 002", b"massage 002"))

    async with opened(file) as journal:
        page = await journal.read(0)
        assert ([record.offset for record in page], page.next) == ([1, 2], 3)
        with pytest.raises(CorruptRecordError, match="Record 3 of the journal") as caught:
            await journal.read(page.next)
        assert caught.value.offset == 3
        assert [record.offset for record in await journal.read(4)] == [4, 5]
        assert (await journal.verify()).damaged == (3,)


async def test_a_missing_record_is_found(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    async with opened(file) as journal:
        await journal.append([make_record(n) for n in range(5)])
        await journal._write(  # pyright: ignore[reportPrivateUsage]
            lambda store: store.connection.execute("DELETE FROM msgbus_messages WHERE offset = 3")
        )

        assert (await journal.read(0)).next == 3
        with pytest.raises(CorruptRecordError, match="is missing"):
            await journal.read(3)
        assert (await journal.verify()).damaged == (3,)


async def test_a_damaged_cursor_is_an_error_and_never_another_place(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    await fill(file)
    async with opened(file) as journal:
        await journal._write(  # pyright: ignore[reportPrivateUsage]
            lambda store: store.connection.execute("UPDATE msgbus_cursors SET offset = 31")
        )

        with pytest.raises(JournalError, match="'ship' is damaged"):
            await journal.cursor("ship")
        with pytest.raises(JournalError, match="'ship' is damaged"):
            await journal.commit([MoveCursor("ship", 40)])
