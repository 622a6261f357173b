"""Whether a bus slows down as it grows: everything registered is used once, then measured.

Both sides send to the same number of types, spread over all that are registered, so that
they differ in nothing but in how much else the bus knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from typing import Any, Final

from benchmarks import subjects
from benchmarks.rows import Row
from benchmarks.subjects import Add, Added
from benchmarks.timing import Effort, Handler, Measurement, Open, Run, Side, compare
from msgbus import BusSession, Command, Event, MessageBus

SPREAD: Final = 10
"""Types that are sent to, on both sides, and the smaller number of registered ones."""

TYPES: Final = (100, 1_000, 10_000)
SESSIONS: Final = (100, 10_000)

LIGHT: Final = 1_000
"""Rows with more of anything take seconds to set up."""

FLAT: Final = 1.5
"""Budget: more than this is not flat."""


@cache
def command_types(number: int) -> list[type[Command[int]]]:
    made = list(command_types(number // 10)) if number > SPREAD else []
    made += [
        type(f"Command{index}", (Command,), {"__module__": __name__})
        for index in range(len(made), number)
    ]
    return made


@cache
def event_types(number: int) -> list[type[Event]]:
    made = list(event_types(number // 10)) if number > SPREAD else []
    made += [
        type(f"Event{index}", (Event,), {"__module__": __name__})
        for index in range(len(made), number)
    ]
    return made


def spread(types: Sequence[type[Any]], number: int) -> list[Any]:
    chosen = types[:: max(1, len(types) // SPREAD)]
    return [chosen[index % len(chosen)]() for index in range(number)]


class Countdown:
    """Waits for handlers without asking the bus, whose answer takes longer the more it runs."""

    def __init__(self) -> None:
        self._left = 0
        self._done = asyncio.Event()

    def expect(self, calls: int) -> None:
        self._left = calls
        self._done = asyncio.Event()

    def around(self, handler: Handler) -> Handler:
        async def counted(event: Event) -> None:
            await handler(event)
            self._left -= 1
            if not self._left:
                self._done.set()

        return counted

    async def wait(self) -> None:
        await self._done.wait()


@asynccontextmanager
async def execute_types(handler: Handler, *, types: int) -> AsyncGenerator[Run]:
    bus = MessageBus()
    for command_type in command_types(types):
        bus.register_command_handler(command_type, handler)

    async def run(messages: Sequence[Any]) -> None:
        for message in messages:
            await bus.execute(message)

    async with bus:
        for command_type in command_types(types):
            await bus.execute(command_type())
        yield run


@asynccontextmanager
async def publish_types(handler: Handler, *, types: int) -> AsyncGenerator[Run]:
    countdown = Countdown()
    bus = MessageBus()
    for event_type in event_types(types):
        bus.register_event_handler(event_type, countdown.around(handler))

    async def run(messages: Sequence[Any]) -> None:
        countdown.expect(len(messages))
        for message in messages:
            await bus.publish(message)
        await countdown.wait()

    async with bus:
        await run([event_type() for event_type in event_types(types)])
        yield run


@asynccontextmanager
async def open_sessions(bus: MessageBus, number: int) -> AsyncGenerator[list[BusSession]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(bus.session()) for _ in range(number)]


@asynccontextmanager
async def execute_in_session(handler: Handler, *, sessions: int) -> AsyncGenerator[Run]:
    async with MessageBus() as bus, open_sessions(bus, sessions) as opened:
        for session in opened:
            session.register_command_handler(Add, handler)
        for session, command in zip(opened, subjects.commands(sessions), strict=True):
            await session.execute(command)

        async def run(messages: Sequence[Any]) -> None:
            execute = opened[0].execute
            for message in messages:
                await execute(message)

        yield run


@asynccontextmanager
async def publish_in_session(handler: Handler, *, sessions: int) -> AsyncGenerator[Run]:
    countdown = Countdown()
    async with MessageBus() as bus, open_sessions(bus, sessions) as opened:
        for session in opened:
            session.register_event_handler(Added, countdown.around(handler), name="note")
        countdown.expect(sessions)
        for session, event in zip(opened, subjects.events(sessions), strict=True):
            await session.publish(event)
        await countdown.wait()

        async def run(messages: Sequence[Any]) -> None:
            publish = opened[0].publish
            countdown.expect(len(messages))
            for message in messages:
                await publish(message)
            await countdown.wait()

        yield run


def over_types(what: str, number: int) -> Row:
    """The same work with many registered types and with few."""

    async def measure(effort: Effort) -> Measurement:
        return await compare(side(SPREAD), side(number), effort)

    def side(size: int) -> Side:
        if what == "execute":
            types: Sequence[type[Any]] = command_types(size)
            opened: Open = partial(execute_types, types=size)
        else:
            types = event_types(size)
            opened = partial(publish_types, types=size)
        return Side(open=opened, build=partial(spread, types), handler=subjects.note)

    return Row(
        name=f"growth.{what}_types_{number}",
        title=f"{what}, {number:,} types",
        baseline=f"the same, {SPREAD} types",
        measure=measure,
        budget=FLAT,
        heavy=number > LIGHT,
    )


def over_sessions(what: str, number: int) -> Row:
    """The same work with many live sessions and with one."""

    async def measure(effort: Effort) -> Measurement:
        return await compare(side(1), side(number), effort)

    def side(size: int) -> Side:
        if what == "execute":
            opened: Open = partial(execute_in_session, sessions=size)
            return Side(open=opened, build=subjects.commands, handler=subjects.add)
        opened = partial(publish_in_session, sessions=size)
        return Side(open=opened, build=subjects.events, handler=subjects.note)

    return Row(
        name=f"growth.{what}_sessions_{number}",
        title=f"{what} in 1 of {number:,} sessions",
        baseline="the same, 1 session",
        measure=measure,
        budget=FLAT,
        heavy=number > LIGHT,
    )


ROWS: Final = (
    *(over_types(what, number) for what in ("execute", "publish") for number in TYPES),
    *(over_sessions(what, number) for what in ("execute", "publish") for number in SESSIONS),
)
