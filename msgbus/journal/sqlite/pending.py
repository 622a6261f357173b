"""Writes of pending rows and their letters, each guarded by the version of the row."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final, final

from msgbus.errors import StaleError
from msgbus.journal import rows
from msgbus.journal.operations import Drop, Put
from msgbus.journal.records import Letter, Pending, State
from msgbus.journal.sqlite.columns import (
    LETTER,
    PENDING,
    PLAIN_PENDING,
    letter_row,
    new_row,
    pending_row,
    read_letter,
    text,
)
from msgbus.journal.sqlite.transactions import (
    MultiRow,
    NotAtOnce,
    WriteTransaction,
    each,
    inserting,
)

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec

_FINISHED: Final = (State.DONE, State.KEPT)
"""States in which a row loses its letter, unless it is `KEPT` with one."""

_ROWS: Final = inserting("pending", PENDING)
_PLAIN_ROWS: Final = inserting("pending", PLAIN_PENDING)
_PLAIN: Final = PLAIN_PENDING.count(",") + 1
_LETTERS: Final = inserting("letters", f"number, {LETTER}", "INSERT OR REPLACE")
_LETTER: Final = (
    f"SELECT number, {LETTER} FROM msgbus_letters WHERE subscription = ? AND offset = ?"  # noqa: S608
)
_DROPS: Final = MultiRow(
    "DELETE FROM msgbus_pending WHERE subscription = ? AND partition = ? AND version = ? "
    "AND owner IS ? AND key IS NULL AND offset IN (",
    "?",
    ")",
)
_DROP: Final = "DELETE FROM msgbus_pending WHERE subscription = ? AND offset = ?"
_COLUMNS: Final = PENDING.split(", ")[2:]
_MARK: Final = (
    f"UPDATE msgbus_pending SET {', '.join(f'{one} = ?' for one in _COLUMNS)} "  # noqa: S608
    "WHERE subscription = ? AND offset = ?"
)
_UPDATE: Final = f"{_MARK} AND version = ? AND (owner IS NULL OR owner = ?)"
_FIRST_PARKED: Final = f"""
SELECT {PENDING} FROM msgbus_pending INDEXED BY msgbus_pending_key
WHERE subscription = ? AND partition = ? AND key = ? AND state = 'parked' AND NOT EXISTS (
    SELECT 1 FROM msgbus_pending INDEXED BY msgbus_pending_holding
    WHERE subscription = ? AND partition = ? AND key = ?
        AND state IN ('waiting', 'claimed', 'dead', 'damaged'))
