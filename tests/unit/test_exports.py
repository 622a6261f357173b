"""The public names: complete, and light to import."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module

import pytest

import msgbus
from tests.docs.pages import ROOT, blocks, pages
from tests.public import MODULES, public_names

# What the design promises to others, beside the errors and lifecycle events.
PROMISED = """
Message Command Query Event Context current_context Refusal per_message per_session DomainEvent
IntegrationEvent SystemEvent CommandResult MessageBus IMessageBus IRegistry HandlerRegistry
BusSession BusConfig QueueConfig BackpressureStrategy PublishReceipt PublishStatus PublishSummary
DrainReport BusStats Fault Subscription TypeFilter SessionFilter RateLimitFilter get_bus
MsgBusError MissingHandlerError DuplicateHandlerError HandlerSignatureError BusClosedError
QueueFullError ConfigurationError MissingExtraError CommandStartedEvent CommandResultEvent
SessionStartEvent SessionEndEvent EventHandlerFailedEvent CreateCommand UpdateCommand DeleteCommand
"""

OPTIONAL = ["structlog", "prometheus_client", "opentelemetry", "rich", "trio", "tenacity"]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there_and_no_other(module: str) -> None:
    loaded = import_module(module)

    assert [name for name in public_names(module) if not hasattr(loaded, name)] == []
    with pytest.raises(AttributeError, match=rf"{re.escape(module)}.* has no attribute"):
        loaded.CircuitBrekaer  # noqa: B018 (asking for it is the test)


def test_no_public_name_means_two_things() -> None:
    meanings: dict[str, dict[int, str]] = {}
    for module in MODULES:
        for name in public_names(module):
            value = getattr(import_module(module), name)
            meanings.setdefault(name, {}).setdefault(id(value), module)

    assert {name: [*found.values()] for name, found in meanings.items() if len(found) > 1} == {}


def test_every_module_that_the_docs_import_from_is_public() -> None:
    examples = [file.read_text(encoding="utf-8") for file in (ROOT / "examples").glob("*.py")]
    docs = [one.text for page in pages() for one in blocks(page) if one.language == "python"]
    imported = re.findall(r"(?m)^\s*(?:from|import) (msgbus[\w.]*)", "\n".join(examples + docs))

    assert imported
    assert set(imported) - set(MODULES) == set()


def test_every_promised_name_is_public() -> None:
    assert set(PROMISED.split()) <= set(msgbus.__all__)


def test_every_error_and_every_lifecycle_event_is_public() -> None:
    from msgbus import errors, lifecycle
    from msgbus.messages.message import SystemEvent

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
