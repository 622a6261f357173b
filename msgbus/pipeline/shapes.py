"""Shapes: a Spark type, with conversion of Python values to it and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple, cast
from uuid import UUID

from pydantic import ConfigDict, PydanticUserError, RootModel, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import from_json, to_json
from pyspark.sql import types

Convert = Callable[[Any], Any]

LARGEST: Final = 2**63 - 1
_MICROSECOND: Final = timedelta(microseconds=1)


class Shape(NamedTuple):
    """The Spark type of one annotation, and its conversions; `None` stays `None`."""

    type: types.DataType
    encode: Convert
    """From a Python value to one that Arrow takes."""
    decode: Convert
    """From there to what pydantic validates."""
    is_plain: bool = True
    """Whether it is neither JSON text nor nested nor nullable."""


def _same(value: Any) -> Any:
    return value


def _made(
    kind: types.DataType, encode: Convert, decode: Convert = _same, *, plain: bool = True
) -> Shape:
    def there(value: Any) -> Any:
        return None if value is None else encode(value)

    def back(value: Any) -> Any:
        return None if value is None else decode(value)

    return Shape(kind, there, back, plain)


# -- plain values --------------------------------------------------------------------------


def _integer(value: int) -> int:
    if not -LARGEST - 1 <= value <= LARGEST:
        message = "A whole number is beyond 64 bits; annotate the field with Decimal to keep it"
        raise ValueError(message)
    return int(value)


def _moment(value: datetime) -> datetime:
    """In UTC; a time without a zone counts as UTC."""
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _aware(value: datetime) -> datetime:
    # Spark returns naive times of the machine's zone.
    return value.astimezone(UTC)


def _duration(value: timedelta) -> timedelta:
    _integer(value // _MICROSECOND)
    return value


def _day(value: date) -> date:
    return value.date() if isinstance(value, datetime) else value


TEXT: Final = _made(types.StringType(), str)
INTEGER: Final = _made(types.LongType(), _integer)
FLOAT: Final = _made(types.DoubleType(), float)
BOOLEAN: Final = _made(types.BooleanType(), bool)
BYTES: Final = _made(types.BinaryType(), bytes, bytes)
DATE: Final = _made(types.DateType(), _day)
MOMENT: Final = _made(types.TimestampType(), _moment, _aware)
LOCAL_TIME: Final = _made(types.TimestampNTZType(), _same)
DURATION: Final = _made(types.DayTimeIntervalType(), _duration)
TIME_TEXT: Final = _made(types.StringType(), time.isoformat)
UUID_TEXT: Final = _made(types.StringType(), str, UUID)

DIGITS: Final = 38
"""Digits of a Decimal at most."""

SCALE: Final = 18
"""Decimal places, unless the field has `decimal_places`."""


def decimal(metadata: tuple[Any, ...]) -> Shape:
    """A Decimal with the digits of the field's constraints."""
    digits, places = _limit(metadata, "max_digits"), _limit(metadata, "decimal_places")
    scale = SCALE if places is None else min(places, DIGITS)
    precision = DIGITS if digits is None or places is None else min(max(digits, scale, 1), DIGITS)
    encode = partial(_fitting, precision=precision, scale=scale)
    return _made(types.DecimalType(precision, scale), encode, _shortest)


def _limit(metadata: tuple[Any, ...], name: str) -> int | None:
    found = [getattr(one, name) for one in metadata if getattr(one, name, None) is not None]
    return int(found[-1]) if found else None


def _fitting(value: Decimal, *, precision: int, scale: int) -> Decimal:
    exact = None
    if value.is_finite() and value.adjusted() < DIGITS:
        exact = value.quantize(Decimal(1).scaleb(-scale), context=Context(prec=4 * DIGITS))
    if exact is None or exact != value or len(exact.as_tuple().digits) > precision:
        message = f"A number does not fit into decimal({precision},{scale})"
        raise ValueError(message)
    return exact


def _shortest(value: Decimal) -> Decimal:
    """Remove the trailing zeros of the column."""
    short = value.normalize(Context(prec=4 * DIGITS))
    return short.quantize(Decimal(1)) if cast("int", short.as_tuple().exponent) > 0 else short


def enum(kind: type[Enum]) -> Shape:
    """The values of an enumeration if all are strings or all integers, else JSON."""
    kinds: set[type] = {type(member.value) for member in kind}
    if kinds == {str}:
        return _made(types.StringType(), _value)
    if kinds == {int} and all(abs(member.value) <= LARGEST for member in kind):
        return _made(types.LongType(), _value)
    return json_of(kind)


