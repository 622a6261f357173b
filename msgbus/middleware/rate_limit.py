"""Token-bucket rate limiting; excess messages wait in order."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, Final, final

import anyio

from msgbus.errors import ConfigurationError, HandlerTimeoutError
from msgbus.messages.frame import current_frame
from msgbus.messages.message import message_type_of
from msgbus.middleware.chain import CallNext
from msgbus.middleware.delivery import (
    KeyOf,
    current_clock,
    current_handler,
    messages_in,
    refuse_foreign_loop,
    require_above_zero,
)
from msgbus.runtime.clock import Clock
from msgbus.runtime.token_bucket import TokenBucket

# Seconds by which a token may be early: a sleep of exactly the missing time can end one
# rounding error short of it.
_TOLERANCE: Final = 1e-6


@final
class _TokenQueue:
    """The token bucket of one key, and the messages that wait for its tokens, in order.

    Only the first of them sleeps by the clock, so a cancelled one delays no other.
    """

    __slots__ = ("_bucket", "_burst", "waiting")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._bucket = TokenBucket(rate, burst, now)
        self._burst = burst
        self.waiting: dict[anyio.Event, int] = {}
        """The event that wakes each as the first, and the tokens it needs."""

    def seconds_to_wait(self, cost: int, now: float) -> float:
        """Seconds that a new message would wait, unless one before it is cancelled."""
        ahead = sum(self.waiting.values())
        return self._bucket.wait(now, ahead + min(cost, self._burst))

    async def take(self, cost: int, clock: Clock) -> None:
        """Take tokens in order of arrival; above `burst`, from a full bucket, into debt."""
        enough = min(cost, self._burst)
        now = clock.now()
        if not self.waiting and self._bucket.wait(now, enough) <= _TOLERANCE:
            self._bucket.take(now, cost)
            return
        is_first = anyio.Event()
        self.waiting[is_first] = cost
        try:
            if len(self.waiting) > 1:
                await is_first.wait()
            while (wait := self._bucket.wait(now := clock.now(), enough)) > _TOLERANCE:
                await clock.sleep(wait)
            self._bucket.take(now, cost)
        finally:
            del self.waiting[is_first]
            if self.waiting:
                next(iter(self.waiting)).set()


@final
class RateLimitMiddleware:
    """Limit messages per second with a token bucket; excess messages wait in order of arrival.

    Up to `burst` messages may begin at once. A message takes its token before it is handled,
    whatever the outcome. One that is cancelled while it waits takes none. One that could only
    begin after its caller's deadline fails at once.

    Calls of handlers are counted: an event with three handlers takes three tokens, and each
    retry takes another. A list for a batch handler takes a token per event, by the event's key.

    On a lane the wait blocks the lane, so the limit becomes back-pressure on publishers. To
    drop excess events instead, see `RateLimitFilter`.

    Args:
        per_second: Messages per second, in the long run.
        burst: Messages at once; one second's worth unless given, and at least 1.
        key: Maps a message to the key it is counted under, `None` for no limit; all messages
            are counted together unless given.
        clock: Clock to use; the bus's clock unless given.
        max_keys: Keys to remember; the least recently used is forgotten first, and starts
            with a full burst when it returns. A key with waiting messages is kept.

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
        self._queues: OrderedDict[Hashable, _TokenQueue] = OrderedDict()

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Call the handler once there is a token.

        Raises:
            HandlerTimeoutError: There would be none before the caller's deadline.
        """
        refuse_foreign_loop()
        clock = current_clock(self._clock)
        for key, cost in self._costs(message).items():
            queue = self._queue(key, clock.now())
            _check_deadline(queue.seconds_to_wait(cost, clock.now()), message)
            await queue.take(cost, clock)
        return await call_next(message)

    def _costs(self, handled: Any) -> Mapping[Hashable, int]:
        messages = messages_in(handled)
        if self._key is None:
            return {"": len(messages)}
        keys = [self._key(message) for message in messages]
        return Counter(key for key in keys if key is not None)

    def _queue(self, key: Hashable, now: float) -> _TokenQueue:
        queue = self._queues.get(key)
        if queue is None:
            if len(self._queues) >= self._max_keys:
                self._forget_one()
            queue = self._queues[key] = _TokenQueue(self._rate, self._burst, now)
        else:
            self._queues.move_to_end(key)
        return queue

    def _forget_one(self) -> None:
        for key, queue in self._queues.items():
            if not queue.waiting:
                del self._queues[key]
                return


def _check_deadline(wait: float, message: Any) -> None:
    frame = current_frame.get()
    if frame is None or frame.deadline is None:
        return
    left = frame.deadline - frame.owner.host.clock.now()
    if wait > left + _TOLERANCE:
        error = HandlerTimeoutError(
            handler=current_handler(), message_type=message_type_of(message), seconds=max(left, 0.0)
        )
        error.add_note(f"It was not begun: the rate limit would have let it begin in {wait:g} s.")
        raise error
