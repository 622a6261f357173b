"""SQL of the user cannot wedge the journal: it is refused or rolled back, and the bus goes on."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import pytest

from msgbus import MessageBus, PublishStatus
from msgbus.errors import ForbiddenStatementError, JournalError, JournalOpenError
from msgbus.journal.operations import Append
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import fill, make_record
from msgbus.testing.conformance.journal.tables import statement
from tests.durable_shop import Placed, Seen, url_of
from tests.unit.journal.sqlite.files import sql

Function: TypeAlias = Callable[[sqlite3.Connection], object]


def as_mine(*_: object) -> Any:
    return "mine"


WROTE = "INSERT INTO mine (x) VALUES ('undone')"
"""Goes before each hazard, and must not be found after it."""


class Shop:
    """A bus on a file with tables of the user's, and the proof that it still works."""

    def __init__(self, bus: MessageBus, seen: Seen, path: Path) -> None:
        self.bus = bus
        self.path = path
        self._seen = seen
        self._number = 0

    def write(self, statement: str) -> None:
        """Write to the file as another program would."""
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute(statement)

    def sql(self, statement: str) -> list[Any]:
        return sql(self.path, statement)

    async def works(self) -> None:
        self._number += 1
        with anyio.fail_after(20):
            receipt = await self.bus.publish(Placed(number=self._number))
            await self.bus.settled()
        assert receipt.status is PublishStatus.DURABLE
        assert self._seen.numbers == list(range(1, self._number + 1))
        assert isinstance(self.bus.journal, SqliteJournal)
        report = await self.bus.journal.verify()
        assert report.is_sound, report


@asynccontextmanager
async def opened(folder: Path) -> AsyncGenerator[Shop]:
    seen = Seen()
    bus = MessageBus(journal=url_of(folder))
    bus.subscribe(Placed, seen, name="seen")
    async with bus:
        shop = Shop(bus, seen, folder / "shop.db")
        await bus.transact(
            statement("CREATE TABLE mine (id INTEGER PRIMARY KEY AUTOINCREMENT, x, UNIQUE (x))")
        )
        await bus.transact(statement("INSERT INTO mine (x) VALUES ('first')"))
        await shop.works()
        yield shop
        await shop.works()


def calls(name: str, *arguments: Any) -> Function:
    return lambda db: getattr(db, name)(*arguments)


def sets(name: str, value: object) -> Function:
    return lambda db: setattr(db, name, value)


def enters(db: sqlite3.Connection) -> None:
    with db:
        db.execute("INSERT INTO mine (x) VALUES ('in a block')")


def goes_on_after_a_rollback(db: sqlite3.Connection) -> None:
    with suppress(sqlite3.IntegrityError):
        db.execute("INSERT OR ROLLBACK INTO mine (x) VALUES ('first')")
    with suppress(ForbiddenStatementError):
        db.execute("INSERT INTO mine (x) VALUES ('outside of any transaction')")


def swallows(statement: str) -> Function:
    def run(db: sqlite3.Connection) -> None:
        with suppress(ForbiddenStatementError, sqlite3.Error):
            db.execute(statement)

    return run


def renames_a_temporary_table(db: sqlite3.Connection) -> None:
    db.execute("CREATE TEMP TABLE scratch (offset)")
    db.execute("ALTER TABLE scratch RENAME TO msgbus_messages")


