"""An outbox as a user would write it: a table in a plain sqlite3 database of the shop's own."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from anyio.to_thread import run_sync

from msgbus.bus.durable.outbox import OutboxEntry
from tests.unit.durable.places import OrderPlaced


class ShopDatabase:
    """Orders, and what is to be told of them, in one transaction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY)")
            database.execute(
                "CREATE TABLE IF NOT EXISTS outbox "
                "(place INTEGER PRIMARY KEY, id TEXT UNIQUE, entry TEXT, done INTEGER DEFAULT 0)"
            )

    def place_order(self, number: int, *, fail: bool = False) -> OutboxEntry:
        entry = OutboxEntry.of(OrderPlaced(number=number))
        with closing(sqlite3.connect(self.path)) as database, database:
            database.execute("INSERT INTO orders VALUES (?)", (number,))
            self.write(database, entry)
            if fail:
                raise RuntimeError("sold out")
        return entry

    @staticmethod
    def write(database: sqlite3.Connection, entry: OutboxEntry) -> None:
        database.execute(
            "INSERT INTO outbox (id, entry) VALUES (?, ?)", (entry.id, entry.to_json())
        )

    def add(self, entry: OutboxEntry) -> None:
        with closing(sqlite3.connect(self.path)) as database, database:
            self.write(database, entry)

    def waiting(self) -> int:
        with closing(sqlite3.connect(self.path)) as database:
            (found,) = database.execute("SELECT count(*) FROM outbox WHERE done = 0").fetchone()
        return int(found)

    # -- what `Outbox` asks for --------------------------------------------------------------

    async def pending(self, limit: int) -> Sequence[OutboxEntry]:
        return await run_sync(self._pending, limit)

    async def done(self, entries: Sequence[OutboxEntry]) -> None:
        await run_sync(self._done, [(entry.id,) for entry in entries])

    def _pending(self, limit: int) -> list[OutboxEntry]:
        with closing(sqlite3.connect(self.path)) as database:
            rows = database.execute(
                "SELECT entry FROM outbox WHERE done = 0 ORDER BY place LIMIT ?", (limit,)
            ).fetchall()
        return [OutboxEntry.from_json(text) for (text,) in rows]

    def _done(self, ids: list[tuple[str]]) -> None:
        with closing(sqlite3.connect(self.path)) as database, database:
            database.executemany("UPDATE outbox SET done = 1 WHERE id = ?", ids)
