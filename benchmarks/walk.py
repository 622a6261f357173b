"""The files and functions of msgbus that a message passes: `python -m benchmarks.walk`.

Measured with `sys.setprofile`, in all threads of this process. Each walk is that of the second
message on a bus, so that what is set up once is not counted; `--first` counts it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import logging
import re
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias

import anyio

import msgbus
from benchmarks import subjects
from benchmarks.subjects import Add, Added
from msgbus import BusConfig, MessageBus, pipeline
from msgbus.journal import SqliteJournal
from msgbus.resilience import CircuitBreakerConfig, ResilientMessageBus, RetryConfig
from msgbus.runtime.clock import SystemClock
from msgbus.testing import VirtualClock

PACKAGE: Final = Path(msgbus.__file__).parent
PAGE: Final = PACKAGE.parent / "docs" / "explanation" / "architecture.md"

UNWATCHED: Final = BusConfig(slow_callback=None)
"""Without the thread that watches the event loop: it runs on a timer."""

Passed: TypeAlias = dict[str, list[str]]
"""Functions by file, both in the order of their first call."""


class Trace:
    """Notes the first call of each function of msgbus that one message of a walk passes.

    Args:
        turn: 0 for the first message on a bus, 1 for the second.
    """

    def __init__(self, turn: int) -> None:
        self._turn = turn
        self._is_recording = False
        self._seen: dict[CodeType, None] = {}

    @contextmanager
    def installed(self) -> Generator[None]:
        """Watch this thread, and those that are started inside."""
        before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before[0])
            threading.setprofile(before[1])

    @contextmanager
    def recording(self, turn: int) -> Generator[None]:
        gc.collect()
        gc.disable()  # what others left behind is no part of the walk
        self._is_recording = turn == self._turn
        try:
            yield
        finally:
            self._is_recording = False
            gc.enable()

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if self._is_recording and event == "call":
            self._seen.setdefault(frame.f_code)

    def passed(self) -> Passed:
        found: Passed = {}
        for code in self._seen:
            file = Path(code.co_filename)
            if file.is_relative_to(PACKAGE) and is_function(code):
                functions = found.setdefault(file.relative_to(PACKAGE.parent).as_posix(), [])
                functions.append(code.co_qualname.replace(".<locals>", ""))
        return found


def is_function(code: CodeType) -> bool:
    """Tell named functions from modules, class bodies and lambdas."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")


# -- the walks -----------------------------------------------------------------------------


async def command(trace: Trace, folder: Path) -> None:
    """A command: `execute`, until it returns the result."""
    del folder
    bus = MessageBus(UNWATCHED)
    bus.register_command_handler(Add, subjects.add)
    async with bus:
        for turn, one in enumerate(subjects.commands(2)):
            with trace.recording(turn):
                await bus.execute(one)


async def event(trace: Trace, folder: Path) -> None:
    """An event in memory: `publish`, until its handler has returned."""
    del folder
    bus = MessageBus(UNWATCHED)
    handled = anyio.Event()

    async def handle(event: Added) -> None:
        del event
        handled.set()

    bus.register_event_handler(Added, handle)
    async with bus:
        for turn, one in enumerate(subjects.events(2)):
            handled = anyio.Event()
            with trace.recording(turn):
                await bus.publish(one)
                await handled.wait()
                await other_tasks()


async def durable(trace: Trace, folder: Path) -> None:
    """A durable event: `publish`, until it is handled and acknowledged.

    The acknowledgement is written at once, instead of 0.2 seconds later, and both clocks stand
    still, so that nothing else that is due meanwhile is traced with it: looks at what other
    processes do, for example.
    """
    journal = SqliteJournal(folder / "walk.db", clock=VirtualClock())
    bus = MessageBus(UNWATCHED, journal=journal, clock=still_clock())
    handled = anyio.Event()

    async def handle(event: Added) -> None:
        del event
        handled.set()

    bus.register_event_handler(Added, handle, durable="walk")
    async with journal, bus:
        for turn, one in enumerate(subjects.events(2)):
            await bus.settled()
            await all_wait(journal)
            handled = anyio.Event()
            flush, written = write_acknowledgements(bus)
            with trace.recording(turn):
                await bus.publish(one)
                await handled.wait()
                flush()
                await written.wait()


def still_clock() -> SystemClock:
    """Return a clock by which nothing is ever due; a virtual one is another walk."""
    clock, now = SystemClock(), time.time()

    def never(seconds: float) -> anyio.CancelScope:
        del seconds
        return anyio.CancelScope()

    vars(clock)["time"] = lambda: now
    vars(clock)["cancel_after"] = never
    return clock


async def all_wait(journal: SqliteJournal) -> None:
    """Return when the bus waits for commits of other processes, and the thread for requests."""
    while not journal._watch._waiting:  # pyright: ignore[reportPrivateUsage]
        await anyio.lowlevel.checkpoint()
    for _ in range(2):  # what it was asked before is done when it takes the second
        await journal.commit([])