ORDER BY offset LIMIT 1
"""  # noqa: S608
_LOWEST: Final = """
SELECT min(offset) FROM msgbus_pending INDEXED BY msgbus_pending_key
WHERE subscription = ? AND partition = ? AND key = ?
"""
_HOLDER: Final = """
SELECT offset FROM msgbus_pending INDEXED BY msgbus_pending_unique
WHERE subscription = ? AND unique_key = ? AND state <> 'dead'
"""


@final
class PendingRows:
    """Inserts, replaces and deletes pending rows."""

    def __init__(self, transaction: WriteTransaction, codec: PayloadCodec | None) -> None:
        self._transaction = transaction
        self._connection = transaction.connection
        self._reader = transaction.reader
        self._codec = codec
        self.acting: int | None = None
        """Id of the member on whose behalf rows are changed."""

    def holder(self, name: str, unique: str) -> int | None:
        """Return the offset of the row that has a unique key and is not dead."""
        row = self._connection.execute(_HOLDER, (name, unique)).fetchone()
        return None if row is None else int(row[0])

    def put_all(self, puts: Sequence[Put]) -> None:
        """Write rows in order: those that are new, or only changed, in few statements each."""
        for is_new, run in groupby(puts, key=_is_new):
            if is_new is None:
                each(self.put, run)
            elif is_new:
                several = list(run)
                self.put_new([put.row for put in several])
                self._put_letters(several)
            else:
                self.update([put.row for put in run])

    # -- new rows ------------------------------------------------------------------------------

    def add(self, new: Iterable[Pending]) -> None:
        """Insert rows; SQLite refuses those that are there."""
        new = list(new)
        self._take_note_of_done(new)
        values = [new_row(row, self._codec) for row in new]
        plain = [one for one in values if len(one) == _PLAIN]
        _PLAIN_ROWS.run(self._connection, plain)
        if len(plain) != len(values):
            _ROWS.run(self._connection, [one for one in values if len(one) != _PLAIN])

    def insert(self, new: Sequence[Pending]) -> None:
        """Insert rows.

        Raises:
            StaleError: One is there, or another has its unique key.
        """
        if len(new) == 1:
            self._insert_one(new[0])
        elif new:
            self._transaction.together(partial(self.add, new), partial(each, self._insert_one, new))

    def put_new(self, new: Sequence[Pending]) -> None:
        """Insert rows; one that is parked behind no other waits for nothing."""
        if any(row.state is State.PARKED for row in new):
            lowest: dict[tuple[str, int, str | None], int] = {}
            new = [self._begun_if_first(row, lowest) for row in new]
        self.insert(new)

    def _begun_if_first(
        self, row: Pending, lowest: dict[tuple[str, int, str | None], int]
    ) -> Pending:
        """Return a parked row as waiting if it is the first of its key.

        Args:
            row: The row.
            lowest: The lowest offset of a row of each key; this row is added.
        """
        key = (row.subscription, row.partition, row.key)
        if row.key is None:
            lowest[key] = row.offset  # nothing would ever let it go
        elif key not in lowest:
            found = self._connection.execute(_LOWEST, key).fetchone()[0]
            lowest[key] = row.offset if found is None else found
        is_first = lowest[key] >= row.offset
        lowest[key] = min(lowest[key], row.offset)
        return rows.first_of_key(row) if is_first and row.state is State.PARKED else row

    def _insert_one(self, row: Pending) -> None:
        try:
            self.add([row])
        except sqlite3.IntegrityError as error:
            raise self._refusal(row) from error

    def _refusal(self, row: Pending) -> StaleError:
        stored = self._reader.row(row.subscription, row.offset)
        try:
            rows.check_version(row, stored, row.version - 1, self.acting)
        except StaleError as error:
            return error
        return rows.unique_taken(row)

    # -- changes -------------------------------------------------------------------------------

    def update(self, changed: Sequence[Pending]) -> None:
        """Replace rows, each at the version before.

        Raises:
            StaleError: One is not at that version, claimed by another member, or another has
                its unique key.
        """
        if len(changed) == 1:
            self._update_one(changed[0])
        elif changed:
            self._transaction.together(
                partial(self._update, changed), partial(each, self._update_one, changed)
            )
        self._delete_letters([row for row in changed if row.state in _FINISHED])

    def _take_note_of_done(self, written: Sequence[Pending]) -> None:
        for row in written:
            if row.state is State.DONE:
                self._transaction.without_done.discard((row.subscription, row.partition))

    def _update(self, changed: Sequence[Pending]) -> None:
        self._take_note_of_done(changed)
        acting = self.acting
        values = [
            (*pending_row(row, self._codec)[2:], *row[:2], row.version - 1, acting)
            for row in changed
        ]
        if self._connection.executemany(_UPDATE, values).rowcount != len(changed):
            raise NotAtOnce

    def _update_one(self, row: Pending) -> None:
        try:
            self._update([row])
        except (NotAtOnce, sqlite3.IntegrityError) as error:
            raise self._refusal(row) from error

    def _delete_letters(self, of: Sequence[Pending]) -> None:
        """Delete the letters of rows; nearly always there are none at all."""
        query = "SELECT EXISTS (SELECT 1 FROM msgbus_letters)"
        if of and self._connection.execute(query).fetchone()[0]:
            self._connection.executemany(
                "DELETE FROM msgbus_letters WHERE subscription = ? AND offset = ?",
                [row[:2] for row in of],
            )

    def put(self, operation: Put) -> None:
        """Write one row, with its letter, and let the next of the key go that it had."""
        row, letter, promote, is_whole = operation
        if row.state is State.PARKED:
            row = self._begun_if_first(row, {})
        stored = self._reader.row(row.subscription, row.offset) if promote else None
        if row.version == 1:
            self._insert_one(row)
        elif letter is not None and row.state is not State.DONE:
            self._update_one(row)
        else:
            self.update([row])
        if letter is not None and row.state is not State.DONE:
            self._put_letter(row, letter, is_whole=is_whole)
        if stored is not None:
            self._promote(stored)

    def _put_letters(self, puts: Iterable[Put]) -> None:
        """Write the letters of new rows, which have had none before."""
        reader = self._reader
        values = [
            (None, *letter_row(row, letter, reader.record(row), self._codec))
            for row, letter, *_ in puts
            if letter is not None and row.state is not State.DONE
        ]
        _LETTERS.run(self._connection, values)

    def _put_letter(self, row: Pending, letter: Letter, *, is_whole: bool) -> None:
        number: int | None = None
        stored = self._connection.execute(_LETTER, row[:2]).fetchone()
        if stored is not None:
            number, known = stored[0], read_letter(stored[1:], self._codec)
            if known is not None and not is_whole:
                letter = letter.after(known)
        values = letter_row(row, letter, self._reader.record(row), self._codec)
        _LETTERS.run(self._connection, [(number, *values)])

    def _promote(self, done: Pending) -> None:
        """Let the first parked row of a key go, unless another row holds it back."""
        if done.key is None:
            return
        key = (done.subscription, done.partition, done.key)
        for row in self._reader.pending(_FIRST_PARKED, key * 2):
            if row.state is State.DAMAGED:
                self.set_aside([row])  # it holds back the others from now on
            else:
                self.update([rows.promoted(row)])

    def set_aside(self, damaged: Iterable[Pending]) -> None:
        """Write damaged rows as `DAMAGED`, so that nobody claims them."""
        for row in damaged:
            if text(row.subscription) is not None:
                aside = row.moved(State.DAMAGED, time=row.time)
                values = (*pending_row(aside, self._codec)[2:], row.subscription, row.offset)
                self._connection.execute(_MARK, values)

    # -- ends ----------------------------------------------------------------------------------

    def drop(self, operation: Drop) -> None:
        """Delete one row and its letter, and let the next of its key go.

        Raises:
            StaleError: It is not at its version, or claimed by another member.
        """
        row = self._reader.row(operation.row.subscription, operation.row.offset)
        rows.check_version(operation.row, row, operation.row.version, self.acting)
        if row is None:
            raise rows.row_changed(operation.row)
        if self._is_passed(row):
            self._connection.execute(_DROP, (row.subscription, row.offset))
            self._delete_letters([row])
        else:
            self.update([rows.done(row)])
        self._promote(row)

    def _is_passed(self, row: Pending) -> bool:
        """Tell whether no cursor has yet to pass the message of a row."""
        cursor = self._reader.cursor(row.subscription, row.partition)
        return cursor is None or row.offset <= cursor.acked

    def drop_all(self, drops: Sequence[Drop]) -> None:
        """Delete rows in order: those that hold back no other in few statements."""
        for is_simple, run in groupby(drops, key=_holds_back_none):
            several = list(run)
            if len(several) == 1 or not is_simple:
                each(self.drop, several)
            else:
                self._transaction.together(
                    partial(self._drop_many, several), partial(each, self.drop, several)
                )

    def _drop_many(self, operations: Sequence[Drop]) -> None:
        groups: dict[tuple[str, int, int, int | None], list[Pending]] = {}
        for (row,) in operations:
            guard = (row.subscription, row.partition, row.version, row.owner)
            groups.setdefault(guard, []).append(row)
        for guard, dropped in groups.items():
            last = max(dropped, key=_offset)
            if last.owner not in (None, self.acting) or not self._is_passed(last):
                raise NotAtOnce
            offsets = [(row.offset,) for row in dropped]
            if _DROPS.run(self._connection, offsets, guard) != len(dropped):
                raise NotAtOnce
            self._delete_letters(dropped)


_offset: Final = attrgetter("offset")


def _is_new(put: Put) -> bool | None:
    """Tell whether a row is new, rather than changed; `None` if it has to be written alone."""
    row, letter, promote, _ = put
    if promote or (row.version != 1 and (letter is not None or row.state is State.PARKED)):
        return None
    return row.version == 1


def _holds_back_none(drop: Drop) -> bool:
    return drop.row.key is None and drop.row.state is not State.DAMAGED
