"""The tables of a journal as Spark sees them: names, types, and where each column comes from.

Both are read from their tables. Not from the view `msgbus_log`: it is for people, and casts every
payload to text. As there, a message without a cause has its own id as correlation and root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pyspark.sql.types import (
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from msgbus.errors import PipelineOptionError


class Column(NamedTuple):
    """One column: its type in Spark, and the SQL that gives it."""

    type: DataType
    sql: str
    """An expression over the table's relation; empty for those that are made from others."""
    needs: tuple[str, ...] = ()
    """Helper columns that it is made from."""


class Table(NamedTuple):
    """A table of the data source."""

    name: str
    relation: str
    """The table or view in the file."""
    position: str
    """The column that grows with every row, by which ranges are read."""
    columns: Mapping[str, Column]

    @property
    def schema(self) -> StructType:
        """All columns, each nullable, as Spark's readers expect of a source."""
        return self.select(tuple(self.columns))

    def select(self, names: Sequence[str]) -> StructType:
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
        return StructType([StructField(name, self.columns[name].type) for name in names])


HELPERS: Final[Mapping[str, str]] = {
    "_payload": "CAST(payload AS BLOB)",
    "_is_json": "json_valid(CAST(payload AS TEXT))",
    "_headers": "headers",
}
"""What some columns are made from."""

# Microseconds as whole numbers: a REAL as Spark's timestamp would be rounded by each engine
# in its own way.
_TIME: Final = "CAST(round(time * 1000000) AS INTEGER)"

_TEXT: Final = StringType()
_HEADERS: Final = MapType(StringType(), StringType())

MESSAGES: Final = Table(
    "messages",
    "msgbus_messages",
    "offset",
    {
        "offset": Column(LongType(), "offset"),
        "message_id": Column(_TEXT, "message_id"),
        "name": Column(_TEXT, "name"),
        "version": Column(IntegerType(), "version"),
        "topic": Column(_TEXT, "topic"),
        "key": Column(_TEXT, "key"),
        "kind": Column(_TEXT, "kind"),
        "time": Column(TimestampType(), _TIME),
        "correlation_id": Column(_TEXT, "coalesce(correlation_id, message_id)"),
        "causation_id": Column(_TEXT, "causation_id"),
        "root_id": Column(_TEXT, "coalesce(root_id, message_id)"),
        "depth": Column(IntegerType(), "depth"),
        "session_id": Column(_TEXT, "session_id"),
        "headers": Column(_HEADERS, "", ("_headers",)),
        "payload": Column(_TEXT, "", ("_payload", "_is_json")),
        "_corrupt": Column(_TEXT, "", ("_payload", "_is_json")),
    },
)
"""One row for each message."""

DELIVERIES: Final = Table(
    "deliveries",
    "msgbus_deliveries",
    "id",
    {
        "id": Column(LongType(), "id"),
        "offset": Column(LongType(), "offset"),
        "message_id": Column(_TEXT, "message_id"),
        "handler": Column(_TEXT, "handler"),
        "attempt": Column(IntegerType(), "attempt"),
        "outcome": Column(_TEXT, "outcome"),
        "wait": Column(DoubleType(), "wait"),
        "run": Column(DoubleType(), "run"),
        "time": Column(TimestampType(), _TIME),
        "error": Column(_TEXT, "error"),
    },
)
"""One row for each try to handle a message."""

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
