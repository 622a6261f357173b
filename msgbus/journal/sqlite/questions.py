"""Look-ups for people: messages, flows, deliveries and groups of letters, each by an index."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from msgbus.journal.flows import flow_trees
from msgbus.journal.records import DeliveryRecord, Kind, Outcome, Record
from msgbus.journal.reports import DeliveryCount, FlowNode, LetterCount, Page
from msgbus.journal.sqlite.columns import DELIVERY, read_delivery
from msgbus.journal.sqlite.messages import BLOCK, MESSAGE, SPAN, read_message
from msgbus.journal.sqlite.reads import TableReader

_OUTCOMES: Final = {str(outcome): outcome for outcome in Outcome}
_EVER: Final = float("inf")
_LARGEST: Final = 2**63 - 1
_CENTURIES: Final = 1e15
"""Seconds."""

_IN_SPANS: Final = """
SELECT min(block), max(block) FROM msgbus_blocks WHERE value >= ? AND value <= ?
"""
_FIRST_SINCE: Final = """
SELECT offset FROM msgbus_messages WHERE offset >= ? AND time >= ? ORDER BY offset LIMIT 1
"""
_DELIVERIES: Final = f"""
SELECT {DELIVERY} FROM msgbus_deliveries INDEXED BY msgbus_deliveries_by_offset
WHERE offset = ? AND offset <> 0 AND message_id = ?
UNION ALL
SELECT {DELIVERY} FROM msgbus_deliveries INDEXED BY msgbus_deliveries_unlogged
WHERE offset = 0 AND message_id = ?
ORDER BY time, attempt
"""  # noqa: S608
_COUNTS: Final = """
SELECT handler, outcome, CAST(time / 60 AS INTEGER) * 60.0 AS minute, count(*)
FROM msgbus_deliveries INDEXED BY msgbus_deliveries_by_time
WHERE time >= ? AND time < ?
GROUP BY minute, handler, outcome ORDER BY minute, handler, outcome
"""
_ENVELOPE: Final = "CAST(substr(body, 1, instr(body, x'0A') - 1) AS TEXT)"
_GROUPS: Final = f"""
SELECT subscription,
    coalesce((SELECT error_type FROM msgbus_letters
        WHERE msgbus_letters.subscription = msgbus_pending.subscription
            AND msgbus_letters.offset = msgbus_pending.offset), '') AS error_type,
    CASE
        WHEN body IS NULL THEN (SELECT name FROM msgbus_messages
            WHERE msgbus_messages.offset = msgbus_pending.offset)
        WHEN json_valid({_ENVELOPE}) THEN json_extract({_ENVELOPE}, '$.name')
    END AS message_name,
    count(*), min(time), max(time), max(offset)
