"""What may happen to a table of dead letters, and who goes when it is full."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import final

from msgbus.errors import DeadLetterStoreError
from msgbus.resilience.claims import Claim
from msgbus.resilience.letter_rows import LetterRows
from msgbus.resilience.letters import DONE, DeadLetterEntry, LetterStatus
from msgbus.resilience.stores import Notice, Overflow, Record, added, released


@final
class Room:
    """At most so many letters in a table.

    Each method is one step, to be made inside a transaction. It keeps nothing, so that a step
    may be made again if the transaction has to be.
    """

    def __init__(self, max_size: int | None, overflow: Overflow) -> None:
        self._max_size = max_size
        self._overflow = overflow

    def keep(self, rows: LetterRows, letter: DeadLetterEntry) -> Sequence[Notice]:
        """Write a letter that came, perhaps again; who was lost for it, or with it.

        Raises:
            sqlite3.OperationalError: The file cannot be written at all.
        """
        try:
            record = rows.get(letter.letter_id)
            if record is None:
                return self.insert(rows, Record(letter))
            rows.update(added(record, letter))
        except sqlite3.OperationalError:
            raise
        except Exception as error:  # one that cannot be written must not hold up the others
            return [Notice("refused", letter, f"it cannot be written: {type(error).__name__}")]
        return ()

    def insert(
        self, rows: LetterRows, record: Record, *, must_fit: bool = False
    ) -> Sequence[Notice]:
        """Write a new record if there is room, or room can be made; who was lost for it."""
        notices: list[Notice] = []
        if self._max_size is not None:
            reason = f"the store is full ({self._max_size} letters)"
            for _ in range(rows.size() + 1 - self._max_size):
                found = self._least_needed(rows)
                if found is None and not must_fit:
                    return [Notice("refused", record.letter, reason)]
                if found is None:
                    break
                rows.remove(found.letter_id)
                if found.status not in DONE:
                    notices.append(Notice("dropped", found, reason))
        rows.insert(record)
        return notices

    def _least_needed(self, rows: LetterRows) -> DeadLetterEntry | None:
        """The letter to go first: one that is done, else the oldest if that may be dropped."""
        wanted = sorted(DONE)
        if self._overflow is Overflow.DROP_OLDEST:
            wanted.append(LetterStatus.DEAD)
        for status in wanted:
            letter = rows.oldest(status)
            if letter is not None:
                return letter
        return None

    def change(
        self,
        rows: LetterRows,
        letter_id: str,
        step: Callable[[Record], Record],
        successor: DeadLetterEntry | None,
    ) -> tuple[DeadLetterEntry | None, Sequence[Notice]]:
        """Replace one record by what `step` makes of it; see `DeadLetterStore.change`."""
        record = rows.get(letter_id)
        if record is None:
            return None, ()
        changed = step(record)
        if changed is not record:
            rows.update(changed)
        if successor is None:
            return changed.letter, ()
        return changed.letter, self.insert(rows, Record(successor), must_fit=True)

    def put(
        self, rows: LetterRows, letters: Sequence[DeadLetterEntry], name: object
    ) -> tuple[int, Sequence[Notice]]:
        """Add those whose ids are new; how many were.

        Raises:
            DeadLetterStoreError: They do not fit into the store of this `name`.
        """
        number = 0
        dropped: list[Notice] = []
        for letter in letters:
            if rows.get(letter.letter_id) is None:
                notices = self.insert(rows, Record(letter))
                if any(notice.kind == "refused" for notice in notices):
                    raise DeadLetterStoreError(
                        f"{len(letters)} letters do not fit into {name}, which takes "
                        f"at most {self._max_size}. Make max_size larger, or discard some."
                    )
                dropped += notices
                number += 1
        return number, dropped


def release(rows: LetterRows, is_void: Callable[[Claim], bool]) -> int:
    """Make every letter dead again whose claim is void; how many."""
    void = [one for one in rows.claimed() if one.claim is None or is_void(one.claim)]
    for record in void:
        rows.update(released(record))
    return len(void)


def tell(listeners: Sequence[Callable[[Notice], None]], notices: Sequence[Notice]) -> None:
    """Tell every listener about letters that were lost."""
    for notice in notices:
        for listener in listeners:
            listener(notice)
