"""Sessions: handlers, dependencies and headers for the time of one job."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

import anyio
from typing_extensions import override
from uuid_utils import uuid7

from msgbus.bus.monitoring.handler_info import HandlerInfo, session_handlers
from msgbus.bus.plans import TopicPlans
from msgbus.bus.protocols import E, SendingMethods
from msgbus.bus.streams import EventStream, Expectation, Where
from msgbus.bus.subscription import Subscription
from msgbus.errors import DuplicateSessionError, SessionClosedError
from msgbus.handlers.injection import Provider, Providers
from msgbus.handlers.registration_methods import RegistrationMethods
from msgbus.messages.frame import current_frame, fix_in_frame
from msgbus.messages.message import Event, Message, require_command, require_event
from msgbus.messages.receipts import SessionReport
from msgbus.messages.system_events import COMMAND_EVENTS, SessionEndEvent, SessionStartEvent
from msgbus.runtime.resources import Resources
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from msgbus.bus.bus import MessageBus
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.lanes.lane import Lane
    from msgbus.bus.plans import CommandPlan, EventPlan
    from msgbus.handlers.registration import Registration
    from msgbus.handlers.registry import HandlerRegistry
    from msgbus.messages.receipts import PublishSummary, Undelivered


F = TypeVar("F", bound=Callable[..., Any])


def _in_session(method: F, check: Callable[[object], None]) -> F:
    """Call a method of the bus with a message of the session."""
    name = method.__name__

    @wraps(method)
    async def send(self: BusSession, message: Message, /, *args: Any, **options: Any) -> Any:
        check(message)
        stamp = self._stamp  # pyright: ignore[reportPrivateUsage]
        stamp(message, options.get("headers"), options.get("topic"))
        return await getattr(self.bus, name)(message, *args, **options)

    return cast("F", send)


@final
class _StampedEvents:
    """Async iterator that makes each event one of a session."""

    def __init__(self, stamped: Callable[[Event], Event], events: AsyncIterator[Event]) -> None:
        self._stamped = stamped
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        return self._stamped(await anext(self._events))


@final
class BusSession(SendingMethods, RegistrationMethods[Subscription]):
    """Scope of one job on a bus. Made by `bus.session(...)` and used with `async with`.

    Its handlers get only messages of this session: its command handlers come before the
    bus's, its event handlers run beside them. Messages sent through it, and everything
    they cause, carry its id. Leaving it drains its queues, then removes its handlers.
    """

    def __init__(
        self,
        state: BusState,
        session_id: str | None,
        *,
        registries: Sequence[HandlerRegistry] = (),
        provide: Mapping[Any, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._state = state
        self.session_id = session_id or str(uuid7())
        self.headers = dict(headers or {})
        providers = Providers(provide, parent=state.providers)
        self._own = SessionState(state, self.session_id, providers)
        self._registries = registries
        self._phase = "new"
        self.report: SessionReport | None = None
        """What was not finished, once the session has ended."""

    @property
    def bus(self) -> MessageBus:
        """The bus that made it."""
        return cast("MessageBus", self._state.bus)

    @property
    def is_open(self) -> bool:
        """Whether it accepts messages."""
        return self._phase == "open"

    async def __aenter__(self) -> Self:
        if self._phase != "new":
            message = f"Session {self.session_id!r} was entered before; make a new one."
            raise SessionClosedError(message)
        if self.session_id in self._state.sessions:
            message = (
                f"A session {self.session_id!r} is still live on this bus. "
                f"Leave it first, or let the bus choose an id: bus.session()."
            )
            raise DuplicateSessionError(message)
        self._state.require_open("open a session on")
        self._phase = "open"
        self._state.add_session(self, self._own)
        try:
            for registry in self._registries:
                self.include(registry)
            if self._state.runtime is not None:
                await self._own.providers.open(self._state.runtime, self._own.resources)
        except BaseException:
            await self.close()
            raise
        self._state.system_events.publish(
            SessionStartEvent, None, SessionStartEvent, session_id=self.session_id
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(error=error)

    async def close(self, *, error: BaseException | None = None) -> SessionReport:
        """Drain its queues, remove its handlers, and report what was not finished.

        A second call returns the same report.
        """
        if self._phase not in ("closing", "closed"):
            self._phase = "closing"
            # Shielded: a cancelled job must still remove its handlers.
            with anyio.CancelScope(shield=True):
                await self._close(error)
        return self.report or SessionReport()

    async def _close(self, error: BaseException | None) -> None:
        delayed: list[Undelivered] = []

        def unregister() -> None:
            delayed.extend(self._state.event_publisher.session_ends(self._own))
            self._own.unregister()

        abandoned, leftovers = await self._state.retire(
            self._own.lanes(), self._state.config.session_timeout, unregister
        )
        abandoned += len(delayed)
        self.report = SessionReport(abandoned, (*leftovers, *delayed))
        self._phase = "closed"
        self._report_refused(delayed)
        for stream in list(self._state.streams):
            if stream.session_id == self.session_id:
                stream.end()
        self._own.forget_handlers()
        if abandoned:
            log.warning(
                "session_ended_with_leftovers",
                bus=self._state.config.name,
                session_id=self.session_id,
                abandoned=abandoned,
            )
        for failure in await self._own.resources.close():
            log.error(
                "session_resource_failed",
                bus=self._state.config.name,
                session_id=self.session_id,
                error=redact_exception(failure),
                traceback=failure,
            )
        self._state.system_events.publish(
            SessionEndEvent,
            None,
            lambda: SessionEndEvent(
                error=None if error is None else redact_exception(error), leftovers=abandoned
            ),
            session_id=self.session_id,
        )

    def _report_refused(self, delayed: Sequence[Undelivered]) -> None:
        handlers: dict[int, list[str]] = {}
        for one in delayed:
            handlers.setdefault(id(one.event), []).append(one.handler)
        for event in {id(one.event): one.event for one in delayed}.values():
            reason = (
                f"session {self.session_id!r} ended before it was due, and with it "
                f"{', '.join(handlers[id(event)])}."
            )
            self._state.event_publisher.report_refused(event, reason)

    # -- handlers --------------------------------------------------------------------------

    def _register(self, registration: Registration, *, replace: bool = False) -> Subscription:
        self._require_open()
        subscription = self._state.subscribe(registration, self.session_id, replace=replace)
        self._own.add(subscription.registration)
        return subscription

    def include(self, registry: HandlerRegistry) -> None:
        """Register all handlers of `registry` for this session."""
        for _, registration in registry.registrations():
            self._register(registration)

    def handlers(self, *, inherited: bool = False) -> tuple[HandlerInfo, ...]:
        """List the session's own handlers, at this moment.

        Args:
            inherited: Also the handlers of the bus that get this session's messages: all but
                those of commands that the session handles itself.
        """
        return session_handlers(self._state, self._own, inherited=inherited)

    # -- messages --------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._phase in ("open", "closing"):
            return
        state = "has ended" if self._phase == "closed" else "was not entered"
        message = (
            f"Session {self.session_id!r} {state}. "
            f"Use it inside `async with bus.session(...) as session:`."
        )
        raise SessionClosedError(message)

    def _stamped(self, event: Event) -> Event:
        require_event(event)
        self._stamp(event)
        return event

    def _stamp(
        self,
        message: Message,
        headers: Mapping[str, str] | None = None,
        topic: str | None = None,
    ) -> None:
        """Make `message` one of this session.

        Raises:
            SessionClosedError: The session is not open.
            SessionMismatchError: The message belongs to another.
        """
        self._require_open()
        fix_in_frame(
            message,
            current_frame.get(),
            session_id=self.session_id,
            headers={**self.headers, **(headers or {})},
            topic=topic,
        )

    execute = _in_session(SendingMethods.execute, require_command)
    publish = _in_session(SendingMethods.publish, require_event)
    request = _in_session(SendingMethods.request, require_command)
    enqueue = _in_session(SendingMethods.enqueue, require_command)

    @override
    async def publish_many(
        self, events: Iterable[Event] | AsyncIterable[Event], *, chunk: int = 1000
    ) -> PublishSummary:
        self._require_open()
        if isinstance(events, AsyncIterable):
            events = _StampedEvents(self._stamped, aiter(events))
        elif not isinstance(events, Message):  # one message is iterable too; the bus refuses it
            events = map(self._stamped, events)
        return await self.bus.publish_many(events, chunk=chunk)

    @override
    def stream(self, event_type: type[E] | str, *, buffer: int = 1000) -> EventStream[E]:
        return EventStream(
            self._state, event_type, buffer, self._register, session_id=self.session_id
        )

    @override
    def expect(
        self,
        event_type: type[E] | str,
        *,
        where: Where[E] | None = None,
        timeout: float | None = None,
    ) -> Expectation[E]:
        return Expectation(
            self._state, event_type, where, timeout, self._register, session_id=self.session_id
        )

    async def settled(self, timeout: float | None = None) -> None:
        """Wait until this session's own handlers have no work left.

        Raises:
            SettleTimeoutError: Something still runs after `timeout`; or, without one, only
                handlers that are paused have work left. They are named.
            InsideHandlerError: Called inside a handler, which would wait for itself.
            BusNotStartedError: Events are queued, but the bus was never started.
        """
        self._state.refuse_inside_handler("session.settled()")
        if self._state.busy(self._own.lanes(), commands=False):
            self._state.require_runtime()
        await self._state.settle(self._own.lanes, timeout, commands=False)

    def __repr__(self) -> str:
        return f"<BusSession {self.session_id} {self._phase}>"


@final
class SessionState:
    """Internal state of a session: handlers, plans and resources. Users see `BusSession`."""

    def __init__(self, state: BusState, session_id: str, providers: Providers) -> None:
        self._state = state
        self.session_id = session_id
        self.providers = providers
        self.resources = Resources(f"session {session_id}")
        self.attachments: dict[Registration, Any] = {}
        """What the bus stores for each of its handlers, and drops with the session."""
        self._own: dict[Registration, None] = {}
        self._kept: dict[Provider, Any] = {}
        self._keeping: anyio.Lock | None = None
        self._version = -1
        self._commands: dict[type, CommandPlan] = {}
        self._events: dict[type, EventPlan] = {}
        self._topics = TopicPlans()

    # -- handlers --------------------------------------------------------------------------

    def add(self, registration: Registration) -> None:
        """Add a handler of the session's own."""
        self._own[registration] = None
        self._state.sessions_observe_commands += _observes_commands(registration)

    def remove(self, registration: Registration) -> None:
        """Remove a handler that was closed before the session."""
        if self._own.pop(registration, self) is None:
            self._state.sessions_observe_commands -= _observes_commands(registration)

    def owns(self, registration: Registration) -> bool:
        """Whether the handler was registered on this session."""
        return registration in self._own

    def lanes(self) -> list[Lane]:
        """List the lanes of its own handlers."""
        lanes = self._state.lanes
        keys = [(one, self.session_id) for one in self._own]
        return [lanes[key] for key in keys if key in lanes]

    def unregister(self) -> None:
        """Unregister its handlers from the bus."""
        self._forget_if_older(-1)
        self._state.registry.drop_session(self.session_id)
        self._state.drop_session(self.session_id)
        self._state.sessions_observe_commands -= sum(map(_observes_commands, self._own))

    def forget_handlers(self) -> None:
        """Drop what was stored for its handlers."""
        self._own.clear()
        self.attachments.clear()

    # -- plans -----------------------------------------------------------------------------

    def command_plans(self, version: int) -> dict[type, CommandPlan]:
        """Get cached plans, as of this version of the registry."""
        self._forget_if_older(version)
        return self._commands

    def event_plans(self, version: int) -> dict[type, EventPlan]:
        """Get cached plans, as of this version of the registry."""
        self._forget_if_older(version)
        return self._events

    def topic_plans(self, version: int) -> TopicPlans:
        """Get cached plans of events with a topic of their own, as of this version."""
        self._forget_if_older(version)
        return self._topics

    def _forget_if_older(self, version: int) -> None:
        if self._version != version:
            self._version = version
            self.flush_counts()
            self._commands = {}
            self._events = {}
            self._topics.forget()

    def flush_counts(self) -> None:
        """Add what its plans have counted to the counters of the bus."""
        for plan in self._events.values():
            plan.flush_counts()
        self._topics.flush_counts()

    # -- resources -------------------------------------------------------------------------

    async def keep(self, provider: Provider, make: Callable[[], Any]) -> Any:
        """Get the session's own instance of a dependency provided `per_session`."""
        if self._keeping is None:
            self._keeping = anyio.Lock()
        async with self._keeping:
            if provider not in self._kept:
                runtime = self._state.require_runtime()
                self._kept[provider] = await self.resources.enter(runtime, make)
        return self._kept[provider]


def _observes_commands(registration: Registration) -> bool:
    return not COMMAND_EVENTS.isdisjoint(registration.classes)
