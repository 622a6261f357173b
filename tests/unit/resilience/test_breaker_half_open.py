"""A half-open circuit: a few permits, none of which is ever lost for good."""

from __future__ import annotations

import anyio
import pytest

from msgbus import Refusal
from msgbus.resilience import CircuitOpenError, Permit
from tests.fakes import let_others_run
from tests.unit.resilience.flaky import CLOSED, HALF_OPEN, OPEN, Circuit, Down

# -- how many --------------------------------------------------------------------------------


@pytest.mark.parametrize("permits", [1, 3])
async def test_of_a_hundred_callers_only_as_many_as_configured_may_probe(permits: int) -> None:
    circuit = Circuit(failure_threshold=1, half_open_max=permits)
    await circuit.half_open()
    release = anyio.Event()
    tried, refused = [0], [0]

    async def probe() -> None:
        tried[0] += 1
        await release.wait()

    async def caller() -> None:
        try:
            await circuit.breaker.call(probe)
        except CircuitOpenError:
            refused[0] += 1

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(caller)
        await let_others_run()
        assert (tried[0], refused[0]) == (permits, 100 - permits)
        release.set()

    assert circuit.state is CLOSED


async def test_a_refused_caller_is_told_when_a_permit_expires_at_the_latest() -> None:
    circuit = Circuit(failure_threshold=1, permit_timeout=60, half_open_max=2)
    await circuit.half_open()
    circuit.breaker.acquire()
    await circuit.clock.advance(20)
    circuit.breaker.acquire()

    with pytest.raises(CircuitOpenError) as refused:
        circuit.breaker.acquire()

    assert refused.value.retry_after == 40.0
    assert circuit.breaker.retry_after == 40.0


async def test_so_many_successes_close_it() -> None:
    circuit = Circuit(failure_threshold=1, half_open_max=3)
    await circuit.half_open()

    circuit.succeed(2)
    assert circuit.state is HALF_OPEN
    circuit.succeed()

    assert circuit.state is CLOSED
    assert circuit.breaker.failures == 0


async def test_one_failure_opens_it_again_whatever_succeeded_before() -> None:
    circuit = Circuit(failure_threshold=5, half_open_max=3)
    await circuit.half_open()

    circuit.succeed(2)
    circuit.fail()

    assert circuit.state is OPEN


async def test_successes_of_an_earlier_half_open_time_do_not_add_up() -> None:
    circuit = Circuit(failure_threshold=1, half_open_max=2)
    await circuit.half_open()
    circuit.succeed()
    circuit.fail()
    await circuit.clock.advance(circuit.breaker.retry_after)

    circuit.succeed()

    assert circuit.state is HALF_OPEN


# -- given back ------------------------------------------------------------------------------


async def test_a_permit_is_given_back_even_if_the_call_says_nothing() -> None:
    circuit = Circuit(failure_threshold=1)
    await circuit.half_open()

    for _ in range(100):
        permit = circuit.breaker.acquire()
        assert circuit.refuses()
        permit.release()
        assert circuit.state is HALF_OPEN

    circuit.succeed()
    assert circuit.state is CLOSED


@pytest.mark.parametrize("error", [KeyError("of the message"), Refusal("no")])
async def test_an_error_that_does_not_count_is_an_answer_and_closes_it(error: Exception) -> None:
    circuit = Circuit(failure_threshold=1, ignore=(KeyError,))
    await circuit.half_open()

    circuit.breaker.acquire().failure(error)

    assert circuit.state is CLOSED


async def test_a_permit_is_given_back_when_the_call_is_cancelled_or_times_out() -> None:
    circuit = Circuit(failure_threshold=1)
    await circuit.half_open()

    for _ in range(10):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await circuit.breaker.call(anyio.sleep_forever)
        with circuit.clock.cancel_after(0):
            async with circuit.breaker:
                await anyio.sleep_forever()
        assert circuit.state is HALF_OPEN

    circuit.succeed()
    assert circuit.state is CLOSED


async def test_a_lost_permit_expires() -> None:
    circuit = Circuit(failure_threshold=1, permit_timeout=60)
    await circuit.half_open()
    lost = circuit.breaker.acquire()
    assert lost.expires == circuit.clock.now() + 60

    await circuit.clock.advance(59.9)
    assert circuit.refuses()
    await circuit.clock.advance(0.1)
    assert circuit.breaker.retry_after == 0.0
    circuit.succeed()

    assert circuit.state is CLOSED


async def test_a_permit_that_expired_long_ago_holds_nobody_up() -> None:
    circuit = Circuit(failure_threshold=1, permit_timeout=60)
    await circuit.half_open()
    circuit.breaker.acquire()

    await circuit.clock.advance(100)
    circuit.succeed()

    assert circuit.state is CLOSED


async def test_only_the_permits_that_expired_are_free_again() -> None:
    circuit = Circuit(failure_threshold=1, permit_timeout=60, half_open_max=2)
    await circuit.half_open()
    circuit.breaker.acquire()
    await circuit.clock.advance(30)
    circuit.breaker.acquire()
    await circuit.clock.advance(30)

    circuit.breaker.acquire()

    assert circuit.refuses()