def write_acknowledgements(bus: MessageBus) -> tuple[Callable[[], object], anyio.Event]:
    """Return what has a commit written now, and what is set when one has moved the cursor."""
    durability: Any = bus._state.durability  # pyright: ignore[reportPrivateUsage]
    (handler,) = durability.handlers._handlers.values()
    state, written = handler.loop.state, anyio.Event()
    partition, committed = state.owned[0], state.committed
    before, event_loop = partition.cursor.acked, asyncio.get_running_loop()

    def watched(kept: bool) -> Any:  # on the thread of the journal
        call = committed(kept)
        if partition.cursor.acked > before:
            event_loop.call_soon_threadsafe(written.set)
        return call

    state.committed = watched
    return durability.membership.flush_soon, written


async def dead_letter(trace: Trace, folder: Path) -> None:
    """An event that always fails: two retries, until its dead letter is stored."""
    del folder
    bus = ResilientMessageBus(
        UNWATCHED,
        retry=RetryConfig(max_retries=2, initial_delay=0.001, jitter=False),
        breaker=CircuitBreakerConfig(failure_threshold=100),  # it stays closed
    )
    attempts, failed = 0, anyio.Event()

    async def fail(event: Added) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 3:
            failed.set()
        raise subjects.RefusedError(event.left)

    bus.register_event_handler(Added, fail)
    async with bus:
        for turn, one in enumerate(subjects.events(2)):
            attempts, failed = 0, anyio.Event()
            with trace.recording(turn):
                await bus.publish(one)
                await failed.wait()
                await other_tasks()
            assert await bus.dead_letters.count() == turn + 1


async def spark(trace: Trace, folder: Path) -> None:
    """A Spark query: `pipeline.open`, until the messages are counted; workers are not traced."""
    url = f"sqlite:///{folder / 'walk.db'}"
    async with MessageBus(UNWATCHED, journal=url) as bus:
        for one in subjects.events(3):
            await bus.publish(one)
    for turn in range(2):
        with trace.recording(turn):
            assert pipeline.open(url).messages().count() == 3


async def other_tasks() -> None:
    """Let every other task go on until it waits."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


WALKS: Final[dict[str, Callable[[Trace, Path], Awaitable[None]]]] = {
    "command": command,
    "event": event,
    "durable": durable,
    "dead-letter": dead_letter,
    "spark": spark,
}


def walk(name: str, *, first: bool = False) -> Passed:
    """Trace the second message on a bus, or the first."""
    trace = Trace(0 if first else 1)

    async def run(to: Trace) -> None:
        with tempfile.TemporaryDirectory() as folder:
            await WALKS[name](to, Path(folder))

    if first:
        asyncio.run(run(Trace(1)))  # what is set up once in a process is not counted
    with trace.installed():
        asyncio.run(run(trace))
    return trace.passed()


# -- the page ------------------------------------------------------------------------------


LIST: Final = re.compile(
    r"(?P<mark><!-- walk: (?P<name>[\w-]+)(?P<first> --first)? -->\n\n)(?P<lines>(?:\d+\. .+\n)*)"
)
LINE: Final = re.compile(r"^\d+\. `([^`]+)`: (.+)$", re.MULTILINE)


def listed(name: str, *, first: bool = False) -> dict[str, str]:
    """The list of a walk on the page: what it says of each file, in order."""
    for found in LIST.finditer(PAGE.read_text(encoding="utf-8")):
        if (found["name"], bool(found["first"])) == (name, first):
            return dict(LINE.findall(found["lines"]))
    raise LookupError(name)


def renew_page() -> None:
    """Measure the lists of the page again; of a file that is new there, name the functions."""

    def renewed(found: re.Match[str]) -> str:
        said = dict(LINE.findall(found["lines"]))
        passed = walk(found["name"], first=bool(found["first"]))
        lines = (f"`{file}`: {said.get(file) or ', '.join(passed[file])}" for file in passed)
        numbered = (f"{number}. {line}\n" for number, line in enumerate(lines, 1))
        return found["mark"] + "".join(numbered)

    PAGE.write_text(LIST.sub(renewed, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


# -- the command line ----------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WALKS)}")
    parser.add_argument("--first", action="store_true", help="the first message on a bus")
    parser.add_argument("--counts", action="store_true", help="print only the numbers")
    parser.add_argument("--page", action="store_true", help=f"renew the lists of {PAGE.name}")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(WALKS))
    if unknown:
        parser.error(f"no such walk: {', '.join(unknown)}; walks are: {', '.join(WALKS)}")
    if options.page:
        renew_page()
        return 0
    for name in options.names or WALKS:
        passed = walk(name, first=options.first)
        functions = sum(map(len, passed.values()))
        print(f"{name}: {len(passed)} files, {functions} functions")
        if not options.counts:
            print(f"{inspect.getdoc(WALKS[name])}\n")
            print(*(f"  {file}: {', '.join(passed[file])}" for file in passed), "", sep="\n")
    return 0


if __name__ == "__main__":
    logging.getLogger("msgbus").setLevel(logging.CRITICAL)  # a handler fails on purpose
    sys.exit(main())
