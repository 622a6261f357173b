"""What the ingredients of a dispatch cost one by one: a bare await with one thing added.

These rows have no budget. They say what the ratios of the other rows are made of, and what
a hand-written bus would pay for the same.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from benchmarks import subjects
from benchmarks.commands import BARE, BASELINE
from benchmarks.rows import Row
from benchmarks.subjects import Add
from benchmarks.timing import Handler, Run, Side, compare

current: Final[ContextVar[object]] = ContextVar("benchmarks_current", default=None)


class Outcome:
    """As many slots as a command's result."""

    __slots__ = ("context", "elapsed", "message", "owner", "reply")

    message: object
    owner: object
    context: object
    reply: object
    elapsed: float


@asynccontextmanager
async def with_coroutine(handler: Handler) -> AsyncGenerator[Run]:
    handlers = {Add: handler}

    async def dispatch(message: Any) -> Any:
        return await handlers[type(message)](message)

    yield partial(run_all, dispatch)


@asynccontextmanager
async def with_variable(handler: Handler) -> AsyncGenerator[Run]:
    handlers = {Add: handler}

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            token = current.set(message)
            await handlers[type(message)](message)
            current.reset(token)

    yield run


@asynccontextmanager
async def with_clock(handler: Handler) -> AsyncGenerator[Run]:
    handlers = {Add: handler}
    now = time.monotonic

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            began = now()
            await handlers[type(message)](message)
            elapsed = now() - began
            del elapsed

    yield run


@asynccontextmanager
async def with_result(handler: Handler) -> AsyncGenerator[Run]:
    handlers = {Add: handler}
    new = object.__new__

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            outcome = new(Outcome)
            outcome.message = message
            outcome.owner = handlers
            outcome.context = None
            outcome.reply = await handlers[type(message)](message)
            outcome.elapsed = 0.0

    yield run


@asynccontextmanager
async def with_counters(handler: Handler) -> AsyncGenerator[Run]:
    handlers = {Add: handler}
    durations: list[float] = []
    sent = 0

    async def run(messages: Sequence[Any]) -> None:
        nonlocal sent
        for message in messages:
            sent += 1
            try:
                await handlers[type(message)](message)
            finally:
                durations.append(0.0)
                if len(durations) >= 512:
                    durations.clear()

    yield run


async def run_all(dispatch: Callable[[Any], Awaitable[Any]], messages: Sequence[Any]) -> None:
    for message in messages:
        await dispatch(message)


def row(name: str, title: str, opened: Callable[[Handler], Any]) -> Row:
    side = Side(open=opened, build=subjects.commands, handler=subjects.add)
    return Row(
        name=f"parts.{name}",
        title=f"+ {title}",
        baseline=BARE,
        measure=partial(compare, BASELINE, side),
    )


ROWS: Final = (
    row("coroutine", "one more async def", with_coroutine),
    row("variable", "context variable set and reset", with_variable),
    row("clock", "two clock reads", with_clock),
    row("result", "result object of five slots", with_result),
    row("counters", "counters and a duration", with_counters),
)
