"""Routing: topics and who gets what is sent to them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgbus.messages.topics.explain import Explanation, RouteMatch
    from msgbus.messages.topics.pattern import TopicPattern, check_topic, is_topic
    from msgbus.messages.topics.router import PatternRouter
    from msgbus.routing.categories import MessageCategory
    from msgbus.routing.dispatch.dispatchers import DispatcherRegistry, MessageDispatcher
    from msgbus.routing.dispatch.engine import MessageDispatchEngine
    from msgbus.routing.dispatch.metrics import (
        LATENCY_HISTOGRAM_BUCKETS,
        DispatcherMetrics,
        DispatchMetrics,
    )
    from msgbus.routing.dispatch.results import (
        DispatchOutcome,
        DispatchResult,
        DispatchRoute,
        DispatchStatus,
    )
    from msgbus.routing.endpoints.balancing import (
        Balancer,
        ByKey,
        LeastInFlight,
        RoundRobin,
        Weighted,
    )
    from msgbus.routing.endpoints.correlation import (
        CorrelationManager,
        CorrelationStats,
        RequestEnd,
        RequestTransport,
    )
    from msgbus.routing.endpoints.delivery import EndpointPool
    from msgbus.routing.endpoints.endpoints import Endpoint, EndpointRegistry
    from msgbus.routing.endpoints.exchange import (
        Delivered,
        MessageRouter,
        RouterMetrics,
        RoutingReport,
    )
    from msgbus.routing.endpoints.health import (
        EndpointHealth,
        EndpointRecoveredEvent,
        EndpointUnhealthyEvent,
        HealthMonitor,
        HealthState,
    )
    from msgbus.routing.envelope import EventEnvelope, MessageKind
    from msgbus.routing.forwarding import publish_on
    from msgbus.routing.nats import from_nats, nats_subjects, to_nats
    from msgbus.routing.routes import Route

__all__ = [
    "LATENCY_HISTOGRAM_BUCKETS",
    "Balancer",
    "ByKey",
    "CorrelationManager",
    "CorrelationStats",
    "Delivered",
    "DispatchMetrics",
    "DispatchOutcome",
    "DispatchResult",
    "DispatchRoute",
    "DispatchStatus",
    "DispatcherMetrics",
    "DispatcherRegistry",
    "Endpoint",
    "EndpointHealth",
    "EndpointPool",
    "EndpointRecoveredEvent",
    "EndpointRegistry",
    "EndpointUnhealthyEvent",
    "EventEnvelope",
    "Explanation",
    "HealthMonitor",
    "HealthState",
    "LeastInFlight",
    "MessageCategory",
    "MessageDispatchEngine",
    "MessageDispatcher",
    "MessageKind",
    "MessageRouter",
    "PatternRouter",
    "RequestEnd",
    "RequestTransport",
    "RoundRobin",
    "Route",
    "RouteMatch",
    "RouterMetrics",
    "RoutingReport",
    "TopicPattern",
    "Weighted",
    "check_topic",
    "from_nats",
    "is_topic",
    "nats_subjects",
    "publish_on",
    "to_nats",
]

_MODULES = {
    "LATENCY_HISTOGRAM_BUCKETS": "metrics",
    "Balancer": "balancing",
    "ByKey": "balancing",
    "CorrelationManager": "requests",
    "CorrelationStats": "requests",
    "Delivered": "exchange",
    "DispatchMetrics": "metrics",
    "DispatchOutcome": "dispatch",
    "DispatchResult": "dispatch",
    "DispatchRoute": "dispatch",
    "DispatchStatus": "dispatch",
    "DispatcherMetrics": "metrics",
    "DispatcherRegistry": "dispatchers",
    "Endpoint": "endpoints",
    "EndpointHealth": "health",
    "EndpointPool": "delivery",
    "EndpointRecoveredEvent": "health",
    "EndpointRegistry": "endpoints",
    "EndpointUnhealthyEvent": "health",
    "EventEnvelope": "envelope",
    "Explanation": "explain",
    "HealthMonitor": "health",
    "HealthState": "health",
    "LeastInFlight": "balancing",
    "MessageCategory": "categories",
    "MessageDispatchEngine": "engine",
    "MessageDispatcher": "dispatchers",
    "MessageKind": "envelope",
    "MessageRouter": "exchange",
    "PatternRouter": "router",
    "RequestEnd": "requests",
    "RequestTransport": "requests",
    "RoundRobin": "balancing",
    "Route": "routes",
    "RouteMatch": "explain",
    "RouterMetrics": "exchange",
    "RoutingReport": "exchange",
    "TopicPattern": "topics",
    "Weighted": "balancing",
    "check_topic": "topics",
    "from_nats": "nats",
    "is_topic": "topics",
    "nats_subjects": "nats",
    "publish_on": "onward",
    "to_nats": "nats",
}

if not TYPE_CHECKING:  # type checkers would accept every name, misspelt ones too
    from importlib import import_module

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
