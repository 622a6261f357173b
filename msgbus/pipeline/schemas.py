"""Spark schemas of pydantic models, and conversion of their values to rows and back.

Each annotation becomes a `Shape`. What Spark has no type for, such as a union, is JSON text.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import (
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
    Set as AbstractSet,
)
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import (
    Annotated,
    Any,
    Final,
    ForwardRef,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Required,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

from pydantic import BaseModel, Json, RootModel
from pydantic.types import (
    AwareDatetime,
    FutureDate,
    FutureDatetime,
    NaiveDatetime,
    PastDate,
    PastDatetime,
)
from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType
from typing_extensions import ReadOnly, TypeAliasType, is_typeddict
from typing_inspection.introspection import is_union_origin

from msgbus.messages.message import Message
from msgbus.pipeline import shapes
from msgbus.pipeline.shapes import Shape

_PLAIN: Final[Mapping[Any, Shape]] = {
    AwareDatetime: shapes.MOMENT,
    FutureDate: shapes.DATE,
    FutureDatetime: shapes.MOMENT,
    NaiveDatetime: shapes.LOCAL_TIME,
    PastDate: shapes.DATE,
    PastDatetime: shapes.MOMENT,
    UUID: shapes.UUID_TEXT,
    bool: shapes.BOOLEAN,
    bytes: shapes.BYTES,
    date: shapes.DATE,
    datetime: shapes.MOMENT,
    float: shapes.FLOAT,
    int: shapes.INTEGER,
    str: shapes.TEXT,
    time: shapes.TIME_TEXT,
    timedelta: shapes.DURATION,
}
_LISTS: Final = frozenset({list, deque, Sequence, MutableSequence, tuple})
_SETS: Final = frozenset({set, frozenset, AbstractSet, MutableSet})
_MAPS: Final = frozenset({dict, Mapping, MutableMapping})


_LITERALS: Final[Mapping[frozenset[type], Shape]] = {
    frozenset({bool}): shapes.BOOLEAN,
    frozenset({int}): shapes.INTEGER,
    frozenset({str}): shapes.TEXT,
}


class _Field(NamedTuple):
    """One field of a struct."""

    name: str
    annotation: Any
    metadata: tuple[Any, ...] = ()
    is_required: bool = True


# -- models ----------------------------------------------------------------------------------


def spark_schema(model: type[BaseModel]) -> StructType:
    """The Spark schema of a model's fields, all nullable."""
    return cast("StructType", model_shape(model).type)


def to_row(message: BaseModel, model: type[BaseModel] | None = None) -> dict[str, Any]:
    """The fields of a message as a row; with `model`, a base class, only the fields of that.

    Raises:
        ValueError: A value does not fit its column: a whole number beyond 64 bits, a Decimal
            with too many digits, a duration beyond 292,000 years.
    """
    return cast("dict[str, Any]", model_shape(model or type(message)).encode(message))


T = TypeVar("T", bound=BaseModel)


def from_row(model: type[T], row: Mapping[str, Any]) -> T:
    """The message of a row.

    Raises:
        ValidationError: The row does not fit the model.
    """
    data = model_shape(model).decode(dict(row))
    return cast("T", model.__pydantic_validator__.validate_python(
        data, by_alias=False, by_name=True
    ))  # fmt: skip


@lru_cache(maxsize=1024)
def model_shape(model: type[BaseModel]) -> Shape:
    """The shape of a model, even without fields."""
    return _struct(_model_fields(model), (model,), attributes=True)


# -- from annotations to shapes ------------------------------------------------------------


def shape_of(annotation: Any, metadata: tuple[Any, ...] = (), seen: tuple[Any, ...] = ()) -> Shape:
    """The shape of an annotation; `seen` are the classes around it."""
    annotation, metadata = _unwrapped(annotation, metadata)
    if any(_is_json(one) for one in metadata):
        return shapes.JSON_SOURCE
    return (
        _plain(annotation, metadata)
        or _choice(annotation, seen)
        or _container(annotation, seen)
        or _struct_of(annotation, seen)
        or shapes.other(annotation)
    )


def _is_json(metadata: Any) -> bool:
    return metadata is Json or type(metadata).__name__ == "Json"


def _plain(annotation: Any, metadata: tuple[Any, ...]) -> Shape | None:
    if annotation is Decimal:
        return shapes.decimal(metadata)
    return _PLAIN.get(annotation) if _is_hashable(annotation) else None


