"""What `msgbus.middleware` exports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from msgbus import middleware


@pytest.mark.parametrize("name", dir(middleware))
def test_every_name_is_there_and_comes_from_its_own_file(name: str) -> None:
    exported = getattr(middleware, name)

    assert exported.__name__ == name
    assert exported.__module__.startswith("msgbus.middleware.")


@pytest.mark.parametrize("name", [one for one in dir(middleware) if one.endswith("Middleware")])
def test_every_ready_middleware_handles_lists_too(name: str) -> None:
    assert getattr(middleware, name).batch is True


def test_importing_the_bus_imports_no_ready_middleware() -> None:
    code = (
        "import sys, msgbus;"
        "print(sorted(name for name in sys.modules if name.startswith('msgbus.middleware.')),"
        "'opentelemetry' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "['msgbus.middleware.chain'] False"
