"""Members, the partitions they own and the rows they claim: steps inside one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple, final

from msgbus.errors import MemberEndedError
from msgbus.journal import rows
from msgbus.journal.operations import Pass
from msgbus.journal.ports import Claim
from msgbus.journal.records import (
    Cursor,
    Member,
    Pending,
    Record,
    Selection,
    State,
)
from msgbus.journal.sqlite.columns import MEMBER, PENDING, member_row
from msgbus.journal.sqlite.reads import SCAN
from msgbus.journal.sqlite.store import Store
from msgbus.runtime.event_loop import Runtime

_OWNED: Final = (
    f"SELECT {PENDING} FROM msgbus_pending INDEXED BY msgbus_pending_owner WHERE owner = ?"  # noqa: S608
)
_JOIN: Final = "INSERT INTO msgbus_members (process, serves, renewals, crc) VALUES ('', '', 0, 0)"
_WRITE_MEMBER: Final = f"INSERT OR REPLACE INTO msgbus_members ({MEMBER}) VALUES (?, ?, ?, ?, ?)"  # noqa: S608
_UNREADABLE: Final = "The message is damaged or missing."


@final
class JournalSteps:
    """Every step of a commit that is more than a list of operations."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._connection = store.transaction.connection
        self._reader = store.reader
        self._known = store.transaction.known_members

    # -- members -------------------------------------------------------------------------------

    def require(self, member: Member) -> None:
        """Raise unless the member exists."""
        self.store.transaction.require_member(member.id)

    def join(self, process: str, serves: Mapping[str, str]) -> Member:
        """Add a member."""
        inserted = self._connection.execute(_JOIN)
        member = Member(inserted.lastrowid or 0, process, dict(serves), 0)
        self._connection.execute(_WRITE_MEMBER, member_row(member))  # the id is in its checksum
        return member

    def count_renewal(self, member: int) -> bool:
        """Show that a member is alive; tell whether it exists."""
        changed = self._connection.execute(
            "UPDATE msgbus_members SET renewals = renewals + 1 WHERE id = ?", (member,)
        )
        if changed.rowcount == 1:
            self._known.add(member)
        return changed.rowcount == 1

    def renew(self, member: Member) -> Member:
        """Show that the member is alive; see `Members.renew`."""
        if not self.count_renewal(member.id):
            raise MemberEndedError(member.id)
        query = "SELECT renewals FROM msgbus_members WHERE id = ?"
        (renewals,) = self._connection.execute(query, (member.id,)).fetchone()
        renewed = member._replace(renewals=renewals)
        self._connection.execute(_WRITE_MEMBER, member_row(renewed))
        return renewed

    def end(self, member: Member) -> bool:
        """Delete a member that was not renewed since it was read; see `Members.end`."""
        deleted = self._connection.execute(
            "DELETE FROM msgbus_members WHERE id = ? AND renewals = ?", (member.id, member.renewals)
        )
        if deleted.rowcount != 1:
            return False
        self._known.discard(member.id)
        self.store.rows.acting = member.id
        owned = self._sound(self._reader.pending(_OWNED, (member.id,)))
        self.store.rows.update([rows.in_doubt(row) for row in owned])
        self.store.set_cursors(
            cursor._replace(owner=None)
            for cursor in self._reader.cursors()
            if cursor.owner == member.id
        )
        return True

    def _sound(self, found: Sequence[Pending]) -> list[Pending]:
        """Set aside the rows that are damaged; return the others."""
        self.store.rows.set_aside(row for row in found if row.state is State.DAMAGED)
        return [row for row in found if row.state is not State.DAMAGED]

    # -- partitions ----------------------------------------------------------------------------

    def open(self, name: str, selection: Selection, start: int) -> list[Cursor]:
        """Return the cursors of a subscription, made if it is new; see `Members.open`."""
        stored = self._reader.cursors(name)
        start = min(start, self.store.transaction.head)
        found = rows.opened(name, selection, start, stored, self._reader.members())
        if found != stored:
            self.store.set_cursors(found)
        return found

    def acquire(
        self, member: Member, name: str, partition: int, selection: Selection
    ) -> Cursor | None:
        """Take a partition that has no owner; see `Members.acquire`."""
        self.require(member)
        cursor = self._opened(name, partition)
        if cursor.owner is not None:
            return None
        self._add_doubtful(cursor, selection)
        taken = rows.taken(cursor, member)
        self.store.set_cursors([taken])
        self.store.forget_done(taken)
        return taken

    def _add_doubtful(self, cursor: Cursor, selection: Selection) -> None:
        """Add rows for what may have been in flight in the process of the last owner."""
        name, partition, after = cursor.name, cursor.partition, cursor.acked
        if after >= cursor.fetched:
            return
        held = self._reader.held(name, partition)
        present = self._reader.offsets(name, after, cursor.fetched)
        while after < cursor.fetched:
            scan = self._reader.scan(after, cursor.fetched, SCAN, selection, (partition,))
            after = scan.upto
            self.store.rows.insert(
                [
                    rows.doubtful(name, one, partition, selection, held)
                    if isinstance(one, Record)
                    else _unreadable(name, one, partition)
                    for one in scan.records
                    if _offset(one) not in present
                ]
            )

    def _opened(self, name: str, partition: int) -> Cursor:
        cursor = self._reader.cursor(name, partition)
        if cursor is None:
            raise rows.removed(name)
        return cursor

    # -- claims --------------------------------------------------------------------------------

    def claim(
        self,
        member: Member,
        name: str,
        limit: int,
        now: float,
        *,
        selection: Selection | None = None,
        partitions: Collection[int] | None = None,
        alone: bool = False,
    ) -> list[Claim]:
        """Claim rows that are due; see `Deliveries.claim`."""
        self.require(member)
        if selection is not None or partitions is not None:
            self._opened(name, 0)
        self.store.rows.acting = member.id
        claims = self._claim_due(member, name, limit, now, partitions, alone=alone)
        room = limit - len(claims)
        if selection is not None and room > 0 and not alone:
            claims += self._claim_new(member, name, room, now, selection)
        return claims

    def _claim_due(
        self,
        member: Member,
        name: str,
        limit: int,
        now: float,
        partitions: Collection[int] | None,
        *,
        alone: bool,
    ) -> list[Claim]:
        while True:
            found = self._reader.due_rows(name, now, limit, partitions, alone=alone)
            sound = self._sound(found)
            records = self._reader.messages([row.offset for row in sound if row.body is None])
            claims: list[Claim] = []
            lost: list[Pending] = []
            for row in sound:
                record = row.body or records.get(row.offset)
                if record is None:
                    lost.append(row.moved(State.DAMAGED, time=now, error=_UNREADABLE))
                else:
                    claims.append(Claim(rows.claimed(row, member, now, alone=alone), record))
            self.store.rows.update([*(claim.row for claim in claims), *lost])
            if claims or not found:
                return claims

    def _claim_new(
        self, member: Member, name: str, limit: int, now: float, selection: Selection
    ) -> list[Claim]:
        """Claim messages beyond the cursor."""
        cursor = self._opened(name, 0)
        transaction = self.store.transaction
        scan = transaction.tail.scan(cursor.acked, limit, selection, None)
        if scan is None:
            scan = self._reader.scan(cursor.acked, transaction.head, limit, selection)
        if scan.upto == cursor.acked == cursor.fetched:
            self.store.forget_done(cursor)
            return []  # and nothing is written: idle members ask often
        present = self._reader.offsets(name, cursor.acked, scan.upto)
        new = [one for one in scan.records if _offset(one) not in present]
        claims = [
            Claim(rows.newly_claimed(name, one, member, now), one)
            for one in new
            if isinstance(one, Record)
        ]
        self.store.rows.insert(
            [
                *(claim.row for claim in claims),
                *(_unreadable(name, one, 0) for one in new if isinstance(one, int)),
            ]
        )
        self.store.apply([Pass(cursor, scan.upto, scan.upto)], member)
        return claims


