"""Who handles what: scopes, caches, a registry of one's own, checks at start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from msgbus import (
    Command,
    ConfigurationError,
    DuplicateHandlerError,
    Event,
    HandlerRegistry,
    Message,
    MessageBus,
    Registration,
    SystemEvent,
    TypeFilter,
    get_bus,
)
from msgbus.resilience import ResilientMessageBus, SqliteDeadLetterStore


class Ask(Command[str]):
    pass


class Happened(Event):
    pass


class MoreHappened(Happened):
    pass


class Other(Event):
    pass


async def ask(command: Ask) -> str:
    return "ask"


async def test_an_included_registry_brings_its_handlers_now_and_later() -> None:
    registry = HandlerRegistry()
    bus = MessageBus(registries=[registry])
    registry.handles(Ask)(ask)

    assert await bus.call(Ask()) == "ask"


async def test_one_registry_serves_two_buses_without_sharing_queues() -> None:
    registry = HandlerRegistry()
    seen: list[Event] = []
    registry.subscribe(Happened, seen.append, inline=True)
    one, other = MessageBus(registries=[registry]), MessageBus(registries=[registry])

    async with one, other:
        await one.publish(Happened())
        await one.settled()
        await other.settled()

    assert len(seen) == 1
    assert one.stats().total("handled") == 1
    assert other.stats().total("handled") == 0


async def test_registering_after_first_use_is_seen_at_once() -> None:
    bus = MessageBus()
    seen: list[str] = []
    async with bus:
        await bus.publish(Happened())
        bus.subscribe(Happened, lambda event: seen.append("first"), inline=True)
        await bus.publish(Happened())
        await bus.settled()
        subscription = bus.subscribe(
            Event, lambda event: seen.append("second"), inline=True, name="second"
        )
        await bus.publish(MoreHappened())
        await bus.settled()
        await subscription.close()
        await bus.publish(Happened())

    assert sorted(seen) == ["first", "first", "first", "second"]


class OwnRegistry:
    """A user's own registry: the plainest one that satisfies the protocol."""

    def __init__(self) -> None:
        self.rows: list[tuple[str | None, Registration]] = []
        self.watchers: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> None:
        self.watchers.append(changed)

    def _changed(self) -> None:
        for changed in self.watchers:
            changed()

    def add(
        self, registration: Registration, session_id: str | None = None, *, replace: bool = False
    ) -> Registration:
        self.rows.append((session_id, registration))
        self._changed()
        return registration

    def remove(self, registration: Registration, session_id: str | None = None) -> bool:
        self.rows.remove((session_id, registration))
        self._changed()
        return True

    def drop_session(self, session_id: str) -> None:
        self.rows = [row for row in self.rows if row[0] != session_id]
        self._changed()

    def command_handler(
        self, command_type: type[Message], session_id: str | None
    ) -> Registration | None:
        for scope in (session_id, None):
            for row_scope, row in self.rows:
                if row_scope == scope and row.message_type is command_type:
                    return row
        return None

    def event_handlers(
        self, event_type: type[Message], session_id: str | None, topic: str | None = None
    ) -> Sequence[Registration]:
        return [
            row
            for scope, row in self.rows
            if scope in (None, session_id) and row.message_type is event_type
        ]

    def registrations(self) -> Iterator[tuple[str | None, Registration]]:
        return iter(self.rows)


async def test_a_users_own_registry_works() -> None:
    registry = OwnRegistry()
    bus = MessageBus(registry=registry)
    seen: list[Event] = []
    bus.handles(Ask)(ask)
    bus.subscribe(Happened, seen.append, inline=True)

    async with bus, bus.session() as session:

        @session.handles(Ask)
        async def mine(command: Ask) -> str:
            return "mine"

        assert await session.call(Ask()) == "mine"
        assert await bus.call(Ask()) == "ask"
        await session.publish(Happened())
        await bus.settled()

    assert len(seen) == 1
    assert len(registry.rows) == 2


