"""Arrow: what Spark's types are in it, and the one door to pyarrow, which has no types."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, TypeAlias

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from msgbus.errors import MissingExtraError

try:
    pa: Any = import_module("pyarrow")
except ImportError as error:  # pragma: no cover (the tests have it)
    raise MissingExtraError("pyarrow", extra="spark") from error

Array: TypeAlias = Any
"""A `pyarrow.Array`."""

ArrowType: TypeAlias = Any
"""A `pyarrow.DataType`."""

Batch: TypeAlias = Any
"""A `pyarrow.RecordBatch`."""

Schema: TypeAlias = Any
"""A `pyarrow.Schema`."""

_PLAIN: Final[Mapping[type[DataType], ArrowType]] = {
    BinaryType: pa.binary(),
    BooleanType: pa.bool_(),
    DateType: pa.date32(),
    DayTimeIntervalType: pa.duration("us"),
    DoubleType: pa.float64(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    StringType: pa.string(),
    TimestampNTZType: pa.timestamp("us"),
    TimestampType: pa.timestamp("us", tz="UTC"),
}


def arrow_type(spark_type: DataType) -> ArrowType:
    """The Arrow type that Spark expects for one of its own."""
    if isinstance(spark_type, DecimalType):
        return pa.decimal128(spark_type.precision, spark_type.scale)
    if isinstance(spark_type, ArrayType):
        return pa.list_(arrow_type(spark_type.elementType))
    if isinstance(spark_type, MapType):
        return pa.map_(arrow_type(spark_type.keyType), arrow_type(spark_type.valueType))
    if isinstance(spark_type, StructType):
        return pa.struct([(field.name, arrow_type(field.dataType)) for field in spark_type.fields])
    return _PLAIN[type(spark_type)]


def arrow_schema(schema: StructType) -> Schema:
    """The Arrow schema of a frame's batches."""
    return pa.schema([(field.name, arrow_type(field.dataType)) for field in schema.fields])


def with_small_types(batch: Batch) -> Batch:
    """A batch as `arrow_schema` describes it: a session may be set to give texts as large ones."""
    if not any("large_" in str(one) for one in batch.schema.types):
        return batch
    fields = [(one.name, _small(one.type)) for one in batch.schema]
    return batch.cast(pa.schema(fields))


def _small(kind: ArrowType) -> ArrowType:
    types = pa.types
    if types.is_large_string(kind):
        return pa.string()
    if types.is_large_binary(kind):
        return pa.binary()
    if types.is_map(kind):
        return pa.map_(_small(kind.key_type), _small(kind.item_type))
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_small(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([(one.name, _small(one.type)) for one in kind])
    return kind
