"""Look-ups for people in a journal in memory; each reads all that there is."""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import itemgetter
from typing import TypeAlias

from msgbus.journal.flows import flow_trees
from msgbus.journal.letters import LetterSelection, LetterTotal, StoredLetter, handler_of
from msgbus.journal.memory_tables import MemoryTables, reads
from msgbus.journal.records import DeliveryRecord, Kind, Letter, Pending, State
from msgbus.journal.reports import DeliveryCount, FlowNode, LetterCount, Page

Chosen: TypeAlias = list[tuple[StoredLetter, Letter]]


class MemoryQuestions(MemoryTables):
    """`Questions` and `Letters` in memory."""

    @reads
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
        records = [
            record
            for offset, record in sorted(self._log.items(), reverse=newest_first)
            if _fits((topic, name, key, kind), (record.topic, record.name, record.key, record.kind))
            and _fits((session_id, correlation_id), (record.session_id, record.correlation_id))
            and _is_within(since, record.time, until)
            and (start is None or (offset <= start if newest_first else offset >= start))
        ]
        limit = max(limit, 1)
        return Page(records[:limit], records[limit].offset if len(records) > limit else None)

    @reads
    def flow(self, correlation_id: str) -> tuple[FlowNode, ...]:
        found = [one for one in self._log.values() if one.correlation_id == correlation_id]
        return flow_trees(found)

    @reads
    def deliveries(self, message_id: str) -> list[DeliveryRecord]:
        found = [note for note in self._notes.values() if note.message_id == message_id]
        return sorted(found, key=lambda note: (note.time, note.attempt))

    @reads
    def delivery_counts(self, since: float, until: float) -> list[DeliveryCount]:
        notes = [note for note in self._notes.values() if _is_within(since, note.time, until)]
        counts = Counter((one.time // 60 * 60.0, one.handler, one.outcome) for one in notes)
        found = sorted(counts.items())
        return [DeliveryCount(who, outcome, minute, size) for (minute, who, outcome), size in found]

    @reads
    def letter_groups(self) -> list[LetterCount]:
        groups: defaultdict[tuple[str, str, str], list[Pending]] = defaultdict(list)
        for row in self._in_states(None, [State.DEAD]):
            name = getattr(self.message_of(row), "name", "")
            error_type = getattr(self._letters.get(row[:2], (0, None))[1], "error_type", "")
            groups[row.subscription, error_type, name].append(row)
        counts: list[LetterCount] = []
        for (subscription, error_type, name), dead in sorted(groups.items()):
            times = [row.time for row in dead]
            totals = (len(dead), min(times), max(times), dead[-1].error)
            counts.append(LetterCount(subscription, error_type, name or None, *totals))
        return counts

    @reads
    def find_letters(
        self, which: LetterSelection, *, after: int = 0, limit: int = 100
    ) -> list[StoredLetter]:
        return [one for one, _ in self._chosen(which) if one.number > after][:limit]

    @reads
    def count_letters(self, which: LetterSelection) -> int:
        return len(self._chosen(which))

    @reads
    def total_letters(self, which: LetterSelection) -> list[LetterTotal]:
        groups: defaultdict[tuple[str, str, str], Chosen] = defaultdict(list)
        for one, letter in self._chosen(which):
            name = getattr(one.record, "name", "")
            groups[letter.error_type, handler_of(one.row, letter), name].append((one, letter))
        totals: list[LetterTotal] = []
        for group, found in groups.items():
            first = min(letter.first_attempt for _, letter in found)
            last = max(letter.last_attempt for _, letter in found)
            totals.append(LetterTotal(*group, len(found), first, last, found[-1][0].row.error))
        return sorted(totals, key=lambda one: (-one.size, one.error_type, one.handler, one.name))

    @reads
    def last_letter(self) -> int:
        return self._numbers["letter"]

    def count_dead(self) -> int:
        with self.opened():
            return len(self._index.get((None, State.DEAD), ()))

    def _chosen(self, which: LetterSelection) -> Chosen:
        exact = (which.handler, which.error_type, which.session_id, which.answered)
        found: Chosen = []
        for key, (number, letter) in sorted(self._letters.items(), key=itemgetter(1)):
            row, record = self._pending[key], self.message_of(self._pending[key])
            fields = ("message_id", "name", "session_id")
            message_id, name, session_id = (getattr(record, field, None) for field in fields)
            values = (handler_of(row, letter), letter.error_type, session_id, letter.answered)
            if (
                _fits(exact, values)
                and (which.message_ids is None or message_id in which.message_ids)
                and (which.names is None or name in which.names)
                and (which.statuses is None or letter.status in which.statuses)
                and _is_within(which.since, letter.last_attempt, which.until)
                and (which.upto is None or number <= which.upto)
            ):
                found.append((StoredLetter(number, row, letter, record), letter))
        return found


def _fits(wanted: tuple[object, ...], values: tuple[object, ...]) -> bool:
    return all(one in (None, value) for one, value in zip(wanted, values, strict=True))


def _is_within(since: float | None, time: float, until: float | None) -> bool:
    return (since is None or since <= time) and (until is None or time < until)
