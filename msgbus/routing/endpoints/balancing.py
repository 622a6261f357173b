"""Round-robin, weighted, least-in-flight and key-based balancing of endpoints.

A balancer orders the endpoints of a group: the message goes to the first, or to the next one if
that is unhealthy. It is told which one got the message, so that the share of a failed endpoint
is spread over all others, not just the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from typing import Final, Protocol, TypeAlias, final
from weakref import WeakKeyDictionary

from msgbus.errors import ConfigurationError
from msgbus.routing.endpoints.endpoints import Endpoint


class Balancer(Protocol):
    """Order the endpoints of a group for one delivery."""

    def order(self, endpoints: Sequence[Endpoint], key: str | None) -> Sequence[Endpoint]:
        """Return all of `endpoints`, the preferred one first."""
        ...

    def took(self, endpoint: Endpoint, endpoints: Sequence[Endpoint]) -> None:
        """Note that `endpoint`, one of `endpoints`, is sent a message now."""
        ...


class RoundRobin:
    """Round-robin balancing: the least recently used endpoint first."""

    def __init__(self) -> None:
        self._deliveries = count(1)
        self._last: WeakKeyDictionary[Endpoint, int] = WeakKeyDictionary()

    def order(self, endpoints: Sequence[Endpoint], key: str | None) -> Sequence[Endpoint]:
        """Return the least recently used endpoint first."""
        del key
        return sorted(endpoints, key=self.last_delivery)

    def last_delivery(self, endpoint: Endpoint) -> int:
        """Return the number of its last delivery; 0 if it had none."""
        return self._last.get(endpoint, 0)

    def took(self, endpoint: Endpoint, endpoints: Sequence[Endpoint]) -> None:
        """Move it to the end of the order."""
        del endpoints
        self._last[endpoint] = next(self._deliveries)


@final
class LeastInFlight(RoundRobin):
    """The endpoint with the fewest deliveries in flight per weight; round-robin among equals."""

    def order(self, endpoints: Sequence[Endpoint], key: str | None) -> Sequence[Endpoint]:
        """Return the least loaded endpoint first."""
        del key
        return sorted(
            endpoints, key=lambda one: (one.in_flight / one.weight, self.last_delivery(one))
        )


@final
class ByKey(RoundRobin):
    """Rendezvous hashing: the same endpoint for the same key, in every process.

    When an endpoint leaves, only its keys move; when one joins, only those it takes over.
    Messages without a key are balanced round-robin.
    """

    def order(self, endpoints: Sequence[Endpoint], key: str | None) -> Sequence[Endpoint]:
        """Return the endpoint of this key first, then those that would take it over."""
        if key is None:
            return super().order(endpoints, key)
        return sorted(endpoints, key=lambda one: _distance(key, one))


@final
class Weighted:
    """Smooth weighted round-robin: in proportion to the weights, without bursts.

    Each message adds its weight to the credit of every endpoint, and the one that gets it pays
    the sum. Skipped endpoints gain no credit, so one that was down gets no burst when it is back.
    """

    def __init__(self) -> None:
        self._credit: WeakKeyDictionary[Endpoint, int] = WeakKeyDictionary()

    def order(self, endpoints: Sequence[Endpoint], key: str | None) -> Sequence[Endpoint]:
        """Return the endpoint with the most credit first."""
        del key
        return sorted(endpoints, key=lambda one: -self._next_credit(one))

    def took(self, endpoint: Endpoint, endpoints: Sequence[Endpoint]) -> None:
        """Add the weights of those with no more credit, and charge this one."""
        limit = self._next_credit(endpoint)
        participants = [one for one in endpoints if self._next_credit(one) <= limit]
        for one in participants:
            self._credit[one] = self._next_credit(one)
        self._credit[endpoint] -= sum(one.weight for one in participants)

    def _next_credit(self, endpoint: Endpoint) -> int:
        return self._credit.get(endpoint, 0) + endpoint.weight


def _distance(key: str, endpoint: Endpoint) -> float:
    """Return the rank of an endpoint for a key, from the key, its id and its weight."""
    # The length keeps ("a", "bc") and ("ab", "c") apart.
    text = f"{len(key)}:{key}:{endpoint.endpoint_id}"
    digest = blake2b(text.encode(), digest_size=8).digest()
    share = (int.from_bytes(digest) + 1) / (2**64 + 1)
    return -math.log(share) / endpoint.weight


Balancing: TypeAlias = str | Balancer
"""A balancer, or a name in `BALANCERS`."""

BALANCERS: Final[dict[str, Callable[[], Balancer]]] = {
    "round_robin": RoundRobin,
    "least_in_flight": LeastInFlight,
    "weighted": Weighted,
    "by_key": ByKey,
}


def make_balancer(balancing: Balancing) -> Balancer:
    """Return the balancer of a name, or the given one.

    Raises:
        ConfigurationError: The name is unknown.
    """
    if not isinstance(balancing, str):
        return balancing
    make = BALANCERS.get(balancing)
    if make is None:
        message = f"balancing={balancing!r} is not one of: {', '.join(BALANCERS)}."
        raise ConfigurationError(message)
    return make()
