"""A circuit breaker: stop calling what fails, and find out gently whether it is back.

```text
            failures reach the threshold
   CLOSED ────────────────────────────────► OPEN ◄───────────────┐
     ▲                                        │                  │
     │                                        │ recovery time    │ a try fails, and the
     │   enough tries succeed                 ▼ is over          │ next wait is longer
     └─────────────────────────────────── HALF_OPEN ─────────────┘
```

While half open, at most `half_open_max` calls may try at once. Each has a permit with an
expiry; it is given back whether the call succeeds, fails, is ignored, times out or is
cancelled, and one that never comes back expires. A call that began before the last change
of state says nothing about the new one, so it is not counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import anyio

from msgbus.clock import Clock, SystemClock
from msgbus.errors import CircuitOpenError, Refusal
from msgbus.resilience.policies import CircuitBreakerConfig
from msgbus.resilience.states import CircuitChange, CircuitState
from msgbus.resilience.window import Streak, make_window
from msgbus.results import FailedResult
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")


@final
class Permit:
    """One call's leave to go through. End it exactly once; a second ending does nothing."""

    __slots__ = ("_began", "_breaker", "_generation", "expires")

    def __init__(
        self, breaker: CircuitBreaker, generation: int, began: float, expires: float
    ) -> None:
        self._breaker: CircuitBreaker | None = breaker
        self._generation = generation
        self._began = began
        self.expires = expires

    @property
    def breaker(self) -> CircuitBreaker | None:
        """The breaker that gave it; `None` once it was given back."""
        return self._breaker

    def success(self) -> None:
        """The call succeeded; a slow one may count as failed all the same."""
        breaker = self._end()
        if breaker is None:
            return
        slow = breaker.config.slow_call
        if slow is not None:
            seconds = breaker.clock.now() - self._began
            if seconds >= slow:
                breaker.failed(self._generation, f"a call took {seconds:g} s")
                return
        breaker.succeeded(self._generation)

    def failure(self, error: BaseException | None = None) -> None:
        """The call failed; not counted if `error` says nothing about the callee."""
        breaker = self._end()
        if breaker is not None and breaker.counts(error):
            breaker.failed(self._generation, "" if error is None else type(error).__name__)

    def release(self) -> None:
        """The call ended in a way that says nothing: cancelled, or never begun."""
        self._end()

    def _end(self) -> CircuitBreaker | None:
        breaker, self._breaker = self._breaker, None
        if breaker is not None:
            breaker.give_back(self)
        return breaker


_entered: Final[ContextVar[tuple[Permit, ...]]] = ContextVar("msgbus_permits", default=())


