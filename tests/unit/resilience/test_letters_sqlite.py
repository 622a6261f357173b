"""The SQLite store alone: files it cannot use, loads it cannot bear, plans of its questions."""

from __future__ import annotations

import gc
import os
import sqlite3
import subprocess
import sys
import threading
import weakref
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from msgbus import (
    ConfigurationError,
    DeadLetterDroppedEvent,
    DeadLetterRefusedEvent,
    SystemEvent,
)
from msgbus.errors import DeadLetterError, DeadLetterStoreError
from msgbus.journal.sqlite.faults import translate
from msgbus.journal.sqlite.schema import VERSION
from msgbus.resilience import (
    DeadLetterQueue,
    LetterFilter,
    MemoryDeadLetterStore,
    Overflow,
    ResilientMessageBus,
    SqliteDeadLetterStore,
)
from msgbus.testing.conformance.dead_letters import letter
from tests.fakes import Connections, logged
from tests.unit.journal.sqlite.sealing import Sealing
from tests.unit.resilience.letter_fakes import CardCharged, bury, bury_orders


async def test_a_codec_hides_what_letters_say(tmp_path: Path) -> None:
    secret = "Tr0ub4dor"
    for name, codec in (("plain.db", None), ("sealed.db", Sealing())):
        path = tmp_path / name
        async with DeadLetterQueue(SqliteDeadLetterStore(path, codec=codec)) as queue:
            queue.store.add(letter(error=ConnectionError(f"no {secret}")))
            await queue.store.flush()
            page = await queue.store.page(LetterFilter(), limit=1)
            assert page.letters[0].error == f"ConnectionError: no {secret}"

        assert (secret.encode() in path.read_bytes()) == (codec is None)


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Another process, as it were, that writes and does not end."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


async def prepared(path: Path) -> None:
    """A file that is there already."""
    async with DeadLetterQueue(SqliteDeadLetterStore(path)):
        pass


# -- files that cannot be used -----------------------------------------------------------------


async def refusal(path: Path) -> str:
    store = SqliteDeadLetterStore(path, timeout=0.01)
    with pytest.raises(DeadLetterStoreError) as caught:
        await store.open()
    await store.close()
    return str(caught.value)


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    text = await refusal(tmp_path / "missing" / "letters.db")

    assert f"does not exist: make {tmp_path / 'missing'} first" in text


async def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "is a folder" in await refusal(tmp_path)


async def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes, many of them, and no database at all" * 20)

    assert "not a SQLite database" in await refusal(path)

    assert path.read_text().startswith("my notes")


async def test_the_database_of_another_application_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (number)")
    before = path.read_bytes()

    assert "is a SQLite database with tables of its own (orders)" in await refusal(path)

    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [0, VERSION + 1, 99])
