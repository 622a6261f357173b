"""Pydantic models become schemas of Spark, and their values rows, and back, without a loss."""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired
from uuid import UUID

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    Json,
    JsonValue,
    NaiveDatetime,
    RootModel,
    SecretStr,
)
from typing_extensions import TypedDict

from msgbus import Event
from msgbus.pipeline.arrow import arrow_schema, pa
from msgbus.pipeline.schemas import from_row, spark_schema, to_row


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Odd(enum.Enum):
    NUMBER = 1
    TEXT = "x"


class Line(BaseModel):
    sku: str
    colors: list[Color] | None = None


class Tree(BaseModel):
    value: int
    below: list[Tree] = []


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    known: int


class Bag(RootModel[dict[str, int]]):
    pass


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


class Options(TypedDict):
    level: int
    note: NotRequired[str]


class Pair(NamedTuple):
    left: int
    right: str


class Plain(Event):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    whole: int
    real: float
    exact: Decimal
    price: Annotated[Decimal, Field(max_digits=10, decimal_places=2)]
    flag: bool
    text: str
    data: bytes
    day: date
    moment: datetime
    aware: AwareDatetime
    local: NaiveDatetime
    clock: time
    span: timedelta
    ident: UUID
    color: Color
    size: Size
    odd: Odd
    word: Literal["a", "b"]
    choice: Literal[1, "a"] | None
    maybe: int | None
    path: Path
    address: ipaddress.IPv4Address


class Nested(Event):
    line: Line
    lines: list[Line]
    tree: Tree
    pair: tuple[int, str]
    numbers: tuple[int, ...]
    words: set[str]
    sizes: frozenset[Size]
    prices: dict[str, float]
    by_number: dict[int, Line | None]
    by_real: dict[float, int]
    by_id: dict[UUID, list[int]]
    union: int | str | Line
    loose: int | str | None
    anything: Any
    json_value: JsonValue
    point: Point
    options: Options
    couple: Pair
    bag: Bag
    deep: list[dict[str, list[Line | None]]]
    bare: list  # type: ignore[type-arg]


class Rest(Event):
    open: Open
    source: Json[list[int]]
    url: HttpUrl
    secret: SecretStr
    number: complex


def there_and_back(message: Event) -> Event:
    """Through Arrow, as Spark's workers send and receive rows."""
    schema = arrow_schema(spark_schema(type(message)))
    batch = pa.RecordBatch.from_pylist([to_row(message)], schema=schema)
    (row,) = batch.to_pylist(maps_as_pydicts="lossy")
    return from_row(type(message), row)


# -- types ---------------------------------------------------------------------------------

TYPES: dict[type[Event], dict[str, str]] = {
    Plain: {
        "whole": "bigint",
        "real": "double",
        "exact": "decimal(38,18)",
        "price": "decimal(10,2)",
        "flag": "boolean",
        "text": "string",
        "data": "binary",
        "day": "date",
        "moment": "timestamp",
        "aware": "timestamp",
        "local": "timestamp_ntz",
        "clock": "string",
        "span": "interval day to second",
        "ident": "string",
        "color": "string",
        "size": "bigint",
        "odd": "string",
        "word": "string",
        "choice": "string",
        "maybe": "bigint",
        "path": "string",
        "address": "string",
    },
    Nested: {
        "line": "struct<sku:string,colors:array<string>>",
        "lines": "array<struct<sku:string,colors:array<string>>>",
        "tree": "struct<value:bigint,below:array<string>>",
        "pair": "struct<_1:bigint,_2:string>",
        "numbers": "array<bigint>",
        "words": "array<string>",
        "sizes": "array<bigint>",
        "prices": "map<string,double>",
        "by_number": "map<bigint,struct<sku:string,colors:array<string>>>",
        "by_real": "string",
        "by_id": "map<string,array<bigint>>",
        "union": "string",
        "loose": "string",
        "anything": "string",
        "json_value": "string",
        "point": "struct<x:bigint,y:double>",
        "options": "struct<level:bigint,note:string>",
        "couple": "string",
        "bag": "map<string,bigint>",
        "deep": "array<map<string,array<struct<sku:string,colors:array<string>>>>>",
        "bare": "array<string>",
    },
    Rest: {
        "open": "string",
        "source": "string",
        "url": "string",
        "secret": "string",
        "number": "string",
    },
}


@pytest.mark.parametrize("model", TYPES)
def test_each_kind_of_field_has_its_type(model: type[Event]) -> None:
    fields = {one.name: one.dataType.simpleString() for one in spark_schema(model).fields}

    assert fields == TYPES[model]


@pytest.mark.parametrize("model", TYPES)
def test_arrow_has_the_types_that_spark_expects(model: type[Event]) -> None:
    schema = spark_schema(model)
    sparks_own: Any = import_module("pyspark.sql.pandas.types")

    assert arrow_schema(schema).equals(sparks_own.to_arrow_schema(schema, timezone="UTC"))


# -- values --------------------------------------------------------------------------------

