"""Routing: topics and who gets what is sent to them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgbus.routing.categories import MessageCategory
    from msgbus.routing.dispatch import (
        DispatchOutcome,
        DispatchResult,
        DispatchRoute,
        DispatchStatus,
    )
    from msgbus.routing.dispatchers import DispatcherRegistry, MessageDispatcher
    from msgbus.routing.engine import MessageDispatchEngine
    from msgbus.routing.envelope import EventEnvelope, MessageKind
    from msgbus.routing.explain import Explanation, RouteMatch
    from msgbus.routing.metrics import DispatcherMetrics, DispatchMetrics
    from msgbus.routing.nats import from_nats, nats_subjects, to_nats
    from msgbus.routing.onward import publish_on
    from msgbus.routing.requests import CorrelationManager, CorrelationStats, RequestTransport
    from msgbus.routing.router import PatternRouter
    from msgbus.routing.routes import Route
    from msgbus.routing.topics import TopicPattern, check_topic, is_topic

__all__ = [
    "CorrelationManager",
    "CorrelationStats",
    "DispatchMetrics",
    "DispatchOutcome",
    "DispatchResult",
    "DispatchRoute",
    "DispatchStatus",
    "DispatcherMetrics",
    "DispatcherRegistry",
    "EventEnvelope",
    "Explanation",
    "MessageCategory",
    "MessageDispatchEngine",
    "MessageDispatcher",
    "MessageKind",
    "PatternRouter",
    "RequestTransport",
    "Route",
    "RouteMatch",
    "TopicPattern",
    "check_topic",
    "from_nats",
    "is_topic",
    "nats_subjects",
    "publish_on",
    "to_nats",
]

_MODULES = {
    "CorrelationManager": "requests",
    "CorrelationStats": "requests",
    "DispatchMetrics": "metrics",
    "DispatchOutcome": "dispatch",
    "DispatchResult": "dispatch",
    "DispatchRoute": "dispatch",
    "DispatchStatus": "dispatch",
    "DispatcherMetrics": "metrics",
    "DispatcherRegistry": "dispatchers",
    "EventEnvelope": "envelope",
    "Explanation": "explain",
    "MessageCategory": "categories",
    "MessageDispatchEngine": "engine",
    "MessageDispatcher": "dispatchers",
    "MessageKind": "envelope",
    "PatternRouter": "router",
    "RequestTransport": "requests",
    "Route": "routes",
    "RouteMatch": "explain",
    "TopicPattern": "topics",
    "check_topic": "topics",
    "from_nats": "nats",
    "is_topic": "topics",
    "nats_subjects": "nats",
    "publish_on": "onward",
    "to_nats": "nats",
}


def __getattr__(name: str) -> object:
    # Only on first use: message classes import this package for the grammar of topics, and
    # the rest of it stands above them.
    module = _MODULES.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value: object = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