async def test_a_file_of_another_version_is_refused_and_left_alone(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "letters.db"
    await prepared(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        statement = "UPDATE msgbus_meta SET value = ? WHERE key = 'schema_version'"
        connection.execute(statement, (str(version),))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    before = path.read_bytes()

    assert await refusal(path) == (
        f"The journal {path} has schema version {version}, and this msgbus reads version "
        f"{VERSION} only. Open it with the msgbus that wrote it, or choose another path."
    )

    with pytest.raises(DeadLetterStoreError, match=f"has schema version {version}, and"):
        SqliteDeadLetterStore(path).size()
    assert path.read_bytes() == before
    assert names(tmp_path) == ["letters.db"]


async def test_a_locked_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "letters.db"
    await prepared(path)

    with locked(path):
        assert "is locked by another process" in await refusal(path)


# -- what was opened is closed -----------------------------------------------------------------


async def test_questions_that_fail_leave_no_connection_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = Connections(monkeypatch)
    async with DeadLetterQueue(SqliteDeadLetterStore(tmp_path / "letters.db")) as letters:
        for _ in range(3):
            with pytest.raises(DeadLetterError, match="'nonsense' is no cursor"):
                await letters.page(after="nonsense")
        assert await letters.count() == 0
        assert len(connections.open) == 3  # one writes, one watches, one reads

    assert connections.open == []


async def test_a_bus_that_cannot_start_closes_its_dead_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_card() -> Path:
        raise OSError("no card")

    connections = Connections(monkeypatch)
    store = SqliteDeadLetterStore(tmp_path / "letters.db")
    bus = ResilientMessageBus(dead_letters=store, provide={Path: find_card})

    with pytest.raises(OSError, match="no card"):
        await bus.start()

    assert connections.made
    assert connections.open == []


async def test_a_handler_that_tries_to_stop_the_bus_leaves_its_dead_letters_open(
    tmp_path: Path,
) -> None:
    bus = ResilientMessageBus(retry=None, dead_letters=SqliteDeadLetterStore(tmp_path / "l.db"))

    @bus.on(CardCharged)
    async def charge(event: CardCharged) -> None:
        await bus.stop()

    async with bus:
        await bus.publish(CardCharged(order=1))
        await bus.settled()

        (letter,) = await bus.dead_letters.find()
        assert letter.error_type == "InsideHandlerError"


# -- the disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (sqlite3.SQLITE_READONLY, "cannot be written: the file, or the folder it is in"),
        (sqlite3.SQLITE_FULL, "No space is left"),
        (sqlite3.SQLITE_IOERR, "broken disk"),
    ],
)
def test_what_the_disk_says_is_explained(code: int, text: str, tmp_path: Path) -> None:
    error = sqlite3.OperationalError("broken disk")
    error.sqlite_errorcode = code | (1 << 8)  # with an extended part

    assert text in str(translate(error, str(tmp_path / "letters.db")))


@pytest.mark.parametrize("options", [{"max_size": 0}, {"buffer": 0}])
def test_sizes_are_above_zero(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="above 0"):
        SqliteDeadLetterStore(tmp_path / "x", **options)


def test_the_size_of_the_memory_store_is_above_zero() -> None:
    with pytest.raises(ConfigurationError, match="above 0"):
        MemoryDeadLetterStore(max_size=0)


