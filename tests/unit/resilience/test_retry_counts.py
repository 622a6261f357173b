"""Retries are counted, in the stats and for Prometheus."""

from __future__ import annotations

from msgbus import MessageBus
from msgbus.resilience import CircuitBreakerConfig, ResilientMessageBus
from msgbus.telemetry.prometheus import expose
from tests.fakes import OrderPlaced, conserves
from tests.unit.resilience.flaky import Charge, Down, Flaky, Paid, Shop, fails_with, quick


async def test_retries_of_a_command_are_counted() -> None:
    """Point g: tries after the first."""
    shop = Shop(Flaky(2))

    async with shop.bus:
        assert (await shop.charge(3)).success
        assert (await shop.charge()).success

    stats = shop.bus.stats().commands["charge"]
    assert (stats.sent, stats.handled, stats.failed, stats.retried) == (2, 2, 0, 2)
    assert shop.bus.stats().as_dict()["commands"]["charge"]["retried"] == 2
    labels = 'bus="msgbus",handler="charge",message_type="Charge"'
    assert f"msgbus_commands_retried_total{{{labels}}} 2.0" in expose(shop.bus)


async def test_retries_of_an_event_are_counted() -> None:
    """Point g: in pairs of event and handler."""
    shop = Shop()
    shop.bus.subscribe(Paid, Flaky(9), name="broken")
    shop.bus.subscribe(Paid, Flaky(), name="fine")

    async with shop.bus:
        await shop.bus.publish(Paid())
        await shop.clock.advance(7)
        await shop.bus.settled()

    stats = shop.bus.stats().handlers
    assert (stats["broken"].failed, stats["broken"].retried) == (1, 3)
    assert stats["fine"].retried == 0
    labels = 'bus="msgbus",handler="broken",message_type="Paid"'
    assert f"msgbus_events_retried_total{{{labels}}} 3.0" in expose(shop.bus)
    conserves(shop.bus)


async def test_each_event_of_a_list_that_is_retried_counts() -> None:
    """Point g: the list once more as a whole, then its events one by one."""
    bus = MessageBus()

    async def fail_on_two(events: list[OrderPlaced]) -> None:
        if any(event.number == 2 for event in events):
            raise Down

    bus.subscribe(OrderPlaced, fail_on_two, batch=True)
    for number in range(3):
        await bus.publish(OrderPlaced(number=number))
    async with bus:
        await bus.settled()

    (stats,) = bus.stats().handlers.values()
    assert (stats.handled, stats.failed, stats.retried) == (2, 1, 6)


async def test_lists_are_counted_when_a_policy_retries_them() -> None:
    """Point g: as many as there are events in them."""
    shop = Shop(retry=quick(1))
    calls: list[int] = []

    async def once(events: list[Paid]) -> None:
        calls.append(len(events))
        if len(calls) == 1:
            raise Down

    shop.bus.subscribe(Paid, once, batch=True, name="once")
    for _ in range(4):
        await shop.bus.publish(Paid())
    async with shop.bus:
        await shop.clock.advance(1)
        await shop.bus.settled()

    assert calls == [4, 4]
    assert shop.bus.stats().handlers["once"].retried == 4


async def test_a_retry_that_an_open_circuit_prevents_is_none() -> None:
    """Point g: only calls that were made count."""
    handler = Flaky(9)
    breaker = CircuitBreakerConfig(failure_threshold=2, recovery_time=50, jitter=0)
    shop = Shop(handler, breaker=breaker)

    async with shop.bus:
        fails_with(await shop.charge(10), Down)

    assert len(handler.calls) == 2
    assert shop.bus.stats().commands["charge"].retried == 1


async def test_attempts_of_enqueued_commands_are_counted() -> None:
    """Point g: those that follow out of the journal, too."""
    retry = quick(initial_delay=0.001, max_delay=0.001)
    bus = ResilientMessageBus(retry=retry, journal="memory:")
    bus.register_command_handler(Charge, Flaky(2), name="charge")

    async with bus:
        ticket = await bus.enqueue(Charge())
        assert await ticket.result(timeout=20) == "done"

        assert bus.stats().commands["charge"].retried == 2
