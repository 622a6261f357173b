"""One enqueued command in hand: what the journal is told of it, step by step.

Its row in the schedule is named after the try that is due, `id#n`. Whoever takes it replaces it,
in one commit, by `id#n+1`, due when the lease is over: the try is counted before it begins, only
one of several processes can take it, and if that one dies, the next try falls due by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import anyio

from msgbus.errors import JournalConflictError
from msgbus.journal.operations import (
    AddDeadLetter,
    Append,
    CloseTicket,
    Mark,
    OpenTicket,
    Operation,
    Schedule,
    Unschedule,
)
from msgbus.journal.records import DeadLetter, Record, Scheduled
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.tracebacks import redacted_traceback

if TYPE_CHECKING:
    from msgbus.durability.hub import Durability
    from msgbus.handlers.registration import Registration
    from msgbus.runtime.clock import Clock

COMMANDS: Final = "msgbus.commands"
"""The subscription under which enqueued commands wait, and under which they are dead letters."""


def row_id(message_id: str, attempt: int) -> str:
    """What the row of a command is called when this try is due."""
    return f"{message_id}#{attempt}"


def opening(record: Record, due: float) -> list[Operation]:
    """Everything that enqueues a command, once."""
    message_id = record.message_id
    entry = Scheduled(row_id(message_id, 1), due, record, COMMANDS)
    return [
        Mark(COMMANDS, message_id, once=True),
        Append(record),
        OpenTicket(message_id, record.time),
        Schedule(entry),
    ]


def taking_back(message_id: str, now: float) -> list[Operation]:
    """Everything that takes a command back which nobody has begun."""
    error = "It was taken back before it began."
    return [
        Unschedule(row_id(message_id, 1), required=True),
        CloseTicket(message_id, now, error=error),
    ]


@final
class Claim:
    """The right to handle a command now, as long as it is renewed."""

    def __init__(self, hub: Durability, entry: Scheduled, lease: float) -> None:
        self._hub = hub
        self._clock: Clock = hub.state.clock
        self._lease = lease
        self._guard = anyio.Lock()
        self.entry = entry
        self.scope = anyio.CancelScope()
        """Around the handler."""
        self.until: float | None = None
        """When it ends, seconds since the epoch; `None` before it is taken and when it is over."""
        self.is_lost = False
        """Whether another process has taken it over."""

    @property
    def record(self) -> Record:
        """The command."""
        return self.entry.record

    @property
    def attempt(self) -> int:
        """The number of the try that is claimed."""
        return self.entry.attempt

    @property
    def _held(self) -> str:
        return row_id(self.record.message_id, self.attempt + 1)

    def _next(self, due: float) -> Schedule:
        return Schedule(self.entry._replace(id=self._held, due=due, attempt=self.attempt + 1))

    async def take(self) -> bool:
        """Count this try; false if another process was quicker."""
        until = self._clock.time() + self._lease
        try:
            await self._commit([Unschedule(self.entry.id, required=True), self._next(until)])
        except JournalConflictError:
            return False
        self.until = until
        return True

    def renew_at(self) -> float | None:
        """When it is to be renewed, seconds since the epoch."""
        return None if self.until is None else self.until - self._lease * 2 / 3

    async def renew(self) -> None:
        """Hold it for another while; if another has it, the handler is cut off."""
        async with self._guard:
            if self.until is None:
                return
            until = self._clock.time() + self._lease
            try:
                await self._commit([Unschedule(self._held, required=True), self._next(until)])
            except JournalConflictError:
                self.until = None
                self.is_lost = True
                self.scope.cancel()
                return
            self.until = until

    async def give_back(self) -> None:
        """Let others have it at once; this try does not count."""
        await self._end([Schedule(self.entry._replace(due=self._clock.time()))])

    async def postpone(self, delay: float, *, counts: bool) -> None:
        """Let it be tried again after `delay`."""
        due = self._clock.time() + delay
        await self._end([self._next(due) if counts else Schedule(self.entry._replace(due=due))])

    async def succeed(self, reply: bytes) -> CloseTicket:
        """It is done."""
        closing = CloseTicket(self.record.message_id, self._clock.time(), result=reply)
        if not await self._end([closing]):
            # Whoever has it now will find that there is nothing left to do.
            await self._commit([closing])
        return closing

    async def refuse(self, error: str) -> CloseTicket | None:
        """It will not be done, and that is the answer; `None` if another has it."""
        closing = CloseTicket(self.record.message_id, self._clock.time(), error=error)
        return closing if await self._end([closing]) else None

    async def bury(
        self,
        error: BaseException,
        *,
        attempts: int,
        reason: str,
        handler: Registration | None,
    ) -> CloseTicket | None:
        """It is given up: a dead letter of its handler; `None` if another has it."""
        now = self._clock.time()
        text = redact_exception(error)
        closing = CloseTicket(self.record.message_id, now, error=text)
        letter = DeadLetter(
            COMMANDS,
            self.record,
            attempts,
            text,
            now,
            error_type=type(error).__name__,
            traceback=redacted_traceback(error),
            reason=reason,
            handler="" if handler is None else handler.name,
            target="" if handler is None else handler.target_key,
        )
        name = letter.handler or COMMANDS
        told = self._hub.recorder.burial(self.record, name, attempts, error)
        return closing if await self._end([closing, AddDeadLetter(letter), *told]) else None

    async def drop(self) -> None:
        """It is done already: take it out of the schedule."""
        await self._end([])

    async def _end(self, operations: list[Operation]) -> bool:
        async with self._guard:
            held = self.entry.id if self.until is None else self._held
            try:
                await self._commit([Unschedule(held, required=True), *operations])
            except JournalConflictError:
                self.is_lost = True
            self.until = None
        return not self.is_lost

    async def _commit(self, operations: list[Operation]) -> None:
        await self._hub.publisher.commit(operations, ())