# -- loads it cannot bear ------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", Overflow)
async def test_adding_never_waits_for_a_file_that_is_locked(
    overflow: Overflow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "letters.db"
    store = SqliteDeadLetterStore(path, overflow=overflow, buffer=5, timeout=0.01)
    queue = DeadLetterQueue(store)
    heard: list[SystemEvent] = []
    queue.on_event(heard.append)
    async with queue:
        with locked(path):
            kept = [add_order(queue, number) for number in range(200)]  # or it would hang here
            # Reading goes on meanwhile.
            assert await queue.find() == []

        await queue.store.flush()
        lost = queue.dropped + queue.refused
        assert await queue.count() == 5
        assert lost == 195
        if overflow is Overflow.REJECT:
            assert (kept.count(True), queue.added, queue.refused) == (5, 5, 195)
        assert len(logged(caplog, "dead_letter_dropped")) == queue.dropped
        assert len(logged(caplog, "dead_letter_refused")) == queue.refused
    told = [
        one for one in heard if isinstance(one, DeadLetterDroppedEvent | DeadLetterRefusedEvent)
    ]
    assert len(told) == lost


def add_order(queue: DeadLetterQueue, number: int) -> bool:
    letter = queue.add(
        CardCharged(order=number), handler="charge", error=ValueError("no"), attempts=1,
        first_attempt=0.0, reason="not retried",
    )  # fmt: skip
    return letter is not None


async def test_letters_wait_in_memory_until_a_lock_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "letters.db"
    async with DeadLetterQueue(SqliteDeadLetterStore(path, timeout=0.01)) as queue:
        with locked(path):
            letters = bury_orders(queue, 3)
            with pytest.raises(DeadLetterStoreError, match="is locked"):
                await queue.store.flush()

        await queue.store.flush()

        assert [one.letter_id for one in await queue.find()] == [one.letter_id for one in letters]
        assert (queue.refused, queue.dropped) == (0, 0)


async def test_what_cannot_be_written_at_the_end_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "letters.db"
    queue = DeadLetterQueue(SqliteDeadLetterStore(path, timeout=0.01))
    await queue.open()
    with locked(path):
        bury_orders(queue, 3)
        await queue.close()

    assert queue.refused == 3
    assert "is locked" in logged(caplog, "dead_letter_refused")[0]["reason"]


async def test_a_disk_that_refuses_is_told_and_harms_no_caller(tmp_path: Path) -> None:
    queue = DeadLetterQueue(SqliteDeadLetterStore(tmp_path / "missing" / "letters.db"))
    heard: list[SystemEvent] = []
    queue.on_event(heard.append)

    bury_orders(queue, 2)
    await queue.close()

    refused = [event for event in heard if isinstance(event, DeadLetterRefusedEvent)]
    assert queue.refused == len(refused) == 2
    assert "does not exist" in refused[0].reason


async def test_close_waits_for_a_letter_that_its_thread_is_about_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteDeadLetterStore(tmp_path / "missing" / "letters.db")
    queue = DeadLetterQueue(store)
    buffer = store._buffer  # pyright: ignore[reportPrivateUsage]
    heard: list[SystemEvent] = []
    is_closing = threading.Event()

    def refuse_all(reason: str) -> None:
        original(reason)
        is_closing.set()

    def hear(event: SystemEvent) -> None:
        if isinstance(event, DeadLetterRefusedEvent):
            is_of_thread = threading.current_thread() is not threading.main_thread()
            assert not is_of_thread or is_closing.wait(30)
            heard.append(event)

    original = buffer.refuse_all
    monkeypatch.setattr(buffer, "refuse_all", refuse_all)
    queue.on_event(hear)
    bury_orders(queue, 1)
    await queue.close()

    assert len(heard) == queue.refused == 1


async def test_a_letter_that_cannot_be_written_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with DeadLetterQueue(SqliteDeadLetterStore(tmp_path / "letters.db")) as queue:
        bury(queue, CardCharged(order=1), attempts=2**70)
        bury(queue, CardCharged(order=2))

        found = await queue.find()

        assert len(found) == 1
        assert queue.refused == 1


async def test_callbacks_run_on_the_event_loop_whichever_thread_finds_out(tmp_path: Path) -> None:
    store = SqliteDeadLetterStore(tmp_path / "letters.db", max_size=1)
    threads: set[int] = set()
    told = anyio.Event()

    def hear(event: SystemEvent) -> None:
        threads.add(threading.get_ident())
        if isinstance(event, DeadLetterDroppedEvent):
            told.set()

    async with DeadLetterQueue(store) as queue:
        queue.on_event(hear)
        bury_orders(queue, 2)
        with anyio.fail_after(30):
            await told.wait()

    assert threads == {threading.get_ident()}


# -- life --------------------------------------------------------------------------------------


async def test_a_closed_store_refuses_and_can_be_opened_again(tmp_path: Path) -> None:
    queue = DeadLetterQueue(SqliteDeadLetterStore(tmp_path / "letters.db"))
    async with queue:
        bury(queue, CardCharged(order=1))
    assert not add_order(queue, 2)
    with pytest.raises(DeadLetterStoreError, match="is closed"):
        await queue.store.flush()
    assert await queue.count() == 1

    async with queue:
        assert [one.message for one in await queue.find()] == [CardCharged(order=1)]
    assert queue.refused == 1


async def test_a_store_needs_no_open(tmp_path: Path) -> None:
    queue = DeadLetterQueue(SqliteDeadLetterStore(tmp_path / "letters.db"))

    assert await queue.count() == 0
    await queue.close()


@pytest.mark.parametrize("numbers", ["range(500)", "[*range(500), *range(500)]"])
def test_what_was_added_is_written_before_the_process_ends(tmp_path: Path, numbers: str) -> None:
    # The file is opened when the interpreter is about to end, and starts no thread any more.
    program = f"""
import sys, threading
from msgbus.resilience import DeadLetterQueue, SqliteDeadLetterStore
from msgbus.testing.conformance.dead_letters import Checked
store = SqliteDeadLetterStore(sys.argv[1])
open_file = store._open_file
def open_late():
    while threading.main_thread().is_alive():
        pass
    return open_file()
store._open_file = open_late
queue = DeadLetterQueue(store)
made = [Checked(number=number) for number in range(500)]
for number in {numbers}:
    queue.add(made[number], handler="h", error=ValueError("x"), attempts=1,
              first_attempt=0.0, reason="r")
"""
    path = tmp_path / "letters.db"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=50)

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM msgbus_letters").fetchone() == (500,)


