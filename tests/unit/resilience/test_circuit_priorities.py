"""An open circuit of a high priority starves nobody: what waits for it opens its gates."""

from __future__ import annotations

from typing import Any

from msgbus.resilience import CircuitBreakerConfig, ResilientMessageBus
from msgbus.runtime.clock import VirtualClock
from tests.fakes import conserves, let_others_run
from tests.unit.resilience.flaky import OPEN, Flaky, Paid, quick

TWO = CircuitBreakerConfig(failure_threshold=2, recovery_time=10, jitter=0)


class Ranks:
    """A resilient bus in virtual time: `high` fails, and `low` runs after it."""

    def __init__(
        self, *errors: BaseException, fails: int = 0, high: dict[str, Any], **options: Any
    ) -> None:
        self.clock = VirtualClock()
        options.setdefault("retry", None)
        self.bus = ResilientMessageBus(clock=self.clock, breaker=TWO, **options)
        self.high, self.low, self.lowest = Flaky(fails, *errors), Flaky(), Flaky()
        self.bus.subscribe(Paid, self.high, name="high", priority=10, durable=False, **high)
        self.bus.subscribe(Paid, self.low, name="low", priority=5, durable=False)
        self.bus.subscribe(Paid, self.lowest, name="lowest", durable=False)

    async def publish(self, *numbers: int) -> None:
        for number in numbers:
            await self.bus.publish(Paid(number=number))
        await self.clock.advance(0)
        await let_others_run()

    def is_open(self) -> bool:
        return self.bus.circuits["high"].state is OPEN


async def test_lower_handlers_go_on_while_a_higher_one_waits_for_its_circuit() -> None:
    """Point 2: the one in hand, those queued behind it, and those that come later."""
    ranks = Ranks(fails=2, high={})

    async with ranks.bus:
        await ranks.publish(0, 1, 2, 3)
        assert ranks.is_open()
        await ranks.publish(4)

        assert ranks.high.calls == [0, 1]
        assert ranks.low.calls == ranks.lowest.calls == [0, 1, 2, 3, 4]
        conserves(ranks.bus)

        await ranks.clock.advance(10)
        await ranks.bus.settled()

    assert ranks.high.calls == [0, 1, 2, 3, 4]
    assert ranks.low.calls == ranks.lowest.calls == [0, 1, 2, 3, 4]
    conserves(ranks.bus)


async def test_lower_handlers_wait_again_once_the_circuit_has_closed() -> None:
    """Point 2: the gate is open for the time of the outage, and no longer."""
    ranks = Ranks(fails=2, high={})
    seen: list[str] = []

    async with ranks.bus:
        await ranks.publish(0, 1, 2)
        await ranks.clock.advance(10)
        await ranks.bus.settled()
        assert not ranks.is_open()
        for name, handler in (("high", ranks.high), ("low", ranks.low)):
            handler.calls = _Noting(seen, name)
        await ranks.publish(3, 4)
        await ranks.bus.settled()

    assert seen.index("low 3") > seen.index("high 3")
    assert seen.index("low 4") > seen.index("high 4")


async def test_a_pause_before_a_retry_opens_no_gate() -> None:
    """Point 2: only an open circuit does."""
    ranks = Ranks(fails=1, high={}, retry=quick())

    async with ranks.bus:
        await ranks.publish(0)
        assert ranks.high.calls == [0]
        assert ranks.low.calls == []

        await ranks.clock.advance(1)
        await ranks.bus.settled()

    assert ranks.low.calls == [0]


async def test_a_retry_that_meets_the_open_circuit_opens_the_gate() -> None:
    """Point 2: its own failures have opened it."""
    ranks = Ranks(fails=2, high={}, retry=quick())

    async with ranks.bus:
        await ranks.publish(0)
        await ranks.clock.advance(1)
        assert ranks.low.calls == []  # second try failed; the next is due in 2 s
        assert ranks.is_open()
        await ranks.clock.advance(2)
        await let_others_run()

        assert ranks.high.calls == [0, 0]
        assert ranks.low.calls == [0]

        await ranks.clock.advance(10)
        await ranks.bus.settled()

    assert ranks.low.calls == [0]
    conserves(ranks.bus)


async def test_a_handler_of_lists_opens_the_gates_of_its_whole_list() -> None:
    """Point 2: for batch handlers too."""
    ranks = Ranks(fails=0, high={"batch": True})

    async with ranks.bus:
        for _ in range(2):
            ranks.bus.circuit("high").acquire().failure(ConnectionError())
        await ranks.publish(0, 1, 2)
        await ranks.publish(3)

        assert ranks.high.calls == []
        assert ranks.low.calls == ranks.lowest.calls == [0, 1, 2, 3]

        await ranks.clock.advance(10)
        await ranks.bus.settled()

    assert len(ranks.high.calls) >= 1
    assert ranks.low.calls == [0, 1, 2, 3]
    conserves(ranks.bus)


async def test_no_lower_handler_sees_an_event_before_the_journal_has_it() -> None:
    """Point 2: on a bus with a journal the commit is waited for, circuit or not."""
    ranks = Ranks(fails=2, high={}, journal="memory:")
    taken: list[int] = []

    async def note(event: Paid) -> None:
        recorded = event.__meta__.recorded  # type: ignore[union-attr]
        assert recorded is not None
        taken.append(event.number)

    ranks.bus.subscribe(Paid, note, name="note", priority=-1, durable=False)
    async with ranks.bus:
        await ranks.publish(0, 1, 2, 3)
        await ranks.publish(4)
        await let_others_run()

        assert taken == [0, 1, 2, 3, 4]

        await ranks.clock.advance(10)
        await ranks.bus.settled()

    assert ranks.high.calls == [0, 1, 2, 3, 4]
    assert not ranks.bus.stats().handlers["note"].failed


class _Noting(list[Any]):
    """What a `Flaky` appends its calls to, noting them in the order of all."""

    def __init__(self, seen: list[str], name: str) -> None:
        super().__init__()
        self._seen = seen
        self._name = name

    def append(self, number: Any, /) -> None:
        super().append(number)
        self._seen.append(f"{self._name} {number}")
