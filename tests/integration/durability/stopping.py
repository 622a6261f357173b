"""A process that handles slowly until SIGTERM, then stops its bus and says what is left.

`python -m tests.integration.durability.stopping <journal> <publish> <seconds a message>`
"""

from __future__ import annotations

import logging
import signal
import sys

import anyio

from msgbus import BusConfig, Event, MessageBus


class Placed(Event, name="stopping.Placed"):
    number: int


class Other(Event, name="stopping.Other"):
    number: int


def write(*words: object) -> None:
    print(*words, flush=True)


async def run(path: str, publish: int, seconds: float) -> None:
    bus = MessageBus(BusConfig(drain_timeout=0.1), journal=f"sqlite:///{path}")

    @bus.on(Placed, durable="mail")
    async def mail(event: Placed) -> None:
        await anyio.sleep(seconds)
        write("handled", event.number)

    @bus.on(Other, durable="print")
    async def print_label(event: Other) -> None:
        del event

    await bus.start()
    for number in range(publish):
        await bus.publish(Placed(number=number))
        await bus.publish(Other(number=number))
    if not seconds:
        await bus.settled()
    else:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            write("started")
            async for _ in signals:
                break
    report = await bus.stop(timeout=0.1)
    write("persisted", report.persisted, dict(report.persisted_by))


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="log %(message)s")
    anyio.run(run, sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
