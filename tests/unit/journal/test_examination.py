"""A class is examined once: what JSON may lose of its messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, cast
from uuid import UUID

import pytest
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    JsonValue,
    PlainSerializer,
    PrivateAttr,
    PydanticDeprecatedSince20,
    SecretBytes,
    SecretStr,
    SerializeAsAny,
    StringConstraints,
    WrapSerializer,
    computed_field,
    create_model,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypeAliasType, TypedDict

from msgbus import Command, Event
from msgbus.errors import StoredMessageError
from msgbus.journal import MessageCodec
from msgbus.journal.examination import LONGEST, Care
from msgbus.journal.payloads import writer_of

T = TypeVar("T")


Nest = TypeAliasType("Nest", "list[Nest]")


class Colour(StrEnum):
    RED = "red"


class Size(IntEnum):
    SMALL = 1


class Mixed(Enum):
    ONE = 1
    PAIR = (1, 2)


class Bits(Flag):
    FIRST = 1


class Line(BaseModel):
    sku: str
    price: float = 0.0
    parts: list[Line] = []


class Base(BaseModel):
    number: int = 1


class Special(Base):
    text: str = ""


class Box(BaseModel, Generic[T]):
    content: T


class Private(BaseModel):
    number: int = 1
    _note: str = PrivateAttr("")


class Extra(BaseModel):
    model_config = ConfigDict(extra="allow")


class Stripped(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True)
    text: str


class Computed(BaseModel):
    number: int = Field(1, alias="Number")

    @computed_field
    def double(self) -> int:
        return self.number * 2


class OwnWay(BaseModel):
    number: int = 1

    @model_serializer
    def _write(self) -> dict[str, int]:
        return {"number": self.number}


class OwnInit(BaseModel):
    number: int = 1

    def __init__(self, number: int = 2) -> None:
        super().__init__(number=number)


class Checked(BaseModel):
    number: int = 1

    @model_validator(mode="after")
    def _check(self) -> Checked:
        return self


@dataclasses.dataclass
class Place:
    row: int


class Options(TypedDict):
    row: int


class Pair(NamedTuple):
    first: int


class Homemade:
    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(lambda value: value)


def care_of(annotation: Any, default: Any = ..., **options: Any) -> Care:
    event = create_model("Examined", __base__=Event, value=(annotation, default), **options)
    return writer_of(event).examination.care


@pytest.mark.parametrize(
    "annotation",
    [
        str, int, float, bool, bytes, None, UUID, date, datetime, timedelta, Colour, Size,
        list[str], tuple[int, ...], tuple[int, str], set[int], frozenset[UUID], list[list[bool]],
        dict[str, int], Mapping[str, int], dict[Colour, list[str]],
        str | None, datetime | None, int | str | None,
        int | float, str | list[str], list[int] | dict[str, str] | None, bool | int,
        Annotated[str, Field(description="a text", alias="other")],
    ],
)  # fmt: skip
def test_plain_fields_pay_nothing(annotation: Any) -> None:
    assert care_of(annotation) is Care.NONE


@pytest.mark.parametrize(
    "annotation",
    [
        Decimal, Literal["a", 1], Line, list[Line], Line | None, dict[str, Line], Computed,
        Box[int], Line | str,
        Annotated[int, Field(gt=0)], Annotated[str, Field(max_length=3)],
        Annotated[list[int], Field(min_length=1)], Annotated[str, Field(pattern="a+")],
        dict[int, str], dict[UUID, int], dict[date, int],
    ],
)  # fmt: skip
def test_fields_that_may_have_been_filled_unvalidated_are_read_back(annotation: Any) -> None:
    assert care_of(annotation) is Care.READ


@pytest.mark.parametrize(
    "annotation",
    [
        Any, object, list, dict, T, list[Any], dict[str, Any], JsonValue, type, Callable[[], int],
        SecretStr, SecretBytes, list[SecretStr], SecretStr | None, Path, HttpUrl, time, complex,
        Mixed, Bits, Literal[Colour.RED], Pair, Place, list[Place], Options, Homemade,
        Sequence[int], Iterable[int],
        Private, Extra, Stripped, OwnWay, OwnInit, Checked, Box[Any], SerializeAsAny[Base],
        list[datetime], Base | Special, UUID | str, date | datetime, float | str, Decimal | int,
        dict[tuple[int, int], str], dict[str | None, int], dict[float, int], dict[datetime, int],
        Annotated[str, StringConstraints(strip_whitespace=True)],
        Annotated[int, AfterValidator(abs)],
        Annotated[int, PlainSerializer(str)],
        Annotated[int, WrapSerializer(lambda value, handler: handler(value))],
        Annotated[int, Field(exclude=True)],
        Annotated[int | str, Field(union_mode="left_to_right")],
    ],
)  # fmt: skip
def test_whatever_else_there_is_is_compared(annotation: Any) -> None:
    assert care_of(annotation) is Care.COMPARE


@pytest.mark.parametrize(
    ("config", "annotation", "care"),
    [
        ({"ser_json_inf_nan": "null"}, float, Care.READ),
        ({"ser_json_inf_nan": "null"}, float | None, Care.COMPARE),
        ({"ser_json_inf_nan": "constants"}, float, Care.READ),
        ({"ser_json_bytes": "base64"}, bytes, Care.COMPARE),
        ({"ser_json_bytes": "base64", "val_json_bytes": "base64"}, bytes, Care.NONE),
        ({"ser_json_timedelta": "float"}, int, Care.COMPARE),
        ({"ser_json_temporal": "seconds"}, int, Care.COMPARE),
        ({"use_enum_values": True}, Colour, Care.COMPARE),
        ({"str_to_lower": True}, str, Care.COMPARE),
        ({"str_max_length": 5}, str, Care.READ),
        ({"coerce_numbers_to_str": True}, str, Care.COMPARE),
        ({"extra": "allow"}, int, Care.COMPARE),
        ({"extra": "ignore"}, int, Care.NONE),
        ({"strict": True}, int, Care.READ),
        ({"serialize_by_alias": True, "populate_by_name": True}, int, Care.NONE),
    ],
)
def test_the_settings_of_the_class_count(config: Any, annotation: Any, care: Care) -> None:
    base = cast("type[Event]", type("Configured", (Event,), {"model_config": config}))
    event = create_model("Examined", __base__=base, value=(annotation, ...))

    assert writer_of(event).examination.care is care


def test_an_encoder_for_a_type_is_code_of_the_class() -> None:
    with pytest.warns(PydanticDeprecatedSince20, match="json_encoders"):

        class Encoded(Event):
            model_config = ConfigDict(json_encoders={int: str})
            number: int

    assert writer_of(Encoded).examination.care is Care.COMPARE


def test_what_runs_code_of_the_class_is_compared() -> None:
    class Written(Event):
        number: int

        @field_serializer("number")
        def _write(self, number: int) -> int:
            return number

    class Read(Event):
        number: int

        @field_validator("number")
        @classmethod
        def _read(cls, number: int) -> int:
            return number

    class Made(Command):
        number: int = 1
        _note: str = PrivateAttr("")

    for examined in (Written, Read, Made):
        assert writer_of(examined).examination.care is Care.COMPARE


def test_a_type_that_contains_itself_is_read_back() -> None:
    class Tree(Event):
        lines: list[Line]

    assert writer_of(Tree).examination.care is Care.READ


def test_an_alias_that_contains_itself_is_read_back() -> None:
    assert care_of(Nest) is Care.READ


def test_a_type_that_is_there_twice_does_not_contain_itself() -> None:
    class Coloured(Event):
        first: Colour
        second: list[Colour]

    assert writer_of(Coloured).examination.care is Care.NONE


def test_a_type_of_very_many_levels_is_compared() -> None:
    annotation: Any = int
    for _ in range(60):
        annotation = list[annotation]

    assert care_of(annotation) is Care.COMPARE


def test_a_class_that_pydantic_has_not_built_is_compared_until_it_is() -> None:
    class Later(Event):
        model_config = ConfigDict(defer_build=True)
        number: int

    event = Later(number=1)

    assert writer_of(Later).write(event) == b'{"number":1}'


# -- what cannot change once it was validated --------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "default", "is_fixed"),
    [
        (int, ..., True),
        (tuple[str, ...], (), True),
        (frozenset[Colour] | None, None, True),
        (Annotated[int, Field(gt=0)], ..., True),
        (Decimal, Decimal(1), True),
        (Decimal, 0, True),
        (datetime | None, None, True),
        (list[int], ..., False),
        (set[int], ..., False),
        (dict[str, int], ..., False),
        (tuple[list[int], ...], ..., False),
        (Line, ..., False),
        (int, "5", False),
        (int, None, False),
        (tuple[int, ...], [], False),
        (int, Field(default_factory=int), False),
        (int, Field(default="5", validate_default=True), True),
        (Any, ..., False),
    ],
)
def test_a_message_is_trusted_if_it_was_validated_and_cannot_change(
    annotation: Any, default: Any, is_fixed: bool
) -> None:
    event = create_model("Examined", __base__=Event, value=(annotation, default))

    assert writer_of(event).examination.is_fixed is is_fixed


def test_a_message_of_a_class_that_is_not_frozen_is_not_trusted() -> None:
    class Loose(Event):
        model_config = ConfigDict(frozen=False)
        number: int

    event = Loose(number=1)
    event.number = cast("Any", "2")

    assert not writer_of(Loose).examination.is_fixed
    with pytest.raises(StoredMessageError, match="number would not come back"):
        MessageCodec().encode(event, time=0.0)


# -- one message of a safe class -------------------------------------------------------------


class Measured(Event):
    number: int
    at: datetime | None = None
    text: str = ""


def cares_for(event: Measured) -> tuple[Care, Care]:
    """What it needs if it was validated, and if that is not known."""
    payload = event.__pydantic_serializer__.to_json(event, round_trip=True)
    examination = writer_of(Measured).examination
    return examination.of_trusted(event, payload), examination.of_payload(event, payload)


NOON = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "care"), [(0, Care.NONE), (-5_400, Care.NONE), (30, Care.COMPARE)]
)
def test_a_moment_is_compared_if_its_zone_has_seconds(seconds: int, care: Care) -> None:
    at = datetime(2026, 1, 1, tzinfo=timezone(timedelta(seconds=seconds)))

    assert cares_for(Measured(number=1, at=at)) == (care, care)


def test_a_message_with_none_is_read_back_unless_it_was_validated() -> None:
    assert cares_for(Measured(number=1, at=NOON)) == (Care.NONE, Care.NONE)
    assert cares_for(Measured(number=1)) == (Care.NONE, Care.READ)


def test_a_message_without_one_of_its_fields_is_compared() -> None:
    writer = writer_of(Measured)

    assert writer.examination.of_payload(Measured.model_construct(text="a"), b"") is Care.COMPARE


@pytest.mark.parametrize("text", ["x" * 100_000, "7 " * 50_000])
def test_a_long_message_pays_nothing_unless_it_may_have_a_long_number(text: str) -> None:
    assert cares_for(Measured(number=1, at=NOON, text=text)) == (Care.NONE, Care.NONE)
    for shift in range(0, LONGEST, 97):
        number = "x" * shift + "1" * LONGEST
        assert cares_for(Measured(number=1, at=NOON, text=number)) == (Care.READ, Care.READ)


def test_a_class_counts_as_a_base_as_soon_as_it_is_one() -> None:
    class Part(BaseModel):
        number: int = 1

    class Ordered(Event):
        part: Part

    examination = writer_of(Ordered).examination
    before = examination.of_payload(Ordered(part=Part()), b"")

    class Spare(Part):
        text: str = ""

    assert (before, examination.of_payload(Ordered(part=Spare()), b"")) == (
        Care.READ, Care.COMPARE,
    )  # fmt: skip
