"""Look-ups for people: messages, flows, deliveries and groups of letters, each by an index."""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple, final

from msgbus._next.journal.flows import flow_trees
from msgbus._next.journal.records import DeliveryRecord, Kind, Outcome, Record
from msgbus._next.journal.reports import DeliveryCount, FlowNode, LetterGroup, Page
from msgbus._next.journal.sqlite.columns import DELIVERY
from msgbus._next.journal.sqlite.messages import MESSAGE, read_message
from msgbus._next.journal.sqlite.reads import TableReader
from msgbus._next.journal.sqlite.schema import read_meta

_OUTCOMES: Final = {str(outcome): outcome for outcome in Outcome}
_EVER: Final = float("inf")
_LARGEST: Final = 2**63 - 1

_IN_TIME: Final = """
SELECT min(offset), max(offset) FROM msgbus_messages INDEXED BY msgbus_messages_by_time
WHERE time >= ? AND time < ?
"""
_DELIVERIES: Final = f"""
SELECT {DELIVERY} FROM msgbus_deliveries WHERE offset = ? AND offset <> 0 AND message_id = ?
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
    """One way into the log: an index and what to look up there."""

    by: str = ""
    where: str = ""
    values: tuple[object, ...] = ()


_WHOLE_LOG: Final = _Arm()
_ROOT_OF_FLOW: Final = "message_id = ? AND correlation_id IS NULL"


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
        flow = self.correlation_id
        if flow is not None:
            # The first message of a flow has its own id as correlation, which is not stored.
            return [
                _Arm("msgbus_messages_by_flow", "correlation_id = ?", (flow,)),
                _Arm("sqlite_autoindex_msgbus_messages_1", _ROOT_OF_FLOW, (flow,)),
            ]
        for column in ("session_id", "key", "name", "topic"):
            value: str | None = getattr(self, column)
            if value is not None:
                word = column.removesuffix("_id")
                return [_Arm(f"msgbus_messages_by_{word}", f"{column} = ?", (value,))]
        if self.kind not in (None, Kind.EVENT):
            return [_Arm("msgbus_messages_by_kind", "kind <> 'event'")]
        return [_WHOLE_LOG]

    def filters(self) -> tuple[list[str], list[object]]:
        """Return the conditions, apart from that on the flow, and their values."""
        given = {
            column: value
            for column, value in self._asdict().items()
            if value is not None and column != "correlation_id"
        }
        return [f"{column} = ?" for column in given], [str(value) for value in given.values()]


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

    def trimmed(self) -> int:
        """Return the offset up to which retention has removed what nobody needs."""
        return int(read_meta(self._connection, "trimmed") or 0)

    def first(self) -> int:
        """Return the lowest offset that was not trimmed; see `Questions.first`."""
        query = "SELECT min(offset) FROM msgbus_messages WHERE offset > ?"
        found = self._first(query, self.trimmed())[0]
        return self.head() + 1 if found is None else int(found)

    def offset_at(self, time: float) -> int:
        """Return the lowest offset recorded at `time` or later."""
        # Not a search by halves: a clock that jumped leaves times out of order.
        found = self._first(_IN_TIME, time, _EVER)[0]
        return self.head() + 1 if found is None else int(found)

    def message(self, message_id: str) -> Record | None:
        """Return the message of this id.

        Raises:
            JournalCorruptError: It is damaged.
        """
        query = f"SELECT {MESSAGE} FROM msgbus_messages WHERE message_id = ?"  # noqa: S608
        row = self._first(query, message_id)
        if row is None:
            return None
        record = read_message(row, self._codec)
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
        where, values = terms.filters()
        low, high = (0, _LARGEST) if start is None else (start, start)
        low, high = (0, high) if newest_first else (low, _LARGEST)
        if since is not None or until is not None:
            since, until = -_EVER if since is None else since, _EVER if until is None else until
            lowest, highest = self._first(_IN_TIME, since, until)
            if lowest is None:
                return Page([])
            low, high = max(low, lowest), min(high, highest)
            where, values = [*where, "time >= ? AND time < ?"], [*values, since, until]
        where, values = [*where, "offset >= ? AND offset <= ?"], [*values, low, high]
        return self._page(terms.arms(), where, values, max(limit, 1), newest_first=newest_first)

    def _page(
        self,
        arms: list[_Arm],
        where: list[str],
        values: list[object],
        limit: int,
        *,
        newest_first: bool,
    ) -> Page:
        queries: list[str] = []
        bound: list[object] = []
        for arm in arms:
            index = f" INDEXED BY {arm.by}" if arm.by else ""
            clauses = " AND ".join(filter(None, [arm.where, *where]))
            queries.append(f"SELECT {MESSAGE} FROM msgbus_messages{index} WHERE {clauses}")  # noqa: S608
            bound += [*arm.values, *values]
        order = "DESC" if newest_first else "ASC"
        query = f"{' UNION ALL '.join(queries)} ORDER BY offset {order} LIMIT ?"
        # One more than asked for: it is the first of the next page.
        rows = self._connection.execute(query, (*bound, limit + 1)).fetchall()
        records = [read_message(row, self._codec) for row in rows[:limit]]
        return Page(records, rows[limit][0] if len(rows) > limit else None)

    def flow(self, correlation_id: str) -> tuple[FlowNode, ...]:
        """Return the undamaged messages of a flow, as trees."""
        page = self.find_messages(correlation_id=correlation_id, limit=_LARGEST - 1)
        return flow_trees([record for record in page.records if isinstance(record, Record)])

    def deliveries(self, message_id: str) -> list[DeliveryRecord]:
        """Return the deliveries of one message, by time."""
        found: list[DeliveryRecord] = []
        values = (self.offset_of(message_id) or 0, message_id, message_id)
        for row in self._connection.execute(_DELIVERIES, values):
            offset, handler, time, attempt, _, word, wait, run, error = row
            outcome = _OUTCOMES.get(word)
            if outcome is not None:  # this is history, without a checksum
                one = (
                    message_id,
                    handler,
                    attempt,
                    outcome,
                    wait,
                    run,
                    time,
                    error,
                    offset or None,
                )
                found.append(DeliveryRecord._make(one))
        return found

    def delivery_counts(self, since: float, until: float) -> list[DeliveryCount]:
        """Count deliveries by minute, handler and outcome, `until` not included."""
        return [
            DeliveryCount(handler, _OUTCOMES[word], minute, count)
            for handler, word, minute, count in self._connection.execute(_COUNTS, (since, until))
            if word in _OUTCOMES
        ]

    def letter_groups(self) -> list[LetterGroup]:
        """Group dead rows by subscription, type of error and name of the message."""
        groups: list[LetterGroup] = []
        for row in self._connection.execute(_GROUPS).fetchall():
            subscription, error_type, name, count, first, last, offset = row
            sample = self.row(subscription, offset)
            error = None if sample is None else sample.error
            groups.append(LetterGroup(subscription, error_type, name, count, first, last, error))
        return groups
