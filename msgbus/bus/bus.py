"""MessageBus: the public face. What it does lives elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import anyio
from typing_extensions import override

from msgbus.bus.bus_state import BusCore, Phase
from msgbus.bus.commands import CommandSide
from msgbus.bus.context import current_frame
from msgbus.bus.events import EventSide
from msgbus.bus.journal_methods import JournalSide
from msgbus.bus.monitoring.handler_info import HandlerInfo, all_handlers
from msgbus.bus.monitoring.loop_watch import LoopWatch, watch_loop
from msgbus.bus.monitoring.stats import snapshot
from msgbus.bus.portal import BusPortal
from msgbus.bus.protocols import E
from msgbus.bus.requests import RequestSide
from msgbus.bus.session import BusSession
from msgbus.bus.streams import EventStream
from msgbus.bus.subscription import Subscription
from msgbus.errors import BusClosedError, ConfigurationError, Fault
from msgbus.expectations import Expectation, Where
from msgbus.handlers.config import BusConfig
from msgbus.handlers.filters import FilterLike
from msgbus.handlers.injection import Call, Providers, Resolver
from msgbus.handlers.registration import Registration
from msgbus.handlers.registration_methods import Registrar
from msgbus.handlers.registry import HandlerRegistry, IRegistry
from msgbus.messages.message import Command, Event, Message
from msgbus.messages.receipts import DrainReport
from msgbus.middleware.chain import Middleware, Per, make_entry
from msgbus.protocols import require_members
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import current_runtime
from msgbus.runtime.resources import Keeper
from msgbus.shutdown import drain, end, quiet, workers_gone
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception, warm_up
from msgbus.telemetry.stats import BusStats

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from msgbus.bus.lanes.lane import Lane
    from msgbus.runtime.event_loop import Runtime


class MessageBus(CommandSide, EventSide, RequestSide, JournalSide, Registrar[Subscription]):
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
        journal: Where messages and deliveries are recorded, and where durable handlers go on
            after a restart: a URL such as `sqlite:///shop.db`, or a `Journal`.
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
        _check_config(config)
        if registry is not None:
            fix = "Give a HandlerRegistry, or all that msgbus.IRegistry has."
            require_members(registry, IRegistry, "The registry", fix)
        time: Clock = SystemClock() if clock is None else clock
        self._core = BusCore(
            self,
            config or BusConfig(),
            HandlerRegistry() if registry is None else registry,
            Providers(provide, resolver=resolver),
            time,
        )
        self._open_command_side()
        self._open_event_side()
        self._open_journal_side(journal)
        self._keeper = self._make_keeper()
        self._report = DrainReport()
        self._starting: anyio.Event | None = None
        """Set when the start that is under way has come to its end."""
        self._stopping: anyio.Event | None = None
        """Set when the stop that is under way has come to its end."""
        self._loop_watch: LoopWatch | None = None
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
        durability = self._core.durability
        journaled = 0 if durability is None else durability.scheduler.count
        return snapshot(
            self._core,
            scheduled=len(self._schedule) + journaled,
            dead_letters=self._count_dead_letters(),
        )

    def _count_dead_letters(self) -> int:
        """Those in the journal, where durable handlers and enqueued commands leave theirs."""
        durability = self._core.durability
        return 0 if durability is None else durability.count_dead_letters()

    def check(self) -> list[Fault]:
        """Everything that is wrong with the set-up, without starting. Empty is good."""
        return self._core.faults()

    def handlers(self) -> tuple[HandlerInfo, ...]:
        """All handlers of the bus, then those of each live session, at this moment.

        The order is stable: in each scope commands come first, then events, those of one
        class or topic together. Open streams and expectations are handlers, too.
        """
        return all_handlers(self._core)

    # -- setting it up ---------------------------------------------------------------------

    def _register(self, registration: Registration, *, replace: bool = False) -> Subscription:
        return self._core.subscribe(registration, replace=replace)

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
            BusStateError: The bus runs; chains are built once for each start.
        """
        self._core.require_set_up("Middleware")
        self._core.middleware.append(make_entry(middleware, types, per))
        self._core.refresh()

    def add_filter(self, filter: FilterLike) -> None:
        """Let only events through that pass this filter too."""
        self._filters.append(filter)

    def assemble(
        self,
        registration: Registration,
        call: Call,
        session: BusSession | None = None,
    ) -> Call:
        """Put a bound handler inside everything that belongs around it.

        One stated order, outermost first: middleware per message, the handler's timeout,
        middleware per attempt, the handler.
        """
        core = self._core
        call = core.limit_time(registration, core.wrap(registration, call, "attempt"))
        call = core.observed(registration, call, session, "attempt")
        return core.wrap(registration, call, "message")

    def writes_names(self) -> bool:
        """Whether wire names leave this process, and so must be unique; for the bus's parts.

        A journal refuses two classes of one name by itself, at registration.
        """
        return self.has_transport

    def policy_in_words(self, registration: Registration) -> str | None:  # noqa: ARG002 (as above)
        """Describe the policy around a handler, if there is one; for the bus's parts."""
        return None

    def require_home(self, what: str) -> None:
        """Raise if it runs on another thread's event loop than the caller; for the bus's parts.

        Raises:
            ForeignLoopError: It does.
        """
        self._core.require_home(what)

    def is_retried(self, registration: Registration) -> bool:  # noqa: ARG002 (for subclasses)
        """Whether what is around a handler tries again by itself."""
        return False

    def event_failed(self, lane: Lane, event: Event, error: BaseException) -> None:
        """For subclasses: a handler has failed on `event` for good, and it was told of."""

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

    @override
    def stream(self, event_type: type[E] | str, *, buffer: int = 1000) -> EventStream[E]:
        return EventStream(self._core, event_type, buffer, self._register)

    @override
    def expect(
        self,
        event_type: type[E] | str,
        *,
        where: Where[E] | None = None,
        timeout: float | None = None,
    ) -> Expectation[E]:
        return Expectation(self._core, event_type, where, timeout, self._register)

    def portal(self) -> BusPortal:
        """The same bus for other threads, with blocking calls.

        Raises:
            BusNotStartedError: There is no event loop to go to yet.
            BusClosedError: There is none any more.
        """
        return BusPortal(self, self._core)

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Check the set-up, open what handlers need, and begin to deliver.

        A stopped bus may be started again, on this event loop or another, with the same
        handlers, middleware and journal: what handlers need is opened anew, counters go on, and
        nothing that `stop` has handed back is delivered. A start that fails leaves the bus as
        it was, to be started again. A second call while one is under way waits for that one; on
        a running bus it does nothing.

        Raises:
            ConfigurationError: With all faults that were found; nothing was started.
            BusClosedError: It is stopping; wait for `stop` to return.
            ForeignLoopError: It runs on another event loop.
        """
        core = self._core
        core.require_own_loop("start")
        while self._starting is not None:
            await self._starting.wait()
        if self._stopping is not None:
            message = "Cannot start this bus: it is stopping. Wait for `await bus.stop()` first."
            raise BusClosedError(message)
        if core.phase is Phase.RUNNING:
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
        core = self._core
        warm_up()
        was_new = core.phase is Phase.NEW
        core.begin_run(runtime)
        try:
            await core.providers.open(runtime, self._keeper)
            core.make_handlers()
            was_new = False
            # A variable that has a value is cheaper to set and reset than one that has none.
            current_frame.set(current_frame.get())
            core.open_run(runtime)
            self._schedule.open(runtime)
            self._loop_watch = watch_loop(self, runtime)
            if core.durability is not None:
                await self._journal_opened()
                await core.durability.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                if was_new:  # what was published before is kept for the next try
                    await self._close_resources()
                    core.leave_home()
                else:
                    await self._stop(0)
            raise

    async def stop(self, timeout: float | None = 30.0) -> DrainReport:
        """Refuse new work, finish what is queued, and say what became of it.

        Handlers may go on sending while the bus drains. What is not finished within
        `timeout` seconds is cancelled and counted; `None` waits as long as it takes. Sessions
        and streams that are still open end with it. A second call gives the same report. Until
        the next `start` the bus raises `BusClosedError`.

        Raises:
            InsideHandlerError: Called by a handler, which would wait for itself.
            ForeignLoopError: It runs on another event loop.
        """
        core = self._core
        core.refuse_inside_handler("bus.stop()")
        if core.home is not None and core.home.has_ended():
            core.home = None  # nobody else can stop it any more
        core.require_own_loop("stop")
        while self._starting is not None:
            await self._starting.wait()
        if self._stopping is not None:
            await self._stopping.wait()
        elif core.phase is not Phase.STOPPED:
            await self._stop(timeout)
        return self._report

    async def _stop(self, timeout: float | None) -> None:
        core = self._core
        self._stopping = anyio.Event()
        core.accepting = False
        core.forget_unstarted()  # if it was never started, the report says what is left
        core.phase = Phase.DRAINING
        core.refresh()
        self._schedule.close()
        self._report = DrainReport()
        try:
            await drain(core, timeout)
        finally:
            # Also when this call is cancelled: then at once, and the next call reports it.
            try:
                with anyio.CancelScope(shield=True):
                    await self._end()
            finally:
                self._stopping.set()
                self._stopping = None

    async def _end(self) -> None:
        try:
            self._report = await end(self._core, self._schedule.hand_back())
            await workers_gone(self._core)
        finally:
            if self._loop_watch is not None:
                self._loop_watch.stop()
            self._core.end_run()
            try:
                await self._close_down()
            finally:
                self._core.leave_home()

    def _make_keeper(self) -> Keeper:
        return Keeper(f"bus {self.config.name}")

    async def _close_down(self) -> None:
        """Close what this run had open, last first."""
        durability = self._core.durability
        try:
            for session in list(self._core.sessions.values()):
                await session.close()
            if durability is not None:
                try:
                    await self._journal_closing()
                finally:
                    await durability.close()
        finally:
            await self._close_resources()

    async def _close_resources(self) -> None:
        keeper, self._keeper = self._keeper, self._make_keeper()
        self._core.providers.forget()
        for failure in await keeper.close():
            log.error(
                "resource_failed",
                bus=self.config.name,
                error=redact_exception(failure),
                traceback=failure,
            )

    async def settled(self, timeout: float | None = None) -> None:
        """Wait until no handler of this bus has anything left to do.

        By counting, not by time: it returns as soon as every queue is empty, every handler
        idle, and every durable handler that works here at the end of the journal. Delayed
        events that are not due do not count, nor does a message whose next try is scheduled.

        Raises:
            SettleTimeoutError: Something still runs after `timeout`; it is named.
            InsideHandlerError: Called by a handler, which would wait for itself.
            BusNotStartedError: Events are queued, but the bus was never started.
            ForeignLoopError: It runs on another event loop.
        """
        core = self._core
        core.refuse_inside_handler("bus.settled()")
        core.require_own_loop("wait for")
        if core.phase is Phase.NEW and core.busy(core.lanes.values(), commands=False):
            core.require_runtime()
        await quiet(core, timeout)

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


def _check_config(config: object) -> None:
    if config is None or isinstance(config, BusConfig):
        return
    fix = "Write MessageBus(BusConfig(...))."
    if isinstance(config, str):
        fix = f"A journal is given by name: MessageBus(journal={config!r})."
    message = f"The first argument of a bus is its BusConfig, not a {type(config).__name__}. {fix}"
    raise ConfigurationError(message)
