"""Select rows and columns of a table, as options of the data source and as SQL.

Conditions are options, not Spark's `pushFilters`: Spark 4.3 keeps the filters of the last plan
with a Python data source, so that two queries of one frame read each other's rows. An option
belongs to one frame.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

from pyspark.sql.types import IntegerType, LongType, StringType

from msgbus.errors import PipelineOptionError
from msgbus.journal.records import Kind
from msgbus.pipeline.source.options import microseconds
from msgbus.pipeline.source.tables import MESSAGES, NAME, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.readwriter import DataFrameReader
    from pyspark.sql.streaming.readwriter import DataStreamReader

Bound: TypeAlias = int | datetime
"""An offset (of a delivery: its id), or a time; one without a zone counts as UTC."""

Where: TypeAlias = Mapping[str, Any]
"""For each of some columns a value, or several of which one must match."""

_COMPARABLE: Final = (IntegerType, LongType, StringType)

_BY_INDEX: Final = ("message_id", "key", "session_id")
"""Columns whose index SQLite may use: few rows have one value.

With that of another, such as `name`, rows would not come in the order of their offsets.
"""

_NO_CONTROL: Final = {"kind": [Kind.EVENT.value, Kind.COMMAND.value]}


_KNOWN: Final = "SELECT value FROM msgbus_blocks WHERE typeof(value) = 'text'"

UNKNOWN: Final[Mapping[str, str]] = {
    "kind": ", ".join(f"'{kind}'" for kind in Kind),
    "name": _KNOWN,
    "topic": _KNOWN,
}
"""The texts that messages have in these columns; a condition lets through all others."""


class RowSelection(NamedTuple):
    """Rows from `since` on and before `until`, where columns have certain values."""

    table: Table
    since: Bound | None = None
    until: Bound | None = None
    columns: Sequence[str] | None = None
    where: Where | None = None

    @property
    def names(self) -> list[str]:
        """The columns to return."""
        return list(self.table.columns if self.columns is None else self.columns)

    @property
    def conditions(self) -> dict[str, list[Any]]:
        """The values of each column that is compared."""
        return compared(self.table, self.where)

    @property
    def needed(self) -> list[str]:
        """The columns to read: those that only the conditions need come last."""
        bounds = [one for one in (self.since, self.until) if one is not None]
        used = {"time" if isinstance(one, datetime) else self.table.position for one in bounds}
        used.update(self.conditions)
        return [*self.names, *sorted(used - set(self.names))]

    def options(self) -> dict[str, str]:
        """Rows and conditions, as options of the data source.

        Raises:
            PipelineOptionError: There is no such column, or it cannot be compared so.
        """
        options = {"table": self.table.name}
        bounds = ((self.since, "start", "since"), (self.until, "end", "until"))
        for bound, offset, time in bounds:
            if isinstance(bound, datetime):
                options[time] = str(microseconds(bound))
            elif bound is not None:
                options[offset] = str(bound)
        if self.where is not None:
            conditions(self.table, where=self.where)  # fails here, not on a worker
            options["where"] = json.dumps(_values(self.where))
        return options

    def load(
        self, reader: DataFrameReader | DataStreamReader, options: Mapping[str, str]
    ) -> DataFrame:
        """A frame of these columns, read by the data source with `options`."""
        reader = reader.format(NAME).options(**options)
        if self.columns is not None:
            reader = reader.schema(self.table.select(self.columns))
        return reader.load()


def compared(table: Table, where: Where | None) -> dict[str, list[Any]]:
    """The values that columns must have; control records only if `kind` asks for them."""
    return {**(_NO_CONTROL if table is MESSAGES else {}), **_values(where or {})}


def _values(where: Where) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, value in where.items():
        several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
        found[name] = list(cast("Iterable[Any]", value)) if several else [value]
    return found


def conditions(
    table: Table, *, since: int | None = None, until: int | None = None, where: Where | None = None
) -> tuple[str, ...]:
    """SQL conditions on time and columns.

    Raises:
        PipelineOptionError: There is no such column, or it cannot be compared so.
    """
    time = table.columns["time"].sql
    found: list[str] = []
    if since is not None:
        found.append(f"{time} >= {since}")
    if until is not None:
        found.append(f"{time} < {until}")
    for name, values in compared(table, where).items():
        found.append(_one_of(table, name, values))
    return tuple(found)


def _one_of(table: Table, name: str, values: list[Any]) -> str:
    usable = {
        name: one
        for name, one in table.columns.items()
        if one.sql and isinstance(one.type, _COMPARABLE)
    }
    column = usable.get(name)
    if column is None:
        message = (
            f"'where' cannot compare {name!r}. The columns of {table.name!r} that it can: "
            f"{', '.join(usable)}."
        )
        raise PipelineOptionError(message, option="where")
    is_text = isinstance(column.type, StringType)
    literals = [_literal(name, value, is_text) for value in values if value is not None]
    sql = column.sql if name in _BY_INDEX else f"+{column.sql}"
    parts = [f"{sql} IN ({', '.join(literals)})"]
    if name in UNKNOWN:
        # One that no message has is damaged: it is read, and its checksum does not fit.
        parts.append(f"{sql} NOT IN ({UNKNOWN[name]})")
    if len(literals) < len(values):
        parts.append(f"{sql} IS NULL")
    return f"({' OR '.join(parts)})"


def _literal(name: str, value: object, is_text: bool) -> str:
    if is_text and isinstance(value, str) and "\0" not in value:
        escaped = value.replace("'", "''")
        return f"'{escaped}'"
    if not is_text and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    wanted = "a text" if is_text else "a whole number"
    message = f"'where' compares {name!r} with {value!r}; write {wanted}."
    raise PipelineOptionError(message, option="where")
