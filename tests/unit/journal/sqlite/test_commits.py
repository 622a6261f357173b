"""Group commit: what rides, what is refused, what fails, and in which order it is answered."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import anyio
import pytest

from msgbus.errors import (
    ForbiddenStatementError,
    JournalError,
    JournalFullError,
    StaleError,
    StoredMessageError,
)
from msgbus.journal.operations import Append, Drop, Note, Operation, Pass, Put, Reply, Seek
from msgbus.journal.ports import Claim
from msgbus.journal.records import (
    Cursor,
    DeliveryRecord,
    Member,
    Outcome,
    Pending,
    Record,
    State,
)
from msgbus.journal.sqlite.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import (
    EVENTS,
    LETTER,
    SHARED,
    TIME,
    append,
    end,
    fill,
    join,
    make_command,
    make_record,
    make_row,
    read_all,
    states_of,
    take,
    until,
)
from tests.unit.journal.sqlite.files import open_counted, sql


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@final
class Feeder:
    """A SHARED subscription in small: claims what is appended, hands it out when committed."""

    def __init__(self, cursor: Cursor, member: Member) -> None:
        self.cursor = cursor
        self.member = member
        self.staged: list[Claim] = []
        self.moved: Cursor | None = None
        self.handed: list[int] = []
        self.kept: list[bool] = []
        self.threads: set[int] = set()
        self.events: list[str] = []

    def operations(self, appended: Sequence[Claim], before: int) -> Sequence[Operation]:
        self.threads.add(threading.get_ident())
        if not appended or self.cursor.acked != before:
            return []
        upto = appended[-1].record.offset
        self.staged = [
            Claim(
                make_row(self.cursor.name, one.record.offset, State.CLAIMED, owner=self.member.id),
                one.record,
            )
            for one in appended
        ]
        move = Pass(self.cursor, upto, upto)
        self.moved = move.after
        return [*(Put(claim.row) for claim in self.staged), move]

    def committed(self, kept: bool) -> Callable[[], object] | None:
        self.kept.append(kept)
        staged, self.staged = self.staged, []
        if kept and self.moved is not None:
            self.cursor = self.moved
        self.moved = None

        def hand_out() -> None:
            self.events.append("handed out")
            self.handed += [claim.row.offset for claim in staged]

        return hand_out if kept and staged else None


async def feeder(journal: SqliteJournal, name: str = "shared") -> Feeder:
    member = await join(journal)
    (cursor,) = await journal.open(name, SHARED, await journal.head())
    fed = Feeder(cursor, member)
    journal.attach([fed], member)
    return fed


# -- participants ------------------------------------------------------------------------------


async def test_a_participant_is_fed_before_the_caller_goes_on(path: Path) -> None:
    journal, connection = open_counted(path)
    fed = await feeder(journal)
    before = connection.commits

    for number in range(3):
        await append(journal, make_record(number))
        assert fed.handed == list(range(1, number + 2))

    assert connection.commits - before == 3
    assert await states_of(journal, "shared") == [State.CLAIMED] * 3
    assert threading.get_ident() not in fed.threads
    await journal.close()


async def test_what_is_handed_out_comes_before_the_answer(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        fed = await feeder(journal)

        async def publish(number: int) -> None:
            await append(journal, make_record(number))
            fed.events.append("answered")

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(publish, number)

        assert fed.events[0] == "handed out"
        assert fed.handed == list(range(1, 21))


async def test_a_participant_that_is_refused_takes_everything_back(path: Path) -> None:
    async with SqliteJournal(path) as journal, SqliteJournal(path) as other:
        await fill(journal, 5)
        fed = await feeder(journal)
        another = await feeder(journal, "another")
        journal.attach([fed, another], fed.member)
        await other.commit([Seek("shared", 3)])  # another process has moved the cursor

        offsets = await append(journal, make_record(0), make_record(1))

        assert offsets == [6, 7]
        assert (fed.kept[-1], fed.handed) == (False, [])
        assert (another.kept[-1], another.handed) == (True, [6, 7])
        assert await journal.count("shared") == {}
        assert await journal.count("another") == {State.CLAIMED: 2}


async def test_a_participant_that_raises_is_left_out_of_the_commit(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        kept: bool | None = None

        def operations(self, appended: Sequence[Claim], before: int) -> Sequence[Operation]:
            raise ValueError("a fault")

        def committed(self, kept: bool) -> None:
            self.kept = kept
            raise ValueError("another fault")

    async with SqliteJournal(path) as journal:
        broken = Broken()
        fed = await feeder(journal)
        journal.attach([broken, fed], None)

        await append(journal, make_record())

        assert broken.kept is False
        assert fed.handed == [1]
    assert "journal_participant_failed" in caplog.text


async def test_participants_of_an_ended_member_are_left_out(path: Path) -> None:
    async with SqliteJournal(path) as journal, SqliteJournal(path) as other:
        lost: list[int] = []
        member = await journal.join("process", {}, on_lost=lambda: lost.append(1))
        fed = await feeder(journal)
        journal.attach([fed], member)
        await end(other, member)

        assert await fill(journal, 2) == [1, 2]
        assert await fill(journal, 1) == [3]

        assert (fed.kept, fed.handed, lost) == ([], [], [1])


async def test_a_call_that_raises_does_not_keep_the_caller_waiting(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("a fault")

    class Raising:
        def operations(self, appended: Sequence[Claim], before: int) -> Sequence[Operation]:
            return []

        def committed(self, kept: bool) -> Callable[[], object]:
            return fail

    async with SqliteJournal(path) as journal:
        journal.attach([Raising()], None)

        with anyio.fail_after(10):
            assert await fill(journal, 1) == [1]
    assert "journal_callback_failed" in caplog.text


# -- commits that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("statement", ["COMMIT", "BEGIN", "INSERT INTO msgbus_pending"])
async def test_a_commit_that_fails_hands_nothing_out(path: Path, statement: str) -> None:
    journal, connection = open_counted(path)
    fed = await feeder(journal)
    errors: list[Exception] = []

    async def publish(number: int) -> None:
        try:
            await append(journal, make_record(number))
        except JournalFullError as error:
            errors.append(error)

    connection.fails_at = statement
    async with anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(publish, number)
    connection.fails_at = None

    assert fed.handed == []
    assert True not in fed.kept
    assert await journal.count() == {}
    if statement == "INSERT INTO msgbus_pending":  # only the participant is refused
        assert (errors, await journal.head()) == ([], 10)
    else:
        assert (len({id(error) for error in errors}), await journal.head()) == (10, 0)
        assert "No space is left" in str(errors[0])
        assert bool(fed.kept) is (statement == "COMMIT")
        await append(journal, make_record(10))
        assert fed.handed == [1]
    await journal.close()


async def test_a_full_file_refuses_and_goes_on_when_there_is_space(path: Path) -> None:
    journal, connection = open_counted(path)
    fed = await feeder(journal)
    await append(journal, make_record())
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()

    with pytest.raises(JournalFullError):
        await append(journal, make_record(1, payload=b"x" * 100_000))
    assert (fed.handed, await journal.head()) == ([1], 1)

    connection.execute("PRAGMA max_page_count = 1000000").fetchall()
    await append(journal, make_record(2))
    assert fed.handed == [1, 2]
    await journal.close()


async def test_what_a_refused_caller_wrote_is_undone_and_others_go_on(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        outcomes: list[object] = []

        async def write(number: int) -> None:
            version = 2 if number % 2 else 1
            row = make_row("orders", number + 1, version=version)
            try:
                await journal.commit([Append(make_record(number)), Put(row)])
                outcomes.append(True)
            except StaleError:
                outcomes.append(False)

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(write, number)

        assert sorted(outcomes) == [False] * 10 + [True] * 10  # type: ignore[type-var]
        assert await journal.head() == 10
        assert await journal.count() == {State.WAITING: 10}


# -- groups ------------------------------------------------------------------------------------


async def hold(journal: SqliteJournal, tasks: Any) -> threading.Event:
    """Keep the writer's thread busy until the event is set."""
    entered, release = threading.Event(), threading.Event()

    def wait(_: sqlite3.Connection) -> None:
        entered.set()
        release.wait(10)

    tasks.start_soon(journal.transact, wait)
    await until(entered.is_set)
    return release


