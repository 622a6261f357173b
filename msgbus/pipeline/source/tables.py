"""The tables of the data source: their columns, Spark types, and the SQL of each column.

A message without a cause has its own id as correlation and root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from pyspark.sql import types

from msgbus.errors import PipelineOptionError
from msgbus.pipeline.arrow import ArrowType, pa
from msgbus.pipeline.source.checksums import Covered

NAME: Final = "msgbus"
"""What to write in `format`."""


class Column(NamedTuple):
    """One column: its Spark type, and its SQL expression."""

    type: types.DataType
    sql: str
    """What conditions compare; empty for a column that none does."""
    needs: tuple[str, ...] = ()
    """The parts that it is made from; by default the one of its name."""


class Part(NamedTuple):
    """What is read of a row: an SQL expression of one type, whatever a damaged row holds."""

    sql: str
    type: ArrowType
    example: str
    """A literal of the type."""


class Table(NamedTuple):
    """A table of the data source."""

    name: str
    relation: str
    """The table in the file."""
    position: str
    """The growing column by which ranges are read."""
    columns: Mapping[str, Column]
    parts: Mapping[str, Part]
    covered: Covered
    """What the checksum of a row covers."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle its name: on a worker it is the same table, not a copy."""
        return table_of, (self.name,)

    @property
    def schema(self) -> types.StructType:
        """All columns, each nullable."""
        return self.select(tuple(self.columns))

    def select(self, names: Sequence[str]) -> types.StructType:
        """Some of the columns, in the order given.

        Raises:
            PipelineOptionError: There is no such column.
        """
        unknown = [name for name in names if name not in self.columns]
        if unknown:
            message = (
                f"The table {self.name!r} has no column {', '.join(map(repr, unknown))}. "
                f"Its columns are: {', '.join(self.columns)}."
            )
            raise PipelineOptionError(message, option="columns")
        return types.StructType(
            [types.StructField(name, self.columns[name].type) for name in names]
        )


def _text(name: str) -> Part:
    return Part(f"CAST({name} AS BLOB)", pa.binary(), "x''")


def _number(name: str) -> Part:
    return Part(f"CAST({name} AS INTEGER)", pa.int64(), "0")


def _float(name: str) -> Part:
    return Part(f"CAST({name} AS REAL)", pa.float64(), "0.0")


# Microseconds as whole numbers: each engine would round a REAL in its own way.
_TIME: Final = "CAST(round(time * 1000000) AS INTEGER)"

_TEXT: Final = types.StringType()
_HEADERS: Final = types.MapType(types.StringType(), types.StringType())

_MESSAGE_TEXTS: Final = (
    *("message_id", "name", "topic", "kind", "key"),
    *("correlation_id", "causation_id", "root_id", "session_id", "headers"),
)

MESSAGES: Final = Table(
    "messages",
    "msgbus_messages",
    "offset",
    {
        "offset": Column(types.LongType(), "offset"),
        "message_id": Column(_TEXT, "message_id"),
        "name": Column(_TEXT, "name"),
        "version": Column(types.IntegerType(), "version"),
        "topic": Column(_TEXT, "topic"),
        "key": Column(_TEXT, "key"),
        "kind": Column(_TEXT, "kind"),
        "time": Column(types.TimestampType(), _TIME, ("_micros",)),
        "correlation_id": Column(_TEXT, "coalesce(correlation_id, message_id)"),
        "causation_id": Column(_TEXT, "causation_id"),
        "root_id": Column(_TEXT, "coalesce(root_id, message_id)"),
        "depth": Column(types.IntegerType(), "depth"),
        "session_id": Column(_TEXT, "session_id"),
        "headers": Column(_HEADERS, ""),
        "payload": Column(_TEXT, "", ("payload", "_is_json")),
        "_corrupt": Column(_TEXT, "", ("payload", "_is_json")),
    },
    {
        **{name: _number(name) for name in ("offset", "version", "depth", "from_system", "slot")},
        **{name: _text(name) for name in (*_MESSAGE_TEXTS, "payload")},
        "time": _float("time"),
        "crc": _number("crc"),
        "_micros": Part(_TIME, pa.int64(), "0"),
        "_is_json": Part("json_valid(CAST(payload AS TEXT))", pa.int64(), "0"),
    },
    Covered(
        ("offset", "version", "depth", "from_system", "slot", "time"), _MESSAGE_TEXTS, ("payload",)
    ),
)
"""One row per message; one that is damaged or missing has its offset and `_corrupt` only."""

_DELIVERY_TEXTS: Final = ("handler", "message_id", "outcome", "error")

DELIVERIES: Final = Table(
    "deliveries",
    "msgbus_deliveries",
    "id",
    {
        "id": Column(types.LongType(), "id"),
        "offset": Column(types.LongType(), "nullif(offset, 0)"),
        "message_id": Column(_TEXT, "message_id"),
        "handler": Column(_TEXT, "handler"),
        "attempt": Column(types.IntegerType(), "attempt"),
        "outcome": Column(_TEXT, "outcome"),
        "wait": Column(types.DoubleType(), "wait"),
        "run": Column(types.DoubleType(), "run"),
        "time": Column(types.TimestampType(), _TIME, ("_micros",)),
        "error": Column(_TEXT, "error"),
        "_corrupt": Column(_TEXT, "", ("crc",)),
    },
    {
        **{name: _number(name) for name in ("id", "offset", "attempt", "crc")},
        **{name: _text(name) for name in _DELIVERY_TEXTS},
        **{name: _float(name) for name in ("wait", "run", "time")},
        "_micros": Part(_TIME, pa.int64(), "0"),
    },
    Covered(("offset", "attempt", "time", "wait", "run"), _DELIVERY_TEXTS),
)
"""One row per attempt to handle a message; one that is damaged has its id and `_corrupt` only."""

TABLES: Final[Mapping[str, Table]] = {table.name: table for table in (MESSAGES, DELIVERIES)}


def table_of(name: str) -> Table:
    """The table of this name.

    Raises:
        PipelineOptionError: There is none.
    """
    table = TABLES.get(name.lower())
    if table is None:
        message = f"There is no table {name!r} in a journal. Write {' or '.join(TABLES)}."
        raise PipelineOptionError(message, option="table")
    return table
