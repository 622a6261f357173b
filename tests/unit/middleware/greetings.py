"""Messages and a handler for tests of the chain."""

from __future__ import annotations

from msgbus import Command, Event


class Greet(Command[str]):
    who: str = "you"


class GreetLoudly(Greet):
    pass


class Happened(Event):
    number: int = 0


class HappenedAgain(Happened):
    pass


async def greet(command: Greet) -> str:
    return f"hello {command.who}"
