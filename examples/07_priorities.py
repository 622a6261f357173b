"""Higher priority runs first: the rest get an event when it is done with it."""

import asyncio

from msgbus import Event, MessageBus


class PaymentReceived(Event):
    """Money has arrived."""

    amount: int


bus = MessageBus()
ledger: list[int] = []


@bus.on(PaymentReceived)  # priority 0
async def thank(event: PaymentReceived) -> None:
    print("thanks for", event.amount, "of", sum(ledger))


@bus.on(PaymentReceived, priority=-10)
async def archive(event: PaymentReceived) -> None:
    print("archived", event.amount)


@bus.on(PaymentReceived, priority=10)
async def book(event: PaymentReceived) -> None:
    await asyncio.sleep(0.01)  # however long it takes, the others wait for it
    ledger.append(event.amount)
    print("booked", event.amount)


async def main() -> None:
    async with bus:
        await bus.publish(PaymentReceived(amount=5))
        await bus.settled()
        await bus.publish(PaymentReceived(amount=7))


asyncio.run(main())
# Output:
# > booked 5
# > thanks for 5 of 5
# > archived 5
# > booked 7
# > thanks for 7 of 12
# > archived 7
