"""Publishing system events, which are built only if a handler subscribes to them.

There are none about system events, nor about messages that their handlers send, so a failing
error handler cannot trigger itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

from msgbus.bus.lanes.queue import admit, check_overflow, refusing
from msgbus.errors import QueueFullError
from msgbus.messages.message import Message, SystemEvent, fix, peek
from msgbus.messages.system_events import CommandResultEvent, CommandStartedEvent
from msgbus.telemetry.logging import log

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState


@final
class SystemEventPublisher:
    """Publishes system events that have a subscriber."""

    def __init__(self, state: BusState) -> None:
        self._state = state
        self.wanted: dict[type[SystemEvent], bool] = {}
        """Whether a handler of the bus subscribes, by class; as far as that is known."""

    def forget(self) -> None:
        """Look up subscribers again: the handlers have changed."""
        self.wanted = {}
        in_sessions = self._state.sessions_observe_commands > 0
        on_bus = self.wants(CommandStartedEvent) or self.wants(CommandResultEvent)
        self._state.observe_commands(in_sessions or on_bus)

    def wants(self, event_type: type[SystemEvent]) -> bool:
        """Whether a handler of the bus subscribes to this class."""
        wanted = self.wanted.get(event_type)
        if wanted is None:
            wanted = bool(self._state.registry.event_handlers(event_type, None))
            self.wanted[event_type] = wanted
        return wanted

    def publish(
        self,
        event_type: type[SystemEvent],
        about: Message | None,
        build: Callable[..., SystemEvent],
        *,
        session_id: str | None = None,
    ) -> None:
        """Publish what `build` returns, caused by `about`, if it has a subscriber.

        Never waits and never raises: if a queue is full, the event is dropped and logged.
        """
        if about is not None:
            meta = peek(about)
            if isinstance(about, SystemEvent) or (meta is not None and meta.from_system):
                return
            session_id = None if meta is None else meta.session_id
        if self._is_deferred_or_over(
            lambda: self.publish(event_type, about, build, session_id=session_id)
        ):
            return
        session = self._state.sessions.get(session_id) if session_id is not None else None
        if session is None and not self.wants(event_type):
            return
        plan = self._state.event_plan(event_type, session)
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
        self._state.observers.publishing(event)
        admit(plan.queues, plan.items(event))
        self._state.observers.published(event, plan.receipt)

    def _is_deferred_or_over(self, publish: Callable[[], None]) -> bool:
        """Whether to publish nothing here: on another thread it is left to the bus's loop."""
        state = self._state
        if state.bound_runtime is not None and state.is_foreign_thread():
            state.bound_runtime.call_soon(publish)
            return True
        return state.runtime is None and not state.accepting
