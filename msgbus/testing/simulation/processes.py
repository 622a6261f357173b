"""Simulated processes on one journal, inside one test; each can crash at any moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Self, cast, final

import anyio

from msgbus.errors import JournalError, StaleError
from msgbus.runtime.event_loop import Runtime, Task, current_runtime

if TYPE_CHECKING:
    from msgbus.journal.operations import Operation
    from msgbus.journal.ports import Claim, CommitParticipant, Journal
    from msgbus.journal.records import Appended, Member
    from msgbus.runtime.clock import Clock


@final
class Process:
    """A simulated process and its view of a journal.

    `process.journal` is a `Journal`. Its members are renewed by the given clock. When the process
    dies, they are renewed no more and nothing more is written. `on_death` ends what else it runs,
    such as subscription engines.

    Args:
        journal: A journal object of its own: `MemoryJournal.beside()`, or another `SqliteJournal`
            on the same file.
        clock: Time.
    """

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._inner = journal
        self._clock = clock
        self._members: dict[int, Member] = {}
        self._renewals: list[Task] = []
        self._runtime: Runtime | None = None
        self.is_dead = False
        self.on_death: list[Callable[[], object]] = []
        self.before_commit: Callable[[Sequence[Operation]], object] = _nothing
        """Called with operations that are about to be written, maybe on a thread of the journal;
        it may call `die`, and on behalf of `commit` raise."""
        self.after_commit: Callable[[Sequence[Operation]], object] = _nothing
        """Called with operations that were written, before the process knows; it may call `die`."""

    @property
    def journal(self) -> Journal:
        """The journal as this process sees it."""
        return cast("Journal", self)

    def freeze(self) -> None:
        """Stop renewing members, so that others take over; everything else continues."""
        for task in self._renewals:
            task.cancel()
        self._renewals.clear()

    def die(self) -> None:
        """End as by `kill -9`; from any thread."""
        self.is_dead = True
        if self._runtime is None or self._runtime.is_running_here():
            self._end()
        else:
            self._runtime.call_soon(self._end)

    def _end(self) -> None:
        self.freeze()
        self._inner.attach((), None)
        for end in self.on_death:
            end()

    def replace(self, name: str, method: Callable[..., object]) -> None:
        """Replace a method of the journal in this process, for instance to fail."""
        self.__dict__[name] = method

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._while_alive(found) if iscoroutinefunction(found) else found

    def _while_alive(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Make a method never return once the process is dead."""

        async def call(*args: Any, **options: Any) -> Any:
            await self._if_alive()
            try:
                return await method(*args, **options)
            finally:
                await self._if_alive()

        return call

    async def _if_alive(self) -> None:
        if self.is_dead:
            await anyio.sleep_forever()

    async def commit(
        self, operations: Sequence[Operation], member: Member | None = None
    ) -> list[Appended]:
        """Commit, unless the process dies before or after it."""
        self.before_commit(operations)
        written: list[Appended] = await self._while_alive(self._inner.commit)(operations, member)
        self.after_commit(operations)
        await self._if_alive()
        return written

    def attach(self, participants: Sequence[CommitParticipant], member: Member | None) -> None:
        """Let these ride in every commit of this process."""
        self._runtime = current_runtime(self._runtime)
        if not self.is_dead:
            self._inner.attach([_Watched(self, one) for one in participants], member)

    async def join(
        self,
        process: str,
        serves: Mapping[str, str],
        *,
        every: float | None = None,
        on_lost: Callable[[], object] | None = None,
    ) -> Member:
        """Become a member, renewed by the clock of this process."""
        await self._if_alive()
        self._runtime = current_runtime(self._runtime)
        member = await self._inner.join(process, serves, on_lost=on_lost)
        self._members[member.id] = member
        if every is not None and not self.is_dead:
            renewing = self._runtime.spawn(self._renew, member.id, every, name="msgbus renewals")
            self._renewals.append(renewing)
        return member

    async def renew(self, member: Member) -> Member:
        """Renew a member, and keep what it serves now."""
        self._members[member.id] = member
        renewed: Member = await self._while_alive(self._inner.renew)(member)
        return renewed

    async def _renew(self, member: int, every: float) -> None:
        while True:
            await self._clock.sleep(every)
            try:
                await self._inner.renew(self._members[member])
            except StaleError:
                return  # the journal has called `on_lost`
            except JournalError:
                continue  # it may be in time with the next one

    async def close(self) -> None:
        """Close the journal object."""
        self.freeze()
        await self._inner.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


@final
class _Watched:
    """A participant of a process that may die around its commits."""

    def __init__(self, process: Process, inner: CommitParticipant) -> None:
        self._process = process
        self._inner = inner
        self._given: Sequence[Operation] = ()

    def operations(self, appended: Sequence[Claim], before: int) -> Sequence[Operation]:
        self._given = ()
        if not self._process.is_dead:
            given = self._inner.operations(appended, before)
            if given:
                self._process.before_commit(given)
            if not self._process.is_dead:
                self._given = given
        return self._given

    def committed(self, kept: bool) -> Callable[[], object] | None:
        if kept and self._given:
            self._process.after_commit(self._given)
        return None if self._process.is_dead else self._inner.committed(kept)


def _nothing(_: Sequence[Operation]) -> None:
    pass
