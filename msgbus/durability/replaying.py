"""History through one handler and no other: `await bus.replay(start, to=handler)`.

Nothing is appended and no cursor moves: it reads the journal from one place to another, and
says what became of each event and where to go on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import anyio.lowlevel

from msgbus.errors import CorruptRecordError, Refusal, StoredMessageError
from msgbus.handlers.filters import passes
from msgbus.journal.codec import RawMessage
from msgbus.journal.records import Kind
from msgbus.messages.frame import ReplayFrame, context_of, current_frame
from msgbus.messages.message import Event
from msgbus.runtime.token_bucket import TokenBucket
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import LaneCounts

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState
    from msgbus.durability.audience import Audience
    from msgbus.durability.hub import Durability
    from msgbus.journal.records import Page, Record

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
    """What was wrong, with secrets removed."""
    name: str | None = None
    """Its wire name; none if its record is damaged."""
    message_id: str | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What became of a replay; the same while it goes on."""

    handler: str
    start: int
    """The first offset that was looked at; higher than asked for if older ones are gone."""
    last: int
    """The last offset that was to be looked at."""
    next: int
    """Where to go on: `bus.replay(report.next, ...)` shows what was not shown yet."""
    handled: int = 0
    """Events that the handler was shown and has handled."""
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
class Stage:
    """Stands where a lane would: what the frames of a replay belong to."""

    __slots__ = ("backing_off", "bus", "counts", "host", "name", "registration")

    def __init__(self, host: BusState, audience: Audience) -> None:
        self.bus = host.bus
        self.host = host
        self.name = audience.registration.name
        self.registration = audience.registration
        self.backing_off: list[Event] = []
        self.counts = LaneCounts()  # of nobody: a replay says what became of it by itself

    def waiting_for_circuit(self, _events: Sequence[Event]) -> AbstractContextManager[None]:
        """Nobody waits behind a replay."""
        return nullcontext()


@final
class Replay:
    """One run through history.

    Args:
        hub: Whose journal it is.
        audience: Who sees it, and what.
        start: The first offset.
        last: The last offset.
        emit: Whether what the handler emits is published.
        stop: Whether the first failure ends it.
        rate: Events a second, at most.
        progress: Called now and then, and at the end.
    """

    def __init__(
        self,
        hub: Durability,
        audience: Audience,
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
        self._audience = audience
        self._stage = Stage(hub.state, audience)
        self._call = audience.call
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
        """How it stands."""
        return ReplayReport(
            handler=self._stage.name,
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
        """Show all of it, in the order of the journal."""
        while self._next <= self._last and not self._is_stopped:
            page = await self._read()
            if page is None:
                continue
            await self._show(page)
            if not self._is_stopped:
                self._next = min(page.next, self._last + 1)
            await self._tell()
        self._told = float("-inf")
        await self._tell()
        return self.report()

    # -- reading ---------------------------------------------------------------------------------

    async def _read(self) -> Page | None:
        """The next records; `None` if the first of them is damaged."""
        journal = self._hub.journal
        try:
            return await journal.read(self._next, PAGE, names=self._audience.names)
        except CorruptRecordError as error:
            if error.offset > self._last:
                self._next = self._last + 1
                return None
            self._next = error.offset
            self._unreadable += 1
            self._note(ReplayFailure(offset=error.offset, error=redact_exception(error)))
            if not self._is_stopped:
                self._next += 1
            return None

    async def _show(self, page: Page) -> None:
        waiting: list[tuple[Record, Event]] = []
        for record in page:
            if record.offset > self._last or self._is_stopped:
                break
            if record.kind is not Kind.EVENT or not self._audience.wants(record):
                continue
            event = self._decode(record)
            if isinstance(event, Event):
                waiting.append((record, event))
            if isinstance(event, ReplayFailure) or len(waiting) == self._audience.size:
                await self._give(waiting)
                waiting = []
            if isinstance(event, ReplayFailure) and not self._is_stopped:
                self._unreadable += 1
                self._note(event)
        if not self._is_stopped:
            await self._give(waiting)

    def _decode(self, record: Record) -> Event | ReplayFailure:
        try:
            event = self._hub.decode(record)
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
        await self._tell()

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
        predicate = self._audience.registration.filter
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
        is_list = self._audience.registration.batch
        frame = ReplayFrame(events, self._stage, is_list=is_list)
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

    async def _tell(self) -> None:
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
