"""Read the journal's file: what it holds, ranges of it, and their rows as Arrow batches.

Rows are read through ADBC or, where that is not installed, through `sqlite3`.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark.sql.datasource import InputPartition

from msgbus.errors import (
    JournalNotFoundError,
    NotAJournalError,
    PipelineError,
    PipelineOptionError,
    TrimmedError,
)
from msgbus.journal.sqlite.faults import translated
from msgbus.journal.sqlite.questions import QuestionReader
from msgbus.journal.sqlite.reads import Source
from msgbus.journal.sqlite.schema import check_codec, has_journal, read_meta
from msgbus.pipeline.arrow import Array, ArrowType, Batch, Schema, arrow_schema, pa
from msgbus.pipeline.source.checksums import damaged
from msgbus.pipeline.source.encoded import plain_parts
from msgbus.pipeline.source.options import file_uri, payload_codec
from msgbus.pipeline.source.tables import MESSAGES, Table

# -- the query -----------------------------------------------------------------------------

pc: Any = import_module("pyarrow.compute")

_OWN_ID: Final = ("correlation_id", "root_id")
"""Columns that are NULL where they are the message's own id."""

DAMAGED: Final = "The record is damaged: its checksum does not fit."
REFUSED: Final = "The record is damaged: the codec refuses what is in it."
MISSING: Final = "The record is missing: it was removed, and not by a trim."


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
    among: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Texts that columns must have, of which the conditions let through unknown ones, too."""
    finds_missing: bool = True
    """Whether messages that are missing belong to the rows that are wanted."""
    journal: str = ""
    """The id of the journal that the read was planned for."""

    @property
    def is_verified(self) -> bool:
        """Whether rows are read that may be damaged, and not only their positions."""
        return bool(self.among) or not {self.table.position}.issuperset(self.columns)

    def parts(self) -> list[str]:
        """What to select: all that the checksum covers, and what columns are made from."""
        table = self.table
        if not self.is_verified:
            return [table.position]
        numbers, texts, rest = table.covered
        wanted = dict.fromkeys((table.position, *numbers, *texts, *rest, "crc"))
        for name in self.columns:
            wanted.update(dict.fromkeys(table.columns[name].needs))
        if not self.is_checked:
            wanted.pop("_is_json", None)
        return list(wanted)

    def sql(self) -> str:
        """The SQL statement."""
        parts = self.table.parts
        expressions = ", ".join(f"{parts[name].sql} AS {name}" for name in self.parts())
        where = [f"{self.table.position} BETWEEN {self.low} AND {self.high}", *self.conditions]
        return (
            f"SELECT {expressions} FROM {self.table.relation} "  # noqa: S608 (no user's text)
            f"WHERE {' AND '.join(where)}"
        )

    def example(self) -> str:
        """A statement that selects one row of the right types."""
        parts = self.table.parts
        return f"SELECT {', '.join(f'{parts[name].example} AS {name}' for name in self.parts())}"

    def schema(self) -> Schema:
        """The types of the parts as SQLite returns them."""
        return pa.schema([(name, self.table.parts[name].type) for name in self.parts()])


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
    """The rows of a query, as its columns.

    A row that is damaged or missing has its position, and the reason in `_corrupt`.
    """
    read = _adbc if engine_of(engine) == "adbc" else _sqlite3
    missing = _missing(query)
    for batch in read(query):
        if batch.num_rows:
            yield finished(batch, query)
    if missing:
        yield _empty_rows(pa.array(missing, pa.int64()), query, MISSING)


def _missing(query: JournalQuery) -> list[int]:
    """The offsets of messages that are neither there nor trimmed."""
    if query.table is not MESSAGES or not query.finds_missing:
        return []
    with reading(query.path) as connection:
        reader = QuestionReader(connection, Source(query.path, None))
        return reader.missing(query.low - 1, min(query.high, reader.head()))


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
        cursor.execute(_STATE)
        trimmed, journal = cursor.fetchone()
        _check_state(query, int(trimmed), journal)
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
        _check_state(query, _trimmed(connection), read_meta(connection, "journal_id"))
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
    return int(read_meta(connection, "trimmed"))


_STATE: Final = (
    "SELECT (SELECT value FROM msgbus_meta WHERE key = 'trimmed'), "
    "(SELECT value FROM msgbus_meta WHERE key = 'journal_id')"
)


def _check_state(query: JournalQuery, trimmed: int, journal: str) -> None:
    """Raise if rows of this range were trimmed since planning, or the file is another one."""
    check_same(query.path, query.journal, journal)
    if query.table is MESSAGES and trimmed >= query.low and not query.may_lack:
        raise TrimmedError(path=query.path, wanted=query.low, first=trimmed + 1)


def check_same(path: str, planned: str, found: str) -> None:
    """Raise if a read that was planned for one journal meets another."""
    if planned and found != planned:
        message = (
            f"The journal {path} was replaced by another one while it was read: one has the id "
            f"{planned}, the other {found}. Read the one that you want from its beginning; a "
            f"stream needs a new checkpoint for it."
        )
        raise PipelineError(message)


# -- columns from parts --------------------------------------------------------------------


def finished(batch: Batch, query: JournalQuery) -> Batch:
    """The columns of a query, from a batch of parts."""
    parts: dict[str, Array] = dict(zip(batch.schema.names, batch.columns, strict=True))
    if not query.is_verified:
        return _from_columns(query, parts, batch.num_rows)
    position, found = query.table.position, list[Batch]()

    def set_aside(bad: Array | None, reason: str) -> None:
        nonlocal parts
        if bad is not None:
            found.append(_empty_rows(parts[position].filter(bad), query, reason))
            parts = _only(parts, pc.invert(bad))

    set_aside(damaged(parts, query.table.covered), DAMAGED)
    for name, values in query.among:
        parts = _only(parts, pc.is_in(parts[name], pa.array(map(str.encode, values), pa.binary())))
    codec = payload_codec(query.codec)
    if codec is not None:
        parts, refused = plain_parts(codec, parts, query.table, query.columns)
        set_aside(refused, REFUSED)
    count = len(parts[position])
    if count or not found:
        found.insert(0, _from_columns(query, _columns(parts, query), count))
    return found[0] if len(found) == 1 else pa.concat_batches(found)


def _only(parts: Mapping[str, Array], wanted: Array) -> dict[str, Array]:
    return {name: part.filter(wanted) for name, part in parts.items()}


def _columns(parts: Mapping[str, Array], query: JournalQuery) -> dict[str, Array]:
    """The columns that are wanted, from the parts of undamaged rows."""
    payloads: dict[str, Array] = {}
    if not {"payload", "_corrupt"}.isdisjoint(query.columns):
        payloads = _payloads(parts)
    found: dict[str, Array] = {}
    for field in arrow_schema(query.table.select(query.columns)):
        name = field.name
        if name in payloads:
            found[name] = payloads[name]
        elif name == "headers":
            found[name] = _headers(parts[name].cast(pa.string()), field.type)
        elif name in _OWN_ID:
            found[name] = pc.coalesce(parts[name], parts["message_id"]).cast(field.type)
        elif name == "offset" and query.table is not MESSAGES:
            found[name] = pc.if_else(pc.equal(parts[name], 0), None, parts[name])
        else:
            found[name] = parts[(query.table.columns[name].needs or (name,))[0]].cast(field.type)
    return found


def _empty_rows(positions: Array, query: JournalQuery, reason: str) -> Batch:
    """Rows of which nothing can be read but where they are."""
    known = {
        query.table.position: positions,
        "_corrupt": pa.array([reason] * len(positions), pa.string()),
    }
    return _from_columns(query, known, len(positions))


def _from_columns(query: JournalQuery, known: Mapping[str, Array], count: int) -> Batch:
    """A batch of the columns that are wanted; those that are not known are null."""
    schema = arrow_schema(query.table.select(query.columns))
    if not len(schema):
        return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
    columns = [
        known[field.name] if field.name in known else pa.nulls(count, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _payloads(parts: Mapping[str, Array]) -> dict[str, Array]:
    """`payload` where it is JSON, `_corrupt` where it is not."""
    if "payload" not in parts:  # deliveries have none
        return {"_corrupt": pa.nulls(len(parts["crc"]), pa.string())}
    raw = parts["payload"]
    flags = parts["_is_json"].to_pylist() if "_is_json" in parts else [1] * len(raw)
    if flags.count(1) == len(flags):
        try:
            # Checks the encoding, which SQLite's json_valid does not.
            nothing = pa.nulls(len(raw), pa.string())
            return {"payload": raw.cast(pa.string()), "_corrupt": nothing}
        except pa.ArrowInvalid:
            pass
    texts = map(_decoded, raw.to_pylist())
    values = [(text, ok and flag == 1) for (text, ok), flag in zip(texts, flags, strict=True)]
    return {
        "payload": pa.array([text if is_sound else None for text, is_sound in values], pa.string()),
        "_corrupt": pa.array(
            [None if is_sound else text for text, is_sound in values], pa.string()
        ),
    }


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
    journal: str = ""
    """The id of the journal."""


class Range(InputPartition):
    """Positions from `low` to `high`, both included, of one journal, read by one task."""

    def __init__(self, low: int, high: int, journal: str = "") -> None:
        super().__init__((low, high))
        self.low = low
        self.high = high
        self.journal = journal


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


def bounds_of(path: str, table: Table = MESSAGES, codec: str | None = None) -> Bounds:
    """The bounds of a table of a file.

    Raises:
        JournalOpenError: The file was made with another codec, if one is named.
    """
    with reading(path) as connection:
        journal = read_meta(connection, "journal_id")
        if codec is not None:
            check_codec(connection, path, payload_codec(codec))
        if table is MESSAGES:
            reader = QuestionReader(connection, Source(path, None))
            return Bounds(reader.first(), reader.head(), reader.trimmed(), journal)
        # The highest id ever given: retention may have removed its row, or all of them.
        (last,) = connection.execute(
            "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = ?", (table.relation,)
        ).fetchone()
        (first,) = connection.execute(
            f"SELECT min({table.position}) FROM {table.relation}"  # noqa: S608
        ).fetchone()
    return Bounds(int(last) + 1 if first is None else int(first), int(last), 0, journal)


def split(low: int, high: int, wanted: int | None = None, journal: str = "") -> list[Range]:
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
        ranges.append(Range(low, end, journal))
        low = end + 1
    return ranges
