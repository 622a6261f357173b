"""Rows that a process has to deal with before it may end."""

from __future__ import annotations

import time

from msgbus.journal import Journal, State

SOON = 60.0


async def unfinished(journal: Journal) -> bool:
    """Tell whether a message waits or runs, or comes within a minute."""
    rows = await journal.find(None, [State.WAITING, State.CLAIMED, State.PARKED], limit=10_000)
    return any(row.due is None or row.due < time.time() + SOON for row in rows)
