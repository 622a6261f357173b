"""The worker of act 2, a process of its own: `python -m examples.shop.worker FOLDER NUMBER`.

It handles sales from the journal until it reads "finish" from its standard input, or is killed.
"""

import logging
import sys
from pathlib import Path

import anyio
import anyio.to_thread

from examples.shop.messages import WRONG, OrderPlaced
from msgbus import BusConfig, MessageBus, Unhandleable
from msgbus.subscriptions import Mode, SubscriptionTuning

BUFFER = 100  # so many messages may be in the memory of a worker: if it is killed, they come again
SILENCE = 1.0  # seconds; a worker that is killed is noticed before, at least on Linux


def url_of(folder: Path) -> str:
    return f"sqlite:///{(folder / 'shop.db').resolve().as_posix()}"


def open_worker(folder: Path, number: int) -> MessageBus:
    """Make the bus of one worker, with two durable handlers."""
    config = BusConfig(name=f"worker-{number}", member_ttl=SILENCE)
    bus = MessageBus(config, journal=url_of(folder))
    mail = (folder / "receipts.txt").open("a", buffering=1)  # stands for a mail server

    # One event after the other, in the order of the journal, on one worker at a time. A worker
    # that is killed after the mail and before the acknowledgement has the mail sent twice.
    @bus.on(
        OrderPlaced,
        durable="send_receipt",
        mode=Mode.EXCLUSIVE,
        tuning=SubscriptionTuning(buffer=BUFFER),
    )
    async def send_receipt(event: OrderPlaced) -> None:
        if event.email.endswith(WRONG):
            raise Unhandleable(f"no such mailbox for order {event.number}")  # a dead letter at once
        await anyio.sleep(0.001)
        mail.write(f"{event.number} {number}\n")

    # Articles side by side, the sales of each in order. The row is written in one transaction
    # with the acknowledgement: whenever the worker is killed, both are there or neither.
    @bus.on(
        OrderPlaced,
        durable="take_stock",
        mode=Mode.KEY_SHARED,
        max_in_flight=5,
        idempotent=True,
    )
    async def take_stock(event: OrderPlaced) -> None:
        async with bus.transaction() as transaction:
            row = [event.number, number, event.quantity]
            transaction.execute("INSERT INTO shelf VALUES (?, ?, ?)", row)
            transaction.acknowledge()

    return bus


async def work(folder: Path, number: int) -> None:
    async with open_worker(folder, number) as bus:
        # The end of the input means that the parent is gone: then stop at once.
        if await anyio.to_thread.run_sync(sys.stdin.readline) == "finish\n":
            await bus.settled()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    anyio.run(work, Path(sys.argv[1]), int(sys.argv[2]))
