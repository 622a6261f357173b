"""Records of executed commands and of deliveries, written in the background.

Commands and deliveries are kept in a bounded buffer and written in groups; a full buffer lets
handlers wait. What is still in it is lost in a crash: nobody was told that it is durable.
Durable handlers do not need it: their deliveries are recorded with their acknowledgements.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, final

import anyio
from typing_extensions import override

from msgbus.errors import JournalError, JournalFullError, StoredMessageError
from msgbus.handlers.observers import BusObserver, CallBegan, CallEnded
from msgbus.journal.operations import Append, Note, Operation
from msgbus.journal.records import DeliveryRecord, Outcome
from msgbus.messages.frame import current_frame
from msgbus.messages.message import Message, Query, SystemEvent, metadata_of
from msgbus.subscriptions.failures import outcome_of
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.handlers.registration import Registration
    from msgbus.runtime.event_loop import Runtime, Task, Waker

GROUP = 1000
"""Operations that are written at a time."""

PAUSE = 0.5
"""Seconds before a journal that failed is tried again."""


_NOT_RECORDED: Final = (Query, SystemEvent)


@final
class JournalRecorder(BusObserver):
    """A buffer in front of the journal, and the task that empties it."""

    only_watches = True

    def __init__(self, hub: DurableBus) -> None:
        self._hub = hub
        self._clock = hub.state.clock
        self._limit = hub.state.config.record_buffer
        self._what = hub.state.config.record
        self._operations: list[Operation] = []
        self.has_commands = False
        """Whether commands are among them, to be written before what they caused."""
        self._writing = 0
        self._task: Task | None = None
        self._waker: Waker | None = None
        self._news: list[anyio.Event] = []
        self.failures = 0
        """Times that the journal could not be written; tried again each time."""
        self._error: JournalError | None = None
        """Why the last group was not written."""

    @property
    def backlog(self) -> int:
        """Number of operations that wait to be written, or are being written."""
        return len(self._operations) + self._writing

    # -- what is recorded ------------------------------------------------------------------------

    @override
    def watch(
        self, registration: Registration, scope: str | None, per: Literal["attempt", "message"]
    ) -> CallBegan | None:
        kind = registration.message_type
        if issubclass(kind, _NOT_RECORDED):
            return None
        if per == "message":
            return self._command_began if registration.is_command else None
        if self._what == "messages" or self._hub.is_durable(registration):
            return None
        return self._watch_attempts(registration.name)

    def _command_began(self, command: Any) -> CallEnded | None:
        """Record a command before it is handled; queries are not."""
        if isinstance(command, Query):
            return None
        self._record(command)
        return None if len(self._operations) < self._limit else self._room_if_full

    def _watch_attempts(self, handler: str) -> CallBegan:
        """Record the end of each attempt, as far as is wanted."""
        now = self._clock.now
        ended = self._failed if self._what == "failures" else self._delivered
        return lambda message: partial(ended, handler, message, now())

    def _room_if_full(self, error: BaseException | None) -> Awaitable[None] | None:
        may_wait = error is None or isinstance(error, Exception)
        return self.room() if may_wait and len(self._operations) >= self._limit else None

    def _failed(
        self, handler: str, message: Any, began: float, error: BaseException | None
    ) -> None:
        if error is not None:
            self._delivered(handler, message, began, error)

    def _record(self, message: Message) -> None:
        meta = metadata_of(message)
        if meta.recorded is not None:
            return  # it came out of the journal
        now = self._clock.time()
        try:
            record = self._hub.codec.encode(message, time=now)
            # What no journal can hold would fail whatever is written with it.
            f"{record.topic} {record.key} {record.session_id}".encode()
            f"{record.correlation_id} {record.causation_id} {record.root_id}".encode()
        except (StoredMessageError, UnicodeEncodeError) as error:
            log.error(
                "command_not_recorded",
                bus=self._hub.state.config.name,
                message_type=type(message).__name__,
                message_id=meta.message_id,
                error=redact_exception(error),
            )
            return
        meta.recorded = (0, now)
        self.has_commands = True
        self.add(Append(record))

    def _delivered(
        self, handler: str, message: Any, began: float, error: BaseException | None
    ) -> Awaitable[None] | None:
        """Record the end of an attempt; what to wait for, if the buffer is full after a success."""
        frame = current_frame.get()
        if frame is not None and frame.is_replay:
            return None  # history is looked at, not made
        clock = self._clock
        ended = clock.time()
        run = clock.now() - began
        attempt = 1 if frame is None else frame.attempt
        outcome, text = Outcome.OK, None
        if error is not None:
            outcome, text = outcome_of(error), redact_exception(error)
        # A copy was handed to a batch handler that may have emptied it: the frame has them all.
        messages = [message] if frame is None or frame.events is None else frame.events
        for one in messages:
            meta = metadata_of(one)
            if isinstance(one, _NOT_RECORDED) or meta.from_system:
                continue
            offset, time = meta.recorded or (0, ended - run)
            wait = ended - run - time
            wait = wait if wait > 0 else 0.0  # cheaper than `max`
            delivery = DeliveryRecord(
                meta.message_id, handler, attempt, outcome, wait, run, ended, text, offset or None
            )
            self.add(Note(delivery))
        is_full = error is None and len(self._operations) >= self._limit
        return self.room() if is_full else None

    def dead_lettered(
        self, message: Message, handler: str, attempt: int, error: BaseException
    ) -> None:
        """Record that a message became a dead letter, which is stored elsewhere."""
        if self._what == "messages":
            return
        meta = metadata_of(message)
        now = self._clock.time()
        offset, time = meta.recorded or (0, now)
        text, wait = redact_exception(error), max(now - time, 0.0)
        delivery = DeliveryRecord(
            meta.message_id,
            handler,
            attempt,
            Outcome.DEAD_LETTERED,
            wait,
            0.0,
            now,
            text,
            offset or None,
        )
        self.add(Note(delivery))

    # -- the buffer ------------------------------------------------------------------------------

    def add(self, operation: Operation) -> None:
        """Have something written soon."""
        self._operations.append(operation)
        if self._waker is not None and len(self._operations) == 1:
            self._waker.wake()

    def take(self) -> list[Operation]:
        """Take what waits, at most one group."""
        taken = self._operations[:GROUP]
        del self._operations[:GROUP]
        self.has_commands = self.has_commands and _has_commands(self._operations)
        # Like with like: a journal writes a run of the same kind in one go.
        taken.sort(key=_is_delivery)
        return taken

    def give_back(self, operations: list[Operation]) -> None:
        """Take back what could not be written."""
        self._operations[:0] = operations
        self.has_commands = self.has_commands or _has_commands(operations)

    async def room(self) -> None:
        """Wait until the buffer is below its limit, unless the journal cannot be written."""
        while len(self._operations) >= self._limit and self._task is not None:
            if self._error is not None:
                return  # nobody waits for a disk that is full: what is too much is dropped
            await self._next_write()

    async def flush(self) -> None:
        """Return when everything that was added so far is in the journal.

        Raises:
            JournalFullError: The disk is full; it is tried again all the same.
        """
        if self._task is None:
            await self._write_all()
        while self._operations or self._writing:
            await self._next_write()
            if isinstance(self._error, JournalFullError):
                raise JournalFullError(str(self._error), path=self._error.path) from self._error

    async def _next_write(self) -> None:
        event = anyio.Event()
        self._news.append(event)
        await event.wait()

    # -- the writer ------------------------------------------------------------------------------

    def open(self, runtime: Runtime) -> None:
        """Begin to write."""
        self._waker = runtime.waker()
        self._task = runtime.spawn(self._work, name="msgbus recorder")

    async def close(self) -> None:
        """Write what is left, and end."""
        task, self._task = self._task, None
        self._waker = None
        if task is not None:
            task.cancel()
        await self._write_all()
        self._notify()

    async def _work(self) -> None:
        while self._waker is not None:
            if not self._operations:
                await self._waker.wait()
                continue
            await self._write_group()

    async def _write_all(self) -> None:
        while self._operations:
            operations = self.take()
            try:
                await self._hub.journal.commit(operations)
            except JournalError as error:
                self._report_lost(len(operations) + len(self._operations), error)
                self._operations.clear()
                self.has_commands = False

    async def _write_group(self) -> None:
        operations = self.take()
        self._writing = len(operations)
        try:
            # Once it has begun it is finished: a group that is cut off would be written twice.
            with anyio.CancelScope(shield=True):
                await self._hub.journal.commit(operations)
        except JournalError as error:
            self._error = error
            self.give_back(operations)
            self._writing = 0
            self.failures += 1
            self._drop_excess(error)
            log.error(
                "journal_not_written",
                bus=self._hub.state.config.name,
                waiting=len(self._operations),
                error=redact_exception(error),
            )
            self._notify()
            await self._clock.sleep(PAUSE)
        except Exception as error:  # nothing may end this task: others wait for it
            self._report_lost(len(operations), error)
        else:
            self._error = None
        finally:
            self._writing = 0
            self._notify()

    def _drop_excess(self, error: JournalError) -> None:
        """Drop the newest beyond the limit, as nothing can be written."""
        lost = len(self._operations) - self._limit
        if lost > 0:
            del self._operations[self._limit :]
            self.has_commands = _has_commands(self._operations)
            self._report_lost(lost, error)

    def _report_lost(self, lost: int, error: Exception) -> None:
        log.error(
            "deliveries_not_recorded",
            bus=self._hub.state.config.name,
            lost=lost,
            error=redact_exception(error),
        )

    def _notify(self) -> None:
        news, self._news = self._news, []
        for event in news:
            event.set()


def _is_delivery(operation: Operation) -> bool:
    return type(operation) is Note


def _has_commands(operations: list[Operation]) -> bool:
    return any(type(one) is Append for one in operations)
