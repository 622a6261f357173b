"""Which policy a handler has, and which circuit."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from msgbus import CircuitOpenedEvent, ConfigurationError, Event
from msgbus.errors import BusStateError
from msgbus.resilience import (
    CircuitBreaker,
    CircuitBreakerConfig,
    CircuitChange,
    Policy,
    RateLimit,
    ResilientMessageBus,
    RetryConfig,
)
from msgbus.runtime.clock import VirtualClock
from tests.unit.resilience.flaky import OPEN, Charge, Down, Flaky, Shop, fails_with, quick


class OrderEvent(Event):
    pass


class OrderPlaced(OrderEvent):
    pass


async def handle(event: OrderEvent) -> None:
    pass


async def other(event: OrderEvent) -> None:
    pass


def bus_of(**options: Any) -> ResilientMessageBus:
    return ResilientMessageBus(clock=VirtualClock(), **options)


# -- whose word counts -----------------------------------------------------------------------


async def test_a_policy_of_a_type_changes_only_what_it_names() -> None:
    shop = Shop(Flaky(9), retry=quick(3), timeout=5)
    shop.bus.policy(Charge, retry=quick(1))

    result = await shop.charge(1)

    assert result.attempts == 2
    assert "5 s per attempt" in shop.bus.describe(Charge)


def test_a_subclass_inherits_and_may_say_otherwise() -> None:
    bus = bus_of()
    bus.policy(OrderEvent, timeout=1, bulkhead=2)
    bus.policy(OrderPlaced, timeout=3)
    bus.subscribe(OrderEvent, handle)
    bus.subscribe(OrderPlaced, other)

    orders, placed = bus.describe(OrderEvent), bus.describe(OrderPlaced)

    assert "1 s per attempt" in orders
    assert "3 s per attempt" in placed.split("in other")[1]
    assert placed.count("2 at once") == 2


def test_a_handlers_policy_comes_before_that_of_its_type() -> None:
    bus = bus_of()
    bus.policy(handle, timeout=7)
    bus.policy(OrderEvent, timeout=1, bulkhead=2)
    bus.subscribe(OrderEvent, handle)
    bus.subscribe(OrderPlaced, other)

    assert "7 s per attempt" in bus.describe(OrderEvent)
    assert "2 at once" in bus.describe(OrderEvent)
    assert "1 s per attempt" in bus.describe(OrderPlaced).split("in other")[1]


def test_a_handler_is_known_by_its_name_too() -> None:
    bus = bus_of()
    bus.policy("mailer", timeout=7)
    bus.subscribe(OrderEvent, handle, name="mailer")

    assert "7 s per attempt" in bus.describe(OrderEvent)


def test_a_function_is_found_though_it_was_registered_by_a_name() -> None:
    bus = bus_of()
    bus.policy(handle, timeout=7)
    bus.subscribe(OrderEvent, handle, name="mailer")

    assert "7 s per attempt" in bus.describe(OrderEvent)


def test_of_two_functions_that_are_called_alike_only_the_one_is_meant() -> None:
    def make() -> Any:
        async def twin(event: OrderEvent) -> None:
            pass

        return twin

    first, second = make(), make()
    bus = bus_of()
    bus.policy(first, timeout=7)
    bus.subscribe(OrderEvent, first)
    bus.subscribe(OrderPlaced, second)

    assert "7 s per attempt" in bus.describe(OrderEvent)
    assert bus.describe(OrderPlaced).count("7 s per attempt") == 1


def test_what_is_said_later_adds_to_what_was_said() -> None:
    bus = bus_of()
    bus.policy(OrderEvent, timeout=7)
    bus.policy(OrderEvent, bulkhead=2)
    bus.policy(handle, timeout=8)
    bus.policy(handle, rate_limit=4)
    bus.subscribe(OrderEvent, handle)

    text = bus.describe(OrderEvent)

    assert all(part in text for part in ("8 s per attempt", "2 at once", "4 per second"))


def test_none_leaves_a_part_out() -> None:
    bus = bus_of(timeout=5)
    bus.policy(OrderEvent, retry=None, breaker=None, timeout=None)
    bus.subscribe(OrderEvent, handle)

    assert bus.describe(OrderEvent) == (
        "OrderEvent in handle:\n"
        "  fallback     none\n"
        "  retry        none\n"
        "  breaker      none\n"
        "  bulkhead     none\n"
        "  rate limit   none\n"
        "  timeout      none\n"
        "  dead letters kept"
    )


async def test_a_policy_set_for_a_handler_that_ran_before_the_start_holds() -> None:
    shop = Shop(Flaky(99), retry=quick(1))
    assert (await shop.charge(1)).attempts == 2

    shop.bus.policy(Charge, retry=None)

    assert (await shop.charge()).attempts == 1


async def test_a_policy_reaches_a_session_that_is_open_before_the_start() -> None:
    shop = Shop(retry=quick(1))
    own = Flaky(99)
    async with shop.bus.session() as session:
        session.register_command_handler(Charge, own)
        fails_with(await session.execute(Charge(), timeout=0.5), Down)
        assert len(own.calls) == 1
        shop.bus.policy(Charge, retry=quick(2, initial_delay=0))

        fails_with(await session.execute(Charge()), Down)

    assert len(own.calls) == 4


# -- what cannot be ---------------------------------------------------------------------------


async def test_a_policy_after_the_start_is_refused() -> None:
    bus = bus_of()

    async with bus:
        with pytest.raises(BusStateError, match="before the bus is started"):
            bus.policy(OrderEvent, timeout=1)


def test_a_part_that_does_not_exist_is_refused() -> None:
    options: dict[str, Any] = {"retries": 3}

    with pytest.raises(ConfigurationError, match=r"bus.policy has no retries\. The parts"):
        bus_of().policy(OrderEvent, **options)
    with pytest.raises(ConfigurationError, match="was given nothing to change"):
        bus_of().policy(OrderEvent)


@pytest.mark.parametrize("part", ["timeout", "bulkhead"])
def test_an_impossible_value_is_refused_at_once(part: str) -> None:
    options: dict[str, Any] = {part: 0}

    with pytest.raises(ConfigurationError, match=f"{part} must be above 0, not 0"):
        bus_of().policy(OrderEvent, **options)
    with pytest.raises(ConfigurationError, match=part):
        bus_of(**options)
    with pytest.raises(ConfigurationError, match=part):
        Policy(**options)


# -- describe --------------------------------------------------------------------------------


def fall_back(message: object, error: Exception) -> None:
    pass


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"fallback": "later"}, "fallback     the value 'later'"),
        ({"fallback": fall_back}, "fallback     call fall_back"),
        ({"retry": RetryConfig(max_retries=0)}, "retry        none"),
        (
            {"retry": quick(2, give_up_on=(KeyError,))},
            "retry        2 times, after 1 s, then 2 times longer each time, at most 100 s; "
            "on Exception, not on KeyError",
        ),
        (
            {"retry": RetryConfig(stop=lambda s: True, wait=lambda s: 1, retry=lambda s: True)},
            "retry        as decided by stop=, after delays by wait=; if retry= allows it",
        ),
        (
            {"breaker": CircuitBreakerConfig()},
            "breaker      circuit 'handle' opens after 5 failures in a row, for 30 s at first",
        ),
        (
            {"breaker": CircuitBreakerConfig(window=60)},
            "breaker      circuit 'handle' opens after 5 failures within 60 s, for 30 s at first",
        ),
        (
            {"breaker": CircuitBreakerConfig(failure_rate=0.5)},
            "breaker      circuit 'handle' opens after 50% failures, of 10 calls or more among "
            "the last 100 calls, for 30 s at first",
        ),
        ({"breaker": "payments"}, "breaker      circuit 'payments', shared"),
        (
            {"breaker": CircuitBreaker(name="bank")},
            "breaker      circuit 'bank' opens after 5 failures in a row, for 30 s at first",
        ),
        ({"rate_limit": RateLimit(per_second=2, burst=9)}, "rate limit   2 per second, 9 at once"),
    ],
)
def test_describe_says_each_part(options: dict[str, Any], line: str) -> None:
    bus = bus_of(**options)
    bus.subscribe(OrderEvent, handle)

    assert f"  {line}" in bus.describe(OrderEvent).splitlines()


def test_describe_says_if_there_is_nothing() -> None:
    assert bus_of().describe(OrderEvent) == "OrderEvent has no handler on this bus."


def test_dead_letters_may_be_left_out() -> None:
    bus = bus_of()
    bus.subscribe(OrderEvent, handle)
    bus.policy(OrderEvent, dead_letters=False)

    assert "dead letters not kept" in bus.describe(OrderEvent)


# -- circuits --------------------------------------------------------------------------------


async def test_handlers_that_name_a_circuit_share_it() -> None:
    shop = Shop(Flaky(9), retry=None)
    shop.bus.circuit("bank", CircuitBreakerConfig(failure_threshold=2))
    shop.bus.policy(Charge, breaker="bank")
    shop.bus.policy(OrderEvent, breaker="bank")
    shop.bus.subscribe(OrderEvent, handle)

    await shop.charge()
    await shop.charge()

    assert shop.bus.circuits["bank"].state is OPEN
    assert list(shop.bus.circuits) == ["bank"]
    assert "circuit 'bank'" in shop.bus.describe(OrderEvent)


async def test_a_circuit_of_ones_own_can_be_shared_with_code_outside_of_the_bus() -> None:
    changes: list[CircuitChange] = []
    config = CircuitBreakerConfig(failure_threshold=2)
    clock = VirtualClock()
    bank = CircuitBreaker(config, name="bank", on_change=changes.append, clock=clock)
    shop = Shop(Flaky(9), retry=None, breaker=bank)
    heard: list[str] = []

    @shop.bus.on(CircuitOpenedEvent)
    async def opened(event: CircuitOpenedEvent) -> None:
        heard.append(event.circuit)

    async with shop.bus:
        await shop.charge()
        bank.acquire().failure(Down())
        await shop.bus.settled()

    # The bus tells of it, and so does the owner's own hook. Who hears of it on the bus does
    # not wait for the circuit that all handlers share.
    assert heard == ["bank"]
    assert [change.new for change in changes] == [OPEN]
    assert shop.bus.stats().circuits == {"bank": "open"}


def test_two_circuits_of_one_name_are_refused() -> None:
    bus = bus_of(breaker=CircuitBreaker(name="bank"))

    with pytest.raises(ConfigurationError, match="another circuit 'bank' on this bus already"):
        bus.policy(OrderEvent, breaker=CircuitBreaker(name="bank"))
    bus.circuit("post", CircuitBreakerConfig(failure_threshold=9))
    with pytest.raises(ConfigurationError, match="circuit 'post' already, with another config"):
        bus.circuit("post", CircuitBreakerConfig(failure_threshold=8))
    assert bus.circuit("post") is bus.circuits["post"]
    assert bus.circuit("post").config.failure_threshold == 9


def test_a_named_circuit_has_the_default_config_of_the_bus() -> None:
    config = CircuitBreakerConfig(failure_threshold=17)

    assert bus_of(breaker=config).circuit("bank").config == config
    assert bus_of(breaker=None).circuit("bank").config == CircuitBreakerConfig()


async def test_a_handlers_circuit_can_be_had_before_its_first_message() -> None:
    shop = Shop(breaker=CircuitBreakerConfig())

    shop.bus.circuit("charge").force_open()

    assert (await shop.charge()).attempts == 0
    assert list(shop.bus.circuits) == ["charge"]


def test_to_describe_and_then_change_a_policy_makes_no_second_circuit() -> None:
    bus = bus_of()
    bus.subscribe(OrderEvent, handle)
    bus.describe(OrderEvent)

    bus.policy(OrderEvent, breaker=CircuitBreakerConfig(failure_threshold=9))

    assert "circuit 'handle' opens after 9" in bus.describe(OrderEvent)
    assert list(bus.circuits) == ["handle"]


def test_one_function_of_two_types_has_one_circuit() -> None:
    bus = bus_of()
    bus.subscribe(OrderEvent, handle, name="mailer")
    bus.policy("mailer", breaker=CircuitBreakerConfig())
    bus.subscribe(OrderPlaced, handle, name="mailer")

    bus.describe(OrderPlaced)

    assert sorted(bus.circuits) == ["mailer"]


async def test_circuits_go_with_their_handlers() -> None:
    bus = bus_of()

    async with bus:
        for number in range(50):
            subscription = bus.subscribe(OrderEvent, handle, name=f"handler {number}")
            await bus.publish(OrderEvent())
            await bus.settled()
            await subscription.close()
    gc.collect()

    assert len(bus.circuits) < 5
    assert len(bus._assembly.guards) < 5  # pyright: ignore[reportPrivateUsage]
