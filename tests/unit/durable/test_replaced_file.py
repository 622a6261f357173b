"""A bus whose journal's file is moved, deleted, replaced or emptied while it runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from msgbus import MessageBus
from msgbus.errors import DeadLetterStoreError, JournalError
from msgbus.journal.sqlite import transactions
from msgbus.resilience import DeadLetterQueue, LetterFilter, SqliteDeadLetterStore
from msgbus.testing.conformance.dead_letters import letter
from msgbus.testing.conformance.journal.kit import until
from tests.durable_shop import Placed, url_of
from tests.fakes import logged
from tests.unit.durable.packing import Pack
from tests.unit.journal.sqlite.deeds import DEEDS, do

GONE: Final = "moved, deleted, replaced or emptied"


@pytest.fixture(autouse=True)
def no_commit_is_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test does within a millisecond what nobody does."""
    monkeypatch.setattr(transactions, "FRESH", 0.0)


async def in_transaction(bus: MessageBus) -> None:
    async with bus.transaction() as tx:
        tx.execute("CREATE TABLE orders (number)")
        await bus.publish(Placed(number=1))


CALLS: Final[dict[str, Callable[[MessageBus], Awaitable[Any]]]] = {
    "publish": lambda bus: bus.publish(Placed(number=1)),
    "publish later": lambda bus: bus.publish(Placed(number=1), delay=9),
    "publish_many": lambda bus: bus.publish_many([Placed(number=n) for n in range(9)]),
    "enqueue": lambda bus: bus.enqueue(Pack(number=1)),
    "transaction": in_transaction,
    "ticket": lambda bus: bus.ticket("unknown"),
}


def bus_on(path: Path, *seen: Any) -> MessageBus:
    bus = MessageBus(
        journal=f"{url_of(path.parent).rpartition('/')[0]}/{path.name}?reserve=0&member_ttl=0.4"
    )
    for handler in seen:
        bus.subscribe(Placed, handler, name="orders")
    return bus


@pytest.mark.parametrize("deed", DEEDS)
async def test_the_next_call_raises_whatever_it_is(tmp_path: Path, deed: str) -> None:
    path = tmp_path / "data" / "shop.db"
    await anyio.Path(path.parent).mkdir()
    handled = anyio.Event()

    async def seen(_: Placed) -> None:
        handled.set()

    bus = bus_on(path, seen)
    await bus.start()
    await bus.publish(Placed())
    await handled.wait()
    await do(deed, path)

    for call in CALLS.values():
        with pytest.raises(JournalError, match=GONE):
            await call(bus)

    await bus.stop()


async def test_a_bus_that_only_waits_says_so_and_goes_on_when_the_file_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, numbers = tmp_path / "shop.db", list[int]()
    arrived = anyio.Event()

    async def seen(event: Placed) -> None:
        numbers.append(event.number)
        if event.number == 2:
            arrived.set()

    def failures() -> set[Any]:
        lines = [*logged(caplog, "journal_task_failed"), *logged(caplog, "membership_failed")]
        return {line.get("task", "membership") for line in lines if GONE in line["error"]}

    async with bus_on(path, seen), bus_on(path) as shop:
        await shop.publish(Placed(number=1))
        await do("move", path)
        with anyio.fail_after(20):
            await until(lambda: failures() >= {"journal changes", "membership"})
        with pytest.raises(JournalError, match=GONE):
            await shop.publish(Placed(number=3))
        await anyio.Path(path.with_name("moved.db")).rename(path)

        await shop.publish(Placed(number=2))
        with anyio.fail_after(20):
            await arrived.wait()
    assert numbers == [1, 2]  # what was refused was not written


async def test_what_could_not_be_acknowledged_comes_again(tmp_path: Path) -> None:
    path, attempts = tmp_path / "shop.db", list[int]()
    begun, moved = anyio.Event(), anyio.Event()

    async def seen(event: Placed) -> None:
        attempts.append(event.number)
        begun.set()
        await moved.wait()

    bus = bus_on(path, seen)
    await bus.start()
    await bus.publish(Placed(number=1))
    await begun.wait()
    await do("move", path)
    moved.set()
    await bus.stop()
    await anyio.Path(path.with_name("moved.db")).rename(path)

    async with bus_on(path, seen):
        with anyio.fail_after(20):
            await until(lambda: attempts == [1, 1])


@pytest.mark.parametrize("deed", DEEDS)
async def test_letters_for_a_file_that_is_gone_are_refused(
    tmp_path: Path, deed: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data" / "letters.db"
    await anyio.Path(path.parent).mkdir()
    async with DeadLetterQueue(SqliteDeadLetterStore(path)) as queue:
        queue.store.add(letter(1))
        await queue.store.flush()
        assert logged(caplog, "dead_letter_refused") == []
        await do(deed, path)

        queue.store.add(letter(2))
        await queue.store.flush()
        (refused,) = logged(caplog, "dead_letter_refused")
        assert GONE in refused["reason"]
        with pytest.raises(DeadLetterStoreError, match=GONE):
            await queue.store.page(LetterFilter(), limit=1)


OTHER: Final = """
import asyncio, sys
from msgbus.journal import SqliteJournal
from msgbus.testing.conformance.journal.kit import fill

async def main():
    journal = SqliteJournal(sys.argv[1], reserve=0)
    for line in sys.stdin:
        try:
            print(await fill(journal, 1), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("deed", DEEDS)
def test_another_process_that_has_it_open_is_told_as_well(tmp_path: Path, deed: str) -> None:
    path = tmp_path / "data" / "shop.db"
    path.parent.mkdir()
    command = [sys.executable, "-c", OTHER, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def publish() -> str:
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return process.stdout.readline()  # type: ignore[union-attr]

        assert publish() == "[1]\n"
        DEEDS[deed](path)
        said = publish()
        process.stdin.close()

    assert "JournalError" in said
    assert GONE in said