TRIGGER = "CREATE {} TRIGGER mine_too AFTER INSERT ON {} BEGIN SELECT 1; END"
# fmt: off
METHODS: list[tuple[Any, ...]] = [
    ("commit",), ("rollback",), ("close",), ("executescript", "COMMIT"), ("interrupt",),
    ("blobopen", "msgbus_messages", "payload", 1), ("backup", None), ("serialize",),
    ("deserialize", b""), ("load_extension", "x"), ("enable_load_extension", True),
    ("set_authorizer", None), ("set_progress_handler", lambda: 1, 1),
    ("set_trace_callback", print), ("setlimit", sqlite3.SQLITE_LIMIT_SQL_LENGTH, 1),
    ("create_function", "coalesce", -1, str), ("create_collation", "x", None),
    ("create_aggregate", "max", 1, object), ("create_window_function", "max", 1, object),
    ("iterdump",), ("__call__", "COMMIT"), ("cursor", sqlite3.Cursor),
]
REFUSED: dict[str, Function] = {
    **{
        text: statement(text)
        for text in (
            "COMMIT", "END", "ROLLBACK", "BEGIN", "SAVEPOINT mine", "RELEASE part",
            "ROLLBACK TO part", "PRAGMA writable_schema = 1", "PRAGMA journal_mode = DELETE",
            "ATTACH ':memory:' AS other", "DETACH main", "ANALYZE", "REINDEX",
            "REINDEX msgbus_pending_due", "ANALYZE msgbus_messages",
            # our tables, under all their names
            "DELETE FROM msgbus_messages", "DELETE FROM MSGBUS_Messages",
            'DELETE FROM "msgbus_messages"', "DELETE FROM main.msgbus_messages",
            "DELETE FROM [Msgbus_Messages]", "UPDATE msgbus_subscriptions SET acked = 0",
            "UPDATE OR IGNORE `MSGBUS_pending` SET due = 0", "DELETE FROM msgbus_meta",
            "INSERT OR REPLACE INTO msgbus_meta VALUES ('trimmed', '9', 0)",
            "REPLACE INTO Msgbus_Meta VALUES ('trimmed', '9', 0)",
            "WITH x AS (SELECT 1) DELETE FROM msgbus_members",
            "DROP TABLE msgbus_messages", "DROP VIEW msgbus_log",
            "DROP INDEX Msgbus_Pending_Due", "ALTER TABLE msgbus_messages RENAME TO gone",
            "ALTER TABLE Msgbus_Messages ADD COLUMN mine",
            "ALTER TABLE msgbus_messages DROP COLUMN headers",
            "UPDATE sqlite_sequence SET seq = 0", "DELETE FROM SQLITE_SEQUENCE",
            "INSERT INTO sqlite_sequence VALUES ('msgbus_members', 0)",
            # things of the user's in front of them, on them, or under their names
            "CREATE TEMP TABLE msgbus_messages (offset)",
            "CREATE TEMP VIEW msgbus_meta AS SELECT 1",
            "CREATE TABLE temp.MSGBUS_pending (x)", "CREATE TABLE msgbus_own (x)",
            "CREATE TABLE MsgBus_Own AS SELECT 1", "CREATE VIEW msgbus_own AS SELECT 1",
            "CREATE VIRTUAL TABLE msgbus_own USING fts5(x)",
            "CREATE INDEX mine_too ON msgbus_messages (name)",
            "CREATE UNIQUE INDEX mine_too ON Msgbus_Messages (name)",
            "CREATE INDEX msgbus_own ON mine (x)", "ALTER TABLE mine RENAME TO msgbus_own",
            "ALTER TABLE mine RENAME TO MsgBus_Own",
            TRIGGER.format("", "msgbus_messages"), TRIGGER.format("", "main.MSGBUS_messages"),
            TRIGGER.format("TEMP", "msgbus_messages"),
            TRIGGER.format("TEMP", "main.Msgbus_Pending"),
            "CREATE TRIGGER msgbus_own AFTER INSERT ON mine BEGIN SELECT 1; END",
        )
    },
    **{
        f"{name}()": calls(name, *arguments)
        for name, *arguments in METHODS
        if hasattr(sqlite3.Connection, name)
    },
    "a temporary table renamed to one of ours": renames_a_temporary_table,
    "cursor().executescript()": lambda db: db.cursor().executescript("COMMIT"),
    "commit() of the connection of a cursor": lambda db: db.cursor().connection.commit(),
    "isolation_level =": sets("isolation_level", "IMMEDIATE"),
    "isolation_level = None": sets("isolation_level", None),
    "autocommit =": sets("autocommit", True) if hasattr(sqlite3, "LEGACY_TRANSACTION_CONTROL")
    else calls("commit"),
    "with connection:": enters,
    "a swallowed COMMIT": swallows("COMMIT"),
    "a swallowed write": swallows("DELETE FROM msgbus_messages"),
    "going on after a rollback": goes_on_after_a_rollback,
    "a trigger of the user's that writes to our tables": statement(
        "INSERT INTO fires (x) VALUES (1)"
    ),
}
# fmt: on


@pytest.mark.parametrize("hazard", REFUSED)
async def test_it_is_refused(hazard: str, tmp_path: Path) -> None:
    def run(db: sqlite3.Connection) -> None:
        db.execute(WROTE)
        REFUSED[hazard](db)

    async with opened(tmp_path) as shop:
        shop.write("CREATE TABLE fires (x)")
        shop.write(
            "CREATE TRIGGER fire AFTER INSERT ON fires BEGIN DELETE FROM msgbus_messages; END"
        )
        with pytest.raises(ForbiddenStatementError):
            await shop.bus.transact(run)

        assert shop.sql("SELECT x FROM mine") == [("first",)]


# -- what a function leaves behind -----------------------------------------------------------------


def leaves_a_cursor_open(sql: str) -> Function:
    def run(db: sqlite3.Connection) -> Any:
        return db.execute(sql).fetchmany(1), db.execute(sql)

    return run