def test_the_same_handler_twice_for_one_event_is_refused() -> None:
    bus = MessageBus()

    async def listen(event: Happened) -> None: ...

    bus.subscribe(Happened, listen)
    with pytest.raises(DuplicateHandlerError, match="name="):
        bus.subscribe(Happened, listen)
    bus.subscribe(Happened, listen, name="again")
    with pytest.raises(DuplicateHandlerError, match="again"):
        bus.subscribe(Happened, listen, name="again")
    bus.subscribe(MoreHappened, listen, name="again")


def test_a_name_that_is_free_again_can_be_used_again() -> None:
    registry = HandlerRegistry()

    async def listen(event: Happened) -> None: ...

    registration = registry.subscribe(Happened, listen, name="once")
    assert registry.remove(registration)
    assert not registry.remove(registration)
    registry.subscribe(Happened, listen, name="once")


# -- point 14: wire names are unique where they are written ------------------------------------


class First(Event, name="shop.Same"):
    pass


class Second(Event, name="shop.Same"):
    pass


class Elsewhere:
    """A way to send requests that leaves the process."""

    async def send(self, command: Command[Any], correlation_id: str, *_: Any, **__: Any) -> None:
        raise NotImplementedError


def handles_both(bus: MessageBus) -> MessageBus:
    bus.subscribe(First, lambda event: None, inline=True, name="first", durable=False)
    bus.subscribe(Second, lambda event: None, inline=True, name="second", durable=False)
    return bus


async def test_two_classes_of_one_name_do_not_clash_where_it_is_not_written() -> None:
    """Point 14: two modules may each have their OrderPlaced."""
    seen: list[str] = []
    bus = MessageBus()
    bus.subscribe(First, lambda event: seen.append("first"), inline=True)
    bus.subscribe(Second, lambda event: seen.append("second"), inline=True)

    async with bus:
        await bus.publish(First())
        await bus.publish(Second())

    assert sorted(seen) == ["first", "second"]
    assert handles_both(ResilientMessageBus()).check() == []


@pytest.mark.parametrize("where", ["dead letters", "transport"])
async def test_two_classes_of_one_name_are_a_fault_where_it_is_written(
    where: str, tmp_path: Path
) -> None:
    """Point 14: a name in a file or on the wire must say which class it is."""
    bus = MessageBus()
    if where == "dead letters":
        bus = ResilientMessageBus(dead_letters=SqliteDeadLetterStore(tmp_path / "letters.db"))
    else:
        bus._state.requests.transport = Elsewhere()  # pyright: ignore[reportPrivateUsage]

    (fault,) = handles_both(bus).check()

    assert fault.subject == "shop.Same"
    with pytest.raises(ConfigurationError, match=r"wire name of 2 classes.*shop\.X"):
        await bus.start()


def test_two_classes_of_one_name_are_refused_by_a_bus_with_a_journal(tmp_path: Path) -> None:
    bus = MessageBus(journal=f"sqlite:///{tmp_path / 'shop.db'}")

    with pytest.raises(ConfigurationError, match=r"Two message classes are called 'shop\.Same'"):
        handles_both(bus)


def test_handlers_that_can_never_be_called_are_faults() -> None:
    bus = MessageBus()

    async def all_system(event: SystemEvent) -> None: ...

    async def filtered_out(event: Happened) -> None: ...

    async def filtered_narrower(event: Happened) -> None: ...

    bus.subscribe(SystemEvent, all_system)
    bus.subscribe(Happened, filtered_out, filter=TypeFilter(Other))
    bus.subscribe(Happened, filtered_narrower, filter=TypeFilter(MoreHappened))

    faults = bus.check()
    assert sorted(fault.subject for fault in faults) == ["all_system", "filtered_out"]
    assert all(fault.fix for fault in faults)


def test_get_bus_gives_one_bus_to_all_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        buses = {id(future.result()) for future in [pool.submit(get_bus) for _ in range(32)]}

    assert len(buses) == 1
