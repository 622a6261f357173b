"""MessageBus: the public face, and the two hot paths. Everything else lives elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import CoroutineType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import anyio.lowlevel

from msgbus.admission import admit_event
from msgbus.clock import Clock, SystemClock
from msgbus.config import BusConfig
from msgbus.context import Frame, current_frame, fix_in_frame
from msgbus.core import BusCore, Phase
from msgbus.errors import (
    BusClosedError,
    BusStateError,
    ConfigurationError,
    Fault,
    QueueFullError,
    WrongMessageTypeError,
)
from msgbus.filters import FilterLike, filter_name, passes
from msgbus.injection import Call, Providers, Resolver
from msgbus.keeper import Keeper
from msgbus.lifecycle import CommandResultEvent, CommandStartedEvent, EventRefusedEvent
from msgbus.messages import Command, Event, Message, R, metadata_of, set_meta
from msgbus.metadata import ROOT
from msgbus.middleware.chain import Middleware, Per, make_entry, not_awaited
from msgbus.plans import CommandPlan, EventPlan
from msgbus.portal import BusPortal
from msgbus.receipts import DrainReport, PublishReceipt, PublishStatus, PublishSummary
from msgbus.registrar import Registrar
from msgbus.registrations import Registration
from msgbus.registry import HandlerRegistry, IRegistry
from msgbus.results import CommandResult, FailedResult, NestedResult
from msgbus.runtime import current_runtime
from msgbus.schedule import Schedule
from msgbus.session import BusSession
from msgbus.shutdown import drain
from msgbus.snapshot import snapshot
from msgbus.streams import EventStream
from msgbus.subscription import Subscription
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import BusStats, Durations
from msgbus.timeouts import within

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

E = TypeVar("E", bound=Event)

new = object.__new__
FOLD_AT = Durations.FOLD_AT


class MessageBus(Registrar[Subscription]):
    """Commands to their one handler, events to all of theirs.

    ```python
    bus = MessageBus()

    @bus.handles(PlaceOrder)
    async def place_order(command: PlaceOrder, context: Context) -> UUID: ...

    async with bus:
        result = await bus.execute(PlaceOrder(sku="tea"))
    ```

    Args:
        config: Sizes and times.
        registry: Where to keep handlers; a `HandlerRegistry` unless given.
        registries: Registries to include from the start.
        middleware: Callables `(message, call_next)`, outermost first.
        filters: Every event must pass all of them to be published.
        provide: What handlers may ask for by annotation.
        resolver: A dependency-injection container behind the `Resolver` port.
        journal: Not available in this version.
        clock: Where time comes from; a `VirtualClock` in tests.
    """

    def __init__(
        self,
        config: BusConfig | None = None,
        *,
        registry: IRegistry | None = None,
        registries: Sequence[HandlerRegistry] = (),
        middleware: Sequence[Middleware] = (),
        filters: Sequence[FilterLike] = (),
        provide: Mapping[Any, object] | None = None,
        resolver: Resolver | None = None,
        journal: str | object | None = None,
        clock: Clock | None = None,
    ) -> None:
        if journal is not None:
            message = "journal=: this version of msgbus has no journal yet; leave it out."
            raise ConfigurationError(message)
        time: Clock = SystemClock() if clock is None else clock
        self._core = BusCore(
            self,
            config or BusConfig(),
            HandlerRegistry() if registry is None else registry,
            Providers(provide, resolver=resolver),
            time,
        )
        # Shortcuts for the hot paths.
        self._now = time.now
        self._commands = self._core.commands
        self._events = self._core.events
        self._filters: list[FilterLike] = []
        self._keeper = Keeper(f"bus {self._core.config.name}")
        self._schedule = Schedule(time, self._publish_due)
        self._report: DrainReport | None = None
        self._stopped = anyio.Event()
        for one in middleware:
            self.add_middleware(one)
        for predicate in filters:
            self.add_filter(predicate)
        for each in registries:
            self.include(each)

    # -- what it is ------------------------------------------------------------------------

    @property
    def config(self) -> BusConfig:
        """Sizes and times."""
        return self._core.config

    @property
    def clock(self) -> Clock:
        """Where time comes from."""
        return self._core.clock

    @property
    def sessions(self) -> Mapping[str, BusSession]:
        """The live sessions, by id."""
        return MappingProxyType(self._core.sessions)

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._core.phase is Phase.RUNNING

    def stats(self) -> BusStats:
        """All counters at this moment."""
        return snapshot(self._core, scheduled=len(self._schedule))

    def check(self) -> list[Fault]:
        """Everything that is wrong with the set-up, without starting. Empty is good."""
        return self._core.faults()

    # -- setting it up ---------------------------------------------------------------------

    def _register(self, registration: Registration, *, replace: bool = False) -> Subscription:
        self._core.registry.add(registration, replace=replace)
        return Subscription(self._core, registration, None)

    def include(self, registry: HandlerRegistry) -> None:
        """Register everything in `registry`, now and whatever it gets later."""
        for _, registration in registry.registrations():
            self._register(registration)
        registry.follow(self._register)

    def unregister_command_handler(self, command_type: type[Command[Any]]) -> bool:
        """Take the bus-level handler of a command away; false if there was none."""
        found = self._core.registry.command_handler(command_type, None)
        return found is not None and self._core.registry.remove(found)

    def add_middleware(
        self,
        middleware: Middleware,
        *,
        types: type[Message] | Sequence[type[Message]] | None = None,
        per: Per = "attempt",
    ) -> None:
        """Put `middleware` around every handler, inside of those added before.

        Args:
            middleware: Any callable `(message, call_next)`.
            types: Only for these message classes and their subclasses.
            per: `"attempt"` runs it again for each retry, `"message"` once around all.

        Raises:
            ConfigurationError: It cannot be called that way.
            BusStateError: The bus has started; chains are built once.
        """
        if self._core.phase is not Phase.NEW:
            message = "Middleware must be added before the bus is started."
            raise BusStateError(message)
        self._core.middleware.append(make_entry(middleware, types, per))
        self._core.refresh()

    def add_filter(self, filter: FilterLike) -> None:
        """Let only events through that pass this filter too."""
        self._filters.append(filter)

    def assemble(self, registration: Registration, call: Call) -> Call:
        """Put a bound handler inside everything that belongs around it.

        One stated order, outermost first: middleware per message, the handler's timeout,
        middleware per attempt, the handler.
        """
        core = self._core
        call = core.limit_time(registration, core.wrap(registration, call, "attempt"))
        return core.wrap(registration, call, "message")

    # -- commands --------------------------------------------------------------------------

    async def execute(  # noqa: C901, PLR0912, PLR0915 (the hot path, in one piece)
        self,
        command: Command[R],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> CommandResult[R]:
        """Have the one handler of `command` handle it, and give its result.

        Errors of the handler, of middleware and of time become a result with
        `success=False`. Cancellation propagates. A nested call inherits the deadline.

        Args:
            command: What to do.
            timeout: Seconds it may take in all.
            headers: Text that flows with it to everything it causes.

        Raises:
            MissingHandlerError: Nobody handles such commands.
            WrongMessageTypeError: It is no command.
            BusClosedError: The bus is stopping or has stopped.
        """
        core = self._core
        plan = self._commands.get(type(command))
        outer = current_frame.get()
        try:
            fresh = command.__meta__ is None
        except AttributeError:
            fresh = False
        seconds: float | None = None
        if fresh and outer is None and plan is not None and timeout is None and not headers:
            set_meta(command, ROOT)
            frame = cast("CommandResult[R]", new(CommandResult))
            frame.message = command
            frame.owner = plan
            frame.context = None
        else:
            plan, frame, seconds = self._prepare(command, outer, timeout, headers)
        counts = plan.counts
        counts.sent += 1
        token = current_frame.set(frame)
        now = self._now
        began = now()
        elapsed = 0.0
        try:
            if core.observed:
                self._tell_started(plan, command)
            if seconds is None:
                value = await plan.invoke(command)
            else:
                value = await within(plan.invoke, command, seconds, plan.name, core.clock)
            if type(value) is CoroutineType:
                value.close()
                raise not_awaited(plan.name, command)
            if frame.context is not None:
                await core.flush(frame)
            frame.elapsed = elapsed = now() - began
            frame.reply = value
        except Exception as error:
            elapsed = now() - began
            counts.failed += 1
            frame = FailedResult(
                frame, error, redact_exception(error), elapsed, self._report_unobserved
            )
        except BaseException:
            elapsed = now() - began
            counts.cancelled += 1
            raise
        finally:
            current_frame.reset(token)
            recent = counts.recent
            recent.append(elapsed)
            if len(recent) >= FOLD_AT:
                counts.fold()
            if core.settlers:
                core.work_ended()
        if core.observed:
            self._tell_result(plan, command, frame)
        return frame

    async def call(self, command: Command[R], *, timeout: float | None = None) -> R:
        """As `execute`, but gives the value or raises the handler's own exception."""
        return (await self.execute(command, timeout=timeout)).unwrap()

    def _prepare(
        self,
        command: Command[Any],
        outer: Frame | None,
        timeout: float | None,
        headers: Mapping[str, str] | None,
    ) -> tuple[CommandPlan, CommandResult[Any], float | None]:
        """Everything that a plain command from outside does not need."""
        self.require_command(command)
        self.require_open("execute a command on", outer)
        meta = fix_in_frame(command, outer, headers=headers)
        session = self._core.sessions.get(meta.session_id) if meta.session_id else None
        plan = self._core.command_plan(type(command), session)
        deadline: float | None = None if outer is None else outer.deadline
        if timeout is not None:
            now = self._now()
            deadline = now + timeout if deadline is None else min(deadline, now + timeout)
            timeout = deadline - now
        return plan, NestedResult(command, plan, deadline, outer), timeout

    def _report_unobserved(self, result: FailedResult[Any]) -> None:
        log.error(
            "command_failed_unobserved",
            bus=self.config.name,
            handler=result.metadata["handler"],
            command_id=result.command_id,
            error=result.error,
        )

    def _tell_started(self, plan: CommandPlan, command: Command[Any]) -> None:
        self._core.lifecycle.tell(
            CommandStartedEvent,
            command,
            lambda: CommandStartedEvent(
                command_type=type(command).__name__,
                command_id=command.message_id,
                handler=plan.name,
            ),
        )

    def _tell_result(
        self, plan: CommandPlan, command: Command[Any], result: CommandResult[Any]
    ) -> None:
        failed = result if isinstance(result, FailedResult) else None
        self._core.lifecycle.tell(
            CommandResultEvent,
            command,
            lambda: CommandResultEvent(
                command_type=type(command).__name__,
                command_id=command.message_id,
                handler=plan.name,
                success=failed is None,
                error=None if failed is None else failed.peek_error(),
                duration=result.duration,
            ),
        )

    # -- events ----------------------------------------------------------------------------

    async def publish(  # noqa: C901 (the hot path, in one piece)
        self,
        event: Event,
        *,
        headers: Mapping[str, str] | None = None,
        topic: str | None = None,
        delay: float | None = None,
        at: datetime | None = None,
    ) -> PublishReceipt:
        """Put `event` into the queue of each of its handlers; they run later.

        If a queue is full, what happens is that queue's strategy; by default this waits,
        so a slow handler slows its publishers. A cancelled wait has published nothing.
        Inside an event handler it never waits. Before `start` events are kept.

        Args:
            event: What happened.
            headers: Text that flows with it to everything it causes.
            topic: The topic to publish under, instead of the class's own.
            delay: Seconds to wait before it is published; the receipt can cancel it.
            at: The time at which to publish it; must know its time zone.

        Raises:
            WrongMessageTypeError: It is no event.
            BusClosedError: The bus is stopping or has stopped.
            QueueFullError: A queue is full and waiting is impossible: in a handler whose
                overflow is used up, or before `start`.
        """
        plan = self._events.get(type(event))
        outer = current_frame.get()
        try:
            fresh = event.__meta__ is None
        except AttributeError:
            fresh = False
        if fresh and outer is None and plan is not None and not headers and topic is None:
            set_meta(event, ROOT)
        else:
            plan = self._prepare_event(event, outer, headers, topic)
        if delay is not None or at is not None:
            return self._schedule_event(event, plan, delay, at)
        if self._filters:
            refused = await self._ask_filters(event, plan)
            return refused or await self._admit(event, plan, outer)
        queues = plan.queues
        for queue in queues:
            if queue.waiting or len(queue.items) >= queue.fast_size:
                return await self._admit(event, plan, outer)
        if plan.is_gated:
            return await self._admit(event, plan, outer)
        # The common case, in place: room everywhere. Each turn is the same as `queue.push`.
        plan.admitted += 1
        for queue in queues:
            queue.items.append(event)
            if queue.sleepers:
                queue.sleepers.pop().wake()
            elif queue.on_work is not None:
                queue.on_work()
        return plan.receipt

    async def publish_many(
        self, events: Iterable[Event] | AsyncIterable[Event], *, chunk: int = 1000
    ) -> PublishSummary:
        """Publish all `events`, giving other tasks a turn after each `chunk`.

        Raises:
            WrongMessageTypeError: One is no event; those before it are published.
        """
        if chunk < 1:
            message = f"chunk must be at least 1, not {chunk}."
            raise ValueError(message)
        summary = PublishSummary()
        if isinstance(events, AsyncIterable):
            async for event in events:
                summary.add(await self.publish(event))
            return summary
        for number, event in enumerate(events, 1):
            summary.add(await self.publish(event))
            if number % chunk == 0:
                await anyio.lowlevel.checkpoint()
        return summary

    def _prepare_event(
        self,
        event: Event,
        outer: Frame | None,
        headers: Mapping[str, str] | None,
        topic: str | None,
    ) -> EventPlan:
        """Everything that a plain event from outside does not need."""
        self.require_event(event)
        self.require_open("publish on", outer)
        meta = fix_in_frame(event, outer, headers=headers, topic=topic)
        session = self._core.sessions.get(meta.session_id) if meta.session_id else None
        return self._core.event_plan(type(event), session)

    async def _ask_filters(self, event: Event, plan: EventPlan) -> PublishReceipt | None:
        for predicate in self._filters:
            try:
                wanted = await passes(predicate, event)
            except BaseException:
                plan.counts.rejected += 1
                raise
            if not wanted:
                plan.counts.filtered += 1
                return PublishReceipt(PublishStatus.FILTERED, reason=filter_name(predicate))
        return None

    async def _admit(self, event: Event, plan: EventPlan, outer: Frame | None) -> PublishReceipt:
        if not plan.queues:
            plan.count_admitted()
            return plan.receipt
        may_wait = outer is None or not outer.on_lane
        if self._core.phase is Phase.NEW:
            self._refuse_if_full(plan)
            may_wait = False
        return await admit_event(plan, event, self._core.clock, may_wait=may_wait)

    def _refuse_if_full(self, plan: EventPlan) -> None:
        for queue in plan.queues:
            if queue.must_block:
                plan.counts.rejected += 1
                raise QueueFullError(
                    queue.name,
                    max_size=queue.max_size,
                    reason="the bus is not started, so nobody would ever make room.",
                )

    def _schedule_event(
        self, event: Event, plan: EventPlan, delay: float | None, at: datetime | None
    ) -> PublishReceipt:
        if delay is not None and at is not None:
            message = "Give delay= or at=, not both."
            raise ValueError(message)
        if at is not None:
            if at.tzinfo is None:
                message = "at= must know its time zone: datetime(..., tzinfo=UTC)."
                raise ValueError(message)
            delay = at.astimezone(UTC).timestamp() - self._core.clock.time()
        cancel = self._schedule.add(event, max(delay or 0.0, 0.0))
        return PublishReceipt(PublishStatus.ACCEPTED, handlers=plan.receipt.handlers, cancel=cancel)

    async def _publish_due(self, event: Event) -> None:
        """Publish a delayed event. Nobody waits for a receipt, so a refusal is told about."""
        core = self._core
        try:
            plan = self._prepare_event(event, None, None, None)
            receipt = None
            if self._filters:
                receipt = await self._ask_filters(event, plan)
            if receipt is None:
                receipt = await admit_event(plan, event, core.clock, may_wait=False)
            reason = "" if receipt.status is not PublishStatus.REJECTED else receipt.reason
        except Exception as error:
            reason = redact_exception(error)
        if reason:
            message_id = metadata_of(event).message_id
            log.error(
                "delayed_event_refused",
                bus=self.config.name,
                message_type=type(event).__name__,
                message_id=message_id,
                reason=reason,
            )
            core.lifecycle.tell(
                EventRefusedEvent,
                event,
                lambda: EventRefusedEvent(
                    event_type=type(event).__name__, event_id=message_id, reason=reason
                ),
            )

    # -- checks shared with sessions and contexts --------------------------------------------

    def require_command(self, command: object) -> None:
        """Raise unless this is a command."""
        if not isinstance(command, Command):
            raise wrong_type("execute takes a Command", command)

    def require_event(self, event: object) -> None:
        """Raise unless this is an event."""
        if not isinstance(event, Event):
            raise wrong_type("publish takes an Event", event)

    def require_open(self, what: str, frame: Frame | None = None) -> None:
        """Raise if the bus is closed to calls from outside its own handlers."""
        core = self._core
        if core.accepting:
            return
        if core.phase is Phase.DRAINING:
            if core.is_inside_handler(frame):
                return
            message = f"Cannot {what} this bus: it is stopping, and takes work only from handlers."
        else:
            message = f"Cannot {what} this bus: it has stopped."
        raise BusClosedError(message)

    # -- scopes and views --------------------------------------------------------------------

    def session(
        self,
        session_id: str | None = None,
        *,
        registries: Sequence[HandlerRegistry] = (),
        provide: Mapping[Any, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> BusSession:
        """A scope for one job: `async with bus.session("job-1") as session:`."""
        return BusSession(
            self._core, session_id, registries=registries, provide=provide, headers=headers
        )

    def stream(self, event_type: type[E], *, buffer: int = 1000) -> EventStream[E]:
        """Events as an iterator: `async with bus.stream(OrderPlaced) as events:`."""
        if buffer < 1:
            message = f"buffer must be at least 1, not {buffer}."
            raise ValueError(message)
        return EventStream(self._core, event_type, buffer)

    def portal(self) -> BusPortal:
        """The same bus for other threads, with blocking calls.

        Raises:
            BusNotStartedError: There is no event loop to go to yet.
        """
        return BusPortal(self, self._core.require_runtime())

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Check the set-up, open what handlers need, and begin to deliver.

        Raises:
            ConfigurationError: With all faults that were found; nothing was started.
            BusClosedError: It was stopped before; make a new bus.
        """
        core = self._core
        if core.phase is Phase.RUNNING:
            return
        self.require_open("start")
        faults = self.check()
        if faults:
            raise ConfigurationError(faults=faults)
        runtime = current_runtime()
        try:
            await core.providers.open(runtime, self._keeper)
        except BaseException:
            await self._keeper.close()
            raise
        core.runtime = runtime
        core.phase = Phase.RUNNING
        # A variable that has a value is cheaper to set and reset than one that has none.
        current_frame.set(current_frame.get())
        core.refresh()
        core.open_lanes()
        self._schedule.open(runtime)

    async def stop(self, timeout: float | None = 30.0) -> DrainReport:
        """Refuse new work, finish what is queued, and say what became of it.

        Handlers may go on sending while the bus drains. What is not finished within
        `timeout` seconds is cancelled and counted; `None` waits as long as it takes. A
        second call gives the same report.

        Raises:
            InsideHandlerError: Called by a handler, which would wait for itself.
        """
        core = self._core
        core.refuse_inside_handler("bus.stop()")
        if not core.accepting:
            await self._stopped.wait()
            return self._report or DrainReport()
        core.accepting = False
        core.phase = Phase.DRAINING
        core.refresh()
        scheduled = self._schedule.close()
        try:
            self._report = await drain(core, timeout, scheduled)
            for failure in await self._keeper.close():
                log.error("resource_failed", bus=self.config.name, error=redact_exception(failure))
        finally:
            core.phase = Phase.STOPPED
            self._stopped.set()
        return self._report

    async def settled(self, timeout: float | None = None) -> None:
        """Wait until no handler of this bus has anything left to do.

        By counting, not by time: it returns as soon as every queue is empty and every
        handler idle. Delayed events that are not due do not count.

        Raises:
            SettleTimeoutError: Something still runs after `timeout`; it is named.
            InsideHandlerError: Called by a handler, which would wait for itself.
            BusNotStartedError: Events are queued, but the bus was never started.
        """
        core = self._core
        core.refuse_inside_handler("bus.settled()")
        if core.phase is Phase.NEW and core.busy(core.lanes.values(), commands=False):
            core.require_runtime()
        await core.settle(lambda: list(core.lanes.values()), timeout, commands=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Shielded: work that was accepted is finished even if the program is cancelled.
        with anyio.CancelScope(shield=True):
            await self.stop(self.config.drain_timeout)

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncGenerator[dict[str, Any]]:
        """A ready lifespan for Starlette and FastAPI: `FastAPI(lifespan=bus.lifespan)`.

        The bus is then `request.state.bus`.
        """
        del app
        async with self:
            yield {"bus": self}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.config.name} {self._core.phase.value}>"


def wrong_type(wanted: str, given: object) -> WrongMessageTypeError:
    """The error for something that is not the kind of message asked for."""
    if isinstance(given, type):
        return WrongMessageTypeError(f"{wanted}, not the class {given.__name__}: pass an instance.")
    hint = ""
    if isinstance(given, Event):
        hint = " Events are published: await bus.publish(event)."
    elif isinstance(given, Command):
        hint = " Commands are executed: await bus.execute(command)."
    return WrongMessageTypeError(f"{wanted}, not {type(given).__name__} ({given!r:.60}).{hint}")
