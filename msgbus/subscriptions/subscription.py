"""`DurableSubscription`: an engine, its dispatcher and one or more consumers, as one thing."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Self, final

from msgbus.subscriptions.config import SubscriptionConfig
from msgbus.subscriptions.dispatcher import Deliver, Dispatcher
from msgbus.subscriptions.engine import SubscriptionEngine

if TYPE_CHECKING:
    from msgbus.handlers.delivery import StartAt
    from msgbus.journal.port import Journal
    from msgbus.journal.records import Record
    from msgbus.runtime.clock import Clock
    from msgbus.subscriptions.ledger import OnDeadLetter
    from msgbus.subscriptions.progress import Progress


@final
class DurableSubscription:
    """A named place in a journal, and those who are given what comes behind it.

    `deliver(record, attempt)` handles one record: returning is the ack, raising a failed try.
    """

    def __init__(
        self,
        journal: Journal,
        name: str,
        deliver: Deliver,
        config: SubscriptionConfig | None = None,
        *,
        topic: str | None = None,
        names: Collection[str] | None = None,
        matches: Callable[[Record], bool] | None = None,
        target: str = "",
        clock: Clock | None = None,
        on_stall: Callable[[Progress], object] | None = None,
        on_dead_letter: OnDeadLetter | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.engine = SubscriptionEngine(
            journal,
            name,
            config,
            topic=topic,
            names=names,
            matches=matches,
            target=target,
            clock=clock,
            on_stall=on_stall,
            on_dead_letter=on_dead_letter,
            chance=chance,
        )
        self.dispatcher = Dispatcher(self.engine.config.mode, self.engine)
        self.add_consumer(name, deliver)

    @property
    def name(self) -> str:
        """The name under which the journal knows it."""
        return self.engine.name

    def add_consumer(self, name: str, deliver: Deliver) -> None:
        """Let one more take part, with `max_in_flight` places of its own."""
        limit = self.engine.config.max_in_flight
        self.dispatcher.add_consumer(name, deliver, max_in_flight=limit)

    def remove_consumer(self, name: str) -> bool:
        """Let one go; what it has in hand goes to the others at once."""
        return self.dispatcher.remove_consumer(name)

    async def start(self) -> None:
        """Begin; see `SubscriptionEngine.start`."""
        await self.engine.start()

    async def close(self, timeout: float | None = 30.0) -> int:
        """End in peace; see `SubscriptionEngine.close`."""
        return await self.engine.close(timeout)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def pause(self) -> None:
        """Hand out nothing more for now; what is in hand is finished."""
        self.engine.pause()

    def resume(self) -> None:
        """Go on after `pause`, or try a blocked message once more."""
        self.engine.resume()

    async def seek(self, start: StartAt | int) -> None:
        """Go on at another place; see `SubscriptionEngine.seek`."""
        await self.engine.seek(start)

    async def caught_up(self, offset: int | None = None, timeout: float | None = None) -> int:
        """Return when it has come so far; see `SubscriptionEngine.caught_up`."""
        return await self.engine.caught_up(offset, timeout)

    def progress(self) -> Progress:
        """How it stands."""
        return self.engine.progress()

    def __repr__(self) -> str:
        return f"<DurableSubscription {self.name} {self.engine.standing}>"
