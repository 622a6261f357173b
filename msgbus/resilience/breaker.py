"""Circuit breaker: stop calling a service that fails, and probe whether it is back.

```text
            failures reach the threshold
   CLOSED ────────────────────────────────► OPEN ◄───────────────┐
     ▲                                        │                  │
     │                                        │ recovery time    │ a probe fails
     │   enough probes succeed                ▼ is over          │
     └─────────────────────────────────── HALF_OPEN ─────────────┘
```

While half open, at most `half_open_max` calls may probe at once. Each has a permit, which is
released when the call succeeds, fails, times out or is cancelled; a lost permit expires. A call
that began before the last change of state is not counted.

A probe may name its message. A message that fails as a probe continues its own retries while the
circuit is open again, so that one bad message never costs more than one recovery time; the open
time grows only after many different messages have failed as probes. An ignored error proves that
the service is up, and counts as a success.
"""

from __future__ import annotations

import inspect
import math
import random
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast, final, overload

import anyio

from msgbus.errors import CircuitOpenError, Refusal
from msgbus.messages.results import FailedResult
from msgbus.resilience.config import CircuitBreakerConfig
from msgbus.resilience.window import make_window
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import Runtime, current_runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")
P = ParamSpec("P")


class CircuitState(Enum):
    """State of a circuit: what it does with a call."""

    CLOSED = "closed"
    """Calls go through."""

    HALF_OPEN = "half_open"
    """A few calls go through as probes."""

    OPEN = "open"
    """Calls are refused."""


@final
@dataclass(frozen=True, slots=True)
class CircuitChange:
    """A change of a circuit's state."""

    name: str
    old: CircuitState
    new: CircuitState
    reason: str
    retry_after: float
    """Seconds until an open circuit lets a probe through; 0 otherwise."""


@final
class Permit:
    """Permission for one call. End it once; ending it again does nothing."""

    __slots__ = ("_began", "_breaker", "_generation", "expires", "message_id")

    def __init__(
        self,
        breaker: CircuitBreaker,
        generation: int,
        began: float,
        expires: float,
        message_id: str | None = None,
    ) -> None:
        self._breaker: CircuitBreaker | None = breaker
        self._generation = generation
        self._began = began
        self.expires = expires
        self.message_id = message_id

    @property
    def breaker(self) -> CircuitBreaker | None:
        """The breaker that issued it; `None` once it has ended."""
        return self._breaker

    def success(self) -> None:
        """Record a success; a call slower than `slow_call` counts as a failure."""
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
        """Record a failure; counts as a success if `error` is ignored."""
        if self._breaker is not None and not self._breaker.counts(error):
            self.success()
            return
        breaker = self._end()
        if breaker is not None:
            reason = "" if error is None else type(error).__name__
            breaker.failed(self._generation, reason, self.message_id)

    def release(self) -> None:
        """Record nothing: the call was cancelled or never began."""
        self._end()

    def _end(self) -> CircuitBreaker | None:
        breaker, self._breaker = self._breaker, None
        if breaker is not None:
            breaker.return_permit(self)
        return breaker


_entered: Final[ContextVar[tuple[Permit, ...]]] = ContextVar("msgbus_permits", default=())


