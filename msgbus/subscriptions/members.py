"""`Membership`: this process among the others that work on one journal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import anyio

from msgbus.errors import JournalError, JournalFullError, SettleTimeoutError, StaleError
from msgbus.journal.operations import Drop, Operation, Seek
from msgbus.journal.ports import CommitParticipant, Journal
from msgbus.journal.records import Member, Pending, State
from msgbus.journal.watch import BUSY
from msgbus.runtime.clock_jumps import ClockJumps
from msgbus.runtime.event_loop import Runtime, current_runtime
from msgbus.runtime.periodic import PeriodicTask
from msgbus.runtime.timeouts import time_limit
from msgbus.subscriptions.attempts import AGAIN
from msgbus.subscriptions.gate import AloneGate
from msgbus.subscriptions.loop import SubscriptionLoop
from msgbus.subscriptions.loops import PartitionedLoop, SharedLoop
from msgbus.subscriptions.progress import describe_left, is_done, is_held_up, progress_now
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock

SURVEY: Final = 0.25
"""Seconds between two looks at the other members, at most."""

FLUSH: Final = 0.2
"""Seconds after which what is settled is written, if no other commit carries it."""


def this_process() -> str:
    """Return an identity by which others on this host can tell when the process is gone."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        parts = (boot.read_text().strip(), str(Path("/proc/self/ns/pid").readlink()))
    except OSError:  # no such files: others wait for the TTL
        return f"::{os.getpid()}:"
    return ":".join((*parts, str(os.getpid()), _started(os.getpid()) or ""))


def is_gone(process: str, here: str) -> bool:
    """Tell whether a process has certainly ended: same boot, same namespace, and not there."""
    host, pid, start = _parts(process)
    own_host, _, _ = _parts(here)
    return bool(start) and host == own_host and _started(int(pid)) != start


def _parts(process: str) -> tuple[str, str, str]:
    rest, _, start = process.rpartition(":")
    host, _, pid = rest.rpartition(":")
    return host, pid, start


