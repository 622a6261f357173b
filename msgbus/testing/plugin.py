"""The pytest plugin: five plain fixtures, none of them autouse.

It is loaded in every pytest run where msgbus is installed, so it imports only pytest, and the
rest when a fixture is used. The fixtures are not async: they work
alike under pytest-asyncio, anyio's plugin, pytest-trio and `trio.run`. Each may be redefined
in a conftest.py, and those that build on it use that. Leave the plugin out with
`-p no:msgbus`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from msgbus.bus.bus import MessageBus
    from msgbus.journal.ports import Journal
    from msgbus.runtime.clock import VirtualClock
    from msgbus.testing.recording.recorder import Recorder


@pytest.fixture
def msgbus_clock() -> VirtualClock:
    """Virtual clock; the test calls `await msgbus_clock.advance(seconds)`."""
    from msgbus.runtime.clock import VirtualClock

    return VirtualClock()


@pytest.fixture
def msgbus_bus(msgbus_clock: VirtualClock) -> MessageBus:
    """A new bus on `msgbus_clock`; start it with `async with msgbus_bus:`."""
    from msgbus.bus.bus import MessageBus

    return MessageBus(clock=msgbus_clock)


@pytest.fixture
def msgbus_recorder(
    msgbus_bus: MessageBus,
) -> Callable[[], AbstractAsyncContextManager[Recorder]]:
    """Function that starts, records and stops `msgbus_bus`.

    A function, not the recorder: a bus belongs to the event loop that starts it, and only
    the test knows its loop. `async with msgbus_recorder() as recorder:`.
    """
    from msgbus.testing.recording.recorder import record

    return lambda: record(msgbus_bus)


@pytest.fixture
def msgbus_journal(tmp_path: Path) -> str:
    """The URL of a new journal in `tmp_path`. Redefine it in conftest.py for another."""
    return f"sqlite:///{tmp_path / 'msgbus.db'}"


@pytest.fixture
def msgbus_journaled_bus(msgbus_clock: VirtualClock, msgbus_journal: str | Journal) -> MessageBus:
    """A new bus on `msgbus_clock` and `msgbus_journal`; start it with `async with`.

    A second bus on `msgbus_journal` continues where this one stopped. Redefine it in conftest.py
    to build another bus on the two.
    """
    from msgbus.bus.bus import MessageBus

    return MessageBus(clock=msgbus_clock, journal=msgbus_journal)
