"""Errors of the ports; they move to `msgbus.errors` with the swap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgbus.errors import JournalError

if TYPE_CHECKING:
    from msgbus._next.journal.records import Member


class StaleError(JournalError):
    """A row, partition or member is no longer what a commit was based on; nothing was written."""


class MemberEndedError(StaleError):
    """Others have taken over the work of this process, as it had shown no sign of life."""

    def __init__(self, member: Member) -> None:
        super().__init__(f"Member {member.id} was ended: others have taken over its work.")
        self.member = member
