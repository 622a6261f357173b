"""What is stored is what was sent: else it is refused, with the field and the cure."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from threading import Lock
from typing import Annotated, Any, cast
from zoneinfo import ZoneInfo

import pytest
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PlainSerializer,
    PrivateAttr,
    SecretStr,
    SerializeAsAny,
    TypeAdapter,
    create_model,
    field_serializer,
    field_validator,
)

from msgbus import Command, Event
from msgbus.errors import StoredMessageError
from msgbus.journal import MessageCodec
from msgbus.journal.differences import difference
from msgbus.journal.examination import LONGEST


class Price(BaseModel):
    amount: Decimal = Decimal(1)


class Discounted(Price):
    percent: int = 10


class Required(BaseModel):
    number: int


class Line(BaseModel):
    sku: str = "a"
    price: Price = Price()


class Order(BaseModel):
    lines: list[Line] = []
    by_name: dict[str, Price] = {}


class Placed(Event):
    order: Order = Order()


@dataclasses.dataclass
class Seat:
    row: int = 1


@dataclasses.dataclass
class Balcony(Seat):
    level: int = 2


class Vague(BaseModel):  # noqa: PLW1641 (never hashed)
    number: int = 1

    def __eq__(self, other: object) -> bool:
        return True


class Sharp(Vague):
    text: str = "a"


class Noted(BaseModel):
    number: int = 1
    _note: str = PrivateAttr("")
    _lock: Lock = PrivateAttr(default_factory=Lock)

    def change(self) -> None:
        self._note = "changed"


def holding(annotation: Any, value: Any, **config: Any) -> Event:
    """An event with one field, made as it is with no questions asked."""
    base = cast("type[Event]", type("Base", (Event,), {"model_config": config}))
    made = create_model("Held", __base__=base, value=(annotation, ...))
    return made.model_construct(value=value)


def stored(message: Event | Command) -> Any:
    """What another process reads."""
    record = MessageCodec().encode(message, time=0.0)
    return MessageCodec([type(message)]).decode(record)


def refused(message: Event | Command) -> StoredMessageError:
    with pytest.raises(StoredMessageError) as caught:
        MessageCodec().encode(message, time=0.0)
    assert caught.value.message_id == message.message_id
    assert str(caught.value).startswith(f"{type(message).__name__} {message.message_id} ")
    return caught.value


# -- what would change -----------------------------------------------------------------------


def test_a_value_of_a_subclass_is_refused_wherever_it_is_with_its_path() -> None:
    price = Discounted()
    lines = [Line(), Line(), Line(price=price)]

    in_list = refused(Placed(order=Order(lines=lines)))
    in_dict = refused(Placed(order=Order(by_name={"a": Price(), "b": price})))

    assert in_list.field == "order.lines[2].price"
    assert "order.lines[2].price would not come back as it was sent" in str(in_list)
    assert "Price | Discounted" in str(in_list)
    assert in_dict.field == "order.by_name['b']"


def test_a_value_of_the_class_itself_is_stored_when_there_are_subclasses() -> None:
    placed = Placed(order=Order(lines=[Line()]))

    assert stored(placed) == placed


@pytest.mark.parametrize(
    ("annotation", "value", "field"),
    [
        (SecretStr, SecretStr("hunter2"), "value"),
        (list[SecretStr], [SecretStr("hunter2")], "value[0]"),
        (Any, (1, 2), "value"),
        (Any, {"a": [1, {2: 3}]}, "value['a'][1][2]"),
        (object, datetime(2026, 1, 1, tzinfo=UTC), "value"),
        (Seat, Balcony(), "value"),
        (Seat | None, Balcony(), "value"),
        (tuple[Price, int], (Discounted(), 1), "value[0]"),
        (dict[str, list[Price]], {"a": [Price(), Discounted()]}, "value['a'][1]"),
        (Annotated[int, PlainSerializer(lambda value: value + 1)], 5, "value"),
        (Annotated[int, AfterValidator(lambda value: value + 1)], 5, "value"),
        (datetime, datetime(2026, 1, 1, tzinfo=timezone(timedelta(seconds=30))), "value"),
        (datetime, datetime(2026, 1, 1, tzinfo=timezone(timedelta(microseconds=1))), "value"),
        (Vague, Sharp(), "value"),
        (time, time(1, tzinfo=ZoneInfo("Europe/Berlin")), "value"),
        (list[str], ("a",), "value"),
        (int, "5", "value"),
        (list[Any], [1.5, math.inf], "value[1]"),
        (dict[str, int], {"a": 1, None: 2}, "value[None]"),
        (dict[str, Price], {None: Price()}, "value[None]"),
        (set[Any], {Decimal(1), Decimal("1.5")}, "value"),
    ],
)  # fmt: skip
def test_what_would_come_back_as_something_else_is_refused(
    annotation: Any, value: Any, field: str
) -> None:
    error = refused(holding(annotation, value))

    assert error.field == field
    assert f" {field} " in str(error)
    assert "hunter2" not in str(error)


def test_an_excluded_field_is_stored_as_long_as_it_has_its_default() -> None:
    class Signed(Event):
        number: int
        trace: str = Field(default="none", exclude=True)

    assert stored(Signed(number=1)) == Signed(number=1)
    assert refused(Signed(number=1, trace="abc")).field == "trace"


def test_private_attributes_are_compared_unless_they_equal_nothing() -> None:
    noted = Noted()
    event = holding(Noted, noted)
    before = stored(event).value.number
    noted.change()

    assert before == 1
    assert refused(event).field == "value._note"


def test_a_serializer_and_a_validator_that_undo_each_other_are_fine() -> None:
    class Spelled(Event):
        number: int
        code: SecretStr

        @field_serializer("number")
        def _write(self, number: int) -> str:
            return "i" * number

        @field_validator("number", mode="before")
        @classmethod
        def _read(cls, number: Any) -> Any:
            return len(number) if isinstance(number, str) else number

        @field_serializer("code", when_used="json")
        def _show(self, code: SecretStr) -> str:
            return code.get_secret_value()

    event = Spelled(number=3, code=SecretStr("1234"))

    assert stored(event) == event


EQUAL: Any = [
    (float, 0),
    (Decimal, 0),
    (Any, {"a": [1, 2.5, None, True, "x", {}]}),
    (Any, OrderedDict(a=1)),
    (float | None, math.nan),
    (set[float] | None, {1.5, math.nan}),
    (SerializeAsAny[Seat], Seat()),
    (datetime, datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))),
    (list[datetime], [datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))]),
    (deque[int], deque([1, 2])),
    (set[Price] | None, None),
]


@pytest.mark.parametrize(("annotation", "value"), EQUAL)
def test_what_is_equal_is_stored(annotation: Any, value: Any) -> None:
    event = holding(annotation, value)

    assert difference(event, stored(event)) is None


# -- what could not be read ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "value", "config", "what"),
    [
        (float, math.nan, {"ser_json_inf_nan": "null"}, "a valid number"),
        (Annotated[int, Field(gt=0)], -5, {}, "greater than 0"),
        (int, None, {}, "a valid integer"),
        (list[int], None, {}, "a valid array"),
        (Decimal, Decimal("NaN"), {}, "finite"),
        (dict[int, int], {True: 1}, {}, "integer"),
        (Required, Required.model_construct(), {}, "Field required"),
    ],
)
def test_what_its_class_would_not_take_is_refused(
    annotation: Any, value: Any, config: Any, what: str
) -> None:
    event = holding(annotation, value, **config)
    error = refused(event)

    assert (error.field or "").startswith("value")
    assert what in str(error)


def test_a_copy_that_breaks_its_class_is_refused() -> None:
    class Counted(Event):
        number: int = Field(gt=0)
        words: list[str] = Field(default=[], max_length=2)

    event = Counted(number=1)
    wrong = event.model_copy(update={"number": -1})
    grown = Counted(number=1, words=["a"])
    grown.words.extend("bc")

    assert refused(wrong).field == "number"
    assert "model_copy" in str(refused(wrong))
    assert refused(grown).field == "words"
    assert refused(Counted.model_construct()).field == "number"
    assert stored(event) == event


def test_a_validator_that_fails_is_a_refusal_with_the_reason() -> None:
    def fail(value: str) -> str:
        if value == "stored":
            raise RuntimeError("no more")
        return value

    class Picky(Event):
        text: Annotated[str, AfterValidator(fail)]

    error = refused(Picky.model_construct(text="stored"))

    assert "RuntimeError: no more" in str(error)


def test_text_with_half_a_character_is_refused_with_the_field() -> None:
    class Two(Event):
        first: str = "a"
        second: str

    error = refused(Two(second="\ud800"))

    assert error.field == "second"
    assert "half a character" in str(error)
    assert str(error).isascii()


def test_a_generator_is_refused_as_it_is_spent() -> None:
    class Streamed(Event):
        numbers: Iterable[int]

    assert refused(Streamed(numbers=iter([1, 2]))).field == "numbers"


# -- the limits of what reads JSON -----------------------------------------------------------


def first_refused(make: Callable[[int], Event], highest: int) -> int:
    """The smallest size that is refused, found by halving; all below are read back equal."""
    low, high = 1, highest
    while low < high:
        middle = (low + high) // 2
        event = make(middle)
        try:
            assert difference(event, stored(event)) is None
        except StoredMessageError:
            high = middle
        else:
            low = middle + 1
    assert low < highest
    return low


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def readable(payload: bytes) -> bool:
    try:
        TypeAdapter(Any).validate_json(payload)
    except ValueError:
        return False
    return True


def test_what_is_nested_too_deep_is_refused_at_the_limit_of_what_reads_it() -> None:
    limit = first_refused(lambda levels: holding(Any, nested(levels)), 1_000)

    # The event itself is one level.
    assert readable(b"[" * limit + b"]" * limit)
    assert not readable(b"[" * (limit + 1) + b"]" * (limit + 1))
    assert refused(holding(Any, nested(limit))).field == "value"
    assert "fewer levels" in str(refused(holding(Any, nested(limit))))


def test_a_model_that_contains_itself_too_often_is_refused() -> None:
    class Tree(BaseModel):
        below: list[Tree] = []

    def grown(levels: int) -> Event:
        tree = Tree()
        for _ in range(levels - 1):
            tree = Tree(below=[tree])
        return event_type.model_validate({"tree": tree})

    event_type = create_model("Grown", __base__=Event, tree=(Tree, ...))

    limit = first_refused(grown, 1_000)

    assert refused(grown(limit)).field == "tree"


@pytest.mark.parametrize("annotation", [int, Any, list[int], dict[int, int]])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_too_long_is_refused_at_the_limit_of_what_reads_it(
    annotation: Any, sign: int
) -> None:
    def made(digits: int) -> Event:
        number = sign * 10 ** (digits - 1)
        values = {list[int]: [1, number], dict[int, int]: {number: 1}}
        return holding(annotation, values.get(annotation, number))

    limit = first_refused(made, 20_000)

    assert limit > LONGEST
    assert refused(made(limit)).field is not None
    if annotation is not dict[int, int]:  # a key is text
        assert readable(b"1" * (limit - 1))
        assert not readable(b"1" * limit)


def test_the_limits_do_not_hang_on_the_settings_of_the_process() -> None:
    before = sys.get_int_max_str_digits()
    try:
        sys.set_int_max_str_digits(0)
        longest = first_refused(lambda digits: holding(int, 10 ** (digits - 1)), 20_000)
        sys.set_int_max_str_digits(640)
        assert first_refused(lambda digits: holding(int, 10 ** (digits - 1)), 20_000) == longest
    finally:
        sys.set_int_max_str_digits(before)
