"""Bus, session, context and portal have one set of sending methods (point 9)."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from msgbus import (
    BusPortal,
    BusSession,
    Command,
    Context,
    IMessageBus,
    MessageBus,
    SessionClosedError,
)
from msgbus.bus.protocols import SendingMethods
from msgbus.errors import BusStateError, NoReplierError, WrongMessageTypeError
from tests.fakes import OrderPlaced, OrderShipped, conserves, let_others_run

NAMES = ["execute", "call", "publish", "publish_many", "request", "enqueue", "stream", "expect"]


class Ask(Command[str]):
    pass


class Fill(Command[int]):
    pass


async def answer_bus(command: Ask) -> str:
    return "bus"


async def answer_session(command: Ask) -> str:
    return "session"


# -- one set -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [MessageBus, BusSession, Context, BusPortal, IMessageBus])
def test_every_sender_has_every_method_with_one_signature(kind: type, name: str) -> None:
    """Point 9: what one of them takes, all of them take."""
    declared = inspect.signature(getattr(SendingMethods, name))
    mine = inspect.signature(getattr(kind, name))

    assert list(mine.parameters.values()) == list(declared.parameters.values())
    assert inspect.getdoc(getattr(kind, name))


def test_no_file_but_one_and_the_bus_itself_writes_the_signatures() -> None:
    """Point 9: session, context, portal and protocol repeat none but for the two they change."""
    package = Path(inspect.getfile(SendingMethods)).parent
    written = {
        name: sorted(
            file.name
            for file in package.glob("*.py")
            if f"    async def {name}(" in file.read_text(encoding="utf-8")
        )
        for name in NAMES
    }

    assert written["execute"] == ["commands.py", "protocols.py"]
    assert written["call"] == ["protocols.py"]
    assert written["publish"] == ["events.py", "protocols.py"]
    assert written["request"] == ["protocols.py", "requests.py"]
    assert written["enqueue"] == ["journal_methods.py", "protocols.py"]


def test_a_blocking_method_does_not_pass_for_a_coroutine_function() -> None:
    assert not inspect.iscoroutinefunction(inspect.unwrap(BusPortal.publish))
    assert inspect.iscoroutinefunction(inspect.unwrap(BusSession.publish))


# -- headers -----------------------------------------------------------------------------------


async def test_call_takes_headers_like_execute() -> None:
    """Point 14: `call(headers=)`, on each of them."""
    seen: list[str] = []
    bus = MessageBus()

    @bus.handles(Ask)
    async def ask(command: Ask, context: Context) -> str:
        seen.append(context.headers["tenant"])
        return ""

    @bus.handles(Fill)
    async def fill(command: Fill, context: Context) -> int:
        await context.call(Ask(), headers={"tenant": "context"})
        return 0

    async with bus, bus.session() as session:
        await bus.call(Ask(), headers={"tenant": "bus"})
        await session.call(Ask(), headers={"tenant": "session"})
        await bus.call(Fill())
        portal = bus.portal()
        await anyio.to_thread.run_sync(lambda: portal.call(Ask(), headers={"tenant": "portal"}))

    assert seen == ["bus", "session", "context", "portal"]


# -- sessions ----------------------------------------------------------------------------------


async def some(numbers: Iterable[int]) -> AsyncIterator[OrderPlaced]:
    for number in numbers:
        yield OrderPlaced(number=number)


async def test_a_session_publishes_many_events_as_its_own() -> None:
    bus = MessageBus()
    seen: list[tuple[int, str | None, str]] = []

    async with bus, bus.session("job", headers={"tenant": "x"}) as session:
        session.subscribe(
            OrderPlaced,
            lambda event: seen.append((event.number, event.session_id, event.headers["tenant"])),
            inline=True,
        )
        first = await session.publish_many(OrderPlaced(number=number) for number in range(3))
        second = await session.publish_many(some(range(3, 5)))
        assert (first.accepted, second.accepted) == (3, 2)

    assert seen == [(number, "job", "x") for number in range(5)]
    conserves(bus)


async def test_a_session_refuses_what_is_no_event_among_many_and_one_alone() -> None:
    bus = MessageBus()
    not_an_event: Any = Ask()
    async with bus, bus.session() as session:
        with pytest.raises(WrongMessageTypeError, match="publish takes an Event"):
            await session.publish_many([OrderPlaced(), not_an_event])
        one: Any = OrderPlaced()
        with pytest.raises(WrongMessageTypeError, match="takes many events"):
            await session.publish_many(one)
        assert one.session_id is None
        with pytest.raises(WrongMessageTypeError, match="execute takes a Command"):
            await session.execute(one)
        assert one.session_id is None


async def test_a_sessions_request_is_answered_by_its_own_handler() -> None:
    bus = MessageBus()
    bus.register_command_handler(Ask, answer_bus)
    async with bus, bus.session() as session:
        session.register_command_handler(Ask, answer_session)

        assert await session.request(Ask()) == "session"
        assert await bus.request(Ask()) == "bus"
        with pytest.raises(NoReplierError):
            await session.request(Fill())


async def test_a_sessions_stream_gives_its_events_and_ends_with_it() -> None:
    bus = MessageBus()
    seen: list[int] = []

    async def read(session: BusSession) -> None:
        async with session.stream(OrderPlaced) as events:
            seen.extend([event.number async for event in events])

    async with bus, anyio.create_task_group() as tasks:
        async with bus.session() as session:
            tasks.start_soon(read, session)
            await let_others_run()
            await bus.publish(OrderPlaced(number=1))
            await session.publish(OrderPlaced(number=2))
            await session.publish(OrderShipped(number=3))
        await let_others_run()
        assert seen == [2]
        late = session.stream(OrderPlaced)
        with pytest.raises(SessionClosedError):
            await late.__aenter__()

    assert bus.stats().registered_handlers == 0
    conserves(bus)


async def test_streams_of_a_long_session_are_forgotten_one_by_one() -> None:
    bus = MessageBus()
    async with bus, bus.session() as session:
        for _ in range(3):
            async with session.stream(OrderPlaced):
                assert bus.stats().registered_handlers == 1

        assert session.handlers() == ()


@pytest.mark.parametrize("name", NAMES[:-2])
async def test_a_closed_session_sends_nothing(name: str) -> None:
    bus = MessageBus()
    message: Any = [] if name == "publish_many" else Ask()
    message = OrderPlaced() if name == "publish" else message
    async with bus:
        async with bus.session() as session:
            pass
        with pytest.raises(SessionClosedError, match="has ended"):
            await getattr(session, name)(message)


async def test_a_session_enqueues_a_command_as_its_own(tmp_path: Path) -> None:
    bus = MessageBus(journal=f"sqlite:///{tmp_path / 'shop.db'}")
    seen: list[tuple[str | None, str]] = []

    @bus.handles(Ask)
    async def ask(command: Ask) -> str:
        seen.append((command.session_id, command.headers["tenant"]))
        return "done"

    async with bus, bus.session("job") as session:
        ticket = await session.enqueue(Ask(), headers={"tenant": "x"})
        assert await ticket.result(10) == "done"

    assert seen == [("job", "x")]


# -- contexts ----------------------------------------------------------------------------------


async def test_a_context_publishes_many_and_requests_as_the_message_at_hand() -> None:
    bus = MessageBus()
    causes: list[str | None] = []
    bus.register_command_handler(Ask, answer_bus)
    bus.subscribe(OrderPlaced, lambda event: causes.append(event.causation_id), inline=True)

    @bus.handles(Fill)
    async def fill(command: Fill, context: Context) -> int:
        assert await context.request(Ask()) == "bus"
        async with context.stream(OrderPlaced) as events:
            summary = await context.publish_many([OrderPlaced(), OrderPlaced()])
            assert (await anext(events)).causation_id == command.message_id
        return summary.accepted

    async with bus:
        command = Fill()
        assert await bus.call(command) == 2
        await bus.settled()

    assert causes == [command.message_id] * 2


async def test_a_context_that_is_used_in_an_older_task_still_gives_the_cause() -> None:
    bus = MessageBus()
    send, receive = anyio.create_memory_object_stream[Context](1)
    done = anyio.Event()
    causes: list[str | None] = []
    bus.subscribe(OrderPlaced, lambda event: causes.append(event.causation_id), inline=True)

    async def older() -> None:
        context = await receive.receive()
        await context.publish_many([OrderPlaced()])
        done.set()

    @bus.handles(Fill)
    async def fill(command: Fill, context: Context) -> int:
        await send.send(context)
        await done.wait()
        return 0

    command = Fill()
    async with bus, anyio.create_task_group() as tasks:
        tasks.start_soon(older)
        await bus.call(command)
        await bus.settled()

    send.close()
    receive.close()
    assert causes == [command.message_id]


# -- portals -----------------------------------------------------------------------------------


async def in_thread(function: Callable[[], Any]) -> Any:
    return await anyio.to_thread.run_sync(function)


async def test_a_portal_requests_and_publishes_many() -> None:
    bus = MessageBus()
    seen: list[int] = []
    bus.register_command_handler(Ask, answer_bus)
    bus.subscribe(OrderPlaced, lambda event: seen.append(event.number), inline=True)

    async with bus:
        portal = bus.portal()
        assert await in_thread(lambda: portal.request(Ask())) == "bus"
        events = [OrderPlaced(number=1), OrderPlaced(number=2)]
        assert (await in_thread(lambda: portal.publish_many(events))).accepted == 2

    assert seen == [1, 2]


async def test_a_portals_delayed_event_is_scheduled() -> None:
    bus = MessageBus()
    async with bus:
        portal = bus.portal()
        receipt = await in_thread(lambda: portal.publish(OrderPlaced(), delay=1000))
        assert bus.stats().scheduled == 1
        assert receipt.cancel()


async def test_a_portals_stream_blocks_its_thread_and_ends_with_the_bus() -> None:
    bus = MessageBus()
    entered = anyio.Event()
    seen: list[int] = []

    async with anyio.create_task_group() as tasks, bus:
        portal = bus.portal()

        async def tell() -> None:
            entered.set()

        def read() -> None:
            with portal.stream(OrderPlaced, buffer=10) as events:
                portal.wait(tell)
                seen.extend(event.number for event in events)
                assert (events.missed, events.lag) == (0, 0)

        tasks.start_soon(anyio.to_thread.run_sync, read)
        await entered.wait()
        await bus.publish_many(OrderPlaced(number=number) for number in range(3))

    assert seen == [0, 1, 2]


async def test_a_portals_stream_must_be_entered_first() -> None:
    async with MessageBus() as bus:
        portal = bus.portal()
        with pytest.raises(BusStateError, match="Enter the stream first"):
            await in_thread(lambda: list(portal.stream(OrderPlaced)))
        with pytest.raises(BusStateError, match="for other threads"):
            portal.stream(OrderPlaced).__enter__()
