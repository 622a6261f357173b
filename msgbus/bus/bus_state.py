"""The state that the parts of one bus share: handlers, plans, lanes and counters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from msgbus.bus.drain import Quiescence
from msgbus.bus.lanes.lane import Lane
from msgbus.bus.lanes.queue import BoundedEventQueue
from msgbus.bus.monitoring.depth import DepthWatch
from msgbus.bus.phases import Phase
from msgbus.bus.plans import CommandPlan, EventPlan, TopicPlans
from msgbus.bus.subscription import Subscription
from msgbus.bus.system_events import SystemEventPublisher
from msgbus.errors import ConfigurationError, Fault, MissingHandlerError
from msgbus.handlers.injection import Call, bind
from msgbus.handlers.observers import BusObserver, Observers
from msgbus.handlers.registration import Registration, registration_faults
from msgbus.messages.frame import Frame, context_of, frame_handling
from msgbus.messages.message import Message, SystemEvent, ids_of, metadata_of
from msgbus.messages.system_events import EventHandlerFailedEvent
from msgbus.middleware.chain import MiddlewareEntry, Per, batch_faults, build_chain, with_timeout
from msgbus.runtime.forks import tell_after_fork
from msgbus.runtime.threads import ThreadPool
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import BusCounters

if TYPE_CHECKING:
    from msgbus.bus.assembly import Assembly
    from msgbus.bus.commands import CommandRunner
    from msgbus.bus.config import BusConfig
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.bus.events import EventPublisher
    from msgbus.bus.protocols import IMessageBus
    from msgbus.bus.requests import Requests
    from msgbus.bus.session import BusSession, SessionState
    from msgbus.bus.streams import EventMatcher, EventStream
    from msgbus.handlers.injection import Providers
    from msgbus.handlers.registry import IRegistry
    from msgbus.runtime.clock import Clock
    from msgbus.runtime.event_loop import Runtime


@final
class BusState(Quiescence):
    """Internal state of a bus. Users see `MessageBus`."""

    def __init__(
        self,
        bus: IMessageBus,
        config: BusConfig,
        registry: IRegistry,
        providers: Providers,
        clock: Clock,
    ) -> None:
        super().__init__(clock, BusCounters(config.histogram_every))
        self.bus = bus
        """For handlers that ask for it, and to publish what they emit."""
        self.config = config
        self.registry = registry
        self.providers = providers
        self.middleware: list[MiddlewareEntry] = []
        self.observers = Observers()
        self.sessions: dict[str, SessionState] = {}
        """The live sessions, by id."""
        self.open_sessions: dict[str, BusSession] = {}
        """The same, as users see them."""
        self.system_events = SystemEventPublisher(self)
        self.assembly: Assembly
        self.command_runner: CommandRunner
        self.event_publisher: EventPublisher
        self.requests: Requests
        self.lanes: dict[tuple[Registration, str | None], Lane] = {}
        """By handler and, for those of a session, its id."""
        self.finished_before_drain = 0
        """Pairs that were finished when the bus began to stop."""
        self.sessions_observe_commands = 0
        """Handlers of sessions that subscribe to system events about commands."""
        self.streams: set[EventStream[Any] | EventMatcher[Any]] = set()
        """Open streams and expectations; they end with the bus or with their session."""
        self.version = 0
        """Incremented by every change, so that sessions drop plans that are out of date."""
        self.commands: dict[type, CommandPlan] = {}
        self.events: dict[type, EventPlan] = {}
        self.plain_events: dict[type, EventPlan] = {}
        """The same plans, for the fast path of `publish`; empty while an observer is active."""
        self.topics = TopicPlans()
        """Plans of events published under a topic other than their class's."""
        self.threads = ThreadPool(config.max_threads)
        self.durability: DurableBus | None = None
        """Everything about the journal, if the bus has one."""
        self.depth_watch = DepthWatch(config.name, config.max_depth)
        self.unstarted: list[BoundedEventQueue] | None = None
        """Queues with events published before the first start."""
        registry.watch(self.refresh)
        tell_after_fork(self)

    def forked(self) -> None:
        """Refuse everything from now on, if it was started: that is the parent's bus."""
        if self.bound_runtime is not None:
            self.is_forked, self.accepting = True, False
            self.runtime, self.phase = None, Phase.STOPPED
            self.refresh()

    # -- plans ---------------------------------------------------------------------------

    def refresh(self) -> None:
        """Drop all plans: the registry, the middleware or the phase has changed.

        A plan is never altered, only replaced: a dispatch in progress keeps its own.
        """
        self.version += 1
        for plan in self.events.values():
            plan.flush_counts()
        self.topics.forget()
        self.commands.clear()
        self.events.clear()
        self.plain_events.clear()
        self.system_events.forget()

    def flush_counts(self) -> None:
        """Add the counts of live plans to the counters."""
        for plan in self.events.values():
            plan.flush_counts()
        self.topics.flush_counts()
        for session in self.sessions.values():
            session.flush_counts()

    def command_plan(
        self, command_type: type[Message], session: SessionState | None
    ) -> CommandPlan:
        """Get the plan of a command type, made at its first use.

        Raises:
            MissingHandlerError: It has no handler.
        """
        plans = self.commands if session is None else session.command_plans(self.version)
        plan = plans.get(command_type)
        if plan is None:
            session_id = None if session is None else session.session_id
            registration = self.registry.command_handler(command_type, session_id)
            if registration is None:
                raise MissingHandlerError(command_type, session_id=session_id)
            owns = session is not None and session.owns(registration)
            counts = self.counters.command(*registration.stats_key(in_session=owns))
            call = self.chain(registration, session)
            plan = CommandPlan(self, registration, call, counts, session_id if owns else None)
            if self.accepting:
                plans[command_type] = plan
        return plan

    def event_plan(
        self, event_type: type[Message], session: SessionState | None, topic: str | None = None
    ) -> EventPlan:
        """Get the plan of an event type; `topic` if it is published under one of its own."""
        if topic is not None:
            return self._topic_plan(event_type, session, topic)
        plans = self.events if session is None else session.event_plans(self.version)
        plan = plans.get(event_type)
        if plan is None:
            plan = self._make_event_plan(event_type, session, None)
            if self.accepting:
                plans[event_type] = plan
                if session is None and not self.observers.active:
                    self.plain_events[event_type] = plan
        return plan

    def _topic_plan(
        self, event_type: type[Message], session: SessionState | None, topic: str
    ) -> EventPlan:
        plans = self.topics if session is None else session.topic_plans(self.version)
        plan = plans.get(event_type, topic)
        if plan is None:
            plan = self._make_event_plan(event_type, session, topic)
            if self.accepting:
                plans.keep(event_type, topic, plan)
        return plan

    def _make_event_plan(
        self, event_type: type[Message], session: SessionState | None, topic: str | None
    ) -> EventPlan:
        session_id = None if session is None else session.session_id
        if topic is None:
            handlers = self.registry.event_handlers(event_type, session_id)
        else:
            handlers = self.registry.event_handlers(event_type, session_id, topic)
        counts = self.counters.event(event_type.__name__)
        if self.durability is None or issubclass(event_type, SystemEvent):
            lanes = [self.lane_of(registration, session) for registration in handlers]
            return EventPlan(lanes, counts, is_kept=self.accepting)
        here = [one for one in handlers if not self.durability.is_durable(one)]
        lanes = [self.lane_of(registration, session) for registration in here]
        # Not "kept": on a bus with a journal no event skips the journal on the fast path.
        return EventPlan(lanes, counts, is_kept=False, durable=len(handlers) - len(here))

    def lane_of(self, registration: Registration, session: SessionState | None) -> Lane:
        """Get the lane of a handler, made at its first event; open if the bus runs."""
        own = session if session is not None and session.owns(registration) else None
        session_id = None if own is None else own.session_id
        lane = self.lanes.get((registration, session_id))
        if lane is None:
            queue = BoundedEventQueue(
                registration.name,
                registration.queue or self.config.queue,
                self.clock,
                self.counters.lane(*registration.stats_key(in_session=own is not None)),
            )
            lane = Lane(self, registration, queue, session_id)
            lane.is_retried = self.assembly.is_retried(registration)
            lane.is_durable = self.is_durable(registration)
            if self.runtime is not None:
                lane.open(self.chain(registration, own))
            elif self.phase is Phase.NEW:
                self._remember_unstarted(queue)
            self.lanes[registration, session_id] = lane
        return lane

    def _remember_unstarted(self, queue: BoundedEventQueue) -> None:
        if self.unstarted is None:
            self.unstarted = []
            weakref.finalize(self.bus, _report_never_started, self.config.name, self.unstarted)
        self.unstarted.append(queue)

    def forget_unstarted(self) -> None:
        """Cancel the warning about a bus that was never started."""
        if self.unstarted is not None:
            self.unstarted.clear()

    def chain(self, registration: Registration, session: SessionState | None) -> Call:
        """Build the call of a handler: dependencies, timeout and all middleware."""
        owns = session is not None and session.owns(registration)
        call = self.bound(registration, session.providers if session and owns else None)
        call = self.assembly.assemble(registration, call, session if owns else None)
        return self.observed(registration, call, session if owns else None, "message")

    def bound(self, registration: Registration, providers: Providers | None = None) -> Call:
        """Bind a handler to its dependencies, without middleware."""
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
        self, registration: Registration, call: Call, session: SessionState | None, per: Per
    ) -> Call:
        """Wrap `call` so that observers are notified when it begins and ends."""
        scope = None if session is None else session.session_id
        return self.observers.around(call, registration, scope, per)

    def observe(self, observer: BusObserver) -> None:
        """Notify `observer` of what the bus does, from now on."""
        self.observers.add(observer)
        self._observers_changed()

    def stop_observing(self, observer: BusObserver) -> None:
        """Stop notifying `observer`, except when calls in progress end."""
        self.observers.remove(observer)
        self._observers_changed()

    def _observers_changed(self) -> None:
        self.refresh()
        if self.phase is not Phase.RUNNING:
            return  # lanes get their chains at the start
        for (registration, session_id), lane in self.lanes.items():
            session = None if session_id is None else self.sessions.get(session_id)
            if session is not None or session_id is None:
                lane.invoke = self.chain(registration, session)

    def is_durable(self, registration: Registration) -> bool:
        """Whether a handler reads its events from the journal."""
        return self.durability is not None and self.durability.is_durable(registration)

    def wrap(self, registration: Registration, call: Call, per: str) -> Call:
        """Wrap `call` in the middleware that runs per attempt, or per message."""
        entries = [entry for entry in self.middleware if entry.per == per]
        return build_chain(
            entries,
            call,
            registration.message_type,
            handler=registration.name,
            batch=registration.batch,
        )

    def limit_time(self, registration: Registration, call: Call) -> Call:
        """Wrap `call` in the handler's own timeout, if it has one."""
        if registration.timeout is None:
            return call
        return with_timeout(call, registration.timeout, registration.name, self.clock)

    def subscribe(
        self, registration: Registration, session_id: str | None = None, *, replace: bool = False
    ) -> Subscription:
        """Register a handler and return its subscription.

        Raises:
            ConfigurationError: The bus runs and a dependency is not provided, or the handler
                cannot be durable.
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
        """Remove a handler at once; events queued for it are abandoned."""
        self.registry.remove(registration, session_id)
        lane = self.lanes.get((registration, session_id))
        if lane is not None:
            lane.detach()
        session = None if session_id is None else self.sessions.get(session_id)
        if session is not None:
            session.remove(registration)

    # -- start and stop --------------------------------------------------------------------

    def bind_to(self, runtime: Runtime) -> None:
        """Bind to an event loop and accept calls, as before the first start."""
        self.bound_runtime = runtime
        self.threads = ThreadPool(self.config.max_threads, runtime)
        self.phase = Phase.NEW
        self.accepting = True
        if self.durability is not None:
            self.durability.reopen()
        self.refresh()

    def begin_run(self, runtime: Runtime) -> None:
        """Begin to deliver, first the events published before the start."""
        self.runtime = runtime
        self.phase = Phase.RUNNING
        self.forget_unstarted()
        self.refresh()
        for (registration, session_id), lane in list(self.lanes.items()):
            session = None if session_id is None else self.sessions.get(session_id)
            lane.open(self.chain(registration, session))

    def make_handlers(self) -> None:
        """Instantiate the bus's handler classes that are made once."""
        for session_id, registration in self.registry.registrations():
            if session_id is None:
                _make(registration, self.providers)

    def unbind(self) -> None:
        """Release the event loop."""
        self.bound_runtime = None
        self.threads = ThreadPool(self.config.max_threads)
        self.refresh()

    def end_run(self) -> None:
        """Drop everything of this event loop: the next start may be on another."""
        self.runtime = None
        self.lanes = {}  # a handler that does not end keeps its lane
        self.streams.clear()
        self.refresh()
        self.notify_idle_waiters()

    def faults(self) -> list[Fault]:
        """List everything that is wrong with the set-up."""
        found: list[Fault] = []
        registrations: list[Registration] = []
        for session_id, registration in self.registry.registrations():
            session = self.sessions.get(session_id) if session_id is not None else None
            providers = self.providers if session is None else session.providers
            found += self._faults_of(registration, providers)
            registrations.append(registration)
        written = self.assembly.writes_names()
        return found + registration_faults(registrations, names_are_written=written)

    def _faults_of(self, registration: Registration, providers: Providers) -> list[Fault]:
        name = registration.name
        found = providers.faults(name, registration.signature.dependencies)
        if registration.source is not None:
            found += providers.faults(name, registration.source.constructor.dependencies)
        if registration.batch:
            found += batch_faults(self.middleware, registration.classes, handler=name)
        return found

    def session_host(self, session_id: str) -> SessionState | None:
        """Get the live session of this id, if there is one."""
        return self.sessions.get(session_id)

    def add_session(self, session: BusSession, state: SessionState) -> None:
        """Add a session that begins."""
        self.sessions[state.session_id] = state
        self.open_sessions[state.session_id] = session

    def drop_session(self, session_id: str) -> None:
        """Remove a session that ends."""
        self.sessions.pop(session_id, None)
        self.open_sessions.pop(session_id, None)

    # -- emitted events and failures -------------------------------------------------------

    async def flush(self, frame: Frame) -> None:
        """Publish the events that a handler emitted, after it has succeeded."""
        emitted = context_of(frame).emitted
        errors: list[Exception] = []
        while emitted:
            event = emitted.pop(0)
            try:
                receipt = await self.bus.publish(event)
            except Exception as error:
                errors.append(error)  # the remaining ones are still published
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

    def may_want(self, event_type: type[SystemEvent]) -> bool:
        """Whether a class of system events may have a subscriber; called in any thread."""
        return bool(self.sessions) or self.system_events.wanted.get(event_type, True)

    def event_failed(self, lane: Lane, message: Any, error: BaseException) -> None:
        """Count a failure of a handler; report it to the log, system events and observers."""
        if lane.is_aborted:
            return  # its events are counted as abandoned
        lane.counts.failed += 1
        text = redact_exception(error)
        frame = frame_handling(message)
        # For durable handlers the subscription logs it: it knows whether there is a retry.
        durability = self.durability
        if (
            durability is None
            or not lane.is_durable
            or durability.is_acknowledged(metadata_of(message).message_id)
        ):
            log.error(
                "handler_failed",
                bus=self.config.name,
                handler=lane.name,
                **ids_of(message),
                attempt=1 if frame is None else frame.attempt,
                error=text,
                traceback=error,
            )
        if self.may_want(EventHandlerFailedEvent):
            self.system_events.publish(
                EventHandlerFailedEvent,
                message,
                lambda: EventHandlerFailedEvent(
                    handler=lane.name,
                    event_type=type(message).__name__,
                    event_id=metadata_of(message).message_id,
                    error_type=type(error).__name__,
                    error=text,
                ),
            )
        # For a durable handler the subscription knows which attempt is the last.
        if self.observers.active and not lane.is_durable:
            self.observers.failed(lane.registration, lane.session_id, message, error)
        self.assembly.event_failed(lane, message, error)


def _make(registration: Registration, providers: Providers) -> None:
    """Instantiate a handler class that is made once, so that its errors show now."""
    source = registration.source
    if source is not None and providers.is_singleton(source):
        providers.singleton(source, registration.name)


def _report_never_started(bus: str, queues: Sequence[BoundedEventQueue]) -> None:
    """Warn that a bus, or the program, ends with events that were never delivered."""
    events = sum(len(queue.items) for queue in queues)
    if events:
        fix = "`async with bus:` or `await bus.start()`"
        log.warning("bus_never_started", bus=bus, events=events, fix=fix)
