"""Tests of code that uses a bus: `record`, `VirtualClock`, a pytest plugin, conformance suites.

May import the bus and what is below it; imported by tests, never by the bus.
"""

from msgbus.runtime.clock import VirtualClock
from msgbus.testing.recording.recorder import Recorder, record

__all__ = ["Recorder", "VirtualClock", "record"]
