"""idempotent=True on the bus: a marked message is never delivered again.

With `tx.acknowledge()` the effect and the marker are one commit, so that even a crash between
that commit and the ack repeats nothing.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from msgbus import Context, MessageBus
from msgbus.errors import BusStateError
from msgbus.journal.records import State
from msgbus.resilience.config import RetryConfig
from tests.durable_shop import dead_letters, journal_of, records
from tests.fakes import Recorder, conserves, logged
from tests.unit.durable.places import OrderPlaced, Place, orders


async def marked(bus: MessageBus, subscription: str) -> list[int]:
    """The numbers of the events that a subscription has kept as handled."""
    kept = {row.offset for row in await journal_of(bus).find(subscription, [State.KEPT])}
    return [one.json()["number"] for one in await records(bus) if one.offset in kept]


async def test_each_message_is_marked_with_its_ack_and_not_delivered_again(place: Place) -> None:
    bus = MessageBus(journal=place())
    careful, plain = Recorder(), Recorder()
    mine = bus.subscribe(OrderPlaced, careful, durable="careful", idempotent=True)
    other = bus.subscribe(OrderPlaced, plain, durable="plain")
    async with bus:
        await bus.publish_many(orders(3))
        await bus.settled()
        assert await marked(bus, "careful") == [0, 1, 2]
        assert await marked(bus, "plain") == []

        for subscription in (mine, other):
            await subscription.seek(1)
        await bus.publish(OrderPlaced(number=3))
        await bus.settled()
        stats = bus.stats().subscriptions["careful"]

    assert careful.numbers == [0, 1, 2, 3]
    assert plain.numbers == [0, 1, 2, 0, 1, 2, 3]
    assert (stats.skipped, stats.acked) == (3, 4)


async def test_markers_outlive_the_bus(place: Place) -> None:
    seen: list[list[int]] = []
    skipped: list[int] = []
    for _ in range(2):
        bus = MessageBus(journal=place())
        handler = Recorder()
        subscription = bus.subscribe(OrderPlaced, handler, durable="careful", idempotent=True)
        async with bus:
            await subscription.seek(1)
            await bus.publish(OrderPlaced(number=1))
            await bus.settled()
        seen.append(handler.numbers)
        skipped.append(bus.stats().subscriptions["careful"].skipped)

    assert seen == [[1], [1]]
    assert skipped == [0, 1]


async def test_a_try_that_fails_marks_nothing_and_its_transaction_is_undone() -> None:
    bus = MessageBus(journal="sqlite:///:memory:")
    tries: list[int] = []

    @bus.on(
        OrderPlaced,
        durable="careful",
        idempotent=True,
        retry=RetryConfig(max_retries=2, initial_delay=0),
    )
    async def careful(event: OrderPlaced, context: Context) -> None:
        async with context.bus.transaction() as tx:
            tx.execute("INSERT INTO effects VALUES (?)", [event.number])
            tx.acknowledge()
            tries.append(event.number)
            if len(tries) == 1:
                raise ValueError("not yet")

    async with bus:
        await bus.transact(lambda database: database.execute("CREATE TABLE effects (number)"))
        await bus.publish(OrderPlaced(number=7))
        await bus.settled()
        rows = await bus.transact(
            lambda database: database.execute("SELECT number FROM effects").fetchall()
        )
        assert await marked(bus, "careful") == [7]

    assert tries == [7, 7]
    assert rows == [(7,)]


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_failure_after_the_acknowledgement_is_told_of_and_not_tried_again(
    place: Place, caplog: pytest.LogCaptureFixture, idempotent: bool
) -> None:
    bus = MessageBus(journal=place())
    tries: list[int] = []

    @bus.on(OrderPlaced, durable="careful", idempotent=idempotent)
    async def careful(event: OrderPlaced, context: Context) -> None:
        tries.append(event.number)
        async with context.bus.transaction() as tx:
            tx.acknowledge()
        raise ValueError("too late")

    async with bus:
        await bus.publish_many(orders(2))
        await bus.settled()
        # Otherwise it is kept only until the cursor has passed it.
        assert await marked(bus, "careful") == ([0, 1] if idempotent else [])
        assert await dead_letters(bus, "careful") == []
        stats = bus.stats().subscriptions["careful"]

    assert tries == [0, 1]
    assert (stats.acked, stats.redelivered, stats.lag) == (2, 0, 0)
    assert len(logged(caplog, "handler_failed")) == 2
    conserves(bus)


async def test_it_cannot_be_acknowledged_outside_a_durable_handler(place: Place) -> None:
    bus = MessageBus(journal=place())
    errors: list[str] = []

    @bus.on(OrderPlaced, durable=False)
    async def fleeting(event: OrderPlaced, context: Context) -> None:
        async with context.bus.transaction() as tx:
            try:
                tx.acknowledge()
            except BusStateError as error:
                errors.append(str(error))

    async with bus:
        await bus.publish(OrderPlaced())
        await bus.settled()
        async with bus.transaction() as tx:
            with pytest.raises(BusStateError, match="not inside a durable handler"):
                tx.acknowledge()

    assert len(errors) == 1


_DIES = """
import os, sys
import anyio
from msgbus import Context, MessageBus
from tests.unit.durable.places import OrderPlaced, orders

url, acknowledges = sys.argv[1], sys.argv[2] == "acknowledges"

async def handler(event: OrderPlaced, context: Context) -> None:
    async with context.bus.transaction() as tx:
        tx.execute("INSERT INTO effects VALUES (?)", [event.number])
        if acknowledges:
            tx.acknowledge()
    if event.number == 2 and len(sys.argv) > 3:
        os._exit(9)

async def main():
    bus = MessageBus(journal=url)
    bus.subscribe(OrderPlaced, handler, durable="careful", idempotent=True)
    async with bus:
        if len(sys.argv) > 3:
            await bus.transact(lambda database: database.execute("CREATE TABLE effects (number)"))
            await bus.publish_many(orders(5))
        await bus.settled()

anyio.run(main)
"""


@pytest.mark.parametrize(("how", "times"), [("acknowledges", 1), ("does not", 2)])
def test_a_crash_between_the_commit_and_the_ack_repeats_no_effect(
    tmp_path: Path, how: str, times: int
) -> None:
    path = tmp_path / "journal.db"
    arguments = [sys.executable, "-c", _DIES, f"sqlite:///{path}", how]
    died = subprocess.run([*arguments, "dies"], timeout=60, check=False)
    assert died.returncode == 9
    subprocess.run(arguments, timeout=60, check=True)

    with closing(sqlite3.connect(path)) as database:
        effects = [number for (number,) in database.execute("SELECT number FROM effects")]
    # Without it the effect is there twice: the guarantee is at least once.
    assert effects.count(2) == times
    assert set(effects) == {0, 1, 2, 3, 4}
    if times == 1:
        assert effects == [0, 1, 2, 3, 4]
