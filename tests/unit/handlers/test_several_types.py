"""One handler of several event classes: `bus.on(A, B)` and `bus.on(A | B)` (point 14)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import pytest

from msgbus import (
    BusConfig,
    Command,
    CommandResultEvent,
    CommandStartedEvent,
    ConfigurationError,
    Context,
    DuplicateHandlerError,
    Event,
    HandlerRegistry,
    HandlerSignatureError,
    MessageBus,
    SystemEvent,
    TypeFilter,
)
from msgbus.resilience import ResilientMessageBus, RetryConfig
from tests.fakes import conserves

if TYPE_CHECKING:
    from msgbus import MessageBus as Elsewhere


class Placed(Event):
    number: int = 0


class Paid(Event):
    number: int = 0


class PaidInCash(Paid):
    pass


class Both(Placed, Paid):
    pass


class Other(Event):
    pass


class Ask(Command[str]):
    pass


OLD_UNION = Union[Placed, Paid]  # noqa: UP007 (people write it)


@pytest.mark.parametrize(
    "targets", [(Placed, Paid), (Placed | Paid,), (OLD_UNION,), (Placed | Paid, Paid)]
)
async def test_one_handler_of_two_classes_sees_both_in_publish_order(targets: Any) -> None:
    """Point 14: one queue, so the order of publishing is kept between the classes."""
    bus = MessageBus()
    seen: list[str] = []

    async def note(event: Placed | Paid) -> None:
        seen.append(f"{type(event).__name__} {event.number}")

    bus.on(*targets)(note)
    async with bus:
        for number in range(3):
            await bus.publish(Placed(number=number))
            await bus.publish(PaidInCash(number=number))
        await bus.publish(Other())

    assert seen == [f"{kind} {n}" for n in range(3) for kind in ("Placed", "PaidInCash")]
    assert set(bus.stats().handlers) == {"note"}
    assert bus.stats().handlers["note"].message_type == "Placed | Paid"
    assert bus.stats().registered_handlers == 1
    conserves(bus)


async def test_an_event_that_is_of_both_classes_is_handled_once() -> None:
    bus = MessageBus()
    seen: list[int] = []

    async def note(event: Placed | Paid) -> None:
        seen.append(event.number)

    bus.subscribe(Placed | Paid, note)
    async with bus:
        receipt = await bus.publish(Both(number=1))
        assert receipt.handlers == 1

    assert seen == [1]


async def test_a_handler_of_several_classes_has_one_handle() -> None:
    bus = MessageBus()
    seen: list[int] = []

    async def note(event: Placed | Paid) -> None:
        seen.append(event.number)

    subscription = bus.subscribe(Placed | Paid, note, name="both")
    assert subscription.message_type is Event
    assert "Placed | Paid" in repr(subscription)

    async with bus:
        await bus.publish(Placed(number=1))
        await subscription.close()
        assert (await bus.publish(Placed(number=2))).handlers == 0
        assert (await bus.publish(Paid(number=3))).handlers == 0
        assert bus.stats().registered_handlers == 0

    assert seen == [1]


async def test_registries_sessions_and_lists_take_several_classes_too() -> None:
    registry = HandlerRegistry()
    seen: list[tuple[str, list[str]]] = []

    @registry.on(Placed, Paid, batch=True)
    async def lists(events: list[Placed | Paid]) -> None:
        seen.append(("registry", [type(event).__name__ for event in events]))

    bus = MessageBus(registries=[registry])
    async with bus, bus.session() as session:

        @session.on(Placed | Paid)
        async def own(event: Placed | Paid) -> None:
            seen.append(("session", [type(event).__name__]))

        await session.publish_many([Placed(), Paid()])
        await bus.settled()

    assert sorted(seen) == [
        ("registry", ["Placed", "Paid"]),
        ("session", ["Paid"]),
        ("session", ["Placed"]),
    ]
    conserves(bus)


def test_a_handler_must_take_every_class_it_is_registered_for() -> None:
    bus = MessageBus()

    async def only_placed(event: Placed) -> None: ...

    wrong: Any = only_placed
    with pytest.raises(HandlerSignatureError, match="annotate it Paid"):
        bus.on(Placed, Paid)(wrong)
    with pytest.raises(HandlerSignatureError, match="annotate it Paid"):
        bus.subscribe(Placed | Paid, wrong)
    assert bus.stats().registered_handlers == 0


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("shop.**", Placed), "for one pattern, or"),
        (("shop.**", "orders.**"), "for one pattern, or"),
        ((Placed, int), "int is not an Event class"),
        ((Placed | None,), "NoneType is not an Event class"),
        ((), "No event class is given"),
    ],
)
def test_what_is_no_set_of_classes_is_refused(targets: Any, said: str) -> None:
    bus: Any = MessageBus()

    async def note(event: Event) -> None: ...

    with pytest.raises(ConfigurationError, match=said):
        bus.on(*targets)(note)


def test_a_handler_is_registered_once_for_each_class() -> None:
    bus = MessageBus()

    async def note(event: Event) -> None: ...

    bus.subscribe(Placed | Paid, note)
    with pytest.raises(DuplicateHandlerError, match="already handles Paid"):
        bus.subscribe(Paid, note)


def test_faults_look_at_each_of_the_classes() -> None:
    bus = MessageBus()

    async def note(event: Event) -> None: ...

    async def told(event: Event) -> None: ...

    bus.subscribe(Placed | Paid, note, filter=TypeFilter(Other))
    bus.subscribe(Placed | SystemEvent, told)

    faults = {fault.subject: fault.problem for fault in bus.check()}
    assert "Placed | Paid" in faults["note"]
    assert "never called" in faults["told"]


async def test_a_session_may_listen_to_both_ends_of_a_command() -> None:
    bus = MessageBus()
    seen: list[str] = []
    async with bus, bus.session() as session:

        @session.on(CommandStartedEvent, CommandResultEvent)
        async def listen(event: CommandStartedEvent | CommandResultEvent) -> None:
            seen.append(type(event).__name__)

        session.register_command_handler(Ask, lambda command: "", inline=True)
        await session.execute(Ask())
        await session.settled()

    assert seen == ["CommandStartedEvent", "CommandResultEvent"]


async def test_middleware_for_one_of_the_classes_sees_only_those() -> None:
    bus = MessageBus()
    seen: list[str] = []

    async def note(message: Any, call_next: Any) -> Any:
        seen.append(type(message).__name__)
        return await call_next(message)

    bus.add_middleware(note, types=Paid)
    bus.subscribe(Placed | Paid, lambda event: None, inline=True)
    async with bus:
        await bus.publish(Placed())
        await bus.publish(Paid())

    assert seen == ["Paid"]


async def test_a_policy_for_one_of_the_classes_holds_and_the_first_has_the_last_word() -> None:
    bus = ResilientMessageBus(retry=None)
    bus.policy(Paid, retry=RetryConfig(max_retries=5), timeout=3)
    bus.policy(Placed, timeout=7)

    @bus.on(Placed, Paid)
    async def note(event: Placed | Paid) -> None: ...

    said = bus.describe(Paid)
    assert "7 s per attempt" in said
    assert "5" in said.split("retry", 1)[1].splitlines()[0]


async def test_a_durable_handler_of_two_classes_reads_both_and_no_others(tmp_path: Path) -> None:
    seen: list[str] = []

    def shop() -> MessageBus:
        bus = MessageBus(BusConfig(), journal=f"sqlite:///{tmp_path / 'shop.db'}")

        @bus.on(Placed, Paid, name="ledger")
        async def ledger(event: Placed | Paid) -> None:
            seen.append(type(event).__name__)

        return bus

    async with shop() as bus:
        await bus.publish(Placed())
        await bus.publish(Other())
        await bus.publish(PaidInCash())
        await bus.settled()
        (name,) = bus.stats().subscriptions
    async with shop() as bus:
        await bus.publish(Paid())
        await bus.settled()

    assert name == "ledger:Placed|Paid"
    assert seen == ["Placed", "PaidInCash", "Paid"]


# -- the bus of a context ------------------------------------------------------------------------


async def test_a_context_may_say_which_kind_of_bus_it_is_on() -> None:
    """Point 14: `context.bus` of a resilient bus has its methods, for type checkers too."""
    bus = ResilientMessageBus()
    letters: list[int] = []

    @bus.on(Placed)
    async def count(event: Placed, context: Context[ResilientMessageBus]) -> None:
        letters.append(context.bus.dead_letters.size)

    @bus.on(Paid)
    async def unresolved(event: Paid, context: Context[Elsewhere]) -> None:
        letters.append(7)

    async with bus:
        await bus.publish(Placed())
        await bus.publish(Paid())

    assert sorted(letters) == [0, 7]
