"""`Claims`: the member in whose name this process replays the letters of a journal.

A letter that is being replayed is a row claimed by that member. When the process has ended the
member is ended too, by whoever notices first, and the letter is dead again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, final

from msgbus.journal.ports import Members
from msgbus.journal.records import LETTERS, Member
from msgbus.subscriptions.members import is_gone, this_process

_TTL: Final = 5.0
"""Seconds without a renewal after which a member is taken for dead, if the journal says none."""


@final
class Claims:
    """Joins a journal at the first replay, and leaves it in the end; `now` is monotonic."""

    def __init__(
        self,
        journal: Members,
        process: str | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._process = process or this_process()
        self._now = now
        self._ttl = journal.member_ttl or _TTL
        self._member: Member | None = None
        self._seen: dict[int, tuple[int, float]] = {}
        """Renewals of others, and since when they stand still by the clock of this process."""

    async def member(self) -> Member:
        """Return the member of this process, which joins now if it has not."""
        if self._member is None:
            serves = {LETTERS: ""}
            joined = await self._journal.join(
                self._process, serves, every=self._ttl / 4, on_lost=self.lose
            )
            if self._member is not None:  # another task was faster
                await self._end(joined)
            else:
                self._member = joined
        return self._member

    def is_own(self, owner: int | None) -> bool:
        """Tell whether a row is claimed by this process."""
        return self._member is not None and owner == self._member.id

    def lose(self) -> None:
        """Take note that others have ended the member; the next replay joins anew."""
        self._member = None

    async def leave(self) -> None:
        """End the member."""
        member, self._member = self._member, None
        if member is not None:
            await self._end(member)

    async def _end(self, member: Member) -> None:
        for one in await self._journal.members():
            if one.id == member.id:
                await self._journal.end(one)

    async def end_others(self) -> None:
        """End members for replays whose process has ended, or was silent for the TTL."""
        for member in await self._journal.members():
            if LETTERS not in member.serves or self.is_own(member.id):
                continue
            if is_gone(member.process, self._process) or self._is_silent(member):
                await self._journal.end(member)

    def _is_silent(self, member: Member) -> bool:
        now = self._now()
        renewals, since = self._seen.get(member.id, (-1, now))
        if renewals != member.renewals:
            self._seen[member.id] = (member.renewals, now)
            return False
        return now - since >= self._ttl
