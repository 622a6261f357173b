"""Which messages a middleware gets to see: by type, and lists or not."""

from __future__ import annotations

from typing import Any

import pytest

from msgbus import (
    CallNext,
    ConfigurationError,
    Event,
    MessageBus,
)
from tests.unit.middleware.greetings import Greet, GreetLoudly, Happened, HappenedAgain, greet


class Counting:
    """Counts what it sees; `batch` says whether it wants lists."""

    def __init__(self, *, batch: bool) -> None:
        self.batch = batch
        self.seen: list[Any] = []

    async def __call__(self, message: Any, call_next: CallNext) -> Any:
        self.seen.append(message)
        return await call_next(message)


async def test_types_limits_a_middleware_to_those_messages() -> None:
    counting = Counting(batch=False)
    bus = MessageBus()
    bus.add_middleware(counting, types=Greet)
    bus.register_command_handler(Greet, greet)
    handled: list[Event] = []
    bus.register_event_handler(Happened, handled.append, inline=True)

    async with bus:
        await bus.execute(Greet())
        await bus.publish(Happened())
        await bus.settled()

    assert [type(message) for message in counting.seen] == [Greet]
    assert len(handled) == 1


async def test_types_takes_several_classes_and_their_subclasses() -> None:
    counting = Counting(batch=False)
    bus = MessageBus()
    bus.add_middleware(counting, types=[GreetLoudly, Happened])
    bus.register_command_handler(Greet, greet)
    handled: list[Event] = []
    bus.register_event_handler(HappenedAgain, handled.append, inline=True)

    async with bus:
        await bus.publish(HappenedAgain())
        await bus.settled()

    assert [type(message) for message in counting.seen] == [HappenedAgain]


async def test_a_base_class_handler_has_the_middleware_of_a_subclass_only_for_it() -> None:
    counting = Counting(batch=False)
    bus = MessageBus()
    bus.add_middleware(counting, types=GreetLoudly)
    bus.register_command_handler(Greet, greet)

    plain = await bus.execute(Greet())
    loud = await bus.execute(GreetLoudly())

    assert plain.value == loud.value == "hello you"
    assert [type(message) for message in counting.seen] == [GreetLoudly]


async def test_a_base_class_event_handler_chooses_its_middleware_for_each_event() -> None:
    counting = Counting(batch=False)
    bus = MessageBus()
    bus.add_middleware(counting, types=HappenedAgain)
    handled: list[Event] = []
    bus.register_event_handler(Happened, handled.append, inline=True)

    async with bus:
        for event in (Happened(), HappenedAgain(), Happened()):
            await bus.publish(event)
        await bus.settled()

    assert [type(event) for event in counting.seen] == [HappenedAgain]
    assert len(handled) == 3


async def test_only_batch_aware_middleware_sees_the_lists_of_batch_handlers() -> None:
    aware, unaware = Counting(batch=True), Counting(batch=False)
    bus = MessageBus(middleware=[aware, unaware])
    handled: list[list[int]] = []

    @bus.on(Happened, batch=True)
    async def record(events: list[Happened]) -> None:
        handled.append([event.number for event in events])

    for number in range(3):
        await bus.publish(Happened(number=number))
    async with bus:
        await bus.settled()

    assert [[event.number for event in events] for events in aware.seen] == [[0, 1, 2]]
    assert unaware.seen == []
    assert handled == [[0, 1, 2]]


async def test_batch_aware_middleware_sees_single_messages_of_other_handlers() -> None:
    aware = Counting(batch=True)
    bus = MessageBus(middleware=[aware])
    bus.register_command_handler(Greet, greet)

    await bus.execute(Greet())

    assert [type(message) for message in aware.seen] == [Greet]


async def test_types_applies_to_lists_by_what_they_hold() -> None:
    wanted, unwanted = Counting(batch=True), Counting(batch=True)
    bus = MessageBus()
    bus.add_middleware(wanted, types=Happened)
    bus.add_middleware(unwanted, types=Greet)

    @bus.on(Happened, batch=True)
    async def record(events: list[Happened]) -> None: ...

    async with bus:
        await bus.publish(Happened())
        await bus.settled()

    assert len(wanted.seen) == 1
    assert unwanted.seen == []


async def test_a_middleware_may_thin_the_list_of_a_batch_handler() -> None:
    class OddOnly:
        batch = True

        async def __call__(self, events: Any, call_next: CallNext) -> Any:
            return await call_next([event for event in events if event.number % 2])

    bus = MessageBus(middleware=[OddOnly()])
    handled: list[int] = []

    @bus.on(Happened, batch=True)
    async def record(events: list[Happened]) -> None:
        handled.extend(event.number for event in events)

    for number in range(4):
        await bus.publish(Happened(number=number))
    async with bus:
        await bus.settled()

    assert handled == [1, 3]


async def test_a_list_whose_middleware_forgets_to_await_fails() -> None:
    class Forgetful:
        batch = True

        async def __call__(self, events: Any, call_next: CallNext) -> Any:
            return call_next(events)

    bus = MessageBus(middleware=[Forgetful()])

    @bus.on(Happened, batch=True, name="record")
    async def record(events: list[Happened]) -> None: ...

    async with bus:
        await bus.publish(Happened())
        await bus.settled()

    assert bus.stats().handlers["record"].failed == 1


# -- point 14: a middleware says whether it takes lists -----------------------------------------


async def silent(message: Any, call_next: CallNext) -> Any:
    return await call_next(message)


async def test_a_middleware_that_does_not_say_whether_it_takes_lists_is_a_fault() -> None:
    """Point 14: it used to be left out around batch handlers, and nobody was told."""
    bus = MessageBus(middleware=[silent])

    @bus.on(Happened, batch=True)
    async def store(events: list[Happened]) -> None: ...

    (fault,) = bus.check()
    assert fault.subject == "store"
    assert "silent" in fault.problem
    assert "silent.batch = True" in fault.fix
    with pytest.raises(ConfigurationError, match="silent"):
        await bus.start()


async def test_such_a_middleware_is_no_fault_where_it_does_not_apply() -> None:
    bus = MessageBus()
    bus.add_middleware(silent, types=Greet)

    @bus.on(Happened, batch=True)
    async def store(events: list[Happened]) -> None: ...

    @bus.on(Happened)
    async def single(event: Happened) -> None: ...

    assert bus.check() == []


async def test_a_batch_handler_that_comes_later_is_refused_for_the_same_reason() -> None:
    bus = MessageBus(middleware=[silent])

    async def store(events: list[Happened]) -> None: ...

    async with bus, bus.session() as session:
        with pytest.raises(ConfigurationError, match="silent"):
            bus.subscribe(Happened, store, batch=True)
        with pytest.raises(ConfigurationError, match="silent"):
            session.subscribe(Happened, store, batch=True)
