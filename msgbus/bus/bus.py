"""`MessageBus`: set-up, start and stop. Sending is in `commands`, `events` and `requests`."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import anyio
from typing_extensions import override

from msgbus.bus.assembly import Assembly
from msgbus.bus.bus_state import BusState
from msgbus.bus.commands import CommandMethods, CommandRunner
from msgbus.bus.config import BusConfig
from msgbus.bus.drain import drain, end, wait_for_workers, wait_until_idle
from msgbus.bus.events import EventMethods, EventPublisher
from msgbus.bus.journal_methods import JournalMethods
from msgbus.bus.monitoring.handler_info import HandlerInfo, all_handlers
from msgbus.bus.monitoring.loop_watch import LoopWatch, watch_loop
from msgbus.bus.monitoring.stats import snapshot
from msgbus.bus.phases import Phase
from msgbus.bus.portal import BusPortal
from msgbus.bus.protocols import E
from msgbus.bus.requests import RequestMethods, Requests
from msgbus.bus.session import BusSession
from msgbus.bus.streams import EventStream, Expectation, Where
from msgbus.bus.subscription import Subscription
from msgbus.errors import BusClosedError, ConfigurationError, Fault
from msgbus.handlers.filters import FilterLike
from msgbus.handlers.injection import Providers, Resolver
from msgbus.handlers.registration import Registration
from msgbus.handlers.registration_methods import RegistrationMethods
from msgbus.handlers.registry import HandlerRegistry, IRegistry
from msgbus.messages.frame import current_frame
from msgbus.messages.message import Command, Message
from msgbus.messages.receipts import DrainReport
from msgbus.middleware.chain import Middleware, Per, make_entry
from msgbus.runtime.arguments import require_members
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import current_runtime
from msgbus.runtime.resources import Resources
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception, warm_up
from msgbus.telemetry.stats import BusStats

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from msgbus.journal.ports import Journal
    from msgbus.runtime.event_loop import Runtime


class MessageBus(
    CommandMethods, EventMethods, RequestMethods, JournalMethods, RegistrationMethods[Subscription]
):
    """Message bus: a command goes to its one handler, an event to all its handlers.

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
        journal: Where messages and deliveries are recorded, and where durable handlers go on
            after a restart, shared with other processes: a URL such as `sqlite:///shop.db`, or a
            `Journal`.
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
        journal: str | Journal | None = None,
        clock: Clock | None = None,
    ) -> None:
        _check_config(config)
        if registry is not None:
            fix = "Give a HandlerRegistry, or all that msgbus.IRegistry has."
            require_members(registry, IRegistry, "The registry", fix)
        time: Clock = SystemClock() if clock is None else clock
        self._state = BusState(
            self,
            config or BusConfig(),
            HandlerRegistry() if registry is None else registry,
            Providers(provide, resolver=resolver),
            time,
        )
        self._state.assembly = self._make_assembly()
        self._state.command_runner = CommandRunner(self._state)
        self._state.event_publisher = EventPublisher(self._state)
        self._state.requests = Requests(self, self._state)
        self._open_command_methods()
        self._open_event_methods()
        self._open_journal_methods(journal)
        self._resources = self._make_resources()
        self._report = DrainReport()
        self._starting: anyio.Event | None = None
        """Set when the current start has ended."""
        self._stopping: anyio.Event | None = None
        """Set when the current stop has ended."""
        self._loop_watch: LoopWatch | None = None
        for one in middleware:
            self.add_middleware(one)
        for predicate in filters:
            self.add_filter(predicate)
        for each in registries:
            self.include(each)

    # -- properties ------------------------------------------------------------------------

    @property
    def config(self) -> BusConfig:
        """Sizes and times."""
        return self._state.config

    @property
    def clock(self) -> Clock:
        """Where time comes from."""
        return self._state.clock

    @property
    def sessions(self) -> Mapping[str, BusSession]:
        """The live sessions, by id."""
        return MappingProxyType(self._state.open_sessions)

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._state.phase is Phase.RUNNING

    def stats(self) -> BusStats:
        """All counters at this moment."""
        durability = self._state.durability
        journaled = 0 if durability is None else durability.scheduler.count
        return snapshot(
            self._state,
            scheduled=len(self._publisher.scheduled) + journaled,
            dead_letters=self._count_dead_letters(),
        )

    def _count_dead_letters(self) -> int:
        """Count the dead letters in the journal, of durable handlers and enqueued commands."""
        durability = self._state.durability
        return 0 if durability is None else durability.count_dead_letters()

    def check(self) -> list[Fault]:
        """Everything that is wrong with the set-up, without starting. Empty is good."""
        return self._state.faults()

    def handlers(self) -> tuple[HandlerInfo, ...]:
        """All handlers of the bus, then those of each live session, at this moment.

        The order is stable: in each scope commands come first, then events, those of one
        class or topic together. Open streams and expectations are handlers, too.
        """
        return all_handlers(self._state)

    # -- set-up ----------------------------------------------------------------------------

    def _register(self, registration: Registration, *, replace: bool = False) -> Subscription:
        return self._state.subscribe(registration, replace=replace)

    def include(self, registry: HandlerRegistry) -> None:
        """Register all handlers of `registry`, now and whenever one is added to it."""
        for _, registration in registry.registrations():
            self._register(registration)
        registry.follow(self._register)

    def unregister_command_handler(self, command_type: type[Command[Any]]) -> bool:
        """Remove the bus-level handler of a command; false if there was none."""
        found = self._state.registry.command_handler(command_type, None)
        return found is not None and self._state.registry.remove(found)

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
            BusStateError: The bus runs; chains are built once for each start.
        """
        self._state.require_set_up("Middleware")
        self._state.middleware.append(make_entry(middleware, types, per))
        self._state.refresh()

    def add_filter(self, filter: FilterLike) -> None:
        """Add a filter that every event must pass to be published."""
        self._filters.append(filter)

    def _make_assembly(self) -> Assembly:
        """Make the part that builds call chains; for subclasses."""
        return Assembly(self._state)

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
            self._state, session_id, registries=registries, provide=provide, headers=headers
        )

    @override
    def stream(self, event_type: type[E] | str, *, buffer: int = 1000) -> EventStream[E]:
        return EventStream(self._state, event_type, buffer, self._register)

    @override
    def expect(
        self,
        event_type: type[E] | str,
        *,
        where: Where[E] | None = None,
        timeout: float | None = None,
    ) -> Expectation[E]:
        return Expectation(self._state, event_type, where, timeout, self._register)

    def portal(self) -> BusPortal:
        """The same bus for other threads, with blocking calls.

        Raises:
            BusNotStartedError: There is no event loop to go to yet.
            BusClosedError: There is none any more.
        """
        return BusPortal(self, self._state)

    # -- start and stop ------------------------------------------------------------------------

    async def start(self) -> None:
        """Check the set-up, open the resources of handlers, and begin to deliver.

        A stopped bus may be started again, on this event loop or another, with the same
        handlers, middleware and journal: resources are opened again, counters continue, and
        events that `stop` has returned are not delivered. A start that fails leaves the bus as
        it was, to be started again. A second call during a start waits for it; on a running
        bus it does nothing.

        Raises:
            ConfigurationError: The set-up has faults, all of them listed; nothing was started.
            JournalError: The journal cannot be opened or read.
            BusClosedError: It is stopping; wait for `stop` to return.
            ForeignLoopError: It runs on another event loop.
        """
        state = self._state
        state.require_own_loop("start")
        while self._starting is not None:
            await self._starting.wait()
        if self._stopping is not None:
            message = "Cannot start this bus: it is stopping. Wait for `await bus.stop()` first."
            raise BusClosedError(message)
        if state.phase is Phase.RUNNING:
            return
        faults = self.check()
        if faults:
            raise ConfigurationError(faults=faults)
        self._starting = anyio.Event()
        try:
            await self._start(current_runtime())
        finally:
            self._starting.set()
            self._starting = None

    async def _start(self, runtime: Runtime) -> None:
        state = self._state
        warm_up()
        was_new = state.phase is Phase.NEW
        state.bind_to(runtime)
        try:
            await state.providers.open(runtime, self._resources)
            state.make_handlers()
            was_new = False
            # A variable that has a value is cheaper to set and reset than one that has none.
            current_frame.set(current_frame.get())
            state.begin_run(runtime)
            self._publisher.scheduled.open(runtime)
            self._loop_watch = watch_loop(self, runtime)
            if state.durability is not None:
                await self._journal_opened()
                await state.durability.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                if was_new:  # events published before are kept for the next start
                    await self._close_resources()
                    state.unbind()
                else:
                    await self._stop(0)
            raise

    async def stop(self, timeout: float | None = 30.0) -> DrainReport:
        """Refuse new work, drain the queues, and report what was not finished.

        Handlers may send messages while the bus drains. What is not finished within `timeout`
        seconds is cancelled and counted; `None` waits without limit. What durable handlers have
        not done stays in the journal, for other processes or the next start. Open sessions and
        streams end with the bus. A second call returns the same report. Until the next `start`
        the bus raises `BusClosedError`.

        Raises:
            InsideHandlerError: Called by a handler, which would wait for itself.
            ForeignLoopError: It runs on another event loop.
        """
        state = self._state
        state.refuse_inside_handler("bus.stop()")
        state.require_not_forked("stop")
        if state.bound_runtime is not None and state.bound_runtime.has_ended():
            state.bound_runtime = None  # its own loop can no longer stop it
        state.require_own_loop("stop")
        while self._starting is not None:
            await self._starting.wait()
        if self._stopping is not None:
            await self._stopping.wait()
        elif state.phase is not Phase.STOPPED:
            await self._stop(timeout)
        return self._report

    async def _stop(self, timeout: float | None) -> None:
        state = self._state
        self._stopping = anyio.Event()
        state.accepting = False
        state.forget_unstarted()  # if it was never started, the report says what is left
        state.phase = Phase.DRAINING
        state.refresh()
        self._publisher.scheduled.close()
        self._report = DrainReport()
        try:
            await drain(state, timeout)
        finally:
            # If this call is cancelled, end at once; the next call returns the report.
            try:
                with anyio.CancelScope(shield=True):
                    await self._end()
            finally:
                self._stopping.set()
                self._stopping = None

    async def _end(self) -> None:
        try:
            self._report = await end(self._state, self._publisher.scheduled.hand_back())
            await wait_for_workers(self._state)
        finally:
            if self._loop_watch is not None:
                self._loop_watch.stop()
            self._state.end_run()
            try:
                await self._close_down()
            finally:
                self._state.unbind()

    def _make_resources(self) -> Resources:
        return Resources(f"bus {self.config.name}")

    async def _close_down(self) -> None:
        """Close sessions, the journal and resources, in this order."""
        durability = self._state.durability
        try:
            for session in list(self._state.open_sessions.values()):
                await session.close()
            if durability is not None:
                try:
                    await self._journal_closing()
                finally:
                    await durability.close()
        finally:
            await self._close_resources()

    async def _close_resources(self) -> None:
        resources, self._resources = self._resources, self._make_resources()
        self._state.providers.forget()
        for failure in await resources.close():
            log.error(
                "resource_failed",
                bus=self.config.name,
                error=redact_exception(failure),
                traceback=failure,
            )

    async def settled(self, timeout: float | None = None) -> None:
        """Wait until no handler of this bus has work left.

        By counting, not by time: it returns as soon as every queue is empty, every handler
        idle, and every durable handler of this bus at the head of the journal, in whichever
        process. Delayed events that are not due do not count, nor do messages that wait for a
        retry in the journal, or behind a dead letter of their key.

        Raises:
            SettleTimeoutError: Something still runs after `timeout`; or, without one, handlers that
                are paused or blocked have work left, and only `resume` lets it go on. They are
                named.
            InsideHandlerError: Called by a handler, which would wait for itself.
            BusNotStartedError: Events are queued, but the bus was never started.
            ForeignLoopError: It runs on another event loop.
        """
        state = self._state
        state.refuse_inside_handler("bus.settled()")
        state.require_own_loop("wait for")
        if state.phase is Phase.NEW and state.busy(state.lanes.values(), commands=False):
            state.require_runtime()
        await wait_until_idle(state, timeout)

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
        """Lifespan for Starlette and FastAPI: `FastAPI(lifespan=bus.lifespan)`.

        The bus is then `request.state.bus`.
        """
        del app
        async with self:
            yield {"bus": self}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.config.name} {self._state.phase.value}>"


def _check_config(config: object) -> None:
    if config is None or isinstance(config, BusConfig):
        return
    fix = "Write MessageBus(BusConfig(...))."
    if isinstance(config, str):
        fix = f"A journal is given by name: MessageBus(journal={config!r})."
    message = f"The first argument of a bus is its BusConfig, not a {type(config).__name__}. {fix}"
    raise ConfigurationError(message)


_lock: Final = threading.Lock()
_default: list[MessageBus] = []


def get_bus() -> MessageBus:
    """Get the default bus of this process, made at first use. Safe to call from any thread.

    For scripts and small programs. Anything larger makes its own `MessageBus` and passes it
    on, so that applications and tests do not share handlers.
    """
    with _lock:
        if not _default:
            _default.append(MessageBus())
        return _default[0]
