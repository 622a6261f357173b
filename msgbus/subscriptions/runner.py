"""One detached task that calls consumers, message after message, as long as there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from msgbus.runtime import Runtime, Task
    from msgbus.subscriptions.desk import Desk
    from msgbus.subscriptions.dispatcher import Consumer
    from msgbus.subscriptions.window import Entry

TURN: Final = 50
"""Messages handled before other tasks get a turn for sure."""


@final
class Runner:
    """Works for whoever's turn it is; ends when there is nothing to hand out."""

    __slots__ = ("_desk", "_entry", "_runners", "_runtime", "task")

    task: Task

    def __init__(self, desk: Desk, runtime: Runtime, entry: Entry, runners: set[Runner]) -> None:
        self._desk = desk
        self._runtime = runtime
        self._entry: Entry | None = entry
        self._runners = runners
        entry.runner = self

    async def run(self) -> None:
        """Deliver until nothing is left to be handed out."""
        turns = 0
        try:
            while self._entry is not None:
                await self._deliver(self._entry)
                turns += 1
                if turns % TURN == 0:
                    await self._runtime.checkpoint()
        finally:
            self._runners.discard(self)

    async def _deliver(self, entry: Entry) -> None:
        consumer = entry.consumer
        assert consumer is not None  # noqa: S101 (set by the hand-out)
        token = entry.token
        error = await self._call(entry, consumer)
        self._entry = None
        if entry.runner is self:
            entry.runner = None
        if self._desk.answer(entry, token, error):
            self._entry = self._desk.next()
            if self._entry is not None:
                self._entry.runner = self

    async def _call(self, entry: Entry, consumer: Consumer) -> Exception | None:
        try:
            await consumer.deliver(entry.record, entry.attempt)
        except Exception as error:
            return error
        except BaseException as error:
            # A handler that lets its own cancellation escape has failed; one that is
            # cancelled from outside, with this task, has not.
            if self._runtime.is_ending(error):
                raise
            return RuntimeError(f"{consumer.name} was cancelled by its own doing.")
        return None