async def test_an_expired_permit_that_ends_late_frees_no_other_permit() -> None:
    circuit = Circuit(failure_threshold=1, permit_timeout=60)
    await circuit.half_open()
    late = circuit.breaker.acquire()
    await circuit.clock.advance(60)
    circuit.breaker.acquire()

    late.release()

    assert circuit.refuses()


async def test_a_closed_circuit_has_permits_without_end() -> None:
    circuit = Circuit()

    permits = [circuit.breaker.acquire() for _ in range(1000)]

    assert {permit.expires for permit in permits} == {float("inf")}


# -- late results ----------------------------------------------------------------------------


async def test_a_call_from_before_the_circuit_opened_says_nothing_about_now() -> None:
    circuit = Circuit(failure_threshold=2)
    old = [circuit.breaker.acquire() for _ in range(6)]
    circuit.fail(2)
    old[0].success()
    old[1].failure(Down())
    assert circuit.state is OPEN
    assert circuit.breaker.retry_after == 30
    await circuit.clock.advance(30)
    probe = circuit.breaker.acquire()
    old[2].success()
    assert circuit.state is HALF_OPEN
    old[3].failure(Down())
    assert circuit.state is HALF_OPEN
    probe.success()
    assert circuit.state is CLOSED

    old[4].failure(Down())
    old[5].failure(Down())

    assert circuit.state is CLOSED
    assert circuit.breaker.failures == 0


async def test_a_probe_from_an_earlier_half_open_time_does_not_count() -> None:
    circuit = Circuit(failure_threshold=1, half_open_max=2)
    await circuit.half_open()
    old = circuit.breaker.acquire()
    circuit.fail()
    await circuit.clock.advance(circuit.breaker.retry_after)
    circuit.breaker.acquire()

    old.failure(Down())

    assert circuit.state is HALF_OPEN


# -- wait ------------------------------------------------------------------------------------


class Waiters:
    """Tasks that wait for a permit; each keeps it until told otherwise."""

    def __init__(self, circuit: Circuit) -> None:
        self.circuit = circuit
        self.permits: list[Permit] = []

    async def __call__(self) -> None:
        self.permits.append(await self.circuit.breaker.wait())


async def test_wait_gives_a_permit_at_once_if_there_is_one() -> None:
    circuit = Circuit()

    permit = await circuit.breaker.wait()

    assert permit.breaker is circuit.breaker


async def test_wait_lasts_until_the_circuit_lets_a_probe_through() -> None:
    circuit = Circuit(failure_threshold=1, recovery_time=30)
    waiters = Waiters(circuit)
    circuit.fail()

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(waiters)
        await circuit.clock.advance(29)
        assert waiters.permits == []
        await circuit.clock.advance(1)
        assert len(waiters.permits) == 1
        assert circuit.state is HALF_OPEN
        waiters.permits[0].success()

    assert len(waiters.permits) == 5


async def test_a_permit_that_is_given_back_goes_to_one_who_waits() -> None:
    circuit = Circuit(failure_threshold=1)
    waiters = Waiters(circuit)
    await circuit.half_open()
    holder = circuit.breaker.acquire()

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(waiters)
        await let_others_run()
        holder.release()
        for number in range(3):
            await let_others_run()
            assert len(waiters.permits) == number + 1
            waiters.permits[-1].release()


async def test_a_lost_permit_goes_to_a_caller_that_waits() -> None:
    circuit = Circuit(failure_threshold=1, permit_timeout=60)
    waiters = Waiters(circuit)
    await circuit.half_open()
    circuit.breaker.acquire()

    async with anyio.create_task_group() as group:
        group.start_soon(waiters)
        await circuit.clock.advance(59)
        assert waiters.permits == []
        await circuit.clock.advance(1)

    assert len(waiters.permits) == 1


async def test_who_waits_on_a_forced_circuit_waits_for_reset() -> None:
    circuit = Circuit()
    waiters = Waiters(circuit)
    circuit.breaker.force_open()

    async with anyio.create_task_group() as group:
        group.start_soon(waiters)
        await circuit.clock.advance(1_000_000)
        assert waiters.permits == []
        circuit.breaker.reset()

    assert len(waiters.permits) == 1


async def test_a_wait_that_is_cancelled_leaves_nothing_behind() -> None:
    circuit = Circuit(failure_threshold=1)
    await circuit.half_open()
    holder = circuit.breaker.acquire()

    with anyio.CancelScope() as scope:
        scope.cancel()
        await circuit.breaker.wait()
    holder.success()

    assert circuit.state is CLOSED


async def test_who_waits_is_not_let_in_when_the_circuit_opens_anew() -> None:
    circuit = Circuit(failure_threshold=1, recovery_time=30)
    waiters = Waiters(circuit)
    await circuit.half_open()
    holder = circuit.breaker.acquire()

    async with anyio.create_task_group() as group:
        group.start_soon(waiters)
        await let_others_run()
        holder.failure(Down())
        await circuit.clock.advance(59)
        assert waiters.permits == []
        await circuit.clock.advance(1)

    assert len(waiters.permits) == 1
