"""ValidationMiddleware: validation of messages before they are handled."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError, field_validator

from msgbus import Command, ConfigurationError, Event, MessageBus
from msgbus.middleware import ValidationMiddleware


class Item(BaseModel):
    sku: str


class Place(Command[str]):
    quantity: int = Field(gt=0)
    item: Item | None = None
    more: list[Item] = Field(default_factory=list[Item])
    tags: frozenset[str] = frozenset()
    by_name: dict[str, Item] = Field(default_factory=dict[str, Item])


class PlaceGift(Place):
    card: str = ""


class Counted(Event):
    number: int = Field(ge=0)


class Aliased(Command[str]):
    model_config = ConfigDict(populate_by_name=False)

    amount: int = Field(alias="theAmount")
    city: str = Field(default="", validation_alias=AliasPath("address", "city"))


class Careless(Command[str]):
    note: str = None  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


class Colour(Enum):
    RED = "red"


class Paint(Command[str]):
    model_config = ConfigDict(use_enum_values=True)

    colour: Colour


class Open(Command[str]):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int]  # pyright: ignore[reportIncompatibleVariableOverride]


class Trimmed(Command[str]):
    name: str

    @field_validator("name")
    @classmethod
    def is_short(cls, name: str) -> str:
        if len(name) > 3:
            message = "too long"
            raise ValueError(message)
        return name


def bus_for(
    command_type: type[Command[str]], validation: ValidationMiddleware
) -> tuple[MessageBus, list[Any]]:
    bus = MessageBus(middleware=[validation])
    handled: list[Any] = []

    async def handle(command: Any) -> str:
        handled.append(command)
        return "done"

    bus.register_command_handler(command_type, handle)
    return bus, handled


async def test_a_valid_message_reaches_the_handler_as_the_same_object() -> None:
    bus, handled = bus_for(Place, ValidationMiddleware())
    command = Place(quantity=1, item=Item(sku="tea"))
    message_id = command.message_id

    result = await bus.execute(command, headers={"tenant": "acme"})

    assert result.value == "done"
    assert handled[0] is command
    assert command.message_id == message_id
    assert command.headers == {"tenant": "acme"}


INVALID = {
    "a value out of bounds": (Place.model_construct(quantity=0), "greater_than"),
    "a value of another type": (Place.model_construct(quantity="many"), "int_type"),
    "a value that would have been converted": (Place.model_construct(quantity="5"), "int_type"),
    "a missing field": (Place.model_construct(), "missing"),
    "a dictionary in place of a model": (
        Place.model_construct(quantity=1, item={"sku": "tea"}),
        "model_type",
    ),
    "a dictionary in a list of models": (
        Place.model_construct(quantity=1, more=[Item(sku="tea"), {"sku": "tea"}]),
        "model_type",
    ),
    "a dictionary in a mapping to models": (
        Place.model_construct(quantity=1, by_name={"tea": {"sku": "tea"}}),
        "model_type",
    ),
    "a value its own validator refuses": (Trimmed.model_construct(name="long"), "value_error"),
    "an update that nobody checked": (
        Place(quantity=1).model_copy(update={"quantity": -1}),
        "greater_than",
    ),
    "a wrong extra value": (Open.model_construct(size="big"), "int_type"),
}


@pytest.mark.parametrize(("command", "fault"), INVALID.values(), ids=INVALID.keys())
async def test_an_invalid_message_fails_before_the_handler(
    command: Command[str], fault: str
) -> None:
    bus, handled = bus_for(type(command), ValidationMiddleware())

    result = await bus.execute(command.model_copy())

    assert isinstance(result.exception, ValidationError)
    assert result.exception.title == type(command).__name__
    assert fault in [error["type"] for error in result.exception.errors()]
    assert handled == []


VALID = {
    "made by model_construct": Place.model_construct(quantity=5),
    "a subclass": PlaceGift(quantity=1, card="hello"),
    "a set": Place(quantity=1, tags=frozenset({"hot", "green"})),
    "nested models": Place(
        quantity=1, more=[Item(sku="tea")], by_name={"tea": Item(sku="tea"), "mug": Item(sku="mug")}
    ),
    "aliases": Aliased.model_validate({"theAmount": 1, "address": {"city": "Ulm"}}),
    "a default that its own type would refuse": Careless(),
    "an enum kept as its value": Paint(colour=Colour.RED),
    "extra values": Open.model_validate({"size": 1}),
    "a validator of its own": Trimmed(name="tea"),
}


@pytest.mark.parametrize("command", VALID.values(), ids=VALID.keys())
async def test_a_valid_message_passes(command: Command[str]) -> None:
    bus, handled = bus_for(type(command), ValidationMiddleware())

    result = await bus.execute(command.model_copy())

    assert result.error is None
    assert handled == [command]


async def test_the_error_says_where_the_fault_is() -> None:
    bus, _ = bus_for(Place, ValidationMiddleware())

    result = await bus.execute(Place.model_construct(quantity=1, more=[{"sku": "tea"}]))

    assert isinstance(result.exception, ValidationError)
    [fault] = result.exception.errors()
    assert fault["loc"] == ("more", 0)
    assert "instance of Item" in fault["msg"]


async def test_a_users_check_may_refuse_a_message() -> None:
    def not_thirteen(command: Place) -> None:
        if command.quantity == 13:
            raise ValueError("unlucky")

    bus, handled = bus_for(Place, ValidationMiddleware(validators={Place: not_thirteen}))

    refused = await bus.execute(Place(quantity=13))
    taken = await bus.execute(Place(quantity=12))

    assert isinstance(refused.exception, ValueError)
    assert str(refused.exception) == "unlucky"
    assert taken.success
    assert [command.quantity for command in handled] == [12]


async def test_a_users_check_may_be_async() -> None:
    async def refuse(command: Place) -> None:
        raise PermissionError("not allowed")

    bus, handled = bus_for(Place, ValidationMiddleware(validators={Place: refuse}))

    result = await bus.execute(Place(quantity=1))

    assert isinstance(result.exception, PermissionError)
    assert handled == []


async def test_all_checks_of_a_message_and_its_base_classes_run_in_the_order_given() -> None:
    journal: list[str] = []

    def note(name: str) -> Callable[[Place], None]:
        def check(command: Place) -> None:
            journal.append(name)

        return check

    validation = ValidationMiddleware(
        validators={Place: note("place"), PlaceGift: note("gift"), Paint: note("paint")}
    )
    bus, _ = bus_for(Place, validation)

    await bus.execute(PlaceGift(quantity=1))
    await bus.execute(Place(quantity=1))

    assert journal == ["place", "gift", "place"]


async def test_a_users_check_sees_only_valid_messages() -> None:
    seen: list[Place] = []
    bus, _ = bus_for(Place, ValidationMiddleware(validators={Place: seen.append}))

    await bus.execute(Place.model_construct(quantity=0))

    assert seen == []


async def test_an_invalid_event_in_a_list_fails_alone() -> None:
    bus = MessageBus(middleware=[ValidationMiddleware()])
    handled: list[int] = []

    @bus.on(Counted, batch=True, name="record")
    async def record(events: list[Counted]) -> None:
        handled.extend(event.number for event in events)

    for event in (Counted(number=1), Counted.model_construct(number=-1), Counted(number=2)):
        await bus.publish(event)
    async with bus:
        await bus.settled()

    assert handled == [1, 2]
    assert bus.stats().handlers["record"].failed == 1


def test_a_check_for_something_that_is_no_message_class_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="message classes as keys"):
        ValidationMiddleware(validators={Item: print})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]


def test_a_check_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="validator of Place is 'strict'"):
        ValidationMiddleware(validators={Place: "strict"})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
