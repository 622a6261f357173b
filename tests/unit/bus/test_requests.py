"""`bus.request`: a command that is answered in time, or ends with an error that says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from msgbus import BusClosedError, Command, Context, Event, MessageBus
from msgbus.errors import (
    HandlerTimeoutError,
    MissingHandlerError,
    NoReplierError,
    RequestTimeoutError,
    WrongMessageTypeError,
)
from msgbus.routing import CorrelationManager
from msgbus.runtime.clock import VirtualClock


class Price(Command[int]):
    sku: str = "tea"


class Total(Command[int]):
    pass


class OutOfStockError(Exception):
    pass


async def test_a_request_gives_the_handlers_answer() -> None:
    async with MessageBus() as bus:

        @bus.handles(Price)
        async def price(command: Price, context: Context) -> int:
            return len(command.sku) + len(context.headers)

        assert await bus.request(Price(sku="tea"), headers={"tenant": "north"}) == 4
        assert bus.correlations.stats().replied == 1
        assert bus.correlations.pending == 0


async def test_a_request_raises_the_handlers_own_exception() -> None:
    async with MessageBus() as bus:

        @bus.handles(Price)
        async def price(command: Price) -> int:
            raise OutOfStockError(command.sku)

        with pytest.raises(OutOfStockError, match="tea"):
            await bus.request(Price())
        assert bus.correlations.stats().failed == 1


async def test_a_request_that_nobody_answers_says_so() -> None:
    async with MessageBus() as bus:
        with pytest.raises(NoReplierError, match="Nobody answers Price") as caught:
            await bus.request(Price())

    assert isinstance(caught.value.__cause__, MissingHandlerError)


async def test_a_request_runs_out_of_time_and_its_handler_is_cancelled() -> None:
    clock = VirtualClock()
    ended: list[str] = []
    async with MessageBus(clock=clock) as bus:

        @bus.handles(Price)
        async def price(command: Price) -> int:
            try:
                await anyio.sleep_forever()
            finally:
                ended.append("handler")
            return 0

        async def ask(seconds: float | None) -> None:
            with pytest.raises(RequestTimeoutError):
                await bus.request(Price(), timeout=seconds)
            ended.append(f"request of {seconds}")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, 2)
            tasks.start_soon(ask, None)
            await clock.advance(2)
            assert ended == ["handler", "request of 2"]
            await clock.advance(28)

    assert ended[2:] == ["handler", "request of None"]
    assert bus.correlations.stats().timed_out == 2


async def test_real_time_runs_out_too_for_a_request_and_for_a_command() -> None:
    async with MessageBus() as bus:

        @bus.handles(Price)
        async def price(command: Price) -> int:
            await anyio.sleep_forever()
            return 0

        with pytest.raises(RequestTimeoutError):
            await bus.request(Price(), timeout=0.001)
        with pytest.raises(HandlerTimeoutError):
            await bus.call(Price(), timeout=0.001)
        await anyio.lowlevel.checkpoint()  # no cancellation is left behind

    assert bus.correlations.pending == 0


async def test_a_request_inside_a_handler_ends_by_that_handlers_deadline() -> None:
    clock = VirtualClock()
    waited: list[float] = []
    async with MessageBus(clock=clock) as bus:

        @bus.handles(Price)
        async def price(command: Price) -> int:
            await anyio.sleep_forever()
            return 0

        @bus.handles(Total)
        async def total(command: Total, context: Context) -> int:
            began = clock.now()
            try:
                return await bus.request(Price(), timeout=60)
            finally:
                waited.append(clock.now() - began)

        async def ask() -> None:
            assert not (await bus.execute(Total(), timeout=3)).success

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await clock.advance(3)

    assert waited == [3]
    assert bus.correlations.pending == 0


async def test_a_request_needs_a_command_and_an_open_bus() -> None:
    class Happened(Event):
        pass

    async with MessageBus() as bus:
        with pytest.raises(WrongMessageTypeError):
            await bus.request(Happened())  # type: ignore[arg-type]
    with pytest.raises(BusClosedError):
        await bus.request(Price())


class Wire:
    """A transport whose other side answers from a task of its own."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, float, str]] = []

    async def send(
        self,
        command: Command[Any],
        correlation_id: str,
        correlations: CorrelationManager,
        *,
        timeout: float,
        headers: Mapping[str, str] | None,
    ) -> None:
        self.sent.append((type(command).__name__, timeout, correlation_id))


async def test_a_transport_carries_requests_elsewhere() -> None:
    wire = Wire()
    answers: list[int] = []
    async with MessageBus() as bus:
        bus._state.requests.transport = wire  # pyright: ignore[reportPrivateUsage]

        async def ask() -> None:
            answers.append(await bus.request(Price(), timeout=7))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            (name, timeout, request_id) = wire.sent[0]
            assert (name, timeout) == ("Price", 7)
            assert bus.correlations.reply(request_id, 12)

    assert answers == [12]
