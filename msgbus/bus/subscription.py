"""`Subscription`: inspect, pause, resume and close a registered event handler."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from msgbus.errors import BusStateError

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.durable.handlers import DurableHandler
    from msgbus.bus.lanes.lane import Lane
    from msgbus.handlers.delivery import StartAt
    from msgbus.handlers.registration import Registration
    from msgbus.messages.message import Message
    from msgbus.subscriptions.progress import Progress


@final
class Subscription:
    """One event handler on one bus or session.

    `seek`, `progress` and `caught_up` are for durable ones, which read the journal.
    """

    def __init__(self, state: BusState, registration: Registration, session_id: str | None) -> None:
        self._state = state
        self._registration = registration
        self._session_id = session_id

    @property
    def name(self) -> str:
        """The handler's name in logs and metrics."""
        return self._registration.name

    @property
    def message_type(self) -> type[Message]:
        """The event class it is registered for; for topics the class it takes.

        Of several classes, the nearest that all of them are below.
        """
        return self._registration.message_type

    @property
    def pattern(self) -> str | None:
        """The topic pattern it is registered for, if not for a class."""
        pattern = self._registration.pattern
        return None if pattern is None else pattern.pattern

    @property
    def is_durable(self) -> bool:
        """Whether it reads the journal, and resumes at its cursor after a restart."""
        return self._state.is_durable(self._registration)

    @property
    def registration(self) -> Registration:
        """The handler and its options; for the parts of the bus."""
        return self._registration

    @property
    def pending(self) -> int:
        """Events queued for the handler or in flight."""
        lane = self._lane
        return 0 if lane is None else len(lane.queue.items) + lane.in_flight

    @property
    def _lane(self) -> Lane | None:
        return self._state.lanes.get((self._registration, self._session_id))

    def pause(self) -> None:
        """Stop taking events from the queue, which keeps filling, until `resume`.

        A durable one takes no more from the journal. Either resumes at the next start of the
        bus, if not before.
        """
        if self.is_durable:
            self._durable().pause()
        else:
            self._made_lane().pause()

    def resume(self) -> None:
        """Continue after `pause`; else let parked keys go. Retry a blocked message once."""
        if self.is_durable:
            self._durable().resume()
        else:
            self._made_lane().resume()

    async def seek(self, start: StartAt | int) -> None:
        """Move the cursor to another position in the journal, back or forth.

        Raises:
            BusStateError: It is not durable, or not active in this process.
        """
        await self._durable().seek(start)

    def progress(self) -> Progress:
        """Get its position in the journal, its lag and its counts.

        Raises:
            BusStateError: It is not durable, or the bus has not started.
        """
        return self._durable().require_progress()

    async def caught_up(self, offset: int | None = None, timeout: float | None = None) -> int:
        """Wait until everything up to `offset`, or to the current head, is acknowledged.

        Raises:
            SettleTimeoutError: It took longer than `timeout`.
            BusStateError: It is not durable, or it ended during the wait.
        """
        return await self._durable().caught_up(offset, timeout)

    def _durable(self) -> DurableHandler:
        durability = self._state.durability
        handler = None if durability is None else durability.handlers.of(self._registration)
        if handler is None:
            message = f"{self.name} is not durable: it has no cursor in a journal."
            raise BusStateError(message)
        return handler

    def _made_lane(self) -> Lane:
        session = None
        if self._session_id is not None:
            session = self._state.sessions.get(self._session_id)
        return self._state.lane_of(self._registration, session)

    async def close(self, timeout: float | None = 30.0) -> int:
        """Unregister the handler, and drain its queue.

        Returns:
            How many events were abandoned because `timeout` ran out; usually 0.
        """
        state = self._state
        state.require_own_thread("close a handler of")
        state.registry.remove(self._registration, self._session_id)
        if state.durability is not None:
            await state.durability.handlers.forget(self._registration, timeout)
        lane = self._lane
        abandoned = 0
        if lane is not None:
            abandoned, _ = await state.retire([lane], timeout)
        session = None if self._session_id is None else state.sessions.get(self._session_id)
        if session is not None:
            session.remove(self._registration)
        return abandoned

    def __repr__(self) -> str:
        return f"<Subscription {self.name} on {self._registration.target_name}>"
