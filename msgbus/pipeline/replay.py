"""Replay a projection over history: keys in parallel, the events of each key in order.

Three steps: each event gets its key and is packed with others of its bucket of keys; the packs of
a bucket are brought together and sorted by offset, as a shuffle alone keeps no order; the fold runs
over them. Packs travel as one row each, with many messages in Arrow's IPC format: row by row, Spark
would convert every column twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from zlib import crc32

from pyspark.sql import functions as sql
from pyspark.sql.types import StringType, StructField, StructType

from msgbus.pipeline.arrow import (
    Array,
    Batch,
    Batches,
    BatchFunction,
    Schema,
    arrow_schema,
    in_tasks,
    mapped,
    pa,
)
from msgbus.pipeline.arrow_decoding import COLUMNS, PlainPayload, StoredRows
from msgbus.pipeline.lake.reading import Parts
from msgbus.pipeline.projections import Fold, States, damaged_record, in_chunks
from msgbus.pipeline.schemas import spark_schema, to_row
from msgbus.pipeline.source.journal_file import FEWEST, Range
from msgbus.pipeline.source.options import read_options
from msgbus.pipeline.source.source import JournalReader
from msgbus.pipeline.source.tables import MESSAGES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


pc: Any = import_module("pyarrow.compute")

KEY: Final = "_key"
_ROWS: Final = 10_000

IN_A_BUCKET: Final = 250_000
"""Messages per bucket, about: a task has the states of one bucket in memory."""

MOST_BUCKETS: Final = 512
"""Buckets at most, unless there are more tasks: with more, packs would be small."""


def replayed(
    spark: SparkSession, parts: Parts, fold: Fold, *, partitions: int | None = None
) -> DataFrame:
    """The rows of a projection; the parts have `COLUMNS`, and only its events."""
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
    return _fold_packs(cast("DataFrame", packs), fold, tasks, schema)


def _fold_packs(packs: DataFrame, fold: Fold, tasks: int, schema: Schema) -> DataFrame:
    task = (sql.col("bucket") % tasks).cast("int")
    together = packs.repartitionById(tasks, task).sortWithinPartitions("bucket", "first")
    rows = spark_schema(fold.row)
    return mapped(together, _folded(fold, schema, arrow_schema(rows)), rows)


class KeySplit(NamedTuple):
    """How keys are split."""

    tasks: int
    buckets: int


def split_keys(rows: int, tasks: int) -> KeySplit:
    """Split keys into buckets, the same number for each task."""
    each = -(-rows // (tasks * IN_A_BUCKET))
    return KeySplit(tasks, tasks * max(1, min(each, MOST_BUCKETS // tasks)))


def _tasks(spark: SparkSession, rows: int) -> int:
    """Spark's number of shuffle partitions, or fewer for few rows."""
    setting = spark.conf.get("spark.sql.shuffle.partitions") or ""
    usual = int(setting) if setting.isdigit() else 200
    return max(1, min(usual, -(-rows // FEWEST)))


def _with_key(fold: Fold) -> StructType:
    schema = MESSAGES.select(COLUMNS)
    if fold.key is None:
        return schema
    return StructType([*schema.fields, StructField(KEY, StringType())])


def _packing(fold: Fold, buckets: int, schema: Schema) -> BatchFunction:
    pack = packer(buckets, "key" if fold.key is None else KEY)

    def run(batches: Batches) -> Batches:
        sound = _sound(batches, skip_corrupt=fold.skip_corrupt)
        return pack(sound if fold.key is None else _keyed(fold, schema, sound))

    return run


def _sound(batches: Batches, *, skip_corrupt: bool) -> Batches:
    """Leave out records that are damaged or missing, or fail with the first of them."""
    for batch in batches:
        is_sound = pc.is_valid(batch.column("message_id"))
        if pc.all(is_sound).as_py() is False:
            if not skip_corrupt:
                offsets = batch.column("offset").filter(pc.invert(is_sound))
                raise damaged_record(offsets[0].as_py())
            batch = batch.filter(is_sound)  # noqa: PLW2901
        yield batch


def _keyed(fold: Fold, schema: Schema, batches: Batches) -> Batches:
    """Add the key; an event that does not decode has none, or fails the job."""
    plain, decode = _plain_payloads(fold), fold.decoder()
    for batch in batches:
        events = StoredRows(batch).messages(plain, decode)
        keys = [None if event is None else fold.key_of(event, None) for event in events]
        columns = [*batch.columns, pa.array(keys, pa.string())]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_payloads(fold: Fold) -> dict[str, PlainPayload]:
    return {one.__wire__.name: PlainPayload.of(one) for one in fold.types}


def _folded(fold: Fold, packed: Schema, schema: Schema) -> BatchFunction:
    key = "key" if fold.key is None else KEY

    def run(batches: Batches) -> Batches:
        plain, decode = _plain_payloads(fold), fold.decoder()
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


PACKED: Final = "bucket int, first long, last long, size long, rows binary"
"""The columns of packs: bucket, first and last offset, uncompressed size, and messages."""

_SCHEMA: Final = pa.schema(
    [
        ("bucket", pa.int32()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("size", pa.int64()),
        ("rows", pa.binary()),
    ]
)

# A third of the bytes, for a fraction of what moving them costs.
_ZSTD: Final = pa.Codec("zstd", compression_level=1)

TOGETHER: Final = 100_000
"""Messages per pack group, at most."""

MOST_BYTES: Final = 64 << 20
"""Bytes per pack group, at most."""


def packer(buckets: int, key: str) -> BatchFunction:
    """Pack batches by bucket of their column `key`; messages without a key are left out."""

    def run(batches: Batches) -> Batches:
        for group in _groups(batches):
            batch = _joined(group)
            keys = batch.column(key)
            if keys.null_count:
                batch = batch.filter(pc.is_valid(keys))
            if batch.num_rows:
                yield _packed(batch, _buckets_of(batch.column(key), buckets))

    return run


def _groups(batches: Batches) -> Iterator[list[Batch]]:
    """Groups of batches that are neighbours in the journal."""
    group: list[Batch] = []
    rows, size, end = 0, 0, 0
    for batch in batches:
        if not batch.num_rows:
            continue
        ends = pc.min_max(batch.column("offset"))
        first, last = ends["min"].as_py(), ends["max"].as_py()
        # A pack that spans what other tasks read would have to be merged with all of it.
        is_near = end < first <= end + TOGETHER
        if group and (rows >= TOGETHER or size >= MOST_BYTES or not is_near):
            yield group
            group, rows, size = [], 0, 0
        group.append(batch)
        rows, size, end = rows + batch.num_rows, size + batch.nbytes, last
    if group:
        yield group


def _buckets_of(keys: Array, buckets: int) -> Array:
    coded = keys.dictionary_encode()
    known = [crc32(key.encode()) % buckets for key in coded.dictionary.to_pylist()]
    return pa.array(known, pa.int32()).take(coded.indices)


def _packed(batch: Batch, buckets: Array) -> Batch:
    keys = pa.table({"bucket": buckets, "offset": batch.column("offset")})
    order = pc.sort_indices(keys, sort_keys=[("bucket", "ascending"), ("offset", "ascending")])
    batch, runs = batch.take(order), pc.run_end_encode(buckets.take(order))
    packs: list[tuple[int, int, int, int, bytes]] = []
    start = 0
    for bucket, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        part = batch.slice(start, end - start)
        offsets = part.column("offset")
        plain = part.serialize()
        rows = _ZSTD.compress(plain, asbytes=True)
        packs.append((bucket, offsets[0].as_py(), offsets[-1].as_py(), plain.size, rows))
        start = end
    columns = zip(*packs, strict=True)
    arrays = [pa.array(values, one.type) for values, one in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


class Unpacked(NamedTuple):
    """Messages of one bucket, in the order of their offsets."""

    bucket: int
    rows: Batch


def unpacked(batches: Iterable[Batch], schema: Schema) -> Iterator[Unpacked]:
    """The messages of packs that are sorted by bucket and first offset, in order."""
    bucket, last = -1, -1
    waiting: list[Batch] = []
    for pack in _rows(batches):
        # Overlapping packs are merged: files of a lake may overlap, as they are by day.
        if waiting and (pack["bucket"] != bucket or pack["first"] > last):
            yield Unpacked(bucket, _merged(waiting))
            waiting, last = [], -1
        plain = _ZSTD.decompress(pack["rows"], pack["size"])
        waiting.append(pa.ipc.read_record_batch(plain, schema))
        bucket, last = pack["bucket"], max(last, pack["last"])
    if waiting:
        yield Unpacked(bucket, _merged(waiting))


def _rows(batches: Iterable[Batch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for index in range(batch.num_rows):
            yield batch.slice(index, 1).to_pylist()[0]


def _merged(parts: list[Batch]) -> Batch:
    joined = _joined(parts)
    if len(parts) == 1:
        return joined
    return joined.take(pc.sort_indices(joined.column("offset")))


def _joined(parts: list[Batch]) -> Batch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)
