"""Endpoint and EndpointRegistry: destinations of messages, with groups and tags."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast, final

from anyio.lowlevel import RunVar

from msgbus.errors import ConfigurationError
from msgbus.messages.topics.pattern import TopicPattern
from msgbus.resilience.config import RetryConfig
from msgbus.routing.dispatch.dispatchers import duplicate, is_async
from msgbus.routing.envelope import EventEnvelope
from msgbus.runtime.arguments import require_id
from msgbus.runtime.threads import ThreadPool

Deliver: TypeAlias = Callable[[EventEnvelope[Any]], Awaitable[Any] | Any]
"""Delivers a message; its return value is the reply to a request."""

Check: TypeAlias = Callable[[], Awaitable[object] | object]
"""A health check, which fails if it raises, returns `False` or times out."""

_in_thread: Final[ContextVar[bool]] = ContextVar("msgbus_call_in_thread", default=False)
"""Whether this code was called from the thread of a sync function."""


@final
class AsyncCall:
    """Await an async function, or run a sync one in threads of its own.

    The threads are not shared, so a function that hangs blocks no other. A call made from the
    thread of another sync function is not bounded: waiting for a thread could deadlock.
    """

    def __init__(self, function: Callable[..., Any], max_threads: int) -> None:
        self._function = function
        self._is_async = is_async(function)
        self._max_threads = max_threads
        self._pools: RunVar[tuple[ThreadPool, ThreadPool]] = RunVar("msgbus_call_threads")

    async def __call__(self, *args: Any) -> Any:
        """Call the function and return its value."""
        if self._is_async:
            return await self._function(*args)

        def work() -> list[Any]:
            _in_thread.set(True)  # in the thread's own copy of the context
            # In a list, as trio refuses to return an awaitable from a thread.
            return [self._function(*args)]

        bounded, unbounded = self._threads()
        [value] = await (unbounded if _in_thread.get() else bounded).run(work)
        return await value if inspect.isawaitable(value) else value

    def _threads(self) -> tuple[ThreadPool, ThreadPool]:
        pools = self._pools.get(None)
        if pools is None:
            pools = (ThreadPool(self._max_threads), ThreadPool(math.inf))
            self._pools.set(pools)
        return pools


@final
class Endpoint:
    """A destination of messages: a worker, a service or a queue.

    Args:
        endpoint_id: Its id, unique in a registry.
        send: Delivers a message; its return value is the reply to a request. A sync function
            runs in a thread.
        group: A name that several endpoints share; a route may name it.
        topics: Patterns of the topics it serves, for `EndpointRegistry.serving`.
        tags: Labels to find it by, such as `{"zone": "north"}`.
        weight: Its capacity, relative to others of its group.
        check: A health check for the `HealthMonitor`. A sync function runs in a thread.
        answers_later: Whether the reply to a request comes as a response message, rather than
            as the return value of `send`.
        retry: How a failed delivery is retried before the next endpoint is used, within the
            time limit of a delivery. An error that is the endpoint's reply is retried only if
            `retry_on` or `retry` is set.
        max_threads: How many calls of a sync `send` run at once.

    Raises:
        ConfigurationError: An argument is not valid.
        InvalidTopicError: One of `topics` is not a valid pattern.
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
        self.deliver = AsyncCall(send, max_threads)
        """Awaits `send`, sync or async."""
        # One thread: a check that hangs is not started a second time.
        self.run_check = None if check is None else AsyncCall(check, 1)
        """Awaits `check`, sync or async."""
        self.in_flight = 0
        """Deliveries in flight."""
        self.delivered = 0
        """Deliveries that succeeded."""
        self.failed = 0
        """Deliveries that failed; cancelled ones are not counted."""

    def serves(self, topic: str) -> bool:
        """Return whether one of its patterns matches `topic`."""
        return any(pattern.matches(topic) for pattern in self.topics)

    def has_tags(self, tags: Mapping[str, str]) -> bool:
        """Return whether it has all these tags, with these values."""
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
    """Endpoints by id and group. Safe to read and change from any thread.

    ```python
    endpoints = EndpointRegistry()
    endpoints.register(Endpoint("worker-1", send, group="billing", tags={"zone": "north"}))
    endpoints.members("billing")
    ```
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Both are replaced as a whole, never modified.
        self._by_id: dict[str, Endpoint] = {}
        self._members: dict[str, tuple[Endpoint, ...]] = {}

    def register(self, endpoint: Endpoint) -> Endpoint:
        """Add an endpoint.

        Raises:
            DuplicateHandlerError: An endpoint or a group has this id.
            ConfigurationError: It is not an `Endpoint`, or its group has the id of an endpoint.
        """
        given = cast("object", endpoint)
        if not isinstance(given, Endpoint):
            message = f"{given!r:.80} is not an Endpoint. Make one: Endpoint(endpoint_id, send)."
            raise ConfigurationError(message)
        with self._lock:
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
        """Remove an endpoint; return whether it was registered. Deliveries in flight finish."""
        with self._lock:
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
        """Return the endpoint of this id, or `None`."""
        return self._by_id.get(endpoint_id)

    def members(self, name: str) -> tuple[Endpoint, ...]:
        """Return the endpoint of this id, or all of this group, in order of registration."""
        return self._members.get(name, ())

    def discover(
        self, pattern: str = "**", *, tags: Mapping[str, str] | None = None
    ) -> list[Endpoint]:
        """Return the endpoints whose id matches a pattern and that have all these tags.

        Raises:
            InvalidTopicError: `pattern` is not valid.
        """
        wanted = TopicPattern(pattern)
        return [
            endpoint
            for name, endpoint in self._by_id.items()
            if wanted.matches(name) and endpoint.has_tags(tags or {})
        ]

    def serving(self, topic: str, *, tags: Mapping[str, str] | None = None) -> list[Endpoint]:
        """Return the endpoints that serve a topic and have all these tags."""
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
