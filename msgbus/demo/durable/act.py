"""The second act itself: sell, kill the worker half-way, sell on, and let another finish."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast, final

import anyio

from msgbus.bus.bus import MessageBus
from msgbus.bus.session import BusSession
from msgbus.demo.durable.findings import Findings, find_out
from msgbus.demo.durable.folder import DemoError, Folder
from msgbus.demo.durable.process import Worker, start_worker
from msgbus.demo.durable.warehouse import HANDLERS, SHELF
from msgbus.demo.durable.worker import DONE, READY
from msgbus.demo.ledger import Ledger
from msgbus.demo.messages import Card, PlaceOrder
from msgbus.demo.plan import Plan
from msgbus.demo.rush import Till
from msgbus.demo.shop import PaymentGateway, Shop, is_real
from msgbus.handlers.config import BusConfig

TILLS: Final = 8
LOOK: Final = 0.02
PATIENCE: Final = 300.0
"""Seconds after which something must be wrong."""


class Watcher(Protocol):
    """Who is told how the act goes."""

    def update(self, scene: Scene) -> None:
        """Called many times a second."""
        ...

    def say(self, seconds: float, text: str, detail: str = "") -> None:
        """Something has happened."""
        ...


@final
@dataclass(slots=True)
class Scene:
    """How far things are."""

    till: Till = field(default_factory=Till)
    sent: int = 0
    """Orders that have their receipt."""
    again: int = 0
    """Receipts that were sent although they had been."""
    taken: int = 0
    """Orders whose goods are off the shelf."""


@final
@dataclass(slots=True)
class Course:
    """What happened on the way."""

    killed_at: float = 0.0
    exit_code: int | None = None
    """Of the worker that was killed."""
    published_at_kill: int = 0
    sent_at_kill: int = 0
    taken_at_kill: int = 0
    recovered: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the second worker logged about the journal that it found."""
    takeover: float = 0.0
    """Seconds from the kill until the second worker had both subscriptions."""


@final
@dataclass(frozen=True, slots=True)
class Recovery:
    """Everything that is known at the end."""

    plan: Plan
    till: Till
    folder: Folder
    published: int
    """Sales of which the bus said that they are durable."""
    course: Course
    findings: Findings
    seconds: float


async def run(plan: Plan, folder: Folder, watcher: Watcher) -> Recovery:
    """Take all orders on a bus with a journal, and kill its worker half-way.

    Raises:
        DemoError: A worker ended by itself, or it all took far too long.
    """
    try:
        with anyio.fail_after(PATIENCE):
            return await _Act(plan, folder, watcher).run()
    except TimeoutError as late:
        message = f"The worker is not done after {PATIENCE:g} s; something is wrong."
        raise DemoError(message) from late
    except ExceptionGroup as group:
        raise _first(group) from group


def _first(error: Exception) -> Exception:
    """What went wrong first, without the groups around it."""
    while isinstance(error, ExceptionGroup):
        error = cast("ExceptionGroup[Exception]", error).exceptions[0]
    return error


