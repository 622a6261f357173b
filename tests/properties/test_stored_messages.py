"""Messages of random classes: what is stored is read back equal, and what is right is stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from ipaddress import IPv4Address
from typing import Annotated, Any, Literal, cast
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import (
    BaseModel,
    Field,
    JsonValue,
    PrivateAttr,
    SecretStr,
    StringConstraints,
    ValidationError,
    create_model,
)
from typing_extensions import TypedDict

from msgbus import Event
from msgbus.errors import StoredMessageError
from msgbus.journal import MessageCodec, Record, payloads
from msgbus.journal.differences import difference
from msgbus.journal.examination import Care, TypeExamination
from msgbus.journal.payloads import writer_of
from tests.counts import STORED_CLASSES
from tests.evidence import Evidence

Values = st.SearchStrategy[Any]


@dataclass(frozen=True)
class Kind:
    """A type of field, with values of it and values that only `model_construct` lets in."""

    annotation: Any
    values: Values
    others: Values = st.nothing()  # noqa: RUF009 (never changed)
    is_kept: bool = True
    """Whether all of its values are to be stored."""

    def any(self) -> Values:
        return self.values | self.others


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Odd(Enum):
    ONE = 1
    TEXT = "1"
    PAIR = (1, 2)


class Point(BaseModel):
    x: int
    y: float = 0.0


class Labelled(Point):
    label: str


class Noted(BaseModel):
    text: str
    _note: str = PrivateAttr("")

    def note(self, text: str) -> None:
        self._note = text


@dataclass
class Place:
    row: int
    seat: str = "a"


@dataclass
class Balcony(Place):
    level: int = 1


class Options(TypedDict, total=False):
    colour: Colour
    count: int


def noted(text: str) -> Noted:
    made = Noted(text=text)
    made.note(text)
    return made


moments = st.datetimes(
    timezones=st.none()
    | st.sampled_from([
        UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York"),
        timezone(timedelta(hours=5, minutes=30)), timezone(timedelta(seconds=30)),
        timezone(timedelta(hours=-1, microseconds=1)),
    ])
)  # fmt: skip
whole_moments = st.datetimes(
    timezones=st.sampled_from([None, UTC, timezone(timedelta(hours=-5, minutes=-45))])
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
wild: Values = (
    plain | st.sampled_from([(1, 2), {1: 2}, {1}, Colour.RED, b"\xff", math.nan, "\ud800"])
    | st.decimals() | moments | st.uuids() | st.builds(Point, x=st.integers())
)  # fmt: skip
texts = st.text(max_size=5)
numbers = st.integers() | st.sampled_from([4_299, 4_300, 5_000]).map(lambda digits: 10**digits)
small = st.integers(-5, 5)

KEYS = (
    Kind(str, texts | st.just("None"), small | st.none() | st.booleans() | st.floats()
         | st.binary() | st.dates() | st.sampled_from(Colour) | st.uuids()),
    Kind(int, small, st.booleans() | st.just("1")),
    Kind(Colour, st.sampled_from(Colour), st.just("red")),
    Kind(UUID, st.uuids()),
    Kind(date, st.dates()),
    Kind(float, st.floats(allow_nan=False)),
    Kind(datetime, whole_moments, moments),
    Kind(tuple[int, int], st.tuples(small, small), is_kept=False),
    Kind(Literal[1, "b"], st.sampled_from([1, "b"]), is_kept=False),
    Kind(str | None, st.none() | texts, is_kept=False),
)  # fmt: skip
HASHABLE = (
    Kind(str, texts | st.text(min_size=4_000, max_size=4_010), st.just("\ud800") | st.binary()),
    Kind(int, st.integers() | small, numbers | st.booleans() | texts | st.just(1.0)),
    Kind(float, st.floats(), st.integers(-100, 100) | texts | st.none()),
    Kind(bool, st.booleans(), small),
    Kind(bytes, texts.map(str.encode), st.binary()),
    Kind(UUID, st.uuids(), texts),
    Kind(date, st.dates(), moments),
    Kind(datetime, whole_moments, moments | st.dates()),
    Kind(time, st.times(), st.times(timezones=st.just(ZoneInfo("Europe/Berlin")))),
    Kind(timedelta, st.timedeltas(), small),
    Kind(
        Decimal, st.decimals(allow_nan=False, allow_infinity=False), st.just(Decimal("NaN")) | small
    ),
    Kind(Colour, st.sampled_from(Colour), texts),
    Kind(Size, st.sampled_from(Size), small),
    Kind(Odd, st.sampled_from([Odd.ONE, Odd.TEXT]), st.just(Odd.PAIR)),
    Kind(Literal["a", 1], st.sampled_from(["a", 1]), texts | st.booleans()),
    Kind(Annotated[int, Field(gt=0)], st.integers(min_value=1), small),
    Kind(Annotated[str, Field(max_length=3)], st.text(max_size=3), texts),
    Kind(Annotated[str, StringConstraints(strip_whitespace=True)], st.just("a"), texts),
    Kind(IPv4Address, st.builds(IPv4Address, st.integers(0, 2**32 - 1)), texts),
)
OTHERS = (
    Kind(Any, plain, wild),
    Kind(object, plain, wild),
    Kind(JsonValue, plain, wild),
    Kind(list, st.lists(plain, max_size=2), wild),
    Kind(SecretStr, st.builds(SecretStr, st.just("secret")), is_kept=False),
    Kind(Point, st.builds(Point, x=small, y=st.floats(allow_nan=False, allow_infinity=False)),
         st.builds(Point, x=numbers, y=st.floats())
         | st.builds(Labelled, x=small, label=texts)
         | st.builds(Point.model_construct, y=st.floats())),
    Kind(Noted, st.builds(Noted, text=texts), st.builds(noted, texts)),
    Kind(Place, st.builds(Place, small), st.builds(Balcony, small) | st.builds(Place, texts)),
    Kind(Options, st.fixed_dictionaries({}, optional={"count": small}),
         st.dictionaries(st.sampled_from(["count", "colour", "other"]), small)),
)  # fmt: skip


def optional(one: Kind) -> Kind:
    return Kind(one.annotation | None, st.none() | one.values, one.others, one.is_kept)


def listed(one: Kind) -> Kind:
    return Kind(
        list[one.annotation],  # type: ignore[name-defined]
        st.lists(one.values, max_size=3),
        st.lists(one.any(), max_size=3) | st.lists(one.values, max_size=2).map(tuple) | wild,
        one.is_kept,
    )


def paired(one: Kind) -> Kind:
    return Kind(
        tuple[one.annotation, str],  # type: ignore[name-defined]
        st.tuples(one.values, texts),
        st.tuples(one.any()) | st.tuples(one.any(), texts),
        one.is_kept,
    )


def held(one: Kind) -> Kind:
    model = create_model("Holder", value=(one.annotation, ...))
    return Kind(
        model,
        st.builds(model, value=one.values),
        st.builds(model.model_construct, value=one.any()) | st.builds(model.model_construct),
        # Of a class with a setting of its own for infinity, pydantic's is null.
        is_kept=False,
    )


def keyed(key: Kind, one: Kind) -> Kind:
    return Kind(
        dict[key.annotation, one.annotation],  # type: ignore[name-defined]
        st.dictionaries(key.values, one.values, max_size=2),
        st.dictionaries(key.any(), one.any(), max_size=2),
        key.is_kept and one.is_kept,
    )


def either(first: Kind, second: Kind) -> Kind:
    return Kind(
        first.annotation | second.annotation,
        first.values | second.values,
        first.others | second.others,
        is_kept=False,  # what JSON does not tell apart is refused
    )


def collected(one: Kind) -> Kind:
    """A set; without what equals nothing, not even itself."""
    return Kind(
        set[one.annotation],  # type: ignore[name-defined]
        st.sets(one.values.filter(lambda value: value == value), max_size=3),
        st.sets(one.any(), max_size=3) | st.frozensets(one.values, max_size=3),
        one.is_kept,
    )


def build(kinds: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    return st.one_of(
        kinds.map(optional),
        kinds.map(listed),
        kinds.map(paired),
        kinds.map(held),
        st.builds(keyed, st.sampled_from(KEYS), kinds),
        st.builds(either, kinds, kinds),
    )


kinds = st.recursive(
    st.sampled_from(HASHABLE + OTHERS) | st.sampled_from(HASHABLE).map(collected),
    build,
    max_leaves=3,
)


def event_class(annotation: Any) -> type[Event]:
    return create_model("Drawn", __base__=Event, value=(annotation, ...))


def search() -> Counter[str]:
    """Store messages of random classes, and count what became of them."""
    counts = Counter[str]()

    @given(kind=kinds, data=st.data())
    @settings(max_examples=STORED_CLASSES, database=None)
    def store(kind: Kind, data: st.DataObject) -> None:
        drawn = event_class(kind.annotation)
        counts["classes"] += 1
        examination = writer_of(drawn).examination
        counts[examination.care.name] += 1
        counts["fixed"] += examination.is_fixed
        values = data.draw(st.lists(kind.any(), min_size=1, max_size=10))
        for event in [event for value in values for event in made(drawn, value)]:
            try:
                record = MessageCodec().encode(event, time=0.0)
            except StoredMessageError:
                counts["refused"] += 1
                continue
            counts["stored"] += 1
            counts["lost"] += not comes_back(event, record)

    store()
    return counts


def made(event_type: type[Event], value: Any) -> Iterator[Event]:
    """Messages with this value: one never validated, and one that is, if it is valid."""
    yield event_type.model_construct(value=value)
    with suppress(ValidationError):
        # By __init__, which a class has for its fields: a journal trusts what it has made.
        yield cast("Any", event_type)(value=value)


def comes_back(event: Event, record: Record) -> bool:
    """Whether another codec reads what was stored, and it is equal."""
    try:
        return difference(event, MessageCodec([type(event)]).decode(record)) is None
    except StoredMessageError:
        return False


@pytest.mark.stress("journal")
def test_what_is_stored_is_read_back_equal(evidence: Evidence) -> None:
    counts = search()

    evidence(
        "messages of random classes stored and read",
        classes=counts["classes"],
        stored=counts["stored"],
        refused=counts["refused"],
        lost=counts["lost"],
    )
    assert counts["lost"] == 0
    assert all(counts[name] for name in ("fixed", "refused", *Care.__members__))


@pytest.mark.stress("journal")
def test_without_the_examination_messages_are_lost(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trust(_: object) -> TypeExamination:
        return TypeExamination(Care.NONE, is_fixed=True)

    monkeypatch.setattr(payloads, "examine_message", trust)

    counts = search()

    evidence("control: no class is examined", stored=counts["stored"], lost=counts["lost"])
    assert counts["lost"] > 0


@given(kind=kinds, data=st.data())
@settings(max_examples=STORED_CLASSES)
def test_what_its_types_allow_is_stored(kind: Kind, data: st.DataObject) -> None:
    value = data.draw(kind.values)
    event = cast("Any", event_class(kind.annotation))(value=value)
    try:
        record = MessageCodec().encode(event, time=0.0)
    except StoredMessageError:
        assert not kind.is_kept
    else:
        assert comes_back(event, record)
