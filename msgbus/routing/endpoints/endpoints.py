"""Endpoints: where messages are delivered, and the registry that knows them all."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, cast, final

from msgbus.errors import ConfigurationError
from msgbus.messages.topics.pattern import TopicPattern
from msgbus.resilience.config import RetryConfig
from msgbus.routing.calls import Callee
from msgbus.routing.dispatch.dispatchers import duplicate
from msgbus.routing.envelope import EventEnvelope
from msgbus.routing.inputs import require_id

Deliver: TypeAlias = Callable[[EventEnvelope[Any]], Awaitable[Any] | Any]
"""Brings a message to its endpoint; what it gives is the answer to a request."""

Check: TypeAlias = Callable[[], Awaitable[object] | object]
"""A health check: well unless it raises, gives `False` or takes too long."""


@final
class Endpoint:
    """One place to which messages can be delivered: a worker, a service, a queue.

    Args:
        endpoint_id: Its id, unique in a registry.
        send: Brings a message there. Its value answers a request. A sync function runs in a
            thread.
        group: A name that several endpoints share; a route may lead to it.
        topics: Patterns of the topics it serves, for those who look for one.
        tags: Words and values to find it by, as `{"zone": "north"}`.
        weight: How much it can take, beside others of its group.
        check: Whether it is well, for the `HealthMonitor`. A sync function runs in a thread.
        answers_later: Whether the answer to a request comes as a message of its own,
            rather than as the value of `send`.
        retry: How often a delivery that failed is tried again before another endpoint is
            asked, within the time that a delivery may take. An error that is the endpoint's
            answer is tried again only if `retry_on` or `retry` says so.
        max_threads: How many calls of a sync `send` run at once.

    Raises:
        ConfigurationError: A setting is wrong.
        InvalidTopicError: One of `topics` is no pattern.
    """

    def __init__(
        self,
        endpoint_id: str,
        send: Deliver,
        *,
        group: str | None = None,
        topics: Iterable[str] = (),
        tags: Mapping[str, str] | None = None,
        weight: int = 1,
        check: Check | None = None,
        answers_later: bool = False,
        retry: RetryConfig | None = None,
        max_threads: int = 40,
    ) -> None:
        require_id("An endpoint's id", endpoint_id)
        if group is not None:
            require_id(f"The group of endpoint {endpoint_id!r}", group)
        for option, number in (("weight", weight), ("max_threads", max_threads)):
            if number < 1:
                message = f"{option}={number} of endpoint {endpoint_id!r} must be at least 1."
                raise ConfigurationError(message)
        _require_callable(endpoint_id, "send", send)
        if check is not None:
            _require_callable(endpoint_id, "check", check)
        self.endpoint_id = endpoint_id
        self.send = send
        self.group = group
        self.topics = tuple(TopicPattern(pattern) for pattern in topics)
        self.tags: Mapping[str, str] = MappingProxyType(dict(tags or {}))
        self.weight = weight
        self.check = check
        self.answers_later = answers_later
        self.retry = retry
        self.deliver = Callee(send, max_threads)
        """`send`, to be awaited whether it is sync or not."""
        # One thread: a check that hangs is not begun again beside itself.
        self.ask_health = None if check is None else Callee(check, 1)
        """`check`, to be awaited whether it is sync or not."""
        self.in_flight = 0
        """Deliveries under way."""
        self.delivered = 0
        """Deliveries that succeeded."""
        self.failed = 0
        """Deliveries that failed; those that were cancelled are neither."""

    def serves(self, topic: str) -> bool:
        """Whether one of its patterns matches `topic`."""
        return any(pattern.matches(topic) for pattern in self.topics)

    def has_tags(self, tags: Mapping[str, str]) -> bool:
        """Whether it has all these tags, with these values."""
        return tags.items() <= self.tags.items()

    def __repr__(self) -> str:
        group = f" of {self.group}" if self.group else ""
        return f"<Endpoint {self.endpoint_id}{group}, {self.in_flight} in flight>"


def _require_callable(endpoint_id: str, option: str, given: object) -> None:
    if not callable(given):
        message = f"{option}={given!r:.80} of endpoint {endpoint_id!r} must be a function."
        raise ConfigurationError(message)


@final
class EndpointRegistry:
    """All endpoints. They may come and go at any time; readers in any thread see a whole.

    ```python
    endpoints = EndpointRegistry()
    endpoints.register(Endpoint("worker-1", send, group="billing", tags={"zone": "north"}))
    endpoints.members("billing")
    ```
    """

    def __init__(self) -> None:
        self._writing = threading.Lock()
        # Both are replaced as a whole, never altered.
        self._by_id: dict[str, Endpoint] = {}
        self._members: dict[str, tuple[Endpoint, ...]] = {}

    def register(self, endpoint: Endpoint) -> Endpoint:
        """Take an endpoint in.

        Raises:
            DuplicateHandlerError: There is one of this id, or a group of this name.
            ConfigurationError: It is no endpoint, or its group is called like another endpoint.
        """
        given = cast("object", endpoint)
        if not isinstance(given, Endpoint):
            message = f"{given!r:.80} is not an Endpoint. Make one: Endpoint(endpoint_id, send)."
            raise ConfigurationError(message)
        with self._writing:
            if endpoint.endpoint_id in self._members:
                raise duplicate("endpoint or group", endpoint.endpoint_id)
            if endpoint.group in self._by_id:
                message = (
                    f"The group of {endpoint.endpoint_id!r} is called {endpoint.group!r}, and so "
                    f"is an endpoint. Rename one: a route could mean either."
                )
                raise ConfigurationError(message)
            self._replace({**self._by_id, endpoint.endpoint_id: endpoint})
        return endpoint

    def unregister(self, endpoint_id: str) -> bool:
        """Let an endpoint go; false if there was none. What is under way is finished."""
        with self._writing:
            if endpoint_id not in self._by_id:
                return False
            left = {name: one for name, one in self._by_id.items() if name != endpoint_id}
            self._replace(left)
        return True

    def _replace(self, by_id: dict[str, Endpoint]) -> None:
        members: dict[str, tuple[Endpoint, ...]] = {}
        for name, endpoint in by_id.items():
            members[name] = (endpoint,)
            if endpoint.group is not None:
                members[endpoint.group] = (*members.get(endpoint.group, ()), endpoint)
        self._by_id, self._members = by_id, members

    def get(self, endpoint_id: str) -> Endpoint | None:
        """The endpoint of this id."""
        return self._by_id.get(endpoint_id)

    def members(self, name: str) -> tuple[Endpoint, ...]:
        """The endpoint of this id, or all of the group of this name, in order of arrival."""
        return self._members.get(name, ())

    def discover(
        self, pattern: str = "**", *, tags: Mapping[str, str] | None = None
    ) -> list[Endpoint]:
        """The endpoints whose id matches a pattern and that have all these tags.

        Raises:
            InvalidTopicError: It is not a pattern.
        """
        wanted = TopicPattern(pattern)
        return [
            endpoint
            for name, endpoint in self._by_id.items()
            if wanted.matches(name) and endpoint.has_tags(tags or {})
        ]

    def serving(self, topic: str, *, tags: Mapping[str, str] | None = None) -> list[Endpoint]:
        """The endpoints that serve a topic and have all these tags."""
        return [
            endpoint
            for endpoint in self._by_id.values()
            if endpoint.serves(topic) and endpoint.has_tags(tags or {})
        ]

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, endpoint_id: object) -> bool:
        return endpoint_id in self._by_id
