"""Messages on their way to their key: packed by bucket, so that Spark moves a few large rows.

Row by row, Spark would take each of them apart, column by column, and put it together again,
twice. Here a task sorts its messages into buckets of keys, and each bucket travels as one row
with all its messages in Arrow's own form. All messages of a key are in one bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, Final, NamedTuple
from zlib import crc32

from msgbus.pipeline.arrow import Array, Batch, Schema, pa
from msgbus.pipeline.source.tasks import Batches, Work

pc: Any = import_module("pyarrow.compute")

PACKED: Final = "bucket int, first long, last long, size long, rows binary"
"""The columns of packed messages: where they belong, from which to which offset, and they."""

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
"""Messages that are packed together: the more they are, the fewer the rows."""

MOST_BYTES: Final = 64 << 20
"""Bytes that are packed together: messages may be large."""


def packer(buckets: int, key: str) -> Work:
    """Packs batches that have the columns `offset` and `key`; without a key, they are left out."""

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
    """Batches to be packed together: neighbours in the journal, as far as can be told."""
    group: list[Batch] = []
    rows, size, end = 0, 0, 0
    for batch in batches:
        if not batch.num_rows:
            continue
        ends = pc.min_max(batch.column("offset"))
        first, last = ends["min"].as_py(), ends["max"].as_py()
        # A range that spans what other tasks have read would have to be merged with all of it.
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
    places = pa.table({"bucket": buckets, "offset": batch.column("offset")})
    order = pc.sort_indices(places, sort_keys=[("bucket", "ascending"), ("offset", "ascending")])
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
    """Packed rows, sorted by bucket and first offset, as messages in order again."""
    bucket, last = -1, -1
    waiting: list[Batch] = []
    for pack in _rows(batches):
        # What overlaps is merged: with a lake, one day's file may reach into another's range.
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
        for place in range(batch.num_rows):
            yield batch.slice(place, 1).to_pylist()[0]


def _merged(parts: list[Batch]) -> Batch:
    joined = _joined(parts)
    if len(parts) == 1:
        return joined
    return joined.take(pc.sort_indices(joined.column("offset")))


def _joined(parts: list[Batch]) -> Batch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)
