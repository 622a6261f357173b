"""Dead letters of one journal: each change is a commit that is guarded by versions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol, final

from msgbus.errors import (
    DeadLetterStoreError,
    JournalCorruptError,
    MemberEndedError,
    StaleError,
    UndeliverableLetterError,
)
from msgbus.journal.letters import Letters, LetterSelection, StoredLetter
from msgbus.journal.operations import Drop, Operation
from msgbus.journal.ports import Journal
from msgbus.journal.records import LETTERS, Member, Pending, State
from msgbus.resilience.dead_letters.claims import Claims
from msgbus.resilience.dead_letters.entry import DONE, DeadLetterEntry, LetterStatus
from msgbus.resilience.dead_letters.filters import LetterFilter, position
from msgbus.resilience.dead_letters.rows import (
    changes,
    entry_of,
    group_of,
    id_of,
    new_row,
    selection_of,
    with_history,
)
from msgbus.resilience.dead_letters.store import (
    BoundedStore,
    LetterGroup,
    LetterPage,
    Notice,
    Overflow,
    Step,
    added,
)
from msgbus.runtime.clock import Clock

_ATTEMPTS: Final = 20
"""Times that a change is attempted which others are always ahead of."""

_IDS: Final = 500
"""Messages looked up at once."""

_DONE: Final = LetterSelection(statuses=tuple(sorted(DONE)))
_DEAD: Final = LetterSelection(statuses=(LetterStatus.DEAD.value,))
_REPLAYING: Final = LetterSelection(statuses=(LetterStatus.REPLAYING.value,))


class LetterJournal(Journal, Letters, Protocol):
    """A journal whose dead letters can be searched."""


class Room(NamedTuple):
    """What makes room for more letters."""

    operations: list[Operation]
    notices: list[Notice]


@final
class JournalLetters:
    """Reads and changes the letters of a journal, within the bound of a store."""

    def __init__(self, journal: LetterJournal, store: BoundedStore, clock: Clock) -> None:
        self.journal = journal
        self.claims = Claims(journal)
        self._store = store
        self._now = clock.time

    # -- reading ---------------------------------------------------------------------------------

    async def get(self, letter_id: str) -> DeadLetterEntry | None:
        """Return one letter."""
        stored, _ = await self._find(letter_id)
        return None if stored is None else entry_of(stored)

    async def _find(self, letter_id: str) -> tuple[StoredLetter | None, StoredLetter | None]:
        """Return the letter of an id, and its record in `LETTERS`: mostly the same."""
        message_id = letter_id.rpartition("-")[0]
        found = await self.journal.find_letters(LetterSelection(message_ids=(message_id,)))
        found = [one for one in found if id_of(one) == letter_id]
        durable = next((one for one in found if one.row.subscription != LETTERS), None)
        record = next((one for one in found if one.row.subscription == LETTERS), None)
        return record if durable is None else with_history(durable, record), record

    async def page(self, which: LetterFilter, after: str | None, limit: int) -> LetterPage:
        """Return at most `limit` letters behind a cursor."""
        behind = 0 if after is None else position(after)
        # One more than asked for says whether there is a next page.
        found = await self.journal.find_letters(selection_of(which), after=behind, limit=limit + 1)
        letters: list[DeadLetterEntry] = []
        damaged: list[JournalCorruptError] = []
        for stored in await self._with_histories(found[:limit]):
            try:
                letters.append(entry_of(stored))
            except JournalCorruptError as error:
                damaged.append(error)
        cursor = str(found[limit - 1].number) if len(found) > limit else None
        return LetterPage(tuple(letters), cursor, tuple(damaged))

    async def _with_histories(self, found: Sequence[StoredLetter]) -> list[StoredLetter]:
        """Add the records of letters that were done before; leave such records out."""
        doubtful = {
            one.record.message_id for one in found if one.record is not None and one.record.offset
        }
        letters: dict[str, StoredLetter] = {}
        records: dict[str, StoredLetter] = {}
        for one in await self._of_messages(doubtful):
            same = records if one.row.subscription == LETTERS else letters
            same[id_of(one)] = one
        return [
            with_history(one, records.get(id_of(one)))
            for one in found
            if one.row.subscription != LETTERS or id_of(one) not in letters
        ]

    async def _of_messages(self, message_ids: Collection[str]) -> list[StoredLetter]:
        letters: list[StoredLetter] = []
        ids = sorted(message_ids)
        for start in range(0, len(ids), _IDS):
            which = LetterSelection(message_ids=ids[start : start + _IDS])
            after = 0
            while found := await self.journal.find_letters(which, after=after, limit=_IDS):
                letters += found
                after = found[-1].number
        return letters

    async def count(self, which: LetterFilter) -> int:
        """Return the number of letters."""
        return await self.journal.count_letters(selection_of(which))

    async def groups(self, which: LetterFilter) -> list[LetterGroup]:
        """Group letters; the largest group first."""
        return [group_of(one) for one in await self.journal.total_letters(selection_of(which))]

    async def head(self) -> str:
        """Return the cursor of the newest letter."""
        return str(await self.journal.last_letter())

    # -- writing ---------------------------------------------------------------------------------

    async def add(self, letters: Sequence[DeadLetterEntry]) -> Sequence[Notice]:
        """Add letters, or update those of their ids; return what was lost for it."""
        if len({one.letter_id for one in letters}) == len(letters) > 1:
            room = await self._room(len(letters), must_drop=False)
            now = self._now()
            if room is not None and await self._is_written([new_row(one, now) for one in letters]):
                return ()
        return [notice for letter in letters for notice in await self._add(letter)]

    async def _add(self, letter: DeadLetterEntry) -> Sequence[Notice]:
        for _ in range(_ATTEMPTS):
            _, record = await self._find(letter.letter_id)
            if record is None:
                room = await self._room(1)
                if room is None:
                    return [Notice("refused", letter, self._store.is_full)]
                operations = [*room.operations, new_row(letter, self._now())]
                owner = None
            else:
                room = Room([], [])
                entry = added(entry_of(record), letter)
                operations = changes(entry, record, record, None, self._now())
                owner = _owner(record)
            if await self._is_written(operations, owner):
                return room.notices
        raise _contended(letter.letter_id)

    async def change(
        self, letter_id: str, step: Step, successor: DeadLetterEntry | None
    ) -> tuple[DeadLetterEntry | None, Sequence[Notice]]:
        """Replace one letter by what `step` makes of it; return it, and what was lost for it.

        Raises:
            UndeliverableLetterError: It cannot be claimed for a replay.
        """
        refused: Pending | None = None
        for _ in range(_ATTEMPTS):
            stored, record = await self._find(letter_id)
            if stored is None:
                return None, ()
            before = entry_of(stored)
            after = step(before)
            is_changed = after != before or successor is not None
            if not is_changed or self._is_of_subscription(stored.row):
                return before, ()
            is_claim = stored.row.owner is None and after.status is LetterStatus.REPLAYING
            if is_claim and refused == stored.row and stored.row.unique is not None:
                raise UndeliverableLetterError("another command of its unique key waits or runs")
            member = await self.claims.member() if is_claim else _owner(stored)
            operations = changes(after, stored, record, member, self._now())
            notices: Sequence[Notice] = ()
            if successor is not None:
                # The letter it stands in for is done: there is room, or nothing is lost.
                room = await self._room(1, beside=stored) or Room([], [])
                notices = room.notices
                operations += [*room.operations, new_row(successor, self._now())]
            if await self._is_written(operations, member):
                is_done = after.status in DONE
                return replace(after, subscription="") if is_done else after, notices
            is_lost = member is not None and not self.claims.is_own(member.id)
            refused = None if is_lost else stored.row
        raise _contended(letter_id)

    def _is_of_subscription(self, row: Pending) -> bool:
        """Tell whether the subscription itself delivers the message of a letter just now."""
        is_durable = row.subscription != LETTERS
        return is_durable and row.owner is not None and not self.claims.is_own(row.owner)

    async def release(self) -> int:
        """Make letters dead again whose process ended while it replayed them; return how many."""
        await self.claims.end_others()
        number = after = 0
        while found := await self.journal.find_letters(_REPLAYING, after=after):
            after = found[-1].number
            for one in found:
                # Without an attempt by its subscription since.
                if id_of(one) and one.row.state is State.WAITING and one.row.alone:
                    entry = replace(entry_of(one), status=LetterStatus.DEAD)
                    operations = changes(entry, one, one, None, self._now())
                    number += await self._is_written(operations)
        return number

    async def put(self, letters: Sequence[DeadLetterEntry]) -> tuple[int, Sequence[Notice]]:
        """Add those whose ids are new, all or none; return how many were, and what was lost.

        Raises:
            DeadLetterStoreError: They do not fit.
        """
        given = {letter.letter_id: letter for letter in letters}
        for _ in range(_ATTEMPTS):
            found = await self._of_messages({letter.message_id for letter in given.values()})
            known = {id_of(one) for one in found}
            new = [letter for letter_id, letter in given.items() if letter_id not in known]
            room = await self._room(len(new))
            if room is None:
                raise DeadLetterStoreError(
                    f"{len(new)} letters do not fit: the store takes at most "
                    f"{self._store.max_size}. Make max_size larger, or discard some."
                )
            now = self._now()
            operations = [*room.operations, *(new_row(letter, now) for letter in new)]
            if await self._is_written(operations):
                return len(new), room.notices
        raise _contended("of an import")

    async def _is_written(
        self, operations: Sequence[Operation], member: Member | None = None
    ) -> bool:
        """Commit; false if another was faster."""
        try:
            await self.journal.commit(operations, member)
        except MemberEndedError:
            self.claims.lose()
            return False
        except StaleError:
            return False
        return True

    # -- capacity --------------------------------------------------------------------------------

    async def _room(
        self, number: int, *, must_drop: bool = True, beside: StoredLetter | None = None
    ) -> Room | None:
        """Make room for so many letters, without `must_drop` only if there is; `None` for none.

        The letter `beside` is changed in the same commit, and stays.
        """
        if self._store.max_size is None:
            return Room([], [])
        size = await self.journal.count_letters(LetterSelection())
        missing = size + number - self._store.max_size
        if missing <= 0 or not must_drop:
            return Room([], []) if missing <= 0 else None
        victims = await self._oldest(_DONE, missing, beside)
        missing -= len(victims)
        notices: list[Notice] = []
        if missing > 0:
            if self._store.overflow is Overflow.REJECT:
                return None
            dead = await self._oldest(_DEAD, missing, beside)
            if len(dead) < missing:
                return None
            victims += dead
            reason = self._store.is_full
            notices = [Notice("dropped", entry_of(one), reason) for one in dead if id_of(one)]
        return Room([Drop(one.row) for one in victims], notices)

    async def _oldest(
        self, which: LetterSelection, number: int, beside: StoredLetter | None
    ) -> list[StoredLetter]:
        found = await self.journal.find_letters(which, limit=number + 1)
        return [one for one in found if beside is None or one.number != beside.number][:number]


def _owner(stored: StoredLetter) -> Member | None:
    """Return who has claimed a letter: it is changed in the name of that member."""
    return None if stored.row.owner is None else Member(stored.row.owner, "", {}, 0)


def _contended(what: str) -> DeadLetterStoreError:
    return DeadLetterStoreError(
        f"The dead letter {what} is changed by others again and again. Repeat the call."
    )