def _offset(one: Record | int) -> int:
    return one if isinstance(one, int) else one.offset


def _unreadable(name: str, offset: int, partition: int) -> Pending:
    """Make the row of a message that is damaged."""
    state, error = State.DAMAGED, _UNREADABLE
    return Pending(name, offset, partition, None, state, 0, None, None, 1, False, error, 0.0)


# -- members of this process -----------------------------------------------------------------------


class JoinedMember(NamedTuple):
    """A member that joined through this journal object."""

    id: int
    every: float | None
    """Seconds between renewals; `None` if the caller renews it."""
    on_lost: Callable[[], object] | None
    runtime: Runtime


@final
class Renewals:
    """The members that joined through one journal object; used on the writer's thread."""

    def __init__(self) -> None:
        self._joined: dict[int, JoinedMember] = {}
        self._times: dict[int, float] = {}
        """When each must be renewed, by the monotonic clock."""
        self.next = inf
        """When the first of them must be."""

    def add(self, joined: JoinedMember) -> None:
        """Renew a member from now on."""
        self._joined[joined.id] = joined
        if joined.every is not None:
            self._times[joined.id] = time.monotonic() + joined.every
            self._plan()

    def drop(self, member: int) -> JoinedMember | None:
        """Renew a member no more; from any thread."""
        if self._times.pop(member, None) is not None:
            self._plan()
        return self._joined.pop(member, None)

    def _plan(self) -> None:
        self.next = min(list(self._times.values()), default=inf)

    def renew(self, steps: JournalSteps) -> list[int]:
        """Renew those that are due; return those that were ended."""
        now = time.monotonic()
        lost: list[int] = []
        for member, due in list(self._times.items()):
            joined = self._joined.get(member)
            if due > now or joined is None:
                continue
            # Also if the commit fails: a full disk is no reason to try without a pause.
            self._times[member] = now + (joined.every or 0.0)
            if not steps.count_renewal(member):
                lost.append(member)
        self._plan()
        return lost

    def calls(self, lost: list[int]) -> list[tuple[Runtime, Callable[[], Any]]]:
        """Forget members that were ended; return what to call, and on which event loop."""
        found = [self.drop(member) for member in lost]
        return [(one.runtime, one.on_lost) for one in found if one is not None and one.on_lost]
