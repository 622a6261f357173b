"""Predicates over events: on the bus, or on one handler; joined with `&`, `|` and `~`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias, final

from msgbus.clock import SystemClock
from msgbus.messages import Event, peek

if TYPE_CHECKING:
    from msgbus.clock import Clock

Verdict: TypeAlias = bool | Awaitable[bool]
FilterLike: TypeAlias = Callable[[Event], Verdict]
"""Any callable from an event to a bool, sync or async."""


class Filter:
    """Base that gives a filter the operators. Subclass it, or wrap a callable: `Filter(f)`.

    The right side of an operator may be any callable.
    """

    def __init__(self, predicate: FilterLike) -> None:
        self._predicate = predicate

    def __call__(self, event: Event) -> Verdict:
        """Whether `event` may pass."""
        return self._predicate(event)

    def __and__(self, other: FilterLike) -> Filter:
        return _Joined(self, other, stop_at=False)

    def __rand__(self, other: FilterLike) -> Filter:
        return _Joined(other, self, stop_at=False)

    def __or__(self, other: FilterLike) -> Filter:
        return _Joined(self, other, stop_at=True)

    def __ror__(self, other: FilterLike) -> Filter:
        return _Joined(other, self, stop_at=True)

    def __invert__(self) -> Filter:
        return _Not(self)

    def __repr__(self) -> str:
        return filter_name(self._predicate)


@final
class _Joined(Filter):
    """`&` and `|`: the right side is asked only if the left does not settle it."""

    def __init__(self, left: FilterLike, right: FilterLike, *, stop_at: bool) -> None:
        self._left = left
        self._right = right
        self._stop_at = stop_at

    def __call__(self, event: Event) -> Verdict:
        verdict = self._left(event)
        if inspect.isawaitable(verdict):
            return self._later(verdict, event)
        return verdict if bool(verdict) is self._stop_at else self._right(event)

    async def _later(self, pending: Awaitable[bool], event: Event) -> bool:
        if bool(await pending) is self._stop_at:
            return self._stop_at
        return await passes(self._right, event)

    def __repr__(self) -> str:
        sign = "|" if self._stop_at else "&"
        return f"({filter_name(self._left)} {sign} {filter_name(self._right)})"


@final
class _Not(Filter):
    def __init__(self, inner: FilterLike) -> None:
        self._inner = inner

    def __call__(self, event: Event) -> Verdict:
        verdict = self._inner(event)
        if inspect.isawaitable(verdict):
            return self._later(verdict)
        return not verdict

    async def _later(self, pending: Awaitable[bool]) -> bool:
        return not await pending

    def __repr__(self) -> str:
        return f"~{filter_name(self._inner)}"


@final
class TypeFilter(Filter):
    """Lets through events of the given types and their subclasses."""

    def __init__(self, *types: type[Event]) -> None:
        if not types:
            message = "TypeFilter needs at least one event type."
            raise ValueError(message)
        self.types = types

    def __call__(self, event: Event) -> bool:
        """Whether the event is of one of the types."""
        return isinstance(event, self.types)

    def __repr__(self) -> str:
        return f"TypeFilter({', '.join(cls.__name__ for cls in self.types)})"


@final
class SessionFilter(Filter):
    """Lets through events of the given sessions; with no id, of any session."""

    def __init__(self, *session_ids: str) -> None:
        self.session_ids = frozenset(session_ids)

    def __call__(self, event: Event) -> bool:
        """Whether the event belongs to one of the sessions."""
        meta = peek(event)
        session_id = None if meta is None else meta.session_id
        if self.session_ids:
            return session_id in self.session_ids
        return session_id is not None

    def __repr__(self) -> str:
        return f"SessionFilter({', '.join(sorted(self.session_ids))})"


@final
class RateLimitFilter(Filter):
    """Lets through at most so many events a second; the rest is filtered, and counted.

    A token bucket: `burst` events may come at once (default: one second's worth).
    """

    def __init__(
        self, max_per_second: float, *, burst: float | None = None, clock: Clock | None = None
    ) -> None:
        if max_per_second <= 0:
            message = f"max_per_second must be above 0, not {max_per_second}."
            raise ValueError(message)
        if burst is not None and burst < 1:
            message = f"burst must be at least 1, or nothing would ever pass; not {burst}."
            raise ValueError(message)
        self.max_per_second = max_per_second
        self._burst = max(1.0, max_per_second) if burst is None else burst
        self._clock = clock or SystemClock()
        self._tokens = self._burst
        self._last = self._clock.now()

    def __call__(self, event: Event) -> bool:
        """Whether there is a token left for this event."""
        del event
        now = self._clock.now()
        grown = self._tokens + (now - self._last) * self.max_per_second
        self._tokens = min(self._burst, grown)
        self._last = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def __repr__(self) -> str:
        return f"RateLimitFilter({self.max_per_second:g}/s)"


def filter_name(predicate: FilterLike) -> str:
    """A name for logs and receipts."""
    if isinstance(predicate, Filter):
        return repr(predicate)
    return getattr(predicate, "__qualname__", type(predicate).__name__)


async def passes(predicate: FilterLike, event: Event) -> bool:
    """The filter's verdict, sync or async."""
    verdict = predicate(event)
    if inspect.isawaitable(verdict):
        return bool(await verdict)
    return bool(verdict)