async def test_many_callers_are_few_transactions(path: Path) -> None:
    journal, connection = open_counted(path)
    await fill(journal, 1)
    before = connection.commits

    async with anyio.create_task_group() as tasks:
        release = await hold(journal, tasks)
        for number in range(500):
            tasks.start_soon(append, journal, make_record(number))
        await anyio.wait_all_tasks_blocked()
        release.set()

    assert connection.commits - before == 2
    assert await journal.head() == 501
    await journal.close()


async def test_a_group_has_at_most_a_thousand_records(path: Path) -> None:
    journal, connection = open_counted(path)
    await fill(journal, 1)
    before = connection.commits

    async with anyio.create_task_group() as tasks:
        release = await hold(journal, tasks)
        for number in range(5):
            records = [make_record(number) for _ in range(600)]
            tasks.start_soon(append, journal, *records)
        await anyio.wait_all_tasks_blocked()
        release.set()

    assert connection.commits - before == 1 + 5
    await journal.close()


async def test_known_and_bad_messages_in_a_group_concern_their_callers_only(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        known = make_record(0)
        await append(journal, known)
        results: dict[str, object] = {}

        async def commit(name: str, *records: Record) -> None:
            try:
                results[name] = await journal.commit([Append(record) for record in records])
            except StoredMessageError:
                results[name] = "refused"

        async with anyio.create_task_group() as tasks:
            release = await hold(journal, tasks)
            twin = make_record(2)
            tasks.start_soon(commit, "known", known)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(commit, "bad", make_record(1), make_record(1, topic="\ud800"))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(commit, "twins", twin, twin)
            await anyio.wait_all_tasks_blocked()
            release.set()

        assert results == {"known": [(1, True)], "bad": "refused", "twins": [(2, False), (2, True)]}
        assert [record.offset for record in await read_all(journal)] == [1, 2]


async def test_a_cancelled_caller_abandons_what_is_not_begun(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        async with anyio.create_task_group() as tasks:
            release = await hold(journal, tasks)
            async with anyio.create_task_group() as callers:
                callers.start_soon(append, journal, make_record())
                await anyio.wait_all_tasks_blocked()
                callers.cancel_scope.cancel()
            release.set()

        assert await journal.head() == 0
        assert await fill(journal, 1) == [1]


async def test_a_cancelled_join_leaves_no_renewals(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        async with anyio.create_task_group() as tasks:
            release = await hold(journal, tasks)
            async with anyio.create_task_group() as callers:

                async def be_member() -> None:
                    await journal.join("process", {}, every=0.001)

                callers.start_soon(be_member)
                await anyio.wait_all_tasks_blocked()
                callers.cancel_scope.cancel()
            release.set()

        assert await journal.members() == []


async def test_rows_are_written_in_the_order_of_the_operations(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        note = Note(DeliveryRecord("id", "handler", 1, Outcome.OK, 0.1, 0.2, TIME, None, 1))
        row = make_row("orders", 1, key="a")
        parked = [make_row("orders", number, State.PARKED, key="a") for number in (2, 3)]
        done = row.moved(State.DONE, time=TIME)

        await journal.commit(
            [
                Put(row),
                note,
                Put(parked[0]),
                Reply("id", TIME, b"1"),
                Reply("id", TIME, b"2"),
                Put(done, promote=True),
                Put(parked[1]),
                Drop(done),
            ]
        )

        assert await states_of(journal, "orders") == [State.WAITING, State.PARKED]
        result = await journal.result("id")
        assert result is not None
        assert result.body == b"1"
        assert sql(path, "SELECT count(*) FROM msgbus_deliveries") == [(1,)]


@pytest.mark.parametrize("count", [1, 2, 5, 20, 150, 1000])
async def test_many_rows_in_few_statements_are_the_same_as_one_by_one(
    path: Path, count: int
) -> None:
    async with SqliteJournal(path) as journal:
        member = await join(journal)
        rows: list[Pending] = [
            make_row("orders", number, State.CLAIMED, owner=member.id)
            if number % 3
            else make_row("orders", number, attempt=number, key="k", error="no stock")
            for number in range(1, count + 1)
        ]
        await journal.commit([Put(row) for row in rows])
        assert await journal.find("orders", list(State), limit=9999) == rows

        changed = [row.moved(State.WAITING, time=TIME, due=TIME) for row in rows]
        await journal.commit([Put(row) for row in changed], member)
        assert await journal.find("orders", list(State), limit=9999) == changed

        for wrong in (rows[-1], changed[-1]._replace(version=9)):
            with pytest.raises(StaleError, match=f"Message {count} of 'orders'"):
                await journal.commit([*(Drop(row) for row in changed[:-1]), Drop(wrong)])
        with pytest.raises(StaleError, match=f"Message {count} of 'orders'"):
            await journal.commit([Put(make_row("bills", 1)), Put(rows[-1])])
        assert len(await journal.find(None, list(State), limit=9999)) == count

        await journal.commit([Drop(row) for row in changed])
        assert await journal.count() == {}


@pytest.mark.parametrize("count", [1, 3])
async def test_claimed_rows_are_changed_by_their_owner_only(path: Path, count: int) -> None:
    async with SqliteJournal(path) as journal:
        owner, other = await join(journal), await join(journal)
        offsets = range(1, count + 1)
        rows = [make_row("orders", n, State.CLAIMED, owner=owner.id) for n in offsets]
        await journal.commit([Put(row) for row in rows])
        done = [row.moved(State.DONE, time=TIME) for row in rows]

        for member in (None, other):
            with pytest.raises(StaleError, match="in flight in another process"):
                await journal.commit([Drop(row) for row in rows], member)
            with pytest.raises(StaleError, match="in flight in another process"):
                await journal.commit([Put(row) for row in done], member)

        await journal.commit([Drop(row) for row in rows], owner)
        assert await journal.count() == {}


@pytest.mark.parametrize("count", [1, 3])
async def test_rows_beyond_the_cursor_are_kept_as_done_until_it_passes(
    path: Path, count: int
) -> None:
    async with SqliteJournal(path) as journal:
        await fill(journal, 4)
        member = await join(journal)
        cursor = await take(journal, member, "orders", EVENTS)
        rows = [make_row("orders", number) for number in range(1, count + 1)]
        await journal.commit([Put(row) for row in rows])

        await journal.commit([Drop(row) for row in rows], member)
        assert await states_of(journal, "orders") == [State.DONE] * count

        await journal.commit([Pass(cursor, count, 4)], member)
        assert await journal.count() == {}


async def test_letters_stay_with_a_replayed_row_and_go_with_it(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        rows = [make_row("orders", number, State.DEAD) for number in (1, 2, 3)]
        await journal.commit([Put(row, LETTER) for row in rows])
        waiting = [row.moved(State.WAITING, time=TIME, due=0.0) for row in rows]
        await journal.commit([Put(row) for row in waiting])
        assert [await journal.letter(row) for row in waiting] == [LETTER] * 3

        await journal.commit([Drop(row) for row in waiting[:2]])
        await journal.commit([Put(waiting[2].moved(State.KEPT, time=TIME))])

        assert [await journal.letter(row) for row in waiting] == [None] * 3


async def test_rows_parked_in_one_commit_wait_behind_the_first(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.commit(
            [Put(make_row("orders", n, State.PARKED, key="ab"[n % 2])) for n in range(1, 7)]
        )

        assert await states_of(journal, "orders") == [State.WAITING] * 2 + [State.PARKED] * 4
        await journal.commit([Put(make_row("bills", n, State.PARKED)) for n in (1, 2)])
        assert await states_of(journal, "bills") == [State.WAITING] * 2


async def test_what_a_refused_caller_appended_is_given_to_no_participant(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        fed = await feeder(journal)
        stale = Put(make_row("orders", 1, version=7))

        async def refused() -> None:
            with pytest.raises(StaleError):
                await journal.commit([Append(make_record(0)), stale])

        async with anyio.create_task_group() as tasks:
            release = await hold(journal, tasks)
            tasks.start_soon(refused)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(append, journal, make_record(1))
            await anyio.wait_all_tasks_blocked()
            release.set()

        assert fed.handed == [1]
        assert [one.json()["number"] for one in await read_all(journal)] == [1]


async def test_a_member_that_is_ended_in_a_group_is_refused_behind_it(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        member = await join(journal)
        outcomes: list[str] = []

        async def commit() -> None:
            try:
                await journal.commit([Append(make_record())], member)
                outcomes.append("written")
            except StaleError:
                outcomes.append("refused")

        async def leave() -> None:
            outcomes.append(f"ended: {await journal.end(member)}")

        async with anyio.create_task_group() as tasks:
            release = await hold(journal, tasks)
            for step in (commit, leave, commit):
                tasks.start_soon(step)
                await anyio.wait_all_tasks_blocked()
            release.set()

        assert sorted(outcomes) == ["ended: True", "refused", "written"]
        assert await journal.head() == 1


async def test_a_unique_key_that_another_has_is_refused_by_name(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        await journal.commit([Append(make_command(0), queue="queue", unique="u")])
        dead = make_row("queue", 9, State.DEAD, unique="u")
        await journal.commit([Put(dead)])

        with pytest.raises(StaleError, match="unique key 'u'"):
            await journal.commit([Put(dead.moved(State.WAITING, time=TIME, due=0.0))])


# -- SQL of the user ---------------------------------------------------------------------------


def create_stock(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE stock (item TEXT)")


async def test_sql_of_the_user_is_part_of_the_commit(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        row = make_row("orders", 1)
        await journal.commit([Put(row)])
        await journal.transact(create_stock)

        def take_one(db: sqlite3.Connection) -> int:
            db.row_factory = sqlite3.Row
            db.execute("INSERT INTO stock VALUES ('a')")
            return int(db.execute("SELECT count(*) FROM stock").fetchone()[0])

        assert await journal.transact(take_one, [Drop(row)]) == (1, [])
        with pytest.raises(StaleError):
            await journal.transact(take_one, [Drop(row)])
        nobody = Member(99, "process", {}, 0)
        with pytest.raises(StaleError):
            await journal.transact(take_one, member=nobody)

        assert sql(path, "SELECT * FROM stock") == [("a",)]
        assert await journal.count() == {}


@pytest.mark.parametrize(
    "statement",
    ["COMMIT", "PRAGMA user_version = 3", "ATTACH ':memory:' AS b", "DELETE FROM msgbus_meta"],
)
async def test_statements_that_end_the_transaction_are_refused(path: Path, statement: str) -> None:
    async with SqliteJournal(path) as journal:
        await journal.transact(create_stock)

        def work(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO stock VALUES ('a')")
            db.execute(statement)

        with pytest.raises(ForbiddenStatementError):
            await journal.transact(work)

        assert sql(path, "SELECT * FROM stock") == []
        assert await fill(journal, 1) == [1]


async def test_an_error_of_the_user_reaches_its_caller_only(path: Path) -> None:
    async with SqliteJournal(path) as journal:
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            await journal.transact(lambda db: db.execute("SELECT * FROM absent"))
        with pytest.raises(ZeroDivisionError):
            await journal.transact(lambda _: 1 // 0)

        assert len((await journal.read(0, 9, EVENTS)).records) == 0


# -- faults ------------------------------------------------------------------------------------


async def test_a_lone_message_that_fails_halfway_leaves_nothing(path: Path) -> None:
    journal, connection = open_counted(path)
    connection.fails_at = "INSERT OR IGNORE INTO msgbus_blocks"
    with pytest.raises(JournalFullError):
        await journal.commit([Append(make_record(1))])
    connection.fails_at = None

    assert await journal.commit([Append(make_record(1))]) == [(1, False)]
    assert await fill(journal, 1) == [2]
    assert (await journal.verify()).is_sound
    await journal.close()


@pytest.mark.parametrize("fails_at", ["ROLLBACK TO part", "ROLLBACK"])
async def test_what_cannot_be_undone_is_not_committed(path: Path, fails_at: str) -> None:
    def work(db: sqlite3.Connection) -> None:
        create_stock(db)
        connection.fails_at = fails_at
        raise ZeroDivisionError

    journal, connection = open_counted(path)
    with pytest.raises((JournalError, ZeroDivisionError)):
        await journal.transact(work)
    connection.fails_at = None

    assert await fill(journal, 1) == [1]
    assert sql(path, "SELECT * FROM sqlite_master WHERE name = 'stock'") == []
    assert (await journal.verify()).is_sound
    await journal.close()


async def test_the_writer_outlives_a_fault_between_commits(path: Path) -> None:
    journal, _ = open_counted(path)
    failed = threading.Event()

    class Broken:
        def operations(self, appended: object, before: int) -> Sequence[Operation]:
            return []

        def committed(self, kept: bool) -> None:
            failed.set()
            raise KeyboardInterrupt

    journal.attach([Broken()], await join(journal))
    assert await journal.commit([Append(make_record(1))]) == [(1, False)]
    assert failed.is_set()
    journal.attach([], None)

    assert await fill(journal, 1) == [2]
    await journal.close()
