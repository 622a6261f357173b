"""Routing: topic patterns, the dispatch engine, endpoints and requests.

Names are imported at their first use. May import `resilience` and what is below it; the bus
and what is above it may import this.
"""

from typing import TYPE_CHECKING

from msgbus.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from msgbus.messages.topics.explain import Explanation as Explanation, RouteMatch as RouteMatch
    from msgbus.messages.topics.index import Route as Route
    from msgbus.messages.topics.pattern import (
        TopicPattern as TopicPattern,
        check_topic as check_topic,
        is_topic as is_topic,
    )
    from msgbus.messages.topics.router import PatternRouter as PatternRouter
    from msgbus.routing.dispatch.dispatchers import (
        DispatcherRegistry as DispatcherRegistry,
        MessageDispatcher as MessageDispatcher,
    )
    from msgbus.routing.dispatch.engine import MessageDispatchEngine as MessageDispatchEngine
    from msgbus.routing.dispatch.metrics import (
        LATENCY_HISTOGRAM_BUCKETS as LATENCY_HISTOGRAM_BUCKETS,
        DispatcherMetrics as DispatcherMetrics,
        DispatchMetrics as DispatchMetrics,
    )
    from msgbus.routing.dispatch.results import (
        DispatchOutcome as DispatchOutcome,
        DispatchResult as DispatchResult,
        DispatchStatus as DispatchStatus,
    )
    from msgbus.routing.dispatch.routes import DispatchRoute as DispatchRoute
    from msgbus.routing.endpoints.balancing import (
        Balancer as Balancer,
        ByKey as ByKey,
        LeastInFlight as LeastInFlight,
        RoundRobin as RoundRobin,
        Weighted as Weighted,
    )
    from msgbus.routing.endpoints.correlation import (
        CorrelationManager as CorrelationManager,
        CorrelationStats as CorrelationStats,
        RequestEnd as RequestEnd,
        RequestTransport as RequestTransport,
    )
    from msgbus.routing.endpoints.delivery import EndpointPool as EndpointPool
    from msgbus.routing.endpoints.endpoints import (
        Endpoint as Endpoint,
        EndpointRegistry as EndpointRegistry,
    )
    from msgbus.routing.endpoints.exchange import (
        Delivered as Delivered,
        MessageRouter as MessageRouter,
        RouterMetrics as RouterMetrics,
        RoutingReport as RoutingReport,
    )
    from msgbus.routing.endpoints.health import (
        EndpointHealth as EndpointHealth,
        EndpointRecoveredEvent as EndpointRecoveredEvent,
        EndpointUnhealthyEvent as EndpointUnhealthyEvent,
        HealthMonitor as HealthMonitor,
        HealthState as HealthState,
    )
    from msgbus.routing.envelope import (
        EventEnvelope as EventEnvelope,
        MessageCategory as MessageCategory,
        MessageKind as MessageKind,
    )
    from msgbus.routing.forwarding import publish_on as publish_on
    from msgbus.routing.nats import (
        from_nats as from_nats,
        nats_subjects as nats_subjects,
        to_nats as to_nats,
    )
else:
    __getattr__, __dir__ = lazy_names(__name__)
