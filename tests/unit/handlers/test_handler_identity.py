"""A handler's identity: its scope, its name and what it is registered for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from msgbus import Command, DuplicateHandlerError, Event, HandlerRegistry, MessageBus
from msgbus.journal import MemoryJournal


class Placed(Event):
    number: int = 0


class Shipped(Event):
    number: int = 0


class Charge(Command[str]):
    pass


class Refund(Command[str]):
    pass


def first_notify() -> Callable[[Event], Any]:
    async def notify(event: Event) -> None: ...

    return notify


def second_notify() -> Callable[[Event], Any]:
    async def notify(event: Event) -> None: ...

    return notify


def recorder(seen: list[str], text: str) -> Callable[[Event], Any]:
    """Functions of one place in the code: one for each call."""

    async def record(event: Event) -> None:
        seen.append(text)

    return record


class Projection:
    def __init__(self, seen: list[str], text: str) -> None:
        self.seen = seen
        self.text = text

    async def apply(self, event: Event) -> None:
        self.seen.append(self.text)

    async def __call__(self, event: Event) -> None:
        self.seen.append(self.text)


def test_two_functions_of_one_name_are_refused_with_both_places_and_the_fix() -> None:
    """Point 4: two handlers of one name would share letters, circuit and numbers."""
    bus = MessageBus()
    first, second = first_notify(), second_notify()
    bus.subscribe(Placed, first)

    with pytest.raises(DuplicateHandlerError) as refused:
        bus.subscribe(Placed, second)

    text = str(refused.value)
    for function in (first, second):
        assert f"{__name__}, line {function.__code__.co_firstlineno}" in text
    assert "name=" in text


def test_it_is_refused_for_different_types_too() -> None:
    """Point 4: a policy or a circuit by that name would mean both."""
    bus = MessageBus()
    bus.subscribe(Placed, first_notify())

    with pytest.raises(DuplicateHandlerError, match="'notify'"):
        bus.subscribe(Shipped, second_notify())
    bus.subscribe(Shipped, second_notify(), name="notify shipped")


def test_commands_and_events_share_the_names_of_a_scope() -> None:
    """Point 4: a name means one handler, whatever it handles."""
    bus = MessageBus()

    async def handle(command: Charge) -> str:
        return "charged"

    def other() -> Callable[[Refund], Any]:
        async def handle(command: Refund) -> str:
            return "refunded"

        return handle

    bus.register_command_handler(Charge, handle)
    with pytest.raises(DuplicateHandlerError, match="'handle'"):
        bus.register_command_handler(Refund, other())
    with pytest.raises(DuplicateHandlerError, match="'handle'"):
        bus.subscribe(Placed, first_notify(), name="handle")
    bus.register_command_handler(Refund, other(), name="refund")


async def test_one_function_may_be_registered_for_several_types_under_one_name() -> None:
    """Point 4: it is the same handler each time."""
    seen: list[Event] = []
    bus = MessageBus()

    async def audit(event: Event) -> None:
        seen.append(event)

    for target in (Placed, Shipped, "shop.**"):
        bus.subscribe(target, audit, name="the audit")
    with pytest.raises(DuplicateHandlerError, match="already handles"):
        bus.subscribe(Placed, audit, name="the audit")

    async with bus:
        await bus.publish(Placed())
        await bus.publish(Shipped())
        await bus.settled()

    assert {type(event) for event in seen} == {Placed, Shipped}


def test_the_bus_and_each_session_have_names_of_their_own() -> None:
    """Point 4: the same name in another scope is another handler."""
    bus = MessageBus()
    bus.subscribe(Placed, first_notify())
    registry = HandlerRegistry()
    registry.subscribe(Placed, second_notify())


async def test_a_session_may_have_a_handler_of_a_name_that_the_bus_has() -> None:
    """Point 4: two sessions and the bus, each with its own."""
    bus = MessageBus()
    bus.subscribe(Placed, first_notify())

    async with bus, bus.session() as one, bus.session() as other:
        one.subscribe(Placed, second_notify())
        other.subscribe(Placed, second_notify())
        with pytest.raises(DuplicateHandlerError, match="'notify'"):
            one.subscribe(Shipped, first_notify())


async def test_lambdas_stay_possible_and_are_told_apart_by_number() -> None:
    """Point 4: nobody expects a lambda to have a name of its own."""
    seen: list[str] = []
    bus = MessageBus()
    one = bus.subscribe(Placed, lambda event: seen.append("one"), inline=True)
    two = bus.subscribe(Placed, lambda event: seen.append("two"), inline=True)
    other = bus.subscribe(Shipped, lambda event: seen.append("other"), inline=True)

    async with bus:
        await bus.publish(Placed())
        await bus.settled()
        handled = {name: one.handled for name, one in bus.stats().handlers.items()}

    assert (one.name, two.name, other.name) == ("<lambda>", "<lambda>#2", "<lambda>")
    assert sorted(seen) == ["one", "two"]
    assert handled == {"<lambda>": 1, "<lambda>#2": 1}


@pytest.mark.parametrize("kind", ["closure", "method", "object", "partial", "builtin"])
async def test_functions_of_one_place_are_told_apart_by_number(kind: str) -> None:
    """Point 4: the same code with other data is no mistake, and has its own letters."""
    seen: list[str] = []
    lists: tuple[list[Any], list[Any]] = [], []
    one, two = Projection(seen, "one"), Projection(seen, "two")

    async def note(text: str, event: Event) -> None:
        seen.append(text)

    handlers: dict[str, tuple[Callable[..., Any], ...]] = {
        "closure": (recorder(seen, "one"), recorder(seen, "two")),
        "method": (one.apply, two.apply),
        "object": (one, two),
        "partial": (functools.partial(note, "one"), functools.partial(note, "two")),
        "builtin": (lists[0].append, lists[1].append),
    }
    bus = MessageBus()
    first, second = (bus.subscribe(Placed, handler) for handler in handlers[kind])
    elsewhere = bus.subscribe(Shipped, handlers[kind][1])

    async with bus:
        await bus.publish(Placed())
        await bus.settled()

    assert second.name == f"{first.name}#2"
    assert elsewhere.name == first.name
    assert sorted(seen) == ["one", "two"] or len(lists[0]) == len(lists[1]) == 1


async def test_a_number_is_free_again_when_its_handler_is_gone() -> None:
    """Point 4: numbers do not pile up in stats."""
    bus = MessageBus()
    async with bus:
        for _ in range(3):
            kept = bus.subscribe(Placed, lambda event: None)
            second = bus.subscribe(Placed, lambda event: None)
            assert (kept.name, second.name) == ("<lambda>", "<lambda>#2")
            await kept.close()
            await second.close()


async def test_handlers_of_several_registries_are_told_apart_on_the_bus() -> None:
    """Point 4: numbers are given where the handlers meet."""
    seen: list[str] = []
    registries = [HandlerRegistry(), HandlerRegistry()]
    for index, registry in enumerate(registries):
        registry.subscribe(Placed, recorder(seen, f"{index} a"))
        registry.subscribe(Placed, recorder(seen, f"{index} b"))
    bus = MessageBus(registries=registries)

    async with bus:
        await bus.publish(Placed())
        await bus.settled()
        names = sorted(bus.stats().handlers)
        async with bus.session(registries=registries) as session:
            await session.publish(Placed())

    assert names == ["record", "record#2", "record#3", "record#4"]
    assert len(seen) == 12


def test_a_replaced_command_handler_gives_its_name_free() -> None:
    """Point 4: what is no longer registered is in nobody's way."""
    bus = MessageBus()

    def make() -> Callable[[Any], Any]:
        async def charge(command: Command[str]) -> str:
            return "charged"

        return charge

    async def charge(command: Charge) -> str:
        return "charged"

    bus.register_command_handler(Charge, make())
    bus.register_command_handler(Charge, charge, replace=True)
    with pytest.raises(DuplicateHandlerError, match="'charge'"):
        bus.register_command_handler(Refund, make())
    bus.unregister_command_handler(Charge)
    bus.register_command_handler(Refund, make())