def sets_factories(db: sqlite3.Connection) -> None:
    db.row_factory = as_mine
    db.text_factory = as_mine
    assert db.execute("SELECT x FROM mine").fetchone() == "mine"


def makes_temporary_tables(db: sqlite3.Connection) -> None:
    db.execute("CREATE TEMP TABLE scratch (x)")
    db.execute("CREATE TEMP TRIGGER noting AFTER INSERT ON mine BEGIN SELECT 1; END")


def breaks_a_deferred_key(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE lines (mine REFERENCES mine (id) DEFERRABLE INITIALLY DEFERRED)")
    db.execute("INSERT INTO lines VALUES (99)")  # not enforced, so nothing fails at the COMMIT


ALLOWED: dict[str, Function] = {
    "a deferred key without its row": breaks_a_deferred_key,
    "an open SELECT on our table": leaves_a_cursor_open(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 9) "
        "SELECT * FROM msgbus_messages, n"
    ),
    "an open INSERT RETURNING": leaves_a_cursor_open(
        "INSERT INTO mine (x) VALUES (random()), (random()) RETURNING x"
    ),
    "an open UPDATE RETURNING": leaves_a_cursor_open("UPDATE mine SET x = x RETURNING x"),
    "factories": sets_factories,
    "temporary tables": makes_temporary_tables,
    "a key that points to our table": statement(
        "CREATE TABLE notes (message REFERENCES msgbus_messages (offset) ON DELETE RESTRICT)"
    ),
    "an index of its own": statement("CREATE INDEX mine_by_x ON mine (x)"),
    "a table renamed": statement("ALTER TABLE mine RENAME TO yours"),
    "a table dropped": statement("DROP TABLE mine"),
    "a view of our table": statement("CREATE VIEW topics AS SELECT topic FROM msgbus_messages"),
    "a column of a name like ours": lambda db: (
        db.execute("ALTER TABLE mine ADD COLUMN msgbus_offset"),
        db.execute("UPDATE mine SET msgbus_offset = 1"),
    ),
}


@pytest.mark.parametrize("what", ALLOWED)
async def test_it_is_allowed_and_leaves_nothing_behind(what: str, tmp_path: Path) -> None:
    async with opened(tmp_path) as shop, SqliteJournal(tmp_path / "shop.db") as other:
        await shop.bus.transact(ALLOWED[what])
        await other.commit([])  # an open cursor would make the next commit of the bus impossible
        shop.write("CREATE TABLE another (x)")
        await shop.works()


async def test_a_connection_and_its_cursors_end_with_the_function(tmp_path: Path) -> None:
    async with opened(tmp_path) as shop:
        connection, cursor = await shop.bus.transact(
            lambda db: (db, db.execute("SELECT * FROM msgbus_messages"))
        )
        uses: list[Callable[[], object]] = [
            cursor.fetchone, cursor.fetchmany, cursor.fetchall, lambda: next(cursor),
            lambda: cursor.execute("DELETE FROM mine"), cursor.connection.commit,
            lambda: cursor.executemany("DELETE FROM mine", []),
            lambda: connection.execute("DELETE FROM mine"), connection.commit, connection.close,
            connection.interrupt, connection.cursor, lambda: connection.total_changes,
            lambda: setattr(connection, "text_factory", bytes),
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(ForbiddenStatementError, match="outside of the function"):
                use()
        for method in (sqlite3.Cursor, sqlite3.Connection.cursor, sqlite3.Connection.commit):
            with pytest.raises(sqlite3.ProgrammingError):
                method(connection)
        assert shop.sql("SELECT x FROM mine") == [("first",)]


async def test_a_connection_is_refused_to_other_threads(tmp_path: Path) -> None:
    def run(db: sqlite3.Connection) -> list[str]:
        cursor = db.execute("SELECT x FROM mine")
        refused: list[str] = []

        def elsewhere() -> None:
            for use in (cursor.fetchone, lambda: db.execute("DELETE FROM mine"), db.rollback):
                try:
                    use()
                except ForbiddenStatementError as error:
                    refused.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return refused

    async with opened(tmp_path) as shop:
        refused = await shop.bus.transact(run)

        assert ["on another thread" in text for text in refused] == [True] * 3
        assert shop.sql("SELECT x FROM mine") == [("first",)]


# -- a function that raises ------------------------------------------------------------------------


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, ZeroDivisionError, MemoryError])
async def test_what_it_raises_reaches_its_caller(
    raised: type[BaseException], tmp_path: Path
) -> None:
    def run(db: sqlite3.Connection) -> None:
        db.execute(WROTE)
        raise raised

    async with opened(tmp_path) as shop:
        with pytest.raises(raised):
            await shop.bus.transact(run)

        assert shop.sql("SELECT x FROM mine") == [("first",)]


