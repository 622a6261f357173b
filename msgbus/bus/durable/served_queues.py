"""`ServedQueues`: the queues of enqueued commands that a bus has handlers for.

The commands of one wire name are a queue. Its loop claims them, and runs them as `bus.execute`
would, but with the retries of the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

import anyio

from msgbus.bus.durable.handlers import letter_of
from msgbus.bus.durable.tickets import queue_of
from msgbus.errors import ConfigurationError, StoredMessageError, Unhandleable
from msgbus.journal.codec import RawMessage, WireNames
from msgbus.journal.operations import Reply
from msgbus.journal.records import (
    DeliveryRecord,
    Kind,
    Letter,
    Order,
    Outcome,
    Selection,
    State,
)
from msgbus.messages.message import Command, Query, classes_defined
from msgbus.messages.results import FailedResult
from msgbus.resilience.config import require_storable
from msgbus.subscriptions.failures import error_text
from msgbus.subscriptions.loops import SharedLoop
from msgbus.subscriptions.members import SURVEY
from msgbus.subscriptions.rules import DeliveryRules, NotAttemptedError
from msgbus.subscriptions.shared import SharedState
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.handlers.registration import Registration
    from msgbus.journal.records import Member, Pending
    from msgbus.runtime.event_loop import Runtime, Task
    from msgbus.subscriptions.in_flight import InFlight


@final
class ServedQueues:
    """The queues that a bus serves: one for each wire name that it has a handler for.

    At most `BusConfig.command_workers` commands run at the same time, over all queues, or have
    ended and their results are not written. No more are claimed, so that other processes get a
    fair share, and no more are repeated after a crash.
    """

    def __init__(self, hub: DurableBus) -> None:
        self._hub = hub
        self._limit = hub.state.config.command_workers
        self._loops: dict[str, SharedLoop] = {}
        """By wire name."""
        self._leaving: list[SharedLoop] = []
        """Those whose handler is gone, until their last command has ended."""
        self._hungry: set[str] = set()
        """Wire names of those that had no room for all that is due."""
        self._seen = (-1, -1)
        """Versions of the handlers and of the classes at the last update."""
        self._runtime: Runtime | None = None
        self._slots = anyio.Semaphore(self._limit)
        self._updating = anyio.Lock()
        self._tasks: set[Task] = set()

    def names(self) -> set[str]:
        """Return the wire names of the commands that this bus handles."""
        state = self._hub.state
        return {
            name
            for session_id, registration in state.registry.registrations()
            if session_id is None
            and registration.is_command
            and not issubclass(registration.message_type, Query)
            for name in WireNames(registration.message_type, self._hub.codec)
        }

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to handle commands."""
        self._runtime = self._hub.state.require_runtime()
        self._slots = anyio.Semaphore(self._limit)
        self._updating = anyio.Lock()
        self._seen = (-1, -1)
        await self.update()

    def ended(self) -> None:
        """Take note that the membership has ended."""
        self._runtime = None
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._loops.clear()
        self._leaving.clear()

    def look(self) -> None:
        """Look for new classes, and for work that had to wait; called on the event loop."""
        self.update_soon()
        if self._hungry and self._room() > 0:
            hungry, self._hungry = self._hungry, set()
            for name in hungry & self._loops.keys():
                self._loops[name].look()

    def _looked(self) -> None:
        self._hub.tickets.look()
        self.look()

    def update_soon(self) -> None:
        """Serve the queues of new handlers, and leave those whose handler is gone."""
        if self._runtime is not None and self._seen != self._versions():
            self._spawn(self.update)

    def _versions(self) -> tuple[int, int]:
        return self._hub.state.version, classes_defined()

    async def update(self) -> None:
        """Serve the queues of all handlers that there are now, and no others."""
        async with self._updating:
            if self._runtime is None or self._seen == self._versions():
                return
            names = self.names()
            self._seen = self._versions()  # after that, as it makes classes known
            for name in self._loops.keys() - names:
                loop = self._loops.pop(name)
                loop.state.is_draining = True
                self._leaving.append(loop)
                self._spawn(self._leave, loop)
            unserved = sorted(names - self._loops.keys())
            new = {name: self._loop(name) for name in unserved if self._can_retry(name)}
            self._loops |= new
            for loop in new.values():
                self._hub.membership.add(loop)
            if new:
                await self._hub.membership.start()

    def _can_retry(self, name: str) -> bool:
        """Tell whether the retries of a command can be stored; if not, its queue is left alone."""
        handler = self.handler_of(name)
        try:
            if handler is not None:
                self.require_storable_retry(handler)
        except ConfigurationError as error:
            log.error(
                "command_queue_not_served",
                bus=self._hub.state.config.name,
                message_type=name,
                error=str(error),
            )
            return False
        return True

    def require_storable_retry(self, handler: Registration) -> None:
        """Raise if the retries of a command's handler cannot be kept in the journal.

        Raises:
            ConfigurationError: They are functions.
        """
        retry = self._hub.state.assembly.durable_retry(handler)
        require_storable(retry, f"Command handler {handler.name!r}, for enqueued commands,")

    async def _leave(self, loop: SharedLoop) -> None:
        await self._hub.membership.exclude(loop)
        self._leaving.remove(loop)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        assert self._runtime is not None  # noqa: S101 (checked by the callers)
        own: list[Task] = []

        async def run() -> None:
            try:
                await work(*args)
            except Exception as error:
                log.error(
                    "journal_task_failed",
                    bus=self._hub.state.config.name,
                    task="enqueued commands",
                    error=redact_exception(error),
                )
            finally:
                self._tasks.difference_update(own)

        own.append(self._runtime.spawn(run, name="msgbus command queues"))
        self._tasks.update(own)

    # -- waiting ---------------------------------------------------------------------------------

    def in_flight(self) -> Iterator[InFlight]:
        """Iterate over the commands that this process has claimed."""
        for loop in (*self._loops.values(), *self._leaving):
            yield from list(loop.state.in_flight)

    def drain(self) -> None:
        """Begin nothing more."""
        for loop in self._loops.values():
            loop.state.is_draining = True

    async def caught_up(self) -> None:
        """Wait until all that is due now is done or waits for a retry."""
        if self._hub.state.accepting:
            await self.update()
        else:
            self.drain()
        version = -1
        while await self.is_busy():
            self._hub.membership.require_writable()
            version = await self._hub.journal.changed(version, SURVEY)

    async def is_busy(self) -> bool:
        """Tell whether something is in flight or due, or has ended and is not written."""
        return any([await self._is_busy(loop) for loop in (*self._loops.values(), *self._leaving)])

    async def _is_busy(self, loop: SharedLoop) -> bool:
        state, member = loop.state, loop.state.member
        if member is None:  # lost, until it has joined again
            return self._hub.state.accepting
        if state.in_flight or state.has_unwritten:
            loop.flush()
            return True
        if state.is_draining:
            return False
        due = (await self._hub.journal.next_due(loop.name)).time
        if due is not None and due <= self._hub.state.clock.time():
            return True
        return await self._has_claims(loop.name, member)

    async def _has_claims(self, name: str, member: Member) -> bool:
        """Tell whether a member has claimed rows: they are handed out a moment after that."""
        after: Pending | None = None
        while rows := await self._hub.journal.find(name, (State.CLAIMED,), after=after):
            if any(row.owner == member.id for row in rows):
                return True
            after = rows[-1]
        return False

    # -- one queue -------------------------------------------------------------------------------

    def _room(self, name: str | None = None) -> int:
        """Return how many more commands may be claimed over all queues; called on any thread."""
        left = self._limit - sum(len(loop.state.in_flight) for loop in [*self._loops.values()])
        if left <= 0 and name is not None:
            self._hungry.add(name)
        return left

    def _loop(self, name: str) -> SharedLoop:
        hub = self._hub
        state = SharedState(
            queue_of(name),
            Selection(kind=Kind.COMMAND, names=(name,), order=Order.NONE),
            hub.state.clock,
            is_queue=True,
            max_in_flight=self._limit,
            least=self._limit,
            quota=partial(self._room, name),
        )
        retry = _StoredRetries(hub, partial(self.handler_of, name))
        rules = DeliveryRules(retry=retry, record="none")
        loop = SharedLoop(
            hub.journal,
            state,
            self._deliver,
            rules,
            hub.membership.gate,
            partial(self._letter, state),
        )
        loop.on_final_failure = self._failed_finally
        loop.on_look = self._looked
        return loop

    def handler_of(self, name: str) -> Registration | None:
        """Return the handler of the commands of a wire name."""
        message_type = self._hub.codec.type_of(name)
        if message_type is None:
            return None
        return self._hub.state.registry.command_handler(message_type, None)

    # -- one command -----------------------------------------------------------------------------

    async def _deliver(self, one: InFlight) -> Reply:
        async with self._slots:
            return await self._handle(one)

    async def _handle(self, one: InFlight) -> Reply:
        state, replies = self._hub.state, self._hub.tickets.replies
        if not state.accepting:
            self.drain()
            raise NotAttemptedError
        command = self._decode(one)
        registration = state.registry.command_handler(type(command), None)
        if registration is None:
            self.update_soon()
            raise NotAttemptedError
        replies.writer(type(command))
        value = await self._perform(command, one, registration)
        try:
            body = replies.dump(type(command), value)
        except StoredMessageError as error:
            raise Unhandleable(str(error)) from error  # another attempt would do it again
        return Reply(one.record.message_id, state.clock.time(), body)

    def _decode(self, one: InFlight) -> Command[Any]:
        command = self._hub.codec.decode(one.record)
        if isinstance(command, RawMessage):
            raise NotAttemptedError
        return cast("Command[Any]", command)

    async def _perform(
        self, command: Command[Any], one: InFlight, registration: Registration
    ) -> Any:
        state = self._hub.state
        try:
            result = await state.command_runner.perform(
                command,
                attempt=one.attempt,
                retried=state.assembly.durable_retry(registration).max_retries > 0,
                delivery=one,
            )
        except Exception:
            raise
        except BaseException as error:
            if state.require_runtime().is_ending(error):
                raise
            message = f"{registration.name} was cancelled by what it called, not by the bus."
            raise RuntimeError(message) from error
        if isinstance(result, FailedResult):
            raise result.peek_exception()
        return result.value

    def _failed_finally(self, one: InFlight, error: Exception | None) -> None:
        handler = self.handler_of(one.record.name)
        if handler is not None:
            error = error or RuntimeError("Its process ended in every attempt.")
            self._hub.tell_failed(one.record, handler, error)

    def _letter(
        self, state: SharedState, one: InFlight, error: Exception | None, now: float
    ) -> Letter:
        """Describe a dead letter, and record that it became one: attempts are recorded already."""
        self._hub.dead_lettered()
        handler, record = self.handler_of(one.record.name), one.record
        if self._hub.recorded_attempts != "none":
            delivery = DeliveryRecord(
                record.message_id,
                one.subscription if handler is None else handler.name,
                one.attempt,
                Outcome.DEAD_LETTERED,
                max(now - record.time, 0.0),
                0.0,
                now,
                error_text(error),
                record.offset,
            )
            state.note(delivery)
        return letter_of(handler, one, error, now)


@final
class _StoredRetries:
    """The retries of a command: every pause is kept in the journal, for whichever process."""

    in_process = 0.0

    def __init__(self, hub: DurableBus, handler: Callable[[], Registration | None]) -> None:
        self._hub = hub
        self._handler = handler

    def pause(self, attempt: int, error: BaseException | None) -> float | None:
        """Return the seconds until the next attempt; see `RetryRule`."""
        handler = self._handler()
        if handler is None:
            return 0.0  # gone: another process has one
        return self._hub.state.assembly.durable_retry(handler).pause(attempt, error)
