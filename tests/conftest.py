"""Every `async def` test runs twice: on asyncio, by pytest-asyncio, and on trio.

Mark a test `asyncio_only` with a reason if what it drives is asyncio's alone.
"""

from __future__ import annotations

import functools
import inspect

import pytest
import trio


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


skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # A skipped test on a promised feature fails the build.
    if skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for nodeid in skipped:
        terminalreporter.write_line(f"skipped, which counts as failed here: {nodeid}", red=True)
