"""What resilience costs: while all is well, at one retry, and a circuit breaker by itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from benchmarks import commands, subjects
from benchmarks.rows import Measure, Row
from benchmarks.subjects import Add
from benchmarks.timing import Effort, Handler, Measurement, Run, Side, compare
from msgbus import MessageBus
from msgbus.resilience import CircuitBreaker, ResilientMessageBus, RetryConfig

PLAIN: Final = "execute on a plain bus"
PACKAGES: Final = ("circuitbreaker", "purgatory")
"""As they are called when installing."""

AT_ONCE: Final = RetryConfig(max_retries=1, initial_delay=0, jitter=False)


class FailsEveryOther:
    """Fails at the first try of each message and succeeds at the second."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._has_failed = False

    async def __call__(self, command: Add) -> int:
        self._has_failed = not self._has_failed
        if self._has_failed:
            raise ConnectionError
        value: int = await self._handler(command)
        return value


@asynccontextmanager
async def execute(bus: MessageBus, handler: Any) -> AsyncGenerator[Run]:
    bus.register_command_handler(Add, handler)
    async with bus:

        async def run(messages: Sequence[Any]) -> None:
            for message in messages:
                await bus.execute(message)

        yield run


@asynccontextmanager
async def plain(handler: Handler) -> AsyncGenerator[Run]:
    async with execute(MessageBus(), handler) as run:
        yield run


@asynccontextmanager
async def resilient(handler: Handler) -> AsyncGenerator[Run]:
    async with execute(ResilientMessageBus(), handler) as run:
        yield run


@asynccontextmanager
async def retried(handler: Handler) -> AsyncGenerator[Run]:
    bus = ResilientMessageBus(retry=AT_ONCE, breaker=None)
    async with execute(bus, FailsEveryOther(handler)) as run:
        yield run


@asynccontextmanager
async def raw_tenacity(handler: Handler) -> AsyncGenerator[Run]:
    tenacity = import_module("tenacity")
    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(2), wait=tenacity.wait_none(), reraise=True
    )
    call = retrying.wraps(FailsEveryOther(handler).__call__)

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            await call(message)

    yield run


@asynccontextmanager
async def breaker_block(handler: Handler) -> AsyncGenerator[Run]:
    breaker = CircuitBreaker()

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            async with breaker:
                await handler(message)

    yield run


@asynccontextmanager
async def breaker_call(handler: Handler) -> AsyncGenerator[Run]:
    call = CircuitBreaker().call

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            await call(handler, message)

    yield run


@asynccontextmanager
async def circuitbreaker(handler: Handler) -> AsyncGenerator[Run]:
    call: Callable[..., Any] = import_module("circuitbreaker").circuit(handler)

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            await call(message)

    yield run


@asynccontextmanager
async def purgatory(handler: Handler) -> AsyncGenerator[Run]:
    breaker = await import_module("purgatory").AsyncCircuitBreakerFactory().get_breaker("calls")

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            async with breaker:
                await handler(message)

    yield run


def side(opened: Any) -> Side:
    return Side(open=opened, build=subjects.commands, handler=subjects.add)


async def if_installed(package: str, candidate: Side, effort: Effort) -> Measurement | None:
    if find_spec(package) is None:
        return None
    return await compare(commands.BASELINE, candidate, effort)


def breaker_row(name: str, title: str, candidate: Side, package: str | None = None) -> Row:
    measure: Measure = partial(compare, commands.BASELINE, candidate)
    if package is not None:
        measure = partial(if_installed, package, candidate)
    return Row(name=f"breaker.{name}", title=title, baseline=commands.BARE, measure=measure)


ROWS: Final = (
    Row(
        name="resilience.execute",
        title="resilient execute, success",
        baseline=PLAIN,
        measure=partial(compare, side(plain), side(resilient)),
        budget=1.5,
    ),
    Row(
        name="resilience.retry",
        title="resilient execute, one retry",
        baseline="tenacity, one retry",
        measure=partial(compare, side(raw_tenacity), side(retried)),
    ),
    breaker_row("block", "async with breaker, closed", side(breaker_block)),
    breaker_row("call", "breaker.call, closed", side(breaker_call)),
    breaker_row("circuitbreaker", "circuitbreaker", side(circuitbreaker), "circuitbreaker"),
    breaker_row("purgatory", "purgatory", side(purgatory), "purgatory"),
)
