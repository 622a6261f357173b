"""Three processes that share a subscription, beside one that has it alone.

Each process is `python -m benchmarks.sharing FOLDER`. It says that it is ready, handles what
comes, writes down each message that it has handled, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from benchmarks.durable import OrderPlaced, bus_of, new_folder
from benchmarks.journal import make_folder
from benchmarks.rows import Row
from benchmarks.timing import Effort, Measurement, WorkNotDoneError, as_speed, summarise
from msgbus import MessageBus
from msgbus.subscriptions import Mode

SECONDS: Final = 0.005
"""Of one message in its handler."""

IN_FLIGHT: Final = 8
PROCESSES: Final = 3
MESSAGES: Final = 3_000
PATIENCE: Final = 120.0


# -- in a process of its own -------------------------------------------------------------------


async def work(folder: Path) -> None:
    handled = os.open(folder / "handled", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    async def handle(event: OrderPlaced) -> None:
        await asyncio.sleep(SECONDS)
        os.write(handled, b"%8d\n" % event.number)

    bus = bus_of(folder)
    bus.subscribe(OrderPlaced, handle, durable="orders", mode=Mode.SHARED, max_in_flight=IN_FLIGHT)
    async with bus:
        await bus.settled()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    os.close(handled)


# -- the processes together --------------------------------------------------------------------


@asynccontextmanager
async def process(folder: Path) -> AsyncGenerator[None]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "benchmarks.sharing", str(folder))
    started = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert started.stdin is not None
    assert started.stdout is not None
    try:
        if await started.stdout.readline() != b"ready\n":
            message = "A process that was to share the work has ended."
            raise WorkNotDoneError(message)
        yield
    finally:
        started.stdin.close()
        await started.wait()


@asynccontextmanager
async def team(folder: Path, processes: int) -> AsyncGenerator[MessageBus]:
    """A bus that only publishes, and so many processes that handle."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(bus_of(folder))
        for _ in range(processes):
            await stack.enter_async_context(process(folder))
        yield bus


async def handle_all(bus: MessageBus, folder: Path) -> float:
    """Seconds a message until all that is published now is handled, each once."""
    file = folder / "handled"
    file.write_bytes(b"")
    began = time.perf_counter()
    await bus.publish_many(OrderPlaced(number=number) for number in range(MESSAGES))
    size = 0
    while size < MESSAGES * 9 and time.perf_counter() - began < PATIENCE:
        await asyncio.sleep(0.005)
        size = file.stat().st_size
    took = time.perf_counter() - began
    handled = sorted(map(int, file.read_text().split()))
    if handled != list(range(MESSAGES)):
        message = f"{MESSAGES} messages were published, {len(handled)} were handled."
        raise WorkNotDoneError(message)
    return took / MESSAGES


async def share(effort: Effort) -> Measurement:
    with new_folder() as folder:
        one, three = (make_folder(str(folder), name) for name in ("one", "three"))
        async with team(one, 1) as alone, team(three, PROCESSES) as together:
            await handle_all(alone, one)  # the first is the warm-up
            await handle_all(together, three)
            pairs = [
                (await handle_all(alone, one), await handle_all(together, three))
                for _ in range(max(3, effort.processes // 2))
            ]
    return as_speed(summarise(pairs))


ROWS: Final = (
    Row(
        name="durable.processes",
        title=f"speed of {PROCESSES} processes, shared, a handler of {SECONDS * 1000:g} ms",
        baseline="1 process",
        measure=share,
        budget=2.2,
        aim=2.8,
        is_speed=True,
        heavy=True,
    ),
)

if __name__ == "__main__":
    logging.getLogger("msgbus").setLevel(logging.ERROR)
    asyncio.run(work(Path(sys.argv[1])))