def _unwrapped(annotation: Any, metadata: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Unwrap `Annotated`, type aliases and new types."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *found = get_args(annotation)
            metadata = (*metadata, *_flat(found))
        elif isinstance(annotation, TypeAliasType):
            if _names_others(annotation.__value__):
                return annotation, metadata  # may name itself, as JsonValue does
            annotation = annotation.__value__
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        else:
            return annotation, metadata


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for one in metadata:
        inner = getattr(one, "metadata", None)  # a Field() inside of Annotated
        if isinstance(inner, list):
            yield from inner
        else:
            yield one


def _names_others(annotation: Any) -> bool:
    """Whether it has forward references, which only pydantic can resolve."""
    if isinstance(annotation, (str, ForwardRef, TypeAliasType)):
        return True
    return any(_names_others(one) for one in get_args(annotation))


def _is_hashable(annotation: Any) -> bool:
    try:
        hash(annotation)
    except TypeError:
        return False
    return True


def _choice(annotation: Any, seen: tuple[Any, ...]) -> Shape | None:
    """Optional is its other type, other unions are JSON, enumerations are their values."""
    origin = get_origin(annotation)
    if is_union_origin(origin):
        members = [one for one in get_args(annotation) if one is not type(None)]
        if len(members) == 1:
            return shapes.optional(shape_of(members[0], seen=seen))
        return shapes.json_of(annotation)
    if origin is Literal:
        values: tuple[object, ...] = get_args(annotation)
        plain = _LITERALS.get(frozenset(map(type, values)))
        return plain or shapes.json_of(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return shapes.enum(annotation)
    return None


def _container(annotation: Any, seen: tuple[Any, ...]) -> Shape | None:
    origin = get_origin(annotation) or annotation
    if not _is_hashable(origin):
        return None
    arguments = get_args(annotation)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        fields = [_Field(f"_{number}", one) for number, one in enumerate(arguments, 1)]
        return shapes.tuple_of(_struct(fields, seen, attributes=False))
    if origin in _LISTS or origin in _SETS:
        item = shape_of(arguments[0] if arguments else Any, seen=seen)
        return shapes.array_of(item, ArrayType(item.type), is_sorted=origin in _SETS)
    if origin in _MAPS:
        key, value = (shape_of(one, seen=seen) for one in (*arguments, Any, Any)[:2])
        is_usable = isinstance(key.type, (StringType, LongType)) and key.is_plain
        if is_usable:
            return shapes.map_of(key, value, MapType(key.type, value.type))
        return shapes.json_of(annotation)
    return None


def _struct_of(annotation: Any, seen: tuple[Any, ...]) -> Shape | None:
    """Models, dataclasses and typed dictionaries, unless they contain themselves."""
    if not isinstance(annotation, type) or annotation in seen:
        return None
    kind = cast("type[Any]", annotation)
    inside = (*seen, kind)
    if issubclass(kind, RootModel):
        root = kind.model_fields["root"]
        return shapes.root_of(shape_of(root.annotation, tuple(root.metadata), inside))
    if is_typeddict(kind):
        fields = _typed_dict_fields(kind)
        return _struct(fields, inside, attributes=False) if fields else None
    fields = _model_fields(kind) if issubclass(kind, BaseModel) else _dataclass_fields(kind)
    if not fields or getattr(kind, "model_config", {}).get("extra") == "allow":
        return None  # unknown fields would be lost
    return _struct(fields, inside, attributes=True)


def _typed_dict_fields(kind: type[Any]) -> list[_Field]:
    required: frozenset[str] = kind.__required_keys__
    fields: list[_Field] = []
    for name, one in get_type_hints(kind, include_extras=True).items():
        # With postponed annotations the class does not know its NotRequired.
        is_required = name in required and get_origin(one) is not NotRequired
        fields.append(_Field(name, _bare(one), (), is_required))
    return fields


def _dataclass_fields(kind: type[Any]) -> list[_Field]:
    """Fields of a dataclass; empty for others, and for fields with `init=False`."""
    if not dataclasses.is_dataclass(kind):
        return []
    own = dataclasses.fields(kind)
    hints = get_type_hints(kind, include_extras=True)
    return [_Field(one.name, hints[one.name]) for one in own] if all(o.init for o in own) else []


def _bare(annotation: Any) -> Any:
    """Unwrap `Required`, `NotRequired` and `ReadOnly`."""
    while get_origin(annotation) in (Required, NotRequired, ReadOnly):
        (annotation,) = get_args(annotation)
    return annotation


def _model_fields(model: type[BaseModel]) -> list[_Field]:
    return [
        _Field(name, field.annotation, tuple(field.metadata))
        for name, field in model.model_fields.items()
    ]


def _struct(fields: Sequence[_Field], seen: tuple[Any, ...], *, attributes: bool) -> Shape:
    inner = {one.name: shape_of(one.annotation, one.metadata, seen) for one in fields}
    optional = frozenset(one.name for one in fields if not one.is_required)
    struct = StructType([StructField(name, shape.type) for name, shape in inner.items()])
    return shapes.struct_of(inner, struct, attributes=attributes, optional=optional)


def known_subclasses(message_type: type[Message]) -> list[type[Message]]:
    """A class and all its subclasses, in the order of definition."""
    found: dict[type[Message], None] = {message_type: None}
    for one in message_type.__subclasses__():
        found.update(dict.fromkeys(known_subclasses(one)))
    return list(found)
