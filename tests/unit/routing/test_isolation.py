"""Endpoints in isolation: hung ones block no other, replies open no circuit, retries."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from msgbus import Command, MessageBus, Refusal
from msgbus.errors import (
    ConfigurationError,
    EndpointFailedError,
    NoHealthyEndpointError,
    RequestTimeoutError,
)
from msgbus.resilience import CircuitBreakerConfig, CircuitState, RetryConfig
from msgbus.resilience.config import RetryAttempt
from msgbus.routing import (
    Endpoint,
    EndpointRegistry,
    EventEnvelope,
    HealthMonitor,
    HealthState,
    MessageRouter,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import let_others_run, logged
from tests.unit.routing.workers import Crew, Worker


class OutOfStockError(Exception):
    """What a worker answers; no message error, no refusal, no lost connection."""


class Shop:
    """A router over workers of one group, on virtual time, that notes what it hears."""

    def __init__(
        self, *names: str, breaker: CircuitBreakerConfig | None = None, **opts: Any
    ) -> None:
        self.clock = VirtualClock()
        self.heard: list[str] = []
        endpoints = EndpointRegistry()
        self.monitor = HealthMonitor(
            endpoints, clock=self.clock, on_event=self.hear, breaker=breaker, chance=lambda: 0.0
        )
        self.router = MessageRouter(
            endpoints=endpoints, monitor=self.monitor, clock=self.clock, **opts
        )
        self.workers = [Worker(name, group="crew") for name in names]
        for worker in self.workers:
            endpoints.register(worker.endpoint)
        self.router.routes.register_route("jobs", "crew")

    def hear(self, event: Any) -> None:
        self.heard.append(f"{type(event).__name__} {event.endpoint_id}")

    async def ask(self, timeout: float | None = None) -> Any:
        """The answer to a request, or the error; time passes as it must."""
        outcome: list[Any] = []

        async def ask() -> None:
            try:
                outcome.append(await self.router.request("jobs", 1, timeout=timeout))
            except Exception as error:
                outcome.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            for _ in range(600):
                await let_others_run()
                if outcome:
                    break
                await self.clock.advance(0.1)
        return outcome[0]

    def circuit(self, name: str = "a") -> CircuitState:
        health = self.monitor.health(name)
        assert health is not None
        return health.circuit


# -- hung endpoints ------------------------------------------------------------------------


async def test_with_defaults_a_hung_endpoint_leaves_time_to_ask_another() -> None:
    """Point 12: a delivery had 30 s and so had the request, and nobody was asked instead."""
    shop = Shop("a", "b")
    shop.workers[0].is_hanging = True

    answers = [await shop.ask() for _ in range(20)]

    assert set(answers) == {"b did 1"}
    assert shop.circuit() is CircuitState.OPEN
    assert shop.workers[0].endpoint.failed == 5
    assert shop.heard == ["EndpointUnhealthyEvent a"]


@pytest.mark.parametrize("timeout", [1.0, 5.0])
async def test_a_delivery_cut_off_by_its_requester_counts_against_the_endpoint(
    timeout: float,
) -> None:
    """Point 12: it used to say nothing, and a hung endpoint was asked for ever."""
    shop = Shop("a")
    shop.workers[0].is_hanging = True

    answers = [await shop.ask(timeout) for _ in range(6)]

    assert [type(one) for one in answers] == [RequestTimeoutError] * 5 + [NoHealthyEndpointError]
    assert shop.circuit() is CircuitState.OPEN
    assert shop.workers[0].endpoint.failed == 5
    assert shop.workers[0].endpoint.in_flight == 0
    assert shop.heard == ["EndpointUnhealthyEvent a"]


async def test_the_time_of_the_manager_counts_too() -> None:
    """Point 12."""
    shop = Shop("a")
    shop.router.correlations.timeout = 2.0
    shop.workers[0].is_hanging = True

    answers = [await shop.ask() for _ in range(5)]

    assert [str(one) for one in answers] == ["No reply to int to 'jobs' within 2 s."] * 5
    assert shop.workers[0].endpoint.failed == 5


class Ask(Command[Any]):
    pass


async def test_the_time_of_the_command_that_asks_counts_too() -> None:
    """Point 12: a handler asks without a limit, and its caller's time is over first."""
    shop = Shop("a")
    shop.workers[0].is_hanging = True
    bus = MessageBus(clock=shop.clock)

    @bus.handles(Ask)
    async def ask(command: Ask) -> Any:
        return await shop.router.request("jobs", 1)

    async with bus:
        for _ in range(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(execute, bus)
                await shop.clock.advance(2)

    assert shop.workers[0].endpoint.failed == 5
    assert shop.workers[0].endpoint.in_flight == 0
    assert shop.circuit() is CircuitState.OPEN
    assert shop.heard == ["EndpointUnhealthyEvent a"]


async def execute(bus: MessageBus) -> None:
    result = await bus.execute(Ask(), timeout=2)
    assert isinstance(result.exception, TimeoutError)


async def test_a_caller_that_goes_away_says_nothing_about_the_endpoint() -> None:
    """Point 12: only the end of the requester's time counts."""
    shop = Shop("a")
    shop.workers[0].is_hanging = True

    for _ in range(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shop.router.request, "jobs", 1)
            await let_others_run()
            tasks.cancel_scope.cancel()

    assert shop.workers[0].endpoint.failed == 0
    assert shop.workers[0].endpoint.in_flight == 0
    assert shop.circuit() is CircuitState.CLOSED


async def test_who_was_asked_in_the_last_moment_is_not_blamed() -> None:
    """Point 12: the time was spent by the one before it."""
    shop = Shop("a", "b", timeout=1.9)
    for worker in shop.workers:
        worker.is_hanging = True

    await shop.ask(2.0)

    assert [worker.endpoint.failed for worker in shop.workers] == [1, 0]


async def test_a_probe_that_is_cut_off_opens_the_circuit_again() -> None:
    """Point 12."""
    shop = Shop("a", breaker=CircuitBreakerConfig(failure_threshold=1, jitter=0))
    shop.workers[0].is_hanging = True
    await shop.ask(1)
    await shop.clock.advance(30)
    assert shop.circuit() is CircuitState.HALF_OPEN

    await shop.ask(1)

    assert shop.circuit() is CircuitState.OPEN


# -- answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OutOfStockError("none"), RuntimeError("odd"), Refusal("no")])
async def test_errors_that_are_an_answer_open_no_circuit(error: Exception) -> None:
    """Point 12: only what sends a message to the next endpoint counts against one."""
    crew = Crew()
    crew.workers[0].error = error

    for _ in range(30):
        with pytest.raises(type(error)):
            await crew.pool.deliver("w0", EventEnvelope(1))

    assert crew.monitor.is_healthy("w0")
    assert crew.events == []


async def test_an_answer_closes_a_half_open_circuit() -> None:
    """Point 12: whoever answers is up."""
    clock = VirtualClock()
    crew = Crew(clock=clock)
    crew.workers[0].error = ConnectionError("gone")
    for _ in range(5):
        with pytest.raises(EndpointFailedError):
            await crew.pool.deliver("w0", EventEnvelope(1))
    await clock.advance(30)
    crew.workers[0].error = OutOfStockError("none")

    with pytest.raises(OutOfStockError):
        await crew.pool.deliver("w0", EventEnvelope(1))

    assert crew.monitor.is_healthy("w0")
    assert [type(event).__name__ for event in crew.events] == [
        "EndpointUnhealthyEvent",
        "EndpointRecoveredEvent",
    ]


async def test_who_says_what_to_ignore_decides_which_answers_count() -> None:
    """Point 12: `ignore=()` counts every error, an answer or not."""
    crew = Crew(monitor={"breaker": CircuitBreakerConfig(ignore=(), failure_threshold=2)})
    crew.workers[0].error = OutOfStockError("none")

    for _ in range(2):
        with pytest.raises(OutOfStockError):
            await crew.pool.deliver("w0", EventEnvelope(1))
    with pytest.raises(NoHealthyEndpointError):
        await crew.pool.deliver("w0", EventEnvelope(1))


async def test_what_means_out_of_reach_counts_whatever_it_is() -> None:
    """Point 12: even an error that a circuit would take for the message's own fault."""
    crew = Crew(failover_on=(LookupError,))
    crew.workers[0].error = LookupError("no route to host")

    answers = await crew.send(*range(30))

    assert len(answers) == 30
    assert crew.workers[0].endpoint.failed == 5
    health = crew.monitor.health("w0")
    assert health is not None
    assert health.state is HealthState.UNHEALTHY


async def test_running_out_of_time_is_out_of_reach_whatever_else_is() -> None:
    """Point 12."""
    clock = VirtualClock()
    crew = Crew(clock=clock, timeout=2, failover_on=(ConnectionError,))
    crew.workers[0].is_hanging = True
    answers: list[Any] = []

    async def send() -> None:
        answers.extend(await crew.send("job"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await clock.advance(2)

    assert answers == ["w1 did job"]


# -- retries -------------------------------------------------------------------------------


class Flaky:
    """Fails so many times, then works; on virtual time."""

    def __init__(self, fails: int, error: Exception | None = None, **options: Any) -> None:
        self.clock = VirtualClock()
        self.calls = 0
        self.retries: list[RetryAttempt] = []
        self.router = MessageRouter(clock=self.clock, timeout=options.pop("timeout", 10.0))
        plan: dict[str, Any] = {"initial_delay": 1.0, "jitter": False}
        plan["on_retry"] = self.retries.append

        async def send(envelope: EventEnvelope[Any]) -> str:
            self.calls += 1
            if self.calls <= fails:
                raise error or ConnectionError("password=hunter2")
            return "done"

        retry = RetryConfig(**{**plan, **options})
        self.router.endpoints.register(Endpoint("a", send, group="crew", retry=retry))
        self.router.routes.register_route("jobs", "crew")

    async def ask(self) -> Any:
        outcome: list[Any] = []

        async def ask() -> None:
            try:
                outcome.append(await self.router.request("jobs", "job"))
            except Exception as error:
                outcome.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await self.clock.advance(25)
        return outcome[0]


async def test_an_endpoint_may_be_tried_again_before_another_is_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Point 12: `Endpoint(retry=RetryConfig(...))`."""
    flaky = Flaky(2)

    assert await flaky.ask() == "done"

    assert flaky.calls == 3
    assert [(one.handler, one.attempt, one.delay) for one in flaky.retries] == [
        ("a", 1, 1.0),
        ("a", 2, 2.0),
    ]
    assert flaky.retries[0].message.payload == "job"
    rows = logged(caplog, "delivery_retried")
    assert [row["attempt"] for row in rows] == [1, 2]
    assert "hunter2" not in str(rows)


async def test_retries_end_and_then_the_next_endpoint_is_asked() -> None:
    """Point 12."""
    flaky = Flaky(99, max_retries=2)

    async def other(envelope: EventEnvelope[Any]) -> str:
        return "other"

    flaky.router.endpoints.register(Endpoint("b", other, group="crew"))

    assert await flaky.ask() == "other"
    assert flaky.calls == 3


async def test_each_try_counts_and_an_open_circuit_ends_the_retries() -> None:
    """Point 12."""
    flaky = Flaky(99, max_retries=50, initial_delay=0.1, exponential_base=1.0)

    assert isinstance(await flaky.ask(), EndpointFailedError)

    assert flaky.calls == CircuitBreakerConfig().failure_threshold


async def test_the_time_of_a_delivery_holds_with_all_its_tries() -> None:
    """Point 12: retries never take longer than a delivery may."""
    flaky = Flaky(99, timeout=2.5, max_retries=50, exponential_base=1.0)

    await flaky.ask()

    assert flaky.calls == 3  # at 0, 1 and 2 s


async def test_an_answer_is_not_asked_for_again_unless_the_retry_names_it() -> None:
    """Point 12."""
    plain = Flaky(99, OutOfStockError("none"))
    named = Flaky(2, OutOfStockError("none"), retry_on=(OutOfStockError,))

    assert isinstance(await plain.ask(), OutOfStockError)
    assert await named.ask() == "done"

    assert (plain.calls, named.calls) == (1, 3)


async def test_a_hook_that_fails_breaks_no_retry(caplog: pytest.LogCaptureFixture) -> None:
    """Point 12."""

    def broken(attempt: RetryAttempt) -> None:
        raise ValueError(attempt.handler)

    flaky = Flaky(1, on_retry=broken)

    assert await flaky.ask() == "done"
    assert len(logged(caplog, "retry_hook_failed")) == 1


# -- sync functions ------------------------------------------------------------------------


async def test_a_sync_send_works_and_holds_up_nobody() -> None:
    """Point 12: it was an error at each delivery that it could not be awaited."""
    router = MessageRouter()
    go_on = threading.Event()
    threads: list[str] = []

    def send(envelope: EventEnvelope[Any]) -> str:
        threads.append(threading.current_thread().name)
        assert go_on.wait(10)
        return f"sync did {envelope.payload}"

    router.endpoints.register(Endpoint("a", send))
    router.routes.register_route("jobs", "a")
    answers: list[str] = []

    async def ask(number: int) -> None:
        answers.append(await router.request("jobs", number))

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(ask, number)
        await let_others_run()
        go_on.set()

    assert sorted(answers) == [f"sync did {number}" for number in range(3)]
    assert threading.current_thread().name not in threads


async def test_a_sync_send_that_gives_something_to_await_works_too() -> None:
    """Point 12: as a lambda around a coroutine does."""
    worker = Worker("w")
    router = MessageRouter()

    def begin(envelope: EventEnvelope[Any]) -> Any:
        return worker.send(envelope)

    router.endpoints.register(Endpoint("a", begin))
    router.routes.register_route("jobs", "a")

    assert await router.request("jobs", 1) == "w did 1"


async def test_a_sync_check_works() -> None:
    """Point 12."""
    endpoints = EndpointRegistry()
    monitor = HealthMonitor(endpoints, failed_checks=1)
    endpoints.register(Endpoint("well", Worker("a").send, check=lambda: True))
    endpoints.register(Endpoint("ill", Worker("b").send, check=lambda: False))

    report = await monitor.check_now()

    assert report["well"].state is HealthState.HEALTHY
    assert str(report["ill"].reason).endswith("it returned False")


async def test_a_sync_check_that_hangs_fails_and_is_not_begun_once_more_beside_itself() -> None:
    """Point 12: it hangs in one thread, not in one more at each check."""
    clock = VirtualClock()
    endpoints = EndpointRegistry()
    monitor = HealthMonitor(endpoints, clock=clock, timeout=1.0, failed_checks=3)
    begun: list[int] = []
    release = threading.Event()

    def check() -> None:
        begun.append(1)
        release.wait(30)

    endpoints.register(Endpoint("hung", Worker("w").send, check=check))
    try:
        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(monitor.check_now)
                while not begun:
                    await anyio.lowlevel.checkpoint()
                await clock.advance(1)
    finally:
        release.set()

    assert str(monitor.report()["hung"].reason).endswith("no result within 1 s")
    assert begun == [1]


async def test_sync_workers_that_ask_each_other_never_run_out_of_threads() -> None:
    """Points 11 and 12."""
    router = MessageRouter()

    def first(envelope: EventEnvelope[Any]) -> Any:
        return anyio.from_thread.run(router.request, "second", envelope.payload)

    def second(envelope: EventEnvelope[Any]) -> Any:
        if envelope.payload == 0:
            return "end"
        return anyio.from_thread.run(router.request, "first", envelope.payload - 1)

    for name, send in {"first": first, "second": second}.items():
        router.endpoints.register(Endpoint(name, send, max_threads=2))
        router.routes.register_route(name, name)
    answers: list[Any] = []

    async def ask() -> None:
        answers.append(await router.request("first", 2, timeout=20))

    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(ask)

    assert answers == ["end"] * 6


@pytest.mark.parametrize("option", ["send", "check"])
def test_what_cannot_be_called_is_refused_when_the_endpoint_is_made(option: str) -> None:
    """Point 12."""
    parts: dict[str, Any] = {"send": Worker("w").send, "check": None, option: "worker-1"}

    with pytest.raises(ConfigurationError, match=f"{option}='worker-1' of endpoint 'a'"):
        Endpoint("a", **parts)