def _started(pid: int) -> str | None:
    """Return when a process began; `None` if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


@final
class Membership:
    """Joins a journal, shares its subscriptions with other members, and starts anew if ended.

    Args:
        journal: The journal.
        clock: Time.
        ttl: Seconds without a renewal after which a member is ended by others.
        process: Identity of this process.
    """

    def __init__(
        self, journal: Journal, clock: Clock, *, ttl: float = 5.0, process: str | None = None
    ) -> None:
        self.journal = journal
        self.ttl = ttl
        self.gate = AloneGate(clock)
        self.member: Member | None = None
        self.losses = 0
        """Times that others have ended this member."""
        self._clock = clock
        self._process = process or this_process()
        self._loops: list[SubscriptionLoop[Any]] = []
        self._added: list[SubscriptionLoop[Any]] = []
        """Those of them that `start` has not begun yet."""
        self._starts: dict[str, int] = {}
        self._seen: dict[int, tuple[Member, float]] = {}
        self._version = -1
        """Of the commits of others."""
        self._runtime: Runtime | None = None
        self._starting = anyio.Lock()
        self._is_stopping = False
        self._jumps = ClockJumps(clock)
        self._full: JournalFullError | None = None
        """Why nothing can be acknowledged at the moment."""
        self._surveys = PeriodicTask(
            "survey", self._survey_often, clock, self._failed, is_look=True
        )
        self._watch = PeriodicTask("watch", self._watch_others, clock, self._failed, is_look=True)
        self._flushes = PeriodicTask("flush", self._flush, clock, self._flush_failed, is_look=True)
        self.flush_soon = self._flushes.wake
        """Write now what is settled."""

    def add(self, loop: SubscriptionLoop[Any], start: int = 0) -> None:
        """Add a subscription, for the next `start`; a new one begins behind the offset `start`."""
        self._loops.append(loop)
        self._added.append(loop)
        self._starts[loop.name] = start
        loop.flush = self.flush_soon

    async def exclude(self, loop: SubscriptionLoop[Any], timeout: float | None = None) -> int:
        """Hand out nothing more of one subscription, and leave it to other members.

        Returns:
            Deliveries that were still in flight after `timeout`; others repeat them.
        """
        left = await self._drain([loop], timeout)
        operations = self._release(loop)
        self._loops.remove(loop)
        if self.member is not None:
            with suppress(StaleError):
                await self.journal.commit(operations, self.member)
        if self.member is not None:
            self._begin(self.member)
            with suppress(StaleError):
                await self._serve()
        return left

    def forget(self, loop: SubscriptionLoop[Any]) -> None:
        """End one subscription at once and write nothing of it, as a crash would."""
        loop.end()
        self._loops.remove(loop)
        if not self._loops:
            self.abandon()
        elif self.member is not None:
            self._begin(self.member)

    @property
    def names(self) -> set[str]:
        """Names of its subscriptions."""
        return {loop.name for loop in self._loops}

    async def _serve(self) -> None:
        """Let others know which subscriptions are served here."""
        assert self.member is not None  # noqa: S101 (checked by the callers)
        self.member = await self.journal.renew(self.member._replace(serves=self._serves()))

    def _serves(self) -> dict[str, str]:
        return {loop.name: loop.state.selection.text for loop in self._loops}

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to deliver what was added since the last call; the first call joins the journal."""
        async with self._starting:
            if self._surveys.is_open:
                await self._start_added()
            elif self._added:
                self._runtime = current_runtime(self._runtime)
                self._is_stopping = False
                await self._join()
                for task in (self._surveys, self._watch, self._flushes):
                    task.open(self._runtime)

    async def _start_added(self) -> None:
        added, self._added = self._added, []
        if added and self.member is not None:  # else they begin when it has joined again
            await self._open(added)
            await self._serve()
            self._begin(self.member)
            await self._survey()
            await self.look()

    async def stop(self, timeout: float | None = None) -> int:
        """Hand out nothing more, wait for what is in flight, and leave.

        Returns:
            Deliveries that were still in flight after `timeout`; others repeat them.
        """
        self._is_stopping = True
        left = await self._drain(self._loops, timeout)
        for task in (self._surveys, self._watch, self._flushes):
            await task.stop()
        await self._leave()
        return left

    def abandon(self) -> None:
        """End at once and write nothing, as a crash would."""
        self._is_stopping = True
        for task in (self._surveys, self._watch, self._flushes):
            task.cancel()
        for loop in self._loops:
            loop.end()
        if self.member is not None:
            self.member = None
            self.journal.attach((), None)

    async def _drain(self, loops: Sequence[SubscriptionLoop[Any]], timeout: float | None) -> int:
        """Begin nothing more of these, and wait at most `timeout` seconds for what runs.

        Returns:
            Deliveries that still run.
        """
        for loop in loops:
            loop.close()
        with time_limit(timeout, self._clock):
            for loop in loops:
                await loop.ended()
        with suppress(JournalError):  # else the next one says so
            await self.journal.commit([])  # when it returns, no commit hands out anything more
        return sum(loop.figures.running for loop in loops)

    @staticmethod
    def _release(loop: SubscriptionLoop[Any]) -> Sequence[Operation]:
        """Cut off what runs; return what lets others have the rest."""
        loop.dead_letter_running()
        operations: Sequence[Operation] = loop.state.release()
        loop.end()
        return operations

    async def _leave(self) -> None:
        operations = [one for loop in self._loops for one in self._release(loop)]
        own = self.member
        if own is None:
            return  # it never joined, or others have ended it: they know what is left
        with suppress(StaleError):  # it was ended by others: they know what is left
            await self.journal.commit(operations, own)
        self.journal.attach((), None)
        for member in await self.journal.members():
            if member.id == own.id:
                await self.journal.end(member)
        self.member = None

    async def _join(self) -> None:
        self._added = []
        await self._open(self._loops)
        self.member = await self.journal.join(
            self._process, self._serves(), every=self.ttl / 4, on_lost=self._on_lost
        )
        self._begin(self.member)
        await self._survey()
        await self.look()

    async def _open(self, loops: Sequence[SubscriptionLoop[Any]]) -> None:
        """Open subscriptions; one that others have with another selection stands by."""
        for loop in list(loops):
            selection = loop.state.selection
            if isinstance(loop, SharedLoop) and loop.state.is_queue:
                continue
            cursors = await self.journal.open(loop.name, selection, self._starts[loop.name])
            loop.is_standby = cursors[0].selection != selection.text

    def _begin(self, member: Member) -> None:
        assert self._runtime is not None  # noqa: S101 (set by `start`)
        participants: list[CommitParticipant] = []
        for loop in self._loops:
            if loop.is_standby:
                continue
            if loop.state.member is None:
                loop.begin(self._runtime, member)
            participants.append(loop.state)
            if isinstance(loop, SharedLoop) and not loop.state.is_queue:
                participants.append(loop.state.feed)
        self.journal.attach(participants, member)

    def _on_lost(self) -> None:
        """Cut off every handler at once, then start anew: others have the work now."""
        if self.member is None:
            return
        self.losses += 1
        self.member = None
        log.warning("member_lost", process=self._process)
        self.journal.attach((), None)
        for loop in self._loops:
            loop.end()
        self._surveys.wake()

    def _failed(self, error: Exception) -> float:
        """Log an error of a background task; return the seconds until it goes on."""
        if isinstance(error, StaleError):
            return SURVEY  # `on_lost` sees to it
        log.warning("membership_failed", error=redact_exception(error))
        return AGAIN

    def _flush_failed(self, error: Exception) -> float:
        self._full = error if isinstance(error, JournalFullError) else None
        for loop in self._loops if not isinstance(error, StaleError) else ():
            if loop.state.is_dirty:
                loop.journal_failed(error)
        return AGAIN

    async def seek(self, name: str, offset: int) -> None:
        """Let a subscription go on behind an offset, in every process.

        Messages that it passes and that hold back others are dropped: neither retried nor parked.
        """
        passed = await self._passed(name, offset)
        await self.journal.commit([*map(Drop, passed), Seek(name, offset)])
        for loop in self._loops:
            if loop.name == name and loop.state.member is not None:
                await loop.check_ownership()
        await self._survey()
        await self.look()

    async def _passed(self, name: str, offset: int) -> list[Pending]:
        """Return rows that hold back others and are passed by a seek forward."""
        cursors = await self.journal.cursors(name)
        if any(cursor.acked > offset for cursor in cursors):
            return []
        passed: list[Pending] = []
        after: Pending | None = None
        while rows := await self.journal.find(name, (State.WAITING, State.PARKED), after=after):
            after = rows[-1]
            passed += [row for row in rows if row.key is not None and row.offset <= offset]
        # The last first: so none of them lets another one go.
        return passed[::-1]

    async def is_done(
        self, loop: SubscriptionLoop[Any], upto: int, *, is_patient: bool = True
    ) -> bool:
        """Tell whether all messages up to an offset are done; if not, wait for a change first.

        Args:
            loop: The subscription.
            upto: The offset.
            is_patient: Whether to wait for the `resume` of one that is paused or blocked, too.

        Raises:
            SettleTimeoutError: It is, and only `resume` would let it go on.
            JournalFullError: The disk is full, so that nothing can be acknowledged.
        """
        self.require_writable()
        version = await self.journal.changed(-1)
        selection, now = loop.state.selection, self._clock.time()
        is_written = await is_done(self.journal, loop.name, selection, upto, now)
        # At most once, what runs here is acknowledged already.
        if is_written and not loop.state.has_in_flight(upto):
            return True
        if not is_patient and is_held_up(loop):
            raise SettleTimeoutError([describe_left(progress_now(loop))], seconds=None)
        loop.flush_when_idle()
        await self.journal.changed(version, SURVEY)
        return False

    def require_writable(self) -> None:
        """Raise if what is done cannot be written, as the disk is full.

        Raises:
            JournalFullError: So it is; it is tried again all the same.
        """
        errors = (self._full, *(loop.full for loop in self._loops))
        full = next((error for error in errors if error is not None), None)
        if full is not None:
            raise JournalFullError(str(full), path=full.path) from full

    # -- other members ---------------------------------------------------------------------------

    async def _survey_often(self) -> float:
        if self.member is None:
            if not self._is_stopping:
                await self._join()
        else:
            await self._survey()
            head = await self.journal.head()
            has_jumped = self._jumps.seconds() > 0
            for loop in self._loops:
                loop.check_stall(head)
                if has_jumped and loop.state.member is not None:
                    loop.look()
                await loop.count_unread()
        return min(self.ttl / 4, SURVEY)

    async def _survey(self) -> None:
        """End members that are gone or silent, then share the partitions."""
        members = await self.journal.members()
        if not await self._is_member(members):
            self._on_lost()
            return
        ended = [member for member in members if await self._ended(member)]
        standby = [loop for loop in self._loops if loop.is_standby]
        if self.member is not None and standby:
            await self._open(standby)
            self._begin(self.member)
            await self.look()
        alive = [member for member in members if member not in ended]
        for loop in self._loops:
            if loop.state.member is None:
                loop.figures.cursors = await self.journal.cursors(loop.name)
                self._note_standby(loop, alive)
                continue
            serving = [member.id for member in alive if loop.name in member.serves]
            await loop.balance(serving)
            if isinstance(loop, PartitionedLoop):
                self._note_standby(loop, alive)
            if ended:
                loop.look()

    async def _is_member(self, members: Sequence[Member]) -> bool:
        """Tell whether others see this member, if it is one; a damaged row is written anew."""
        member = self.member
        if member is None:
            return True
        own = next((one for one in members if one.id == member.id), None)
        if own is not None and (own.process, own.serves) != (member.process, member.serves):
            await self._serve()
        return own is not None

    def _note_standby(self, loop: SubscriptionLoop[Any], members: Sequence[Member]) -> None:
        """Keep and log, once, that other processes have all of a subscription."""
        figures, text = loop.figures, loop.state.selection.text
        if loop.is_standby:
            reason = "processes with another selection of messages serve it"
            others = [one for one in members if one.serves.get(loop.name, text) != text]
        elif isinstance(loop, PartitionedLoop) and not loop.state.owned:
            reason = "other processes own all of it"
            owners = {cursor.owner for cursor in figures.cursors}
            others = [one for one in members if one.id in owners]
        else:
            reason, others = "", []
        was_standby = figures.owner is not None
        figures.owner = _parts(others[0].process)[1] if others else None
        if others and not was_standby:
            log.warning(
                "subscription_standby", subscription=loop.name, owner=figures.owner, reason=reason
            )

    async def _ended(self, member: Member) -> bool:
        """End a member that is gone or was silent for a TTL."""
        if self.member is not None and member.id == self.member.id:
            return False
        now = self._clock.now()
        seen, since = self._seen.get(member.id, (None, now))
        if seen is None or seen.renewals != member.renewals:
            self._seen[member.id] = (member, now)
            since = now
        is_silent = now - since >= self.ttl
        if not is_silent and not is_gone(member.process, self._process):
            return False
        self._seen.pop(member.id, None)
        return await self.journal.end(member)

    # -- news ------------------------------------------------------------------------------------

    async def _watch_others(self) -> float:
        """See what other processes commit; what this one commits is known already."""
        self._version = await self.journal.changed(self._version, others=True)
        await self.look()
        return BUSY

    async def look(self) -> None:
        """Let all subscriptions look for messages and rows that they do not know of."""
        head = await self.journal.head()
        for loop in self._loops:
            if loop.state.member is not None:
                loop.state.head = max(loop.state.head, head)
                loop.look()

    async def _flush(self) -> float:
        if self.member is not None and any(loop.state.is_dirty for loop in self._loops):
            await self.journal.commit([])
        self._full = None
        return FLUSH
