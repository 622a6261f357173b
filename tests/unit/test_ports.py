"""What users bring themselves: proxies are taken, and what lacks a part is told which.

A proxy has its methods by `__getattr__`, where `isinstance` of a protocol does not see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from msgbus import (
    Command,
    ConfigurationError,
    Event,
    HandlerRegistry,
    IMessageBus,
    IRegistry,
    MessageBus,
)
from msgbus.bus.durable import Outbox, OutboxEntry
from msgbus.journal import Journal, MemoryJournal
from msgbus.journal.records import State
from msgbus.resilience import (
    DeadLetterQueue,
    DeadLetterStore,
    JournalDeadLetterStore,
    MemoryDeadLetterStore,
    ResilientMessageBus,
)
from msgbus.routing import DispatcherRegistry, MessageDispatchEngine, MessageDispatcher
from msgbus.routing.envelope import EventEnvelope
from msgbus.routing.forwarding import publish_on
from msgbus.runtime.arguments import missing_members
from msgbus.runtime.clock import VirtualClock
from msgbus.testing.simulation.processes import Process
from tests.unit.routing.engines import PLACED, TOPIC, Reducer, route


class Ordered(Event, name="ports.Ordered"):
    number: int = 0


class Order(Command[int], name="ports.Order"):
    number: int = 0


class Proxy:
    """Stands in for something else, and has nothing of its own."""

    def __init__(self, inner: object, *, without: str = "") -> None:
        self._inner = inner
        self._without = without

    def __getattr__(self, name: str) -> Any:
        if name == self._without:
            raise AttributeError(name)
        return getattr(self._inner, name)


class ListOutbox:
    def __init__(self, *entries: OutboxEntry) -> None:
        self.entries = list(entries)

    async def pending(self, limit: int) -> list[OutboxEntry]:
        return self.entries[:limit]

    async def done(self, entries: list[OutboxEntry]) -> None:
        del self.entries[: len(entries)]


# -- proxies ---------------------------------------------------------------------------------


async def test_a_proxy_of_a_journal_makes_a_bus_durable() -> None:
    seen: list[int] = []

    async def pack(event: Ordered) -> None:
        seen.append(event.number)

    async with MemoryJournal() as journal:
        for number in range(2):
            bus = MessageBus(journal=cast("Journal", Proxy(journal)))
            bus.subscribe(Ordered, pack)
            async with bus:
                await bus.publish(Ordered(number=number))
                await bus.settled()

        assert seen == [0, 1]
        assert await journal.head() == 2


async def test_a_process_is_the_journal_of_a_bus() -> None:
    async with MemoryJournal() as journal:
        process = Process(journal, VirtualClock())
        async with MessageBus(journal=process.journal) as bus:
            await bus.publish(Ordered())

        assert await journal.head() == 1


async def test_a_proxy_of_a_journal_keeps_dead_letters() -> None:
    async def fail(event: Ordered) -> None:
        raise ValueError("no")

    async with MemoryJournal() as journal:
        proxy: Any = Proxy(journal)
        bus = ResilientMessageBus(retry=None, dead_letters=JournalDeadLetterStore(proxy))
        bus.subscribe(Ordered, fail)
        async with bus:
            await bus.publish(Ordered())
            await bus.settled()

            assert (await bus.dead_letters.count(), bus.dead_letters.size) == (1, 1)
        assert await journal.count() == {State.DEAD: 1}


async def test_a_proxy_of_a_bus_journal_keeps_its_dead_letters() -> None:
    async def fail(event: Ordered) -> None:
        raise ValueError("no")

    async with MemoryJournal() as journal:
        bus = ResilientMessageBus(retry=None, journal=cast("Journal", Proxy(journal)))
        bus.subscribe(Ordered, fail)
        async with bus:
            await bus.publish(Ordered())
            await bus.settled()

            assert await bus.dead_letters.count() == 1


async def test_a_proxy_of_a_store_keeps_dead_letters() -> None:
    async def fail(event: Ordered) -> None:
        raise ValueError("no")

    store: Any = Proxy(MemoryDeadLetterStore())
    bus = ResilientMessageBus(retry=None, dead_letters=store)
    bus.subscribe(Ordered, fail)
    async with bus:
        await bus.publish(Ordered())
        await bus.settled()

        assert await bus.dead_letters.count() == 1


async def test_a_proxy_of_an_outbox_is_relayed() -> None:
    outbox: Any = Proxy(ListOutbox(OutboxEntry.of(Ordered())))
    async with MessageBus(journal="memory:") as bus:
        report = await bus.relay_once(outbox)

    assert (report.published, outbox.entries) == (1, [])


async def test_a_proxy_of_a_registry_keeps_handlers() -> None:
    async def take(command: Order) -> int:
        return command.number

    registry: Any = Proxy(HandlerRegistry())
    async with MessageBus(registry=registry) as bus:
        bus.register_command_handler(Order, take)

        assert await bus.call(Order(number=3)) == 3


async def test_a_proxy_of_a_dispatcher_is_dispatched_to() -> None:
    dispatcher: Any = Proxy(Reducer())
    registry = DispatcherRegistry()
    registry.register_dispatcher(dispatcher)
    engine = MessageDispatchEngine()
    engine.include(registry)
    engine.register_route(route("reducer"))
    engine.freeze()

    assert (await engine.dispatch(TOPIC, PLACED)).outputs == ["shop.events.reduced"]


async def test_a_proxy_of_a_bus_is_published_on() -> None:
    seen: list[int] = []

    async def pack(event: Ordered) -> None:
        seen.append(event.number)

    inner = MessageBus()
    inner.subscribe(Ordered, pack)
    bus: Any = Proxy(inner)
    async with inner:
        await publish_on(bus)("shop.orders", EventEnvelope(Ordered(number=4)))
        await inner.settled()

    assert seen == [4]


# -- what lacks a part -----------------------------------------------------------------------


async def journal_without(method: str) -> None:
    async with MemoryJournal() as journal:
        MessageBus(journal=cast("Journal", Proxy(journal, without=method)))


async def letters_without(method: str) -> None:
    async with MemoryJournal() as journal:
        proxy: Any = Proxy(journal, without=method)
        JournalDeadLetterStore(proxy)


async def found_letters_without(method: str) -> None:
    async with MemoryJournal() as journal:
        proxy: Any = Proxy(journal, without=method)
        await JournalDeadLetterStore(lambda: proxy).open()


async def store_without(method: str) -> None:
    proxy: Any = Proxy(MemoryDeadLetterStore(), without=method)
    DeadLetterQueue(proxy)


async def bus_letters_without(method: str) -> None:
    proxy: Any = Proxy(MemoryDeadLetterStore(), without=method)
    ResilientMessageBus(dead_letters=proxy)


async def outbox_without(method: str) -> None:
    proxy: Any = Proxy(ListOutbox(), without=method)
    async with MessageBus(journal="memory:") as bus:
        bus.relay(proxy)


async def registry_without(method: str) -> None:
    proxy: Any = Proxy(HandlerRegistry(), without=method)
    MessageBus(registry=proxy)


async def dispatcher_without(method: str) -> None:
    proxy: Any = Proxy(Reducer(), without=method)
    DispatcherRegistry().register_dispatcher(proxy)


@pytest.mark.parametrize(
    ("give", "method", "what", "fix"),
    [
        (journal_without, "commit", "The journal", 'Give a URL such as "sqlite:///shop.db"'),
        (
            letters_without,
            "find_letters",
            "The journal of these dead letters",
            "Give dead_letters=",
        ),
        (found_letters_without, "count_letters", "The journal of these", "Give dead_letters="),
        (store_without, "release", "The store of dead letters", "Give a store such as Sqlite"),
        (bus_letters_without, "add", "The store of dead letters", "Give a store such as Sqlite"),
        (outbox_without, "done", "The outbox", "See msgbus.bus.durable.Outbox"),
        (registry_without, "watch", "The registry", "Give a HandlerRegistry"),
        (dispatcher_without, "node_kind", "The dispatcher", "See msgbus.routing.MessageDispatcher"),
    ],
)
async def test_what_lacks_a_part_is_told_which_and_what_to_do(
    give: Callable[[str], Any], method: str, what: str, fix: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await give(method)

    text = str(caught.value)
    assert text.startswith(what)
    assert f"which lacks {method}. {fix}" in text


def test_what_has_nothing_of_a_journal_is_told_what_to_give() -> None:
    with pytest.raises(ConfigurationError) as caught:
        MessageBus(journal=cast("Any", object()))

    assert ", which lacks acquire, attach, blocked_keys, changed, claim and " in str(caught.value)
    assert 'Give a URL such as "sqlite:///shop.db"' in str(caught.value)


@pytest.mark.parametrize(
    ("given", "protocol"),
    [
        (MessageBus(), IMessageBus),
        (HandlerRegistry(), IRegistry),
        (MemoryDeadLetterStore(), DeadLetterStore),
        (ListOutbox(), Outbox),
        (Reducer(), MessageDispatcher),
        (Proxy(MessageBus()), IMessageBus),
    ],
)
def test_an_object_is_known_by_what_it_has(given: object, protocol: type) -> None:
    assert missing_members(given, protocol) == []
    assert missing_members(object(), protocol) != []