@final
class CircuitBreaker:
    """Circuit breaker around calls of one service. Works alone and inside a bus.

    ```python
    breaker = CircuitBreaker(CircuitBreakerConfig(failure_threshold=3), name="payments")

    async with breaker:  # or `with breaker:` around sync code
        await charge(card)

    @breaker
    async def charge(card: str) -> None: ...
    ```

    Call all methods from the thread of one event loop.

    Args:
        config: When it opens and closes.
        name: Name in errors, logs and metrics.
        clock: Clock to use; only its monotonic time is used.
        on_change: Called with every change of state.
        chance: Random numbers from 0 to 1, for the jitter.
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
        """`None` if it counts failures in a row."""
        self._is_ignored = _ignored_by(self.config)
        self._until = 0.0
        self._growths = 0
        """Times that the recovery time has grown since it was last closed."""
        self._probe: str | None = None
        """Id of the message that last failed as a probe."""
        self._probes = 0
        """Different messages in a row that have failed as probes."""
        self._failures = 0
        """Failures that opened it."""
        self._permits: set[Permit] = set()
        """Permits of the probes in flight."""
        self._successes = 0
        """Probes that have succeeded."""
        self._waiting: dict[anyio.Event, Runtime] = {}
        """One event per task that waits for a change, with its event loop."""
        self.is_closed = True
        """All that the hot path reads."""
        self.in_a_row = 0
        """Failures in a row, if there is no window."""
        self.records_all = self._window is not None or self.config.slow_call is not None
        """Whether every call must be recorded. Else, for the hot path, a call of a closed circuit
        needs no permit, and its success matters only after a failure."""
        self.generation = 0
        """Number of changes of state."""

    @property
    def state(self) -> CircuitState:
        """State that the next call would find."""
        if self._state is CircuitState.OPEN and self.clock.now() >= self._until:
            return CircuitState.HALF_OPEN
        return self._state

    @property
    def failures(self) -> int:
        """Failures counted now; of an open circuit, those that opened it."""
        if not self.is_closed:
            return self._failures
        if self._window is None:
            return self.in_a_row
        self._window.expire(self.clock.now())
        return self._window.failures

    @property
    def retry_after(self) -> float:
        """Seconds until a call may go through, as far as is known; 0 if now."""
        if self._state is CircuitState.OPEN:
            return max(self._until - self.clock.now(), 0.0)
        if self._state is CircuitState.HALF_OPEN and not self._has_permit():
            return max(min(one.expires for one in self._permits) - self.clock.now(), 0.0)
        return 0.0

    # -- calls -------------------------------------------------------------------------------

    def acquire(self, message_id: str | None = None) -> Permit:
        """Get a permit for one call; the caller must end it, whatever the outcome.

        Args:
            message_id: The message that the call is for, if it may be retried: a message that
                failed as a probe continues its retries while the circuit is open.

        Raises:
            CircuitOpenError: The circuit is open; `retry_after` has the seconds to wait.
        """
        if self.is_closed:
            began = 0.0 if self.config.slow_call is None else self.clock.now()
            return Permit(self, self.generation, began, math.inf, message_id)
        now = self.clock.now()
        if self._state is CircuitState.OPEN and now >= self._until:
            self._change(CircuitState.HALF_OPEN, "recovery time is over")
        is_probe = message_id is not None and message_id == self._probe
        is_refused = self._state is CircuitState.OPEN and not is_probe
        if is_refused or not self._has_permit():
            raise CircuitOpenError(self.name, retry_after=self.retry_after)
        expires = now + self.config.permit_timeout
        permit = Permit(self, self.generation, now, expires, message_id)
        self._permits.add(permit)
        return permit

    async def wait(self, message_id: str | None = None) -> Permit:
        """Wait for a permit for one call. Safe to cancel."""
        while True:
            try:
                return self.acquire(message_id)
            except CircuitOpenError as refused:
                changed = anyio.Event()
                self._waiting[changed] = current_runtime()
                try:
                    if refused.retry_after == math.inf:
                        await changed.wait()
                    else:
                        with self.clock.cancel_after(refused.retry_after):
                            await changed.wait()
                finally:
                    del self._waiting[changed]

    @overload
    def call(
        self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]: ...
    @overload
    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...
    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function(*args, **kwargs)` through the circuit.

        Await the result if the function is async. A failed `CommandResult` counts as a failure,
        as an exception does.

        Raises:
            CircuitOpenError: The circuit is open; nothing was called.
        """
        if inspect.iscoroutinefunction(function):
            return self._call_async(function, args, kwargs)
        permit = self.acquire()
        try:
            value = function(*args, **kwargs)
        except BaseException as error:
            _end(permit, error)
            raise
        if inspect.isawaitable(value):
            return _awaited(permit, value)
        _end_with(permit, value)
        return value

    async def _call_async(
        self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> T:
        if self.records_all or not self.is_closed:
            return await _awaited(self.acquire(), function(*args, **kwargs))
        # Without a permit: a closed circuit does not limit calls.
        generation = self.generation
        try:
            value = await function(*args, **kwargs)
        except Exception as error:
            self.ended(generation, error)
            raise
        outcome: object = value
        if isinstance(outcome, FailedResult):
            self.ended(generation, outcome.peek_exception())
        elif self.in_a_row:
            self.succeeded(generation)
        return value

    @overload
    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]: ...
    @overload
    def __call__(self, function: Callable[P, T]) -> Callable[P, T]: ...
    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function, sync or async, so that its calls go through the circuit."""
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def guarded(*args: Any, **kwargs: Any) -> Any:
                return await self._call_async(function, args, kwargs)

            return guarded

        @wraps(function)
        def guarded_sync(*args: Any, **kwargs: Any) -> Any:
            return self.call(function, *args, **kwargs)

        return guarded_sync

    def __enter__(self) -> CircuitBreaker:
        _entered.set((*_entered.get(), self.acquire()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        permits = _entered.get()
        if permits and permits[-1].breaker is self:
            permit: Permit | None = permits[-1]
            _entered.set(permits[:-1])
        else:  # not exited in the order in which they were entered
            permit = next((one for one in reversed(permits) if one.breaker is self), None)
            _entered.set(tuple(one for one in permits if one is not permit))
        if permit is None:
            # Entered in another task, as a test fixture may do: the outcome is not recorded,
            # and the permit expires.
            return
        _end(permit, error)

    async def __aenter__(self) -> CircuitBreaker:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)

    # -- manual control ----------------------------------------------------------------------

    def force_open(self) -> None:
        """Refuse all calls until `reset`."""
        self._probe = None
        self._failures = self.failures
        self._change(CircuitState.OPEN, "forced open", until=math.inf)

    def reset(self) -> None:
        """Close the circuit and forget all failures."""
        self._forget_calls()
        if self._state is not CircuitState.CLOSED:
            self._close("reset")

    # -- outcomes ----------------------------------------------------------------------------

    def counts(self, error: BaseException | None) -> bool:
        """Whether an error counts as a failure of the service."""
        return not isinstance(error, Exception) or not self._is_ignored(error)

    def ended(
        self, generation: int, error: BaseException | None, message_id: str | None = None
    ) -> None:
        """Record that a call which began in `generation` has raised."""
        if self.counts(error):
            self.failed(generation, type(error).__name__, message_id)
        else:
            self.succeeded(generation)

    def succeeded(self, generation: int) -> None:
        """Record that a call which began in `generation` has succeeded."""
        if generation != self.generation:
            return
        if self.is_closed:
            self.in_a_row = 0
            if self._window is not None:
                self._window.add(self.clock.now(), failed=False)
                self._open_if_due("")
            return
        self._successes += 1
        if self._successes >= self.config.half_open_max:
            self._close("probes succeeded")

    def failed(self, generation: int, reason: str, message_id: str | None = None) -> None:
        """Record that a call which began in `generation` has failed."""
        if generation != self.generation:
            return
        if self._state is CircuitState.CLOSED:
            if self._window is None:
                self.in_a_row += 1
            else:
                self._window.add(self.clock.now(), failed=True)
            self._open_if_due(reason)
        elif self._state is CircuitState.HALF_OPEN:
            self._count_probe(message_id)
            self._open(f"a probe failed: {reason}" if reason else "a probe failed")

    def _count_probe(self, message_id: str | None) -> None:
        """Count a failed probe; the same message twice is not a sign of an outage."""
        if message_id is None:
            self._growths += 1
        elif message_id != self._probe:
            self._probes += 1
            self._growths += self._probes > self.config.failure_threshold
        self._probe = message_id

    def return_permit(self, permit: Permit) -> None:
        """Free a permit, so that another call may probe."""
        if self._permits and permit in self._permits:
            self._permits.discard(permit)
            self._wake()

    def _open_if_due(self, reason: str) -> None:
        window, config = self._window, self.config
        failures = self.in_a_row if window is None else window.failures
        if config.failure_rate is None or window is None:
            is_due = failures >= config.failure_threshold
            text = f"{failures} failures"
        else:
            rate = failures / window.calls
            is_due = window.calls >= config.minimum_calls and rate >= config.failure_rate
            text = f"{failures} of {window.calls} calls failed"
        if is_due:
            self._failures = failures
            self._open(f"{text}, the last one: {reason}" if reason else text)

    def _open(self, reason: str) -> None:
        config = self.config
        try:
            seconds = config.recovery_time * config.recovery_growth**self._growths
        except OverflowError:  # a long outage
            seconds = config.max_recovery_time
        seconds = min(seconds, config.max_recovery_time)
        seconds *= 1 - config.jitter * self._chance()
        self._change(CircuitState.OPEN, reason, until=self.clock.now() + seconds)

    def _close(self, reason: str) -> None:
        self._probe = None
        self._probes = self._growths = 0
        self._change(CircuitState.CLOSED, reason)

    def _has_permit(self) -> bool:
        if len(self._permits) < self.config.half_open_max:
            return True
        now = self.clock.now()
        # A lost permit must not keep the circuit half open for ever.
        self._permits = {one for one in self._permits if one.expires > now}
        return len(self._permits) < self.config.half_open_max

    def _change(self, new: CircuitState, reason: str, *, until: float = 0.0) -> None:
        old, self._state = self._state, new
        self._until = until
        self._permits.clear()
        self._successes = 0
        self._forget_calls()
        self.generation += 1
        self.is_closed = new is CircuitState.CLOSED
        self._wake()
        if self.on_change is not None:
            try:
                self.on_change(CircuitChange(self.name, old, new, reason, self.retry_after))
            except Exception as error:  # a broken hook must not break the call
                log.error(
                    "circuit_hook_failed",
                    circuit=self.name,
                    error=redact_exception(error),
                    traceback=error,
                )

    def _forget_calls(self) -> None:
        self.in_a_row = 0
        if self._window is not None:
            self._window.clear()

    def _wake(self) -> None:
        for changed, runtime in list(self._waiting.items()):
            if runtime.thread_id == threading.get_ident():
                changed.set()
            else:
                runtime.call_soon(changed.set)

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.name} {self.state.value}>"


def _end(permit: Permit, error: BaseException | None) -> None:
    """End a permit by the outcome of its call."""
    if error is None:
        permit.success()
    elif isinstance(error, Exception):
        permit.failure(error)
    else:
        permit.release()


def _end_with(permit: Permit, value: object) -> None:
    if isinstance(value, FailedResult):
        permit.failure(value.peek_exception())
    else:
        permit.success()


async def _awaited(permit: Permit, call: Awaitable[T]) -> T:
    try:
        value = await call
    except BaseException as error:
        _end(permit, error)
        raise
    _end_with(permit, value)
    return value


def _ignored_by(config: CircuitBreakerConfig) -> Callable[[Exception], bool]:
    """Whether an error does not count as a failure, as a function."""
    given = [cast("type[Exception]", one) for one in config.ignore if isinstance(one, type)]
    types: tuple[type[Exception], ...] = (Refusal, RecursionError, *given)
    # An OSError only by types of its own tree: a certificate that cannot be verified is a
    # ValueError too, and yet an outage.
    of_os = [one for one in given if issubclass(one, OSError) or issubclass(OSError, one)]
    os_types: tuple[type[Exception], ...] = (Refusal, *of_os)
    predicates = [one for one in config.ignore if not isinstance(one, type)]

    def is_ignored(error: Exception) -> bool:
        if isinstance(error, os_types if isinstance(error, OSError) else types):
            return True
        return any(_matches(predicate, error) for predicate in predicates)

    return is_ignored


def _matches(predicate: Callable[[Exception], bool], error: Exception) -> bool:
    try:
        return bool(predicate(error))
    except Exception as broken:  # the error counts, as if there were no predicate
        log.error("circuit_predicate_failed", error=redact_exception(broken), traceback=broken)
        return False
