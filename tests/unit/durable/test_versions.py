"""Old, newer and unknown messages in the journal, as handlers of the bus meet them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from msgbus import Event, MessageBus
from msgbus.journal import upcasts
from msgbus.journal.operations import Append
from msgbus.journal.records import Record
from msgbus.testing.conformance.journal.kit import make_record
from tests.durable_shop import dead_letters, journal_of, records
from tests.unit.durable.places import Place


class PriceSet(Event, name="versions.PriceSet", version=3):
    sku: str
    cents: int
    currency: str


@upcasts(PriceSet, from_version=1)
def euros_to_cents(data: dict[str, Any]) -> dict[str, Any]:
    return {"sku": data["sku"], "cents": data["euros"] * 100}


@upcasts(PriceSet, from_version=2)
def with_currency(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "currency": "EUR"}


class StockCounted(Event, name="versions.StockCounted", version=2):
    count: int


def record(number: int, name: str, version: int, payload: bytes) -> Record:
    return make_record(number, name=name, version=version, payload=payload, topic="shop.prices")


async def append(bus: MessageBus, *several: Record) -> None:
    await journal_of(bus).commit([Append(one) for one in several])


async def test_a_handler_gets_old_versions_as_the_new_class(place: Place) -> None:
    bus = MessageBus(journal=place())
    seen: list[PriceSet] = []

    @bus.on(PriceSet, durable="prices")
    async def price(event: PriceSet) -> None:
        seen.append(event)

    await append(
        bus,
        record(1, "versions.PriceSet", 1, b'{"sku": "tea", "euros": 3}'),
        record(2, "versions.PriceSet", 2, b'{"sku": "tea", "cents": 250}'),
    )
    async with bus:
        await bus.publish(PriceSet(sku="tea", cents=199, currency="USD"))
        await bus.settled()
        stored = [one.version for one in await records(bus)]

    assert [(one.cents, one.currency) for one in seen] == [
        (300, "EUR"),
        (250, "EUR"),
        (199, "USD"),
    ]
    assert stored == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "version", "payload", "error"),
    [
        ("versions.PriceSet", 9, b"{}", "has version 9, .* at version 3. Deploy the newer class"),
        ("versions.StockCounted", 1, b'{"n": 1}', r"Add @upcasts\(StockCounted, from_version=1\)"),
        ("versions.PriceSet", 3, b'{"sku": "tea"}', "does not fit PriceSet"),
        ("versions.PriceSet", 1, b'{"sku": "tea"}', "An upcaster of PriceSet failed"),
        ("versions.Unknown", 1, b'{"a": 1}', "no event class of that name"),
    ],
)
async def test_what_cannot_be_read_is_a_dead_letter_at_once_and_holds_up_nobody(
    place: Place, name: str, version: int, payload: bytes, error: str
) -> None:
    bus = MessageBus(journal=place())
    seen: list[Event] = []

    @bus.on("shop.**", durable="everything of the shop")
    async def anything(event: Event) -> None:
        seen.append(event)

    await append(bus, record(1, name, version, payload))
    good = StockCounted(count=4)
    async with bus:
        await bus.publish(good, topic="shop.stock")
        await bus.settled()
        (dead,) = await dead_letters(bus, "everything of the shop")
        stats = bus.stats().subscriptions["everything of the shop"]

    assert seen == [good]
    assert dead.row.attempt == 1
    assert dead.row.error is not None
    assert dead.record.payload == payload
    assert dead.record.name == name
    assert re.search(error, dead.row.error)
    assert (stats.dead_lettered, stats.redelivered) == (1, 0)
