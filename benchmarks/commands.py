"""What a command costs on top of finding its handler in a dict and awaiting it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from benchmarks import subjects
from benchmarks.rows import Row
from benchmarks.subjects import Add, Offset, RefusedError
from benchmarks.timing import Handler, Run, Side, compare
from msgbus import CallNext, MessageBus, Middleware

BARE: Final = "await handlers[type(m)](m)"
SAME: Final = Add(left=1, right=2)


@asynccontextmanager
async def bare(handler: Handler) -> AsyncGenerator[Run]:
    handlers = {Add: handler}

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            await handlers[type(message)](message)

    yield run


@asynccontextmanager
async def bare_failing(handler: Handler) -> AsyncGenerator[Run]:
    handlers = {Add: handler}

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            try:  # noqa: SIM105 (suppress would slow the side that is the yardstick)
                await handlers[type(message)](message)
            except RefusedError:
                pass

    yield run


def new_bus(handler: Handler, middleware: int = 0) -> MessageBus:
    bus = MessageBus(middleware=[passing() for _ in range(middleware)], provide={Offset: Offset()})
    bus.register_command_handler(Add, handler)
    return bus


def passing() -> Middleware:
    async def pass_through(message: Any, call_next: CallNext) -> Any:
        return await call_next(message)

    return pass_through


@asynccontextmanager
async def execute(handler: Handler, *, middleware: int = 0) -> AsyncGenerator[Run]:
    async with new_bus(handler, middleware) as bus:

        async def run(messages: Sequence[Any]) -> None:
            for message in messages:
                await bus.execute(message)

        yield run


@asynccontextmanager
async def execute_again(handler: Handler) -> AsyncGenerator[Run]:
    """Each object that it is given was executed before."""
    async with new_bus(handler) as bus:

        async def run(messages: Sequence[Any]) -> None:
            for _ in messages:
                await bus.execute(SAME)

        yield run


@asynccontextmanager
async def execute_failing(handler: Handler) -> AsyncGenerator[Run]:
    async with new_bus(handler) as bus:

        async def run(messages: Sequence[Any]) -> None:
            for message in messages:
                # Looked at, as a caller would: a failure nobody looks at is logged.
                if (await bus.execute(message)).success:
                    raise AssertionError

        yield run


@asynccontextmanager
async def call(handler: Handler) -> AsyncGenerator[Run]:
    async with new_bus(handler) as bus:

        async def run(messages: Sequence[Any]) -> None:
            for message in messages:
                await bus.call(message)

        yield run


BASELINE: Final = Side(open=bare, build=subjects.commands, handler=subjects.add)
FAILING: Final = Side(open=bare_failing, build=subjects.commands, handler=subjects.fail)


FRESH: Final = Side(open=execute, build=subjects.commands, handler=subjects.add)


def row(
    name: str,
    title: str,
    candidate: Side,
    *,
    baseline: Side = BASELINE,
    budget: float | None = None,
    aim: float | None = None,
) -> Row:
    return Row(
        name=f"commands.{name}",
        title=title,
        baseline=BARE,
        measure=partial(compare, baseline, candidate),
        budget=budget,
        aim=aim,
    )


def with_middleware(number: int) -> Side:
    return Side(
        open=partial(execute, middleware=number), build=subjects.commands, handler=subjects.add
    )


def plain(handler: Handler) -> Side:
    return Side(open=execute, build=subjects.commands, handler=handler)


ROWS: Final = (
    row("execute", "execute, no middleware", plain(subjects.add), budget=7, aim=6),
    row("middleware3", "execute, 3 middleware", with_middleware(3), budget=12, aim=10),
    row("middleware10", "execute, 10 middleware", with_middleware(10)),
    row("call", "call", Side(open=call, build=subjects.commands, handler=subjects.add)),
    row("injected", "execute, injected dependency", plain(subjects.add_with_offset)),
    row("context", "execute, context parameter", plain(subjects.add_with_context), budget=11),
    Row(
        name="commands.again",
        title="execute, the same object again",
        baseline="execute, a fresh object",
        measure=partial(
            compare,
            FRESH,
            Side(open=execute_again, build=subjects.commands, handler=subjects.add),
        ),
        budget=1.15,
    ),
    row(
        "failing",
        "execute, handler raises",
        Side(open=execute_failing, build=subjects.commands, handler=subjects.fail),
        baseline=FAILING,
    ),
)
