"""The pending buffer: messages that were read and are not done, and who has them."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, final

from msgbus.handlers.delivery import Mode

if TYPE_CHECKING:
    from msgbus.journal.records import Record
    from msgbus.subscriptions.dispatcher import Consumer
    from msgbus.subscriptions.runner import Runner


class State(Enum):
    """Where a message in the window stands."""

    READY = auto()
    """It can go out, if others of its key do not come first."""

    IN_FLIGHT = auto()
    """A consumer has it."""

    FAILED = auto()
    """It has come back; what becomes of it is not decided yet."""

    WAITING = auto()
    """It waits for its next try."""

    DONE = auto()
    """It has left the window."""


@final
class Entry:
    """One message in the window."""

    __slots__ = (
        "attempt",
        "consumer",
        "deadline",
        "due",
        "error",
        "is_retry",
        "is_scheduled",
        "key",
        "offset",
        "record",
        "runner",
        "state",
        "stored",
        "token",
    )

    def __init__(self, record: Record, key: str | None, *, stored: int = 0) -> None:
        self.record = record
        self.offset = record.offset
        self.key = key
        self.stored = stored
        """Tries that the journal knows of."""
        self.attempt = stored + 1
        """The number of the try that it is in, or that comes next."""
        self.state = State.READY
        self.token = 0
        """Grows with every hand-out, so that an answer can be told from an older one."""
        self.due = 0.0
        self.deadline = float("inf")
        self.error: Exception | None = None
        self.consumer: Consumer | None = None
        self.runner: Runner | None = None
        self.is_scheduled = False
        """The journal's schedule has it, too."""
        self.is_retry = False
        """The cursor has passed it; only the schedule keeps it."""

    @property
    def is_untouched(self) -> bool:
        """Whether it is as it was read: then it can be read again."""
        is_new = self.state is State.READY and not self.token and not self.stored
        return is_new and self.attempt == 1 and not self.is_scheduled and not self.is_retry

    def __repr__(self) -> str:
        return f"<Entry {self.offset} {self.state.name} attempt {self.attempt}>"


