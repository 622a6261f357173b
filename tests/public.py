"""The modules that users import from, and the names they find there."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Final

MODULES: Final = (
    "msgbus",
    "msgbus.bus.durable",
    "msgbus.errors",
    "msgbus.journal",
    "msgbus.journal.operations",
    "msgbus.middleware",
    "msgbus.pipeline",
    "msgbus.pipeline.jobs",
    "msgbus.pipeline.lake",
    "msgbus.pipeline.report",
    "msgbus.pipeline.schemas",
    "msgbus.pipeline.session",
    "msgbus.resilience",
    "msgbus.routing",
    "msgbus.subscriptions",
    "msgbus.telemetry",
    "msgbus.telemetry.prometheus",
    "msgbus.telemetry.redaction",
    "msgbus.testing",
    "msgbus.testing.conformance.dead_letters",
    "msgbus.testing.conformance.journal",
    "msgbus.testing.simulation.processes",
    "msgbus.testing.simulation.simulation",
)


def public_names(module: str) -> list[str]:
    """The names in `__all__`; without one, the classes and functions that are defined there."""
    loaded = import_module(module)
    listed: list[str] | None = getattr(loaded, "__all__", None)
    if listed is not None:
        return listed
    return [
        name
        for name, value in vars(loaded).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module
        and not name.startswith("_")
    ]
