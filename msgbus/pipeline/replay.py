"""Replay: a projection over history, keys side by side, each key's events in order.

Three steps: every event gets its key, and is packed with others of its bucket; the packs of a
bucket come together, sorted by offset; the fold runs over them. The sort is asked for
explicitly: a shuffle alone keeps no order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, cast

from pyspark.sql import functions as sql
from pyspark.sql.types import StringType, StructField, StructType

from msgbus.pipeline.arrow import Schema, arrow_schema, pa
from msgbus.pipeline.lake.reading import Parts
from msgbus.pipeline.packing import PACKED, packer, unpacked
from msgbus.pipeline.projections import Fold, States, in_chunks
from msgbus.pipeline.schemas import spark_schema, to_row
from msgbus.pipeline.source.options import read_options
from msgbus.pipeline.source.ranges import FEWEST, Range
from msgbus.pipeline.source.reader import JournalReader
from msgbus.pipeline.source.tables import MESSAGES
from msgbus.pipeline.source.tasks import Batches, Work, in_tasks, mapped
from msgbus.pipeline.stored import COLUMNS, Plain, StoredRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["COLUMNS", "Split", "replayed", "split_keys"]

KEY: Final = "_key"
_ROWS: Final = 10_000

IN_A_BUCKET: Final = 250_000
"""Messages of one bucket, about: a task has the states of one bucket in memory."""

MOST_BUCKETS: Final = 512
"""With more of them, packs would be small and many, unless more tasks are asked for."""


def replayed(
    spark: SparkSession, parts: Parts, fold: Fold, *, partitions: int | None = None
) -> DataFrame:
    """The rows of a projection; the parts have `COLUMNS`, and its events only."""
    rows, ranges, read = parts.rows, list[Range](), None
    if parts.tail is not None:
        options, columns = read_options(parts.tail), MESSAGES.select(COLUMNS)
        reader = JournalReader(options, columns, check_payloads=False)
        ranges, read = reader.partitions(), reader.read
        rows += sum(one.high - one.low + 1 for one in ranges)
    tasks, buckets = split_keys(rows, partitions or _tasks(spark, rows))
    schema = arrow_schema(_with_key(fold))
    pack = _packing(fold, buckets, schema)
    packs = None if parts.sealed is None else mapped(parts.sealed, pack, PACKED)
    if read is not None:
        live = in_tasks(spark, read, ranges, pack, PACKED)
        packs = live if packs is None else packs.unionAll(live)
    return _put_together(cast("DataFrame", packs), fold, tasks, schema)


def _put_together(packs: DataFrame, fold: Fold, tasks: int, schema: Schema) -> DataFrame:
    place = (sql.col("bucket") % tasks).cast("int")
    together = packs.repartitionById(tasks, place).sortWithinPartitions("bucket", "first")
    rows = spark_schema(fold.row)
    return mapped(together, _folded(fold, schema, arrow_schema(rows)), rows)


class Split(NamedTuple):
    """How keys are shared out."""

    tasks: int
    buckets: int


def split_keys(rows: int, tasks: int) -> Split:
    """Buckets for so many tasks; each task has the same number of them."""
    each = -(-rows // (tasks * IN_A_BUCKET))
    return Split(tasks, tasks * max(1, min(each, MOST_BUCKETS // tasks)))


def _tasks(spark: SparkSession, rows: int) -> int:
    """As many as Spark takes for every shuffle, unless there is too little to do."""
    setting = spark.conf.get("spark.sql.shuffle.partitions") or ""
    usual = int(setting) if setting.isdigit() else 200
    return max(1, min(usual, -(-rows // FEWEST)))


def _with_key(fold: Fold) -> StructType:
    schema = MESSAGES.select(COLUMNS)
    if fold.key is None:
        return schema
    return StructType([*schema.fields, StructField(KEY, StringType())])


def _packing(fold: Fold, buckets: int, schema: Schema) -> Work:
    if fold.key is None:
        return packer(buckets, "key")
    pack = packer(buckets, KEY)

    def run(batches: Batches) -> Batches:
        return pack(_keyed(fold, schema, batches))

    return run


def _keyed(fold: Fold, schema: Schema, batches: Batches) -> Batches:
    """Adds the key; an event that does not decode has none, or fails the job."""
    plain, decode = _plain_ways(fold), fold.decoder()
    for batch in batches:
        events = StoredRows(batch).messages(plain, decode)
        keys = [None if event is None else fold.key_of(event, None) for event in events]
        columns = [*batch.columns, pa.array(keys, pa.string())]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_ways(fold: Fold) -> dict[str, Plain]:
    return {one.__wire__.name: Plain.of(one) for one in fold.types}


def _folded(fold: Fold, packed: Schema, schema: Schema) -> Work:
    key = "key" if fold.key is None else KEY

    def run(batches: Batches) -> Batches:
        plain, decode = _plain_ways(fold), fold.decoder()
        states, current = States(fold), -1
        for bucket, batch in unpacked(batches, packed):
            if bucket != current:
                yield from _rows_of(states, fold, schema)
                states, current = States(fold), bucket
            rows = StoredRows(batch)
            events = rows.messages(plain, decode)
            states.advance(zip(rows.column(key), events, rows.column("offset"), strict=True))
        yield from _rows_of(states, fold, schema)

    return run


def _rows_of(states: States, fold: Fold, schema: Schema) -> Batches:
    for chunk in in_chunks(states.rows(), _ROWS):
        rows = [to_row(row, fold.row) for row in chunk]
        yield pa.RecordBatch.from_pylist(rows, schema=schema)
