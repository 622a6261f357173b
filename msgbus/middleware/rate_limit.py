"""So many messages a second, and the rest in line."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Mapping
from typing import Any, Final, final

import anyio

from msgbus.bus.context import current_frame
from msgbus.errors import ConfigurationError, HandlerTimeoutError
from msgbus.messages.message import message_type_of
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import (
    KeyOf,
    clock_at_hand,
    current_handler,
    messages_in,
    refuse_foreign_loop,
    require_above_zero,
)
from msgbus.runtime.clock import Clock

# Seconds by which a token may be early. A clock that is told to move by exactly the time
# still missing can stop one rounding error short of it, and would then not move at all.
_TOLERANCE: Final = 1e-6


@final
class _Turn:
    """One who waits in line."""

    __slots__ = ("cost", "is_first")

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.is_first = anyio.Event()


@final
class _Bucket:
    """The tokens of one key, and the line of those who wait for them.

    Only the first in line watches the clock, so a place that is given up costs nobody time.
    """

    __slots__ = ("_burst", "_filled_at", "_rate", "_tokens", "line")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._filled_at = now
        self.line: deque[_Turn] = deque()

    def seconds_until(self, cost: float, now: float) -> float:
        """How long until so many tokens are there; 0 or less if they are."""
        grown = self._tokens + (now - self._filled_at) * self._rate
        self._tokens = min(self._burst, grown)
        self._filled_at = now
        return (cost - self._tokens) / self._rate

    def seconds_to_wait(self, cost: int, now: float) -> float:
        """How long one who comes now would wait, if nobody leaves the line."""
        ahead = sum(turn.cost for turn in self.line)
        return self.seconds_until(ahead + min(cost, self._burst), now)

    async def take(self, cost: int, clock: Clock) -> None:
        """Take so many tokens, when it is one's turn and they are there.

        One who takes more than the bucket holds waits until it is full and leaves a debt.
        """
        enough = min(cost, self._burst)
        if self.line or self.seconds_until(enough, clock.now()) > _TOLERANCE:
            await self._queue_for(cost, enough, clock)
        else:
            self._tokens -= cost

    async def _queue_for(self, cost: int, enough: float, clock: Clock) -> None:
        turn = _Turn(cost)
        self.line.append(turn)
        try:
            if self.line[0] is not turn:
                await turn.is_first.wait()
            while (wait := self.seconds_until(enough, clock.now())) > _TOLERANCE:
                await clock.sleep(wait)
            self._tokens -= cost
        finally:
            was_first = self.line[0] is turn
            self.line.remove(turn)
            if was_first and self.line:
                self.line[0].is_first.set()


@final
class RateLimitMiddleware:
    """Lets messages through at `per_second`; the rest waits in order of arrival.

    A token bucket: `burst` messages may come at once after a quiet time. A message takes
    its token before it is handled, and keeps it whatever the outcome. One that is cancelled
    in line takes none, and those behind it move up. One that could only begin after the
    deadline of its caller fails at once.

    It counts calls of handlers: an event with three handlers takes three tokens, a retry
    takes another. A list for a batch handler takes a token per event, of each event's key.

    On a lane the wait holds up the lane, so a limit becomes back-pressure on publishers. To
    refuse what is too much instead, see `RateLimitFilter`.

    Args:
        per_second: Messages a second, in the long run.
        burst: Messages at once; one second's worth unless given, and at least 1.
        key: From a message to what it is counted under, `None` for no limit; all messages
            are counted together unless given.
        clock: Where time comes from; the bus's clock unless given.
        max_keys: Keys to remember; the one used longest ago is forgotten first, and begins
            with a full burst when it comes back. A key that somebody waits for is kept.

    Raises:
        ConfigurationError: A number is too small.
    """

    batch: Final = True

    def __init__(
        self,
        per_second: float,
        *,
        burst: float | None = None,
        key: KeyOf | None = None,
        clock: Clock | None = None,
        max_keys: int = 10_000,
    ) -> None:
        require_above_zero("per_second", per_second)
        require_above_zero("max_keys", max_keys)
        if burst is not None and burst < 1:
            message = f"burst must be at least 1, not {burst}: no message would ever get through."
            raise ConfigurationError(message)
        self._rate = per_second
        self._burst = max(1.0, per_second) if burst is None else float(burst)
        self._key = key
        self._clock = clock
        self._max_keys = max_keys
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call on, when it is this message's turn.

        Raises:
            HandlerTimeoutError: Its turn would come after the deadline of its caller.
        """
        refuse_foreign_loop()
        clock = clock_at_hand(self._clock)
        for key, cost in self._costs(message).items():
            bucket = self._bucket(key, clock.now())
            _check_deadline(bucket.seconds_to_wait(cost, clock.now()), message)
            await bucket.take(cost, clock)
        return await call_next(message)

    def _costs(self, handled: Any) -> Mapping[Hashable, int]:
        messages = messages_in(handled)
        if self._key is None:
            return {"": len(messages)}
        keys = [self._key(message) for message in messages]
        return Counter(key for key in keys if key is not None)

    def _bucket(self, key: Hashable, now: float) -> _Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._max_keys:
                self._forget_one()
            bucket = self._buckets[key] = _Bucket(self._rate, self._burst, now)
        else:
            self._buckets.move_to_end(key)
        return bucket

    def _forget_one(self) -> None:
        for key, bucket in self._buckets.items():
            if not bucket.line:
                del self._buckets[key]
                return


def _check_deadline(wait: float, message: Any) -> None:
    frame = current_frame.get()
    if frame is None or frame.deadline is None:
        return
    left = frame.deadline - frame.owner.bus.clock.now()
    if wait > left + _TOLERANCE:
        error = HandlerTimeoutError(
            handler=current_handler(), message_type=message_type_of(message), seconds=max(left, 0.0)
        )
        error.add_note(f"It was not begun: the rate limit would have let it begin in {wait:g} s.")
        raise error
