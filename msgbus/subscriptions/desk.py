"""All that an active subscription knows, and every step that needs no journal."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, final

from msgbus.errors import Refusal
from msgbus.runtime.token_bucket import TokenBucket
from msgbus.subscriptions.cursor import SafeCursor
from msgbus.subscriptions.progress import Counts
from msgbus.subscriptions.window import Entry, State, Window

if TYPE_CHECKING:
    from msgbus.journal.records import Record
    from msgbus.runtime.clock import Clock
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
        self.rate = TokenBucket(config.rate_limit, config.burst, clock.now())
        self.clock = clock
        self._wake = wake
        self.key_of = config.key or _stored_key
        self.head = 0
        """The newest offset that is known."""
        self.parked: Container[str] = ()
        """Keys whose messages go to the dead letters."""
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
        until = self.recover_until
        if until is None or self.cursor.position >= until:
            return False
        return self.cursor.looked < until or any(map(self.is_suspect, self.window.in_flight))

    def is_suspect(self, offset: int) -> bool:
        """Whether a message may have been in flight at an unclean end."""
        return self.recover_until is not None and offset <= self.recover_until

    def wanted(self) -> int:
        """How many messages to read now."""
        if self.is_held or not self.dispatcher.consumers:
            return 0
        room = self.room()
        if self.is_recovering:
            # One at a time: if the process dies again, it is known of what.
            return min(room, 0 if self.window.is_busy else 1)
        if self.config.is_at_most_once:
            return 0 if self.has_more_due else room
        return max(min(room, self.config.max_ahead - self.cursor.span), 0)

    def room(self) -> int:
        """How many more messages the window should take in now."""
        window, config = self.window, self.config
        most, size = config.max_buffered, config.fetch_size
        if config.is_at_most_once:
            # What is in the window is passed: a crash loses it.
            most = size = max(config.loss_window, self.dispatcher.places)
        if window.ready_count > size // 2:
            return 0
        return max(min(size, most - len(window)), 0)

    def has_work(self, head: int) -> bool:
        """Whether a message could go out, or be read, right now."""
        if self.is_held or not self.dispatcher.free or not self.rate.allows(self.clock.now()):
            return False
        if self.is_recovering and self.window.in_flight:
            return False
        if self.window.peek() is not None or (self.window.hungry and self.room()):
            return True
        return not len(self.window) and head > self.cursor.looked

    def until_next(self, now: float) -> float:
        """Seconds until time alone gives it something to do."""
        pause = self.window.next_due() - now
        if self.config.rate_limit is not None and self.window.ready_count:
            wait = self.rate.wait(now)
            pause = min(pause, wait) if wait > 0 else pause
        return max(pause, 0.0)

    # -- messages in ---------------------------------------------------------------------------

    def entry(self, record: Record) -> Entry:
        """A record as an entry of the window, with the tries that the journal knows of."""
        return Entry(record, self.key_of(record), stored=self.attempts.pop(record.offset, 0))

    def admit(self, entry: Entry, *, due: float | None = None) -> None:
        """Take it into the window; if its tries are used up, it is not to go out."""
        self.window.add(entry, due=due)
        if entry.attempt > self.config.retry.max_attempts:
            entry.attempt = entry.stored
            times = "once" if entry.stored == 1 else f"{entry.stored} times"
            error = RuntimeError(f"Its process ended while it was being handled, {times}.")
            self.window.fail(entry, error)

    def shelve(self, entry: Entry) -> None:
        """Let its record go: others of its key come first."""
        assert entry.key is not None  # noqa: S101 (only keys hold each other up)
        if entry.stored:
            self.attempts[entry.offset] = entry.stored
        self.window.shelve(entry.offset, entry.key)

    # -- messages out --------------------------------------------------------------------------

    def next(self) -> Entry | None:
        """Hand out a message, if there is one, somebody is free, and the rate allows it.

        All three are asked before anything is taken, so that neither a message nor a token
        is ever taken in vain.
        """
        now = self.clock.now()
        while not self.is_held:
            if self.is_recovering and self.window.in_flight:
                return None
            entry = self.window.peek()
            if entry is None:
                return None
            if entry.key is not None and entry.key in self.parked:
                self.window.fail(entry, ParkedError())
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
            or self.window.hungry
            or self.is_recovering
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
        """Take back what it has in hand: it goes out again at once, and not as a failure.

        Unless it may be delivered only once: then it has failed.
        """
        entries = self.window.held_by(consumer)
        for entry in entries:
            self.give_back(entry)
            entry.token += 1  # its answer no longer counts
            if self.config.is_at_most_once:
                self.fail(entry, RuntimeError(f"{consumer.name} left while it had it in hand."))
            else:
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


@final
class ParkedError(RuntimeError):
    """An earlier message of its key is among the dead letters."""

    def __init__(self) -> None:
        # The key is a part of the payload, so the error does not name it.
        super().__init__("An earlier message of its key is among the dead letters.")
