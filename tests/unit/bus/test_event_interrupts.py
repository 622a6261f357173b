"""Event handlers that raise what is no `Exception`: they harm only their own event."""

from __future__ import annotations

import anyio
import pytest

from msgbus import MessageBus
from tests.fakes import OrderPlaced, Recorder, conserves, let_others_run, logged


class Halt(BaseException):
    """As libraries use it to get past `except Exception`."""


@pytest.mark.parametrize(
    "error", [Halt(), BaseExceptionGroup("several", [Halt()])], ids=["alone", "in a group"]
)
@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
async def test_a_base_exception_fails_its_event_and_the_lane_goes_on(
    *, error: BaseException, batch: bool
) -> None:
    bus = MessageBus()
    handled: list[int] = []

    async def halt_on_zero(event: OrderPlaced) -> None:
        if event.number == 0:
            raise error
        handled.append(event.number)

    async def halt_on_list(events: list[OrderPlaced]) -> None:
        for event in events:
            await halt_on_zero(event)

    if batch:
        bus.subscribe(OrderPlaced, halt_on_list, batch=True, name="handler")
    else:
        bus.subscribe(OrderPlaced, halt_on_zero, name="handler")
    async with bus:
        await bus.publish_many(OrderPlaced(number=number) for number in range(3))
        await let_others_run()

        assert handled == [1, 2]
        assert bus.stats().handlers["handler"].failed == 1
        conserves(bus)


async def test_a_base_exception_from_a_handler_that_is_cut_off_harms_nobody() -> None:
    bus = MessageBus()

    @bus.on(OrderPlaced)
    async def fail_to_clean_up(event: OrderPlaced) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise Halt

    await bus.start()
    await bus.publish(OrderPlaced())
    await let_others_run()
    report = await bus.stop(timeout=0)
    await let_others_run()

    assert report.abandoned == 1
    conserves(bus)


async def test_a_list_that_is_cut_off_is_not_tried_again() -> None:
    bus = MessageBus()
    calls: list[int] = []

    @bus.on(OrderPlaced, batch=True)
    async def fail_to_clean_up(events: list[OrderPlaced]) -> None:
        calls.append(len(events))
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError

    await bus.start()
    await bus.publish_many(OrderPlaced(number=number) for number in range(3))
    await let_others_run()
    report = await bus.stop(timeout=0)
    await let_others_run()

    assert calls == [3]
    assert report.abandoned == 3
    conserves(bus)


async def test_a_task_that_fails_to_clean_up_when_its_handler_is_cut_off_harms_nobody() -> None:
    bus = MessageBus()
    cut_off: list[str] = []

    async def fail_to_clean_up() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cut_off.append("task")
            raise OSError

    @bus.on(OrderPlaced)
    async def start_tasks(event: OrderPlaced) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(fail_to_clean_up)
            group.start_soon(anyio.sleep_forever)

    await bus.start()
    await bus.publish(OrderPlaced())
    await let_others_run()
    report = await bus.stop(timeout=0)
    await let_others_run()

    assert cut_off == ["task"]
    assert report.abandoned == 1
    conserves(bus)


@pytest.mark.parametrize("library", ["asyncio", "trio"])
@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
def test_a_program_that_ends_without_stop_is_told_what_it_lost(
    *, library: str, batch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang(event: object) -> None:
        await anyio.sleep_forever()

    async def forget_to_stop() -> None:
        bus = MessageBus()
        bus.subscribe(OrderPlaced, hang, name="hang")
        if batch:
            bus.subscribe(OrderPlaced, hang, name="hang_on_lists", batch=True)
        bus.subscribe(OrderPlaced, Recorder(), name="done")
        await bus.start()
        await bus.publish_many(OrderPlaced(number=number) for number in range(3))
        await let_others_run()

    anyio.run(forget_to_stop, backend=library)

    lost = {
        entry["handler"]: (entry["abandoned"], entry["queued"])
        for entry in logged(caplog, "worker_cancelled")
    }
    assert lost == {"hang": (1, 2)} | ({"hang_on_lists": (3, 0)} if batch else {})
