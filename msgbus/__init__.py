"""msgbus: commands, events and sessions for Python applications."""

from msgbus.bus import MessageBus
from msgbus.config import BackpressureStrategy, BusConfig, QueueConfig
from msgbus.context import Context, current_context
from msgbus.default import get_bus
from msgbus.errors import (
    BusClosedError,
    BusNotStartedError,
    BusStateError,
    ConfigurationError,
    DeliveryError,
    DuplicateHandlerError,
    DuplicateSessionError,
    Fault,
    HandlerSignatureError,
    HandlerTimeoutError,
    InsideHandlerError,
    InvalidTopicError,
    MessageDefinitionError,
    MiddlewareError,
    MissingExtraError,
    MissingHandlerError,
    MissingProviderError,
    MsgBusError,
    QueueFullError,
    Refusal,
    SessionClosedError,
    SessionMismatchError,
    SettleTimeoutError,
    WrongMessageTypeError,
)
from msgbus.filters import Filter, RateLimitFilter, SessionFilter, TypeFilter
from msgbus.injection import Resolver, per_message, per_session
from msgbus.lifecycle import (
    CommandResultEvent,
    CommandStartedEvent,
    EventHandlerFailedEvent,
    EventRefusedEvent,
    SessionEndEvent,
    SessionStartEvent,
)
from msgbus.messages import (
    Command,
    DomainEvent,
    Event,
    IntegrationEvent,
    Message,
    Query,
    SystemEvent,
)
from msgbus.middleware.chain import CallNext, Middleware
from msgbus.portal import BusPortal
from msgbus.protocols import IMessageBus
from msgbus.receipts import (
    DrainReport,
    PublishReceipt,
    PublishStatus,
    PublishSummary,
    Undelivered,
)
from msgbus.registrations import Registration
from msgbus.registry import HandlerRegistry, IRegistry
from msgbus.results import CommandResult
from msgbus.session import BusSession
from msgbus.streams import EventStream
from msgbus.subscription import Subscription
from msgbus.telemetry.stats import BusStats

__all__ = [
    "BackpressureStrategy",
    "BusClosedError",
    "BusConfig",
    "BusNotStartedError",
    "BusPortal",
    "BusSession",
    "BusStateError",
    "BusStats",
    "CallNext",
    "Command",
    "CommandResult",
    "CommandResultEvent",
    "CommandStartedEvent",
    "ConfigurationError",
    "Context",
    "DeliveryError",
    "DomainEvent",
    "DrainReport",
    "DuplicateHandlerError",
    "DuplicateSessionError",
    "Event",
    "EventHandlerFailedEvent",
    "EventRefusedEvent",
    "EventStream",
    "Fault",
    "Filter",
    "HandlerRegistry",
    "HandlerSignatureError",
    "HandlerTimeoutError",
    "IMessageBus",
    "IRegistry",
    "InsideHandlerError",
    "IntegrationEvent",
    "InvalidTopicError",
    "Message",
    "MessageBus",
    "MessageDefinitionError",
    "Middleware",
    "MiddlewareError",
    "MissingExtraError",
    "MissingHandlerError",
    "MissingProviderError",
    "MsgBusError",
    "PublishReceipt",
    "PublishStatus",
    "PublishSummary",
    "Query",
    "QueueConfig",
    "QueueFullError",
    "RateLimitFilter",
    "Refusal",
    "Registration",
    "Resolver",
    "SessionClosedError",
    "SessionEndEvent",
    "SessionFilter",
    "SessionMismatchError",
    "SessionStartEvent",
    "SettleTimeoutError",
    "Subscription",
    "SystemEvent",
    "TypeFilter",
    "Undelivered",
    "WrongMessageTypeError",
    "current_context",
    "get_bus",
    "per_message",
    "per_session",
]
