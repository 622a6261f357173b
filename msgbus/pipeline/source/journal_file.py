"""Read the journal's file: what it holds, ranges of it, and their rows as Arrow batches.

Rows are read through ADBC or, where that is not installed, through `sqlite3`.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark.sql import types
from pyspark.sql.datasource import InputPartition

from msgbus.errors import (
    JournalNotFoundError,
    NotAJournalError,
    PipelineOptionError,
    TrimmedError,
)
from msgbus.journal.codec import PayloadCodec
from msgbus.journal.sqlite.faults import translated
from msgbus.journal.sqlite.messages import decoded
from msgbus.journal.sqlite.questions import QuestionReader
from msgbus.journal.sqlite.reads import Source
from msgbus.journal.sqlite.schema import has_journal, read_meta
from msgbus.pipeline.arrow import Array, ArrowType, Batch, Schema, arrow_schema, arrow_type, pa
from msgbus.pipeline.source.options import file_uri, payload_codec
from msgbus.pipeline.source.tables import HELPERS, MESSAGES, Table

# -- the query -----------------------------------------------------------------------------

_EXAMPLES: Final[Mapping[type[types.DataType], str]] = {
    types.DoubleType: "0.0",
    types.IntegerType: "0",
    types.LongType: "0",
    types.StringType: "''",
    types.TimestampType: "0",
}
_HELPER_EXAMPLES: Final = {"_payload": "x''", "_is_json": "0", "_headers": "''"}
_HELPER_TYPES: Final = {"_payload": pa.binary(), "_is_json": pa.int64(), "_headers": pa.string()}
_ASSOCIATED: Final = ("message_id", "name")
"""Columns that a codec is given with the payload; see `PayloadCodec`."""


class JournalQuery(NamedTuple):
    """The query of one task."""

    path: str
    table: Table
    columns: tuple[str, ...]
    low: int
    high: int
    conditions: tuple[str, ...] = ()
    batch_rows: int | None = None
    """Rows per batch; by default `fitting_rows`."""
    may_lack: bool = False
    """Whether rows trimmed since planning may be missing."""
    codec: str | None = None
    """Where the codec of the payloads is, as `module:name`."""
    is_checked: bool = True
    """Whether payloads are checked to be JSON."""

    def parts(self) -> list[str]:
        """The columns to select: plain ones, and the helpers of others."""
        wanted: dict[str, None] = {}
        for name in self.columns:
            for part in self.table.columns[name].needs or (name,):
                if part != "_is_json" or self.is_checked:
                    wanted[part] = None
        if self.codec is not None and "_payload" in wanted:
            wanted.update(dict.fromkeys(_ASSOCIATED))
        # Spark may want no column at all, but rows to count.
        return list(wanted) or [self.table.position]

    def sql(self) -> str:
        """The SQL statement."""
        expressions = ", ".join(f"{self._expression(part)} AS {part}" for part in self.parts())
        where = [f"{self.table.position} BETWEEN {self.low} AND {self.high}", *self.conditions]
        return (
            f"SELECT {expressions} FROM {self.table.relation} "  # noqa: S608 (no user's text)
            f"WHERE {' AND '.join(where)}"
        )

    def example(self) -> str:
        """A statement that selects one row of the right types."""
        return "SELECT " + ", ".join(f"{self._example(part)} AS {part}" for part in self.parts())

    def schema(self) -> Schema:
        """The types of the parts as SQLite returns them."""
        return pa.schema([(part, self._type(part)) for part in self.parts()])

    def _expression(self, part: str) -> str:
        return HELPERS[part] if part in HELPERS else self.table.columns[part].sql

    def _example(self, part: str) -> str:
        if part in HELPERS:
            return _HELPER_EXAMPLES[part]
        return _EXAMPLES[type(self.table.columns[part].type)]

    def _type(self, part: str) -> ArrowType:
        if part in HELPERS:
            return _HELPER_TYPES[part]
        spark_type = self.table.columns[part].type
        if isinstance(spark_type, (types.StringType, types.DoubleType)):
            return arrow_type(spark_type)
        return pa.int64()


# -- how much at once ----------------------------------------------------------------------

MOST_ROWS: Final = 20_000
MOST_BYTES: Final = 64 << 20


def fitting_rows(connection: sqlite3.Connection) -> int:
    """Rows per batch that fit into `MOST_BYTES`, by the size of the file."""
    row: tuple[int, int, int | None, int | None] = connection.execute(
        "SELECT (SELECT page_count FROM pragma_page_count), (SELECT page_size FROM "
        "pragma_page_size), (SELECT min(offset) FROM msgbus_messages WHERE offset > ?), "
        "(SELECT max(offset) FROM msgbus_messages)",
        (_trimmed(connection),),
    ).fetchone()
    pages, size, first, last = row
    if first is None or last is None:
        return MOST_ROWS
    each = pages * size // (last - first + 1)
    return max(1, min(MOST_ROWS, MOST_BYTES // max(1, each)))


# -- engines -------------------------------------------------------------------------------


def batches(query: JournalQuery, engine: str) -> Iterator[Batch]:
    """The rows of a query, as its columns."""
    read = _adbc if engine_of(engine) == "adbc" else _sqlite3
    for batch in read(query):
        if batch.num_rows:
            yield finished(batch, query)


def engine_of(engine: str) -> str:
    """The engine to use: "adbc" or "sqlite3".

    Raises:
        PipelineOptionError: ADBC is demanded, and not installed.
    """
    if engine == "sqlite3":
        return engine
    if find_spec("adbc_driver_sqlite") is not None:
        return "adbc"
    if engine == "adbc":
        message = "The engine 'adbc' needs a package: pip install adbc-driver-sqlite."
        raise PipelineOptionError(message, option="engine")
    return "sqlite3"


def _adbc(query: JournalQuery) -> Generator[Batch, None, None]:
    # By name: its modules are not typed.
    adbc: Any = import_module("adbc_driver_sqlite.dbapi")
    # ADBC takes a column's type from the first batch, where NULL alone would be a number. So
    # a row of examples comes first, and is left out again.
    statement = f"{query.example()} UNION ALL SELECT * FROM ({query.sql()})"  # noqa: S608
    rows = {"adbc.sqlite.query.batch_rows": str(_check(query))}
    with (
        adbc.connect(file_uri(query.path)) as connection,
        connection.cursor(adbc_stmt_kwargs=rows) as cursor,
    ):
        cursor.execute("PRAGMA busy_timeout = 30000")
        cursor.execute("SELECT value FROM msgbus_meta WHERE key = 'trimmed'")
        _check_trimmed(query, int(cursor.fetchone()[0]))
        cursor.execute(statement)
        first = True
        for batch in cursor.fetch_record_batch():
            yield batch.slice(1) if first else batch
            first = False


def _check(query: JournalQuery) -> int:
    """Check the file through `sqlite3`, whose errors have codes; returns the rows per batch."""
    with reading(query.path) as connection:
        return query.batch_rows or fitting_rows(connection)


def _sqlite3(query: JournalQuery) -> Generator[Batch, None, None]:
    schema = query.schema()
    with reading(query.path) as connection:
        _check_trimmed(query, _trimmed(connection))
        size = query.batch_rows or fitting_rows(connection)
        cursor = connection.execute(query.sql())
        while rows := cursor.fetchmany(size):
            yield pa.record_batch(
                [
                    pa.array(values, type=field.type)
                    for values, field in zip(zip(*rows, strict=True), schema, strict=True)
                ],
                schema=schema,
            )


def _trimmed(connection: sqlite3.Connection) -> int:
    return int(read_meta(connection, "trimmed") or 0)


def _check_trimmed(query: JournalQuery, trimmed: int) -> None:
    """Raise if rows of this range were trimmed since planning."""
    if query.table is MESSAGES and trimmed >= query.low and not query.may_lack:
        raise TrimmedError(path=query.path, wanted=query.low, first=trimmed + 1)


# -- columns from parts --------------------------------------------------------------------


def finished(batch: Batch, query: JournalQuery) -> Batch:
    """The columns of a query, from a batch of parts."""
    schema = arrow_schema(query.table.select(query.columns))
    parts = dict(zip(batch.schema.names, batch.columns, strict=True))
    payloads = _payloads(parts, payload_codec(query.codec)) if "_payload" in parts else {}
    columns: list[Array] = []
    for field in schema:
        if field.name in payloads:
            columns.append(payloads[field.name])
        elif field.name == "headers":
            columns.append(_headers(parts["_headers"], field.type))
        else:
            columns.append(parts[field.name].cast(field.type))
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _payloads(parts: Mapping[str, Array], codec: PayloadCodec | None) -> dict[str, Array]:
    """`payload` where it is JSON, `_corrupt` where it is not."""
    raw = parts["_payload"]
    if codec is not None:
        values = (one.to_pylist() for one in (raw, *(parts[name] for name in _ASSOCIATED)))
        return _texts([_through(codec, *one) for one in zip(*values, strict=True)])
    flags = parts["_is_json"].to_pylist() if "_is_json" in parts else [1] * len(raw)
    if flags.count(1) == len(flags):
        try:
            # Checks the encoding, which SQLite's json_valid does not.
            nothing = pa.nulls(len(raw), pa.string())
            return {"payload": raw.cast(pa.string()), "_corrupt": nothing}
        except pa.ArrowInvalid:
            pass
    texts = map(_decoded, raw.to_pylist())
    return _texts(
        [(text, is_text and flag == 1) for (text, is_text), flag in zip(texts, flags, strict=True)]
    )


def _texts(values: Sequence[tuple[str, bool]]) -> dict[str, Array]:
    """Both columns, from texts and whether each is valid."""
    return {
        "payload": pa.array([text if is_sound else None for text, is_sound in values], pa.string()),
        "_corrupt": pa.array(
            [None if is_sound else text for text, is_sound in values], pa.string()
        ),
    }


def _through(
    codec: PayloadCodec, stored: bytes | None, message_id: str, name: str
) -> tuple[str, bool]:
    """A payload decoded by the codec, and whether that is JSON; as stored if not."""
    try:
        plain = decoded(codec, stored or b"", "message", message_id, name)
        json.loads(plain)
        return plain.decode(), True
    except (ValueError, RecursionError):
        # Of the codec, of UTF-8 or of JSON: one message must not fail a job.
        return _decoded(stored)[0], False


def _decoded(value: bytes | None) -> tuple[str, bool]:
    if value is None:
        return "", False
    try:
        return value.decode(), True
    except UnicodeDecodeError:
        return value.decode(errors="backslashreplace"), False


def _headers(texts: Array, map_type: ArrowType) -> Array:
    """Maps from JSON; each distinct text is parsed once."""
    if texts.null_count == len(texts):
        return pa.array([()] * len(texts), map_type)
    coded = texts.dictionary_encode()
    maps = [*map(_pairs, coded.dictionary.to_pylist()), ()]
    indices = coded.indices.fill_null(len(maps) - 1)
    return pa.array(maps, map_type).take(indices)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    try:
        found = json.loads(text)
        return tuple((str(key), str(value)) for key, value in found.items())
    except (ValueError, AttributeError):
        return (("_corrupt", text),)  # only a damaged file has such


ROWS: Final = 250_000
"""Rows per range at most, unless the number of ranges is given."""

FEWEST: Final = 10_000
"""Rows per range at least."""


class Bounds(NamedTuple):
    """First and last position of a table, both included."""

    first: int
    last: int
    trimmed: int
    """The highest offset that retention has removed; 0 for deliveries."""


class Range(InputPartition):
    """Positions from `low` to `high`, both included, read by one task."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__((low, high))
        self.low = low
        self.high = high


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(file_uri(path), uri=True, timeout=30.0, isolation_level=None)


