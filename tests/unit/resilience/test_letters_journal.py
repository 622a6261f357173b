"""Dead letters in a journal: who waits for whom, what is stored, and what can go wrong."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from msgbus import ConfigurationError, MessageBus
from msgbus.errors import DeadLetterStoreError, LetterNotFoundError
from msgbus.journal import Journal, Kind, MemoryJournal, Retention, SqliteJournal
from msgbus.journal.letters import LetterSelection, StoredLetter
from msgbus.journal.operations import Append
from msgbus.resilience import (
    DeadLetterQueue,
    JournalDeadLetterStore,
    LetterFilter,
    LetterStatus,
    Overflow,
    ResilientMessageBus,
)
from msgbus.resilience.dead_letters.filters import ANY
from msgbus.resilience.dead_letters.store import Notice, discarded
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.conformance.dead_letters import Checked, add, letter, raises
from msgbus.testing.conformance.journal import make_record
from tests.unit.resilience.letter_fakes import CardCharged, ChargeCard


class Rot13:
    """Stands for encryption: what is stored is not what was given."""

    def encode(self, payload: bytes, associated: bytes) -> bytes:
        return bytes(byte ^ 0x5A for byte in payload)

    decode = encode


class Later:
    """A journal that is opened some day."""

    def __init__(self) -> None:
        self.journal: Journal | None = None

    def __call__(self) -> Journal | None:
        return self.journal


def opened(folder: Path, **options: object) -> SqliteJournal:
    return SqliteJournal(folder / "journal.db", **{"reserve": 0, **options})  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


@contextmanager
def beside(folder: Path) -> Generator[sqlite3.Connection]:
    """A connection of somebody else's."""
    with closing(sqlite3.connect(folder / "journal.db", isolation_level=None)) as connection:
        yield connection


async def dead(journal: MemoryJournal | SqliteJournal) -> list[StoredLetter]:
    """The letters of a journal that are dead."""
    return await journal.find_letters(LetterSelection(statuses=("dead",)))


async def numbers(journal: MemoryJournal | SqliteJournal) -> list[int]:
    return [one.record.json()["number"] for one in await dead(journal) if one.record is not None]


def told(store: JournalDeadLetterStore) -> list[str]:
    notices: list[str] = []

    def hear(notice: Notice) -> None:
        notices.append(f"{notice.kind} {notice.letter.message.number}: {notice.reason}")  # type: ignore[attr-defined]

    store.listen(hear)
    return notices


# -- a bus -------------------------------------------------------------------------------------


