"""`Membership`: this process among the others that work on one journal."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from msgbus._next.journal.errors import StaleError
from msgbus._next.journal.operations import Operation, Seek
from msgbus._next.journal.ports import Claim, CommitParticipant, Journal
from msgbus._next.journal.records import Member
from msgbus._next.subscriptions.gate import Gate
from msgbus._next.subscriptions.loop import PartitionedLoop, SharedLoop, SubscriptionLoop
from msgbus.errors import JournalError
from msgbus.journal.watch import BUSY
from msgbus.runtime.event_loop import Runtime, Task, current_runtime
from msgbus.runtime.timeouts import time_limit
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
class _OwnCommits:
    """Counts the commits of this process, in which its subscriptions took part."""

    def __init__(self) -> None:
        self.count = 0

    def operations(self, appended: Sequence[Claim], before: int) -> Sequence[Operation]:
        del appended, before
        return ()

    def committed(self, kept: bool) -> None:
        self.count += kept


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
        self.gate = Gate(clock)
        self.member: Member | None = None
        self.losses = 0
        """Times that others have ended this member."""
        self._clock = clock
        self._process = process or this_process()
        self._loops: list[SubscriptionLoop[Any]] = []
        self._starts: dict[str, int] = {}
        self._seen: dict[int, tuple[Member, float]] = {}
        self._own = _OwnCommits()
        self._tasks: list[Task] = []
        self._runtime: Runtime | None = None
        self._is_flushing = False
        self._is_stopping = False

    def add(self, loop: SubscriptionLoop[Any], start: int = 0) -> None:
        """Add a subscription; a new one begins behind the offset `start`."""
        self._loops.append(loop)
        self._starts[loop.name] = start
        loop.flush = self.flush_soon

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the journal and begin to deliver."""
        self._runtime = current_runtime(self._runtime)
        await self._join()
        for work in (self._survey_often, self._watch, self._flush_often):
            self._tasks.append(self._runtime.spawn(work, name=f"msgbus {work.__name__}"))

    async def stop(self, timeout: float | None = None) -> int:
        """Hand out nothing more, wait for what is in flight, and leave.

        Returns:
            Deliveries that were still in flight after `timeout`; others repeat them.
        """
        self._is_stopping = True
        for loop in self._loops:
            loop.state.is_draining = True
        version = -1
        with time_limit(timeout, self._clock):
            while self._in_flight():
                await self._commit()
                version = await self.journal.changed(version, SURVEY)
        left = self._in_flight()
        for task in self._tasks:
            task.cancel()
        for loop in self._loops:
            loop.end()
        await self._leave()
        return left

    def abandon(self) -> None:
        """End at once and write nothing, as a crash would."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        for loop in self._loops:
            loop.end()

    def _in_flight(self) -> int:
        return sum(len(loop.state.in_flight) for loop in self._loops)

    async def _leave(self) -> None:
        await self._commit()
        self.journal.attach((), None)
        for member in await self.journal.members():
            if self.member is not None and member.id == self.member.id:
                await self.journal.end(member)
        self.member = None

    async def _commit(self) -> None:
        with suppress(StaleError):  # `on_lost` sees to it
            await self.journal.commit([], self.member)

    async def _join(self) -> None:
        serves = {loop.name: loop.state.selection.text for loop in self._loops}
        await self._open()
        self.member = await self.journal.join(
            self._process, serves, every=self.ttl / 4, on_lost=self._on_lost
        )
        self._begin(self.member)
        await self._survey()
        await self.look()

    async def _open(self) -> None:
        """Open the subscriptions; one that others have with another selection stands by."""
        for loop in self._loops:
            selection = loop.state.selection
            if isinstance(loop, SharedLoop) and loop.state.is_queue:
                continue
            cursors = await self.journal.open(loop.name, selection, self._starts[loop.name])
            is_standby = cursors[0].selection != selection.text
            if is_standby and not loop.is_standby:
                log.warning(
                    "subscription_standby",
                    subscription=loop.name,
                    reason="processes with another selection of messages serve it",
                )
            loop.is_standby = is_standby

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
        self.journal.attach([*participants, self._own], member)

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
        if self._runtime is not None and not self._is_stopping:
            self._tasks.append(self._runtime.spawn(self._rejoin, name="msgbus rejoin"))

    async def _rejoin(self) -> None:
        while self.member is None:
            await self._attempt(self._join)
            if self.member is None:
                await self._clock.sleep(SURVEY)

    async def _attempt(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except StaleError:
            pass  # `on_lost` sees to it
        except JournalError as error:
            log.warning("membership_failed", error=redact_exception(error))

    async def seek(self, name: str, offset: int) -> None:
        """Let a subscription go on behind an offset, in every process."""
        await self.journal.commit([Seek(name, offset)])
        for loop in self._loops:
            if loop.name == name and loop.state.member is not None:
                await loop.check_ownership()
        await self._survey()
        await self.look()

    # -- other members ---------------------------------------------------------------------------

    async def _survey_often(self) -> None:
        while True:
            await self._clock.sleep(min(self.ttl / 4, SURVEY))
            if self.member is not None:
                await self._attempt(self._survey)

    async def _survey(self) -> None:
        """End members that are gone or silent, then share the partitions."""
        members = await self.journal.members()
        if self.member is not None and self.member.id not in {one.id for one in members}:
            self._on_lost()
            return
        ended = [member for member in members if await self._ended(member)]
        if self.member is not None and any(loop.is_standby for loop in self._loops):
            await self._open()
            self._begin(self.member)
            await self.look()
        alive = [member for member in members if member not in ended]
        for loop in self._loops:
            if loop.state.member is None:
                continue
            serving = [member.id for member in alive if loop.name in member.serves]
            if isinstance(loop, PartitionedLoop):
                await loop.balance(serving)
            elif isinstance(loop, SharedLoop):
                loop.state.set_others(len(serving) - 1)
            if ended:
                loop.look()

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

    async def _watch(self) -> None:
        """See what other processes commit; what this one commits is known already."""
        version, foreign = -1, -1
        while True:
            version = await self.journal.changed(version)
            if version - self._own.count != foreign:
                foreign = version - self._own.count
                await self._attempt(self.look)
                # A file does not tell whose commits it has seen, so this may have been our own.
                await self._clock.sleep(BUSY)

    async def look(self) -> None:
        """Let all subscriptions look for messages and rows that they do not know of."""
        head = await self.journal.head()
        for loop in self._loops:
            if loop.state.member is not None:
                loop.state.head = max(loop.state.head, head)
                loop.look()

    async def _flush_often(self) -> None:
        while True:
            await self._clock.sleep(FLUSH)
            if any(loop.state.is_dirty for loop in self._loops):
                await self._attempt(self._flush)

    def flush_soon(self) -> None:
        """Have a commit now, unless one is on its way."""
        if not self._is_flushing and self._runtime is not None and self.member is not None:
            self._is_flushing = True
            self._runtime.spawn(self._flush, name="msgbus flush")

    async def _flush(self) -> None:
        self._is_flushing = False
        await self._attempt(self._commit)
