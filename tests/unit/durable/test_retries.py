"""Which retries durable handlers and enqueued commands get: one policy, kept in the journal."""

from __future__ import annotations

from typing import Any

import pytest
import tenacity

from msgbus import ConfigurationError, Context, MessageBus
from msgbus.resilience import ResilientMessageBus, RetryConfig
from tests.durable_shop import DownError, Placed, dead_letters
from tests.fakes import logged
from tests.unit.durable.conftest import Site
from tests.unit.durable.packing import Pack, Worker

TWICE = RetryConfig(max_retries=1, initial_delay=0)
TENACITY = [
    RetryConfig(stop=tenacity.stop_after_delay(60)),
    RetryConfig(wait=tenacity.wait_random(1, 5)),
    RetryConfig(retry=tenacity.retry_if_exception_type(OSError)),
]


def resilient(site: Site, **options: Any) -> ResilientMessageBus:
    return ResilientMessageBus(breaker=None, journal=site.journal, clock=site.clock, **options)


class Failing:
    """A handler that always fails, and notes its attempts."""

    def __init__(self, error: type[Exception]) -> None:
        self.attempts: list[int] = []
        self._error = error

    async def __call__(self, event: Placed, context: Context) -> None:
        self.attempts.append(context.attempt)
        raise self._error("no")


async def attempts_of(bus: MessageBus, site: Site, error: type[Exception], **options: Any) -> int:
    """Publish an event whose handler always fails; return the attempts within a minute."""
    failing = Failing(error)
    bus.subscribe(Placed, failing, durable="failing", **options)
    known = len(await dead_letters(bus, "failing"))
    async with bus:
        await bus.publish(Placed())
        await site.clock.advance(60)
        count = len(failing.attempts)
        assert failing.attempts == list(range(1, count + 1))
        dead = (await dead_letters(bus, "failing"))[known:]
        assert [one.row.attempt for one in dead] in ([], [count])
        return count if dead else -count


@pytest.mark.parametrize("kind", ["plain", "resilient"])
async def test_by_default_an_outage_is_waited_for_and_a_bad_message_is_not(
    memory: Site, kind: str
) -> None:
    def bus() -> MessageBus:
        return memory.bus() if kind == "plain" else resilient(memory)

    assert await attempts_of(bus(), memory, ValueError) == 3
    waiting = await attempts_of(bus(), memory, DownError)
    assert -7 <= waiting <= -5  # of nine, and the next is minutes away


async def test_a_retry_that_is_given_is_used_as_it_is(memory: Site) -> None:
    assert await attempts_of(resilient(memory, retry=RetryConfig()), memory, ValueError) == 4
    assert await attempts_of(resilient(memory, retry=TWICE), memory, DownError) == 2


async def test_a_retry_of_the_handler_stands_above_that_of_the_bus(memory: Site) -> None:
    bus = resilient(memory, retry=RetryConfig())
    assert await attempts_of(bus, memory, DownError, retry=TWICE) == 2
    assert await attempts_of(memory.bus(), memory, DownError, retry=TWICE) == 2


async def test_without_a_policy_nothing_is_retried(memory: Site) -> None:
    assert await attempts_of(resilient(memory, retry=None), memory, DownError) == 1


async def test_a_policy_of_a_type_counts_for_its_durable_handlers(memory: Site) -> None:
    bus = resilient(memory)
    bus.policy(Placed, retry=TWICE)
    assert await attempts_of(bus, memory, DownError) == 2


@pytest.mark.parametrize("retry", TENACITY, ids=["stop", "wait", "retry"])
async def test_functions_cannot_be_stored_and_are_refused_at_the_start(
    memory: Site, retry: RetryConfig
) -> None:
    of_handler, of_bus = memory.bus(), resilient(memory, retry=retry)
    of_handler.subscribe(Placed, Failing(DownError), durable="failing", retry=retry)
    of_bus.subscribe(Placed, Failing(DownError), durable="failing")

    for bus in (of_handler, of_bus):
        with pytest.raises(ConfigurationError, match="does not have the function") as refused:
            await bus.start()
        assert str(refused.value).startswith("Subscription 'failing' cannot use RetryConfig(")
        assert not bus.is_running


async def test_functions_are_fine_for_handlers_in_memory(memory: Site) -> None:
    retry = RetryConfig(stop=tenacity.stop_after_attempt(2), initial_delay=0)
    bus, failing = resilient(memory, retry=retry), Failing(DownError)
    bus.subscribe(Placed, failing, durable=False)
    async with bus:
        await bus.publish(Placed())
        await bus.settled()

    assert failing.attempts == [1, 2]


async def test_a_command_whose_retries_cannot_be_stored_is_executed_but_not_enqueued(
    memory: Site, caplog: pytest.LogCaptureFixture
) -> None:
    retry, worker = RetryConfig(stop=tenacity.stop_after_attempt(2)), Worker()
    bus = resilient(memory, retry=retry)
    bus.register_command_handler(Pack, worker)
    async with memory.bus() as shop:
        ticket = await shop.enqueue(Pack(number=1))

    async with bus:
        assert await bus.call(Pack(number=2)) == 20
        with pytest.raises(ConfigurationError, match="'Worker', for enqueued commands, cannot use"):
            await bus.enqueue(Pack(number=3))
        await bus.settled()
        [entry] = logged(caplog, "command_queue_not_served")
        assert entry["message_type"] == "packing.Pack"

    fixed = resilient(memory)
    fixed.register_command_handler(Pack, worker)
    async with fixed:  # it was left alone
        assert await (await fixed.ticket(ticket.message_id)).result(timeout=30) == 10
    assert worker.attempts == [(2, 1), (1, 1)]
