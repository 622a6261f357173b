"""A handler that blocks the event loop is named (20.4).

The blocks are real: a handler waits, on the loop's own thread, until the log has named it.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any, Final

import anyio
import anyio.to_thread
import pytest

from msgbus import BusConfig, Command, Event, MessageBus
from msgbus.runtime.clock import VirtualClock

LIMIT: Final = 0.1
LENIENT: Final = 0.4
"""The limit where nobody is to be blamed: a busy machine may stop the loop for a while."""
PATIENCE: Final = 30.0
"""Seconds after which a block ends even if nobody has named it: the test fails then."""


class Grind(Command):
    pass


class Outer(Command):
    pass


class Ground(Event):
    pass


class Blocks(logging.Handler):
    """Collects the log events about blocks, and lets threads wait for the first of a kind."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Mapping[str, Any]] = []
        self.blocked = threading.Event()
        self.unblocked = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        entry: Mapping[str, Any] = getattr(record, "msgbus", {})
        if entry.get("event") == "event_loop_blocked":
            self.entries.append(entry)
            self.blocked.set()
        elif entry.get("event") == "event_loop_unblocked":
            self.entries.append(entry)
            self.unblocked.set()

    def named(self) -> list[tuple[str, str, str, str]]:
        keys = ("event", "bus", "handler", "message_type")
        return [tuple(entry[key] for key in keys) for entry in self.entries]


@pytest.fixture
def blocks() -> Generator[Blocks]:
    handler = Blocks()
    logger = logging.getLogger("msgbus")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def make_bus(name: str = "shop", limit: float = LIMIT, **options: Any) -> MessageBus:
    return MessageBus(BusConfig(name=name, slow_callback=limit), **options)


def watches() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("msgbus loop watch")]


async def watched() -> None:
    """Let the loop run until the watch of a bus has begun."""
    with anyio.fail_after(PATIENCE):
        while not watches():
            await anyio.lowlevel.checkpoint()


def grind_until(blocks: Blocks) -> None:
    assert blocks.blocked.wait(PATIENCE)


def blocking(blocks: Blocks) -> Any:
    async def grind(message: object) -> None:
        grind_until(blocks)

    return grind


# -- who is named --------------------------------------------------------------------------------


async def test_an_event_handler_that_blocks_the_loop_is_named_with_its_stack(
    blocks: Blocks,
) -> None:
    bus = make_bus()

    @bus.on(Ground)
    async def grind(event: Ground) -> None:
        grind_until(blocks)

    async with bus:
        await watched()
        await bus.publish(Ground())
        await bus.settled()

    assert blocks.named() == [
        ("event_loop_blocked", "shop", "grind", "Ground"),
        ("event_loop_unblocked", "shop", "grind", "Ground"),
    ]
    blocked, unblocked = blocks.entries
    assert LIMIT <= blocked["seconds"] <= unblocked["seconds"] < PATIENCE
    assert blocked["limit"] == LIMIT
    lines = blocked["traceback"].split("\n")
    assert "of msgbus" in lines[0]
    assert any("in grind_until" in line for line in lines)
    assert "workers.py" not in blocked["traceback"]


async def test_a_command_handler_is_named(blocks: Blocks) -> None:
    bus = make_bus()
    bus.register_command_handler(Grind, blocking(blocks))

    async with bus:
        await watched()
        (await bus.execute(Grind())).unwrap()

    assert blocks.named()[0] == ("event_loop_blocked", "shop", "grind", "Grind")


async def test_of_nested_commands_the_innermost_is_named(blocks: Blocks) -> None:
    bus = make_bus()
    bus.register_command_handler(Grind, blocking(blocks))

    @bus.handles(Outer)
    async def outer(command: Outer) -> None:
        (await bus.execute(Grind())).unwrap()

    async with bus:
        await watched()
        (await bus.execute(Outer())).unwrap()

    assert blocks.named()[0] == ("event_loop_blocked", "shop", "grind", "Grind")


@pytest.mark.parametrize("options", [{"batch": True}, {"durable": "ground"}])
async def test_batch_handlers_and_durable_ones_are_named(
    blocks: Blocks, options: dict[str, Any]
) -> None:
    bus = make_bus(journal="memory:")
    bus.register_event_handler(Ground, blocking(blocks), **options)

    async with bus:
        await watched()
        await bus.publish(Ground())
        await bus.settled()

    assert blocks.named()[0] == ("event_loop_blocked", "shop", "grind", "Ground")


async def test_a_sync_handler_on_the_loop_is_named(blocks: Blocks) -> None:
    bus = make_bus()

    @bus.on(Ground, inline=True)
    def grind(event: Ground) -> None:
        grind_until(blocks)

    async with bus:
        await watched()
        await bus.publish(Ground())
        await bus.settled()

    assert blocks.named()[0] == ("event_loop_blocked", "shop", "grind", "Ground")


async def test_the_handler_of_an_enqueued_command_is_named(blocks: Blocks) -> None:
    bus = make_bus(journal="memory:")
    bus.register_command_handler(Grind, blocking(blocks))

    async with bus:
        await watched()
        await bus.enqueue(Grind())
        await bus.settled()

    assert blocks.named()[0] == ("event_loop_blocked", "shop", "grind", "Grind")


