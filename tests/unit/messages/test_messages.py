"""Messages hold the user's fields; everything else rides beside them."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from uuid import UUID

import pytest
from pydantic import BaseModel, ValidationError

from msgbus import (
    Command,
    Context,
    CreateCommand,
    DeleteCommand,
    Event,
    Message,
    MessageBus,
    UpdateCommand,
)
from msgbus.errors import MessageDefinitionError
from msgbus.messages.message import metadata_of, peek


class Placed(Event, name="shop.Placed", version=2, topic="shop.orders.placed", key="order"):
    order: int
    note: str = ""


class Ship(Command):
    order: int


class Begin(Command):
    pass


def test_the_schema_and_the_dump_hold_only_the_users_fields() -> None:
    event = Placed(order=1)
    assert event.message_id

    assert event.model_dump() == {"order": 1, "note": ""}
    assert set(Placed.model_json_schema()["properties"]) == {"order", "note"}
    assert set(vars(event)) == {"order", "note"}
    assert event.model_dump_json() == '{"order":1,"note":""}'


def test_equality_and_hash_are_about_fields() -> None:
    one, other = Placed(order=1), Placed(order=1)
    assert one.message_id != other.message_id

    assert one == other
    assert hash(one) == hash(other)
    assert one != Placed(order=2)


def test_messages_are_frozen_and_refuse_unknown_fields() -> None:
    with pytest.raises(ValidationError):
        setattr(Placed(order=1), "order", 2)  # noqa: B010
    with pytest.raises(ValidationError):
        Placed.model_validate({"order": 1, "wrong": 2})


def test_the_id_is_a_uuid7_that_tells_its_time() -> None:
    event = Placed(order=1)

    assert UUID(event.message_id).version == 7
    assert abs((event.created_at - datetime.now(UTC)).total_seconds()) < 60
    assert event.message_id == event.message_id


def test_nothing_is_made_until_somebody_looks() -> None:
    event = Placed(order=1)

    assert peek(event) is None


def test_a_root_is_its_own_correlation_and_has_no_cause() -> None:
    event = Placed(order=1)

    assert event.correlation_id == event.message_id
    assert event.causation_id is None
    assert event.session_id is None
    assert dict(event.headers) == {}


def test_headers_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        Placed(order=1).headers["a"] = "b"  # type: ignore[index]


def test_a_copy_is_a_new_message() -> None:
    event = Placed(order=1)

    copies = [event.model_copy(), event.model_copy(update={"order": 2}), copy.copy(event)]
    copies.append(copy.deepcopy(event))

    assert len({event.message_id, *(one.message_id for one in copies)}) == 5


def test_pickling_keeps_metadata() -> None:
    event = Placed(order=1)

    twin = pickle.loads(pickle.dumps(event))

    assert twin == event
    assert twin.message_id == event.message_id
    assert twin.correlation_id == event.correlation_id


def test_messages_made_without_init_work_too() -> None:
    made = [
        Placed.model_validate({"order": 1}),
        Placed.model_construct(order=1, note=""),
        Placed.model_validate_json('{"order": 1}'),
    ]

    assert len({one.message_id for one in made}) == 3


def test_threads_that_look_at_once_see_one_id() -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in range(50):
            event = Placed(order=1)
            ids = set(pool.map(look_at, [event] * 8))
            assert len(ids) == 1


def look_at(message: Message) -> str:
    return message.message_id


def test_wire_options_and_their_defaults() -> None:
    assert Placed.__wire__.name == "shop.Placed"
    assert Placed.__wire__.version == 2
    assert Placed.__wire__.topic == "shop.orders.placed"
    assert (Ship.__wire__.name, Ship.__wire__.version, Ship.__wire__.topic) == ("Ship", 1, None)


def test_the_key_comes_from_a_field_or_a_function_and_is_inherited() -> None:
    class Special(Placed):
        pass

    def make_key(event: Computed) -> str:
        return f"k{event.order}"

    class Computed(Event, key=make_key):
        order: int

    assert Placed(order=5).key == "5"
    assert Special(order=6).key == "6"
    assert Computed(order=7).key == "k7"
    assert Ship(order=1).key is None
    assert Special.__wire__.name == "Special"


def test_a_key_that_is_no_field_is_refused() -> None:
    with pytest.raises(MessageDefinitionError, match="order, note"):
        type("Wrong", (Placed,), {}, key="nothing")


@pytest.mark.parametrize("name", ["message_id", "session_id", "headers", "key", "created_at"])
def test_a_field_that_would_hide_metadata_is_refused(name: str) -> None:
    with pytest.raises(MessageDefinitionError, match=name):
        type("Clash", (Event,), {"__annotations__": {name: str}, "__module__": __name__})


def test_a_version_below_one_is_refused() -> None:
    with pytest.raises(MessageDefinitionError, match="count from 1"):
        type("Wrong", (Event,), {}, version=0)


def test_messages_can_be_fields_of_other_models() -> None:
    class Envelope(BaseModel):
        event: Placed

    envelope = Envelope(event=Placed(order=1))

    assert envelope.model_dump() == {"event": {"order": 1, "note": ""}}
    assert Envelope.model_validate(envelope.model_dump()) == envelope


async def test_cause_correlation_and_headers_flow_by_themselves() -> None:
    bus = MessageBus()
    seen: dict[str, Message] = {}

    @bus.handles(Begin)
    async def begin(command: Begin, context: Context) -> None:
        await bus.call(Ship(order=1))

    @bus.handles(Ship)
    async def ship(command: Ship, context: Context) -> None:
        seen["ship"] = command
        context.emit(Placed(order=1))

    @bus.on(Placed)
    async def placed(event: Placed) -> None:
        seen["placed"] = event

    async with bus:
        root = Begin()
        await bus.execute(root, headers={"tenant": "acme"})
        await bus.settled()

    assert seen["ship"].causation_id == root.message_id
    assert seen["placed"].causation_id == seen["ship"].message_id
    assert seen["placed"].correlation_id == root.message_id
    assert dict(seen["placed"].headers) == {"tenant": "acme"}
    assert root.causation_id is None


async def test_the_cause_is_fixed_at_the_first_sending() -> None:
    bus = MessageBus()
    sent = Ship(order=1)

    @bus.handles(Begin)
    async def begin(command: Begin) -> None:
        await bus.call(sent)

    @bus.handles(Ship)
    async def ship(command: Ship) -> None:
        pass

    await bus.execute(sent)
    await bus.execute(Begin())

    assert sent.causation_id is None


async def test_looking_at_the_id_before_sending_fixes_only_the_id() -> None:
    bus = MessageBus()
    sent = Ship(order=1)
    before = sent.message_id

    @bus.handles(Begin)
    async def begin(command: Begin) -> None:
        await bus.call(sent)

    @bus.handles(Ship)
    async def ship(command: Ship) -> None:
        pass

    root = Begin()
    await bus.execute(root)

    assert sent.message_id == before
    assert sent.causation_id == root.message_id


async def test_a_handled_root_pays_for_no_metadata() -> None:
    bus = MessageBus()

    @bus.handles(Ship)
    async def ship(command: Ship) -> None:
        pass

    command = Ship(order=1)
    await bus.execute(command)

    assert not hasattr(peek(command), "message_id")
    assert metadata_of(command).fixed


async def test_tasks_started_by_a_handler_carry_its_cause() -> None:
    import anyio

    bus = MessageBus()
    sent = [Ship(order=number) for number in range(3)]

    @bus.handles(Begin)
    async def begin(command: Begin) -> None:
        async with anyio.create_task_group() as group:
            for one in sent:
                group.start_soon(bus.execute, one)

    @bus.handles(Ship)
    async def ship(command: Ship) -> None:
        await anyio.lowlevel.checkpoint()

    root = Begin()
    await bus.call(root)

    assert {one.causation_id for one in sent} == {root.message_id}


# -- point 13: commands by what they do ---------------------------------------------------------


class Draft(CreateCommand[int]):
    title: str


class Retitle(UpdateCommand):
    title: str


class Drop(DeleteCommand[bool]):
    pass


def test_commands_by_what_they_do_are_commands_and_nothing_more() -> None:
    for base in (CreateCommand, UpdateCommand, DeleteCommand):
        assert issubclass(base, Command)
        assert not base.model_fields
    assert Draft(title="a").model_dump() == {"title": "a"}
    assert isinstance(Retitle(title="b"), UpdateCommand)
    assert not isinstance(Drop(), CreateCommand)