FROM msgbus_pending INDEXED BY msgbus_pending_dead WHERE state = 'dead'
GROUP BY subscription, error_type, message_name
ORDER BY subscription, error_type, message_name
"""  # noqa: S608
"""The letters alone do not do: a row that waits for its replay has one, too."""


class _Arm(NamedTuple):
    """One way into the log: the tables with an index, and what to look up there."""

    tables: str = "msgbus_messages"
    where: str = "offset >= :low AND offset <= :high"
    order: str = "offset {0}"


def _by(index: str, where: str) -> _Arm:
    plain = _Arm()
    return _Arm(f"{plain.tables} INDEXED BY {index}", f"{where} AND {plain.where}")


_OFFSETS: Final = f"""
block >= :low / {BLOCK} AND block <= :high / {BLOCK}
AND offset >= block * {BLOCK} AND offset < (block + 1) * {BLOCK}
AND +offset >= :low AND +offset <= :high
"""
"""With plus signs, so that each block is searched, not each time the whole log."""

_IN_BLOCKS: Final = _Arm(
    "msgbus_blocks CROSS JOIN msgbus_messages", _OFFSETS, "block {0}, offset {0}"
)
_ALSO: Final = (
    "EXISTS (SELECT 1 FROM msgbus_blocks AS other "
    "WHERE other.value = :topic AND other.block = msgbus_blocks.block)"
)


class _Terms(NamedTuple):
    """Conditions on messages; `None` for any."""

    correlation_id: str | None
    session_id: str | None
    key: str | None
    name: str | None
    topic: str | None
    kind: Kind | None

    def arms(self) -> list[_Arm]:
        """Choose the index that leaves the fewest messages, as a rule; they come by offset."""
        if self.correlation_id is not None:
            # The first message of a flow has its own id as correlation, which is not stored.
            root = "message_id = :correlation_id AND correlation_id IS NULL"
            return [
                _by("msgbus_messages_by_flow", "correlation_id = :correlation_id"),
                _by("sqlite_autoindex_msgbus_messages_1", root),
            ]
        if self.session_id is not None:
            return [_by("msgbus_messages_by_session", "session_id = :session_id")]
        if self.key is not None:
            return [_by("msgbus_messages_by_key", "key = :key")]
        if self.name is not None or self.topic is not None:
            return [self._in_blocks()]
        if self.kind not in (None, Kind.EVENT):
            return [_by("msgbus_messages_by_kind", "kind <> 'event'")]
        return [_Arm()]

    def _in_blocks(self) -> _Arm:
        if self.name is None:
            return _IN_BLOCKS._replace(where=f"value = :topic AND {_OFFSETS}")
        also = "" if self.topic is None else f"AND {_ALSO}"
        return _IN_BLOCKS._replace(where=f"value = :name AND {_OFFSETS} {also}")

    def filters(self) -> list[str]:
        """Return the conditions, apart from that on the flow."""
        return [
            f"{column} = :{column}"
            for column, value in self._asdict().items()
            if value is not None and column != "correlation_id"
        ]

    def values(self) -> dict[str, object]:
        """Return what the conditions ask for."""
        return {**self._asdict(), "kind": None if self.kind is None else str(self.kind)}


@final
class QuestionReader(TableReader):
    """Answers look-ups on one connection."""

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection, with a snapshot open."""
        return self._connection

    @property
    def path(self) -> str:
        """Path of the journal."""
        return self._source.path

    def first(self) -> int:
        """Return the lowest offset that was not trimmed; see `Questions.first`."""
        query = "SELECT min(offset) FROM msgbus_messages WHERE offset > ?"
        found = self._first(query, self.trimmed())[0]
        return self.head() + 1 if found is None else int(found)

    def offset_at(self, time: float) -> int:
        """Return the lowest offset recorded at `time` or later."""
        # Not a search by halves: a clock that jumped leaves times out of order.
        low, _ = self._first(_IN_SPANS, _span(time), _LARGEST)
        found = None if low is None else self._first(_FIRST_SINCE, low * BLOCK, time)
        return self.head() + 1 if found is None else int(found[0])

    def message(self, message_id: str) -> Record | None:
        """Return the message of this id.

        Raises:
            JournalCorruptError: It is damaged.
        """
        query = f"SELECT {MESSAGE} FROM msgbus_messages WHERE message_id = ?"  # noqa: S608
        row = self._first(query, message_id)
        if row is None:
            return None
        record = read_message(row, self.codec)
        if isinstance(record, int):
            raise self._source.damaged(f"Message {record}")
        return record

    def find_messages(
        self,
        *,
        topic: str | None = None,
        name: str | None = None,
        key: str | None = None,
        kind: Kind | None = None,
        session_id: str | None = None,
        correlation_id: str | None = None,
        since: float | None = None,
        until: float | None = None,
        start: int | None = None,
        limit: int = 100,
        newest_first: bool = False,
    ) -> Page:
        """Return messages that have everything given; see `Questions.find_messages`."""
        terms = _Terms(correlation_id, session_id, key, name, topic, kind)
        low, high = (0, _LARGEST) if start is None else (start, start)
        low, high = (0, high) if newest_first else (low, _LARGEST)
        where, values = terms.filters(), terms.values()
        if since is not None or until is not None:
            since, until = -_EVER if since is None else since, _EVER if until is None else until
            lowest, highest = self._first(_IN_SPANS, _span(since), _span(until))
            if lowest is None:
                return Page([])
            low, high = max(low, lowest * BLOCK), min(high, (highest + 1) * BLOCK - 1)
            where.append("time >= :since AND time < :until")
            values.update(since=since, until=until)
        values.update(low=low, high=high, limit=max(limit, 1) + 1)
        return self._page(terms.arms(), where, values, "DESC" if newest_first else "ASC")

    def _page(
        self, arms: Sequence[_Arm], where: Sequence[str], values: dict[str, object], order: str
    ) -> Page:
        """Return a page; one message more than it shows is read, the first of the next."""
        queries = [
            f"SELECT {MESSAGE} FROM {arm.tables} WHERE {' AND '.join([arm.where, *where])}"  # noqa: S608
            for arm in arms
        ]
        query = f"{' UNION ALL '.join(queries)} ORDER BY {arms[0].order.format(order)} LIMIT :limit"
        rows = self._connection.execute(query, values).fetchall()
        has_more = len(rows) == values["limit"]
        following = rows.pop()[0] if has_more else None
        return Page([read_message(row, self.codec) for row in rows], following)

    def flow(self, correlation_id: str) -> tuple[FlowNode, ...]:
        """Return the undamaged messages of a flow, as trees."""
        page = self.find_messages(correlation_id=correlation_id, limit=_LARGEST - 1)
        return flow_trees([record for record in page.records if isinstance(record, Record)])

    def deliveries(self, message_id: str) -> list[DeliveryRecord]:
        """Return the deliveries of one message, by time, without damaged ones."""
        values = (self.offset_of(message_id) or 0, message_id, message_id)
        rows = self._connection.execute(_DELIVERIES, values)
        found = (read_delivery(row, self.codec) for row in rows)
        return [one for one in found if one is not None]

    def delivery_counts(self, since: float, until: float) -> list[DeliveryCount]:
        """Count deliveries by minute, handler and outcome, `until` not included."""
        return [
            DeliveryCount(handler, _OUTCOMES[word], minute, count)
            for handler, word, minute, count in self._connection.execute(_COUNTS, (since, until))
            if word in _OUTCOMES
        ]

    def letter_groups(self) -> list[LetterCount]:
        """Group dead rows by subscription, type of error and name of the message."""
        groups: list[LetterCount] = []
        for row in self._connection.execute(_GROUPS).fetchall():
            subscription, error_type, name, count, first, last, offset = row
            sample = self.row(subscription, offset)
            error = None if sample is None else sample.error
            groups.append(LetterCount(subscription, error_type, name, count, first, last, error))
        return groups


def _span(time: float) -> int:
    """Return the number of the span of time, of any time at all."""
    return int(max(-_CENTURIES, min(time, _CENTURIES)) // SPAN)
