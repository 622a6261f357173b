"""msgbus: commands, events and sessions for Python applications."""

from msgbus.bus.bus import MessageBus, get_bus
from msgbus.bus.config import BusConfig
from msgbus.bus.context import Context, current_context
from msgbus.bus.monitoring.handler_info import HandlerInfo
from msgbus.bus.portal import BusPortal
from msgbus.bus.protocols import IMessageBus
from msgbus.bus.session import BusSession
from msgbus.bus.streams import EventStream, Expectation
from msgbus.bus.subscription import Subscription
from msgbus.errors import (
    BusClosedError,
    CircuitOpenError,
    ConfigurationError,
    DuplicateHandlerError,
    ExpectTimeoutError,
    Fault,
    HandlerSignatureError,
    HandlerTimeoutError,
    JournalError,
    MissingExtraError,
    MissingHandlerError,
    MsgBusError,
    QueueFullError,
    Refusal,
    RequestTimeoutError,
    SessionClosedError,
    SettleTimeoutError,
    TicketFailedError,
    Unhandleable,
)
from msgbus.handlers.config import BackpressureStrategy, QueueConfig, QueueLevel
from msgbus.handlers.filters import Filter, RateLimitFilter, SessionFilter, TypeFilter
from msgbus.handlers.injection import Resolver, per_message, per_session
from msgbus.handlers.registration import Registration
from msgbus.handlers.registry import HandlerRegistry, IRegistry
from msgbus.messages.message import (
    Command,
    CreateCommand,
    DeleteCommand,
    DomainEvent,
    Event,
    IntegrationEvent,
    Message,
    Query,
    SystemEvent,
    UpdateCommand,
    topic_of,
)
from msgbus.messages.receipts import (
    DrainReport,
    HandlerOutcome,
    OutcomeStatus,
    PublishReceipt,
    PublishStatus,
    PublishSummary,
    SessionReport,
    Undelivered,
)
from msgbus.messages.results import CommandResult
from msgbus.messages.system_events import (
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitOpenedEvent,
    CommandResultEvent,
    CommandStartedEvent,
    DeadLetterDroppedEvent,
    DeadLetteredEvent,
    DeadLetterRefusedEvent,
    EventHandlerFailedEvent,
    EventRefusedEvent,
    RetryScheduledEvent,
    SessionEndEvent,
    SessionStartEvent,
)
from msgbus.middleware.chain import CallNext, Middleware
from msgbus.telemetry.stats import BusStats

__all__ = [
    "BackpressureStrategy",
    "BusClosedError",
    "BusConfig",
    "BusPortal",
    "BusSession",
    "BusStats",
    "CallNext",
    "CircuitClosedEvent",
    "CircuitHalfOpenedEvent",
    "CircuitOpenError",
    "CircuitOpenedEvent",
    "Command",
    "CommandResult",
    "CommandResultEvent",
    "CommandStartedEvent",
    "ConfigurationError",
    "Context",
    "CreateCommand",
    "DeadLetterDroppedEvent",
    "DeadLetterRefusedEvent",
    "DeadLetteredEvent",
    "DeleteCommand",
    "DomainEvent",
    "DrainReport",
    "DuplicateHandlerError",
    "Event",
    "EventHandlerFailedEvent",
    "EventRefusedEvent",
    "EventStream",
    "ExpectTimeoutError",
    "Expectation",
    "Fault",
    "Filter",
    "HandlerInfo",
    "HandlerOutcome",
    "HandlerRegistry",
    "HandlerSignatureError",
    "HandlerTimeoutError",
    "IMessageBus",
    "IRegistry",
    "IntegrationEvent",
    "JournalError",
    "Message",
    "MessageBus",
    "Middleware",
    "MissingExtraError",
    "MissingHandlerError",
    "MsgBusError",
    "OutcomeStatus",
    "PublishReceipt",
    "PublishStatus",
    "PublishSummary",
    "Query",
    "QueueConfig",
    "QueueFullError",
    "QueueLevel",
    "RateLimitFilter",
    "Refusal",
    "Registration",
    "RequestTimeoutError",
    "Resolver",
    "RetryScheduledEvent",
    "SessionClosedError",
    "SessionEndEvent",
    "SessionFilter",
    "SessionReport",
    "SessionStartEvent",
    "SettleTimeoutError",
    "Subscription",
    "SystemEvent",
    "TicketFailedError",
    "TypeFilter",
    "Undelivered",
    "Unhandleable",
    "UpdateCommand",
    "current_context",
    "get_bus",
    "per_message",
    "per_session",
    "topic_of",
]


def __dir__() -> list[str]:
    return list(__all__)
