"""Dead letters: what keeping one costs, and how long questions about 100,000 take."""

from __future__ import annotations

import atexit
import shutil
import sqlite3
import tempfile
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from uuid_utils import uuid7

from benchmarks import subjects
from benchmarks.rows import Row
from benchmarks.subjects import Added
from benchmarks.timing import Effort, Handler, Measurement, Open, Run, Side, compare, summarise
from msgbus.journal import SqliteJournal
from msgbus.journal.sqlite.columns import LETTER, PENDING, letter_row, pending_row
from msgbus.journal.sqlite.schema import open_writer
from msgbus.resilience import (
    DeadLetterEntry,
    DeadLetterQueue,
    DeadLetterStore,
    JournalDeadLetterStore,
    LetterFilter,
    MemoryDeadLetterStore,
    SqliteDeadLetterStore,
)
from msgbus.resilience.dead_letters.entry import letter_about, letter_id_of
from msgbus.resilience.dead_letters.filters import ANY
from msgbus.resilience.dead_letters.rows import new_row

MANY: Final = 100_000
DIED: Final = datetime(2026, 1, 1, tzinfo=UTC)
ERRORS: Final = (ConnectionError("down"), ValueError("no such sku"), KeyError("order"))


def letters(number: int) -> Sequence[DeadLetterEntry]:
    """Letters of a few kinds; half of them of one handler that died of one thing."""
    made: list[DeadLetterEntry] = []
    for place in range(number):
        died = DIED + timedelta(seconds=place)
        rare = place % 2 == 0
        handler, message_id = f"handler-{place % 20}" if rare else "charge", str(uuid7())
        one = replace(
            template(place % 3 if rare else 0), letter_id=letter_id_of(message_id, handler),
            message_id=message_id, handler=handler, first_attempt=died, last_attempt=died,
            session_id=f"job-{place % 1000}",
        )  # fmt: skip
        made.append(one)
    return made


@cache
def template(error: int) -> DeadLetterEntry:
    """A real letter; making each anew would take longer than all that is timed."""
    return letter_about(
        subjects.events(1)[0], handler="charge", error=ERRORS[error], attempts=3,
        first_attempt=DIED, last_attempt=DIED, reason="retries exhausted",
    )  # fmt: skip


async def kept(letter: object) -> None:
    """Stands for the caller, who goes on."""
    del letter


@asynccontextmanager
async def into_deque(handler: Handler) -> AsyncGenerator[Run]:
    line: deque[DeadLetterEntry] = deque(maxlen=10_000)

    async def run(batch: Sequence[Any]) -> None:
        for letter in batch:
            line.append(letter)
            await handler(letter)

    yield run


@asynccontextmanager
async def into_memory(handler: Handler) -> AsyncGenerator[Run]:
    store = MemoryDeadLetterStore()

    async def run(batch: Sequence[Any]) -> None:
        for letter in batch:
            store.add(letter)
            await handler(letter)

    yield run


def insert(connection: sqlite3.Connection, batch: Sequence[DeadLetterEntry]) -> None:
    """Write the rows of letters, by `executemany` in one transaction."""
    puts = [new_row(one, 0.0) for one in batch]
    rows = [pending_row(put.row, None) for put in puts]
    about = [letter_row(put.row, put.letter, put.row.body, None) for put in puts if put.letter]
    connection.execute("BEGIN IMMEDIATE")
    for table, columns, values in (("pending", PENDING, rows), ("letters", LETTER, about)):
        places = ", ".join("?" * len(columns.split(", ")))
        statement = f"INSERT INTO msgbus_{table} ({columns}) VALUES ({places})"
        connection.executemany(statement, values)
    connection.execute("COMMIT")


@asynccontextmanager
async def by_insert(handler: Handler) -> AsyncGenerator[Run]:
    """The same rows and indexes, by `executemany` in one transaction, with one fsync."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_writer(f"{folder}/letters.db", 5.0)) as connection,
    ):

        async def run(batch: Sequence[Any]) -> None:
            insert(connection, batch)
            for letter in batch:
                await handler(letter)

        yield run


def flushed(store: DeadLetterStore, handler: Handler) -> Run:
    async def run(batch: Sequence[Any]) -> None:
        for letter in batch:
            store.add(letter)
            await handler(letter)
        await store.flush()

    return run


@asynccontextmanager
async def into_sqlite(handler: Handler) -> AsyncGenerator[Run]:
    """Until everything is in the file."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteDeadLetterStore(Path(folder) / "letters.db", buffer=100_000)
        await store.open()
        yield flushed(store, handler)
        await store.close()


@asynccontextmanager
async def into_journal(handler: Handler) -> AsyncGenerator[Run]:
    """Until everything is in the journal's file."""
    with tempfile.TemporaryDirectory() as folder:
        async with SqliteJournal(Path(folder) / "journal.db", reserve=0) as journal:
            store = JournalDeadLetterStore(journal, buffer=100_000)
            await store.open()
            yield flushed(store, handler)
            await store.close()


def failure() -> Exception:
    """An error as a handler raises it."""
    try:
        raise ConnectionError("https://shop:hunter2@payments.example is down")
    except ConnectionError as error:
        return error


@asynccontextmanager
async def formatted(handler: Handler) -> AsyncGenerator[Run]:
    error = failure()

    async def run(batch: Sequence[Any]) -> None:
        for event in batch:
            traceback.format_exception(error)
            await handler(event)

    yield run


