"""Look-ups for people in a journal in memory; each reads all that there is."""

from __future__ import annotations

from collections import Counter, defaultdict

from msgbus.journal.flows import flow_trees
from msgbus.journal.memory_tables import MemoryTables
from msgbus.journal.records import DeliveryRecord, Kind, Pending, State
from msgbus.journal.reports import DeliveryCount, FlowNode, LetterCount, Page


def find_messages(
    tables: MemoryTables,
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
    terms = {
        "topic": topic,
        "name": name,
        "key": key,
        "kind": kind,
        "session_id": session_id,
        "correlation_id": correlation_id,
    }
    given = {field: value for field, value in terms.items() if value is not None}
    found = [
        record
        for _, record in sorted(tables.messages.items(), reverse=newest_first)
        if all(getattr(record, field) == value for field, value in given.items())
        and (since is None or record.time >= since)
        and (until is None or record.time < until)
        and (start is None or (record.offset <= start if newest_first else record.offset >= start))
    ]
    limit = max(limit, 1)
    return Page(found[:limit], found[limit].offset if len(found) > limit else None)


def flow(tables: MemoryTables, correlation_id: str) -> tuple[FlowNode, ...]:
    """Return the messages of a flow as trees; see `Questions.flow`."""
    found = tables.messages.values()
    return flow_trees([record for record in found if record.correlation_id == correlation_id])


def deliveries(tables: MemoryTables, message_id: str) -> list[DeliveryRecord]:
    """Return the deliveries of a message, by time."""
    found = [one for one in tables.deliveries.values() if one.message_id == message_id]
    return sorted(found, key=lambda one: (one.time, one.attempt))


def delivery_counts(tables: MemoryTables, since: float, until: float) -> list[DeliveryCount]:
    """Count deliveries by minute, handler and outcome; see `Questions.delivery_counts`."""
    counts = Counter(
        (one.time // 60 * 60.0, one.handler, one.outcome)
        for one in tables.deliveries.values()
        if since <= one.time < until
    )
    return [
        DeliveryCount(handler, outcome, minute, count)
        for (minute, handler, outcome), count in sorted(counts.items())
    ]


def letter_groups(tables: MemoryTables) -> list[LetterCount]:
    """Group the dead rows; see `Questions.letter_groups`."""
    groups: defaultdict[tuple[str, str, str], list[Pending]] = defaultdict(list)
    for row in tables.rows(None):
        if row.state is State.DEAD:
            letter, record = tables.letter(row), tables.record(row)
            error_type = "" if letter is None else letter.error_type
            name = "" if record is None else record.name
            groups[row.subscription, error_type, name].append(row)
    return [
        LetterCount(
            subscription,
            error_type,
            name or None,
            len(dead),
            min(row.time for row in dead),
            max(row.time for row in dead),
            dead[-1].error,
        )
        for (subscription, error_type, name), dead in sorted(groups.items())
    ]