@final
class CircuitBreaker:
    """Guards calls of one thing that may be down. Works alone and inside a bus.

    ```python
    breaker = CircuitBreaker(CircuitBreakerConfig(failure_threshold=3), name="payments")

    async with breaker:
        await charge(card)
    ```

    All methods are to be called from the thread of one event loop.

    Args:
        config: When it opens and closes.
        name: For errors, logs and metrics.
        clock: Where time comes from; only its monotonic time is used.
        on_change: Told of every change of state.
        chance: Gives numbers from 0 to 1, for the jitter.
    """

    def __init__(
        self,
        config: CircuitBreakerConfig | None = None,
        *,
        name: str = "circuit",
        clock: Clock | None = None,
        on_change: Callable[[CircuitChange], None] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.config = config or CircuitBreakerConfig()
        self.name = name
        self.clock: Clock = clock or SystemClock()
        self.on_change = on_change
        self._chance = chance
        self._state = CircuitState.CLOSED
        self._window = make_window(self.config)
        self._until = 0.0
        self._openings = 0
        """Times in a row that it opened."""
        self._permits: set[Permit] = set()
        """Those of the calls that try while it is half open."""
        self._successes = 0
        """Tries that succeeded while it is half open."""
        self._changed: anyio.Event | None = None
        self.is_closed = True
        """The one thing that the hot path asks."""
        streak = self._window if isinstance(self._window, Streak) else None
        self.streak = streak if self.config.slow_call is None else None
        """For the hot path, where a success in a closed circuit matters only after a failure;
        `None` where every call has to be told."""
        self.generation = 0
        """Grows with every change of state."""

    @property
    def state(self) -> CircuitState:
        """What the next call would meet."""
        if self._state is CircuitState.OPEN and self.clock.now() >= self._until:
            return CircuitState.HALF_OPEN
        return self._state

    @property
    def failures(self) -> int:
        """Failures that count at the moment."""
        self._window.let_go(self.clock.now())
        return self._window.failures

    @property
    def retry_after(self) -> float:
        """Seconds until a call may go through, as far as is known; 0 if one may now."""
        if self._state is CircuitState.OPEN:
            return max(self._until - self.clock.now(), 0.0)
        if self._state is CircuitState.HALF_OPEN and not self._has_permit():
            return max(min(one.expires for one in self._permits) - self.clock.now(), 0.0)
        return 0.0

    # -- calls -------------------------------------------------------------------------------

    def acquire(self) -> Permit:
        """Leave for one call, which must be ended whatever becomes of the call.

        Raises:
            CircuitOpenError: Not now; it says when to try again.
        """
        if self.is_closed:
            began = 0.0 if self.config.slow_call is None else self.clock.now()
            return Permit(self, self.generation, began, math.inf)
        now = self.clock.now()
        if self._state is CircuitState.OPEN and now >= self._until:
            self._change(CircuitState.HALF_OPEN, "recovery time is over")
        if self._state is CircuitState.OPEN or not self._has_permit():
            raise CircuitOpenError(self.name, retry_after=self.retry_after)
        permit = Permit(self, self.generation, now, now + self.config.permit_timeout)
        self._permits.add(permit)
        return permit

    async def wait(self) -> Permit:
        """Leave for one call, as soon as there is any; a cancelled wait leaves nothing behind."""
        while True:
            try:
                return self.acquire()
            except CircuitOpenError as refused:
                if self._changed is None:
                    self._changed = anyio.Event()
                changed = self._changed
                if refused.retry_after == math.inf:
                    await changed.wait()
                else:
                    with self.clock.cancel_after(refused.retry_after):
                        await changed.wait()

    async def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """`await function(*args)`, if the circuit lets it through.

        A failed `CommandResult` counts as a failure, as an exception does.

        Raises:
            CircuitOpenError: It does not; nothing was called.
        """
        streak = self.streak
        if streak is not None and self.is_closed:
            return await self._call_closed(streak, function, args)
        permit = self.acquire()
        try:
            value = await function(*args)
        except Exception as error:
            permit.failure(error)
            raise
        except BaseException:
            permit.release()
            raise
        outcome: object = value
        if isinstance(outcome, FailedResult):
            permit.failure(outcome.peek_exception())
        else:
            permit.success()
        return value

    async def _call_closed(
        self, streak: Streak, function: Callable[..., Awaitable[T]], args: tuple[Any, ...]
    ) -> T:
        """The same without a permit: a closed circuit has no end of them."""
        generation = self.generation
        try:
            value = await function(*args)
        except Exception as error:
            if self.counts(error):
                self.failed(generation, type(error).__name__)
            raise
        outcome: object = value
        if isinstance(outcome, FailedResult):
            failure = outcome.peek_exception()
            if self.counts(failure):
                self.failed(generation, type(failure).__name__)
        elif streak.failures:
            self.succeeded(generation)
        return value

    async def __aenter__(self) -> CircuitBreaker:
        _entered.set((*_entered.get(), self.acquire()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        permits = _entered.get()
        if permits and permits[-1].breaker is self:
            permit: Permit | None = permits[-1]
            _entered.set(permits[:-1])
        else:  # not left in the order in which they were entered
            permit = next((one for one in reversed(permits) if one.breaker is self), None)
            _entered.set(tuple(one for one in permits if one is not permit))
        if permit is None:
            # Entered in another task, as a test's fixture may do: the call is not told of,
            # and its permit expires.
            return
        if error is None:
            permit.success()
        elif isinstance(error, Exception):
            permit.failure(error)
        else:
            permit.release()

    # -- by hand -----------------------------------------------------------------------------

    def force_open(self) -> None:
        """Refuse all calls until `reset`."""
        self._change(CircuitState.OPEN, "opened by hand", until=math.inf)

    def reset(self) -> None:
        """Close it and forget all failures."""
        self._openings = 0
        self._window.clear()
        if self._state is not CircuitState.CLOSED:
            self._change(CircuitState.CLOSED, "closed by hand")

    # -- outcomes ----------------------------------------------------------------------------

    def counts(self, error: BaseException | None) -> bool:
        """Whether such an error says something about the callee."""
        return not isinstance(error, (Refusal, *self.config.ignore))

    def succeeded(self, generation: int) -> None:
        """A call that began in this generation has succeeded."""
        if generation != self.generation:
            return
        if self.is_closed:
            if self.streak is None or self.streak.failures:
                self._window.add(self.clock.now(), failed=False)
                self._open_if_due("")
            return
        self._successes += 1
        if self._successes >= self.config.half_open_max:
            self._openings = 0
            self._change(CircuitState.CLOSED, "it works again")

    def failed(self, generation: int, reason: str) -> None:
        """A call that began in this generation has failed."""
        if generation != self.generation:
            return
        if self._state is CircuitState.CLOSED:
            self._window.add(self.clock.now(), failed=True)
            self._open_if_due(reason)
            return
        self._open(f"it fails still: {reason}" if reason else "it fails still")

    def give_back(self, permit: Permit) -> None:
        """A call has ended, in whatever way; another may try in its place."""
        if self._permits and permit in self._permits:
            self._permits.discard(permit)
            self._wake()

    def _open_if_due(self, reason: str) -> None:
        window, config = self._window, self.config
        if config.failure_rate is None:
            is_due = window.failures >= config.failure_threshold
            text = f"{window.failures} failures"
        else:
            rate = window.failures / window.calls
            is_due = window.calls >= config.minimum_calls and rate >= config.failure_rate
            text = f"{window.failures} of {window.calls} calls failed"
        if is_due:
            self._open(f"{text}, the last one: {reason}" if reason else text)

    def _open(self, reason: str) -> None:
        config = self.config
        try:
            seconds = config.recovery_time * config.recovery_growth**self._openings
        except OverflowError:  # a long outage
            seconds = config.max_recovery_time
        seconds = min(seconds, config.max_recovery_time)
        seconds *= 1 - config.jitter * self._chance()
        self._openings += 1
        self._change(CircuitState.OPEN, reason, until=self.clock.now() + seconds)

    def _has_permit(self) -> bool:
        if len(self._permits) < self.config.half_open_max:
            return True
        now = self.clock.now()
        # Who lost a permit cannot give it back, and must not hold the circuit for good.
        self._permits = {one for one in self._permits if one.expires > now}
        return len(self._permits) < self.config.half_open_max

    def _change(self, new: CircuitState, reason: str, *, until: float = 0.0) -> None:
        old, self._state = self._state, new
        self._until = until
        self._permits.clear()
        self._successes = 0
        self._window.clear()
        self.generation += 1
        self.is_closed = new is CircuitState.CLOSED
        self._wake()
        if self.on_change is not None:
            try:
                self.on_change(CircuitChange(self.name, old, new, reason, self.retry_after))
            except Exception as error:  # a broken hook must not break the call it hears of
                log.error("circuit_hook_failed", circuit=self.name, error=redact_exception(error))

    def _wake(self) -> None:
        if self._changed is not None:
            changed, self._changed = self._changed, None
            changed.set()

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.name} {self.state.value}>"
