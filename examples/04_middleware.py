"""Code around every handler: any callable that takes `(message, call_next)`."""

import asyncio
from typing import Any

from msgbus import CallNext, Command, MessageBus


class Add(Command[int]):
    """Add numbers up."""

    numbers: list[int]


class AddSmall(Add):
    """The same; with no handler of its own, it goes to that of `Add`."""


async def trace(message: Any, call_next: CallNext) -> Any:
    value = await call_next(message)
    print(type(message).__name__, "gave", value)
    return value


class AtMost:
    """A middleware with settings is a class with `__call__`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        """Let no larger value out."""
        return min(await call_next(message), self._limit)


bus = MessageBus(middleware=[trace])  # the first is the outermost: it sees what others made
bus.add_middleware(AtMost(10), types=AddSmall)  # only around this command


@bus.handles(Add)
async def add(command: Add) -> int:
    return sum(command.numbers)


async def main() -> None:
    async with bus:
        await bus.call(Add(numbers=[7, 8]))
        await bus.call(AddSmall(numbers=[7, 8]))


asyncio.run(main())
# Output:
# > Add gave 15
# > AddSmall gave 10