async def test_of_two_buses_on_a_loop_only_the_one_whose_handler_blocks_names_it(
    blocks: Blocks,
) -> None:
    caller, callee = make_bus("caller"), make_bus("callee")

    @callee.handles(Grind)
    async def grind(command: Grind) -> None:
        grind_until(blocks)

    @caller.handles(Outer)
    async def outer(command: Outer) -> None:
        (await callee.execute(Grind())).unwrap()

    async with caller, callee:
        with anyio.fail_after(PATIENCE):
            while len(watches()) < 2:
                await anyio.lowlevel.checkpoint()
        (await caller.execute(Outer())).unwrap()

    assert {bus for _, bus, _, _ in blocks.named()} == {"callee"}


def test_buses_in_other_threads_are_not_blamed(blocks: Blocks) -> None:
    done = threading.Event()

    async def be_quiet() -> None:
        async with make_bus("quiet"):
            await anyio.to_thread.run_sync(done.wait, PATIENCE)

    async def block() -> None:
        bus = make_bus("loud")

        @bus.handles(Grind)
        async def grind(command: Grind) -> None:
            grind_until(blocks)

        async with bus:
            with anyio.fail_after(PATIENCE):
                while len(watches()) < 2:
                    await anyio.lowlevel.checkpoint()
            (await bus.execute(Grind())).unwrap()
        done.set()

    other = threading.Thread(target=anyio.run, args=(be_quiet,))
    other.start()
    anyio.run(block, backend="trio")
    other.join(PATIENCE)

    assert {bus for _, bus, _, _ in blocks.named()} == {"loud"}


# -- who is not ----------------------------------------------------------------------------------


async def named_afterwards(bus: MessageBus, blocks: Blocks) -> list[str]:
    """The handlers named until one that really blocks was: the watch has looked in between."""
    (await bus.execute(Grind())).unwrap()
    return [handler for event, _, handler, _ in blocks.named() if event == "event_loop_blocked"]


async def test_a_handler_that_awaits_for_long_is_not_blamed(blocks: Blocks) -> None:
    bus = make_bus(limit=LENIENT)
    bus.register_command_handler(Grind, blocking(blocks))

    @bus.on(Ground)
    async def wait(event: Ground) -> None:
        await anyio.to_thread.run_sync(time.sleep, 2 * LENIENT)

    async with bus:
        await watched()
        await bus.publish(Ground())
        await bus.settled()
        assert blocks.entries == []
        assert await named_afterwards(bus, blocks) == ["grind"]


async def test_a_sync_handler_in_a_thread_is_not_blamed(blocks: Blocks) -> None:
    bus = make_bus(limit=LENIENT)
    bus.register_command_handler(Grind, blocking(blocks))

    @bus.on(Ground)
    def sleep(event: Ground) -> None:
        time.sleep(2 * LENIENT)

    async with bus:
        await watched()
        await bus.publish(Ground())
        await bus.settled()
        assert blocks.entries == []
        assert await named_afterwards(bus, blocks) == ["grind"]


async def test_code_beside_the_bus_that_blocks_the_loop_is_not_taken_for_a_handler(
    blocks: Blocks,
) -> None:
    bus = make_bus(limit=LENIENT)
    bus.register_command_handler(Grind, blocking(blocks))

    async with bus:
        await watched()
        time.sleep(2 * LENIENT)  # noqa: ASYNC251 (the loop is to stand still)
        await anyio.lowlevel.checkpoint()
        assert blocks.entries == []
        assert await named_afterwards(bus, blocks) == ["grind"]


def test_a_process_that_was_suspended_blames_nobody() -> None:
    code = """
import os, sys, threading, anyio
from msgbus import BusConfig, Command, MessageBus

class Grind(Command): ...

bus = MessageBus(BusConfig(slow_callback=0.8))

@bus.handles(Grind)
async def grind(command):
    print("now", flush=True)
    sys.stdin.readline()

async def main():
    async with bus:
        while threading.active_count() < 2:
            await anyio.sleep(0)
        (await bus.execute(Grind())).unwrap()

anyio.run(main)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "now\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(1.6)  # the child cannot say anything meanwhile
    child.send_signal(signal.SIGCONT)
    time.sleep(0.1)  # it is blocked still, but not for long
    _, errors = child.communicate("\n", timeout=PATIENCE)

    assert (child.returncode, errors) == (0, "")


# -- its thread ----------------------------------------------------------------------------------


async def test_the_thread_starts_with_each_start_of_a_bus_and_ends_with_each_stop() -> None:
    bus = make_bus()

    for _ in range(2):
        async with bus:
            await watched()
        assert watches() == []


async def test_a_bus_that_lives_shortly_starts_no_thread() -> None:
    for _ in range(10):
        async with MessageBus() as bus:
            assert bus.config.slow_callback == 1.0
            assert watches() == []


@pytest.mark.parametrize("off", ["virtual time", "None"])
async def test_it_can_be_off(off: str, blocks: Blocks) -> None:
    config = BusConfig(slow_callback=None if off == "None" else LIMIT)
    bus = MessageBus(config, clock=VirtualClock() if off == "virtual time" else None)

    async with bus, make_bus("other"):
        await watched()
        assert [one.name for one in watches()] == ["msgbus loop watch other"]


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("is_watched", [True, False])
def test_a_loop_that_ends_without_a_stop_ends_the_thread(loop: str, is_watched: bool) -> None:
    bus = make_bus()

    async def leave() -> None:
        await bus.start()
        if is_watched:
            await watched()

    anyio.run(leave, backend=loop)

    for thread in watches():
        thread.join(PATIENCE)
    assert watches() == []
    anyio.run(bus.stop, backend=loop)  # on another loop
