"""All that an active subscription knows, and every step that needs no journal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

from msgbus.errors import Refusal
from msgbus.subscriptions.cursor import SafeCursor
from msgbus.subscriptions.progress import Counts
from msgbus.subscriptions.rate import RateLimit
from msgbus.subscriptions.window import Entry, State, Window

if TYPE_CHECKING:
    from msgbus.clock import Clock
    from msgbus.journal.records import Record
    from msgbus.subscriptions.config import SubscriptionConfig
    from msgbus.subscriptions.dispatcher import Consumer, Dispatcher

INFINITY = float("inf")


@final
class Desk:
    """Cursor, window, rate limit and dispatcher of one tenure: they change together.

    A pure state machine, but for the clock that it reads and the `wake` that it calls when the
    journal has to be asked or told something.
    """

    def __init__(
        self,
        config: SubscriptionConfig,
        dispatcher: Dispatcher,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        self.config = config
        self.dispatcher = dispatcher
        self.counts = Counts()
        self.rate = RateLimit(config.rate_limit, config.burst, clock.now())
        self.clock = clock
        self._wake = wake
        self._key = config.key or _stored_key
        self.head = 0
        """The newest offset that is known."""
        self.is_paused = False
        self.is_closing = False
        self.seek_to: int | None = None
        """Where it is to go as soon as nothing is in flight."""
        self.waiters: list[int] = []
        """Offsets that somebody waits to be passed."""
        self.open(0)

    def open(
        self,
        offset: int,
        *,
        attempts: dict[int, int] | None = None,
        recover_until: int | None = None,
    ) -> None:
        """Begin anew behind `offset`."""
        self.cursor = SafeCursor(offset)
        self.window = Window(self.dispatcher.mode)
        self.attempts = dict(attempts or {})
        self.dated_until = 0
        """Messages up to here may have a date in the schedule."""
        self.has_more_due = False
        """Retries were left in the schedule for want of room."""
        self.recover_until = recover_until
        self.parked: set[str] = set()
        self.marks: list[str] = []
        """Messages to be marked as handled with the next write."""
        self.unschedule: list[str] = []
        """Messages to be taken out of the schedule with the next write."""
        self.blocked: Entry | None = None
        self.dirty_since: float | None = None
        self.active_at = self.clock.now()

    # -- questions -----------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether nothing may go out."""
        return (
            self.is_paused
            or self.is_closing
            or self.seek_to is not None
            or self.blocked is not None
        )

    @property
    def is_recovering(self) -> bool:
        """Whether it is among messages that were in flight at an unclean end."""
        return self.recover_until is not None and self.cursor.position < self.recover_until

    def wanted(self) -> int:
        """How many messages to read now."""
        if self.is_held or not self.dispatcher.consumers:
            return 0
        window, config = self.window, self.config
        if self.is_recovering:
            # One at a time: if the process dies again, it is known of what.
            return 0 if len(window) else 1
        if config.is_at_most_once:
            return self._startable()
        return self.room()

    def room(self) -> int:
        """How many more messages the window should take in now."""
        window, config = self.window, self.config
        if window.ready_count > config.fetch_size // 2:
            return 0
        return max(min(config.fetch_size, config.max_buffered - len(window)), 0)

    def _startable(self) -> int:
        """Messages that would go out at once: a crash may lose no others."""
        held = len(self.window) - len(self.window.in_flight)
        places = self.dispatcher.free
        tokens = self.rate.available(self.clock.now())
        if tokens is not None:
            places = min(places, tokens)
        return max(places - held, 0)

    def has_work(self, head: int) -> bool:
        """Whether a message could go out, or be read, right now."""
        if self.is_held or not self.dispatcher.free or not self.rate.allows(self.clock.now()):
            return False
        if self.window.peek() is not None:
            return True
        return not len(self.window) and head > self.cursor.looked

    def until_next(self, now: float) -> float:
        """Seconds until time alone gives it something to do."""
        pause = self.window.next_due() - now
        if self.config.rate_limit is not None and (self.window.ready_count or self._lacks_tokens()):
            wait = self.rate.wait(now)
            pause = min(pause, wait) if wait > 0 else pause
        return max(pause, 0.0)

    def _lacks_tokens(self) -> bool:
        return self.config.is_at_most_once and self.head > self.cursor.looked

    # -- messages in ---------------------------------------------------------------------------

    def entry(self, record: Record) -> Entry:
        """A record as an entry of the window, with the tries that the journal knows of."""
        return Entry(record, self._key(record), stored=self.attempts.pop(record.offset, 0))

    # -- messages out --------------------------------------------------------------------------

    def next(self) -> Entry | None:
        """Hand out a message, if there is one, somebody is free, and the rate allows it.

        All three are asked before anything is taken, so that neither a message nor a token
        is ever taken in vain.
        """
        now = self.clock.now()
        while not self.is_held:
            entry = self.window.peek()
            if entry is None:
                return None
            if entry.key is not None and entry.key in self.parked:
                self.window.fail(entry, _parked(entry.key))
                self._wake()
                continue
            return self._hand_out(now)
        return None

    def _hand_out(self, now: float) -> Entry | None:
        consumer = self.dispatcher.choose() if self.rate.allows(now) else None
        if consumer is None:
            return None
        self.rate.take(now)
        entry = self.window.take(consumer, now + (self.config.ack_timeout or INFINITY))
        self.counts.delivered += 1
        if entry.token > 1 or entry.attempt > 1:
            self.counts.redelivered += 1
        self.active_at = now
        return entry

    # -- answers -------------------------------------------------------------------------------

    def answer(self, entry: Entry, token: int, error: Exception | None) -> bool:
        """A consumer is done with a try; whether it still had a place of its own.

        It has none if its time had run out: somebody else may be in its place by now.
        """
        if not self.window.accepts(entry, token):
            return False
        in_time = entry.state is State.IN_FLIGHT
        if in_time:
            self.give_back(entry)
        if error is None or isinstance(error, Refusal):
            self.counts.refused += error is not None
            self.counts.late_acks += not in_time
            self.ack(entry)
        elif in_time:
            self.fail(entry, error)
        return in_time

    def give_back(self, entry: Entry) -> None:
        """Its consumer is free for another one."""
        if entry.consumer is not None:
            entry.consumer.in_hand -= 1
            entry.consumer = None

    def ack(self, entry: Entry) -> None:
        """It was handled."""
        self.counts.acked += 1
        if self.config.idempotent:
            self.marks.append(entry.record.message_id)
        self.leave(entry)

    def leave(self, entry: Entry) -> None:
        """It is done with: the cursor may move over it."""
        if entry.is_scheduled:
            self.unschedule.append(entry.record.message_id)
        if self.blocked is entry:
            self.blocked = None
        self.window.remove(entry)
        if not entry.is_retry:
            self.cursor.done(entry.offset)
        self.moved()

    def moved(self) -> None:
        """The cursor may have moved: see whether that is somebody's business."""
        now = self.clock.now()
        self.active_at = now
        cursor, config = self.cursor, self.config
        if cursor.is_dirty and self.dirty_since is None:
            self.dirty_since = now
        if (
            self.marks
            or self.unschedule
            or (self.waiters and min(self.waiters) <= cursor.position)
            or self.is_closing
            or config.rate_limit is not None  # the alarm for the next token has to be set
            or self.seek_to is not None
            or cursor.acks >= config.flush_acks
            or (self.has_more_due and self.room())
            or (cursor.looked < self.head and self.wanted())
        ):
            self._wake()

    def fail(self, entry: Entry, error: Exception) -> None:
        """A try has failed."""
        self.counts.failed += 1
        self.window.fail(entry, error)
        self._wake()

    def expire(self) -> None:
        """Take messages back whose consumers have not answered in time."""
        timeout = self.config.ack_timeout
        for entry in self.window.overdue(self.clock.now()):
            self.give_back(entry)
            self.counts.timed_out += 1
            self.fail(entry, TimeoutError(f"No answer within {timeout:g} s."))

    def consumer_left(self, consumer: Consumer) -> list[Entry]:
        """Take back what it has in hand: it goes out again at once, and not as a failure."""
        entries = self.window.held_by(consumer)
        for entry in entries:
            self.give_back(entry)
            entry.token += 1  # its answer no longer counts
            self.window.ready(entry)
        self._wake()
        return entries

    def unblock(self) -> None:
        """Give the message that it stands at one more try."""
        self.blocked = None
        for entry in self.window.entries():
            if entry.state is State.WAITING and entry.due == INFINITY:
                entry.attempt += 1
                self.window.wait(entry, self.clock.now())

    def drop(self) -> None:
        """Forget what is in hand: another engine works on it."""
        for entry in list(self.window.in_flight.values()):
            self.give_back(entry)
        self.open(self.cursor.persisted)

    def is_flush_due(self) -> bool:
        """Whether it is time to tell the journal how far it has come."""
        if self.marks or self.unschedule:
            return True
        if not self.cursor.is_dirty:
            return False
        config, now = self.config, self.clock.now()
        is_idle = not len(self.window) and now - self.active_at >= config.flush_idle
        is_old = self.dirty_since is not None and now - self.dirty_since >= config.flush_interval
        is_awaited = any(target <= self.cursor.position for target in self.waiters)
        return is_idle or is_old or is_awaited or self.cursor.acks >= config.flush_acks


def _stored_key(record: Record) -> str | None:
    return record.key


def _parked(key: str) -> Exception:
    return RuntimeError(f"An earlier message of the key {key!r} is among the dead letters.")
