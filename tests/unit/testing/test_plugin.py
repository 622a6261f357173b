"""The pytest plugin, in pytest runs of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

MESSAGES = """
import anyio, pytest, trio
from msgbus import Command, Event


class Add(Command[int]):
    left: int


class Added(Event):
    pass


async def use(bus, clock, recorder):
    @bus.handles(Add)
    async def add(command: Add) -> int:
        await bus.publish(Added(), delay=3600)
        return command.left + 1

    assert not bus.is_running
    async with recorder() as recorded:
        assert await recorded.call(Add(left=1)) == 2
        recorded.assert_not_published(Added)
        await clock.advance(3600)
    recorded.assert_published(Added)
    assert not bus.is_running
"""

FIXTURES = "msgbus_bus, msgbus_clock, msgbus_recorder"


def run(
    pytester: pytest.Pytester, test: str, *options: str, messages: str = MESSAGES
) -> pytest.RunResult:
    """Run one test module in a folder of its own, with nothing of ours around it."""
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(messages + test)
    without = [f"-pno:{name}" for name in ("randomly", "cacheprovider", "hypothesispytest")]
    return pytester.runpytest(*without, *options)


def test_the_fixtures_work_under_pytest_asyncio(pytester: pytest.Pytester) -> None:
    test = f"""
@pytest.mark.asyncio
async def test_it({FIXTURES}):
    await use({FIXTURES})
"""

    run(pytester, test).assert_outcomes(passed=1)


def test_the_fixtures_work_under_anyio_on_both_back_ends(pytester: pytest.Pytester) -> None:
    test = f"""
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_it({FIXTURES}, anyio_backend):
    await use({FIXTURES})
"""

    run(pytester, test).assert_outcomes(passed=2)


def test_the_fixtures_work_without_any_async_plugin(pytester: pytest.Pytester) -> None:
    test = f"""
def test_asyncio({FIXTURES}):
    anyio.run(use, {FIXTURES})

def test_trio({FIXTURES}):
    trio.run(use, {FIXTURES})
"""

    result = run(pytester, test, "-p", "no:anyio", "-p", "no:asyncio")

    result.assert_outcomes(passed=2)


JOURNAL = """
import anyio, pytest, trio
from msgbus import Event, MessageBus


class Paid(Event):
    number: int


async def use(bus, clock, journal):
    seen = []

    async def book(event: Paid) -> None:
        seen.append(event.number)

    bus.subscribe(Paid, book, durable="books")
    assert bus.clock is clock
    async with bus:
        await bus.publish(Paid(number=1))
        await bus.publish(Paid(number=2), delay=3600)
        await bus.settled()
        assert seen == [1]

    later = MessageBus(clock=clock, journal=journal)  # the process after this one
    later.subscribe(Paid, book, durable="books")
    async with later:
        await clock.advance(3600)
        await later.settled()
        assert seen == [1, 2]
"""

JOURNALED = "msgbus_journaled_bus, msgbus_clock, msgbus_journal"


def test_the_bus_with_a_journal_works_on_both_back_ends(pytester: pytest.Pytester) -> None:
    """20.8: what is left in the journal is there for the next bus."""
    test = f"""
def test_asyncio({JOURNALED}):
    anyio.run(use, {JOURNALED})

def test_trio({JOURNALED}):
    trio.run(use, {JOURNALED})

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_anyio({JOURNALED}, anyio_backend):
    await use({JOURNALED})
"""

    run(pytester, test, messages=JOURNAL).assert_outcomes(passed=4)


def test_every_test_has_a_journal_of_its_own(pytester: pytest.Pytester) -> None:
    """20.8."""
    test = """
seen = set()

@pytest.mark.parametrize("number", [1, 2])
def test_it(msgbus_journal, tmp_path, number):
    seen.add(msgbus_journal)
    assert len(seen) == number
    assert str(tmp_path) in msgbus_journal
    assert not list(tmp_path.iterdir())  # made by the bus that starts on it
