"""What registering an event handler gives back: a handle to look at it and end it."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from msgbus.core import BusCore
    from msgbus.lanes import Lane
    from msgbus.messages import Message
    from msgbus.registrations import Registration


@final
class Subscription:
    """One event handler on one bus or session."""

    def __init__(self, core: BusCore, registration: Registration, session_id: str | None) -> None:
        self._core = core
        self._registration = registration
        self._session_id = session_id

    @property
    def name(self) -> str:
        """The handler's name in logs and metrics."""
        return self._registration.name

    @property
    def message_type(self) -> type[Message]:
        """The event class it is registered for; for topics the class it takes."""
        return self._registration.message_type

    @property
    def pattern(self) -> str | None:
        """The topics it is registered for, if it is not for a class."""
        pattern = self._registration.pattern
        return None if pattern is None else pattern.pattern

    @property
    def pending(self) -> int:
        """Events that wait for the handler or are being handled."""
        lane = self._lane
        return 0 if lane is None else len(lane.queue.items) + lane.in_hand

    @property
    def _lane(self) -> Lane | None:
        return self._core.lanes.get((self._registration, self._session_id))

    def pause(self) -> None:
        """Take no more events from the queue for now; the queue goes on filling."""
        self._made_lane().pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._made_lane().resume()

    def _made_lane(self) -> Lane:
        session = None
        if self._session_id is not None:
            session = self._core.sessions.get(self._session_id)
        return self._core.lane_of(self._registration, session)

    async def close(self, timeout: float | None = 30.0) -> int:
        """Stop taking new events, finish what is queued, and unregister the handler.

        Returns:
            How many events were abandoned because `timeout` ran out; usually 0.
        """
        self._core.registry.remove(self._registration, self._session_id)
        lane = self._lane
        if lane is None:
            return 0
        return await self._core.retire([lane], timeout)

    def __repr__(self) -> str:
        return f"<Subscription {self.name} on {self._registration.target_name}>"
