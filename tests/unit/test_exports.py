"""The public names: complete, and light to import."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module

import pytest

import msgbus
from msgbus import BusSession, MessageBus
from msgbus.resilience import ResilientMessageBus
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

SENDING = "call enqueue execute expect publish publish_many request stream"
REGISTERING = "handles include on register_command_handler register_event_handler subscribe"
BUS = f"""
{SENDING} {REGISTERING} add_filter add_middleware check clock config correlations handlers
is_running journal lifespan portal relay relay_once replay session sessions settled start stats stop
ticket transact transaction unregister_command_handler unschedule
"""
SESSION = "bus close handlers headers is_open report session_id settled"
SHOWN: dict[type[object], str] = {
    MessageBus: BUS,
    ResilientMessageBus: f"{BUS} circuit circuits dead_letters describe policy",
    BusSession: f"{SENDING} {REGISTERING} {SESSION}",
}

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
    examples = [file.read_text(encoding="utf-8") for file in (ROOT / "examples").rglob("*.py")]
    docs = [one.text for page in pages() for one in blocks(page) if one.language == "python"]
    imported = re.findall(r"(?m)^\s*(?:from|import) (msgbus[\w.]*)", "\n".join(examples + docs))

    assert imported
    assert set(imported) - set(MODULES) == set()


def test_every_promised_name_is_public() -> None:
    assert set(PROMISED.split()) <= set(msgbus.__all__)


def test_every_system_event_is_public() -> None:
    from msgbus.messages import system_events
    from msgbus.messages.message import SystemEvent

    defined = {
        name
        for name, value in vars(system_events).items()
        if isinstance(value, type) and issubclass(value, SystemEvent)
    }

    assert defined <= set(msgbus.__all__)


def test_the_package_shows_its_public_names_and_nothing_else() -> None:
    assert dir(msgbus) == sorted(msgbus.__all__)


@pytest.mark.parametrize(("cls", "names"), SHOWN.items())
def test_public_objects_show_what_a_user_may_call_and_nothing_else(
    cls: type[object], names: str
) -> None:
    made = MessageBus().session() if cls is BusSession else cls()

    assert [name for name in dir(made) if not name.startswith("_")] == sorted(names.split())


def test_importing_msgbus_pulls_in_no_optional_package() -> None:
    code = f"import sys, msgbus; print([m for m in {OPTIONAL!r} if m in sys.modules])"

    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert run.stdout.strip() == "[]"
