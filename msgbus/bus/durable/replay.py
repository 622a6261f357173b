"""Replay of recorded events to one handler: `await bus.replay(start, to=handler)`.

A bounded subscription without a cursor: nothing is appended and nothing is acknowledged. The
report has the outcome of each event, and the offset to continue at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import anyio.lowlevel

from msgbus.bus.durable.replay_target import ReplayTarget
from msgbus.errors import Refusal, StoredMessageError
from msgbus.handlers.delivery import StartAt
from msgbus.handlers.filters import passes
from msgbus.journal.codec import RawMessage
from msgbus.journal.records import Order, Selection
from msgbus.messages.frame import ReplayFrame, context_of, current_frame
from msgbus.messages.message import Event
from msgbus.runtime.token_bucket import TokenBucket
from msgbus.subscriptions.progress import start_offset
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import LaneCounts

if TYPE_CHECKING:
    from datetime import datetime
    from typing import Any

    from msgbus.bus.bus_state import BusState
    from msgbus.bus.durable.hub import DurableBus
    from msgbus.bus.subscription import Subscription
    from msgbus.journal.ports import Scan
    from msgbus.journal.records import Record

PAGE: Final = 1000
"""Records that are read at a time."""

LISTED: Final = 1000
"""Failures that a report lists; all of them are counted."""

TURN: Final = 100
"""Calls of the handler after which other tasks get a turn, if they did not anyway."""

NEWS: Final = 1.0
"""Seconds between two calls of `progress`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFailure:
    """An event of the past that the handler did not handle."""

    offset: int
    error: str
    """Text of the error, redacted."""
    name: str | None = None
    """Its wire name; none if its record is damaged."""
    message_id: str | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Result of a replay, or its progress."""

    handler: str
    start: int
    """The first offset that was looked at; higher than asked for if older ones are gone."""
    last: int
    """The last offset that was to be looked at."""
    next: int
    """The offset to continue at: `bus.replay(report.next, ...)`."""
    handled: int = 0
    """Events that the handler has handled."""
    refused: int = 0
    """Of these, those for which it raised a `Refusal`."""
    filtered: int = 0
    """Events that the handler's own filter turned away."""
    failed: int = 0
    """Events that the handler has failed on."""
    unreadable: int = 0
    """Events of unknown classes, events that do not fit their class, and damaged records."""
    emitted: int = 0
    """Events that the handler emitted; published only with `emit=True`."""
    failures: tuple[ReplayFailure, ...] = ()
    """Everything that failed or was unreadable, in order; the first thousand."""
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all of it was looked at."""
        return self.next > self.last


@final
class ReplayLane:
    """Owner of the frames of a replay, instead of a lane."""

    __slots__ = ("backing_off", "bus", "counts", "host", "name", "registration")

    def __init__(self, host: BusState, target: ReplayTarget) -> None:
        self.bus = host.bus
        self.host = host
        self.name = target.registration.name
        self.registration = target.registration
        self.backing_off: list[Event] = []
        self.counts = LaneCounts()  # of nobody: a replay says what became of it by itself

    def waiting_for_circuit(self, _events: Sequence[Event]) -> AbstractContextManager[None]:
        """Hold nobody back: nothing waits behind a replay."""
        return nullcontext()


@final
class Replay:
    """One replay.

    Args:
        hub: Whose journal it is.
        target: The handler, and the messages that it gets.
        start: The first offset.
        last: The last offset.
        emit: Whether what the handler emits is published.
        stop: Whether the first failure ends it.
        rate: Events a second, at most.
        progress: Called now and then, and at the end.
    """

    def __init__(
        self,
        hub: DurableBus,
        target: ReplayTarget,
        start: int,
        last: int,
        *,
        emit: bool,
        stop: bool,
        rate: float | None,
        progress: Callable[[ReplayReport], object] | None,
    ) -> None:
        self._hub = hub
        self._clock = hub.state.clock
        self._target = target
        self._lane = ReplayLane(hub.state, target)
        self._call = target.call
        self._start = start
        self._next = start
        self._last = last
        self._emit = emit
        self._stop = stop
        self._is_stopped = False
        self._progress = progress
        self._began = self._told = self._clock.now()
        self._rate = TokenBucket(rate, 1, self._began)
        self._calls = 0
        self._handled = self._refused = self._filtered = 0
        self._failed = self._unreadable = self._emitted = 0
        self._failures: list[ReplayFailure] = []

    def report(self) -> ReplayReport:
        """Return the result so far."""
        return ReplayReport(
            handler=self._lane.name,
            start=self._start,
            last=self._last,
            next=self._next,
            handled=self._handled,
            refused=self._refused,
            filtered=self._filtered,
            failed=self._failed,
            unreadable=self._unreadable,
            emitted=self._emitted,
            failures=tuple(self._failures),
            seconds=self._clock.now() - self._began,
        )

    async def run(self) -> ReplayReport:
        """Replay everything, in the order of the journal."""
        selection = Selection(
            names=self._target.names, matches=self._target.wants, order=Order.NONE
        )
        while self._next <= self._last and not self._is_stopped:
            first = self._next  # `_show` moves it on
            scan = await self._hub.journal.read(first - 1, PAGE, selection)
            await self._show(scan)
            if not self._is_stopped:
                self._next = min(max(scan.upto, first) + 1, self._last + 1)
            await self._report_progress()
        self._told = float("-inf")
        await self._report_progress()
        return self.report()

    # -- reading ---------------------------------------------------------------------------------

    async def _show(self, scan: Scan) -> None:
        waiting: list[tuple[Record, Event]] = []
        for record in scan.records:
            offset = record if isinstance(record, int) else record.offset
            if offset > self._last or self._is_stopped:
                break
            event = self._event(record)
            if isinstance(event, Event):
                assert not isinstance(record, int)  # noqa: S101 (that is a failure)
                waiting.append((record, event))
            if isinstance(event, ReplayFailure) or len(waiting) == self._target.size:
                await self._give(waiting)
                waiting = []
            if isinstance(event, ReplayFailure) and not self._is_stopped:
                self._unreadable += 1
                self._note(event)
        if not self._is_stopped:
            await self._give(waiting)

    def _event(self, record: Record | int) -> Event | ReplayFailure:
        if isinstance(record, int):
            return ReplayFailure(offset=record, error="The record is damaged or missing.")
        return self._decode(record)

    def _decode(self, record: Record) -> Event | ReplayFailure:
        try:
            event = self._hub.codec.decode(record)
        except StoredMessageError as error:
            return _failure(record, redact_exception(error))
        if isinstance(event, RawMessage) or not isinstance(event, Event):
            return _failure(record, "This process has no event class of that name: import it.")
        return event

    def _note(self, failure: ReplayFailure) -> None:
        if len(self._failures) < LISTED:
            self._failures.append(failure)
        if self._stop:
            self._is_stopped = True
            self._next = failure.offset

    # -- handling --------------------------------------------------------------------------------

    async def _give(self, shown: list[tuple[Record, Event]]) -> None:
        """Show the handler one event, or one list."""
        if not shown:
            return
        wanted = await self._wanted(shown)
        if wanted:
            error = await self._try([event for _, event in wanted])
            if error is None:
                self._handled += len(wanted)
            elif len(wanted) == 1:
                self._fail(wanted[0][0], error)
            else:
                await self._give_singly(wanted)
        if not self._is_stopped:
            self._next = shown[-1][0].offset + 1
        await self._report_progress()

    async def _wanted(self, shown: list[tuple[Record, Event]]) -> list[tuple[Record, Event]]:
        """What the handler's own filter lets through, at its rate."""
        wanted: list[tuple[Record, Event]] = []
        for record, event in shown:
            await self._pace()
            if await self._passes(record, event):
                wanted.append((record, event))
            elif self._is_stopped:
                break
        return wanted

    async def _give_singly(self, shown: list[tuple[Record, Event]]) -> None:
        """Find the bad one of a list that failed."""
        for record, event in shown:
            error = await self._try([event])
            if error is None:
                self._handled += 1
            else:
                self._fail(record, error)
                if self._is_stopped:
                    return

    def _fail(self, record: Record, error: Exception) -> None:
        self._failed += 1
        self._note(_failure(record, redact_exception(error)))

    async def _passes(self, record: Record, event: Event) -> bool:
        predicate = self._target.registration.filter
        if predicate is None:
            return True
        try:
            wanted = await passes(predicate, event)
        except Exception as error:
            self._fail(record, error)
            return False
        self._filtered += not wanted
        return wanted

    async def _try(self, events: list[Event]) -> Exception | None:
        """Call the handler; the error it failed with, if it did."""
        is_list = self._target.registration.batch
        frame = ReplayFrame(events, self._lane, is_list=is_list)
        token = current_frame.set(frame)
        self._calls += 1
        try:
            await self._call(list(events) if is_list else events[0])
            if frame.context is not None:
                await self._take_emitted(frame)
        except Refusal:
            self._refused += len(events)
        except Exception as error:
            return error
        finally:
            current_frame.reset(token)
        if self._calls % TURN == 0:
            await anyio.lowlevel.checkpoint()
        return None

    async def _take_emitted(self, frame: ReplayFrame) -> None:
        emitted = context_of(frame).emitted
        self._emitted += len(emitted)
        if self._emit:
            await self._hub.state.flush(frame)

    # -- time ------------------------------------------------------------------------------------

    async def _pace(self) -> None:
        while (pause := self._rate.wait(self._clock.now())) > 0:
            await self._clock.sleep(pause)
        self._rate.take(self._clock.now())

    async def _report_progress(self) -> None:
        now = self._clock.now()
        if self._progress is None or now - self._told < NEWS:
            return
        self._told = now
        said = self._progress(self.report())
        if inspect.isawaitable(said):
            await said


