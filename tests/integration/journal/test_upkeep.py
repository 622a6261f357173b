"""Looking after a file: retention, verify, compact, backup, codecs, crossing event loops."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import anyio
import pytest
import trio

from msgbus.errors import CursorError, JournalOpenError, StoredMessageError
from msgbus.journal import DeliveryRecord, Outcome, Retention, SqliteJournal
from msgbus.journal.operations import (
    AddDelivery,
    CloseTicket,
    CreateCursor,
    Mark,
    MoveCursor,
    OpenTicket,
)
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.journal import make_record, read_all


def opened(path: Path, **options: object) -> SqliteJournal:
    return SqliteJournal(path / "journal.db", **{"reserve": 0, **options})  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


# -- retention -----------------------------------------------------------------------------


async def test_retention_by_count_keeps_the_newest(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append([make_record(n) for n in range(1_000)])

        report = await journal.trim(Retention(max_count=10))

        assert (report.removed, report.first, report.held_back_by) == (990, 991, ())
        assert [record.offset for record in await read_all(journal)] == list(range(991, 1001))
        assert (await journal.first(), await journal.head()) == (991, 1000)
        assert (await journal.verify()).is_sound


async def test_retention_by_age_stops_at_the_first_that_is_young_enough(tmp_path: Path) -> None:
    clock = VirtualClock(start=10_000.0)
    async with opened(tmp_path, clock=clock) as journal:
        # The clock was an hour ahead for the second one.
        times = [9_000.0, 9_100.0 + 3_600, 9_200.0, 9_990.0]
        await journal.append([make_record(time=time) for time in times])

        report = await journal.trim(Retention(max_age=100))

        assert (report.removed, report.first) == (1, 2)


async def test_retention_by_size_frees_space_that_is_used_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        for _ in range(5):
            await journal.append([make_record(payload=bytes(1_000)) for _ in range(500)])
        await journal.trim(Retention(max_bytes=500_000))
        await journal.compact()
        small = (tmp_path / "journal.db").stat().st_size
        left = len(await read_all(journal))

        assert small < 600_000
        assert 50 < left < 500  # whole steps go


async def test_what_a_subscription_has_not_read_is_kept_and_told(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append([make_record(n) for n in range(20)])
        await journal.commit([CreateCursor("slow", 0), CreateCursor("fast", 20)])
        await journal.commit([MoveCursor("slow", 5)])

        report = await journal.trim(Retention(max_count=3))

        assert (report.removed, report.first, report.held_back_by) == (5, 6, ("slow",))


async def test_offsets_are_never_given_twice_even_if_all_is_trimmed(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append([make_record(n) for n in range(5)])
        await journal.trim(before=6)
        assert (await journal.first(), await journal.head()) == (6, 5)

    async with opened(tmp_path) as journal:
        (ack,) = await journal.append([make_record(9)])

        assert ack.offset == 6
        assert [record.offset for record in await read_all(journal)] == [6]


async def test_what_belongs_to_a_message_goes_with_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        for name in ("old", "new"):
            await journal.append([make_record(message_id=name)])
            await journal.commit(
                [
                    AddDelivery(DeliveryRecord(name, "h", 1, Outcome.OK, 0.0, 0.0, 1.0)),
                    Mark("ship", name),
                    OpenTicket(name, 1.0),
                    CloseTicket(name, 1.0),
                ]
            )

        await journal.trim(before=2)

        assert await journal.marked("ship", ["old", "new"]) == {"new"}
        assert await journal.ticket("old") is None
        assert await journal.ticket("new") is not None
        assert (await journal.deliveries("old"), len(await journal.deliveries("new"))) == ([], 1)


async def test_a_journal_with_retention_sees_to_it_by_itself(tmp_path: Path) -> None:
    async with opened(tmp_path, retention=Retention(max_count=100)) as journal:
        for _ in range(5):
            await journal.append([make_record(n) for n in range(1_000)])

        # The group after the trim: it has been done by then.
        await journal.append([make_record(0)])
        assert await journal.head() == 5_001
        assert await journal.first() > 4_000


# -- verify, compact, back up --------------------------------------------------------------


async def test_a_sound_journal_is_found_sound(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append([make_record(n, headers={"a": "b"}) for n in range(10)])

        report = await journal.verify()

        assert (report.messages, report.is_sound) == (10, True)


async def test_a_backup_is_complete_and_sound_while_others_write(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append([make_record(n) for n in range(1_000)])

        async def write() -> None:
            for n in range(50):
                await journal.append([make_record(n)])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            await journal.backup(tmp_path / "copy.db")

    async with SqliteJournal(tmp_path / "copy.db", reserve=0) as copy:
        assert 1_000 <= len(await read_all(copy)) <= 1_050
        assert (await copy.verify()).is_sound
    assert "copy.db" in names(tmp_path)
    assert not [name for name in names(tmp_path) if "partial" in name]


async def test_a_backup_replaces_nothing(tmp_path: Path) -> None:
    target = tmp_path / "precious.db"
    target.write_text("mine")
    async with opened(tmp_path) as journal:
        with pytest.raises(JournalOpenError, match="is there already"):
            await journal.backup(target)
        with pytest.raises(JournalOpenError, match="does not exist"):
            await journal.backup(tmp_path / "nowhere" / "copy.db")

    assert target.read_text() == "mine"


async def test_a_cursor_ahead_of_a_restored_backup_is_an_error_not_a_gap(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append([make_record(n) for n in range(3)])
        await journal.commit([CreateCursor("ship", 3)])
    with sqlite3.connect(tmp_path / "journal.db") as connection:
        connection.execute("DELETE FROM msgbus_messages WHERE offset > 1")
        connection.execute("UPDATE sqlite_sequence SET seq = 1 WHERE name = 'msgbus_messages'")
    connection.close()

    async with opened(tmp_path) as journal:
        with pytest.raises(CursorError, match="beyond the head at 1"):
            await journal.cursor("ship")
        report = await journal.verify()
        assert not report.is_sound


# -- codecs --------------------------------------------------------------------------------


class Shift:
    """A codec that is no secret, but shows where one would work."""

    def __init__(self, by: int) -> None:
        self._by = by

    def encode(self, payload: bytes) -> bytes:
        return bytes([self._by]) + bytes((byte + self._by) % 256 for byte in payload)

    def decode(self, stored: bytes) -> bytes:
        if stored[0] != self._by:
            raise ValueError("wrong key")
        return bytes((byte - self._by) % 256 for byte in stored[1:])


async def test_a_codec_changes_what_is_stored_and_not_what_is_read(tmp_path: Path) -> None:
    record = make_record(payload=b"the secret of the shop")
    async with opened(tmp_path, codec=Shift(3)) as journal:
        await journal.append([record])

        assert (await journal.read(0))[0].payload == record.payload
        assert (await journal.verify()).is_sound
    assert b"secret" not in (tmp_path / "journal.db").read_bytes()


async def test_the_wrong_codec_is_an_error_that_names_the_message(tmp_path: Path) -> None:
    record = make_record()
    async with opened(tmp_path, codec=Shift(3)) as journal:
        await journal.append([record])

    async with opened(tmp_path, codec=Shift(4)) as journal:
        with pytest.raises(StoredMessageError, match="and the key") as caught:
            await journal.read(0)
        assert (await journal.verify()).is_sound  # needs no key
    assert caught.value.message_id == record.message_id


# -- several event loops -------------------------------------------------------------------


def test_one_journal_serves_several_event_loops_at_once(tmp_path: Path) -> None:
    journal = opened(tmp_path)

    async def publish() -> None:
        for number in range(100):
            await journal.append([make_record(number)])

    threads = [
        threading.Thread(target=lambda: asyncio.run(publish())),
        threading.Thread(target=lambda: asyncio.run(publish())),
        threading.Thread(target=lambda: trio.run(publish)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def look() -> int:
        found = len(await read_all(journal))
        await journal.close()
        return found

    assert asyncio.run(look()) == 300


def test_a_journal_goes_on_after_the_event_loop_that_used_it_has_ended(tmp_path: Path) -> None:
    journal = opened(tmp_path)

    async def begin_and_leave() -> None:
        with anyio.move_on_after(0):
            await journal.append([make_record()])

    for _ in range(20):
        asyncio.run(begin_and_leave())
        trio.run(begin_and_leave)
    (ack,) = asyncio.run(journal.append([make_record()]))
    asyncio.run(journal.close())

    assert ack.offset >= 1
