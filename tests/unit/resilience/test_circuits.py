"""One function, one circuit: however many sessions register it, and however often it is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from msgbus import BusSession
from msgbus.resilience import CircuitBreakerConfig, CircuitOpenError, circuits
from msgbus.telemetry.prometheus import expose
from tests.fakes import OrderEvent, OrderPlaced, let_others_run
from tests.unit.resilience.flaky import CLOSED, OPEN, Charge, Down, Flaky, Paid, Shop, fails_with

THREE = CircuitBreakerConfig(failure_threshold=3, recovery_time=10, jitter=0)


class Bank:
    """A service that is down."""

    def __init__(self) -> None:
        self.calls = 0

    async def charge(self, command: Charge) -> str:
        self.calls += 1
        raise Down


def closure(bank: Bank) -> Callable[[Charge], Any]:
    async def charge_in_session(command: Charge) -> str:
        return await bank.charge(command)

    return charge_in_session


def method(bank: Bank) -> Callable[[Charge], Any]:
    return bank.charge


def partly(bank: Bank) -> Callable[[Charge], Any]:
    return functools.partial(charge_with, bank)


async def charge_with(bank: Bank, command: Charge) -> str:
    return await bank.charge(command)


class Charging:
    def __init__(self, bank: Bank) -> None:
        self._bank = bank

    async def __call__(self, command: Charge) -> str:
        return await self._bank.charge(command)


@dataclass
class Never:
    """A predicate that has no hash."""

    verdict: bool = False

    def __call__(self, error: Exception) -> bool:
        return self.verdict


def fail() -> str:
    raise Down


def shop_of(**options: Any) -> Shop:
    return Shop(**{"retry": None, "breaker": THREE, **options})


async def in_a_session(shop: Shop, register: Callable[[BusSession], None]) -> Any:
    async with shop.bus.session() as session:
        register(session)
        result = await session.execute(Charge())
        _ = result.success  # looked at: else it would be collected, and told of, at any time
        return result


# -- 3. one function, one circuit ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (method, "Bank.charge"),
        (closure, "charge_in_session"),
        (Charging, "Charging"),
        (partly, "charge_with"),
    ],
)
async def test_short_sessions_with_one_function_share_its_circuit(
    make: Callable[[Bank], Any], name: str
) -> None:
    """Point 3: 20 sessions and a dead service make 3 calls with a threshold of 3."""
    shop, bank = shop_of(), Bank()

    async with shop.bus:
        for number in range(20):
            result = await in_a_session(
                shop, lambda session: session.register_command_handler(Charge, make(bank))
            )
            fails_with(result, Down if number < 3 else CircuitOpenError)

        assert bank.calls == 3
        assert shop.bus.circuits[name].state is OPEN
        assert shop.bus.stats().circuits == {name: "open"}
        assert f'circuit_breaker_state{{bus="msgbus",handler="{name}"}} 2.0' in expose(shop.bus)


async def test_sessions_share_the_circuit_of_an_event_handler() -> None:
    """Point 3: the lanes of later sessions wait, as those of the bus do."""
    shop, calls = shop_of(), 0

    async def mail(event: Paid) -> None:
        nonlocal calls
        calls += 1
        raise Down

    async with shop.bus:
        for _ in range(3):
            async with shop.bus.session() as session:
                session.subscribe(Paid, mail)
                await session.publish(Paid())
                await session.settled()
        assert shop.bus.circuits["mail"].state is OPEN
        async with shop.bus.session() as session:
            session.subscribe(Paid, mail)
            await session.publish(Paid())
            await let_others_run()
            assert calls == 3

            await shop.clock.advance(10)
            await session.settled()

    assert calls == 4


async def test_bus_and_sessions_share_the_circuit_of_one_function() -> None:
    """Point 3: a session that registers the function of the bus meets its open circuit."""
    bank = Bank()
    shop = shop_of()
    shop.bus.register_command_handler(Charge, bank.charge, replace=True)

    async with shop.bus:
        for _ in range(3):
            fails_with(await shop.charge(), Down)
        result = await in_a_session(
            shop, lambda session: session.register_command_handler(Charge, bank.charge)
        )

    fails_with(result, CircuitOpenError)
    assert list(shop.bus.circuits) == ["Bank.charge"]


async def test_one_function_for_two_types_has_one_circuit() -> None:
    """Point 3: the service behind it is one."""
    shop = shop_of()
    flaky = Flaky(99)
    shop.bus.subscribe(OrderEvent, flaky)
    shop.bus.subscribe(OrderPlaced, flaky)

    async with shop.bus:
        for _ in range(2):
            await shop.bus.publish(OrderPlaced())
        await let_others_run()

        assert len(flaky.calls) == 3
        assert shop.bus.stats().circuits == {"Flaky": "open"}
        await shop.bus.stop(0)


async def test_handlers_of_different_names_have_a_circuit_each() -> None:
    """Point 3: so that closures made by one factory for two services can be told apart."""
    shop = shop_of()
    down, up = Flaky(99), Flaky()

    async with shop.bus:
        for _ in range(4):
            await in_a_session(
                shop, lambda session: session.register_command_handler(Charge, down, name="east")
            )
        result = await in_a_session(
            shop, lambda session: session.register_command_handler(Charge, up, name="west")
        )

    assert result.success
    assert len(down.calls) == 3
    assert shop.bus.stats().circuits == {"east": "open", "west": "closed"}


async def test_functions_of_one_name_have_a_circuit_each() -> None:
    """Point 3: a dry run in a session says nothing of the real service."""
    shop = shop_of(handler=Flaky(99))

    async def charge(command: Charge) -> str:
        return "dry run"

    async with shop.bus:
        for _ in range(4):
            result = await in_a_session(
                shop, lambda session: session.register_command_handler(Charge, charge)
            )
            assert result.success
        for _ in range(3):
            fails_with(await shop.charge(), Down)

    # The bus's own handler has its name, even if it is used after the other.
    assert shop.bus.circuits["charge"].state is OPEN
    assert shop.bus.circuits["charge[Charge]"].state is CLOSED


async def test_two_lambdas_have_a_circuit_each() -> None:
    """Point 3: functions of one qualified name are told apart by their lines."""
    shop = shop_of()

    def register(session: BusSession, *, works: bool) -> None:
        handlers: list[Callable[[Charge], str]] = [
            lambda command: fail(),
            lambda command: "done",
        ]
        session.register_command_handler(Charge, handlers[works])

    async with shop.bus:
        for _ in range(3):
            fails_with(await in_a_session(shop, functools.partial(register, works=False)), Down)
        result = await in_a_session(shop, functools.partial(register, works=False))
        fails_with(result, CircuitOpenError)
        assert (await in_a_session(shop, functools.partial(register, works=True))).success


async def test_policies_that_differ_give_one_function_several_circuits() -> None:
    """Point 3: what a policy says of a type holds for the function too."""
    shop = shop_of()
    flaky = Flaky()
    shop.bus.subscribe(OrderEvent, flaky)
    shop.bus.subscribe(Paid, flaky)
    shop.bus.policy(Paid, breaker=CircuitBreakerConfig(ignore=(Never(),)))

    async with shop.bus:
        await shop.bus.publish(OrderEvent())
        await shop.bus.publish(Paid())
        await shop.bus.settled()

    assert sorted(shop.bus.circuits) == ["Flaky", "Flaky[Paid]"]


async def test_circuits_of_ended_sessions_are_kept_in_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Point 3: those with nothing to remember go first."""
    monkeypatch.setattr(circuits, "CIRCUITS_KEPT", 5)
    shop = shop_of()

    async def job(name: str, handler: Flaky) -> None:
        await in_a_session(
            shop, lambda session: session.register_command_handler(Charge, handler, name=name)
        )

    async with shop.bus:
        down = Flaky(99)
        for _ in range(3):
            await job("down", down)
        for number in range(50):
            await job(f"good {number}", Flaky())
        assert kept(shop) == ["down"]
        for number in range(50):
            await job(f"bad {number}", Flaky(99))

    assert kept(shop) == [f"bad {number}" for number in range(45, 50)]


def kept(shop: Shop) -> list[str]:
    """The circuits that would stay if no session were left."""
    circuits = shop.bus._circuits  # pyright: ignore[reportPrivateUsage]
    return [one.name for one in circuits._kept]  # pyright: ignore[reportPrivateUsage]
