"""The public names: sorted, complete, and light to import."""

from __future__ import annotations

import subprocess
import sys

import msgbus

# What the design promises to others, beside the errors and lifecycle events.
PROMISED = """
Message Command Query Event Context current_context Refusal per_message per_session DomainEvent
IntegrationEvent SystemEvent CommandResult MessageBus IMessageBus IRegistry HandlerRegistry
BusSession BusConfig QueueConfig BackpressureStrategy PublishReceipt PublishStatus PublishSummary
DrainReport BusStats Fault Subscription TypeFilter SessionFilter RateLimitFilter get_bus
MsgBusError MissingHandlerError DuplicateHandlerError HandlerSignatureError BusClosedError
QueueFullError ConfigurationError MissingExtraError CommandStartedEvent CommandResultEvent
SessionStartEvent SessionEndEvent EventHandlerFailedEvent
"""

OPTIONAL = ["structlog", "prometheus_client", "opentelemetry", "rich", "trio", "tenacity"]


def test_all_is_sorted_and_every_name_exists() -> None:
    assert msgbus.__all__ == sorted(msgbus.__all__)
    assert all(hasattr(msgbus, name) for name in msgbus.__all__)


def test_every_promised_name_is_public() -> None:
    assert set(PROMISED.split()) <= set(msgbus.__all__)


def test_every_error_and_every_lifecycle_event_is_public() -> None:
    from msgbus import errors, lifecycle
    from msgbus.messages import SystemEvent

    defined = {
        name
        for module, base in ((errors, errors.MsgBusError), (lifecycle, SystemEvent))
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base)
    }

    assert defined <= set(msgbus.__all__)


def test_every_error_is_in_the_tree_of_the_docstring() -> None:
    from msgbus import errors

    assert errors.__doc__ is not None
    names = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.MsgBusError)
    ]
    assert [name for name in names if name not in errors.__doc__] == []


def test_importing_msgbus_pulls_in_no_optional_package() -> None:
    code = f"import sys, msgbus; print([m for m in {OPTIONAL!r} if m in sys.modules])"

    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert run.stdout.strip() == "[]"