"""

    run(pytester, test).assert_outcomes(passed=2)


@pytest.mark.parametrize("back_end", ["anyio", "trio"])
def test_a_conftest_overrides_the_journal(pytester: pytest.Pytester, back_end: str) -> None:
    """20.8."""
    pytester.makeconftest(
        """
import pytest

@pytest.fixture
def msgbus_journal():
    return "memory:"
"""
    )
    test = f"""
async def look(bus):
    async with bus:
        assert type(bus.journal).__name__ == "MemoryJournal"

def test_it(msgbus_journaled_bus):
    {back_end}.run(look, msgbus_journaled_bus)
"""

    run(pytester, test).assert_outcomes(passed=1)


@pytest.mark.parametrize("back_end", ["anyio", "trio"])
def test_a_conftest_overrides_the_buses(pytester: pytest.Pytester, back_end: str) -> None:
    """20.8: an application gives its tests its own buses, and the recorder uses them."""
    pytester.makeconftest(
        """
import pytest
from msgbus.resilience import ResilientMessageBus

@pytest.fixture
def msgbus_bus(msgbus_clock):
    return ResilientMessageBus(clock=msgbus_clock)

@pytest.fixture
def msgbus_journaled_bus(msgbus_clock, msgbus_journal):
    return ResilientMessageBus(clock=msgbus_clock, journal=msgbus_journal)
"""
    )
    test = f"""
async def look(bus, recorder):
    async with bus, recorder() as recorded:
        assert type(bus) is type(recorded.bus)
        assert type(bus).__name__ == "ResilientMessageBus"
        assert bus.journal is not None

def test_it(msgbus_journaled_bus, msgbus_recorder):
    {back_end}.run(look, msgbus_journaled_bus, msgbus_recorder)
"""

    run(pytester, test).assert_outcomes(passed=1)


def test_every_test_has_a_bus_of_its_own(pytester: pytest.Pytester) -> None:
    test = """
seen = []

@pytest.mark.parametrize("number", [1, 2])
def test_it(msgbus_bus, msgbus_clock, number):
    seen.append(msgbus_bus)
    assert msgbus_bus.clock is msgbus_clock
    assert len({id(bus) for bus in seen}) == number
"""

    run(pytester, test).assert_outcomes(passed=2)


def test_a_failed_assertion_points_at_the_line_of_the_test(pytester: pytest.Pytester) -> None:
    test = """
def test_it(msgbus_recorder):
    async def fail():
        async with msgbus_recorder() as recorder:
            recorder.assert_published(Added)  # here
    anyio.run(fail)
"""

    result = run(pytester, test, "--tb=short")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*recorder.assert_published(Added)  # here", "E*No Added was published. Nothing was*"]
    )
    result.stdout.no_fnmatch_line("*raise AssertionError*")


def test_the_plugin_can_be_left_out(pytester: pytest.Pytester) -> None:
    test = """
def test_without():
    pass

def test_with(msgbus_bus):
    pass
"""

    result = run(pytester, test, "-p", "no:msgbus")

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*fixture 'msgbus_bus' not found*"])


def test_nothing_of_it_runs_unasked(pytester: pytest.Pytester) -> None:
    test = """
def test_it(request):
    assert not [name for name in request.fixturenames if "msgbus" in name]
"""

    run(pytester, test).assert_outcomes(passed=1)


def test_the_fixtures_explain_themselves(pytester: pytest.Pytester) -> None:
    result = run(pytester, "", "--fixtures")

    result.stdout.fnmatch_lines_random(
        [
            "msgbus_clock*",
            "*Virtual clock*",
            "msgbus_bus*",
            "msgbus_recorder*",
            "msgbus_journal*",
            "msgbus_journaled_bus*",
            "*Redefine it in conftest.py*",
        ]
    )


def test_loading_it_imports_neither_optional_packages_nor_an_event_loop_of_others() -> None:
    unwanted = ["structlog", "prometheus_client", "trio", "rich", "tenacity", "opentelemetry"]
    code = f"""
import sys
import msgbus.testing.plugin
print([name for name in {unwanted!r} if name in sys.modules])
"""

    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert answer.stdout.strip() == "[]"
