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


def run(pytester: pytest.Pytester, test: str, *options: str) -> pytest.RunResult:
    """Run one test module in a folder of its own, with nothing of ours around it."""
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(MESSAGES + test)
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
            "*Time that stands still*",
            "msgbus_bus*",
            "msgbus_recorder*",
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
