"""The bus's own events: built only when somebody subscribes to them by name.

They are never about each other, nor about anything that one of their handlers caused, so
a failing error handler cannot feed itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

from msgbus.bus.lanes.queue import admit, check_overflow, refusing
from msgbus.errors import QueueFullError
from msgbus.messages.message import Message, SystemEvent, fix, peek
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusCore


class CommandStartedEvent(SystemEvent):
    """A command is about to be handled."""

    command_type: str
    command_id: str
    handler: str


class CommandResultEvent(SystemEvent):
    """A command was handled, well or not."""

    command_type: str
    command_id: str
    handler: str
    success: bool
    error: str | None = None
    duration: float


class SessionStartEvent(SystemEvent):
    """A session has begun; `session_id` says which."""


class SessionEndEvent(SystemEvent):
    """A session has ended, and its handlers are gone; `session_id` says which."""

    error: str | None = None
    """What its body raised, secrets removed."""

    leftovers: int = 0
    """(event, handler) pairs of its own handlers that were not finished in time."""


class EventHandlerFailedEvent(SystemEvent):
    """An event handler failed on one event."""

    handler: str
    event_type: str
    event_id: str
    error_type: str
    error: str


class EventRefusedEvent(SystemEvent):
    """An event could not be published, and no publisher was there to be told."""

    event_type: str
    event_id: str
    reason: str


class RetryScheduledEvent(SystemEvent):
    """A handler failed, and will be tried again."""

    handler: str
    message_type: str
    failed_id: str
    attempt: int
    """The try that failed, from 1."""

    delay: float
    """Seconds until the next one."""

    error: str


class CircuitOpenedEvent(SystemEvent):
    """A circuit breaker has opened: what it guards is left alone for a while."""

    circuit: str
    reason: str
    retry_after: float


class CircuitHalfOpenedEvent(SystemEvent):
    """A circuit breaker lets a few calls through, to see whether they succeed."""

    circuit: str


class CircuitClosedEvent(SystemEvent):
    """A circuit breaker has closed: what it guards works again."""

    circuit: str
    reason: str


class DeadLetteredEvent(SystemEvent):
    """A message was given up, and became a dead letter; `causation_id` is the message's."""

    letter_id: str
    message_type: str
    handler: str
    error_type: str
    error: str
    attempts: int
    reason: str
    answered: bool


class DeadLetterDroppedEvent(SystemEvent):
    """A dead letter fell out of a full store: its message is lost."""

    letter_id: str
    message_type: str
    handler: str
    error: str
    reason: str


class DeadLetterRefusedEvent(SystemEvent):
    """A dead letter was not taken by its store: its message is lost."""

    letter_id: str
    message_type: str
    handler: str
    error: str
    reason: str


COMMAND_EVENTS: Final = frozenset({CommandStartedEvent, CommandResultEvent})


@final
class LifecyclePort:
    """Publishes system events, if anybody wants them."""

    def __init__(self, core: BusCore) -> None:
        self._core = core
        self._wanted: dict[type[SystemEvent], bool] = {}

    def forget(self) -> None:
        """The handlers have changed."""
        self._wanted = {}
        in_sessions = self._core.sessions_observe_commands > 0
        on_bus = self.wants(CommandStartedEvent) or self.wants(CommandResultEvent)
        self._core.observe_commands(in_sessions or on_bus)

    def wants(self, event_type: type[SystemEvent]) -> bool:
        """Whether anybody subscribes to this class on the bus itself."""
        wanted = self._wanted.get(event_type)
        if wanted is None:
            wanted = bool(self._core.registry.event_handlers(event_type, None))
            self._wanted[event_type] = wanted
        return wanted

    def tell(
        self,
        event_type: type[SystemEvent],
        about: Message | None,
        build: Callable[..., SystemEvent],
        *,
        session_id: str | None = None,
    ) -> None:
        """Publish what `build` gives, caused by `about`, unless nobody would hear it.

        Never waits and never raises: a bus must not fail for want of a listener's room.
        """
        if about is not None:
            meta = peek(about)
            if isinstance(about, SystemEvent) or (meta is not None and meta.from_system):
                return
            session_id = None if meta is None else meta.session_id
        if self._is_elsewhere_or_over(
            lambda: self.tell(event_type, about, build, session_id=session_id)
        ):
            return
        session = self._core.sessions.get(session_id) if session_id is not None else None
        if session is None and not self.wants(event_type):
            return
        plan = self._core.event_plan(event_type, session)
        if not plan.queues:
            return
        event = build()
        fix(event, about, session_id=session_id)
        full = refusing(plan.queues)
        try:
            check_overflow(plan.queues)
        except QueueFullError:
            full = plan.queues[0]
        if full is not None:
            plan.counts.rejected += 1
            log.warning(
                "lifecycle_event_refused", message_type=event_type.__name__, handler=full.name
            )
            return
        plan.count_admitted()
        self._core.observers.publishing(event)
        admit(plan.queues, plan.items(event))
        self._core.observers.published(event, plan.receipt)

    def _is_elsewhere_or_over(self, tell: Callable[[], None]) -> bool:
        """Whether nothing can be told here: then it is told on the loop of the bus, if any."""
        core = self._core
        if core.home is not None and core.is_elsewhere():
            core.home.call_soon(tell)
            return True
        return core.runtime is None and not core.accepting
