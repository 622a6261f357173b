"""All rows, in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks import (
    behind,
    commands,
    creation,
    dispatch,
    durable,
    encoding,
    events,
    growth,
    history,
    imports,
    journal,
    latency,
    letters,
    memory,
    parts,
    peers,
    recording,
    redaction,
    resilience,
    sharing,
    subscriptions,
    topics,
)
from benchmarks.rows import Row

ROWS: Final[tuple[Row, ...]] = (
    *commands.ROWS,
    *peers.COMMAND_ROWS,
    *parts.ROWS,
    *events.ROWS,
    *peers.EVENT_ROWS,
    *latency.ROWS,
    *creation.ROWS,
    *memory.ROWS,
    *growth.ROWS,
    *topics.ROWS,
    *dispatch.ROWS,
    *resilience.ROWS,
    *letters.ROWS,
    *encoding.ROWS,
    *journal.ROWS,
    *history.ROWS,
    *recording.ROWS,
    *subscriptions.ROWS,
    *durable.ROWS,
    *sharing.ROWS,
    *behind.ROWS,
    *redaction.ROWS,
    *imports.ROWS,
)


class UnknownRowError(Exception):
    """No row is called that."""


def choose(rows: Sequence[Row], names: Sequence[str], *, quick: bool) -> list[Row]:
    """The rows that were asked for by name or by a part of it; all if none was.

    Raises:
        UnknownRowError: A name fits no row.
    """
    if not names:
        return [row for row in rows if not (quick and row.heavy)]
    for name in names:
        if not any(fits(row, name) for row in rows):
            message = f"No row is called {name!r}. There are: {', '.join(r.name for r in rows)}."
            raise UnknownRowError(message)
    return [row for row in rows if any(fits(row, name) for name in names)]


def fits(row: Row, name: str) -> bool:
    """Whether `name` is the row's, or one of its parts, such as `events` or `peer`."""
    return name == row.name or name in row.name.split(".")
