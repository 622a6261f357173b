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
