"""Balancing: in which order the endpoints of a group are tried.

A balancer gives an order, not a choice: the first endpoint is meant to get the message,
and the next ones are where it goes if the first is out of order. It hears which one took
it, so that the share of a lost endpoint is spread over all others, not just the next.
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
    """Puts the endpoints of a group in the order in which they are tried."""

    def order(self, endpoints: Sequence[Endpoint], key: str | None) -> Sequence[Endpoint]:
        """All of `endpoints`, the one that is to get the message first."""
        ...

    def took(self, endpoint: Endpoint, endpoints: Sequence[Endpoint]) -> None:
        """This one of `endpoints` is given a message now."""
        ...


class RoundRobin:
    """One after the other: first the one that has waited longest."""

    def __init__(self) -> None:
        self._turns = count(1)
        self._last: WeakKeyDictionary[Endpoint, int] = WeakKeyDictionary()

    def order(self, endpoints: Sequence[Endpoint], key: str | None) -> Sequence[Endpoint]:
        """The one that has waited longest first."""
        del key
        return sorted(endpoints, key=self.last_turn)

    def last_turn(self, endpoint: Endpoint) -> int:
        """When it last got a message, in turns; 0 if it never did."""
        return self._last.get(endpoint, 0)

    def took(self, endpoint: Endpoint, endpoints: Sequence[Endpoint]) -> None:
        """It goes to the end of the line."""
        del endpoints
        self._last[endpoint] = next(self._turns)


@final
class LeastInFlight(RoundRobin):
    """The one with the least to do for its weight; among equals, one after the other."""

    def order(self, endpoints: Sequence[Endpoint], key: str | None) -> Sequence[Endpoint]:
        """The idlest first."""
        del key
        return sorted(endpoints, key=lambda one: (one.in_flight / one.weight, self.last_turn(one)))


@final
class ByKey(RoundRobin):
    """The same endpoint for the same key, in every process and after every restart.

    When an endpoint goes, only its own keys move; when one comes, only those it takes over.
    Messages without a key go one after the other.
    """

    def order(self, endpoints: Sequence[Endpoint], key: str | None) -> Sequence[Endpoint]:
        """The endpoint of this key first, then the one that would follow it."""
        if key is None:
            return super().order(endpoints, key)
        return sorted(endpoints, key=lambda one: _distance(key, one))


@final
class Weighted:
    """In proportion to the weights, spread evenly rather than in bursts.

    Each endpoint gains its weight with every message; who takes the message pays for all.
    Those that were passed by gain nothing: who was down for long must not get everything
    when it is back.
    """

    def __init__(self) -> None:
        self._credit: WeakKeyDictionary[Endpoint, int] = WeakKeyDictionary()

    def order(self, endpoints: Sequence[Endpoint], key: str | None) -> Sequence[Endpoint]:
        """The richest first."""
        del key
        return sorted(endpoints, key=lambda one: -self._next_credit(one))

    def took(self, endpoint: Endpoint, endpoints: Sequence[Endpoint]) -> None:
        """All that were not richer gain their weight, and this one pays."""
        limit = self._next_credit(endpoint)
        taking_part = [one for one in endpoints if self._next_credit(one) <= limit]
        for one in taking_part:
            self._credit[one] = self._next_credit(one)
        self._credit[endpoint] -= sum(one.weight for one in taking_part)

    def _next_credit(self, endpoint: Endpoint) -> int:
        return self._credit.get(endpoint, 0) + endpoint.weight


def _distance(key: str, endpoint: Endpoint) -> float:
    """A number that depends on nothing but the key, the endpoint's id and its weight."""
    # The length keeps ("a", "bc") and ("ab", "c") apart.
    text = f"{len(key)}:{key}:{endpoint.endpoint_id}"
    digest = blake2b(text.encode(), digest_size=8).digest()
    share = (int.from_bytes(digest) + 1) / (2**64 + 1)
    return -math.log(share) / endpoint.weight


Balancing: TypeAlias = str | Balancer
"""A balancer, or the name of one: see `BALANCERS`."""

BALANCERS: Final[dict[str, Callable[[], Balancer]]] = {
    "round_robin": RoundRobin,
    "least_in_flight": LeastInFlight,
    "weighted": Weighted,
    "by_key": ByKey,
}


def make_balancer(balancing: Balancing) -> Balancer:
    """The balancer of a name, or the one that was given.

    Raises:
        ConfigurationError: There is none of this name.
    """
    if not isinstance(balancing, str):
        return balancing
    make = BALANCERS.get(balancing)
    if make is None:
        message = f"balancing={balancing!r} is none of: {', '.join(BALANCERS)}."
        raise ConfigurationError(message)
    return make()
