"""Reads by one connection: in a snapshot, or in the transaction of the writer."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Final

from msgbus._next.journal.ports import Scan
from msgbus._next.journal.records import Cursor, Kind, Member, Pending, Record, Selection
from msgbus._next.journal.sqlite.columns import CURSOR, read_cursor
from msgbus._next.journal.sqlite.messages import MESSAGE, read_message
from msgbus._next.journal.sqlite.row_reads import RowReader
from msgbus._next.journal.sqlite.statements import Row
from msgbus.errors import CursorError

SCAN: Final = 5_000
"""Offsets that one read looks at."""

CHUNK: Final = 500
"""Values of one `IN (...)`; older versions of SQLite take no more than 999."""

_MOST_NAMES: Final = 200

_HEAD: Final = """
SELECT max(coalesce((SELECT max(offset) FROM msgbus_messages), 0),
    coalesce((SELECT CAST(value AS INTEGER) FROM msgbus_meta WHERE key = 'trimmed'), 0))
"""
_OTHER_KINDS: Final = {
    kind: ", ".join(f"'{other}'" for other in Kind if other is not kind) for kind in Kind
}
_REPAIR: Final = (
    "is damaged: its checksum does not fit. Restore a backup, or seek it to where it should be; "
    "starting anywhere else would skip or repeat messages."
)


def places(values: Collection[object]) -> str:
    """Return as many question marks."""
    return ", ".join("?" * len(values))


class TableReader(RowReader):
    """Reads all tables of one journal on one connection."""

    # -- the log -----------------------------------------------------------------------------

    def head(self) -> int:
        """Return the highest offset ever given."""
        return int(self._first(_HEAD)[0])

    def read(
        self,
        after: int,
        limit: int,
        selection: Selection,
        partitions: Collection[int] | None = None,
    ) -> Scan:
        """Read records behind an offset; see `Log.read`."""
        return self.scan(after, self.head(), limit, selection, partitions)

    def scan(
        self,
        after: int,
        until: int,
        limit: int,
        selection: Selection,
        partitions: Collection[int] | None = None,
    ) -> Scan:
        """Read records behind the offset `after`, up to `until`."""
        limit, upto = max(limit, 1), max(min(until, after + SCAN), after)
        where, values = self._where(selection, partitions)
        query = (
            f"SELECT {MESSAGE} FROM msgbus_messages "  # noqa: S608
            f"WHERE offset > ? AND offset <= ?{where} ORDER BY offset LIMIT ?"
        )
        found: list[Record | int] = []
        while after < upto:
            rows = self._connection.execute(query, (after, upto, *values, limit)).fetchall()
            for row in rows:
                record = read_message(row, self._codec)
                if self._is_wanted(record, row, selection, partitions):
                    found.append(record)
                    if len(found) >= limit:
                        return Scan(found, row[0])
            if len(rows) < limit:
                break
            after = rows[-1][0]
        return Scan(found, upto)

    def _where(
        self, selection: Selection, partitions: Collection[int] | None
    ) -> tuple[str, list[object]]:
        """Leave out what is surely not wanted."""
        where = f" AND kind NOT IN ({_OTHER_KINDS[selection.kind]})"
        values: list[object] = []
        if selection.names is not None:
            others = sorted(self._source.names.difference(selection.names))[:_MOST_NAMES]
            where += f" AND name NOT IN ({places(others)})"
            values += others
        if partitions is not None and selection.key is None:
            wanted = ", ".join(str(int(partition)) for partition in partitions)
            where += f" AND slot % {selection.partitions:d} IN ({wanted})"
        return where, values

    def _is_wanted(
        self,
        record: Record | int,
        row: Row,
        selection: Selection,
        partitions: Collection[int] | None,
    ) -> bool:
        if isinstance(record, int):
            # Whose it is cannot be known: it goes to all, but to one partition only.
            slot = row[-2] if isinstance(row[-2], int) else 0
            return partitions is None or slot % selection.partitions in partitions
        if not selection.takes(record):
            if record.name not in self._source.names:
                self._source.names |= {record.name}
            return False
        is_checked = partitions is None or selection.key is None
        return is_checked or selection.partition(record) in partitions  # type: ignore[operator]

    def messages(self, offsets: Sequence[int]) -> dict[int, Record]:
        """Return those of these messages that are there and undamaged, by offset."""
        found: dict[int, Record] = {}
        for start in range(0, len(offsets), CHUNK):
            chunk = offsets[start : start + CHUNK]
            query = f"SELECT {MESSAGE} FROM msgbus_messages WHERE offset IN ({places(chunk)})"  # noqa: S608
            for row in self._connection.execute(query, chunk):
                record = read_message(row, self._codec)
                if isinstance(record, Record):
                    found[record.offset] = record
        return found

    def offset_of(self, message_id: str) -> int | None:
        """Return the offset of a message, if the log has it."""
        row = self._first("SELECT offset FROM msgbus_messages WHERE message_id = ?", message_id)
        return None if row is None else int(row[0])

    # -- members and cursors -----------------------------------------------------------------

    def members(self) -> list[Member]:
        """Return all members, by id."""
        query = "SELECT id, process, serves, renewals FROM msgbus_members ORDER BY id"
        rows = self._connection.execute(query).fetchall()
        return [
            Member(id, process, json.loads(serves), renewals)
            for id, process, serves, renewals in rows  # noqa: A001
        ]

    def cursors(self, name: str | None = None) -> list[Cursor]:
        """Return the cursors of one subscription, or of all, by name and partition.

        Raises:
            CursorError: One of the subscription is damaged; among all it is left out.
        """
        where, values = ("", ()) if name is None else (" WHERE name = ?", (name,))
        query = f"SELECT {CURSOR} FROM msgbus_subscriptions{where} ORDER BY name, partition"  # noqa: S608
        found: list[Cursor] = []
        for row in self._connection.execute(query, values).fetchall():
            cursor = read_cursor(row)
            if cursor is not None:
                found.append(cursor)
            elif name is not None:
                raise CursorError(name, _REPAIR, path=self._source.path)
        return found

    def cursor(self, name: str, partition: int) -> Cursor | None:
        """Return one cursor, if it is there.

        Raises:
            CursorError: It is damaged.
        """
        query = f"SELECT {CURSOR} FROM msgbus_subscriptions WHERE name = ? AND partition = ?"  # noqa: S608
        row = self._first(query, name, partition)
        cursor = None if row is None else read_cursor(row)
        if row is not None and cursor is None:
            raise CursorError(name, _REPAIR, path=self._source.path)
        return cursor

    def record(self, row: Pending) -> Record | None:
        """Return the message of a row; `None` if it is damaged."""
        return row.body or self.messages([row.offset]).get(row.offset)
