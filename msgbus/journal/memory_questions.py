"""Look-ups for people in a journal in memory; each reads all that there is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from operator import itemgetter

from msgbus.journal.flows import flow_trees
from msgbus.journal.letters import LetterSelection, LetterTotal, StoredLetter, handler_of
from msgbus.journal.memory_tables import MemoryTables
from msgbus.journal.records import DeliveryRecord, Kind, Letter, Pending, Record, State
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
    found = [
        record
        for offset, record in sorted(tables.messages.items(), reverse=newest_first)
        if topic in (None, record.topic)
        and name in (None, record.name)
        and key in (None, record.key)
        and kind in (None, record.kind)
        and session_id in (None, record.session_id)
        and correlation_id in (None, record.correlation_id)
        and _is_within(since, record.time, until)
        and (start is None or (offset <= start if newest_first else offset >= start))
    ]
    limit = max(limit, 1)
    return Page(found[:limit], found[limit].offset if len(found) > limit else None)


def flow(tables: MemoryTables, correlation_id: str) -> tuple[FlowNode, ...]:
    """Return the messages of a flow as trees; see `Questions.flow`."""
    found = tables.messages.values()
    return flow_trees([record for record in found if record.correlation_id == correlation_id])


def deliveries(tables: MemoryTables, message_id: str) -> list[DeliveryRecord]:
    """Return the deliveries of a message, by time."""
    found = [one for one in tables.notes.values() if one.message_id == message_id]
    return sorted(found, key=lambda one: (one.time, one.attempt))


def delivery_counts(tables: MemoryTables, since: float, until: float) -> list[DeliveryCount]:
    """Count deliveries by minute, handler and outcome; see `Questions.delivery_counts`."""
    found = [one for one in tables.notes.values() if _is_within(since, one.time, until)]
    counts = Counter((one.time // 60 * 60.0, one.handler, one.outcome) for one in found)
    return [
        DeliveryCount(handler, outcome, minute, count)
        for (minute, handler, outcome), count in sorted(counts.items())
    ]


def letter_groups(tables: MemoryTables) -> list[LetterCount]:
    """Group the dead rows; see `Questions.letter_groups`."""
    groups: defaultdict[tuple[str, str, str], list[Pending]] = defaultdict(list)
    for row in tables.rows():
        if row.state is State.DEAD:
            record, (_, letter) = tables.record(row), tables.letters.get(row[:2], (0, None))
            error_type = "" if letter is None else letter.error_type
            name = "" if record is None else record.name
            groups[row.subscription, error_type, name].append(row)
    counts: list[LetterCount] = []
    for (subscription, error_type, name), dead in sorted(groups.items()):
        times = [row.time for row in dead]
        totals = (len(dead), min(times), max(times), dead[-1].error)
        counts.append(LetterCount(subscription, error_type, name or None, *totals))
    return counts


def find_letters(
    tables: MemoryTables, which: LetterSelection, *, after: int = 0, limit: int = 100
) -> list[StoredLetter]:
    """Return letters behind a number; see `Letters.find_letters`."""
    found = _selected(tables, which).items()
    return [StoredLetter(number, *rest) for number, rest in found if number > after][:limit]


def count_letters(tables: MemoryTables, which: LetterSelection) -> int:
    """Return the number of letters."""
    return len(_selected(tables, which))


def total_letters(tables: MemoryTables, which: LetterSelection) -> list[LetterTotal]:
    """Count letters by type of error, handler and name of message."""
    groups: defaultdict[tuple[str, str, str], list[tuple[Pending, Letter]]] = defaultdict(list)
    for row, letter, record in _selected(tables, which).values():
        name = "" if record is None else record.name
        groups[letter.error_type, handler_of(row, letter), name].append((row, letter))
    totals: list[LetterTotal] = []
    for group, found in groups.items():
        first = min(letter.first_attempt for _, letter in found)
        last = max(letter.last_attempt for _, letter in found)
        totals.append(LetterTotal(*group, len(found), first, last, found[-1][0].error))
    return sorted(totals, key=lambda one: (-one.size, one.error_type, one.handler, one.name))


def last_letter(tables: MemoryTables) -> int:
    """Return the highest number of a letter."""
    return tables.numbers.get("letter", 0)


def _selected(
    tables: MemoryTables, which: LetterSelection
) -> dict[int, tuple[Pending, Letter, Record | None]]:
    """Return rows, letters and messages, by number of the letter."""
    found: dict[int, tuple[Pending, Letter, Record | None]] = {}
    for (name, offset), (number, letter) in sorted(tables.letters.items(), key=itemgetter(1)):
        row = tables.pending[name][offset]
        if _takes(which, number, row, letter, tables.record(row)):
            found[number] = (row, letter, tables.record(row))
    return found


def _takes(
    which: LetterSelection, number: int, row: Pending, letter: Letter, record: Record | None
) -> bool:
    message_id, name, session_id = None, None, None
    if record is not None:
        message_id, name, session_id = record.message_id, record.name, record.session_id
    return (
        which.handler in (None, handler_of(row, letter))
        and which.error_type in (None, letter.error_type)
        and which.session_id in (None, session_id)
        and which.answered in (None, letter.answered)
        and _is_one_of(which.message_ids, message_id)
        and _is_one_of(which.names, name)
        and _is_one_of(which.statuses, letter.status)
        and _is_within(which.since, letter.last_attempt, which.until)
        and (which.upto is None or number <= which.upto)
    )


def _is_one_of(wanted: Collection[str] | None, value: str | None) -> bool:
    return wanted is None or value in wanted


def _is_within(since: float | None, time: float, until: float | None) -> bool:
    return (since is None or since <= time) and (until is None or time < until)
