"""One detached task that calls consumers, message after message, as long as there are any."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from msgbus.runtime.event_loop import Runtime, Task
    from msgbus.subscriptions.desk import Desk
    from msgbus.subscriptions.dispatcher import Consumer
    from msgbus.subscriptions.window import Entry

TURN: Final = 50
"""Messages handled before other tasks get a turn for sure."""


@final
class Runner:
    """Works for whoever's turn it is; ends when there is nothing to hand out."""

    __slots__ = ("_begun", "_desk", "_entry", "_runners", "_runtime", "task")

    task: Task

    def __init__(
        self, desk: Desk, runtime: Runtime, entry: Entry, runners: dict[Runner, None]
    ) -> None:
        self._desk = desk
        self._runtime = runtime
        self._runners = runners
        self._take(entry)

    def _take(self, entry: Entry | None) -> None:
        """Have a message in hand; an eager consumer begins with it here and now."""
        self._entry = entry
        self._begun: Awaitable[None] | None = None
        if entry is None:
            return
        entry.runner = self
        consumer = entry.consumer
        if consumer is not None and consumer.is_eager:
            self._begun = consumer.deliver(entry.record, entry.attempt)

    async def run(self) -> None:
        """Deliver until nothing is left to be handed out."""
        desk = self._desk
        turns = 0
        try:
            while self._entry is not None and await self._deliver(self._entry):
                self._entry = None
                turns += 1
                # A handler that never waits would keep its free colleagues from their turn.
                if turns % TURN == 0 or len(desk.dispatcher.consumers) > 1:
                    await self._runtime.checkpoint()
                self._take(desk.next())
        finally:
            self._runners.pop(self, None)

    async def _deliver(self, entry: Entry) -> bool:
        """Call the consumer; whether its place is free for another message."""
        consumer = entry.consumer
        assert consumer is not None  # noqa: S101 (set by the hand-out)
        token = entry.token
        error = await self._call(entry, consumer)
        if entry.runner is self:
            entry.runner = None
        return self._desk.answer(entry, token, error)

    async def _call(self, entry: Entry, consumer: Consumer) -> Exception | None:
        try:
            await (self._begun or consumer.deliver(entry.record, entry.attempt))
        except Exception as error:
            return error
        except BaseException as error:
            # A handler that lets its own cancellation escape has failed; one that is
            # cancelled from outside, with this task, has not.
            if self._runtime.is_ending(error):
                raise
            return RuntimeError(f"{consumer.name} was cancelled by its own doing.")
        return None
