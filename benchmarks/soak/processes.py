"""The processes of a soak: one publishes at a pace, the others handle."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

import anyio

from benchmarks.soak.board import MODES, Board
from msgbus import BusConfig, Event, MessageBus
from msgbus.subscriptions import Mode

PUBLISHERS: Final = 32
"""Tasks that publish at the same time."""

IN_FLIGHT: Final = 16
PLACES: Final = 64
CONFIG: Final = BusConfig(member_ttl=2.0)


class Measured(Event, name="soak.Measured", key="place"):
    number: int
    place: str
    sent: float


async def publish(
    board: Board, url: str, rate: float, limit: int, *, is_control: bool = False
) -> None:
    """Publish until told to stop, or until there are so many messages.

    Args:
        board: Where to note what was acknowledged.
        url: The journal.
        rate: Messages a second; 0 for as many as it can.
        limit: Number of messages at which it ends.
        is_control: Note them as acknowledged before they are: a kill has to lose some.
    """
    async with MessageBus(CONFIG, journal=url) as bus:
        began, first = monotonic(), board.published

        async def work() -> None:
            while board.published < limit:
                number = board.next_number()
                if rate:
                    due = began + (number - first) / rate
                    await anyio.sleep(max(due - monotonic(), 0.0))
                place = f"p{number % PLACES}"
                if is_control:
                    board.acknowledged(number)
                await bus.publish(Measured(number=number, place=place, sent=monotonic()))
                board.acknowledged(number)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_on_sigterm, tasks.cancel_scope)
            async with anyio.create_task_group() as publishers:
                for _ in range(PUBLISHERS):
                    publishers.start_soon(work)
            tasks.cancel_scope.cancel()


async def handle(board: Board, url: str, process: int) -> None:
    """Handle messages in every mode, until told to stop."""
    bus = MessageBus(CONFIG, journal=url)
    for number, mode in enumerate(MODES):
        in_flight = 1 if mode == "exclusive" else IN_FLIGHT
        handler = _handler(board, process, number)
        bus.register_event_handler(
            Measured,
            handler,
            name=mode,
            durable=mode,
            mode=Mode(mode),
            max_in_flight=in_flight,
        )
    async with bus, anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_on_sigterm, tasks.cancel_scope)


def _handler(board: Board, process: int, mode: int) -> Callable[[Measured], Awaitable[None]]:
    async def note(event: Measured) -> None:
        board.handled(process, mode, event.number, monotonic() - event.sent)

    return note


async def _cancel_on_sigterm(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()
            return
