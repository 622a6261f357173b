"""Act 2: sales go to a journal on disk, and the worker that handles them is killed."""

import sqlite3
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import NamedTuple

import anyio
import anyio.to_thread

from examples.shop.handlers import Ledger, Shop, orders
from examples.shop.messages import Card, PlaceOrder
from examples.shop.rush import Till, place_orders
from examples.shop.worker import url_of
from msgbus import BusConfig, MessageBus
from msgbus.journal import Record, Selection, State

ROOT = Path(__file__).resolve().parents[2]
MARK = "# Made by examples/shop, which replaces its files at each run.\n*\n"


class Handled(NamedTuple):
    """Counts of one durable handler."""

    rows: list[tuple[int, int]]  # each time that it did its work: the order, the worker
    dead: list[int]  # the orders of its dead letters
    cursor: int  # the offset up to which it is done with the journal

    @property
    def again(self) -> int:
        """Deliveries of messages that it had handled before."""
        return len(self.rows) - len({number for number, _ in self.rows})


@dataclass
class Durable:
    """Everything that is counted in the second act."""

    book: Sequence[PlaceOrder]
    folder: Path
    till: Till = field(default_factory=Till)
    shop: Shop = field(default_factory=lambda: Shop(Ledger(outage_after=0)))
    killed: float = 0.0  # when
    journal: Sequence[Record] = ()  # the sales that are in the journal
    handlers: dict[str, Handled] = field(default_factory=dict[str, Handled])
    units: int = 0  # in the rows of `take_stock`


async def run(act: Durable) -> None:
    """Place the orders, kill the worker on the way, and let another one finish."""
    bus = MessageBus(
        BusConfig(name="shop"),
        journal=url_of(act.folder),
        registries=[orders],
        provide={Shop: act.shop},
    )
    half = len(act.book) // 2
    with anyio.fail_after(300):
        async with bus:
            table = "CREATE TABLE shelf (number INTEGER, worker INTEGER, units INTEGER)"
            await bus.transact(lambda database: database.execute(table))
            await sell_and_kill(bus, act, act.book[:half])
            await sell_and_take_over(bus, act, act.book[half:])
            await read_results(bus, act)


async def sell_and_kill(bus: MessageBus, act: Durable, book: Sequence[PlaceOrder]) -> None:
    """Kill the worker when a third of the receipts is sent. The tills go on."""
    third = sum(order.card is Card.GOOD for order in book) // 3

    def is_time() -> bool:
        receipts, shelf = read_receipts(act.folder), read_shelf(act.folder)
        return len(receipts) >= third and len(shelf) >= min(third, 1)

    with start_worker(act.folder, 1) as worker:
        await wait_until(lambda: is_active(act.folder, 1), worker)
        print(f"  worker 1 (process {worker.pid}) handles the sales")
        async with anyio.create_task_group() as tills:
            tills.start_soon(place_orders, bus, book, act.till)
            await wait_until(is_time, worker)
            worker.kill()
            worker.wait()
            act.killed, sold = time.perf_counter(), act.shop.sales.accepted
            sent = len(read_receipts(act.folder))
            print(f"  kill -9 {worker.pid}: {sold:,} sales are on disk, {sent:,} receipts are sent")


async def sell_and_take_over(bus: MessageBus, act: Durable, book: Sequence[PlaceOrder]) -> None:
    """Sell on. A second worker takes over, and finishes what is left."""
    with start_worker(act.folder, 2) as worker:
        async with anyio.create_task_group() as tills:
            tills.start_soon(place_orders, bus, book, act.till)
            await wait_until(lambda: is_active(act.folder, 2), worker)
            seconds = time.perf_counter() - act.killed
            print(f"  worker 2 (process {worker.pid}) takes over {seconds:.1f} s after the kill")
        await anyio.to_thread.run_sync(worker.communicate, "finish\n", abandon_on_cancel=True)


async def read_results(bus: MessageBus, act: Durable) -> None:
    """Read what the workers left: in the journal, on the shelf, at the mail server."""
    journal, shelf = bus.journal, read_shelf(act.folder)
    assert journal is not None
    scan = await journal.read(0, 10**9, Selection(names={"shop.OrderPlaced"}))
    act.journal = [record for record in scan.records if isinstance(record, Record)]
    act.units = sum(units for _, _, units in shelf)
    taken = [(number, worker) for number, worker, _ in shelf]
    for name, rows in {"send_receipt": read_receipts(act.folder), "take_stock": taken}.items():
        letters = {row.offset for row in await journal.find(name, [State.DEAD], limit=10**9)}
        dead = [record.json()["number"] for record in act.journal if record.offset in letters]
        cursor = min(partition.acked for partition in await journal.cursors(name))
        act.handlers[name] = Handled(rows, dead, cursor)


# --- The worker and its files, seen from outside --------------------------------------------------


@contextmanager
def start_worker(folder: Path, number: int) -> Generator[Popen[str]]:
    """Run worker.py in a process of its own, which ends with the block at the latest."""
    command = [sys.executable, "-m", "examples.shop.worker", str(folder.resolve()), str(number)]
    log = (folder / f"worker-{number}.log").open("w")
    # A session of its own: Ctrl-C is for the demo, which then ends the worker.
    worker = Popen(
        command, cwd=ROOT, stdin=PIPE, stdout=log, stderr=log, text=True, start_new_session=True
    )
    with log, worker:
        try:
            yield worker
        finally:
            worker.kill()


async def wait_until(is_true: Callable[[], bool], worker: Popen[str]) -> None:
    while not is_true():
        if worker.poll() is not None:
            raise ChildProcessError(f"worker ended with code {worker.returncode}; see its log")
        await anyio.sleep(0.02)


def is_active(folder: Path, number: int) -> bool:
    """Whether this worker has both subscriptions, by its log."""
    return (folder / f"worker-{number}.log").read_text("utf-8").count("subscription_active") == 2


def read_receipts(folder: Path) -> list[tuple[int, int]]:
    """The lines of `send_receipt`: order and worker."""
    lines = (folder / "receipts.txt").read_text("utf-8").splitlines()
    return [(int(number), int(worker)) for number, worker in map(str.split, lines)]


def read_shelf(folder: Path) -> list[tuple[int, int, int]]:
    """The rows of `take_stock`: order, worker and units."""
    with closing(sqlite3.connect(folder / "shop.db")) as database:
        return database.execute("SELECT * FROM shelf ORDER BY rowid").fetchall()


def clear(folder: Path) -> None:
    """Make the folder, or remove what an earlier run left; never somebody else's files."""
    mark = folder / ".gitignore"
    is_ours = mark.is_file() and mark.read_text("utf-8").startswith("# Made by")
    if folder.exists() and not is_ours and any(folder.iterdir()):
        sys.exit(f"{folder} has files of somebody else. Name another folder: --folder PATH")
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(MARK, "utf-8")
    for pattern in ("shop.db*", "receipts.txt", "worker-*.log", "report.html"):
        for old in folder.glob(pattern):
            old.unlink()
    (folder / "receipts.txt").touch()
