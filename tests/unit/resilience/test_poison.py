"""A bad message is not an outage: what counts against a circuit, and how long others wait."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

import pytest

from msgbus import Command, Event, Refusal
from msgbus.resilience import (
    MESSAGE_ERRORS,
    CircuitBreaker,
    CircuitBreakerConfig,
    CircuitOpenError,
    ResilientMessageBus,
)
from msgbus.runtime.clock import VirtualClock
from tests.unit.resilience.flaky import CLOSED, HALF_OPEN, OPEN, Circuit, Down, Shop, quick

RECOVERY = CircuitBreakerConfig().recovery_time


class Placed(Event):
    number: int


class Declined(Refusal):
    pass


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


def is_4xx(error: Exception) -> bool:
    return isinstance(error, HttpError) and 400 <= error.status < 500


async def seconds_until_healthy_are_handled(
    error: Callable[[], Exception], bad: set[int], count: int = 10
) -> float:
    """How long a bus with defaults takes to handle all good events of `count`."""
    clock = VirtualClock()
    bus = ResilientMessageBus(clock=clock)
    began = clock.now()
    handled: dict[int, float] = {}

    @bus.on(Placed)
    async def ship(event: Placed) -> None:
        if event.number in bad:
            raise error()
        handled[event.number] = clock.now() - began

    async with bus:
        for number in range(count):
            await bus.publish(Placed(number=number))
        for _ in range(3_600):
            await clock.advance(1)
            if len(handled) == count - len(bad):
                break
        await bus.settled()
    assert sorted(handled) == [number for number in range(count) if number not in bad]
    return max(handled.values())


# -- 1. poison is not an outage ----------------------------------------------------------------


@pytest.mark.parametrize("poison", [2, 3, 4])
async def test_healthy_events_wait_for_the_retries_of_bad_ones_and_no_longer(poison: int) -> None:
    """Point 1: a ValueError does not count against the circuit."""
    waited = await seconds_until_healthy_are_handled(
        lambda: ValueError("bad address"), set(range(poison))
    )

    assert waited < poison * 2  # pauses of 0.1, 0.2 and 0.4 s, give or take half


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError])
@pytest.mark.parametrize("bad", [{0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {1, 3, 5, 7}, {0, 1, 2, 3, 4}])
async def test_bad_events_delay_healthy_ones_by_one_recovery_time_each_at_most(
    error: type[Exception], bad: set[int]
) -> None:
    """Point 1: with any exception, and not exponentially."""
    waited = await seconds_until_healthy_are_handled(lambda: error("down"), bad)

    assert waited <= len(bad) * RECOVERY + 2


@pytest.mark.parametrize("error", MESSAGE_ERRORS)
def test_errors_of_the_message_or_the_code_do_not_open_a_circuit(error: type[Exception]) -> None:
    """Point 1: subclasses included."""
    circuit = Circuit(failure_threshold=1)
    below = type("Below", (error,), {})

    for one in (error, below):
        circuit.breaker.acquire().failure(one("of the message"))

    assert circuit.state is CLOSED


def test_everything_counts_if_nothing_is_ignored() -> None:
    """Point 1: `ignore=()`."""
    circuit = Circuit(failure_threshold=1, ignore=())

    circuit.breaker.acquire().failure(ValueError("x"))

    assert circuit.state is OPEN


def test_an_error_of_the_system_counts_even_where_it_is_a_value_error() -> None:
    """Point 1: a certificate that cannot be verified is an outage."""
    assert issubclass(ssl.SSLCertVerificationError, ValueError)
    circuit = Circuit(failure_threshold=1)

    circuit.breaker.acquire().failure(ssl.SSLCertVerificationError("expired"))

    assert circuit.state is OPEN


@pytest.mark.parametrize("ignored", [FileNotFoundError, OSError, Exception])
def test_an_error_of_the_system_that_is_named_does_not_count(ignored: type[Exception]) -> None:
    circuit = Circuit(failure_threshold=1, ignore=(ignored,))

    circuit.breaker.acquire().failure(FileNotFoundError("x"))

    assert circuit.state is CLOSED


class Pay(Command[str]):
    card: str = ""


async def test_two_bad_inputs_of_a_command_close_it_to_nobody() -> None:
    """Point 1: they are retried, and fail for themselves."""
    clock = VirtualClock()
    bus = ResilientMessageBus(clock=clock, retry=None)

    @bus.handles(Pay)
    async def pay(command: Pay) -> str:
        return {"visa": "paid"}[command.card]

    async with bus:
        for _ in range(20):
            assert isinstance((await bus.execute(Pay(card="?"))).exception, KeyError)
        assert (await bus.call(Pay(card="visa"))) == "paid"


async def test_an_outage_opens_the_circuit_and_few_messages_die_in_it() -> None:
    """Point 1: an outage of ten minutes, 200 events behind it."""
    clock = VirtualClock()
    bus = ResilientMessageBus(clock=clock)
    is_down = [True]
    handled: list[int] = []

    @bus.on(Placed)
    async def ship(event: Placed) -> None:
        if is_down[0]:
            raise ConnectionError("refused")
        handled.append(event.number)

    async with bus:
        for number in range(200):
            await bus.publish(Placed(number=number))
        await clock.advance(600)
        assert not bus.circuits["ship"].is_closed
        is_down[0] = False
        await clock.advance(300)
        await bus.settled()
        died = await bus.dead_letters.count()

    assert len(handled) + died == 200
    assert handled == sorted(handled)
    assert died <= 12
    # The cause, not the circuit.
    assert {letter.error_type for letter in await bus.dead_letters.find()} == {"ConnectionError"}


# -- 1. an answer is a sign of life -------------------------------------------------------------


async def test_a_service_that_declines_every_card_is_up() -> None:
    """Point 1: a refusal closes a circuit that is half open."""
    shop = Shop(retry=None, breaker=CircuitBreakerConfig(failure_threshold=2, jitter=0))
    shop.handler.errors = [Down(), Down(), *(Declined("no") for _ in range(10))]
    for _ in range(2):
        await shop.charge()
    assert shop.bus.circuits["charge"].state is OPEN
    await shop.clock.advance(30)

    answers = [await shop.charge() for _ in range(10)]

    assert {type(one.exception) for one in answers} == {Declined}
    assert shop.bus.circuits["charge"].state is CLOSED


async def test_blips_among_refusals_are_not_in_a_row() -> None:
    """Point 1: in a closed circuit an answer ends a run of failures."""
    shop = Shop(retry=None, breaker=CircuitBreakerConfig(failure_threshold=3))
    refusals: list[BaseException] = [Declined("no") for _ in range(150)]
    for place in (20, 70, 120):
        refusals[place] = Down()
    shop.handler.errors = refusals

    for _ in range(150):
        await shop.charge()

    assert shop.bus.circuits["charge"].state is CLOSED


@pytest.mark.parametrize("slow_call", [None, 9.0])
def test_a_function_says_which_errors_are_answers(slow_call: float | None) -> None:
    """Point 1: `ignore=` takes predicates, such as one for HTTP 4xx."""
    ignore = (*MESSAGE_ERRORS, is_4xx)
    circuit = Circuit(failure_threshold=2, ignore=ignore, slow_call=slow_call)

    for status in (404, 503, 404, 503, 404):
        circuit.breaker.acquire().failure(HttpError(status))
    assert circuit.state is CLOSED
    for status in (503, 503):
        circuit.breaker.acquire().failure(HttpError(status))

    assert circuit.state is OPEN


def test_an_error_counts_if_the_function_fails(caplog: pytest.LogCaptureFixture) -> None:
    def broken(error: Exception) -> bool:
        raise RuntimeError("password=hunter2")

    circuit = Circuit(failure_threshold=1, ignore=(broken,))

    circuit.breaker.acquire().failure(ValueError("x"))

    assert circuit.state is OPEN
    assert "circuit_predicate_failed" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("wrong", [int, "ValueError", 404, KeyboardInterrupt])
def test_what_cannot_be_ignored_is_refused_with_what_can(wrong: Any) -> None:
    with pytest.raises(ValueError, match="a tuple of exception types, and of functions"):
        CircuitBreakerConfig(ignore=(wrong,))


# -- 1. one message as probe --------------------------------------------------------------------


def test_the_open_time_does_not_grow_while_one_message_is_the_probe() -> None:
    """Point 1: nor by a few different ones."""
    circuit = Circuit(failure_threshold=2, recovery_time=10)
    circuit.fail(2)
    waits: list[float] = []
    for message in ("a", "a", "b", "b", "c", "d"):
        waits.append(circuit.breaker.retry_after)
        circuit.clock._now += circuit.breaker.retry_after  # pyright: ignore[reportPrivateUsage]
        circuit.breaker.acquire(message).failure(Down())

    assert waits == [10, 10, 10, 10, 10, 20]
    assert circuit.breaker.retry_after == 40


async def test_a_message_that_failed_as_probe_goes_on_while_others_wait() -> None:
    """Point 1: so that its retries cost nobody another recovery time."""
    circuit = Circuit(failure_threshold=1, recovery_time=10)
    await circuit.half_open()
    circuit.breaker.acquire("a").failure(Down())

    circuit.breaker.acquire("a").failure(Down())
    assert circuit.breaker.retry_after == 10
    for other in ("b", None):
        with pytest.raises(CircuitOpenError):
            circuit.breaker.acquire(other)
    circuit.breaker.acquire("a").success()

    assert circuit.state is CLOSED


async def test_a_circuit_that_was_opened_by_hand_lets_no_probe_through() -> None:
    circuit = Circuit(failure_threshold=1)
    await circuit.half_open()
    circuit.breaker.acquire("a").failure(Down())
    circuit.breaker.force_open()

    with pytest.raises(CircuitOpenError):
        circuit.breaker.acquire("a")


# -- 1. the breaker alone -----------------------------------------------------------------------


async def test_an_open_circuit_remembers_how_many_failures_opened_it() -> None:
    """Point 1: `breaker.failures`."""
    circuit = Circuit(failure_threshold=3)
    circuit.fail(3)
    assert (circuit.state, circuit.breaker.failures) == (OPEN, 3)

    await circuit.clock.advance(circuit.breaker.retry_after)
    assert (circuit.state, circuit.breaker.failures) == (HALF_OPEN, 3)
    circuit.succeed()

    assert circuit.breaker.failures == 0


def fails(*, times: int = 1) -> int:
    raise Down(f"{times} times")


async def test_functions_are_called_with_keywords_sync_and_async() -> None:
    """Point 1: `breaker.call(f, *args, **kwargs)`."""
    breaker = CircuitBreaker(CircuitBreakerConfig(failure_threshold=2))

    def add(one: int, *, two: int) -> int:
        return one + two

    async def add_later(one: int, *, two: int) -> int:
        return one + two

    assert breaker.call(add, 1, two=2) == 3
    assert await breaker.call(add_later, 1, two=2) == 3
    assert await breaker.call(lambda: add_later(1, two=2)) == 3
    for _ in range(2):
        with pytest.raises(Down):
            breaker.call(fails, times=2)
    with pytest.raises(CircuitOpenError):
        breaker.call(add, 1, two=2)
    with pytest.raises(CircuitOpenError):
        await breaker.call(add_later, 1, two=2)


async def test_a_breaker_decorates_functions_sync_and_async() -> None:
    """Point 1: `@breaker`."""
    breaker = CircuitBreaker(CircuitBreakerConfig(failure_threshold=2))

    @breaker
    async def charge(card: str) -> str:
        """Charge a card."""
        if not card:
            raise Down
        return card

    @breaker
    def refund(card: str) -> str:
        if not card:
            raise Down
        return card

    assert (await charge("visa"), refund("visa")) == ("visa", "visa")
    assert (charge.__name__, charge.__doc__) == ("charge", "Charge a card.")
    with pytest.raises(Down):
        await charge("")
    with pytest.raises(Down):
        refund("")
    with pytest.raises(CircuitOpenError):
        await charge("visa")
    with pytest.raises(CircuitOpenError):
        refund("visa")


def test_a_breaker_stands_around_code_that_does_not_wait() -> None:
    """Point 1: `with breaker:`."""
    breaker = CircuitBreaker(CircuitBreakerConfig(failure_threshold=2))

    for _ in range(2):
        with pytest.raises(Down), breaker:
            raise Down

    with pytest.raises(CircuitOpenError), breaker:
        pytest.fail("it is open")


# -- 5. a diagnosis is kept ---------------------------------------------------------------------


async def test_a_retry_that_meets_the_circuit_its_own_failure_opened_keeps_its_cause() -> None:
    """Point 5: in the result and in the letter; attempts are calls that happened."""
    shop = Shop(retry=quick(9), breaker=CircuitBreakerConfig(failure_threshold=2, jitter=0))
    cause = KeyError("root")
    error = Down("no 1")
    error.__cause__ = cause
    shop.handler.errors = [Down("no 0"), error]

    result = await shop.charge(1 + 2)

    assert result.exception is error
    assert error.__cause__ is cause
    assert result.attempts == 2
    (letter,) = await shop.bus.dead_letters.find()
    assert (letter.error, letter.attempts, letter.reason) == ("Down: no 1", 2, "circuit open")
