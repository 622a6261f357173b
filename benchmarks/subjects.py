"""The messages and handlers that most rows share."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any, cast

from benchmarks.timing import Handler
from msgbus import Command, Context, Event


class Add(Command[int]):
    left: int
    right: int


class Added(Event):
    left: int
    right: int


class Offset:
    """Something to inject."""

    value = 1


class RefusedError(Exception):
    """What the failing handler raises."""


async def add(command: Any) -> int:
    total: int = command.left
    return total


async def add_with_context(command: Add, context: Context) -> int:
    del context
    return command.left


async def add_with_offset(command: Add, offset: Offset) -> int:
    del offset
    return command.left


async def fail(command: Add) -> int:
    raise RefusedError(command.left)


async def note(event: Any) -> None:
    del event


async def note_all(events: list[Added]) -> None:
    del events


def commands(number: int) -> Sequence[Add]:
    return [Add(left=index, right=1) for index in range(number)]


def events(number: int) -> Sequence[Added]:
    return [Added(left=index, right=1) for index in range(number)]


def copies(handler: Handler, number: int) -> list[Handler]:
    """As many functions that do the same: some buses refuse to register one twice."""
    original = cast("FunctionType", handler)
    made: list[Handler] = []
    for _ in range(number):
        copy = FunctionType(
            original.__code__,
            original.__globals__,
            original.__name__,
            original.__defaults__,
            original.__closure__,
        )
        copy.__dict__.update(original.__dict__)
        copy.__annotations__ = original.__annotations__
        made.append(cast("Handler", copy))
    return made
