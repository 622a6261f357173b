"""Messages that cause each other without end: told of, refused if wanted, and stopped."""

from __future__ import annotations

import pickle
import sys
import traceback
from typing import Any

import anyio
import pytest

from msgbus import BusConfig, Command, Context, Event, MessageBus, MsgBusError
from msgbus.errors import MessageDepthError
from msgbus.resilience import ResilientMessageBus
from msgbus.runtime.clock import VirtualClock
from tests.fakes import conserves, logged

TOLD_AT = 120


class Ping(Event):
    pass


class Pong(Event):
    pass


class Plan(Command[int]):
    level: int = 0


class Check(Command[int]):
    level: int = 0


class Circle:
    """Handlers of `Ping` and `Pong` that publish the other one, `limit` times at most."""

    def __init__(self, bus: MessageBus, limit: int = 100_000, **options: Any) -> None:
        self.bus = bus
        self.limit = limit
        self.handled = 0
        self.ended = anyio.Event()
        bus.subscribe(Ping, self.ping, name="ping", **options)
        bus.subscribe(Pong, self.pong, name="pong", **options)

    async def ping(self, event: Any) -> None:
        await self._send(Pong())

    async def pong(self, event: Any) -> None:
        await self._send(Ping())

    async def _send(self, event: Event) -> None:
        self.handled += 1
        if self.handled >= self.limit:
            self.ended.set()
            return
        await self.bus.publish(event)


# -- 10. circles of events -----------------------------------------------------------------------