async def test_what_fails_on_a_bus_is_in_its_journal(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        store = JournalDeadLetterStore(journal)
        async with ResilientMessageBus(retry=None, breaker=None, dead_letters=store) as bus:

            async def charge(command: ChargeCard) -> str:
                raise ConnectionError(f"no answer for {command.order}")

            async def note(event: CardCharged) -> None:
                raise ValueError(event.note)

            bus.register_command_handler(ChargeCard, charge)
            bus.register_event_handler(CardCharged, note, name="note")
            result = await bus.execute(ChargeCard(order=1))
            await bus.publish(CardCharged(order=2))
            await bus.settled()
            await store.flush()
            assert bus.stats().dead_letters == 2

        assert not result.success
        (_, _, command, record), (_, _, event, _) = await dead(journal)
        assert command is not None
        assert event is not None
        assert record is not None
        assert (record.kind, command.answered) == (Kind.COMMAND, True)
        assert record.json() == {"order": 1}
        assert (event.handler, event.error_type) == ("note", "ValueError")
        assert bus.stats().dead_letters == 2


async def test_a_bus_replays_from_its_journal(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        store = JournalDeadLetterStore(journal)
        async with ResilientMessageBus(retry=None, breaker=None, dead_letters=store) as bus:
            broken = True
            handled: list[int] = []

            async def note(event: CardCharged) -> None:
                if broken:
                    raise ValueError
                handled.append(event.order)

            bus.register_event_handler(CardCharged, note, name="note")
            await bus.publish(CardCharged(order=2))
            await bus.settled()
            failed = await bus.dead_letters.replay_all()
            broken = False
            report = await bus.dead_letters.replay_all()

        assert (failed.failed, report.succeeded, handled) == (1, 1, [2])
        assert await dead(journal) == []


async def test_a_letter_in_the_journal_of_a_bus_has_the_times_of_its_clock() -> None:
    clock = VirtualClock()
    async with (
        MemoryJournal(clock=clock) as journal,
        ResilientMessageBus(retry=None, breaker=None, clock=clock, journal=journal) as bus,
    ):

        async def charge(command: ChargeCard) -> str:
            raise ConnectionError

        bus.register_command_handler(ChargeCard, charge)
        await bus.execute(ChargeCard(order=1))
        (letter,) = await bus.dead_letters.find()
        (stored,) = await dead(journal)
        added = clock.time()
        await clock.advance(60)
        await bus.dead_letters.discard(letter, "no longer wanted")
        (kept,) = await journal.find_letters(LetterSelection())

    assert (stored.row.time, kept.row.time) == (added, added + 60)


async def test_letters_are_kept_in_memory_without_a_journal() -> None:
    async with ResilientMessageBus() as bus:
        assert not isinstance(bus.dead_letters.store, JournalDeadLetterStore)


async def test_a_bus_that_was_never_used_opens_no_journal(tmp_path: Path) -> None:
    bus = ResilientMessageBus(journal=f"sqlite:///{tmp_path}/journal.db")

    before = bus.stats().dead_letters
    await bus.stop()

    assert (before, bus.stats().dead_letters) == (0, 0)
    assert names(tmp_path) == []


async def test_a_bus_that_was_never_started_keeps_what_failed(tmp_path: Path) -> None:
    async def charge(command: ChargeCard) -> str:
        raise ConnectionError(f"no answer for {command.order}")

    def make() -> ResilientMessageBus:
        url = f"sqlite:///{tmp_path}/journal.db"
        bus = ResilientMessageBus(journal=url, retry=None, breaker=None)
        bus.register_command_handler(ChargeCard, charge)
        return bus

    bus = make()
    assert not (await bus.execute(ChargeCard(order=1))).success
    await bus.stop()
    assert bus.stats().dead_letters == 1

    bus = make()
    assert [one.message for one in await bus.dead_letters.find()] == [ChargeCard(order=1)]
    await bus.stop()


# -- writing -----------------------------------------------------------------------------------


async def test_a_letter_is_written_though_nobody_asks(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        store = JournalDeadLetterStore(journal)
        await store.open()
        version = await journal.changed(-1)

        assert store.add(letter(1)) is None
        await journal.changed(version)

        assert len(await dead(journal)) == 1
        await store.close()


async def test_letters_come_from_any_thread(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        store = JournalDeadLetterStore(journal)
        await store.open()
        given = [letter(number) for number in range(40)]

        async with anyio.create_task_group() as tasks:
            for one in given:
                tasks.start_soon(anyio.to_thread.run_sync, store.add, one)
        await store.flush()

        assert {one.message_id for one in await DeadLetterQueue(store).find()} == {
            one.message_id for one in given
        }
        assert await anyio.to_thread.run_sync(store.size) == 40
        await store.close()


async def test_letters_wait_for_a_journal_that_is_opened_later() -> None:
    later = Later()
    store = JournalDeadLetterStore(later)
    assert store.add(letter(1)) is None
    assert store.size() == 0
    for question in (store.open(), store.flush(), store.count(ANY)):
        error = await raises(DeadLetterStoreError, question)
        assert "Start the bus first" in str(error)

    async with MemoryJournal(clock=VirtualClock()) as journal:
        later.journal = journal
        await store.open()

        assert await store.count(ANY) == 1
        assert store.size() == 1
        await store.close()


async def test_letters_whose_journal_never_came_are_told_as_lost() -> None:
    store = JournalDeadLetterStore(Later())
    notices = told(store)
    store.add(letter(1))

    await store.close()

    assert len(notices) == 1
    assert notices[0].startswith("refused 1: DeadLetterStoreError: The journal of these dead ")
    assert store.add(letter(2)) == "the store is closed"


async def test_letters_that_a_closed_journal_cannot_take_are_told_as_lost(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    store = JournalDeadLetterStore(journal)
    await store.open()
    notices = told(store)
    await add(store, letter(1))
    assert store.size() == 1
    await journal.close()

    store.add(letter(2))
    await store.close()

    assert len(notices) == 1
    assert notices[0].startswith("refused 2: JournalClosedError: The journal ")
    assert store.size() == 1


@pytest.mark.parametrize("overflow", Overflow)
async def test_the_line_to_the_journal_is_bounded(overflow: Overflow) -> None:
    later = Later()
    store = JournalDeadLetterStore(later, overflow=overflow, buffer=2)
    notices = told(store)

    refused = [store.add(letter(number)) for number in range(3)]

    async with MemoryJournal(clock=VirtualClock()) as journal:
        later.journal = journal
        await store.open()
        kept = await numbers(journal)
        if overflow is Overflow.REJECT:
            assert refused == [None, None, "the store does not keep up (2 letters wait for it)"]
            assert (kept, notices) == ([0, 1], [])
        else:
            assert refused == [None, None, None]
            assert (kept, notices) == ([1, 2], ["dropped 0: the store does not keep up"])
        await store.close()


async def test_a_letter_that_cannot_be_written_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        store = JournalDeadLetterStore(journal)
        await store.open()
        notices = told(store)

        for one in (letter(1), letter(2, handler="\ud800"), letter(3)):
            store.add(one)
        await store.flush()

        assert await numbers(journal) == [1, 3]
        assert notices == ["refused 2: it cannot be written: UnicodeEncodeError"]
        await store.close()


async def test_letters_wait_for_a_file_that_others_keep_locked(tmp_path: Path) -> None:
    async with opened(tmp_path, lock_timeout=0.01) as journal:
        store = JournalDeadLetterStore(journal)
        await store.open()
        notices = told(store)
        with beside(tmp_path) as other:
            other.execute("BEGIN IMMEDIATE")
            store.add(letter(1))
            error = await raises(DeadLetterStoreError, store.flush())
            assert "is locked by another process" in str(error)
            other.execute("COMMIT")

        await store.flush()

        assert (await store.count(ANY), notices) == (1, [])
        await store.close()


async def test_two_event_loops_share_a_store(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        store = JournalDeadLetterStore(journal)
        await store.open()

        async def elsewhere() -> int:
            store.add(letter(2))
            await store.flush()
            return await store.count(ANY)

        store.add(letter(1))
        number = await anyio.to_thread.run_sync(anyio.run, elsewhere)

        assert number == await store.count(ANY) == 2
        await store.close()


# -- what is stored ----------------------------------------------------------------------------


async def test_the_journals_codec_has_the_payload(tmp_path: Path) -> None:
    async with opened(tmp_path, codec=Rot13()) as journal:
        store = JournalDeadLetterStore(journal)
        await store.open()
        given = letter(7)
        await add(store, given)
        with beside(tmp_path) as other:
            (body,) = other.execute("SELECT body FROM msgbus_pending").fetchone()
        assert Rot13().encode(given.payload.encode(), b"") in bytes(body)

        await store.change(given.letter_id, lambda old: discarded(old, "no"))

        found = await store.get(given.letter_id)
        assert found is not None
        assert (found.message, found.note) == (Checked(number=7), "no")
        await store.close()


async def test_a_damaged_letter_is_an_error_and_never_another_letter(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        queue = DeadLetterQueue(JournalDeadLetterStore(journal))
        await queue.open()
        given = letter(1)
        await add(queue.store, given)
        assert (await journal.verify()).is_sound
        with beside(tmp_path) as other:
            other.execute("UPDATE msgbus_letters SET handler = 'other'")

        error = await raises(DeadLetterStoreError, queue.find(status=None)._all())  # pyright: ignore[reportPrivateUsage]

        assert "its checksum" in str(error)
        await raises(LetterNotFoundError, queue.get(given))
        report = await journal.verify()
        assert "letter" in report.problems[0]
        await queue.close()


async def test_letters_that_are_done_go_with_their_messages(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        queue = DeadLetterQueue(JournalDeadLetterStore(journal))
        await queue.open()
        given = [letter(number) for number in range(3)]
        await add(queue.store, *given)
        records = [make_record(1, message_id=one.message_id) for one in given]
        await journal.commit([Append(record) for record in (*records, make_record(4))])
        await queue.discard(given[0], "no")
        await queue.discard(given[2], "no")

        await journal.trim(Retention(max_count=2))

        found = {one.letter_id: one.status for one in await queue.find(status=None)}
        assert found == {
            given[1].letter_id: LetterStatus.DEAD,
            given[2].letter_id: LetterStatus.DISCARDED,
        }
        await queue.close()


# -- misuse ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_size": 0}, {"buffer": 0}])
def test_bounds_are_above_zero(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="must be above 0"):
        JournalDeadLetterStore(Later(), **options)  # type: ignore[arg-type]


async def test_a_journal_without_letters_is_refused() -> None:
    # Not a journal at all: one that keeps no letters in a table is found out the same way.
    store = JournalDeadLetterStore(MessageBus)  # type: ignore[arg-type]

    error = await raises(ConfigurationError, store.open())

    assert "SqliteDeadLetterStore(path)" in str(error)


async def test_a_closed_store_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        store = JournalDeadLetterStore(journal)
        await store.open()
        await store.close()

        error = await raises(DeadLetterStoreError, store.put([letter(1)]))

        assert "Open it again" in str(error)
        assert await store.count(LetterFilter()) == 0
