"""Looking after a file: backups while others write, codecs, crossing event loops."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import anyio
import pytest
import trio

from msgbus.errors import CursorError, JournalOpenError
from msgbus.journal import Retention, SqliteJournal
from msgbus.journal.operations import Seek
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    append,
    fill,
    join,
    make_record,
    read_all,
)
from tests.unit.journal.sqlite.files import sql


def opened(path: Path, **options: object) -> SqliteJournal:
    return SqliteJournal(path / "journal.db", **{"reserve": 0, **options})  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


# -- retention and backups -----------------------------------------------------------------


async def test_retention_by_size_frees_space_that_is_used_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        for _ in range(5):
            await append(journal, *(make_record(payload=bytes(1_000)) for _ in range(500)))
        await journal.trim(Retention(max_bytes=500_000))
        await journal.compact()
        small = (tmp_path / "journal.db").stat().st_size
        left = len(await read_all(journal))

        assert small < 600_000
        assert 50 < left < 500  # whole steps go


async def test_a_backup_is_complete_and_sound_while_others_write(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await fill(journal, 1_000)

        async def write() -> None:
            for number in range(50):
                await append(journal, make_record(number))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            await journal.backup(tmp_path / "copy.db")

    async with SqliteJournal(tmp_path / "copy.db", reserve=0) as copy:
        assert 1_000 <= len(await read_all(copy)) <= 1_050
        assert (await copy.verify()).is_sound
    assert "copy.db" in names(tmp_path)
    assert not [name for name in names(tmp_path) if "partial" in name]


async def test_a_cursor_ahead_of_a_restored_backup_is_an_error_not_a_gap(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await fill(journal, 3)
        await journal.open("ship", EVENTS, 3)
        await journal.open("pack", EVENTS, 0)
    sql(tmp_path / "journal.db", "DELETE FROM msgbus_messages WHERE offset > 1")

    async with opened(tmp_path) as journal:
        for ask in (journal.cursors("ship"), journal.open("ship", EVENTS, 0)):
            with pytest.raises(CursorError, match="beyond the head at 1"):
                await ask
        assert not (await journal.verify()).is_sound
        assert await journal.acquire(await join(journal), "pack", 0, EVENTS) is not None

        await journal.commit([Seek("ship", 1)])
        assert [cursor.acked for cursor in await journal.open("ship", EVENTS, 0)] == [1]


# -- codecs --------------------------------------------------------------------------------


class Shift:
    """A codec that is no secret, but shows where one would work."""

    def __init__(self, by: int) -> None:
        self._by = by

    def encode(self, payload: bytes, associated: bytes) -> bytes:
        return bytes([self._by]) + bytes((byte + self._by) % 256 for byte in payload)

    def decode(self, payload: bytes, associated: bytes) -> bytes:
        if payload[0] != self._by:
            raise ValueError("wrong key")
        return bytes((byte - self._by) % 256 for byte in payload[1:])


async def test_a_codec_changes_what_is_stored_and_not_what_is_read(tmp_path: Path) -> None:
    record = make_record(payload=b"the secret of the shop")
    async with opened(tmp_path, codec=Shift(3)) as journal:
        await append(journal, record)

        (found,) = await read_all(journal)
        assert found.payload == record.payload
        assert (await journal.verify()).is_sound
    assert b"secret" not in (tmp_path / "journal.db").read_bytes()


@pytest.mark.parametrize("codec", [Shift(4), None])
async def test_the_wrong_codec_is_refused(tmp_path: Path, codec: Shift | None) -> None:
    async with opened(tmp_path, codec=Shift(3)) as journal:
        await append(journal, make_record())

    with pytest.raises(JournalOpenError, match="codec"):
        opened(tmp_path, codec=codec)
    async with opened(tmp_path, codec=Shift(3)) as journal:
        assert (await journal.verify()).is_sound


# -- several event loops -------------------------------------------------------------------


def test_one_journal_serves_several_event_loops_at_once(tmp_path: Path) -> None:
    journal = opened(tmp_path)

    async def publish() -> None:
        for number in range(100):
            await append(journal, make_record(number))

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
            await append(journal, make_record())

    for _ in range(20):
        asyncio.run(begin_and_leave())
        trio.run(begin_and_leave)
    (offset,) = asyncio.run(append(journal, make_record()))
    asyncio.run(journal.close())

    assert offset >= 1
