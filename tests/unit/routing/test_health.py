"""HealthMonitor: health checks, stalled endpoints, and events on changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from msgbus import MessageBus
from msgbus.errors import ConfigurationError, NoHealthyEndpointError
from msgbus.resilience import CircuitState
from msgbus.routing import (
    EndpointRecoveredEvent,
    EndpointRegistry,
    EndpointUnhealthyEvent,
    EventEnvelope,
    HealthMonitor,
    HealthState,
)
from msgbus.runtime.clock import VirtualClock
from tests.fakes import let_others_run, logged
from tests.unit.routing.workers import Crew, Worker


def state(crew: Crew, name: str = "w0") -> HealthState:
    health = crew.monitor.health(name)
    assert health is not None
    return health.state


def told(crew: Crew) -> list[tuple[str, str]]:
    return [(type(event).__name__, event.endpoint_id) for event in crew.events]


async def test_an_endpoint_is_not_green_before_it_has_proven_anything() -> None:
    crew = Crew()

    assert state(crew) is HealthState.UNKNOWN
    assert not crew.monitor.is_healthy("w0")
    assert crew.monitor.health("nobody") is None
    assert not crew.monitor.is_healthy("nobody")


async def test_a_delivery_or_a_check_proves_it_well() -> None:
    crew = Crew()

    await crew.send(1)
    assert [state(crew, name) for name in ("w0", "w1")] == [
        HealthState.HEALTHY,
        HealthState.UNKNOWN,
    ]
    report = await crew.monitor.check_now()

    assert {health.state for health in report.values()} == {HealthState.HEALTHY}
    assert [worker.checks for worker in crew.workers] == [1, 1, 1]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (False, "it returned False"),
        (ConnectionError("amqp://bob:hunter2@host"), "ConnectionError: amqp://bob:[redacted]@host"),
    ],
)
async def test_checks_that_fail_again_and_again_put_it_out_of_order(
    answer: Any, reason: str
) -> None:
    crew = Crew()
    crew.workers[0].is_well = answer

    await crew.monitor.check_now()
    assert state(crew) is HealthState.UNKNOWN
    await crew.monitor.check_now()

    health = crew.monitor.health("w0")
    assert health is not None
    assert health.state is HealthState.UNHEALTHY
    assert health.reason == f"2 health checks failed, the last one: {reason}"
    assert health.circuit is CircuitState.CLOSED
    assert told(crew) == [("EndpointUnhealthyEvent", "w0")]
    await crew.send(*range(10))
    assert crew.counts[0] == 0


async def test_a_check_that_hangs_has_failed() -> None:
    clock = VirtualClock()
    crew = Crew(clock=clock, monitor={"timeout": 1.0})
    crew.workers[0].is_well = None

    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(crew.monitor.check_now)
            await clock.advance(1)

    health = crew.monitor.health("w0")
    assert health is not None
    assert health.reason == "2 health checks failed, the last one: no result within 1 s"


async def test_a_check_that_passes_brings_it_back_and_that_is_told_once() -> None:
    clock = VirtualClock()
    crew = Crew(clock=clock)
    crew.workers[0].is_well = False
    for _ in range(5):
        await crew.monitor.check_now()

    await clock.advance(60)
    crew.workers[0].is_well = True
    for _ in range(5):
        await crew.monitor.check_now()

    assert told(crew) == [("EndpointUnhealthyEvent", "w0"), ("EndpointRecoveredEvent", "w0")]
    assert crew.events[1].down_for == 60
    assert state(crew) is HealthState.HEALTHY


async def test_failing_deliveries_are_noticed_at_once_whatever_the_checks_say() -> None:
    crew = Crew()
    crew.workers[0].error = ConnectionError("password=hunter2")

    await crew.send(*range(30))
    for _ in range(5):
        await crew.monitor.check_now()

    # The checks pass all the time; only a real delivery could prove them right.
    assert state(crew) is HealthState.UNHEALTHY
    assert told(crew) == [("EndpointUnhealthyEvent", "w0")]
    assert "its circuit is open" in crew.events[0].reason
    assert "hunter2" not in crew.events[0].reason


async def test_one_endpoint_has_one_breaker_and_one_try_at_a_time() -> None:
    clock = VirtualClock()
    crew = Crew(clock=clock)
    crew.workers[0].error = ConnectionError("gone")
    await crew.send(*range(30))
    await clock.advance(30)
    crew.workers[0].error = None
    crew.workers[0].is_hanging = True

    async with anyio.create_task_group() as tasks:
        for number in range(30):
            tasks.start_soon(crew.send, number)
        await let_others_run()
        assert crew.workers[0].endpoint.in_flight == 1
        assert state(crew) is HealthState.UNHEALTHY
        crew.workers[0].release.set()

    assert state(crew) is HealthState.HEALTHY


async def test_an_endpoint_that_takes_everything_and_finishes_nothing_is_found_out() -> None:
    clock = VirtualClock()
    crew = Crew(clock=clock, timeout=None, monitor={"stall_after": 10.0})
    crew.workers[0].is_hanging = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(crew.pool.deliver, "w0", EventEnvelope("stuck"))
        await clock.advance(9)
        await crew.monitor.check_now()
        assert state(crew) is HealthState.HEALTHY  # its check passes
        await clock.advance(1)
        await crew.monitor.check_now()  # and passes still, but nothing gets done

        health = crew.monitor.health("w0")
        assert health is not None
        assert health.reason == "no delivery finished for 10 s, 1 in flight"
        with pytest.raises(NoHealthyEndpointError):
            await crew.pool.deliver("w0", EventEnvelope("next"))
        crew.workers[0].release.set()

    assert state(crew) is HealthState.HEALTHY
    assert told(crew) == [("EndpointUnhealthyEvent", "w0"), ("EndpointRecoveredEvent", "w0")]


async def test_an_idle_endpoint_is_not_stalled() -> None:
    clock = VirtualClock()
    crew = Crew(clock=clock, monitor={"stall_after": 10.0})

    await crew.send(1)
    await clock.advance(1000)
    await crew.send(2, 3, 4)

    assert state(crew) is HealthState.HEALTHY
    assert crew.events == []


async def test_checks_run_by_the_clock_and_end_with_the_monitor() -> None:
    clock = VirtualClock()
    crew = Crew(clock=clock)
    late = Worker("late")

    async with crew.monitor:
        await clock.advance(12)
        assert crew.workers[0].checks == 3  # at 0, 5 and 10
        crew.endpoints.register(late.endpoint)
        crew.endpoints.unregister("w0")
        await clock.advance(5)
        assert late.checks == 1
    await clock.advance(60)

    assert late.checks == 1
    assert crew.workers[0].checks == 3


async def test_checks_are_spread_by_the_jitter() -> None:
    clock = VirtualClock()
    endpoints = EndpointRegistry()
    workers = [Worker(f"w{number}") for number in range(3)]
    for worker in workers:
        endpoints.register(worker.endpoint)
    shares = iter([0.0, 0.5, 1.0, 0.0, 0.5, 1.0])

    async with HealthMonitor(endpoints, jitter=0.2, clock=clock, chance=lambda: next(shares)):
        await clock.advance(0)
        assert [worker.checks for worker in workers] == [1, 0, 0]
        await clock.advance(0.5)
        assert [worker.checks for worker in workers] == [1, 1, 0]
        await clock.advance(0.5)
        assert [worker.checks for worker in workers] == [1, 1, 1]


async def test_a_slow_check_holds_up_no_other() -> None:
    clock = VirtualClock()
    crew = Crew(clock=clock)
    crew.workers[0].is_well = None

    async with crew.monitor:
        await clock.advance(0.5)
        assert [worker.checks for worker in crew.workers] == [1, 1, 1]


async def test_another_endpoint_of_the_same_id_begins_anew() -> None:
    crew = Crew()
    crew.workers[0].is_well = False
    await crew.monitor.check_now()
    await crew.monitor.check_now()

    crew.endpoints.unregister("w0")
    crew.endpoints.register(Worker("w0").endpoint)

    assert state(crew) is HealthState.UNKNOWN


async def test_endpoints_that_are_gone_are_forgotten() -> None:
    endpoints = EndpointRegistry()
    monitor = HealthMonitor(endpoints)

    for number in range(100):
        endpoints.register(Worker(str(number)).endpoint)
        await monitor.check_now()
        endpoints.unregister(str(number))

    assert len(vars(monitor)["_states"]) <= 2


async def test_a_bus_hears_of_endpoints_that_go_and_come_back() -> None:
    heard: list[str] = []
    async with MessageBus() as bus:

        @bus.on(EndpointUnhealthyEvent)
        async def gone(event: EndpointUnhealthyEvent) -> None:
            heard.append(f"{event.endpoint_id} gone")

        @bus.on(EndpointRecoveredEvent)
        async def back(event: EndpointRecoveredEvent) -> None:
            heard.append(f"{event.endpoint_id} back")

        worker = Worker("w0")
        endpoints = EndpointRegistry()
        endpoints.register(worker.endpoint)
        monitor = HealthMonitor(endpoints, on_event=bus.publish, failed_checks=1)
        for is_well in (False, True):
            worker.is_well = is_well
            await monitor.check_now()
            await bus.settled()

    assert heard == ["w0 gone", "w0 back"]


async def test_a_listener_that_fails_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: object) -> None:
        message = "password=hunter2"
        raise ValueError(message)

    worker = Worker("w0")
    worker.is_well = False
    endpoints = EndpointRegistry()
    endpoints.register(worker.endpoint)
    monitor = HealthMonitor(endpoints, on_event=broken, failed_checks=1)

    report = await monitor.check_now()

    assert report["w0"].state is HealthState.UNHEALTHY
    assert "hunter2" not in str(logged(caplog, "health_listener_failed"))
    assert len(logged(caplog, "health_listener_failed")) == 1


@pytest.mark.parametrize(
    "options", [{"interval": 0}, {"timeout": 0}, {"failed_checks": 0}, {"jitter": 2}]
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    make: Callable[..., HealthMonitor] = HealthMonitor

    with pytest.raises(ConfigurationError, match="HealthMonitor needs"):
        make(EndpointRegistry(), **options)
