"""A process that publishes, and forks meanwhile: `forker FOLDER BACKEND COUNT [blind]`.

Each child uses the bus, the journal or the store of letters of its parent, which it must not, and
writes how that ended. Then it ends as a program does. `blind`: the children do not know that they
are forked, and commit.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import anyio

from msgbus import BusConfig, Command, Event, MessageBus
from msgbus.errors import MsgBusError
from msgbus.journal import Selection, SqliteJournal
from msgbus.resilience import SqliteDeadLetterStore
from msgbus.runtime import forks
from tests.unit.resilience.test_letters import about

PATIENCE: Final = 5.0
"""Seconds that a child gets before it is killed."""


class Placed(Event, name="forks.Placed"):
    number: int


class Pack(Command[int], name="forks.Pack"):
    number: int


class Parent:
    """What the children inherit."""

    def __init__(self, folder: Path, journal: SqliteJournal) -> None:
        self.folder = folder
        self.journal = journal
        self.bus = MessageBus(config=BusConfig(record="all"), journal=journal)
        self.plain = MessageBus()
        self.store = SqliteDeadLetterStore(folder / "letters.db")
        self.handled: list[int] = []
        self.published = 0
        self.children: list[dict[str, Any]] = []
        self.bus.on(Placed, durable="orders")(self._handle)
        self.plain.on(Placed)(self._handle_plain)
        for bus in (self.bus, self.plain):
            bus.handles(Pack)(self._pack)

    async def _handle(self, event: Placed) -> None:
        self.handled.append(event.number)

    async def _handle_plain(self, event: Placed) -> None:
        pass

    async def _pack(self, command: Pack) -> int:
        return command.number

    async def publish(self) -> None:
        await self.bus.publish(Placed(number=self.published))
        self.published += 1

    async def letters(self) -> None:
        self.store.add(about(Placed(number=1)))
        await self.store.flush()

    async def open_again(self) -> None:
        await SqliteJournal(self.journal.path).close()

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Return what the children do, by name."""
        bus, plain, journal = self.bus, self.plain, self.journal
        return {
            "publish": lambda: bus.publish(Placed(number=-1)),
            "publish_many": lambda: bus.publish_many([Placed(number=-1)]),
            "execute": lambda: bus.execute(Pack(number=-1)),
            "enqueue": lambda: bus.enqueue(Pack(number=-1)),
            "settled": bus.settled,
            "stop": bus.stop,
            "start": bus.start,
            "plain publish": lambda: plain.publish(Placed(number=-1)),
            "plain execute": lambda: plain.execute(Pack(number=-1)),
            "commit": lambda: journal.commit([]),
            "read": lambda: journal.read(0, 10, Selection()),
            "changed": lambda: journal.changed(0),
            "trim": journal.trim,
            "close": journal.close,
            "open": self.open_again,
            "letters": self.letters,
        }


def in_child(parent: Parent, portal: Any, name: str, backend: str, output: int) -> None:
    """Make one call, and write how it ended."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    began, found = time.monotonic(), "value"

    async def call() -> None:
        await parent.calls()[name]()

    try:
        if name == "portal":
            portal.publish(Placed(number=-1))
        else:
            anyio.run(call, backend=backend)
    except MsgBusError as error:
        found = f"{type(error).__name__}: {error}"
    except BaseException as error:
        found = f"unexpected {error!r}"
    line = {"call": name, "found": found, "seconds": time.monotonic() - began}
    os.write(output, json.dumps(line).encode())
    # Its end takes seconds where many others work: all that was imported is collected.
    faulthandler.dump_traceback_later(10 * PATIENCE, exit=True)


def fork(parent: Parent, portal: Any, name: str, backend: str) -> dict[str, Any]:
    """Fork; return what the child has written."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        in_child(parent, portal, name, backend, writing)
        sys.exit(0)  # with all that a program does at its end
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    found = json.loads(text) if text else {"call": name, "found": "nothing", "seconds": PATIENCE}
    return {**found, "exit": os.waitstatus_to_exitcode(status)}


class Running:
    """The bus on an event loop in a thread of its own; the main thread forks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_ready = threading.Event()
        self.is_done = False
        self.parent: Parent
        self.portal: Any = None

    async def publish_meanwhile(self) -> None:
        async with SqliteJournal(self.folder / "shop.db") as journal:
            parent = self.parent = Parent(self.folder, journal)
            async with parent.bus, parent.plain:
                self.portal = parent.bus.portal()
                await parent.letters()
                await parent.publish()
                self.is_ready.set()
                while not self.is_done:
                    await parent.publish()
                await parent.bus.settled(timeout=60)
            report = await journal.verify()
        await parent.store.close()
        found = {
            "children": parent.children,
            "published": parent.published,
            "handled": parent.handled,
            "is_sound": report.is_sound,
            "letters": parent.store.size(),
        }
        print(json.dumps(found))


def main(folder: Path, backend: str, count: int) -> None:
    running = Running(folder)
    thread = threading.Thread(
        target=lambda: anyio.run(running.publish_meanwhile, backend=backend), daemon=True
    )
    thread.start()
    assert running.is_ready.wait(30)
    names = ["commit"] if "blind" in sys.argv else [*running.parent.calls(), "portal"]
    for number in range(count):
        name = names[number % len(names)]
        found = fork(running.parent, running.portal, name, backend)
        running.parent.children.append(found)
    running.is_done = True
    thread.join(60)


if __name__ == "__main__":
    if "blind" in sys.argv:
        forks._tell.__code__ = (lambda: None).__code__  # pyright: ignore[reportPrivateUsage]
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