@final
class _Act:
    def __init__(self, plan: Plan, folder: Folder, watcher: Watcher) -> None:
        self._plan = plan
        self._folder = folder
        self._watcher = watcher
        self._scene = Scene()
        self._course = Course()
        self._shop = Shop(Ledger(outage_after=0))
        self._began = time.perf_counter()
        self._bus = MessageBus(
            BusConfig(name="shop"),
            journal=folder.url,
            filters=[is_real],
            provide={PaymentGateway: PaymentGateway()},
        )
        self._bus.register_command_handler(PlaceOrder, self._shop.place_order, name="place_order")

    async def run(self) -> Recovery:
        half = len(self._plan.at_tills) // 2
        async with self._bus:
            await self._bus.transact(_make_shelf)
            async with anyio.create_task_group() as watching:
                watching.start_soon(self._show)
                await self._first_half(self._plan.at_tills[:half])
                await self._second_half(self._plan.at_tills[half:])
                watching.cancel_scope.cancel()
            self._look()
            findings = await find_out(self._bus, self._folder)
        return Recovery(
            plan=self._plan,
            till=self._scene.till,
            folder=self._folder,
            published=self._published,
            course=self._course,
            findings=findings,
            seconds=time.perf_counter() - self._began,
        )

    async def _first_half(self, orders: Sequence[PlaceOrder]) -> None:
        """Import jobs and the first half of the tills; the worker is killed in the middle."""
        sales = sum(map(is_sale, [*orders, *(one for job in self._plan.imports for one in job)]))
        async with start_worker(self._folder, 1) as worker:
            await worker.hear(READY)
            self._say(f"worker 1 (process {worker.pid}) is at work")
            async with anyio.create_task_group() as everybody:
                for number, job in enumerate(self._plan.imports, 1):
                    everybody.start_soon(self._import, f"import-{number}", job)
                everybody.start_soon(self._sell, orders)
                await self._wait_for(sales // 3)
                await self._kill(worker)

    async def _kill(self, worker: Worker) -> None:
        course = self._course
        course.exit_code = await worker.kill()
        course.killed_at = time.perf_counter()
        self._look()
        course.published_at_kill = self._published
        course.sent_at_kill, course.taken_at_kill = self._scene.sent, self._scene.taken
        self._say(
            f"kill -9 {worker.pid}: {course.sent_at_kill:,} receipts are sent, "
            f"{course.taken_at_kill:,} orders are off the shelf, {course.published_at_kill:,} "
            f"sales are in the journal"
        )

    async def _second_half(self, orders: Sequence[PlaceOrder]) -> None:
        """The tills go on at once; another worker takes up where the first was."""
        async with anyio.create_task_group() as everybody:
            everybody.start_soon(self._sell, orders)
            async with start_worker(self._folder, 2) as worker:
                await self._take_over(worker)
                await self._until(lambda: self._scene.till.placed == len(self._plan.orders))
                await worker.finish()
                await worker.hear(DONE)
                self._say("all sales are handled")

    async def _take_over(self, worker: Worker) -> None:
        found = self._course.recovered = await worker.hear("journal_opened")
        self._say(
            f"worker 2 (process {worker.pid}) finds {found['subscriptions']} subscriptions in the "
            f"journal, together {found['behind']:,} messages behind; up to {found['in_doubt']:,} "
            f"of these were in the hands of the dead one",
            found["text"],
        )
        await worker.hear("subscription_active", times=len(HANDLERS))
        self._course.takeover = time.perf_counter() - self._course.killed_at
        self._say(
            f"it has taken over, {self._course.takeover:.1f} s after the kill; the tills went on "
            f"meanwhile"
        )

    # -- selling ---------------------------------------------------------------------------------

    @property
    def _published(self) -> int:
        return self._shop.orders_published.accepted

    async def _sell(self, orders: Sequence[PlaceOrder]) -> None:
        line = iter(orders)

        async def till() -> None:
            for order in line:
                await self._place(self._bus, order)

        async with anyio.create_task_group() as tills:
            for _ in range(TILLS):
                tills.start_soon(till)

    async def _import(self, name: str, orders: Sequence[PlaceOrder]) -> None:
        async with self._bus.session(name) as session:
            for order in orders:
                await self._place(session, order)

    async def _place(self, where: MessageBus | BusSession, order: PlaceOrder) -> None:
        self._scene.till.note(order, await where.execute(order))

    # -- watching --------------------------------------------------------------------------------

    def _say(self, text: str, detail: str = "") -> None:
        self._watcher.say(time.perf_counter() - self._began, text, detail)

    def _look(self) -> None:
        scene = self._scene
        lines = [
            line
            for diary in map(self._folder.diary, (1, 2))
            if diary.exists()
            for line in diary.read_bytes().splitlines()
        ]
        scene.sent = len(set(lines))
        scene.again = len(lines) - scene.sent
        scene.taken = _count_taken(self._folder)
        self._watcher.update(scene)

    async def _show(self) -> None:
        while True:
            self._look()
            await anyio.sleep(LOOK)

    async def _wait_for(self, number: int) -> None:
        """Until so many receipts are sent, and some goods are off the shelf."""
        await self._until(
            lambda: self._scene.sent >= number and self._scene.taken >= min(number, 1)
        )

    async def _until(self, is_true: Callable[[], bool]) -> None:
        # The worker is another process: its work is looked at from outside.
        while not is_true():  # noqa: ASYNC110
            await anyio.sleep(LOOK)


def is_sale(order: PlaceOrder) -> bool:
    """Whether it will be an event that goes as far as the handlers."""
    return order.card is Card.GOOD and not order.is_test


def _make_shelf(connection: sqlite3.Connection) -> None:
    connection.execute(SHELF)


def _count_taken(folder: Folder) -> int:
    """From outside, as any other program could: the shelf is an ordinary table."""
    with closing(sqlite3.connect(folder.journal)) as connection:
        number: int = connection.execute("SELECT count(*) FROM shelf").fetchone()[0]
        return number
