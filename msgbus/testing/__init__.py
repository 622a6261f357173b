"""Helpers for testing code that uses a bus."""

from msgbus.runtime.clock import VirtualClock
from msgbus.testing.recording.recorder import Recorder, record

__all__ = ["Recorder", "VirtualClock", "record"]