@asynccontextmanager
async def dead(handler: Handler) -> AsyncGenerator[Run]:
    """All of it: the letter is made, its secrets are removed, and it is kept in memory."""
    error, queue = failure(), DeadLetterQueue(MemoryDeadLetterStore(max_size=None))

    async def run(batch: Sequence[Any]) -> None:
        for event in batch:
            queue.add(
                event, handler="charge", error=error, attempts=3, first_attempt=DIED,
                reason="retries exhausted",
            )  # fmt: skip
            await handler(event)

    yield run


async def made(effort: Effort) -> Measurement:
    return await compare(
        Side(open=formatted, build=subjects.events, handler=kept),
        Side(open=dead, build=subjects.events, handler=kept),
        effort,
    )


async def appended(plain: Open, measured: Open, effort: Effort) -> Measurement:
    return await compare(
        Side(open=plain, build=letters, handler=kept),
        Side(open=measured, build=letters, handler=kept),
        effort,
    )


# -- questions ---------------------------------------------------------------------------------

Question = Callable[[DeadLetterStore], Awaitable[object]]
_full: dict[int, Path] = {}


def full_file(number: int) -> Path:
    """A file with so many letters, made once for all rows."""
    if number not in _full:
        folder = Path(tempfile.mkdtemp(prefix="msgbus-letters-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = folder / "letters.db"
        with closing(open_writer(str(path), 5.0)) as connection:
            insert(connection, letters(number))
        _full[number] = path
    return _full[number]


@asynccontextmanager
async def full_journal(number: int) -> AsyncGenerator[tuple[DeadLetterStore, Path]]:
    """The same letters in a journal, which is made once for all rows too."""
    path = full_file(number).with_name("journal.db")
    async with SqliteJournal(path, reserve=0) as journal:
        store = JournalDeadLetterStore(journal)
        await store.open()
        if not await store.count(ANY):
            await store.put(letters(number))
        yield store, path
        await store.close()


@asynccontextmanager
async def full_store(number: int) -> AsyncGenerator[tuple[DeadLetterStore, Path]]:
    path = full_file(number)
    store = SqliteDeadLetterStore(path)
    await store.open()
    yield store, path
    await store.close()


def scanned(path: Path) -> float:
    """Seconds to read every letter of the file, and its row, in one go."""
    with closing(sqlite3.connect(path)) as connection:
        began = time.perf_counter()
        for table in ("msgbus_letters", "msgbus_pending"):
            for _ in connection.execute(f"SELECT * FROM {table}"):
                pass
        return time.perf_counter() - began


async def asked(
    question: Question, effort: Effort, number: int = MANY, *, in_journal: bool = False
) -> Measurement:
    """A question, in times of reading everything."""
    pairs: list[tuple[float, float]] = []
    async with (full_journal if in_journal else full_store)(number) as (store, path):
        for _ in range(min(effort.repeats, 15)):
            scan = scanned(path)
            began = time.perf_counter()
            await question(store)
            pairs.append((scan, time.perf_counter() - began))
    return summarise(pairs)


def page(**filters: Any) -> Question:
    async def ask(store: DeadLetterStore) -> object:
        found = await store.page(LetterFilter(**filters), limit=100)
        assert len(found.letters) == 100
        return found

    return ask


async def groups(store: DeadLetterStore) -> object:
    found = await store.groups(LetterFilter())
    assert sum(group.count for group in found) == MANY
    return found


def question(name: str, title: str, ask: Question, *, in_journal: bool = False) -> Row:
    return Row(
        name=f"letters.{name}",
        title=f"{title}, {MANY:,} letters{' in a journal' if in_journal else ''}",
        baseline="reading all letters",
        measure=partial(asked, ask, in_journal=in_journal),
        budget=1,
        heavy=True,
    )


LATE: Final = DIED + timedelta(seconds=MANY - 1_000)

ROWS: Final = (
    Row(
        name="letters.made",
        title="make a letter of an error and keep it",
        baseline="traceback.format_exception(error)",
        measure=made,
        budget=15,
    ),
    Row(
        name="letters.in_memory",
        title="keep a letter in memory",
        baseline="deque.append(letter)",
        measure=partial(appended, into_deque, into_memory),
        budget=30,
    ),
    Row(
        name="letters.in_sqlite",
        title="keep a letter in SQLite, flushed",
        baseline="INSERT in one transaction",
        measure=partial(appended, by_insert, into_sqlite),
        budget=3,
    ),
    Row(
        name="letters.in_journal",
        title="keep a letter in a journal, flushed",
        baseline="INSERT in one transaction",
        measure=partial(appended, by_insert, into_journal),
        budget=3,
    ),
    question("groups", "groups", groups),
    question("journal_groups", "groups", groups, in_journal=True),
    question("journal_handler", "page of one handler", page(handler="charge"), in_journal=True),
    question("journal_since", "page of the last hour", page(since=LATE), in_journal=True),
    question("page_handler", "page of one handler", page(handler="charge")),
    question("page_session", "page of one session", page(session_id="job-8")),
    question("page_error", "page of one error type", page(error_type="ConnectionError")),
    question("page_since", "page of the last hour", page(since=LATE)),
    question(
        "page_type",
        "page of one message type",
        page(message_types=frozenset({Added.__wire__.name})),
    ),
)
