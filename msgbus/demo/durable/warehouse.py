"""The handlers of the worker: two durable subscriptions, and what each promises.

`send_receipt` has its effect outside the journal, in a file that stands for a mail server.
So a worker that is killed between the two may send a receipt twice; never not at all.
`take_stock` has its effect in a table in the journal's own file, in one transaction with the
word that its message is handled. So it happens once, whatever happens to the worker.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, final

import anyio

from msgbus.bus.bus import MessageBus
from msgbus.bus.context import Context
from msgbus.demo.aftermath import WRONG
from msgbus.demo.messages import OrderPlaced
from msgbus.errors import Unhandleable
from msgbus.handlers.config import BusConfig
from msgbus.handlers.delivery import Mode
from msgbus.subscriptions.config import RetryTiers

RECEIPTS: Final = "send_receipt"
STOCK: Final = "take_stock"
HANDLERS: Final = (RECEIPTS, STOCK)

LEASE: Final = 1.0
"""Seconds without a sign of life after which another worker may take over."""

FLUSH: Final = 50
WINDOW: Final = 100
"""Acks between two writes of a cursor, and messages in memory: so many at most come again."""

MAILING: Final = 0.001
"""Seconds per receipt."""

HICCUP_EVERY: Final = 200
"""The mail server refuses one receipt in so many at the first try."""

SOON: Final = RetryTiers(max_attempts=3, initial_delay=0.01)

SHELF: Final = "CREATE TABLE shelf (number INTEGER, sku TEXT, units INTEGER, worker INTEGER)"
TAKE: Final = "INSERT INTO shelf VALUES (?, ?, ?, ?)"


@final
class Warehouse:
    """The handlers of one worker.

    Args:
        worker: Its number, from 1 on.
        mail: The file where receipts go, one line each.
    """

    def __init__(self, worker: int, mail: Path, bus: MessageBus) -> None:
        self._worker = worker
        self._bus = bus
        # One write per line, handed to the system at once: it outlives the process.
        self._mail = os.open(mail, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    async def send_receipt(self, event: OrderPlaced, context: Context) -> None:
        """Send one mail, in the order of the sales."""
        if event.email.startswith(WRONG):
            message = f"no such mailbox for order {event.number}"
            raise Unhandleable(message)
        if event.number % HICCUP_EVERY == 0 and context.attempt == 1:
            message = "the mail server closed the connection"
            raise ConnectionResetError(message)
        await anyio.sleep(MAILING)
        os.write(self._mail, f"{event.number}\n".encode())

    async def take_stock(self, event: OrderPlaced) -> None:
        """Take the goods off the shelf: articles side by side, each in the order of its sales."""
        async with self._bus.transaction() as tx:
            tx.execute(TAKE, [event.number, event.sku, event.quantity, self._worker])
            tx.acknowledge()


def open_warehouse(url: str, worker: int, mail: Path) -> MessageBus:
    """The bus of one worker, on the journal of the shop."""
    bus = MessageBus(BusConfig(name=f"worker-{worker}"), journal=url)
    warehouse = Warehouse(worker, mail, bus)
    bus.register_event_handler(
        OrderPlaced,
        warehouse.send_receipt,
        name=RECEIPTS,
        durable=RECEIPTS,
        mode=Mode.EXCLUSIVE,
        retry=SOON,
        lease_ttl=LEASE,
        flush_acks=FLUSH,
        max_buffered=WINDOW,
    )
    bus.register_event_handler(
        OrderPlaced,
        warehouse.take_stock,
        name=STOCK,
        durable=STOCK,
        mode=Mode.KEY_SHARED,
        max_in_flight=5,
        idempotent=True,
        retry=SOON,
        lease_ttl=LEASE,
        flush_acks=FLUSH,
        max_buffered=WINDOW,
    )
    return bus