def _failure(record: Record, error: str) -> ReplayFailure:
    return ReplayFailure(
        offset=record.offset, error=error, name=record.name, message_id=record.message_id
    )


async def replay_history(
    hub: DurableBus,
    start: StartAt | int | datetime,
    to: str | Subscription | Callable[..., Any],
    *,
    until: int | datetime | None,
    names: Collection[str] | None,
    topic: str | None,
    emit: bool,
    stop: bool,
    rate: float | None,
    progress: Callable[[ReplayReport], object] | None,
) -> ReplayReport:
    """Replay recorded events to one handler; see `bus.replay`."""
    hub.state.require_own_thread("replay on")
    hub.state.require_runtime()
    begin, end = StartAt.of(start), None if until is None else StartAt.of(until)
    target = ReplayTarget(hub, to, names=names, topic=topic)
    # What was executed before is in the journal before it is read.
    await hub.recorder.flush()
    last = await hub.journal.head()
    if end is not None:
        bound = end.offset
        if end.time is not None:
            bound = await hub.journal.offset_at(end.time) - 1
        last = min(last, last if bound is None else bound)
    first = max(await start_offset(hub.journal, begin) + 1, await hub.journal.first())
    replay = Replay(hub, target, first, last, emit=emit, stop=stop, rate=rate, progress=progress)
    return await replay.run()
