"""Every `async def` test runs twice: on asyncio, by pytest-asyncio, and on trio.

Mark a test `asyncio_only` with a reason if what it drives is asyncio's alone.
"""

from __future__ import annotations

import functools
import gc
import inspect
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import trio

from tests.counts import STRESS
from tests.evidence import AREAS, Evidence, Table
from tests.groups import GroupScheduling

# How long an example may take is no property of the code: other tests run beside it.
hypothesis.settings.register_profile(
    "msgbus",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("msgbus")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not inspect.iscoroutinefunction(metafunc.function):
        return
    backends = [pytest.param("asyncio", marks=pytest.mark.asyncio)]
    if metafunc.definition.get_closest_marker("asyncio_only") is None:
        backends.append(pytest.param("trio"))
    metafunc.fixturenames.append("backend")
    metafunc.parametrize("backend", backends)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    callspec = getattr(pyfuncitem, "callspec", None)
    if callspec is None or callspec.params.get("backend") != "trio":
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}
    trio.run(functools.partial(pyfuncitem.obj, **arguments))
    return True


@pytest.fixture
def collected() -> None:
    """Collect what earlier tests left: failed results that nobody looked at are logged then."""
    gc.collect()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, collected: None) -> pytest.LogCaptureFixture:
    """Pytest's `caplog`, without the log lines of what earlier tests left."""
    caplog.clear()
    return caplog


skipped: list[str] = []
table = Table()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        skipped.append(report.nodeid)
    if report.when == "call" and report.passed:
        table.take(report.user_properties, report.duration)


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()
    # A skipped test on a promised feature fails the build.
    if skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    for area, lines in table.sections().items() if STRESS else ():
        terminalreporter.section(f"evidence: {area}")
        terminalreporter.write_line(lines)
    page: Path | None = config.getoption("--evidence")
    if page is not None and exitstatus == pytest.ExitCode.OK:
        table.write(page)
        terminalreporter.write_line(f"Written to {page}.")
    for nodeid in skipped:
        terminalreporter.write_line(f"skipped, which counts as failed here: {nodeid}", red=True)


# -- tiers -----------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("msgbus")
    group.addoption("--area", default="", help=f"stress tests of this area: {', '.join(AREAS)}")
    group.addoption("--evidence", type=Path, help="page to write the table of `make stress` to")


def pytest_configure(config: pytest.Config) -> None:
    area = str(config.getoption("--area"))
    if area and area not in AREAS:
        raise pytest.UsageError(f"There is no area {area!r}; areas are: {', '.join(AREAS)}.")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not STRESS:
        keep(config, items, [item for item in items if not is_for_stress_only(item)])
        return
    area = str(config.getoption("--area"))
    for item in items:
        # The limit of a test is for its small count.
        item.add_marker(pytest.mark.timeout(3_600), append=False)
    if area:
        keep(config, items, [item for item in items if area_of(item) == area])


def pytest_collection_finish() -> None:
    # Modules and tests stay to the end: the collector need not look at them each time.
    gc.collect()
    gc.freeze()


def keep(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
    items[:] = chosen


def is_for_stress_only(item: pytest.Item) -> bool:
    return any(marker.kwargs.get("only") for marker in item.iter_markers("stress"))


def area_of(item: pytest.Item) -> str | None:
    marker = item.get_closest_marker("stress")
    return None if marker is None else marker.args[0]


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Evidence:
    """Notes what this test has counted, for the table of `make stress`."""
    node: pytest.Item = request.node
    area = area_of(node)
    assert area in AREAS, f"{node.nodeid} needs @pytest.mark.stress(area)"

    def note(
        what: str,
        *,
        lost: int | None = None,
        doubled: int | None = None,
        reordered: int | None = None,
        **amounts: int,
    ) -> None:
        faults = {"lost": lost, "doubled": doubled, "reordered": reordered}
        known = {name: number for name, number in faults.items() if number is not None}
        value = {"area": area, "what": what, "amounts": amounts, "faults": known}
        node.user_properties.append(("evidence", value))

    return note
