"""What the parts of one bus share: its handlers, lanes, counters and phase of life."""

from __future__ import annotations

import weakref
from enum import Enum
from typing import TYPE_CHECKING, Any, final

from msgbus.bus.context import Frame, context_of, current_frame, frame_about
from msgbus.bus.drain import Quiescence
from msgbus.bus.lanes.lane import Lane
from msgbus.bus.lanes.queue import BoundedEventQueue
from msgbus.bus.monitoring.depth import DepthWatch
from msgbus.bus.plans import CommandPlan, EventPlan, TopicPlans
from msgbus.bus.subscription import Subscription
from msgbus.errors import (
    BusClosedError,
    BusNotStartedError,
    BusStateError,
    ConfigurationError,
    Fault,
    ForeignLoopError,
    InsideHandlerError,
    MissingHandlerError,
)
from msgbus.handlers.injection import Call, bind
from msgbus.handlers.observers import BusObserver, Observers
from msgbus.handlers.registration import Registration, registration_faults
from msgbus.messages.message import Message, SystemEvent, metadata_of
from msgbus.messages.system_events import EventHandlerFailedEvent, LifecyclePort
from msgbus.middleware.chain import MiddlewareEntry, Per, batch_faults, build_chain
from msgbus.runtime.event_loop import foreign_loop
from msgbus.runtime.threads import ThreadPool
from msgbus.runtime.timeouts import with_timeout
from msgbus.telemetry.logging import ids_of, log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import Ledger

if TYPE_CHECKING:
    from msgbus.bus.bus import MessageBus
    from msgbus.bus.session import BusSession
    from msgbus.bus.streams import EventStream
    from msgbus.durability.hub import Durability
    from msgbus.expectations import Watch
    from msgbus.handlers.config import BusConfig
    from msgbus.handlers.injection import Providers
    from msgbus.handlers.registry import IRegistry
    from msgbus.runtime.clock import Clock
    from msgbus.runtime.event_loop import Runtime


class Phase(Enum):
    """A bus's life, in this order; a stopped bus that is started again begins anew."""

    NEW = "new"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


def _has_stopped(what: str) -> BusClosedError:
    message = f"Cannot {what} this bus: it has stopped. Start it again with `await bus.start()`."
    return BusClosedError(message)


@final
class Unstarted:
    """The queues of a bus that was not started yet. Knows nothing of the bus itself."""

    __slots__ = ("bus", "queues")

    def __init__(self, bus: str) -> None:
        self.bus = bus
        self.queues: list[BoundedEventQueue] = []

    def report(self) -> None:
        """Say that the bus is gone, or the program ends, with events that nobody handled."""
        events = sum(len(queue.items) for queue in self.queues)
        if events:
            fix = "`async with bus:` or `await bus.start()`"
            log.warning("bus_never_started", bus=self.bus, events=events, fix=fix)


