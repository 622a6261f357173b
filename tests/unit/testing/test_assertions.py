"""The recorder's assertions: what they give, and what they say when they fail."""

from __future__ import annotations

import pytest

from msgbus import Command, Event, MessageBus
from msgbus.testing import Recorder, record


class PlaceOrder(Command):
    sku: str


class OrderEvent(Event):
    order_id: int


class OrderPlaced(OrderEvent):
    sku: str = "tea"


class StockReserved(OrderEvent):
    pass


async def ignore(message: object) -> None:
    pass


async def recorded() -> Recorder:
    """One command, and three events."""
    bus = MessageBus()
    bus.register_command_handler(PlaceOrder, ignore)
    async with record(bus) as recorder:
        await recorder.execute(PlaceOrder(sku="tea"))
        await recorder.publish(OrderPlaced(order_id=1))
        async with recorder.session("job") as session:
            await session.publish(OrderPlaced(order_id=2, sku="jam"))
        await recorder.publish(StockReserved(order_id=1))
    return recorder


async def test_assert_published_gives_the_first_match() -> None:
    recorder = await recorded()

    assert recorder.assert_published(OrderPlaced).order_id == 1
    assert recorder.assert_published(OrderPlaced, order_id=2).sku == "jam"
    assert recorder.assert_published(OrderEvent, order_id=1) == OrderPlaced(order_id=1)


async def test_assert_executed_gives_the_first_match() -> None:
    recorder = await recorded()

    assert recorder.assert_executed(PlaceOrder, sku="tea").sku == "tea"


async def test_metadata_can_be_asked_for_like_a_field() -> None:
    recorder = await recorded()

    assert recorder.assert_published(OrderPlaced, session_id="job").order_id == 2


async def test_assert_published_says_what_was_published_instead() -> None:
    recorder = await recorded()

    with pytest.raises(AssertionError) as caught:
        recorder.assert_published(OrderPlaced, order_id=9, sku="tea")

    assert str(caught.value).splitlines() == [
        "No OrderPlaced with order_id=9, sku='tea' was published. Published instead:",
        "  OrderPlaced(order_id=1, sku='tea')",
        "  OrderPlaced(order_id=2, sku='jam')",
        "  StockReserved(order_id=1)",
    ]


async def test_assert_executed_says_what_was_executed_instead() -> None:
    recorder = await recorded()

    with pytest.raises(AssertionError) as caught:
        recorder.assert_executed(PlaceOrder, sku="jam")

    assert str(caught.value).splitlines() == [
        "No PlaceOrder with sku='jam' was executed. Executed instead:",
        "  PlaceOrder(sku='tea')",
    ]


async def test_where_nothing_was_published_at_all_it_says_so() -> None:
    async with record(MessageBus()) as recorder:
        pass

    with pytest.raises(AssertionError, match=r"^No OrderPlaced was published\. Nothing was publ"):
        recorder.assert_published(OrderPlaced)


async def test_a_long_list_is_cut_and_says_by_how_much() -> None:
    async with record(MessageBus()) as recorder:
        await recorder.publish_many(StockReserved(order_id=number) for number in range(60))

    with pytest.raises(AssertionError) as caught:
        recorder.assert_published(OrderPlaced)

    lines = str(caught.value).splitlines()
    assert lines[-2:] == ["  StockReserved(order_id=49)", "  ... and 10 more"]


async def test_assert_not_published_holds_for_what_was_not() -> None:
    recorder = await recorded()

    recorder.assert_not_published(OrderPlaced, order_id=9)


async def test_assert_not_published_shows_what_was() -> None:
    recorder = await recorded()

    with pytest.raises(AssertionError) as caught:
        recorder.assert_not_published(OrderPlaced, sku="jam")

    assert str(caught.value).splitlines() == [
        "OrderPlaced with sku='jam' was published:",
        "  OrderPlaced(order_id=2, sku='jam')",
    ]


async def test_a_misspelt_field_is_an_error_and_not_a_match_that_never_is() -> None:
    recorder = await recorded()

    with pytest.raises(TypeError, match=r"no field ordr_id\. It has: order_id, sku"):
        recorder.assert_not_published(OrderPlaced, ordr_id=1)
    with pytest.raises(TypeError, match="no field ordr_id"):
        recorder.assert_published(OrderPlaced, ordr_id=1)
