"""The tasks of a subscription in this process: one that works, one that listens, and runners."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import anyio

from msgbus.errors import JournalClosedError, LeaseLostError
from msgbus.runtime.event_loop import Runtime, Task, Waker, current_runtime
from msgbus.subscriptions.runner import Runner
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.journal.port import Journal
    from msgbus.runtime.clock import Clock
    from msgbus.subscriptions.desk import Desk
    from msgbus.subscriptions.pump import Pump
    from msgbus.subscriptions.tenure import Tenure
    from msgbus.subscriptions.watchdog import Watchdog

LOOKS_PER_TTL: Final = 5
"""How often a standby looks at the lease while it could run out."""

SHORTEST_REST: Final = 0.001


@final
class Office:
    """Works while it has the lease, and stands by while another has it."""

    def __init__(
        self,
        name: str,
        journal: Journal,
        clock: Clock,
        desk: Desk,
        pump: Pump,
        watchdog: Watchdog,
        tenure: Tenure,
        on_round: Callable[[int], object],
        on_stop: Callable[[], object],
    ) -> None:
        self._name = name
        self._journal = journal
        self._clock = clock
        self._desk = desk
        self._pump = pump
        self._watchdog = watchdog
        self._tenure = tenure
        self._on_round = on_round
        """Called after each round with what the journal knows to be done."""
        self._on_stop = on_stop
        """Called when it ends, or loses the lease."""
        self._first = 0
        self._runtime: Runtime | None = None
        self._waker: Waker | None = None
        self._tasks: list[Task] = []
        self._runners: dict[Runner, None] = {}
        self._has_news = False
        self._is_lost = False
        self._close_by: float | None = None
        self._ended: anyio.Event | None = None
        self.is_ended = False
        self.left_in_hand = 0
        self.last_error: str | None = None

    @property
    def is_started(self) -> bool:
        """Whether `start` was called, and succeeded."""
        return self._runtime is not None

    def wake(self) -> None:
        """Look at once whether there is something to do."""
        self._has_news = True
        if self._waker is not None:
            self._waker.wake()

    # -- begin and end -------------------------------------------------------------------------

    async def start(self, first: int) -> None:
        """Take the lease if it is free, and begin; a new cursor is written behind `first`."""
        self._first = first
        if await self._tenure.take():
            try:
                await self._take_over()
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._tenure.release()
                raise
        else:
            log.warning("subscription_standby", subscription=self._name, owner=self._tenure.owner)
        self._runtime = current_runtime()
        self._waker = self._runtime.waker()
        self._ended = anyio.Event()
        self._tasks = [
            self._runtime.spawn(self._work, name=f"msgbus subscription {self._name}"),
            self._runtime.spawn(self._listen, name=f"msgbus news for {self._name}"),
        ]

    async def close(self, timeout: float | None) -> int:
        """Finish what is in hand, in `timeout` seconds; how much was left."""
        if self._ended is None:
            self.is_ended = True
            return 0
        self._desk.is_closing = True
        until = float("inf") if timeout is None else self._clock.now() + timeout
        self._close_by = until if self._close_by is None else min(self._close_by, until)
        self.wake()
        await self._ended.wait()
        return self.left_in_hand

    def abort(self) -> None:
        """End at once and write nothing."""
        for task in self._tasks:
            task.cancel()
        self._end()

    def _end(self) -> None:
        self.is_ended = True
        self._cancel_runners()
        for task in self._tasks[1:]:
            task.cancel()
        if self._ended is not None:
            self._ended.set()
        self._on_stop()

    def _cancel_runners(self) -> None:
        for runner in list(self._runners):
            runner.task.cancel()
        self._runners.clear()

    # -- work ----------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            while not self.is_ended:
                self._has_news = False
                await self._try_turn()
                if not self.is_ended:
                    await self._rest()
        finally:
            self._end()

    async def _try_turn(self) -> None:
        try:
            await self._turn()
        except LeaseLostError:
            self.lease_lost()
        except JournalClosedError as error:
            self._note(error)
            self.is_ended = True
        except Exception as error:  # a full disk may have room again
            self._note(error)
            self.is_ended = self._is_time_up()
            if not self.is_ended:
                # Whatever the news: what failed now would only fail again.
                await self._clock.sleep(self._desk.config.watchdog)

    async def _turn(self) -> None:
        desk = self._desk
        if self._is_lost:
            self._hand_over()
        if self._tenure.lease is None:
            await self._stand_by()
            return
        await self._watchdog.look_if_due()
        await self._pump.round()
        self._feed()
        self._on_round(desk.cursor.persisted)
        if desk.is_closing and (not desk.window.in_flight or self._is_time_up()):
            await self._leave()

    def _feed(self) -> None:
        """Begin a delivery for everybody who is free."""
        assert self._runtime is not None  # noqa: S101 (set by `start`)
        while (entry := self._desk.next()) is not None:
            runner = Runner(self._desk, self._runtime, entry, self._runners)
            self._runners[runner] = None
            runner.task = self._runtime.spawn(runner.run, name=f"msgbus delivery of {self._name}")

    async def _rest(self) -> None:
        assert self._waker is not None  # noqa: S101 (set by `start`)
        assert self._runtime is not None  # noqa: S101 (set by `start`)
        if self._has_news:
            await self._runtime.checkpoint()
            return
        with self._clock.cancel_after(max(self._pause(), SHORTEST_REST)):
            await self._waker.wait()

    def _pause(self) -> float:
        now = self._clock.now()
        if self._tenure.lease is None:
            return self._desk.config.lease_ttl / LOOKS_PER_TTL
        pause = min(self._watchdog.due - now, self._pump.until_next())
        return pause if self._close_by is None else min(pause, self._close_by - now)

    async def _listen(self) -> None:
        """Hear of new messages, from this process and others."""
        desk = self._desk
        while not self.is_ended:
            try:
                head = await self._journal.wait(desk.head)
            except JournalClosedError:
                return
            except Exception as error:  # the watchdog finds what is missed meanwhile
                self._note(error)
                await self._clock.sleep(desk.config.watchdog)
                continue
            if head > desk.head:
                desk.head = head
                self.wake()

    def _note(self, error: Exception) -> None:
        self._desk.counts.errors += 1
        self.last_error = redact_exception(error)
        log.error("subscription_failed", subscription=self._name, error=self.last_error)

    def _is_time_up(self) -> bool:
        return self._close_by is not None and self._clock.now() >= self._close_by

    async def _leave(self) -> None:
        """Close in peace: nothing is in hand, or there is no time left for it."""
        self.left_in_hand = len(self._desk.window.in_flight)
        self._cancel_runners()
        await self._pump.close()
        await self._tenure.release()
        self.is_ended = True

    # -- the lease -----------------------------------------------------------------------------

    async def _take_over(self) -> None:
        await self._pump.begin(self._first)
        await self._tenure.keep()
        log.info("subscription_active", subscription=self._name, epoch=self._tenure.epoch)

    async def _stand_by(self) -> None:
        desk = self._desk
        if desk.is_closing:
            self.is_ended = True
            return
        if await self._tenure.take():
            await self._take_over()
            self.wake()
            return
        cursor = await self._journal.cursor(self._name)
        self._watchdog.head = await self._journal.head()
        if cursor is not None:
            desk.open(cursor.offset)
            self._on_round(cursor.offset)

    def lease_lost(self) -> None:
        """Another engine has it."""
        self._is_lost = True
        self.wake()

    def _hand_over(self) -> None:
        """Stop: what is in hand here will be refused by the journal."""
        self._is_lost = False
        self._cancel_runners()
        self._desk.drop()
        self._pump.forget()
        self._tenure.lose()
        self._on_stop()
        log.warning("subscription_lease_lost", subscription=self._name)
