"""Sessions scope handlers, dependencies and headers to one job."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Generator
from contextlib import contextmanager

import anyio
import pytest

from msgbus import (
    BusClosedError,
    BusConfig,
    Command,
    Context,
    Event,
    HandlerRegistry,
    MessageBus,
    MissingHandlerError,
    SessionClosedError,
    SessionEndEvent,
    SessionFilter,
    SessionStartEvent,
)
from msgbus.errors import DuplicateSessionError, InsideHandlerError, SessionMismatchError
from msgbus.runtime.clock import VirtualClock
from msgbus.telemetry.prometheus import expose
from tests.counts import SESSIONS
from tests.evidence import Evidence
from tests.fakes import OrderPlaced, SlowHandler, conserves, let_others_run


class Ask(Command[str]):
    pass


class Relay(Command[str]):
    pass


class Happened(Event):
    number: int = 0


async def answer_bus(command: Ask) -> str:
    return "bus"


async def answer_session(command: Ask) -> str:
    return "session"


async def test_a_sessions_command_handler_comes_before_the_buss() -> None:
    bus = MessageBus()
    bus.register_command_handler(Ask, answer_bus)

    async with bus, bus.session("job") as session:
        assert await session.call(Ask()) == "bus"
        session.register_command_handler(Ask, answer_session)
        assert await session.call(Ask()) == "session"
        assert await bus.call(Ask()) == "bus"
    assert not bus.sessions


async def test_handlers_are_gone_after_the_session_also_from_caches() -> None:
    bus = MessageBus()
    async with bus:
        async with bus.session("job") as session:
            session.handles(Ask)(answer_session)
            assert await session.call(Ask()) == "session"
        async with bus.session("job") as session:
            with pytest.raises(MissingHandlerError, match="job"):
                await session.call(Ask())


async def test_what_a_handler_sends_stays_in_its_session() -> None:
    bus = MessageBus()
    seen: list[str | None] = []

    @bus.handles(Relay)
    async def relay(command: Relay, context: Context) -> str:
        assert context.session is not None
        assert context.session.session_id == "job"
        return await context.call(Ask())

    @bus.on(Happened)
    async def everywhere(event: Happened) -> None:
        seen.append(event.session_id)

    async with bus, bus.session("job") as session:
        session.register_command_handler(Ask, answer_session)
        assert await session.call(Relay()) == "session"
        await session.publish(Happened())
        await bus.publish(Happened())
        await bus.settled()

    assert seen == ["job", None]


async def test_event_handlers_of_a_session_see_only_its_events() -> None:
    bus = MessageBus()
    seen: list[tuple[str, int]] = []

    async with bus, bus.session("a") as a, bus.session("b") as b:
        a.subscribe(Happened, lambda event: seen.append(("a", event.number)), inline=True)
        b.subscribe(Happened, lambda event: seen.append(("b", event.number)), inline=True)
        bus.subscribe(Happened, lambda event: seen.append(("bus", event.number)), inline=True)
        await a.publish(Happened(number=1))
        await b.publish(Happened(number=2))
        await bus.publish(Happened(number=3))
        await bus.settled()

    assert sorted(seen) == [("a", 1), ("b", 2), ("bus", 1), ("bus", 2), ("bus", 3)]


async def test_leaving_a_session_empties_its_queues_before_its_handlers_go() -> None:
    bus = MessageBus()
    seen: list[int] = []

    async with bus:
        async with bus.session() as session:

            @session.on(Happened)
            async def slow(event: Happened) -> None:
                await anyio.lowlevel.checkpoint()
                seen.append(event.number)

            for number in range(50):
                await session.publish(Happened(number=number))

        assert seen == list(range(50))


async def test_a_session_that_ends_says_so_with_its_error_and_leftovers() -> None:
    clock = VirtualClock()
    bus = MessageBus(BusConfig(session_timeout=5), clock=clock)
    ends: list[SessionEndEvent] = []
    starts: list[str | None] = []
    bus.subscribe(SessionEndEvent, ends.append, inline=True)
    bus.subscribe(SessionStartEvent, lambda event: starts.append(event.session_id), inline=True)

    is_handled = anyio.Event()

    async def job() -> None:
        async with bus.session("job") as session:

            @session.on(Happened)
            async def hang(event: Happened) -> None:
                is_handled.set()
                await anyio.sleep_forever()

            await session.publish(Happened())
            await session.publish(Happened())
            await is_handled.wait()
            raise ValueError("password=hunter2")

    async with bus:
        async with anyio.create_task_group() as group:

            async def run() -> None:
                with pytest.raises(ValueError, match="hunter2"):
                    await job()

            group.start_soon(run)
            await is_handled.wait()  # else time has passed before the session begins to wait
            await clock.advance(6)
        await bus.settled()

    assert starts == ["job"]
    (end,) = ends
    assert end.session_id == "job"
    assert end.leftovers == 2
    assert end.error is not None
    assert "hunter2" not in end.error
    assert bus.stats().total("abandoned") == 2


async def test_a_second_live_session_of_one_id_is_refused() -> None:
    bus = MessageBus()
    async with bus, bus.session("job"):
        with pytest.raises(DuplicateSessionError, match="job"):
            async with bus.session("job"):
                pass
    assert not bus.sessions


async def test_a_session_is_used_inside_its_block_only() -> None:
    bus = MessageBus()
    session = bus.session("job")
    with pytest.raises(SessionClosedError, match="was not entered"):
        await session.publish(Happened())

    async with bus:
        async with session:
            pass
        with pytest.raises(SessionClosedError, match="has ended"):
            await session.publish(Happened())
        with pytest.raises(SessionClosedError, match="has ended"):
            session.register_command_handler(Ask, answer_session)
        with pytest.raises(SessionClosedError, match="entered before"):
            async with session:
                pass


async def test_closing_twice_does_nothing() -> None:
    bus = MessageBus()
    async with bus:
        async with bus.session("job") as session:
            await session.close()
        await session.close()
        assert not session.is_open


async def test_a_session_refuses_another_sessions_message() -> None:
    bus = MessageBus()
    async with bus, bus.session("a") as a, bus.session("b") as b:
        event = Happened()
        await a.publish(event)

        with pytest.raises(SessionMismatchError, match="model_copy"):
            await b.publish(event)
        await b.publish(event.model_copy())


async def test_a_session_can_be_closed_by_its_own_handler() -> None:
    bus = MessageBus()
    handled: list[int] = []

    async with bus, bus.session("job") as session:

        @session.on(Happened)
        async def end_it(event: Happened) -> None:
            handled.append(event.number)
            await session.close()

        for number in range(3):
            await session.publish(Happened(number=number))
        await bus.settled()
        assert not session.is_open

    assert handled == [0]
    assert bus.stats().total("abandoned") == 2


async def test_session_headers_and_registries_apply() -> None:
    registry = HandlerRegistry()
    registry.register_command_handler(Ask, answer_session)
    bus = MessageBus()

    async with bus, bus.session("job", registries=[registry], headers={"tenant": "x"}) as session:
        command = Ask()
        assert await session.call(command) == "session"
        assert dict(command.headers) == {"tenant": "x"}


async def test_session_settled_waits_for_its_own_handlers_only() -> None:
    bus = MessageBus()
    gate = anyio.Event()
    seen: list[str] = []

    @bus.on(Happened)
    async def blocked(event: Happened) -> None:
        await gate.wait()

    async with bus, bus.session() as session:

        @session.on(Happened)
        async def quick(event: Happened) -> None:
            seen.append("quick")

        await session.publish(Happened())
        await session.settled()
        assert seen == ["quick"]
        gate.set()


async def test_settled_inside_a_handler_raises_instead_of_hanging() -> None:
    bus = MessageBus()
    async with bus, bus.session() as session:

        @session.handles(Ask)
        async def ask(command: Ask) -> str:
            await session.settled()
            return ""

        with pytest.raises(InsideHandlerError):
            await session.call(Ask())


async def test_session_filter_lets_only_those_sessions_through() -> None:
    seen: list[str | None] = []
    bus = MessageBus()
    bus.subscribe(
        Happened,
        lambda event: seen.append(event.session_id),
        filter=SessionFilter("a"),
        inline=True,
    )
    async with bus, bus.session("a") as a, bus.session("b") as b:
        await a.publish(Happened())
        await b.publish(Happened())
        await bus.publish(Happened())
        await bus.settled()

    assert seen == ["a"]
    assert bus.stats().total("filtered") == 2


async def test_a_session_belongs_to_the_bus_that_made_it() -> None:
    one, other = MessageBus(), MessageBus()
    one.register_command_handler(Ask, answer_bus)
    async with one, other, other.session("job") as session:
        assert session.bus is other
        with pytest.raises(MissingHandlerError):
            await session.call(Ask())


async def test_no_session_can_be_opened_on_a_stopped_bus() -> None:
    bus = MessageBus()
    await bus.start()
    await bus.stop()

    with pytest.raises(BusClosedError):
        async with bus.session():
            pass


async def test_a_cancelled_job_still_gives_its_handlers_back() -> None:
    bus = MessageBus()
    async with bus:
        with anyio.CancelScope() as scope:
            async with bus.session("job") as session:
                session.register_command_handler(Ask, answer_session)
                scope.cancel()
                await anyio.sleep_forever()
        assert not bus.sessions
        assert bus.stats().registered_handlers == 0


@pytest.mark.slow
@pytest.mark.stress("core")
async def test_many_sessions_leave_memory_where_it_was(evidence: Evidence) -> None:
    bus = MessageBus()

    async def one_session() -> None:
        async with bus.session() as session:
            session.register_command_handler(Ask, answer_session)
            session.subscribe(Happened, lambda event: None, inline=True)
            await session.call(Ask())
            await session.publish(Happened())

    async with bus:
        for _ in range(100):
            await one_session()
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(SESSIONS):
            await one_session()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert after - before < 200_000, f"{(after - before) / SESSIONS:.0f} bytes a session"
    evidence("sessions opened and closed leave no memory behind", sessions=SESSIONS)


# -- point 9: short sessions cost little and leave nothing -------------------------------------


async def test_names_and_topics_of_session_handlers_do_not_pile_up_in_stats() -> None:
    """Point 9: 5,000 sessions with names of their own left 34,089 lines in Prometheus."""
    bus = MessageBus()
    handled = first = lines = 0

    async def progress(event: Happened) -> None:
        nonlocal handled
        handled += 1

    async def on_topic(event: Event) -> None:
        pass

    async with bus:
        for number in range(20):
            async with bus.session(f"job-{number}") as session:
                session.subscribe(Happened, progress, name=f"progress-{number}")
                session.subscribe(f"job.{number}.**", on_topic, name=f"topic-{number}")
                session.register_command_handler(Ask, answer_session, name=f"answer-{number}")
                await session.publish(Happened())
                await session.publish(Happened(), topic=f"job.{number}.a")
                await session.call(Ask())
            await let_others_run()
            gc.collect()  # what is left of the session
            lines = len(expose(bus).splitlines())
            first = lines if number == 0 else first

    stats = bus.stats()
    assert handled == 40
    assert {name: row.handled for name, row in stats.handlers.items()} == {
        "progress": 40,
        "on_topic": 20,
    }
    assert {name: row.handled for name, row in stats.commands.items()} == {"answer_session": 20}
    assert lines == first
    conserves(bus)


async def test_a_live_sessions_queue_is_in_the_row_of_its_function() -> None:
    bus = MessageBus()
    slow = SlowHandler()
    async with bus, bus.session() as session:
        session.subscribe(OrderPlaced, slow, name="mine")
        await session.publish(OrderPlaced())
        await slow.started.wait()
        await session.publish(OrderPlaced())
        row = bus.stats().handlers["SlowHandler"]
        assert (row.queued, row.running) == (1, 1)
        slow.release.set()


class TimerCount(VirtualClock):
    """A virtual clock that counts how often somebody set a timer."""

    timers = 0

    @contextmanager
    def cancel_after(self, seconds: float) -> Generator[anyio.CancelScope]:
        self.timers += 1
        with super().cancel_after(seconds) as scope:
            yield scope


async def test_closing_an_idle_session_sets_no_timer() -> None:
    """Point 9: nor does settling an idle bus, or closing an idle handler."""
    clock = TimerCount()
    bus = MessageBus(clock=clock)

    async with bus:
        async with bus.session() as session:
            session.register_command_handler(Ask, answer_session)
            handler = session.subscribe(Happened, lambda event: None, inline=True)
            await session.call(Ask())
            await session.publish(Happened())
            await session.settled()
            before = clock.timers
            await handler.close()
            await bus.settled(timeout=5)
        assert clock.timers == before
        async with bus.session() as session:
            session.subscribe(Happened, lambda event: None, inline=True)
            await session.publish(Happened())
        assert clock.timers > before, "a busy one is waited for, with a limit"
