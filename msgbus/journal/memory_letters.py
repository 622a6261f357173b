"""Search among the letters of a journal in memory."""

from __future__ import annotations

from collections.abc import Iterator

from msgbus.journal.letters import LetterSelection, LetterTotal, StoredLetter, handler_of
from msgbus.journal.memory_tables import MemoryTables
from msgbus.journal.records import Letter, Pending, Record


def _takes(which: LetterSelection, number: int, row: Pending, letter: Letter) -> bool:
    return (
        which.handler in (None, handler_of(row, letter))
        and which.error_type in (None, letter.error_type)
        and (which.since is None or letter.last_attempt >= which.since)
        and (which.until is None or letter.last_attempt < which.until)
        and (which.statuses is None or letter.status in which.statuses)
        and which.answered in (None, letter.answered)
        and (which.upto is None or number <= which.upto)
    )


def _takes_message(which: LetterSelection, record: Record | None) -> bool:
    wanted = (which.message_ids, which.names, which.session_id)
    if record is None:
        return wanted == (None, None, None)
    return (
        (which.message_ids is None or record.message_id in which.message_ids)
        and (which.names is None or record.name in which.names)
        and which.session_id in (None, record.session_id)
    )


def _found(tables: MemoryTables, which: LetterSelection) -> Iterator[StoredLetter]:
    for (name, offset), (number, letter) in tables.letters.items():
        row = tables.pending[name][offset]
        record = tables.record(row)
        if _takes(which, number, row, letter) and _takes_message(which, record):
            yield StoredLetter(number, row, letter, record)


def find_letters(
    tables: MemoryTables, which: LetterSelection, *, after: int = 0, limit: int = 100
) -> list[StoredLetter]:
    """Return letters behind a number; see `Letters.find_letters`."""
    found = [one for one in _found(tables, which) if one.number > after]
    return sorted(found)[:limit]


def count_letters(tables: MemoryTables, which: LetterSelection) -> int:
    """Return the number of letters."""
    return sum(1 for _ in _found(tables, which))


def total_letters(tables: MemoryTables, which: LetterSelection) -> list[LetterTotal]:
    """Count letters by type of error, handler and name of message."""
    groups: dict[tuple[str, str, str], list[tuple[Pending, Letter]]] = {}
    for _, row, letter, record in sorted(_found(tables, which)):
        assert letter is not None  # noqa: S101 (nothing in memory is damaged)
        name = "" if record is None else record.name
        group = (letter.error_type, handler_of(row, letter), name)
        groups.setdefault(group, []).append((row, letter))
    totals = [
        LetterTotal(
            *group,
            len(found),
            min(letter.first_attempt for _, letter in found),
            max(letter.last_attempt for _, letter in found),
            found[-1][0].error,
        )
        for group, found in groups.items()
    ]
    return sorted(totals, key=lambda one: (-one.size, one.error_type, one.handler, one.name))


def last_letter(tables: MemoryTables) -> int:
    """Return the highest number of a letter."""
    return tables.numbers.get("letter", 0)
