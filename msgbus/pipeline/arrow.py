"""Arrow: the Arrow types of Spark types, and functions over batches on Spark's workers.

pyarrow is not typed: its names are `Any` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from pyspark.sql import types

from msgbus.errors import MissingExtraError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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

_PLAIN: Final[Mapping[type[types.DataType], ArrowType]] = {
    types.BinaryType: pa.binary(),
    types.BooleanType: pa.bool_(),
    types.DateType: pa.date32(),
    types.DayTimeIntervalType: pa.duration("us"),
    types.DoubleType: pa.float64(),
    types.IntegerType: pa.int32(),
    types.LongType: pa.int64(),
    types.StringType: pa.string(),
    types.TimestampNTZType: pa.timestamp("us"),
    types.TimestampType: pa.timestamp("us", tz="UTC"),
}


def arrow_type(spark_type: types.DataType) -> ArrowType:
    """The Arrow type of a Spark type."""
    if isinstance(spark_type, types.DecimalType):
        return pa.decimal128(spark_type.precision, spark_type.scale)
    if isinstance(spark_type, types.ArrayType):
        return pa.list_(arrow_type(spark_type.elementType))
    if isinstance(spark_type, types.MapType):
        return pa.map_(arrow_type(spark_type.keyType), arrow_type(spark_type.valueType))
    if isinstance(spark_type, types.StructType):
        return pa.struct([(field.name, arrow_type(field.dataType)) for field in spark_type.fields])
    return _PLAIN[type(spark_type)]


def arrow_schema(schema: types.StructType) -> Schema:
    """The Arrow schema of a frame."""
    return pa.schema([(field.name, arrow_type(field.dataType)) for field in schema.fields])


def with_small_types(batch: Batch) -> Batch:
    """Cast a batch to the types of `arrow_schema`: a session may be set to use large ones."""
    if not any("large_" in str(one) for one in batch.schema.types):
        return batch
    fields = [(one.name, _small(one.type)) for one in batch.schema]
    return batch.cast(pa.schema(fields))


def _small(kind: ArrowType) -> ArrowType:
    arrow = pa.types
    if arrow.is_large_string(kind):
        return pa.string()
    if arrow.is_large_binary(kind):
        return pa.binary()
    if arrow.is_map(kind):
        return pa.map_(_small(kind.key_type), _small(kind.item_type))
    if arrow.is_list(kind) or arrow.is_large_list(kind):
        return pa.list_(_small(kind.value_type))
    if arrow.is_struct(kind):
        return pa.struct([(one.name, _small(one.type)) for one in kind])
    return kind


Batches: TypeAlias = Iterator[Batch]

BatchFunction: TypeAlias = Callable[[Batches], Batches]

T = TypeVar("T")


def mapped(frame: DataFrame, work: BatchFunction, schema: types.StructType | str) -> DataFrame:
    """`mapInArrow`, typed."""

    def run(batches: Batches) -> Batches:
        return work(map(with_small_types, batches))

    map_in_arrow: Callable[..., DataFrame] = cast("Any", frame).mapInArrow
    return map_in_arrow(run, schema)


def in_tasks(
    spark: SparkSession,
    read: Callable[[T], Batches],
    ranges: Sequence[T],
    work: BatchFunction,
    schema: types.StructType | str,
) -> DataFrame:
    """The same over what `read` reads from each range, in one task per range.

    The rows do not pass through the JVM.
    """

    def run(batches: Batches) -> Batches:
        numbers: list[int] = [one for batch in batches for one in batch.column(0).to_pylist()]
        return work(rows for number in numbers for rows in read(ranges[number]))

    return mapped(spark.range(0, len(ranges), 1, max(1, len(ranges))), run, schema)
