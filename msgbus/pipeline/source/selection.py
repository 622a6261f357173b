"""What the options say of rows, as SQL: those that are not wanted never leave the file.

Not by Spark's own way for Python data sources (`pushFilters`): Spark 4.3 keeps the filters of
the last plan with the frame, so that two queries of one frame read each other's rows. What is
said by an option belongs to one frame for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

from pyspark.sql.types import IntegerType, LongType, StringType

from msgbus.errors import PipelineOptionError
from msgbus.pipeline.source.tables import Table

Where: TypeAlias = Mapping[str, Any]
"""A value, or several of which one must fit, for each of some columns."""


def where_values(where: Where) -> dict[str, list[Any]]:
    """A list of values for each column."""
    found: dict[str, list[Any]] = {}
    for name, value in where.items():
        several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
        found[name] = list(cast("Iterable[Any]", value)) if several else [value]
    return found


def conditions(
    table: Table,
    *,
    since: int | None = None,
    until: int | None = None,
    where: Where | None = None,
) -> tuple[str, ...]:
    """Conditions on time, and on columns, as SQL.

    Raises:
        PipelineOptionError: There is no such column, or it cannot be compared so.
    """
    time = table.columns["time"].sql
    found: list[str] = []
    if since is not None:
        found.append(f"{time} >= {since}")
    if until is not None:
        found.append(f"{time} < {until}")
    for name, values in where_values(where or {}).items():
        found.append(_one_of(table, name, values))
    return tuple(found)


def _one_of(table: Table, name: str, values: list[Any]) -> str:
    column = table.columns.get(name)
    is_usable = column is not None and bool(column.sql)
    if column is None or not (
        is_usable and isinstance(column.type, (IntegerType, LongType, StringType))
    ):
        usable = [
            name
            for name, one in table.columns.items()
            if one.sql and isinstance(one.type, (IntegerType, LongType, StringType))
        ]
        message = (
            f"'where' can say nothing of {name!r}. The columns of {table.name!r} that it can: "
            f"{', '.join(usable)}."
        )
        raise PipelineOptionError(message, option="where")
    is_text = isinstance(column.type, StringType)
    literals = [_literal(name, value, is_text) for value in values if value is not None]
    parts = [f"{column.sql} IN ({', '.join(literals)})"]
    if len(literals) < len(values):
        parts.append(f"{column.sql} IS NULL")
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