@contextmanager
def reading(path: str) -> Generator[sqlite3.Connection, None, None]:
    """Open the file in one read transaction.

    Raises:
        JournalNotFoundError: There is no file.
        NotAJournalError: It is no journal.
        JournalVersionError: It was written by another version of msgbus.
    """
    if not Path(path).is_file():
        raise JournalNotFoundError(path=path)
    with translated(path), closing(_connect(path)) as connection:
        connection.execute("BEGIN")
        if not has_journal(connection, path, adopt=True):
            message = f"{path} is a SQLite database, but there is no journal in it."
            raise NotAJournalError(message, path=path)
        yield connection


def bounds_of(path: str, table: Table = MESSAGES) -> Bounds:
    """The bounds of a table of a file."""
    with reading(path) as connection:
        if table is MESSAGES:
            reader = QuestionReader(connection, Source(path, None))
            return Bounds(reader.first(), reader.head(), reader.trimmed())
        # The highest id ever given: retention may have removed its row, or all of them.
        (last,) = connection.execute(
            "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = ?", (table.relation,)
        ).fetchone()
        (first,) = connection.execute(
            f"SELECT min({table.position}) FROM {table.relation}"  # noqa: S608
        ).fetchone()
    return Bounds(int(last) + 1 if first is None else int(first), int(last), 0)


def split(low: int, high: int, wanted: int | None = None) -> list[Range]:
    """Split `low` to `high` into ranges of nearly equal length."""
    rows = high - low + 1
    if rows <= 0:
        return []
    if wanted is None:
        # One per core if each has enough rows; more where one would take long to repeat.
        at_least = min(os.cpu_count() or 1, -(-rows // FEWEST))
        wanted = max(at_least, -(-rows // ROWS))
    count = min(wanted, rows)
    size, rest = divmod(rows, count)
    ranges: list[Range] = []
    for number in range(count):
        end = low + size + (number < rest) - 1
        ranges.append(Range(low, end))
        low = end + 1
    return ranges