@pytest.mark.parametrize("raised", [asyncio.CancelledError, GeneratorExit, StopIteration])
async def test_what_would_mean_something_else_to_the_event_loop_is_an_error_of_ours(
    raised: type[BaseException], tmp_path: Path
) -> None:
    def run(db: sqlite3.Connection) -> None:
        db.execute(WROTE)
        raise raised

    async with opened(tmp_path) as shop:
        with pytest.raises(JournalError, match=raised.__name__) as caught:
            await shop.bus.transact(run)

        assert isinstance(caught.value.__cause__, raised)
        assert shop.sql("SELECT x FROM mine") == [("first",)]


# -- others in the same group ----------------------------------------------------------------------


def inserts(value: object, how: str = "INSERT") -> Function:
    return statement(f"{how} INTO mine (x) VALUES (?)", value)


def raises_rollback(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE strict (x)")
    db.execute(
        "CREATE TRIGGER no AFTER INSERT ON strict BEGIN SELECT RAISE(ROLLBACK, 'not this'); END"
    )
    db.execute("INSERT INTO strict VALUES (1)")


@pytest.mark.parametrize(
    ("guilty", "error"),
    [
        (inserts("first", "INSERT OR ROLLBACK"), sqlite3.IntegrityError),
        (raises_rollback, sqlite3.IntegrityError),
        (goes_on_after_a_rollback, ForbiddenStatementError),
        (inserts("first"), sqlite3.IntegrityError),
        (leaves_a_cursor_open("INSERT INTO mine (x) VALUES (1), (2) RETURNING x"), sqlite3.Error),
    ],
)
async def test_a_rollback_of_one_caller_is_its_own(
    guilty: Function, error: type[Exception], tmp_path: Path
) -> None:
    path = tmp_path / "journal.db"
    results: dict[str, object] = {}
    holding, held = threading.Event(), threading.Event()

    def hold(db: sqlite3.Connection) -> None:
        held.set()
        holding.wait(20)

    async with SqliteJournal(path) as journal:
        await journal.transact(statement("CREATE TABLE mine (x UNIQUE)"))
        await journal.transact(inserts("first"))
        before = await journal.head()

        async def run(name: str, function: Function) -> None:
            try:
                results[name] = await journal.transact(function)
            except Exception as failure:
                results[name] = failure

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "hold", hold)
            await anyio.to_thread.run_sync(held.wait, 20)
            tasks.start_soon(run, "one", inserts("one"))
            tasks.start_soon(run, "guilty", guilty)
            tasks.start_soon(run, "two", inserts("two"))
            tasks.start_soon(fill, journal, 2)
            await anyio.wait_all_tasks_blocked()
            holding.set()

        assert isinstance(results["guilty"], error)
        assert (results["one"], results["two"]) == (([], []), ([], []))
        assert sql(path, "SELECT x FROM mine ORDER BY x") == [("first",), ("one",), ("two",)]
        assert await journal.head() == before + 2
        assert (await journal.verify()).is_sound


# -- what another program has done to the file -----------------------------------------------------

LOSES = "CREATE TRIGGER lose BEFORE INSERT ON msgbus_messages BEGIN SELECT RAISE(IGNORE); END"


async def test_a_trigger_made_by_others_stops_writing_until_it_is_gone(tmp_path: Path) -> None:
    async with opened(tmp_path) as shop:
        shop.write(LOSES)
        assert isinstance(shop.bus.journal, SqliteJournal)
        with pytest.raises(JournalError, match=r"triggers .* \(lose on msgbus_messages\)"):
            await shop.bus.publish(Placed(number=99))
        with pytest.raises(JournalOpenError, match="DROP TRIGGER"):
            SqliteJournal(shop.path)
        report = await shop.bus.journal.verify()
        assert report.problems == (
            "The trigger 'lose' on 'msgbus_messages' was not made by msgbus.",
        )
        shop.write("DROP TRIGGER lose")


async def test_control_a_trigger_loses_what_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msgbus.journal.sqlite.transactions.require_no_triggers", as_mine)
    async with SqliteJournal(tmp_path / "journal.db") as journal:
        sql(tmp_path / "journal.db", LOSES)
        (appended,) = await journal.commit([Append(make_record())])
        assert not appended.is_duplicate

        assert await journal.head() == 0


async def test_an_index_made_by_others_is_shown(tmp_path: Path) -> None:
    async with SqliteJournal(tmp_path / "journal.db") as journal:
        sql(tmp_path / "journal.db", "CREATE INDEX extra ON msgbus_messages (name, topic)")
        await fill(journal, 1)
        problems = (await journal.verify()).problems

    assert problems == ("The index 'extra' on 'msgbus_messages' was not made by msgbus.",)
