"""Replay: a projection over history, keys side by side, each key's events in order.

Three steps: every event gets its key; events of one key come together, sorted by offset; the
fold runs over them. The sort is asked for explicitly: a shuffle alone keeps no order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from pyspark.sql import functions as sql
from pyspark.sql.types import StringType, StructField, StructType

from msgbus.journal.records import Kind, Record
from msgbus.metadata import NO_HEADERS
from msgbus.pipeline.arrow import Batch, Schema, arrow_schema, pa
from msgbus.pipeline.columns import MESSAGES
from msgbus.pipeline.projections import Fold, fold_sorted, in_chunks
from msgbus.pipeline.schemas import spark_schema, to_row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Batches: TypeAlias = Iterator[Batch]

COLUMNS: Final = (
    "message_id",
    "name",
    "version",
    "topic",
    "key",
    "kind",
    "correlation_id",
    "causation_id",
    "root_id",
    "depth",
    "session_id",
    "headers",
    "payload",
    "_corrupt",
    "offset",
)
"""What a record is made from, in its own order. Not its time: no event has it."""

KEY: Final = "_key"
_ROWS: Final = 10_000
_KINDS: Final = {kind.value: kind for kind in Kind}


def replayed(messages: DataFrame, fold: Fold, *, partitions: int | None = None) -> DataFrame:
    """The rows of a projection; `messages` has `COLUMNS`, and its events only."""
    if fold.key is None:
        keyed = messages.withColumn(KEY, sql.col("key"))
    else:
        schema = MESSAGES.select(COLUMNS)
        schema = StructType([*schema.fields, StructField(KEY, StringType())])
        keyed = mapped(messages, _keyed(fold, arrow_schema(schema)), schema)
    keyed = keyed.where(sql.col(KEY).isNotNull())
    together = keyed.repartition(KEY) if partitions is None else keyed.repartition(partitions, KEY)
    # By key as well: then a task has one state in memory, however many keys it gets.
    ordered = together.sortWithinPartitions(KEY, "offset")
    rows = spark_schema(fold.row)
    return mapped(ordered, _folded(fold, arrow_schema(rows)), rows)


def mapped(
    frame: DataFrame, function: Callable[[Batches], Batches], schema: StructType
) -> DataFrame:
    """`mapInArrow`, of whose types strict checkers know too little."""
    map_in_arrow: Callable[..., DataFrame] = cast("Any", frame).mapInArrow
    return map_in_arrow(function, schema)


def _keyed(fold: Fold, schema: Schema) -> Callable[[Batches], Batches]:
    """Adds the key; an event that does not decode has none, or fails the job."""

    def run(batches: Batches) -> Batches:
        codec = fold.codec()
        for batch in batches:
            keys: list[str | None] = []
            for record in records(batch):
                event = fold.event(codec, record)
                keys.append(None if event is None else fold.key_of(record, event))
            columns = [*batch.columns, pa.array(keys, pa.string())]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return run


def _folded(fold: Fold, schema: Schema) -> Callable[[Batches], Batches]:
    def run(batches: Batches) -> Batches:
        pairs = (
            pair
            for batch in batches
            for pair in zip(batch.column(KEY).to_pylist(), records(batch), strict=True)
        )
        for chunk in in_chunks(fold_sorted(fold, pairs, fold.codec()), _ROWS):
            rows = [to_row(row, fold.row) for row in chunk]
            yield pa.RecordBatch.from_pylist(rows, schema=schema)

    return run


def records(batch: Batch) -> Iterator[Record]:
    """The records of a batch with `COLUMNS`."""
    columns = [batch.column(name).to_pylist() for name in COLUMNS]
    for (
        message_id, name, version, topic, key, kind, correlation_id, causation_id, root_id, depth,
        session_id, headers, payload, corrupt, offset,
    ) in zip(*columns, strict=True):  # fmt: skip
        yield Record(
            message_id, name, version, topic, key, _KINDS[kind], 0.0, correlation_id,
            causation_id, root_id, depth, session_id, dict(headers) if headers else NO_HEADERS,
            (payload if payload is not None else corrupt).encode(), False, offset,
        )  # fmt: skip
