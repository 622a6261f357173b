"""Messages become records and come back, with old versions brought up to date."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
from pydantic import ConfigDict, Field, computed_field

from msgbus import Command, ConfigurationError, Context, Event, MessageBus
from msgbus.errors import StoredMessageError
from msgbus.journal import Kind, MessageCodec, RawMessage, Record, upcasts


class Placed(Event, name="shop.Placed", topic="shop.orders.placed", key="order_id"):
    order_id: int
    total: float = 0.0


class Cancel(Command[bool]):
    order_id: int


def codec_of(*types: Any) -> MessageCodec:
    return MessageCodec(types)


def old(record: Record, version: int, payload: bytes) -> Record:
    return record._replace(version=version, payload=payload)


# -- there and back ------------------------------------------------------------------------


def test_a_message_comes_back_equal_with_its_metadata() -> None:
    codec = codec_of(Placed)
    event = Placed(order_id=7, total=1.5)

    record = codec.encode(event, time=5.0)
    found = codec.decode(record)

    assert found == event
    assert type(found) is Placed
    assert found.message_id == event.message_id
    assert (record.name, record.version, record.kind) == ("shop.Placed", 1, Kind.EVENT)
    assert (record.topic, record.key, record.time) == ("shop.orders.placed", "7", 5.0)


def test_a_command_without_class_keywords_has_its_name_for_a_topic() -> None:
    record = MessageCodec().encode(Cancel(order_id=1), time=0.0)

    assert (record.kind, record.name, record.topic, record.key) == (
        Kind.COMMAND, "Cancel", "Cancel", None,
    )  # fmt: skip


async def test_cause_session_headers_and_depth_come_back() -> None:
    codec = MessageCodec()
    seen: list[Event] = []
    bus = MessageBus()

    @bus.handles(Cancel)
    async def cancel(command: Cancel, context: Context) -> bool:
        await context.publish(Placed(order_id=command.order_id), topic="elsewhere")
        return True

    @bus.on(Placed)
    async def note(event: Placed) -> None:
        seen.append(event)

    command = Cancel(order_id=1)
    async with bus, bus.session("job") as session:
        await session.execute(command, headers={"tenant": "a"})
        await bus.settled()

    record = codec.encode(seen[0], time=0.0)
    found = codec.decode(record)
    assert (record.root_id, record.depth, record.topic) == (command.message_id, 1, "elsewhere")
    assert found.causation_id == found.correlation_id == command.message_id
    assert (found.session_id, dict(found.headers)) == ("job", {"tenant": "a"})
    assert codec.encode(found, time=0.0) == record


def test_a_depth_is_counted_from_the_root() -> None:
    from msgbus.messages.message import fix, metadata_of

    first, second, third = (Placed(order_id=number) for number in range(3))
    fix(second, first)
    fix(third, second)

    assert [metadata_of(one).depth for one in (first, second, third)] == [0, 1, 2]
    assert metadata_of(third).root_id == first.message_id


def test_fields_come_back_whatever_their_aliases_and_computed_fields() -> None:
    class Odd(Event):
        model_config = ConfigDict(serialize_by_alias=True)
        size: int = Field(validation_alias="grösse", serialization_alias="taille")

        @computed_field
        def double(self) -> int:
            return self.size * 2

    event = Odd.model_validate({"grösse": 4})

    assert codec_of(Odd).decode(MessageCodec().encode(event, time=0.0)) == event


@pytest.mark.parametrize("total", [math.inf, -math.inf, 1e308, 0.1])
def test_floats_come_back_as_they_were(total: float) -> None:
    codec = codec_of(Placed)

    found = codec.decode(codec.encode(Placed(order_id=1, total=total), time=0.0))

    assert isinstance(found, Placed)
    assert found.total == total


def test_bytes_that_are_no_text_are_refused_with_the_cure() -> None:
    class Photo(Event):
        data: bytes

    class Base64Photo(Event):
        model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
        data: bytes

    codec = codec_of(Base64Photo)
    with pytest.raises(StoredMessageError, match="base64"):
        codec.encode(Photo(data=b"\xff"), time=0.0)

    cured = Base64Photo(data=b"\xff")
    assert codec.decode(codec.encode(cured, time=0.0)) == cured


# -- names ---------------------------------------------------------------------------------


def test_two_classes_of_one_name_are_refused() -> None:
    class Other(Event, name="shop.Placed"):
        pass

    with pytest.raises(ConfigurationError, match=r"'shop\.Placed'.*Give one of them another"):
        codec_of(Placed, Other)


def test_an_old_name_of_a_class_can_be_made_known() -> None:
    codec = codec_of(Placed)
    codec.register(Placed, name="OrderPlaced")
    record = codec.encode(Placed(order_id=1), time=0.0)._replace(name="OrderPlaced")

    assert codec.knows("OrderPlaced")
    assert isinstance(codec.decode(record), Placed)


def test_a_message_of_an_unknown_class_is_readable_and_can_be_stored_again() -> None:
    record = codec_of(Placed).encode(Placed(order_id=7), time=3.0)
    stranger = MessageCodec()

    found = stranger.decode(record)

    assert isinstance(found, RawMessage)
    assert (found.name, found.version, found.kind) == ("shop.Placed", 1, Kind.EVENT)
    assert found.data == record.json() == {"order_id": 7, "total": 0.0}
    assert found.message_id == record.message_id
    assert stranger.encode(found, time=3.0) == record._replace(key=None)


def test_an_unknown_payload_that_is_no_json_is_an_error_that_names_the_message() -> None:
    record = codec_of(Placed).encode(Placed(order_id=7), time=3.0)._replace(payload=b"\x00")

    with pytest.raises(StoredMessageError, match="is not JSON") as caught:
        MessageCodec().decode(record)

    assert caught.value.message_id == record.message_id


# -- versions ------------------------------------------------------------------------------


class Paid(Event, name="shop.Paid", version=3):
    amount: int
    currency: Literal["EUR", "USD"]


@upcasts(Paid, from_version=1)
def name_the_amount(data: dict[str, Any]) -> dict[str, Any]:
    return {"amount": data["value"]}


@upcasts(Paid, from_version=2)
def add_a_currency(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "currency": "EUR"}


@pytest.mark.parametrize(
    ("version", "payload"),
    [(1, b'{"value":5}'), (2, b'{"amount":5}'), (3, b'{"amount":5,"currency":"EUR"}')],
)
def test_old_versions_are_brought_up_step_by_step(version: int, payload: bytes) -> None:
    codec = codec_of(Paid)
    record = codec.encode(Paid(amount=1, currency="USD"), time=0.0)

    assert codec.decode(old(record, version, payload)) == Paid(amount=5, currency="EUR")


def test_a_missing_upcaster_is_named() -> None:
    class Sent(Event, version=3):
        pass

    upcasts(Sent, from_version=1)(dict)
    record = codec_of(Sent).encode(Sent(), time=0.0)

    with pytest.raises(StoredMessageError, match=r"Add @upcasts\(Sent, from_version=2\)"):
        codec_of(Sent).decode(old(record, 1, b"{}"))


def test_a_version_from_the_future_is_an_error() -> None:
    record = codec_of(Placed).encode(Placed(order_id=1), time=0.0)

    with pytest.raises(StoredMessageError, match="Deploy the newer class"):
        codec_of(Placed).decode(old(record, 2, b"{}"))


def test_an_upcaster_that_fails_is_named_without_the_payload() -> None:
    record = codec_of(Paid).encode(Paid(amount=1, currency="EUR"), time=0.0)

    with pytest.raises(StoredMessageError, match="An upcaster of Paid failed") as caught:
        codec_of(Paid).decode(old(record, 1, b'{"secret":"hunter2"}'))

    assert "hunter2" not in str(caught.value)


def test_a_payload_that_does_not_fit_is_an_error_without_the_payload() -> None:
    record = codec_of(Placed).encode(Placed(order_id=1), time=0.0)

    with pytest.raises(StoredMessageError, match=r"does not fit Placed.*order_id") as caught:
        codec_of(Placed).decode(record._replace(payload=b'{"order_id":"hunter2"}'))

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("version", [0, 3, 4])
def test_an_upcaster_that_leads_nowhere_is_refused(version: int) -> None:
    with pytest.raises(ConfigurationError, match="would never run"):
        upcasts(Paid, from_version=version)


def test_a_second_upcaster_for_one_version_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="name_the_amount"):
        upcasts(Paid, from_version=1)