async def test_a_circle_of_events_is_told_of_once_with_its_types(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Point 10: within a second, with the chain of types."""
    bus = MessageBus()
    circle = Circle(bus, 2_000)

    async with bus:
        await bus.publish(Ping())
        with anyio.fail_after(10):
            await circle.ended.wait()

    (told,) = logged(caplog, "message_circle")
    assert told["bus"] == "msgbus"
    assert told["depth"] == TOLD_AT
    assert told["chain"] in ("Ping > Pong > Ping", "Pong > Ping > Pong")
    conserves(bus)


async def test_a_circle_is_told_of_within_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """Point 10: long before anybody wonders why the machine is warm."""
    bus = MessageBus()
    circle = Circle(bus, TOLD_AT + 1)

    async with bus:
        await bus.publish(Ping())
        with anyio.fail_after(1):
            await circle.ended.wait()

    assert logged(caplog, "message_circle")


async def test_a_long_chain_that_ends_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Point 10: only beyond a hundred, and what happens beside it counts for nothing."""
    bus = MessageBus()
    circle = Circle(bus, 100)

    async with bus:
        for _ in range(5):
            circle.handled = 0
            await bus.publish(Ping())
            await bus.settled()

    assert not logged(caplog, "message_circle")


async def test_a_handler_that_sends_much_is_no_circle(caplog: pytest.LogCaptureFixture) -> None:
    """Point 10: depth is what counts, not number; also where one object is sent again."""
    first, second = MessageBus(BusConfig(max_depth=3)), MessageBus(BusConfig(max_depth=3))
    seen = 0

    @first.on(Ping)
    async def forward(event: Ping) -> None:
        for _ in range(500):
            await second.publish(event)

    @second.on(Ping)
    async def count(event: Ping) -> None:
        nonlocal seen
        seen += 1

    async with second, first:
        await first.publish(Ping())
        await first.settled()
        await second.settled()

    assert seen == 500
    assert not logged(caplog, "message_circle")


async def test_an_event_that_waits_for_its_time_begins_anew() -> None:
    """Point 10: a handler that publishes its next turn with a delay is a clock, no circle."""
    clock = VirtualClock()
    bus = MessageBus(BusConfig(max_depth=5), clock=clock)
    turns = 0

    @bus.on(Ping)
    async def tick(event: Ping) -> None:
        nonlocal turns
        turns += 1
        await bus.publish(Ping(), delay=1)

    async with bus:
        await bus.publish(Ping())
        await clock.advance(50)
        assert turns == 51
        await bus.stop(0)


async def test_a_circle_is_an_error_beyond_max_depth(caplog: pytest.LogCaptureFixture) -> None:
    """Point 10: `BusConfig.max_depth`."""
    bus = MessageBus(BusConfig(max_depth=50))
    circle = Circle(bus)

    async with bus:
        await bus.publish(Ping())
        await bus.settled()

    assert circle.handled == 51  # the first, and fifty below it
    (failed,) = logged(caplog, "handler_failed")
    assert "MessageDepthError" in failed["error"]
    assert "max_depth=50" in failed["error"]
    assert "Pong > Ping > Pong" in failed["error"] or "Ping > Pong > Ping" in failed["error"]
    conserves(bus)


async def test_what_is_emitted_and_what_lists_send_is_as_deep() -> None:
    """Point 10: however it is sent."""
    bus = MessageBus(BusConfig(max_depth=10))
    levels: list[str] = []

    @bus.on(Ping)
    async def emit(event: Ping, context: Context) -> None:
        levels.append("ping")
        context.emit(Pong())

    @bus.on(Pong, batch=True)
    async def answer(events: list[Pong]) -> None:
        levels.append("pong")
        await bus.publish(Ping())

    async with bus:
        await bus.publish(Ping())
        await bus.settled()

    assert levels.count("ping") == 6


def test_max_depth_is_off_unless_asked_for() -> None:
    """Point 10."""
    assert BusConfig().max_depth is None
    with pytest.raises(ValueError, match="max_depth"):
        BusConfig(max_depth=0)


@pytest.mark.parametrize("bus_type", [MessageBus, ResilientMessageBus])
async def test_stop_ends_at_its_deadline_while_events_go_round(bus_type: type[MessageBus]) -> None:
    """Point 10: in a circle of one lane and of two."""
    bus = bus_type()
    Circle(bus, limit=sys.maxsize)

    @bus.on(Ping)
    async def again(event: Ping) -> None:
        await bus.publish(Ping())

    await bus.start()
    for _ in range(3):
        await bus.publish(Ping())
    with anyio.fail_after(10):
        report = await bus.stop(0.2)

    assert report.abandoned


# -- f. two buses --------------------------------------------------------------------------------


async def test_two_buses_that_forward_to_each_other_are_a_circle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Point f: the depth travels with the very same event."""
    left = MessageBus(BusConfig(name="left"))
    right = MessageBus(BusConfig(name="right"))
    handled = 0
    told = anyio.Event()

    @left.on(Ping)
    async def to_right(event: Ping) -> None:
        nonlocal handled
        handled += 1
        if handled > TOLD_AT:
            told.set()
            return
        await right.publish(event)

    @right.on(Ping)
    async def to_left(event: Ping) -> None:
        await left.publish(event)

    async with left, right:
        await left.publish(Ping())
        with anyio.fail_after(1):
            await told.wait()

    (circle,) = logged(caplog, "message_circle")
    assert circle["chain"] == "Ping > Ping"


async def test_max_depth_ends_a_circle_of_two_buses() -> None:
    """Point f: one event was handled 23,563 times in half a second."""
    left, right = MessageBus(BusConfig(max_depth=20)), MessageBus()
    handled = 0
    refused = anyio.Event()

    @left.on(Ping)
    async def to_right(event: Ping) -> None:
        nonlocal handled
        handled += 1
        await right.publish(event)

    @right.on(Ping)
    async def to_left(event: Ping) -> None:
        try:
            await left.publish(event)
        except MessageDepthError:
            refused.set()

    async with right, left:
        await left.publish(Ping())
        with anyio.fail_after(10):
            await refused.wait()

    assert handled == 11


async def test_buses_of_a_circle_stop_at_their_deadlines() -> None:
    """Point f."""
    left, right = MessageBus(), MessageBus()

    @left.on(Ping)
    async def to_right(event: Ping) -> None:
        await right.publish(event)

    @right.on(Ping)
    async def to_left(event: Ping) -> None:
        await left.publish(event)

    await left.start()
    await right.start()
    await left.publish(Ping())
    with anyio.fail_after(10):
        await left.stop(0.2)
        await right.stop(0.2)


# -- commands that call each other ---------------------------------------------------------------


def recursive(bus: MessageBus) -> MessageBus:
    @bus.handles(Plan)
    async def plan(command: Plan) -> int:
        return await bus.call(Check(level=command.level + 1))

    @bus.handles(Check)
    async def check(command: Check) -> int:
        return await bus.call(Plan(level=command.level + 1))

    return bus


@pytest.mark.parametrize("bus_type", [MessageBus, ResilientMessageBus])
async def test_recursive_commands_end_in_a_clear_error(bus_type: type[MessageBus]) -> None:
    """Point 10: not in a traceback of 2,800 lines."""
    bus = recursive(bus_type())

    async with bus:
        with anyio.fail_after(30):
            result = await bus.execute(Plan())

    error = result.exception
    assert isinstance(error, MessageDepthError)
    assert "Plan > Check > Plan" in str(error) or "Check > Plan > Check" in str(error)
    assert "call each other" in str(error)
    assert len(traceback.format_exception(error)) < 30
    with pytest.raises(RecursionError) as caught:
        result.unwrap()
    assert len(traceback.format_exception(caught.value)) < 30


async def test_recursive_commands_neither_open_circuits_nor_fill_the_dead_letters() -> None:
    """Point 10: it is a fault of the program, and told of once."""
    bus = ResilientMessageBus()
    recursive(bus)

    async with bus:
        (await bus.execute(Plan())).exception  # noqa: B018 (looked at, so that it is not logged)

        assert set(bus.stats().circuits.values()) == {"closed"}
        assert bus.stats().dead_letters == 1


async def test_recursive_commands_end_at_max_depth() -> None:
    """Point 10: `BusConfig.max_depth` holds for commands too."""
    bus = recursive(MessageBus(BusConfig(max_depth=7)))

    async with bus:
        result = await bus.execute(Plan())

        assert isinstance(result.exception, MessageDepthError)
        assert result.exception.depth == 8
        assert "max_depth=7" in str(result.exception)
        assert bus.stats().commands["plan"].sent == 4
        assert bus.stats().commands["check"].sent == 4


async def test_a_handlers_own_recursion_stays_its_own_error() -> None:
    """Point 10: it says nothing about commands."""
    bus = MessageBus()

    def fall(level: int) -> int:
        return fall(level + 1)

    @bus.handles(Plan)
    async def plan(command: Plan) -> int:
        return fall(0)

    async with bus:
        result = await bus.execute(Plan())

    assert type(result.exception) is RecursionError


async def test_commands_may_call_each_other_to_a_reasonable_depth() -> None:
    """Point 10: fifty calls deep is no circle."""
    bus = MessageBus()

    @bus.handles(Plan)
    async def plan(command: Plan) -> int:
        if command.level == 50:
            return 50
        return await bus.call(Plan(level=command.level + 1))

    async with bus:
        assert await bus.call(Plan()) == 50


def test_the_error_says_what_it_knows_and_pickles() -> None:
    """Point 10."""
    error = MessageDepthError(["A", "B", "A", "B", "A"], depth=12, max_depth=11)

    again = pickle.loads(pickle.dumps(error))

    assert isinstance(error, MsgBusError)
    assert (again.chain, again.depth) == (("A", "B", "A", "B", "A"), 12)
    assert str(again) == str(error)
    assert "A > B > A" in str(error)
    assert "A > B > A > B" not in str(error)
