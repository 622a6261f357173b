"""Commands: one handler, one result."""

from __future__ import annotations

import pytest

from msgbus import Command, MessageBus, MissingHandlerError


class Add(Command[int]):
    left: int
    right: int


async def add(command: Add) -> int:
    return command.left + command.right


async def test_execute_gives_the_handlers_reply() -> None:
    bus = MessageBus()
    bus.register_command_handler(Add, add)

    result = await bus.execute(Add(left=1, right=2))

    assert result.success
    assert result.value == 3
    assert result.unwrap() == 3
    assert result.error is None


async def test_a_command_without_handler_raises_and_says_how_to_register_one() -> None:
    bus = MessageBus()

    with pytest.raises(MissingHandlerError, match="register_command_handler"):
        await bus.execute(Add(left=1, right=2))