@final
class BusCore(Quiescence):
    """The shared inside of a bus. Users see `MessageBus`."""

    def __init__(
        self,
        bus: MessageBus,
        config: BusConfig,
        registry: IRegistry,
        providers: Providers,
        clock: Clock,
    ) -> None:
        super().__init__(clock, Ledger(config.histogram_every))
        self.bus = bus
        self.config = config
        self.registry = registry
        self.providers = providers
        self.middleware: list[MiddlewareEntry] = []
        self.observers = Observers()
        self.sessions: dict[str, BusSession] = {}
        self.lifecycle = LifecyclePort(self)
        self.phase = Phase.NEW
        self.accepting = True
        """Whether calls from outside are taken: before and while it runs. Afterwards no plan
        is kept, so that every call goes the long way and is asked where it comes from."""
        self.lanes: dict[tuple[Registration, str | None], Lane] = {}
        """By handler and, for those of a session, its id."""
        self.drained_from = 0
        """Pairs that were finished when the bus began to stop."""
        self.sessions_observe_commands = 0
        """Handlers of sessions that want to hear of commands."""
        self.streams: set[EventStream[Any] | Watch[Any]] = set()
        """Those who read events from outside, and are told when there will be no more."""
        self.version = 0
        """Grows with every change, so that sessions know when their plans are old."""
        self.commands: dict[type, CommandPlan] = {}
        self.events: dict[type, EventPlan] = {}
        self.topics = TopicPlans()
        """Of events published under another topic than their class's."""
        self.threads = ThreadPool(config.max_threads)
        self.durability: Durability | None = None
        """Everything that concerns the journal, if there is one."""
        self.depth_watch = DepthWatch(config.name, config.max_depth)
        self.unstarted: Unstarted | None = None
        """The queues of events that were published before the start."""
        registry.watch(self.refresh)

    # -- plans ---------------------------------------------------------------------------

    def refresh(self) -> None:
        """Forget all plans: the registry, the middleware or the phase has changed.

        A plan is never altered, only replaced: a dispatch that is under way keeps its own.
        """
        self.version += 1
        for plan in self.events.values():
            plan.settle_accounts()
        self.topics.forget()
        self.commands.clear()
        self.events.clear()
        self.lifecycle.forget()

    def settle_accounts(self) -> None:
        """Bring into the ledger what live plans have counted."""
        for plan in self.events.values():
            plan.settle_accounts()
        self.topics.settle_accounts()
        for session in self.sessions.values():
            session.settle_accounts()

    def command_plan(self, command_type: type[Message], session: BusSession | None) -> CommandPlan:
        """How to handle such a command.

        Raises:
            MissingHandlerError: Nobody handles it.
        """
        plans = self.commands if session is None else session.command_plans(self.version)
        plan = plans.get(command_type)
        if plan is None:
            session_id = None if session is None else session.session_id
            registration = self.registry.command_handler(command_type, session_id)
            if registration is None:
                raise MissingHandlerError(command_type, session_id=session_id)
            owns = session is not None and session.owns(registration)
            counts = self.ledger.command(*registration.row(in_session=owns))
            call = self.chain(registration, session)
            owns = session is not None and session.owns(registration)
            plan = CommandPlan(self.bus, registration, call, counts, session_id if owns else None)
            if self.accepting:
                plans[command_type] = plan
        return plan

    def event_plan(
        self, event_type: type[Message], session: BusSession | None, topic: str | None = None
    ) -> EventPlan:
        """Where to put such an event; `topic` if it is published under one of its own."""
        if topic is not None:
            return self._topic_plan(event_type, session, topic)
        plans = self.events if session is None else session.event_plans(self.version)
        plan = plans.get(event_type)
        if plan is None:
            plan = self._make_event_plan(event_type, session, None)
            if self.accepting:
                plans[event_type] = plan
        return plan

    def _topic_plan(
        self, event_type: type[Message], session: BusSession | None, topic: str
    ) -> EventPlan:
        plans = self.topics if session is None else session.topic_plans(self.version)
        plan = plans.get(event_type, topic)
        if plan is None:
            plan = self._make_event_plan(event_type, session, topic)
            if self.accepting:
                plans.keep(event_type, topic, plan)
        return plan

    def _make_event_plan(
        self, event_type: type[Message], session: BusSession | None, topic: str | None
    ) -> EventPlan:
        session_id = None if session is None else session.session_id
        if topic is None:
            handlers = self.registry.event_handlers(event_type, session_id)
        else:
            handlers = self.registry.event_handlers(event_type, session_id, topic)
        counts = self.ledger.event(event_type.__name__)
        if self.durability is None or issubclass(event_type, SystemEvent):
            lanes = [self.lane_of(registration, session) for registration in handlers]
            return EventPlan(lanes, counts, is_kept=self.accepting)
        here = [one for one in handlers if not self.durability.is_durable(one)]
        lanes = [self.lane_of(registration, session) for registration in here]
        # Not "kept": on a bus with a journal no event is simply appended to its queues.
        return EventPlan(lanes, counts, is_kept=False, durable=len(handlers) - len(here))

    def lane_of(self, registration: Registration, session: BusSession | None) -> Lane:
        """The handler's lane, made at its first event; open if the bus runs."""
        own = session if session is not None and session.owns(registration) else None
        session_id = None if own is None else own.session_id
        lane = self.lanes.get((registration, session_id))
        if lane is None:
            queue = BoundedEventQueue(
                registration.name,
                registration.queue or self.config.queue,
                self.clock,
                self.ledger.lane(*registration.row(in_session=own is not None)),
            )
            lane = Lane(self, registration, queue, session_id)
            lane.is_retried = self.bus.is_retried(registration)
            lane.is_durable = self.is_durable(registration)
            if self.runtime is not None:
                lane.open(self.chain(registration, own))
            elif self.phase is Phase.NEW:
                self._remember_unstarted(queue)
            self.lanes[registration, session_id] = lane
        return lane

    def _remember_unstarted(self, queue: BoundedEventQueue) -> None:
        if self.unstarted is None:
            self.unstarted = Unstarted(self.config.name)
            weakref.finalize(self.bus, self.unstarted.report)
        self.unstarted.queues.append(queue)

    def forget_unstarted(self) -> None:
        """Forget what would have to be said if there were never a start."""
        if self.unstarted is not None:
            self.unstarted.queues.clear()

    def chain(self, registration: Registration, session: BusSession | None) -> Call:
        """The handler with its dependencies, inside its timeout and all its middleware."""
        owns = session is not None and session.owns(registration)
        call = self.bound(registration, session.providers if session and owns else None)
        call = self.bus.assemble(registration, call, session if owns else None)
        return self.observed(registration, call, session if owns else None, "message")

    def bound(self, registration: Registration, providers: Providers | None = None) -> Call:
        """The handler with its dependencies, and nothing around it."""
        return bind(
            registration.handler,
            registration.signature,
            providers or self.providers,
            source=registration.source,
            name=registration.name,
            inline=registration.inline,
            threads=self.threads,
            is_wrapped=bool(self.middleware),
        )

    def observed(
        self, registration: Registration, call: Call, session: BusSession | None, per: Per
    ) -> Call:
        """`call` with its beginning and its end told to those who watch this handler."""
        scope = None if session is None else session.session_id
        return self.observers.around(call, registration, scope, per)

    def observe(self, observer: BusObserver) -> None:
        """Tell `observer` what the bus does, from now on."""
        self.observers.add(observer)
        self._observers_changed()

    def stop_observing(self, observer: BusObserver) -> None:
        """Tell `observer` nothing more, but for the ends of calls that are under way."""
        self.observers.remove(observer)
        self._observers_changed()

    def _observers_changed(self) -> None:
        self.bus.observers_changed()
        self.refresh()
        if self.phase is not Phase.RUNNING:
            return  # lanes get their chains at the start
        for (registration, session_id), lane in self.lanes.items():
            session = None if session_id is None else self.sessions.get(session_id)
            if session is not None or session_id is None:
                lane.invoke = self.chain(registration, session)

    def is_durable(self, registration: Registration) -> bool:
        """Whether a handler reads the journal instead of being handed what is published."""
        return self.durability is not None and self.durability.is_durable(registration)

    def wrap(self, registration: Registration, call: Call, per: str) -> Call:
        """`call` inside the middleware that runs per attempt, or per message."""
        entries = [entry for entry in self.middleware if entry.per == per]
        return build_chain(
            entries,
            call,
            registration.message_type,
            handler=registration.name,
            batch=registration.batch,
        )

    def limit_time(self, registration: Registration, call: Call) -> Call:
        """`call` inside the handler's own timeout, if it has one."""
        if registration.timeout is None:
            return call
        return with_timeout(call, registration.timeout, registration.name, self.clock)

    def subscribe(
        self, registration: Registration, session_id: str | None = None, *, replace: bool = False
    ) -> Subscription:
        """Register a handler and give its handle.

        Raises:
            ConfigurationError: The bus runs, and the handler asks for what nobody provides;
                or it is to be durable, and cannot be.
            DuplicateHandlerError: The command has a handler, or the name is taken.
        """
        if self.durability is not None:
            registration = self.durability.accept(registration, session_id)
        elif registration.durable or registration.subscription:
            asked = ["durable"] if registration.durable else []
            message = (
                f"{registration.name}: {', '.join([*asked, *(registration.subscription or ())])} "
                f"is for durable subscriptions, and this bus has no journal. "
                f'Make it with MessageBus(journal="sqlite:///shop.db").'
            )
            raise ConfigurationError(message)
        if self.phase is Phase.RUNNING:
            session = None if session_id is None else self.sessions.get(session_id)
            providers = self.providers if session is None else session.providers
            faults = self._faults_of(registration, providers)
            if faults:
                raise ConfigurationError(faults=faults)
            _make(registration, providers)
        registration = self.registry.add(registration, session_id, replace=replace)
        if self.durability is not None:
            self.durability.registered(registration, session_id)
        return Subscription(self, registration, session_id)

    def unsubscribe(self, registration: Registration, session_id: str | None) -> None:
        """Take a handler away at once; what is queued for it is given up."""
        self.registry.remove(registration, session_id)
        lane = self.lanes.get((registration, session_id))
        if lane is not None:
            lane.leave()
        session = None if session_id is None else self.sessions.get(session_id)
        if session is not None:
            session.disown(registration)

    # -- life ----------------------------------------------------------------------------

    def require_runtime(self) -> Runtime:
        """The running event loop.

        Raises:
            BusNotStartedError: There is none yet.
            BusClosedError: There is none any more.
        """
        if self.runtime is None:
            if self.phase is Phase.STOPPED:
                raise _has_stopped("use")
            message = "This bus is not started. Use `async with bus:` or `await bus.start()`."
            raise BusNotStartedError(message)
        return self.runtime

    def require_open(self, what: str, frame: Frame | None = None) -> None:
        """Raise if the bus is closed to calls from outside its own handlers.

        Raises:
            BusClosedError: It is stopping or has stopped.
            ForeignLoopError: It runs on another event loop than the caller.
        """
        self.require_home(what)
        if self.accepting:
            return
        if self.phase is Phase.DRAINING:
            if self.is_inside_handler(frame):
                return
            message = f"Cannot {what} this bus: it is stopping, and takes work only from handlers."
            raise BusClosedError(message)
        raise _has_stopped(what)

    def require_home(self, what: str) -> None:
        """Raise if the bus runs on another thread's event loop than the caller.

        Its queues and workers belong to that loop: nothing here would wake them.

        Raises:
            ForeignLoopError: It does.
        """
        if self.is_elsewhere():
            raise self._foreign(what)

    def require_own_loop(self, what: str) -> None:
        """As `require_home`, and find out an older loop of this thread too; takes longer.

        Raises:
            ForeignLoopError: The bus runs on another event loop than the caller, or did so
                when that loop ended.
        """
        if self.home is not None and not self.home.is_running_here():
            raise self._foreign(what)

    def _foreign(self, what: str) -> ForeignLoopError:
        if self.home is None or not self.home.has_ended():
            return foreign_loop(what)
        message = (
            f"Cannot {what} this bus: the event loop that it was started on has ended without "
            f"bus.stop(). Stop it with `await bus.stop()`, then start it again."
        )
        return ForeignLoopError(message)

    def require_set_up(self, what: str) -> None:
        """Raise if chains are built already; they are built anew at each start.

        Raises:
            BusStateError: The bus runs, or is stopping.
        """
        if self.phase not in (Phase.NEW, Phase.STOPPED):
            message = f"{what} must be set before the bus is started, or once it has stopped."
            raise BusStateError(message)

    def begin_run(self, runtime: Runtime) -> None:
        """Belong to this event loop and take calls, as before the first start."""
        self.home = runtime
        self.threads = ThreadPool(self.config.max_threads, runtime)
        self.phase = Phase.NEW
        self.accepting = True
        self.refresh()

    def open_run(self, runtime: Runtime) -> None:
        """Begin to deliver, first what was published before."""
        self.runtime = runtime
        self.phase = Phase.RUNNING
        self.forget_unstarted()
        self.refresh()
        for (registration, session_id), lane in list(self.lanes.items()):
            session = None if session_id is None else self.sessions.get(session_id)
            lane.open(self.chain(registration, session))

    def make_handlers(self) -> None:
        """Make the bus's own handler classes that are made once."""
        for session_id, registration in self.registry.registrations():
            if session_id is None:
                _make(registration, self.providers)

    def leave_home(self) -> None:
        """Belong to no event loop."""
        self.home = None
        self.threads = ThreadPool(self.config.max_threads)
        self.refresh()

    def end_run(self) -> None:
        """Keep nothing that belongs to the event loop: the next start may be on another."""
        self.runtime = None
        self.lanes = {}  # a handler that does not end keeps its own
        self.streams.clear()
        self.refresh()
        self.work_ended()

    def faults(self) -> list[Fault]:
        """Everything that is wrong with the set-up."""
        found: list[Fault] = []
        registrations: list[Registration] = []
        for session_id, registration in self.registry.registrations():
            session = self.sessions.get(session_id) if session_id is not None else None
            providers = self.providers if session is None else session.providers
            found += self._faults_of(registration, providers)
            registrations.append(registration)
        written = self.bus.writes_names()
        return found + registration_faults(registrations, names_are_written=written)

    def _faults_of(self, registration: Registration, providers: Providers) -> list[Fault]:
        name = registration.name
        found = providers.faults(name, registration.signature.dependencies)
        if registration.source is not None:
            found += providers.faults(name, registration.source.constructor.dependencies)
        if registration.batch:
            found += batch_faults(self.middleware, registration.classes, handler=name)
        return found

    def is_inside_handler(self, frame: Frame | None) -> bool:
        """Whether `frame` was called from a handler of this bus."""
        while frame is not None:
            if frame.owner.bus is self.bus:
                return True
            frame = frame.parent
        return False

    def refuse_inside_handler(self, what: str) -> None:
        """Raise if the caller is a handler of this bus, which would wait for itself."""
        if self.is_inside_handler(current_frame.get()):
            message = (
                f"{what} was called inside a handler of the same bus, or in a task that one "
                f"started, and would wait for that handler to end. Call it from outside."
            )
            raise InsideHandlerError(message)

    # -- what handlers leave behind --------------------------------------------------------

    async def flush(self, frame: Frame) -> None:
        """Publish what a handler emitted, now that it has succeeded."""
        emitted = context_of(frame).emitted
        errors: list[Exception] = []
        while emitted:
            event = emitted.pop(0)
            try:
                receipt = await self.bus.publish(event)
            except Exception as error:
                errors.append(error)  # those behind it are published all the same
                continue
            if not receipt.accepted:
                log.warning(
                    "emitted_event_refused",
                    bus=self.config.name,
                    handler=frame.owner.name,
                    message_type=type(event).__name__,
                    status=receipt.status.value,
                    reason=receipt.reason,
                )
        if len(errors) == 1:
            raise errors[0]
        if errors:
            message = f"{len(errors)} events that {frame.owner.name} emitted were not published"
            raise ExceptionGroup(message, errors)

    def event_failed(self, lane: Lane, message: Any, error: BaseException) -> None:
        """Say that a handler failed: in the log, and as an event if somebody listens."""
        meta = metadata_of(message)
        text = redact_exception(error)
        frame = frame_about(message)
        # Of durable handlers the subscription says so: it knows whether they are called again.
        if not lane.is_durable or self._is_acknowledged(lane, meta.message_id):
            log.error(
                "handler_failed",
                bus=self.config.name,
                handler=lane.name,
                **ids_of(message),
                attempt=1 if frame is None else frame.attempt,
                error=text,
                traceback=error,
            )
        self.lifecycle.tell(
            EventHandlerFailedEvent,
            message,
            lambda: EventHandlerFailedEvent(
                handler=lane.name,
                event_type=type(message).__name__,
                event_id=meta.message_id,
                error_type=type(error).__name__,
                error=text,
            ),
        )
        if not lane.is_durable:  # of those the journal decides whether it was the last attempt
            self.observers.failed(lane.registration, lane.session_id, message, error)
        self.bus.event_failed(lane, message, error)

    def _is_acknowledged(self, lane: Lane, message_id: str) -> bool:
        """Tell if a durable handler has acknowledged an event that it failed on."""
        return self.durability is not None and self.durability.subscribers.is_acknowledged(
            lane.registration, message_id
        )


def _make(registration: Registration, providers: Providers) -> None:
    """Make a handler class that is made once, for its errors to show now."""
    source = registration.source
    if source is not None and providers.makes_once(source):
        providers.made(source, registration.name)
