"""Work that waits in a journal: a delayed event, and a command that another bus handles."""

import asyncio
import tempfile
from pathlib import Path

from msgbus import Command, Context, Event, MessageBus, Refusal, TicketFailedError


class PrintLabel(Command[str]):
    """Print the label of a parcel; the reply is the name of the file."""

    parcel: int


class PickupDue(Event):
    """The carrier is about to come."""

    parcel: int


async def shop(journal: str) -> list[str]:
    """Takes orders, and ends before anything is done about them."""
    async with MessageBus(journal=journal) as bus:
        return [(await bus.enqueue(PrintLabel(parcel=number))).message_id for number in (1, 2)]


async def warehouse(journal: str, tickets: list[str]) -> None:
    bus, picked_up = MessageBus(journal=journal), asyncio.Queue[int]()

    @bus.handles(PrintLabel)
    async def print_label(command: PrintLabel, context: Context) -> str:
        if command.parcel == 2:
            raise Refusal("parcel 2 has no address")
        await context.publish(PickupDue(parcel=command.parcel), delay=0.1)
        return f"label-{command.parcel}.pdf"

    @bus.on(PickupDue)
    async def hand_over(event: PickupDue) -> None:
        await picked_up.put(event.parcel)

    async with bus:
        for message_id in tickets:
            try:
                print(await (await bus.ticket(message_id)).result(timeout=10))
            except TicketFailedError as error:
                print("failed:", error.error)
        print("carrier takes parcel", await picked_up.get())


with tempfile.TemporaryDirectory() as folder:
    url = f"sqlite:///{Path(folder) / 'shop.db'}"
    asyncio.run(warehouse(url, asyncio.run(shop(url))))
# Output:
# > label-1.pdf
# > failed: Refusal: parcel 2 has no address
# > carrier takes parcel 1