@pytest.mark.parametrize("place", ["here", "loop", "no threads"])
def test_what_is_added_while_the_process_ends_is_written(tmp_path: Path, place: str) -> None:
    # Python 3.11 starts threads as late as that, but waits for none; 3.12 refuses to, so that the
    # letters are written on the caller's thread, also beside the event loop that runs there.
    program = """
import asyncio, atexit, sys, threading
from msgbus.resilience import SqliteDeadLetterStore
from msgbus.testing.conformance.dead_letters import letter
store = SqliteDeadLetterStore(sys.argv[1])
def add_some():
    for number in range(20):
        assert store.add(letter(number)) is None
async def add_on_a_loop():
    add_some()
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
def end():
    if sys.argv[2] == "loop":
        asyncio.run(add_on_a_loop())
        return
    if sys.argv[2] == "no threads":
        threading.Thread.start = refuse
    add_some()
atexit.register(end)
"""
    path = tmp_path / "letters.db"
    arguments = [sys.executable, "-c", program, str(path), place]
    subprocess.run(arguments, check=True, timeout=50)

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM msgbus_letters").fetchone() == (20,)


def test_what_cannot_be_written_any_more_is_told_as_lost(tmp_path: Path) -> None:
    # As on Python 3.12, where no thread can be started; beside trio, no event loop, either.
    program = """
import atexit, sys, threading, trio
from msgbus.resilience import SqliteDeadLetterStore
from msgbus.testing.conformance.dead_letters import letter
store = SqliteDeadLetterStore(sys.argv[1])
store.listen(lambda notice: print(notice.kind, notice.letter.message.number))
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
async def add():
    store.add(letter(1))
    await store.flush()
def end():
    threading.Thread.start = refuse
    trio.run(add)
atexit.register(end)
"""
    arguments = [sys.executable, "-c", program, str(tmp_path / "letters.db")]
    done = subprocess.run(arguments, check=True, timeout=50, capture_output=True, text=True)

    assert done.stdout == "refused 1\n"


async def test_a_store_that_nobody_closes_ends_with_its_last_user(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # other tests may have left stores to the collector
    store = SqliteDeadLetterStore(tmp_path / "letters.db")
    assert store.add(letter(1)) is None
    assert await store.count(LetterFilter()) == 1
    gone = weakref.ref(store)
    begun = set(threading.enumerate()) - before
    (thread,) = [one for one in begun if one.name == "msgbus journal writer"]
    for one in begun:  # it has written the letter, and may be about to end
        if one.name == "msgbus dead letters":
            await anyio.to_thread.run_sync(one.join, 30)

    del store
    gc.collect()

    assert gone() is None
    await anyio.to_thread.run_sync(thread.join, 30)
    assert not thread.is_alive()


async def test_files_and_threads_do_not_pile_up(tmp_path: Path) -> None:
    def opened() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    async def use() -> None:
        async with DeadLetterQueue(SqliteDeadLetterStore(tmp_path / "letters.db")) as queue:
            bury(queue, CardCharged())
            await queue.find()

    await use()
    before = opened()

    for _ in range(20):
        await use()

    assert opened() <= before