def _value(member: Any) -> Any:
    return member.value if isinstance(member, Enum) else member


# -- JSON text -----------------------------------------------------------------------------

_CONFIG: Final = ConfigDict(
    arbitrary_types_allowed=True,
    ser_json_bytes="base64",
    val_json_bytes="base64",
    ser_json_inf_nan="strings",
)


def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(annotation, config=_CONFIG)
    except PydanticSchemaGenerationError:
        return None
    except PydanticUserError:
        return TypeAdapter(annotation)  # a model has its own configuration


def json_of(annotation: Any) -> Shape:
    """JSON text, for unions and others."""
    adapter = _adapter(annotation)
    if adapter is None:
        return _made(types.StringType(), _any_json, from_json, plain=False)

    def encode(value: Any) -> str:
        return adapter.dump_json(value, round_trip=True, by_alias=False).decode()

    def decode(text: str) -> Any:
        return adapter.validate_json(text, by_alias=False, by_name=True)

    return _made(types.StringType(), encode, decode, plain=False)


def _any_json(value: Any) -> str:
    return to_json(value, by_alias=False, inf_nan_mode="strings", fallback=str).decode()


def other(annotation: Any) -> Shape:
    """Other types: a string if their JSON always is one, else JSON text."""
    adapter = _adapter(annotation)
    if adapter is not None and _kind_in_json(adapter) == "string":

        def encode(value: Any) -> str:
            return str(adapter.dump_python(value, mode="json", round_trip=True))

        return _made(types.StringType(), encode)
    return json_of(annotation)


def _kind_in_json(adapter: TypeAdapter[Any]) -> str | None:
    try:
        return adapter.json_schema(mode="serialization").get("type")
    except PydanticUserError:
        return None


JSON_SOURCE: Final = _made(types.StringType(), _any_json, plain=False)
"""A field of pydantic's `Json`."""


# -- nested types --------------------------------------------------------------------------


def optional(inner: Shape) -> Shape:
    """A nullable shape."""
    return _made(inner.type, inner.encode, inner.decode, plain=False)


def array_of(item: Shape, kind: types.DataType, *, is_sorted: bool) -> Shape:
    """Lists, and sets in an order that is the same on all workers."""

    def encode(values: Any) -> list[Any]:
        ordered = sorted(values, key=_any_json) if is_sorted else values
        return [item.encode(value) for value in ordered]

    def decode(values: Any) -> list[Any]:
        return [item.decode(value) for value in values]

    return _made(kind, encode, decode, plain=False)


def map_of(key: Shape, value: Shape, kind: types.DataType) -> Shape:
    """Mappings with strings or integers as keys."""

    def encode(items: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        return [(key.encode(name), value.encode(one)) for name, one in items.items()]

    def decode(items: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key.decode(name): value.decode(one) for name, one in dict(items).items()}

    return _made(kind, encode, decode, plain=False)


def struct_of(
    fields: Mapping[str, Shape], kind: types.DataType, *, attributes: bool, optional: frozenset[str]
) -> Shape:
    """Models and dataclasses (`attributes`), and dictionaries with known keys."""

    def encode(value: Any) -> dict[str, Any]:
        if attributes:
            return {name: shape.encode(getattr(value, name)) for name, shape in fields.items()}
        return {
            name: shape.encode(value[name]) if name in value else None
            for name, shape in fields.items()
        }

    def decode(row: Any) -> dict[str, Any]:
        found = {name: shape.decode(row[name]) for name, shape in fields.items()}
        return {name: one for name, one in found.items() if one is not None or name not in optional}

    return _made(kind, encode, decode, plain=False)


def tuple_of(struct: Shape) -> Shape:
    """Tuples of a fixed length: a struct of `_1`, `_2` and so on."""

    def encode(values: tuple[Any, ...]) -> Any:
        return struct.encode({f"_{number}": value for number, value in enumerate(values, 1)})

    def decode(row: Any) -> tuple[Any, ...]:
        return tuple(struct.decode(row).values())

    return _made(struct.type, encode, decode, plain=False)


def root_of(inner: Shape) -> Shape:
    """A root model."""

    def encode(value: RootModel[Any]) -> Any:
        return inner.encode(value.root)

    return _made(inner.type, encode, inner.decode, plain=False)
