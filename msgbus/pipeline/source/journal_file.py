"""Rows of the file as Arrow batches, through ADBC or, where that is missing, the stdlib."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from pyspark.sql.types import (
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
)

from msgbus.errors import PipelineOptionError, TrimmedError
from msgbus.journal.codec import PayloadCodec
from msgbus.journal.sqlite.faults import translated
from msgbus.pipeline.arrow import Array, ArrowType, Batch, Schema, arrow_schema, arrow_type, pa
from msgbus.pipeline.source.options import file_uri, payload_codec
from msgbus.pipeline.source.ranges import check
from msgbus.pipeline.source.tables import HELPERS, MESSAGES, Table

# -- the query -----------------------------------------------------------------------------

_EXAMPLES: Final[Mapping[type[DataType], str]] = {
    DoubleType: "0.0",
    IntegerType: "0",
    LongType: "0",
    StringType: "''",
    TimestampType: "0",
}
_HELPER_EXAMPLES: Final = {"_payload": "x''", "_is_json": "0", "_headers": "''"}
_HELPER_TYPES: Final = {"_payload": pa.binary(), "_is_json": pa.int64(), "_headers": pa.string()}


class Query(NamedTuple):
    """What one task asks of the file."""

    path: str
    table: Table
    columns: tuple[str, ...]
    low: int
    high: int
    conditions: tuple[str, ...] = ()
    batch_rows: int | None = None
    """Rows of one batch; as many as `fitting_rows` says if not given."""
    may_lack: bool = False
    """Whether rows that have been trimmed since may be missing."""
    codec: str | None = None
    """Where the codec of the payloads is."""
    is_checked: bool = True
    """Whether payloads are looked at: what is no JSON is corrupt."""

    def parts(self) -> list[str]:
        """Names of the columns to select: plain ones, and what the others are made from."""
        wanted: dict[str, None] = {}
        for name in self.columns:
            for part in self.table.columns[name].needs or (name,):
                if part != "_is_json" or self.is_checked:
                    wanted[part] = None
        # Spark may want no column at all, but rows to count.
        return list(wanted) or [self.table.position]

    def sql(self) -> str:
        """The statement."""
        expressions = ", ".join(f"{self._expression(part)} AS {part}" for part in self.parts())
        where = [f"{self.table.position} BETWEEN {self.low} AND {self.high}", *self.conditions]
        return (
            f"SELECT {expressions} FROM {self.table.relation} "  # noqa: S608 (no user's text)
            f"WHERE {' AND '.join(where)}"
        )

    def example(self) -> str:
        """A statement that gives one row of the right types."""
        return "SELECT " + ", ".join(f"{self._example(part)} AS {part}" for part in self.parts())

    def types(self) -> Schema:
        """The types of the parts as they come from SQLite."""
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
        if isinstance(spark_type, (StringType, DoubleType)):
            return arrow_type(spark_type)
        return pa.int64()


# -- how much at once ----------------------------------------------------------------------

MOST_ROWS: Final = 20_000
MOST_BYTES: Final = 64 << 20


def fitting_rows(connection: sqlite3.Connection) -> int:
    """Rows of one batch: many, unless messages are so large that they would fill the memory.

    By the size of the file, which is never less than that of its messages.
    """
    row: tuple[int, int, int | None, int | None] = connection.execute(
        "SELECT (SELECT page_count FROM pragma_page_count), (SELECT page_size FROM "
        "pragma_page_size), (SELECT min(offset) FROM msgbus_messages), "
        "(SELECT max(offset) FROM msgbus_messages)"
    ).fetchone()
    pages, size, first, last = row
    if first is None or last is None:
        return MOST_ROWS
    each = pages * size // (last - first + 1)
    return max(1, min(MOST_ROWS, MOST_BYTES // max(1, each)))


# -- engines -------------------------------------------------------------------------------


def batches(query: Query, engine: str) -> Iterator[Batch]:
    """The rows of a query, made into the columns that were asked for."""
    read = _adbc if engine_of(engine) == "adbc" else _sqlite3
    for batch in read(query):
        if batch.num_rows:
            yield finished(batch, query)


def engine_of(engine: str) -> str:
    """The engine to use: "adbc" or "sqlite3".

    Raises:
        PipelineOptionError: ADBC is asked for, and not installed.
    """
    if engine == "sqlite3":
        return engine
    if find_spec("adbc_driver_sqlite") is not None:
        return "adbc"
    if engine == "adbc":
        message = "The engine 'adbc' needs a package: pip install adbc-driver-sqlite."
        raise PipelineOptionError(message, option="engine")
    return "sqlite3"


def _adbc(query: Query) -> Generator[Batch, None, None]:
    # By name: its modules have types of which strict checkers know too little.
    adbc: Any = import_module("adbc_driver_sqlite.dbapi")
    # ADBC takes a column's type from the first batch: one that begins with nothing but NULL
    # would be a number. So a row of examples goes first, and is left out again.
    statement = f"{query.example()} UNION ALL SELECT * FROM ({query.sql()})"  # noqa: S608
    rows = {"adbc.sqlite.query.batch_rows": str(_check(query))}
    with (
        adbc.connect(file_uri(query.path)) as connection,
        connection.cursor(adbc_stmt_kwargs=rows) as cursor,
    ):
        cursor.execute("PRAGMA busy_timeout = 30000")
        cursor.execute("SELECT value FROM msgbus_meta WHERE key = 'trimmed'")
        _check_trimmed(query, cursor.fetchone())
        cursor.execute(statement)
        first = True
        for batch in cursor.fetch_record_batch():
            yield batch.slice(1) if first else batch
            first = False


def _check(query: Query) -> int:
    """Look at the file by the stdlib first: its errors are told apart by their codes.

    Gives the rows of one batch.
    """
    with translated(query.path), closing(_connect(query.path)) as connection:
        check(connection, query.path)
        return query.batch_rows or fitting_rows(connection)


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(file_uri(path), uri=True, timeout=30.0, isolation_level=None)


def _sqlite3(query: Query) -> Generator[Batch, None, None]:
    types = query.types()
    with translated(query.path), closing(_connect(query.path)) as connection:
        connection.execute("BEGIN")
        check(connection, query.path)
        trimmed = connection.execute("SELECT value FROM msgbus_meta WHERE key = 'trimmed'")
        _check_trimmed(query, trimmed.fetchone())
        size = query.batch_rows or fitting_rows(connection)
        cursor = connection.execute(query.sql())
        while rows := cursor.fetchmany(size):
            yield pa.record_batch(
                [
                    pa.array(values, type=field.type)
                    for values, field in zip(zip(*rows, strict=True), types, strict=True)
                ],
                schema=types,
            )


def _check_trimmed(query: Query, row: Sequence[Any] | None) -> None:
    """Raise if rows of this range have gone since it was planned."""
    trimmed = int(row[0]) if row is not None and row[0] is not None else 0
    if query.table is MESSAGES and trimmed >= query.low and not query.may_lack:
        raise TrimmedError(path=query.path, wanted=query.low, first=trimmed + 1)


# -- columns from parts --------------------------------------------------------------------


def finished(batch: Batch, query: Query) -> Batch:
    """The columns that were asked for, from a batch of parts."""
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
        return _texts([_through(codec, value) for value in raw.to_pylist()])
    flags = parts["_is_json"].to_pylist() if "_is_json" in parts else [1] * len(raw)
    if flags.count(1) == len(flags):
        try:
            # Checks the encoding, which SQLite's json_valid does not.
            nothing = pa.nulls(len(raw), pa.string())
            return {"payload": raw.cast(pa.string()), "_corrupt": nothing}
        except pa.ArrowInvalid:
            pass
    decoded = map(_decoded, raw.to_pylist())
    return _texts(
        [
            (text, is_text and flag == 1)
            for (text, is_text), flag in zip(decoded, flags, strict=True)
        ]
    )


def _texts(values: Sequence[tuple[str, bool]]) -> dict[str, Array]:
    """The two columns, of texts that are sound or not."""
    return {
        "payload": pa.array([text if is_sound else None for text, is_sound in values], pa.string()),
        "_corrupt": pa.array(
            [None if is_sound else text for text, is_sound in values], pa.string()
        ),
    }


def _through(codec: PayloadCodec, stored: bytes | None) -> tuple[str, bool]:
    """What was stored, decoded; as it is if it cannot be, or is no JSON then."""
    try:
        plain = codec.decode(stored or b"")
        json.loads(plain)
        return plain.decode(), True
    except Exception:
        # Whatever a codec raises: one message must not fail a job.
        return _decoded(stored)[0], False


def _decoded(value: bytes | None) -> tuple[str, bool]:
    if value is None:
        return "", False
    try:
        return value.decode(), True
    except UnicodeDecodeError:
        return value.decode(errors="backslashreplace"), False


def _headers(texts: Array, map_type: ArrowType) -> Array:
    """Maps from JSON; most messages have none, and those of one flow have the same."""
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