def test_a_replacement_that_is_refused_leaves_the_old_handler() -> None:
    """Point 4: all or nothing."""
    bus = MessageBus()
    bus.subscribe(Placed, first_notify())

    async def charge(command: Charge) -> str:
        return "charged"

    async def better(command: Charge) -> str:
        return "better"

    bus.register_command_handler(Charge, charge)
    with pytest.raises(DuplicateHandlerError, match="'notify'"):
        bus.register_command_handler(Charge, better, replace=True, name="notify")
    with pytest.raises(DuplicateHandlerError, match="already handled by charge"):
        bus.register_command_handler(Charge, better)


async def test_durable_handlers_are_never_numbered() -> None:
    """Point 4: a place in the journal must not depend on the order of registration."""
    journal = MemoryJournal()
    bus = MessageBus(journal=journal)
    seen: list[str] = []
    bus.subscribe(Placed, recorder(seen, "one"))
    with pytest.raises(DuplicateHandlerError, match="durable="):
        bus.subscribe(Placed, recorder(seen, "two"))
    bus.subscribe(Shipped, first_notify_of_all())
    with pytest.raises(DuplicateHandlerError, match="'record'"):
        bus.subscribe(Shipped, another_record(seen))

    async with bus:
        await bus.publish(Placed())
        await bus.publish(Shipped())
        await bus.settled()
        assert list(bus.stats().subscriptions) == ["record:Placed", "notify_all:Shipped"]

    assert seen == ["one"]
    await journal.close()


async def test_handlers_of_one_place_may_have_durable_names_of_their_own() -> None:
    """Point 4: the journal knows them by these; in memory they are told apart by number."""
    journal = MemoryJournal()
    bus = MessageBus(journal=journal)
    seen: list[str] = []
    one = bus.subscribe(Placed, recorder(seen, "one"), durable="one")
    two = bus.subscribe(Placed, recorder(seen, "two"), durable="two")

    async with bus:
        await bus.publish(Placed())
        await bus.settled()
        assert list(bus.stats().subscriptions) == ["one", "two"]

    assert (one.name, two.name) == ("record", "record#2")
    assert sorted(seen) == ["one", "two"]
    await journal.close()


async def test_two_streams_of_one_event_live_on_a_journaled_bus() -> None:
    """Point 4: a stream is nobody's name, and has no place in the journal."""
    journal = MemoryJournal()
    bus = MessageBus(journal=journal)
    async with bus, bus.stream(Placed) as one, bus.stream(Placed) as two:
        await bus.publish(Placed(number=7))
        assert (await anext(one)).number == (await anext(two)).number == 7
        assert not bus.stats().subscriptions
    await journal.close()


def first_notify_of_all() -> Callable[[Event], Any]:
    async def notify_all(event: Event) -> None: ...

    return notify_all


def another_record(seen: list[str]) -> Callable[[Event], Any]:
    async def record(event: Event) -> None:
        seen.append("another")

    return record
