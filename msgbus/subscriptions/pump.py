"""The work that needs the journal: read, settle what failed, try again, write the cursor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

from msgbus.handlers.delivery import Poison
from msgbus.journal import operations as op
from msgbus.subscriptions.agenda import Agenda
from msgbus.subscriptions.desk import ParkedError
from msgbus.subscriptions.parking import Parking
from msgbus.subscriptions.shelf import Shelf
from msgbus.subscriptions.verdict import Fate, judge
from msgbus.subscriptions.window import Entry, State
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.journal.records import Record, Scheduled
    from msgbus.runtime.clock import Clock
    from msgbus.subscriptions.desk import Desk
    from msgbus.subscriptions.ledger import Ledger

INFINITY = float("inf")


@final
class Pump:
    """One round after the other, each a few steps; only one task calls it."""

    def __init__(
        self, name: str, desk: Desk, ledger: Ledger, clock: Clock, chance: Callable[[], float]
    ) -> None:
        self._name = name
        self._desk = desk
        self._ledger = ledger
        self._clock = clock
        self._chance = chance
        self._agenda = Agenda(desk, ledger)
        self._shelf = Shelf(desk, ledger)
        self.parking = Parking(ledger)
        desk.parked = self.parking

    @property
    def scheduled(self) -> int:
        """Messages that wait in the schedule only."""
        return self._agenda.count

    async def begin(self, start: int) -> None:
        """Take up the work where it was left.

        Raises:
            CursorError: How far it came cannot be read; to guess would skip messages.
        """
        desk, ledger = self._desk, self._ledger
        cursor = await ledger.begin(start)
        attempts = await ledger.attempts()
        desk.open(
            cursor.offset,
            attempts=attempts,
            recover_until=None if cursor.is_clean else cursor.fetched,
        )
        if desk.config.park_key:
            await self.parking.load()
        await self._agenda.begin()
        if self.scheduled:
            desk.dated_until = await ledger.head()
        if desk.is_recovering or self.scheduled:
            log.info(
                "subscription_recovered",
                subscription=self._name,
                offset=cursor.offset,
                in_flight_until=cursor.fetched,
                scheduled=self.scheduled,
            )

    def forget(self) -> None:
        """Another engine has the schedule now."""
        self._agenda.forget()
        self.parking.clear()

    async def round(self) -> None:
        """Do everything that is to be done now."""
        desk = self._desk
        desk.expire()
        await self._settle()
        if desk.seek_to is not None and not desk.window.in_flight:
            await self._seek(desk.seek_to)
        if not desk.is_held:
            await self._take_due()
            await self._retry()
            await self._fetch()
        if desk.is_flush_due():
            await self._ledger.commit()

    def until_next(self) -> float:
        """Seconds until time alone gives it something to do."""
        if self._desk.is_held:
            return INFINITY
        pause = self._desk.until_next(self._clock.now())
        if not self._desk.has_more_due:
            pause = min(pause, self._agenda.due() - self._clock.time())
        return max(pause, 0.0)

    # -- reading -------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        """Read one page; what failed meanwhile is settled before the next one."""
        desk = self._desk
        await self._shelf.bring_back()
        limit = desk.wanted()
        if not limit or desk.head <= desk.cursor.looked:
            return
        is_single = desk.is_recovering
        size = desk.config.fetch_size if is_single else limit
        records, end = await self._ledger.read(desk.cursor.looked + 1, size)
        if is_single and len(records) > 1:
            records, end = records[:1], records[0].offset
        if end > desk.cursor.looked:
            await self._open(records, end, is_single=is_single)

    async def _open(self, records: list[Record], end: int, *, is_single: bool) -> None:
        """Write that these are handed out, then let them be."""
        desk, ledger = self._desk, self._ledger
        known: set[str] = set()
        if desk.config.idempotent and records:
            known = await ledger.marked(records)
        dates: dict[str, Scheduled] = {}
        if records and records[0].offset <= desk.dated_until:
            dates = await ledger.dates(records)
        fresh = [desk.entry(record) for record in records if record.message_id not in known]
        behind = {entry.offset for entry in fresh if self._is_behind(entry, is_single=is_single)}
        limit = desk.config.retry.max_attempts
        alive = [entry for entry in fresh if entry.stored < limit and entry.offset not in behind]
        try:
            await self._write_opening(fresh, alive, end, is_single=is_single)
        except BaseException:
            # It will be read again, and must find its attempts again.
            desk.attempts.update({entry.offset: entry.stored for entry in fresh if entry.stored})
            raise
        desk.counts.skipped += len(known)
        self._take_in(records, {entry.offset: entry for entry in fresh}, end)
        for entry in fresh:
            date = dates.get(entry.record.message_id)
            if entry.offset in behind:
                self._put_behind(entry, date)
            else:
                self._add(entry, date)
        self._shelf.make_room()
        desk.moved()  # so that the next page is read, if there is room now

    def _is_behind(self, entry: Entry, *, is_single: bool) -> bool:
        """Whether it is to wait on the shelf for others of its key."""
        window = self._desk.window
        return window.is_held_up(entry.key) if is_single else window.is_on_shelf(entry.key)

    def _put_behind(self, entry: Entry, date: Scheduled | None) -> None:
        if date is not None:
            # Only the first of a key is ever put off, unless keys were changed meanwhile.
            self._agenda.found()
            self._desk.unschedule.append(entry.record.message_id)
        self._desk.shelve(entry)

    async def _write_opening(
        self, entries: list[Entry], alive: list[Entry], end: int, *, is_single: bool
    ) -> None:
        ledger = self._ledger
        if not entries:
            return
        if self._desk.config.is_at_most_once:
            await ledger.commit([ledger.passed(end)])
            return
        operations = [ledger.opened(entries[-1].offset)]
        again = [entry for entry in alive if is_single or entry.stored]
        if again:
            operations.append(ledger.counted(again))
        await ledger.commit(operations)
        for entry in again:
            entry.stored = entry.attempt

    def _take_in(self, records: list[Record], fresh: dict[int, Entry], end: int) -> None:
        desk = self._desk
        cursor = desk.cursor
        for record in records:
            entry = fresh.get(record.offset)
            if desk.config.is_at_most_once:
                cursor.pass_by(record.offset)
            else:
                cursor.read(record.offset)
            if entry is None:
                cursor.done(record.offset)
        cursor.pass_by(end)
        if desk.config.is_at_most_once:
            cursor.written(cursor.position if fresh else cursor.persisted)

    def _add(self, entry: Entry, date: Scheduled | None) -> None:
        desk = self._desk
        due = None
        if date is not None:
            self._agenda.found()
            entry.is_scheduled = True
            entry.attempt = max(entry.attempt, date.attempt)
            due = self._clock.now() + max(date.due - self._clock.time(), 0.0)
        desk.admit(entry, due=due)

    # -- failures ------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Decide on everything that failed."""
        desk, ledger = self._desk, self._ledger
        letters: list[Entry] = []
        dated: list[tuple[Entry, float, Fate]] = []
        await self._unpark()
        for entry in desk.window.failed():
            fate, delay = self._judge(entry)
            if fate is Fate.DEAD_LETTER:
                letters.append(entry)
            elif fate in {Fate.KEEP_DATE, Fate.SCHEDULE}:
                dated.append((entry, delay, fate))
            else:
                self._settle_here(entry, fate, delay)
        if not letters and not dated:
            return
        operations = [each for entry in letters for each in ledger.letter(entry)]
        now = self._clock.time()
        operations += [
            op.Schedule(ledger.retry(entry, now + delay, entry.attempt + 1))
            for entry, delay, _ in dated
        ]
        gone = [*letters, *(entry for entry, _, fate in dated if fate is Fate.SCHEDULE)]
        await ledger.commit(operations, done={entry.offset for entry in gone if not entry.is_retry})
        for entry in letters:
            self._bury(entry)
        for entry, delay, fate in dated:
            self._put_off(entry, now + delay, fate)

    async def _unpark(self) -> None:
        """Let go on what was held back for dead letters that are there no more."""
        window = self._desk.window
        held = [entry for entry in window.failed() if isinstance(entry.error, ParkedError)]
        for key in {entry.key for entry in held if entry.key is not None}:
            await self.parking.look(key)
        for entry in held:
            if entry.key not in self.parking and entry.state is State.FAILED:
                window.ready(entry)

    def _judge(self, entry: Entry) -> tuple[Fate, float]:
        desk = self._desk
        assert entry.error is not None  # noqa: S101 (set by `fail`)
        if entry.key is not None and entry.key in desk.parked:
            return Fate.DEAD_LETTER, 0.0
        return judge(desk.config, desk.dispatcher.mode, entry, entry.error, self._chance())

    def _settle_here(self, entry: Entry, fate: Fate, delay: float) -> None:
        desk = self._desk
        if fate is Fate.RETRY:
            self._log_retry(entry, delay)
            entry.attempt += 1
            desk.window.wait(entry, self._clock.now() + delay)
        elif fate is Fate.BLOCK:
            desk.window.wait(entry, INFINITY)
            desk.blocked = entry
            log.error("subscription_blocked", **self._about(entry))
        else:
            desk.counts.dropped += 1
            self._end_runner(entry)
            log.error("subscription_dropped_message", **self._about(entry))
            desk.leave(entry)

    def _bury(self, entry: Entry) -> None:
        desk = self._desk
        desk.counts.dead_lettered += 1
        if desk.config.park_key and entry.key is not None:
            self.parking.add(entry.key)
        self._end_runner(entry)
        if isinstance(entry.error, ParkedError):
            log.warning("subscription_key_parked", **self._about(entry))
        else:
            log.error("subscription_dead_lettered", **self._about(entry))
        if entry.state is not State.DONE:  # its late ack may have come just now
            desk.leave(entry)

    def _put_off(self, entry: Entry, due: float, fate: Fate) -> None:
        desk = self._desk
        if entry.state is State.DONE:
            desk.unschedule.append(entry.record.message_id)
            return
        self._log_retry(entry, due - self._clock.time())
        entry.attempt += 1
        if fate is Fate.KEEP_DATE:
            entry.is_scheduled = True
            desk.window.wait(entry, self._clock.now() + due - self._clock.time())
            return
        self._end_runner(entry)
        entry.is_scheduled = False  # the schedule is to keep it
        desk.leave(entry)
        self._agenda.add(self._ledger.retry(entry, due, entry.attempt))

    def _log_retry(self, entry: Entry, delay: float) -> None:
        log.warning("subscription_retry_scheduled", delay=delay, **self._about(entry))

    def _about(self, entry: Entry) -> dict[str, object]:
        """Name the message, the attempt and the error for a log event."""
        record, error = entry.record, entry.error
        assert error is not None  # noqa: S101 (set by `fail`)
        return {
            "subscription": self._name,
            "offset": entry.offset,
            "message_type": record.name,
            "message_id": record.message_id,
            "correlation_id": record.correlation_id,
            "session_id": record.session_id,
            "attempt": entry.attempt,
            "error": redact_exception(error),
            "traceback": error,
        }

    # -- other tries ---------------------------------------------------------------------------

    async def _take_due(self) -> None:
        """Bring scheduled messages back whose time has come."""
        desk = self._desk
        room = desk.room()
        for _ in range(room):
            scheduled = await self._agenda.take(self._clock.time())
            if scheduled is None:
                break
            entry = desk.entry(scheduled.record)
            entry.attempt = scheduled.attempt
            entry.is_retry = entry.is_scheduled = True
            desk.window.add(entry, due=self._clock.now())
        desk.has_more_due = self._agenda.due() <= self._clock.time()

    async def _retry(self) -> None:
        """Let those whose pause is over go out again, once the journal knows of it."""
        desk, ledger = self._desk, self._ledger
        due = desk.window.due(self._clock.now())
        if not due:
            return
        now = self._clock.time()
        placed = [entry for entry in due if not entry.is_retry]
        operations: list[op.Operation] = [
            # If this process ends in the middle of it, the try after this one is due.
            op.Schedule(ledger.retry(entry, now, entry.attempt + 1))
            if not desk.config.is_at_most_once
            else ledger.undated(entry)
            for entry in due
            if entry.is_retry
        ]
        operations += [ledger.undated(entry) for entry in placed if entry.is_scheduled]
        if placed:
            operations.append(ledger.counted(placed))
        await ledger.commit(operations)
        for entry in due:
            self._go_again(entry)

    def _go_again(self, entry: Entry) -> None:
        if entry.state is not State.WAITING:
            return  # a late ack came while the journal was written
        entry.stored = entry.attempt
        entry.is_scheduled = entry.is_retry and not self._desk.config.is_at_most_once
        self._end_runner(entry)
        self._desk.window.ready(entry)

    def _end_runner(self, entry: Entry) -> None:
        """A try that ran out of time must not run beside the next one."""
        if entry.runner is not None:
            entry.runner.task.cancel()
            entry.runner = None

    # -- the end, and elsewhere ----------------------------------------------------------------

    async def close(self) -> None:
        """Write the last cursor; what was passed in advance and has not begun is handed back."""
        desk, ledger = self._desk, self._ledger
        operations: list[op.Operation] = []
        if desk.config.is_at_most_once:
            now = self._clock.time()
            for entry in desk.window.entries():
                if not entry.token and not entry.is_scheduled:
                    operations.append(op.Schedule(ledger.retry(entry, now, entry.attempt)))
                elif entry.state is State.IN_FLIGHT and desk.config.on_poison is Poison.DEAD_LETTER:
                    entry.error = TimeoutError("It was in hand when the subscription was closed.")
                    operations += ledger.letter(entry)
        await ledger.commit(operations, close=True)

    async def _seek(self, offset: int) -> None:
        desk, ledger = self._desk, self._ledger
        back: list[op.Operation] = []
        for entry in desk.window.entries():
            self._end_runner(entry)
            if entry.is_retry:
                retry = ledger.retry(entry, self._clock.time(), entry.attempt)
                back.append(op.Schedule(retry))
                self._agenda.add(retry)
            elif entry.is_scheduled:
                desk.unschedule.append(entry.record.message_id)
            desk.window.remove(entry)
        await ledger.commit(back)
        await ledger.seek(offset)
        dated_until = max(desk.dated_until, desk.cursor.looked)
        desk.open(offset)
        desk.dated_until = dated_until if self.scheduled else 0
        desk.seek_to = None
        self._agenda.look_again()
