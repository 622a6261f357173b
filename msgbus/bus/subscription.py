"""What registering an event handler gives back: a handle to look at it and end it."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from msgbus.errors import BusStateError

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusCore
    from msgbus.bus.lanes.lane import Lane
    from msgbus.handlers.delivery import StartAt
    from msgbus.handlers.registration import Registration
    from msgbus.messages.message import Message
    from msgbus.subscriptions.progress import Progress
    from msgbus.subscriptions.subscription import DurableSubscription


@final
class Subscription:
    """One event handler on one bus or session.

    `seek`, `progress` and `caught_up` are for durable ones, which read the journal.
    """

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
        """The event class it is registered for; for topics the class it takes.

        Of several classes, the nearest that all of them are below.
        """
        return self._registration.message_type

    @property
    def pattern(self) -> str | None:
        """The topics it is registered for, if it is not for a class."""
        pattern = self._registration.pattern
        return None if pattern is None else pattern.pattern

    @property
    def is_durable(self) -> bool:
        """Whether it reads the journal, and goes on where it was after a restart."""
        return self._core.is_durable(self._registration)

    @property
    def registration(self) -> Registration:
        """The handler and all that was said of it; for the bus's parts."""
        return self._registration

    @property
    def pending(self) -> int:
        """Events that wait for the handler or are being handled."""
        lane = self._lane
        return 0 if lane is None else len(lane.queue.items) + lane.in_hand

    @property
    def _lane(self) -> Lane | None:
        return self._core.lanes.get((self._registration, self._session_id))

    def pause(self) -> None:
        """Take no more events from the queue for now; the queue goes on filling.

        A durable one takes no more from the journal. Either goes on at the next start of the
        bus, if not before.
        """
        if self.is_durable:
            self._durable().pause()
        else:
            self._made_lane().pause()

    def resume(self) -> None:
        """Go on after `pause`, or try a blocked message once more."""
        if self.is_durable:
            self._durable().resume()
        else:
            self._made_lane().resume()

    async def seek(self, start: StartAt | int) -> None:
        """Go on at another place in the journal, back or forth.

        Raises:
            BusStateError: It is not durable, or does not work in this process.
        """
        await self._durable().seek(start)

    def progress(self) -> Progress:
        """How far it has come in the journal.

        Raises:
            BusStateError: It is not durable, or the bus has not started.
        """
        return self._durable().progress()

    async def caught_up(self, offset: int | None = None, timeout: float | None = None) -> int:
        """Return when everything up to `offset`, or to the head as it is now, is done.

        Raises:
            SettleTimeoutError: It took longer than `timeout`.
            BusStateError: It is not durable, or ended meanwhile.
        """
        return await self._durable().caught_up(offset, timeout)

    def _durable(self) -> DurableSubscription:
        durability = self._core.durability
        handler = None if durability is None else durability.subscribers.of(self._registration)
        if handler is None:
            message = f"{self.name} is not durable: it has no place in a journal."
            raise BusStateError(message)
        if handler.subscription is None:
            message = f"{self.name} reads the journal once the bus is started."
            raise BusStateError(message)
        return handler.subscription

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
        core = self._core
        core.require_home("close a handler of")
        core.registry.remove(self._registration, self._session_id)
        if core.durability is not None:
            await core.durability.subscribers.forget(self._registration, timeout)
        lane = self._lane
        abandoned = 0
        if lane is not None:
            abandoned, _ = await core.retire([lane], timeout)
        session = None if self._session_id is None else core.sessions.get(self._session_id)
        if session is not None:
            session.disown(self._registration)
        return abandoned

    def __repr__(self) -> str:
        return f"<Subscription {self.name} on {self._registration.target_name}>"
