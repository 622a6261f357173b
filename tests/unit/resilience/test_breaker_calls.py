"""Calls through a circuit breaker: `call` and `async with`."""

from __future__ import annotations

import anyio
import pytest

from msgbus import Command, MessageBus, Refusal
from msgbus.resilience import CircuitBreaker, CircuitOpenError
from tests.unit.resilience.flaky import CLOSED, OPEN, Charge, Circuit, Down, Flaky


class OutOfStock(Refusal):
    pass


async def down() -> None:
    raise Down


async def fine() -> str:
    return "fine"


async def inside(breaker: CircuitBreaker, error: Exception) -> None:
    async with breaker as entered:
        assert entered is breaker
        raise error


async def test_call_gives_the_value_and_passes_the_error_on() -> None:
    circuit = Circuit(failure_threshold=2)

    assert await circuit.breaker.call(fine) == "fine"
    for _ in range(2):
        with pytest.raises(Down):
            await circuit.breaker.call(down)

    assert circuit.state is OPEN


async def test_an_open_circuit_calls_nothing() -> None:
    circuit = Circuit(failure_threshold=1)
    circuit.fail()
    calls: list[int] = []

    async def note(number: int) -> None:
        calls.append(number)

    with pytest.raises(CircuitOpenError):
        await circuit.breaker.call(note, 1)
    with pytest.raises(CircuitOpenError):
        async with circuit.breaker:
            calls.append(2)

    assert calls == []


async def test_a_failed_result_is_a_failure_though_nothing_was_raised() -> None:
    # A breaker around a bus that turns exceptions into results must open all the same.
    circuit = Circuit(failure_threshold=3)
    bus = MessageBus()

    @bus.handles(Charge)
    async def charge(command: Charge) -> str:
        raise Down

    for _ in range(3):
        result = await circuit.breaker.call(bus.execute, Charge())
        assert not result.success

    assert circuit.state is OPEN
    with pytest.raises(CircuitOpenError):
        await circuit.breaker.call(bus.execute, Charge())


async def test_a_result_that_failed_with_a_refusal_is_no_failure() -> None:
    circuit = Circuit(failure_threshold=1)
    bus = MessageBus()

    class Reserve(Command[None]):
        pass

    @bus.handles(Reserve)
    async def reserve(command: Reserve) -> None:
        raise OutOfStock

    result = await circuit.breaker.call(bus.execute, Reserve())

    assert not result.success
    assert circuit.state is CLOSED
    assert circuit.breaker.failures == 0


async def test_a_successful_result_is_a_success() -> None:
    circuit = Circuit(failure_threshold=2)
    bus = MessageBus()
    bus.register_command_handler(Charge, Flaky())
    circuit.fail()

    result = await circuit.breaker.call(bus.execute, Charge())

    assert result.value == "done"
    assert circuit.breaker.failures == 0


async def test_async_with_counts_as_call_does() -> None:
    circuit = Circuit(failure_threshold=2, ignore=(KeyError,))

    for error in (KeyError("k"), Down()):
        with pytest.raises(type(error)):
            await inside(circuit.breaker, error)
    assert circuit.breaker.failures == 1
    async with circuit.breaker:
        pass

    assert circuit.breaker.failures == 0


async def test_circuits_nest_and_tasks_do_not_mix_their_permits() -> None:
    outer, inner = Circuit(failure_threshold=1), Circuit(failure_threshold=9)
    entered = anyio.Event()

    async def other() -> None:
        entered.set()
        with pytest.raises(Down):
            await inside(inner.breaker, Down())

    async with anyio.create_task_group() as group, outer.breaker, inner.breaker:
        group.start_soon(other)
        await entered.wait()
        with pytest.raises(Down):
            async with inner.breaker, inner.breaker:
                raise Down

    # The inner ones failed, the outermost success of the row came last.
    assert inner.breaker.failures == 0
    assert outer.state is CLOSED
    assert outer.breaker.failures == 0


async def test_left_in_another_task_than_entered_hides_no_error() -> None:
    circuit = Circuit(failure_threshold=1)

    async def enter() -> None:
        await circuit.breaker.__aenter__()

    async with anyio.create_task_group() as group:
        group.start_soon(enter)

    await circuit.breaker.__aexit__(Down, Down(), None)
    assert circuit.state is CLOSED


async def test_a_cancelled_call_says_nothing() -> None:
    circuit = Circuit(failure_threshold=1)

    for entered in ("call", "with"):
        with anyio.CancelScope() as scope:
            scope.cancel()
            if entered == "call":
                await circuit.breaker.call(anyio.sleep_forever)
            else:
                async with circuit.breaker:
                    await anyio.sleep_forever()

    assert circuit.breaker.failures == 0
    assert circuit.state is CLOSED
