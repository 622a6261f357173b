"""What a bus says of its journal when it starts, above all after an unclean end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from msgbus import Command, Event, MessageBus
from msgbus.journal.operations import Pass, Put
from msgbus.journal.ports import Journal
from msgbus.journal.records import Pending, Selection, State
from tests.fakes import Recorder, logged
from tests.unit.durable.conftest import Site
from tests.unit.durable.places import OrderPlaced, OrderShipped, Place, journal_of, orders


class Remind(Event, name="finding.Remind"):
    pass


class Pack(Command, name="finding.Pack"):
    number: int


async def pack(command: Pack) -> None:
    pass


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="msgbus")


def opened(caplog: pytest.LogCaptureFixture) -> Mapping[str, Any]:
    """The last line of its kind."""
    return logged(caplog, "journal_opened")[-1]


async def test_a_new_journal_is_empty(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    bus = MessageBus(journal=place())
    bus.subscribe(OrderPlaced, Recorder(), durable="receipts")
    async with bus:
        found = dict(opened(caplog))

    assert found.pop("journal")
    assert found == {
        "event": "journal_opened",
        "bus": "msgbus",
        "messages_up_to": 0,
        "subscriptions": 0,
        "behind": 0,
        "in_doubt": 0,
        "unclean": (),
        "unattended": (),
        "scheduled": 0,
        "overdue": 0,
        "next_due": None,
        "enqueued": 0,
        "dead_letters": 0,
    }


async def test_a_clean_end_leaves_nothing_in_doubt(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        bus = MessageBus(journal=place())
        bus.subscribe(OrderPlaced, Recorder(), durable="receipts")
        async with bus:
            await bus.publish_many(orders(3))
            await bus.settled()

    found = opened(caplog)
    assert (found["messages_up_to"], found["subscriptions"]) == (3, 1)
    assert (found["behind"], found["in_doubt"], found["unclean"]) == (0, 0, ())


async def _interrupted(
    journal: Journal, name: str, *, acked: int, fetched: int, kept: Sequence[int] = ()
) -> None:
    """Leave a subscription as a process does that ends in the middle of its work."""
    selection = Selection()
    await journal.open(name, selection, acked)
    member = await journal.join("::1:", {name: ""})
    cursor = await journal.acquire(member, name, 0, selection)
    assert cursor is not None
    row = Pending(name, 0, 0, None, State.KEPT, 1, None, None, 1, False, None, 0.0)
    rows = [Put(row._replace(offset=offset)) for offset in kept]
    await journal.commit([*rows, Pass(cursor, acked, fetched)], member)
    await journal.end(member)


async def test_what_was_handed_out_is_counted_as_it_will_be_delivered_again(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async with MessageBus(journal=place()) as first:
        journal = journal_of(first)
        for number in range(4):
            await first.publish(OrderPlaced(number=number), topic="shop.orders")
            await first.publish(OrderShipped(number=number), topic="depot.orders")
        # Done up to 1 of the eight, handed out up to 5: of its own, 3 and 5.
        await _interrupted(journal, "placed", acked=1, fetched=5)
        # The same, but it has kept that 3 is handled.
        await _interrupted(journal, "marked", acked=1, fetched=5, kept=[3])
        # By topic: 2, 4, 6 of what was handed out up to 7.
        await _interrupted(journal, "depot", acked=0, fetched=7)
        # All done, and five to come.
        await _interrupted(journal, "clean", acked=3, fetched=3)
        await _interrupted(journal, "renamed", acked=0, fetched=0)
        caplog.clear()

        second = MessageBus(journal=place())
        seen = {name: Recorder() for name in ("placed", "marked", "depot", "clean")}
        second.subscribe(OrderPlaced, seen["placed"], durable="placed")
        second.subscribe(OrderPlaced, seen["marked"], durable="marked", idempotent=True)
        second.subscribe("depot.**", seen["depot"], durable="depot")
        second.subscribe(OrderShipped, seen["clean"], durable="clean")
        async with second:
            found = opened(caplog)
            await second.settled()

    assert found["in_doubt"] == 2 + 1 + 3
    assert found["unclean"] == ("depot", "marked", "placed")
    assert found["unattended"] == ("renamed",)
    assert found["subscriptions"] == 5
    assert found["behind"] == 7 + 7 + 8 + 5
    assert seen["placed"].numbers == [1, 2, 3]
    assert seen["marked"].numbers == [2, 3]
    assert seen["depot"].numbers == [0, 1, 2, 3]


async def test_schedules_and_enqueued_commands_are_counted(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    begun = site.clock.time()
    async with site.bus() as first:
        await first.publish(Remind(), delay=60)
        await first.publish(Remind(), delay=3600)
        await first.enqueue(Pack(number=1), delay=3600)
        await first.enqueue(Pack(number=2))
    await site.clock.advance(600)

    async with site.bus():
        found = opened(caplog)

    assert (found["scheduled"], found["overdue"], found["enqueued"]) == (2, 1, 2)
    assert found["next_due"] == pytest.approx(begun + 60)


_DIES = """
import os, sys
import anyio
from msgbus import MessageBus
from tests.unit.durable.places import OrderPlaced, orders
from tests.unit.durable.test_finding import Pack, Remind

async def handler(event: OrderPlaced) -> None:
    if event.number == 3:
        os._exit(9)

async def main():
    bus = MessageBus(journal=sys.argv[1])
    bus.subscribe(OrderPlaced, handler, durable="receipts")
    async with bus:
        await bus.publish(Remind(), delay=3600)
        await bus.enqueue(Pack(number=1))
        await bus.publish_many(orders(6))
        await anyio.sleep_forever()

anyio.run(main)
"""


def test_after_a_process_has_died_the_next_says_what_it_takes_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path / 'journal.db'}"
    ended = subprocess.run([sys.executable, "-c", _DIES, url], timeout=60, check=False)
    assert ended.returncode == 9
    seen = Recorder()

    async def start_again() -> None:
        bus = MessageBus(journal=url)
        bus.subscribe(OrderPlaced, seen, durable="receipts")
        bus.register_command_handler(Pack, pack)
        async with bus:
            await bus.settled()

    anyio.run(start_again)
    found = opened(caplog)
    redelivered = found["in_doubt"]
    assert found["unclean"] == ("receipts",)
    # All that the dead process was given and that it did not write down as done.
    assert redelivered == len([number for number in seen.numbers if number < 6])
    assert 3 in seen.numbers
    assert seen.numbers[-1] == 5
    assert found["behind"] >= redelivered > 0
    assert found["enqueued"] == 1
    assert (found["scheduled"], found["overdue"]) == (1, 0)
