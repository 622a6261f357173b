"""`bus.handlers()` and `session.handlers()`: the public list of what is registered (19e)."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from msgbus import Command, Event, HandlerInfo, MessageBus, per_message
from msgbus.handlers.signatures import location_of
from msgbus.resilience import ResilientMessageBus, RetryConfig
from msgbus.subscriptions import Mode


class Ask(Command[str]):
    pass


class Tell(Command[str]):
    pass


class Happened(Event):
    pass


class Ended(Event):
    pass


async def ask(command: Ask | Tell) -> str:
    return ""


async def note(event: Event) -> None: ...


class Lists:
    async def handle(self, events: list[Happened]) -> None: ...


def names(infos: tuple[HandlerInfo, ...]) -> list[str]:
    return [f"{one.name} {one.target}" for one in infos]


def test_each_handler_is_listed_with_all_that_was_said_of_it() -> None:
    bus = MessageBus()
    bus.subscribe(Happened | Ended, note, priority=5, concurrency=3, timeout=2.0)
    bus.subscribe("shop.**", note, name="topics")
    bus.subscribe(Happened, per_message(Lists), batch=True)
    bus.register_command_handler(Ask, ask)

    command, several, lists, topics = bus.handlers()

    assert (command.name, command.kind, command.message_types) == ("ask", "command", (Ask,))
    assert (command.module, command.line) == (__name__, ask.__code__.co_firstlineno)
    assert (command.handler, command.session_id, command.made) == (ask, None, None)
    assert (several.target, several.message_types) == ("Happened | Ended", (Happened, Ended))
    assert (several.priority, several.concurrency, several.timeout) == (5, 3, 2.0)
    assert (topics.name, topics.topic, topics.target) == ("topics", "shop.**", "shop.**")
    assert topics.message_types == (Event,)
    assert (lists.name, lists.batch, lists.made) == ("Lists", True, "per message")
    assert (lists.handler, lists.line) == (Lists, Lists.handle.__code__.co_firstlineno)
    assert (lists.mode, lists.subscription, lists.is_durable) == (None, None, False)


def test_it_is_a_snapshot_in_a_stable_order_of_records_that_do_not_change() -> None:
    bus = MessageBus()
    bus.subscribe(Happened, note)
    before = bus.handlers()

    bus.register_command_handler(Ask, ask)

    assert names(before) == ["note Happened"]
    assert names(bus.handlers()) == ["ask Ask", "note Happened"]
    assert bus.handlers() == bus.handlers()
    assert len(set(bus.handlers())) == 2
    with pytest.raises(FrozenInstanceError):
        before[0].name = "other"  # type: ignore[misc]


async def test_a_session_lists_its_own_and_on_request_what_it_inherits() -> None:
    bus = MessageBus()
    bus.register_command_handler(Ask, ask)
    bus.register_command_handler(Tell, ask)
    bus.subscribe(Happened, note)

    async def other(command: Ask) -> str:
        return ""

    async with bus, bus.session("job-1") as session:
        session.register_command_handler(Ask, other)
        session.subscribe(Ended, note)

        own = session.handlers()
        assert names(own) == ["other Ask", "note Ended"]
        assert {one.session_id for one in own} == {"job-1"}
        inherited = ["ask Tell", "note Happened"]
        assert names(session.handlers(inherited=True)) == [*names(own), *inherited]
        assert names(bus.handlers()) == ["ask Ask", *inherited, *names(own)]
        assert "session 'job-1'" in repr(own[0])

    assert names(bus.handlers()) == ["ask Ask", "ask Tell", "note Happened"]


async def test_durable_handlers_say_their_mode_and_their_name_in_the_journal() -> None:
    bus = MessageBus(journal="memory:")
    bus.subscribe(Happened, note)
    bus.subscribe(Ended, note, durable="ended", mode=Mode.KEY_SHARED, max_in_flight=4)
    bus.subscribe(Ended, note, name="here", durable=False)

    async with bus:
        first, second, third = bus.handlers()

    assert (first.mode, first.subscription) == (Mode.EXCLUSIVE, "note:Happened")
    assert (second.mode, second.subscription) == (Mode.KEY_SHARED, "ended")
    assert second.concurrency == 4
    assert (third.mode, third.is_durable) == (None, False)
    assert "durable KEY_SHARED" in repr(second)


def test_the_repr_is_one_line_that_says_who_handles_what_and_where() -> None:
    bus = MessageBus()
    bus.subscribe(Happened, Lists, batch=True, priority=2, concurrency=8)

    (info,) = bus.handlers()

    assert repr(info) == (
        f"<HandlerInfo Lists for event Happened, {__name__}:{info.line}, bus, in memory, "
        f"priority 2, 8 at once, lists, made once>"
    )


def test_a_builtin_has_no_line() -> None:
    seen: list[Event] = []
    bus = MessageBus()
    bus.subscribe(Happened, seen.append)

    (info,) = bus.handlers()

    assert (info.module, info.line) == location_of(seen.append) == ("builtins", None)
    assert repr(info).startswith("<HandlerInfo list.append for event Happened, builtins, bus")


async def test_a_resilient_bus_says_the_policy_in_words_and_makes_no_circuit_for_it() -> None:
    bus = ResilientMessageBus(retry=RetryConfig(max_retries=7), timeout=3.0)
    bus.register_command_handler(Ask, ask)
    bus.policy(Ask, bulkhead=4)
    async with bus, bus.session() as session:
        session.subscribe(Happened, note, timeout=1.0)

        command, event = bus.handlers()

        assert not bus.circuits
        assert command.policy is not None
        assert event.policy is not None
        assert "retry        7 times" in command.policy
        assert "bulkhead     4 at once" in command.policy
        assert "circuit 'ask' opens after" in command.policy
        assert "timeout      1 s per attempt" in event.policy
        described = "\n".join(line[2:] for line in bus.describe(Ask).splitlines()[1:])
        assert described == command.policy


def test_a_plain_bus_has_no_policies() -> None:
    bus = MessageBus()
    bus.subscribe(Happened, note)

    (info,) = bus.handlers()

    if isinstance(bus, ResilientMessageBus):  # these tests run on both kinds of bus
        assert info.policy is not None
    else:
        assert info.policy is None