@final
class Window:
    """Keeps the order that the mode promises; knows nothing of time but numbers given to it."""

    def __init__(self, mode: Mode) -> None:
        self._by_key = mode is Mode.KEY_SHARED
        self._strict = mode is Mode.EXCLUSIVE
        self._entries: dict[int, Entry] = {}
        self._ready: list[tuple[int, Entry]] = []
        self._lanes: dict[str, deque[Entry]] = {}
        self._shelf: dict[str, deque[int]] = {}
        self.hungry: dict[str, None] = {}
        """Keys that have nothing in the window any more, but something on the shelf."""
        self.in_flight: dict[int, Entry] = {}
        self.waiting: dict[int, Entry] = {}
        """For a retry, or for a decision after a failure, by offset."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, offset: int) -> bool:
        return offset in self._entries

    def get(self, offset: int) -> Entry | None:
        """The entry of this offset."""
        return self._entries.get(offset)

    def entries(self) -> list[Entry]:
        """Everything in the window."""
        return list(self._entries.values())

    @property
    def ready_count(self) -> int:
        """Messages that nothing but a free consumer is missing for."""
        return len(self._ready)

    @property
    def is_busy(self) -> bool:
        """Whether something is in hand, or about to be."""
        return bool(self.in_flight or self._ready or self.failed())

    @property
    def oldest(self) -> Entry | None:
        """The entry with the lowest offset."""
        return self._entries[min(self._entries)] if self._entries else None

    # -- coming in -----------------------------------------------------------------------------

    def add(self, entry: Entry, *, due: float | None = None) -> None:
        """Take in a message; with `due`, it waits until then."""
        self._entries[entry.offset] = entry
        is_first = True
        if self._by_key and entry.key is not None:
            lane = self._lanes.setdefault(entry.key, deque())
            is_first = not lane
            lane.append(entry)
        if due is not None:
            self.wait(entry, due)
        elif is_first:
            heappush(self._ready, (entry.offset, entry))

    # -- the shelf: what waits behind others of its key, as mere offsets ------------------------

    @property
    def shelved(self) -> int:
        """Messages whose records were let go."""
        return sum(map(len, self._shelf.values()))

    def is_held_up(self, key: str | None) -> bool:
        """Whether a message of this key would have to wait for another one."""
        return self._by_key and key is not None and (key in self._lanes or key in self._shelf)

    def is_on_shelf(self, key: str | None) -> bool:
        """Whether what comes of this key must go to the shelf, to stay behind what is there."""
        return key is not None and key in self._shelf

    def shelve(self, offset: int, key: str) -> None:
        """Note a message that has others of its key before it, and let its record go."""
        self._shelf.setdefault(key, deque()).append(offset)

    def clear_out(self, keep: int) -> None:
        """Shelve what stands behind the first `keep` of its key, if nothing is known of it."""
        for key, lane in self._lanes.items():
            while len(lane) > keep and lane[-1].is_untouched:
                entry = lane.pop()
                del self._entries[entry.offset]
                entry.state = State.DONE
                self._shelf.setdefault(key, deque()).appendleft(entry.offset)

    def shelf(self, key: str, count: int) -> list[int]:
        """The next offsets of a key; they stay until they are `unshelved`."""
        return list(islice(self._shelf[key], count))

    def unshelved(self, key: str, count: int) -> None:
        """So many of a key are in the window again, or done with."""
        shelf = self._shelf[key]
        for _ in range(count):
            shelf.popleft()
        if not shelf:
            del self._shelf[key]
        if key in self._lanes or not shelf:
            self.hungry.pop(key, None)

    # -- going out -----------------------------------------------------------------------------

    def peek(self) -> Entry | None:
        """The message that is to go out next, if one may."""
        if not self._ready:
            return None
        offset, entry = self._ready[0]
        if self._strict and self.waiting and min(self.waiting) < offset:
            return None  # an earlier one is still to be tried again
        return entry

    def take(self, consumer: Consumer, deadline: float) -> Entry:
        """Hand out what `peek` has shown."""
        _, entry = heappop(self._ready)
        entry.state = State.IN_FLIGHT
        entry.token += 1
        entry.consumer = consumer
        entry.deadline = deadline
        self.in_flight[entry.offset] = entry
        return entry

    # -- coming back ---------------------------------------------------------------------------

    def accepts(self, entry: Entry, token: int) -> bool:
        """Whether the answer to this hand-out still counts.

        It does if it is late, as long as the message was not handed out again: the work is
        done, and to do it twice helps nobody.
        """
        return entry.token == token and self._entries.get(entry.offset) is entry

    def fail(self, entry: Entry, error: Exception) -> None:
        """It has come back, or is not to go out; it stands still until somebody decides."""
        self._leave_hand(entry)
        self._leave_ready(entry)
        entry.state = State.FAILED
        entry.error = error
        self.waiting[entry.offset] = entry

    def wait(self, entry: Entry, due: float) -> None:
        """Let it wait for its next try."""
        self._leave_hand(entry)
        entry.state = State.WAITING
        entry.due = due
        self.waiting[entry.offset] = entry

    def ready(self, entry: Entry) -> None:
        """Let it go out again, before all that come behind it."""
        self._leave_hand(entry)
        self.waiting.pop(entry.offset, None)
        entry.state = State.READY
        if not self._is_behind(entry):
            heappush(self._ready, (entry.offset, entry))

    def remove(self, entry: Entry) -> None:
        """It is done with, one way or the other."""
        self._leave_hand(entry)
        self.waiting.pop(entry.offset, None)
        if self._entries.pop(entry.offset, None) is None:
            return
        self._leave_ready(entry)
        entry.state = State.DONE
        self._leave_lane(entry)

    def _leave_hand(self, entry: Entry) -> None:
        self.in_flight.pop(entry.offset, None)

    def _leave_ready(self, entry: Entry) -> None:
        if entry.state is State.READY:
            self._ready = [pair for pair in self._ready if pair[1] is not entry]
            heapify(self._ready)

    def _is_behind(self, entry: Entry) -> bool:
        """Whether another message of its key comes first."""
        lane = self._lanes.get(entry.key) if self._by_key and entry.key is not None else None
        return lane is not None and lane[0] is not entry

    def _leave_lane(self, entry: Entry) -> None:
        if not self._by_key or entry.key is None:
            return
        lane = self._lanes[entry.key]
        was_first = lane[0] is entry
        lane.remove(entry)
        if not lane:
            del self._lanes[entry.key]
            if entry.key in self._shelf:
                self.hungry[entry.key] = None
        elif was_first and lane[0].state is State.READY:
            heappush(self._ready, (lane[0].offset, lane[0]))

    # -- time ----------------------------------------------------------------------------------

    def overdue(self, now: float) -> list[Entry]:
        """Messages in hand that should have been answered by now."""
        return [entry for entry in self.in_flight.values() if entry.deadline <= now]

    def due(self, now: float) -> list[Entry]:
        """Messages whose next try may begin, in order."""
        return [
            self.waiting[offset]
            for offset in sorted(self.waiting)
            if self.waiting[offset].state is State.WAITING and self.waiting[offset].due <= now
        ]

    def failed(self) -> list[Entry]:
        """Messages about which somebody has to decide, in order."""
        return [
            self.waiting[offset]
            for offset in sorted(self.waiting)
            if self.waiting[offset].state is State.FAILED
        ]

    def next_due(self) -> float:
        """When the next try may begin; infinity if none waits."""
        return min(
            (entry.due for entry in self.waiting.values() if entry.state is State.WAITING),
            default=float("inf"),
        )

    def held_by(self, consumer: Consumer) -> list[Entry]:
        """What this consumer has in hand."""
        return [entry for entry in self.in_flight.values() if entry.consumer is consumer]
