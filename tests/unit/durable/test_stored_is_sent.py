"""Wherever a message is stored, it is what was sent, or it is refused and nothing is done."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from pydantic import BaseModel

from msgbus import Command, Context, Event, MessageBus
from msgbus.bus.durable.outbox import OutboxEntry
from msgbus.errors import StoredMessageError, TicketFailedError
from tests.durable_shop import recorded
from tests.fakes import logged
from tests.unit.durable.conftest import Site


class Parcel(BaseModel):
    weight: int = 1


class Fragile(Parcel):
    note: str = "this side up"


class Sent(Event, name="stored.Sent"):
    number: int = 0
    parcels: tuple[Parcel, ...] = ()


class Send(Command[Parcel], name="stored.Send"):
    number: int = 0
    parcel: Parcel = Parcel()


GOOD = Sent(parcels=(Parcel(),))
FIELD = r"parcels\[1\] would not come back as it was sent: a Fragile is written as a Parcel"


def bad(number: int = 0) -> Sent:
    return Sent(number=number, parcels=(Parcel(), Fragile()))


class Seen:
    """A handler that notes what it was given."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    async def __call__(self, event: Sent) -> None:
        self.numbers.append(event.number)


def watched(site: Site) -> tuple[MessageBus, Seen, Seen]:
    bus, here, durable = site.bus(), Seen(), Seen()
    bus.subscribe(Sent, here, name="here", durable=False)
    bus.subscribe(Sent, durable, name="durable", durable=True)
    return bus, here, durable


async def many(bus: MessageBus) -> None:
    await bus.publish_many([Sent(number=1), bad(), Sent(number=2)])


async def in_transaction(bus: MessageBus) -> None:
    async with bus.transaction():
        await bus.publish(Sent(number=1))
        await bus.publish(bad())


WAYS: dict[str, tuple[Callable[[MessageBus], Coroutine[Any, Any, Any]], list[int]]] = {
    "publish": (lambda bus: bus.publish(bad()), []),
    "wait": (lambda bus: bus.publish(bad(), wait=True), []),
    "delayed": (lambda bus: bus.publish(bad(), delay=5), []),
    "many": (many, [1]),
    "transaction": (in_transaction, []),
    "enqueue": (lambda bus: bus.enqueue(Send(parcel=Fragile())), []),
}


@pytest.mark.parametrize("way", WAYS)
async def test_what_would_change_is_refused_and_nothing_is_done(site: Site, way: str) -> None:
    send, published = WAYS[way]
    bus, here, durable = watched(site)
    async with bus:
        with pytest.raises(StoredMessageError, match="Fragile is written as a Parcel") as caught:
            await send(bus)
        await site.clock.advance(10)
        await bus.settled()

        assert caught.value.field == ("parcel" if way == "enqueue" else "parcels[1]")
        assert len(await recorded(bus)) == len(published)
        assert here.numbers == durable.numbers == published

        await bus.publish(GOOD)
        await bus.settled()

        assert len(here.numbers) == len(durable.numbers) == len(published) + 1


async def test_an_emitted_event_that_would_change_fails_the_command(site: Site) -> None:
    bus, here, durable = watched(site)

    @bus.handles(Send)
    async def send(command: Send, context: Context) -> Parcel:
        context.emit(bad())
        context.emit(Sent(number=1))
        return command.parcel

    async with bus:
        result = await bus.execute(Send())
        await bus.settled()

        with pytest.raises(StoredMessageError, match=FIELD):
            result.unwrap()
        assert here.numbers == durable.numbers == [1]


async def test_a_command_that_would_change_is_handled_and_logged_as_not_recorded(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    bus = site.bus()

    @bus.handles(Send)
    async def send(command: Send) -> Parcel:
        return command.parcel

    async with bus:
        assert (await bus.execute(Send(parcel=Fragile()))).value == Fragile()
        await bus.settled()

        assert await recorded(bus) == []
        (entry,) = logged(caplog, "command_not_recorded")
        assert "parcel would not come back" in entry["error"]


async def test_a_reply_that_would_change_fails_its_ticket(site: Site) -> None:
    bus = site.bus()
    handled: list[int] = []

    @bus.handles(Send)
    async def send(command: Send) -> Parcel:
        handled.append(command.number)
        return Fragile() if command.number else Parcel(weight=5)

    async with bus:
        good = await bus.enqueue(Send())
        wrong = await bus.enqueue(Send(number=1))

        assert await good.result(timeout=30) == Parcel(weight=5)
        with pytest.raises(TicketFailedError, match=r"reply cannot be kept: .*Parcel \| Fragile"):
            await wrong.result(timeout=30)
        assert sorted(handled) == [0, 1]


def test_an_event_that_would_change_gets_into_no_outbox() -> None:
    with pytest.raises(StoredMessageError, match=FIELD):
        OutboxEntry.of(bad())

    assert OutboxEntry.of(GOOD).payload == '{"number":0,"parcels":[{"weight":1}]}'


async def test_without_a_journal_nothing_is_compared() -> None:
    seen: list[Parcel] = []
    async with MessageBus() as bus:

        @bus.on(Sent)
        async def keep(event: Sent) -> None:
            seen.extend(event.parcels)

        await bus.publish(bad())
        await bus.settled()

    assert seen == [Parcel(), Fragile()]