WHOLE = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"))
# Some room at both ends: there times of other zones do not exist.
LOCAL = st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29))  # noqa: DTZ001
AWARE = LOCAL.map(lambda one: one.replace(tzinfo=UTC))
LINES = st.builds(Line, sku=TEXT, colors=st.none() | st.lists(st.sampled_from(Color)))
TREES = st.recursive(
    st.builds(Tree, value=WHOLE),
    lambda below: st.builds(Tree, value=WHOLE, below=st.lists(below, max_size=3)),
    max_leaves=5,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
SPANS = st.timedeltas(timedelta(days=-(10**8)), timedelta(days=10**8))
REAL = st.floats(allow_nan=False)

PLAIN = st.builds(
    Plain,
    whole=WHOLE,
    real=REAL,
    exact=st.decimals(-(10**19), 10**19, allow_nan=False, places=18),
    price=st.decimals(-(10**7), 10**7, allow_nan=False, places=2),
    flag=st.booleans(),
    text=TEXT,
    data=st.binary(),
    day=st.dates(),
    moment=AWARE,
    aware=AWARE,
    local=LOCAL,
    clock=st.times(),
    span=SPANS,
    ident=st.uuids(),
    color=st.sampled_from(Color),
    size=st.sampled_from(Size),
    odd=st.sampled_from(Odd),
    word=st.sampled_from(["a", "b"]),
    choice=st.sampled_from([1, "a", None]),
    maybe=st.none() | WHOLE,
    path=st.just(Path("/a/b c")),
    address=st.ip_addresses(v=4),
)
NESTED = st.builds(
    Nested,
    line=LINES,
    lines=st.lists(LINES, max_size=3),
    tree=TREES,
    pair=st.tuples(WHOLE, TEXT),
    numbers=st.lists(WHOLE, max_size=3).map(tuple),
    words=st.sets(TEXT, max_size=4),
    sizes=st.frozensets(st.sampled_from(Size)),
    prices=st.dictionaries(TEXT, REAL, max_size=3),
    by_number=st.dictionaries(WHOLE, st.none() | LINES, max_size=3),
    by_real=st.dictionaries(st.floats(-10, 10), WHOLE, max_size=3),
    by_id=st.dictionaries(st.uuids(), st.lists(WHOLE, max_size=2), max_size=2),
    union=WHOLE | TEXT | LINES,
    loose=st.none() | WHOLE | TEXT,
    anything=JSON,
    json_value=JSON,
    point=st.builds(Point, x=WHOLE, y=REAL),
    options=st.fixed_dictionaries({"level": WHOLE}, optional={"note": TEXT}),
    couple=st.tuples(WHOLE, TEXT).map(lambda one: Pair(*one)),
    bag=st.dictionaries(TEXT, WHOLE, max_size=3).map(Bag),
    deep=st.lists(
        st.dictionaries(TEXT, st.lists(st.none() | LINES, max_size=2), max_size=2), max_size=2
    ),
    bare=st.lists(JSON, max_size=3),
)


@settings(max_examples=60)
@given(message=PLAIN)
def test_plain_values_come_back_equal(message: Plain) -> None:
    assert there_and_back(message) == message


@settings(max_examples=60)
@given(message=NESTED)
def test_nested_values_come_back_equal(message: Nested) -> None:
    assert there_and_back(message) == message


def test_other_values_come_back_and_secrets_stay_hidden() -> None:
    message = Rest.model_validate(
        {
            "open": {"known": 1, "more": [1, 2]},
            "source": "[1, 2]",
            "url": "https://example.org/a",
            "secret": "hunter2",
            "number": 1 + 2j,
        }
    )

    found = there_and_back(message)

    assert isinstance(found, Rest)
    assert (found.open, found.source, found.url) == (message.open, [1, 2], message.url)
    assert found.number == message.number
    assert "hunter2" not in str(to_row(message))


# -- what has no place ---------------------------------------------------------------------


class Number(Event):
    value: int | None = None
    exact: Decimal | None = None
    span: timedelta | None = None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"value": 2**63}, "beyond 64 bits"),
        ({"value": -(2**63) - 1}, "beyond 64 bits"),
        ({"exact": "1e-19"}, r"does not fit into decimal\(38,18\)"),
        ({"exact": "1e20"}, r"does not fit into decimal\(38,18\)"),
        ({"exact": "1e999999"}, r"does not fit into decimal\(38,18\)"),
        ({"span": timedelta.max}, "beyond 64 bits"),
    ],
)
def test_a_value_without_a_place_is_refused_not_changed(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        to_row(Number.model_validate(fields))


def test_a_time_without_a_zone_counts_as_utc() -> None:
    class Seen(Event):
        at: datetime

    moment = datetime(2026, 1, 1, 12, tzinfo=UTC)

    assert to_row(Seen(at=moment.replace(tzinfo=None))) == {"at": moment}


def test_sets_have_an_order_that_does_not_depend_on_the_process() -> None:
    class Tagged(Event):
        tags: set[str]

    tags = [f"tag {number}" for number in range(50)]

    assert to_row(Tagged(tags=set(tags))) == {"tags": sorted(tags)}


def test_a_subclass_has_the_columns_of_its_base_when_asked_for() -> None:
    class Base(Event):
        a: int

    class More(Base):
        b: int

    assert to_row(More(a=1, b=2), Base) == {"a": 1}
    assert to_row(More(a=1, b=2)) == {"a": 1, "b": 2}
