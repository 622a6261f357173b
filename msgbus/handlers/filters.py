"""Event filters for the bus or one handler; combine them with `&`, `|` and `~`."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeAlias, final

from msgbus.messages.message import Event, peek
from msgbus.runtime.clock import SystemClock
from msgbus.runtime.token_bucket import TokenBucket

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock

FilterResult: TypeAlias = bool | Awaitable[bool]
FilterLike: TypeAlias = Callable[[Event], FilterResult]
"""Any callable from an event to a bool, sync or async."""


class Filter:
    """Base of filters that combine with `&`, `|` and `~`; `Filter(f)` wraps a callable.

    The other side of an operator may be any callable.
    """

    def __init__(self, predicate: FilterLike) -> None:
        self._predicate = predicate

    def __call__(self, event: Event) -> FilterResult:
        """Return whether `event` passes."""
        return self._predicate(event)

    def __and__(self, other: FilterLike) -> Filter:
        return _BinaryFilter(self, other, stop_at=False)

    def __rand__(self, other: FilterLike) -> Filter:
        return _BinaryFilter(other, self, stop_at=False)

    def __or__(self, other: FilterLike) -> Filter:
        return _BinaryFilter(self, other, stop_at=True)

    def __ror__(self, other: FilterLike) -> Filter:
        return _BinaryFilter(other, self, stop_at=True)

    def __invert__(self) -> Filter:
        return _NotFilter(self)

    def __repr__(self) -> str:
        return filter_name(self._predicate)


@final
class _BinaryFilter(Filter):
    """`&` and `|`; the right side is called only if the left does not decide."""

    def __init__(self, left: FilterLike, right: FilterLike, *, stop_at: bool) -> None:
        self._left = left
        self._right = right
        self._stop_at = stop_at

    def __call__(self, event: Event) -> FilterResult:
        result = self._left(event)
        if inspect.isawaitable(result):
            return self._later(result, event)
        return result if bool(result) is self._stop_at else self._right(event)

    async def _later(self, pending: Awaitable[bool], event: Event) -> bool:
        if bool(await pending) is self._stop_at:
            return self._stop_at
        return await passes(self._right, event)

    def __repr__(self) -> str:
        sign = "|" if self._stop_at else "&"
        return f"({filter_name(self._left)} {sign} {filter_name(self._right)})"


@final
class _NotFilter(Filter):
    def __init__(self, inner: FilterLike) -> None:
        self._inner = inner

    def __call__(self, event: Event) -> FilterResult:
        result = self._inner(event)
        if inspect.isawaitable(result):
            return self._later(result)
        return not result

    async def _later(self, pending: Awaitable[bool]) -> bool:
        return not await pending

    def __repr__(self) -> str:
        return f"~{filter_name(self._inner)}"


@final
class TypeFilter(Filter):
    """Pass events of the given types and their subclasses."""

    def __init__(self, *types: type[Event]) -> None:
        if not types:
            message = "TypeFilter needs at least one event type."
            raise ValueError(message)
        self.types = types

    def __call__(self, event: Event) -> bool:
        """Return whether the event is of one of the types."""
        return isinstance(event, self.types)

    def __repr__(self) -> str:
        return f"TypeFilter({', '.join(cls.__name__ for cls in self.types)})"


@final
class SessionFilter(Filter):
    """Pass events of the given sessions; without ids, of any session."""

    def __init__(self, *session_ids: str) -> None:
        self.session_ids = frozenset(session_ids)

    def __call__(self, event: Event) -> bool:
        """Return whether the event belongs to one of the sessions."""
        meta = peek(event)
        session_id = None if meta is None else meta.session_id
        if self.session_ids:
            return session_id in self.session_ids
        return session_id is not None

    def __repr__(self) -> str:
        return f"SessionFilter({', '.join(sorted(self.session_ids))})"


@final
class RateLimitFilter(Filter):
    """Pass at most `max_per_second` events; the rest is filtered, and counted as such.

    A token bucket: `burst` events may pass at once (default: one second's worth).

    Args:
        max_per_second: Events per second, in the long run.
        burst: Events at once, at least 1.
        key: A function from an event to its key, such as `lambda event: event.user`: each
            key has the whole rate for itself, and the key `None` is not limited. Without
            it all events share one rate.
        max_keys: Keys to remember; the least recently used is forgotten first, and starts
            with a full burst when it comes back.
        clock: The source of time.
    """

    def __init__(
        self,
        max_per_second: float,
        *,
        burst: float | None = None,
        key: Callable[[Any], Hashable | None] | None = None,
        max_keys: int = 10_000,
        clock: Clock | None = None,
    ) -> None:
        if max_per_second <= 0:
            message = f"max_per_second must be above 0, not {max_per_second}."
            raise ValueError(message)
        if burst is not None and burst < 1:
            message = f"burst must be at least 1, or nothing would ever pass; not {burst}."
            raise ValueError(message)
        if key is not None and not callable(key):
            message = f"key must be a function of an event, not {key!r:.80}."
            raise ValueError(message)
        if max_keys < 1:
            message = f"max_keys must be at least 1, not {max_keys}."
            raise ValueError(message)
        self.max_per_second = max_per_second
        self._burst = max(1.0, max_per_second) if burst is None else burst
        self._key = key
        self._max_keys = max_keys
        self._clock = clock or SystemClock()
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()
        """By key; the most recently used last."""

    def __call__(self, event: Event) -> bool:
        """Return whether there is a token left for this event."""
        key = None
        if self._key is not None:
            key = self._key(event)
            if key is None:
                return True
        now = self._clock.now()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self.max_per_second, self._burst, now)
            if len(self._buckets) > self._max_keys:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        if not bucket.allows(now):
            return False
        bucket.take(now)
        return True

    def __repr__(self) -> str:
        return f"RateLimitFilter({self.max_per_second:g}/s{' by key' if self._key else ''})"


def filter_name(predicate: FilterLike) -> str:
    """Return the name of a filter for logs and receipts."""
    if isinstance(predicate, Filter):
        return repr(predicate)
    return getattr(predicate, "__qualname__", type(predicate).__name__)


async def passes(predicate: FilterLike, event: Event) -> bool:
    """Return whether `event` passes a filter, sync or async."""
    result = predicate(event)
    if inspect.isawaitable(result):
        return bool(await result)
    return bool(result)
