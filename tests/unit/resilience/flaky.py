"""Parts that the tests of resilience share: a breaker in virtual time, and things that fail."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from msgbus import Command, CommandResult, Event
from msgbus.resilience import (
    CircuitBreaker,
    CircuitBreakerConfig,
    CircuitChange,
    CircuitOpenError,
    CircuitState,
    ResilientMessageBus,
    RetryConfig,
)
from msgbus.runtime.clock import VirtualClock

CLOSED, HALF_OPEN, OPEN = CircuitState.CLOSED, CircuitState.HALF_OPEN, CircuitState.OPEN


class Down(Exception):  # noqa: N818 (what the callee says)
    """The callee is down."""


class Charge(Command[str]):
    number: int = 0


class Paid(Event):
    number: int = 0


class Circuit:
    """A breaker, its clock and all it has told."""

    def __init__(self, *, chance: float = 0.0, **config: Any) -> None:
        self.clock = VirtualClock(start=5.0)  # small, so that sums and products differ
        self.changes: list[CircuitChange] = []
        config.setdefault("jitter", 0.0)
        self.breaker = CircuitBreaker(
            CircuitBreakerConfig(**config),
            name="payments",
            clock=self.clock,
            on_change=self.changes.append,
            chance=lambda: chance,
        )

    @property
    def state(self) -> CircuitState:
        return self.breaker.state

    @property
    def states(self) -> list[CircuitState]:
        return [change.new for change in self.changes]

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            self.breaker.acquire().failure(Down())

    def succeed(self, times: int = 1) -> None:
        for _ in range(times):
            self.breaker.acquire().success()

    def refuses(self) -> bool:
        try:
            permit = self.breaker.acquire()
        except CircuitOpenError:
            return True
        permit.release()
        return False

    async def half_open(self) -> None:
        """Open it, and wait until it lets a call try."""
        self.fail(self.breaker.config.failure_threshold)
        assert self.state is OPEN
        await self.clock.advance(self.breaker.retry_after)
        assert self.state is HALF_OPEN


class Flaky:
    """A handler that fails so many times, then works; `errors` are raised in turn first."""

    def __init__(self, fails: int = 0, *errors: BaseException) -> None:
        self.errors: list[BaseException] = [*errors, *(Down(f"no {n}") for n in range(fails))]
        self.calls: list[Any] = []

    async def __call__(self, message: Any) -> str:
        self.calls.append(getattr(message, "number", message))
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def quick(max_retries: int = 3, **options: Any) -> RetryConfig:
    """Retries with pauses of 1, 2, 4 ... seconds, without chance."""
    numbers: dict[str, Any] = {"initial_delay": 1.0, "max_delay": 100.0, "jitter": False}
    return RetryConfig(max_retries=max_retries, **{**numbers, **options})


class Shop:
    """A resilient bus in virtual time, with one handler of `Charge`."""

    def __init__(self, handler: Any = None, **options: Any) -> None:
        self.clock = VirtualClock()
        options.setdefault("retry", quick())
        options.setdefault("breaker", None)
        self.bus = ResilientMessageBus(clock=self.clock, **options)
        self.handler = handler or Flaky()
        self.bus.register_command_handler(Charge, self.handler, name="charge")

    async def charge(self, seconds: float = 0.0, **options: Any) -> CommandResult[str]:
        """Execute one `Charge` while time passes."""
        results: list[CommandResult[str]] = []

        async def execute() -> None:
            results.append(await self.bus.execute(Charge(), **options))

        async with anyio.create_task_group() as group:
            group.start_soon(execute)
            await self.clock.advance(seconds)
        return results[0]


def fails_with(result: CommandResult[Any], kind: type[BaseException]) -> None:
    assert not result.success
    with pytest.raises(kind):
        result.unwrap()
