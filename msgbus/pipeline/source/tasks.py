"""Python functions over Arrow batches, run by Spark's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from pyspark.sql.types import StructType

from msgbus.pipeline.arrow import Batch, with_small_types
from msgbus.pipeline.source.ranges import Range

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Batches: TypeAlias = Iterator[Batch]

Work: TypeAlias = Callable[[Batches], Batches]

Read: TypeAlias = Callable[[Range], Batches]


def mapped(frame: DataFrame, work: Work, schema: StructType | str) -> DataFrame:
    """`mapInArrow`, of whose types strict checkers know too little."""

    def run(batches: Batches) -> Batches:
        return work(map(with_small_types, batches))

    map_in_arrow: Callable[..., DataFrame] = cast("Any", frame).mapInArrow
    return map_in_arrow(run, schema)


def in_tasks(
    spark: SparkSession,
    read: Read,
    ranges: Sequence[Range],
    work: Work,
    schema: StructType | str,
) -> DataFrame:
    """The same for ranges, a task for each, that `read` can read where the task runs.

    The rows stay in one process: through the JVM they would be moved twice.
    """

    def run(batches: Batches) -> Batches:
        numbers: list[int] = [one for batch in batches for one in batch.column(0).to_pylist()]
        return work(rows for number in numbers for rows in read(ranges[number]))

    return mapped(spark.range(0, len(ranges), 1, max(1, len(ranges))), run, schema)
