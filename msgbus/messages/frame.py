"""Frames: the state of one message while it is being handled.

A frame is made for every message, so for speed it has no constructor and only the slots that
differ. Its context is made only for handlers that ask for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, final

from msgbus.messages.message import Event, Message, SystemEvent, fix, metadata_of, peek
from msgbus.messages.metadata import Metadata, Root

if TYPE_CHECKING:
    from msgbus.runtime.clock import Clock


class SessionHost(Protocol):
    """The session of a message, as far as its handlers use it."""

    async def keep(self, provider: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` made at the first call, and keep it until the session ends."""
        ...


class BusHost(Protocol):
    """The bus, as far as handlers, middleware and policies use it."""

    @property
    def clock(self) -> Clock:
        """The source of time."""
        ...

    def require_own_thread(self, what: str) -> None:
        """Raise if the bus runs on another thread's event loop than the caller."""
        ...

    def session_host(self, session_id: str) -> SessionHost | None:
        """Return the live session of this id, if there is one."""
        ...


class Frame:
    """One handling of one message. Subclasses add slots for what differs from a plain call."""

    __slots__ = ("_depth", "context", "message", "owner")

    message: Any
    """The message; in a batch handler the first of the list."""
    events: list[Event] | None = None
    """The list, in a batch handler."""
    owner: Any
    """The command plan or lane that handles it: has `name`, `registration`, `bus` and `host`
    (the same bus as a `BusHost`)."""
    context: HandlingContext | None
    """Made by `context_of` at the first use."""
    deadline: float | None = None
    """Clock time by which it must be done, in seconds."""
    on_lane: bool = False
    """Whether a lane is among the callers: then a publish must never wait."""
    first_attempt: int = 1
    """The number of the first attempt in this frame; above 1 for what is redelivered."""
    is_retried_later: bool = False
    """Whether the journal retries it, so that the policy need not."""
    parent: Frame | None = None
    """The frame this one was called from."""
    is_replay: bool = False
    """Whether it replays a message that was handled before."""
    delivery: Any = None
    """The delivery of a durable subscription or queue, which fences all that is written here; in a
    batch handler, a tuple with that of each of its events."""
    _depth: int

    @property
    def depth(self) -> int:
        """The number of nested handlings that led to this one; see `msgbus.bus.monitoring.depth`.

        Computed when something is first sent from here, and fixed then: the message itself
        may be sent on.
        """
        try:
            return self._depth
        except AttributeError:
            handled = [self.message] if self.events is None else self.events
            self._depth = max(meta.hops if (meta := peek(one)) else 0 for one in handled)
            return self._depth

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1; retries count it in the context."""
        return self.first_attempt if self.context is None else self.context.attempt


@final
class EventFrame(Frame):
    """One event on a lane; the worker fills the slots."""

    __slots__ = ()
    on_lane = True


@final
class DeliveryFrame(Frame):
    """One event that a durable subscription delivers."""

    __slots__ = ("delivery", "first_attempt")
    on_lane = True

    def __init__(self, event: Event, owner: Any, delivery: Any) -> None:
        self.message = event
        self.owner = owner
        self.context = None
        self.delivery = delivery
        self.first_attempt = delivery.attempt


@final
class BatchFrame(Frame):
    """A batch of events on a lane."""

    __slots__ = ("delivery", "events", "first_attempt")
    on_lane = True

    def __init__(
        self,
        events: list[Event],
        owner: Any,
        attempt: int,
        deliveries: tuple[Any, ...] | None = None,
    ) -> None:
        self.message = events[0]
        self.events = events
        self.owner = owner
        self.context = None
        self.first_attempt = attempt
        self.delivery = deliveries


@final
class ReplayFrame(Frame):
    """A recorded event, or a list of them, replayed to one handler."""

    __slots__ = ("events", "on_lane", "parent")
    is_replay = True

    def __init__(self, events: list[Event], owner: Any, *, is_list: bool) -> None:
        outer = current_frame.get()
        self.message = events[0]
        self.events = events if is_list else None
        self.owner = owner
        self.context = None
        self.on_lane = outer is not None and outer.on_lane
        self.parent = outer


@final
class BatchItemFrame(Frame):
    """One event of a batch, inside `context.handling(event)`."""

    __slots__ = ("delivery", "is_replay", "on_lane", "parent")

    def __init__(self, event: Event, outer: Frame, context: HandlingContext) -> None:
        deliveries = zip(outer.events or (), outer.delivery or (), strict=False)
        self.delivery = next((found for one, found in deliveries if one is event), None)
        self.message = event
        self.owner = outer.owner
        self.context = context
        self.on_lane = outer.on_lane
        self.is_replay = outer.is_replay
        self.parent = outer


current_frame: Final[ContextVar[Frame | None]] = ContextVar("msgbus_frame", default=None)


def frame_handling(event: Event) -> Frame | None:
    """Return the current frame if it handles `event`; `None` if no handler was called yet."""
    frame = current_frame.get()
    if frame is None:
        return None
    handled = [frame.message] if frame.events is None else frame.events
    return frame if any(one is event for one in handled) else None


class HandlingContext:
    """The part of a `Context` that msgbus itself uses; `msgbus.bus.context` has the rest.

    It has no constructor: `context_of` fills the slots, which is faster.
    """

    __slots__ = ("_frame", "attempt", "emitted", "failures", "kept", "outgoing")

    _frame: Frame
    attempt: int
    """The number of the attempt, from 1; counted before the handler is called."""
    failures: Any
    """For resilience: the failed attempts of this message so far."""
    emitted: list[Event]
    kept: int
    """For resilience: the number of emitted events before the first attempt."""
    outgoing: Callable[[], Mapping[str, str]] | None
    """For middleware: called for each new message sent from here; its headers override the
    inherited ones."""


ContextType = TypeVar("ContextType", bound=type[HandlingContext])
_context_type: type[HandlingContext] = HandlingContext


def frame_context_type(context_type: ContextType) -> ContextType:
    """Class decorator: use this class for the contexts of frames."""
    global _context_type  # noqa: PLW0603 (set once, by the module of `Context`)
    _context_type = context_type
    return context_type


def context_of(frame: Frame) -> HandlingContext:
    """Return the context of a frame; made at the first call."""
    context = frame.context
    if context is None:
        context = frame.context = _context_type()
        context._frame = frame  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        context.attempt = frame.first_attempt
        context.failures = None
        context.emitted = []
        context.kept = 0
        context.outgoing = None
    return context


def fix_in_frame(
    message: Message,
    frame: Frame | None,
    *,
    session_id: str | None = None,
    headers: Mapping[str, str] | None = None,
    topic: str | None = None,
) -> Metadata | Root:
    """Fix the cause of `message`, sent while `frame` is being handled.

    In a batch handler there is no single cause: correlation, session and headers are
    inherited only where all events of the list agree.
    """
    context = None if frame is None else frame.context
    if context is not None and context.outgoing is not None:
        sent = peek(message)
        if sent is None or not sent.fixed:
            headers = {**context.outgoing(), **(headers or {})}
    events = None if frame is None else frame.events
    if events is None:
        parent = None if frame is None else frame.message
        return fix(message, parent, session_id=session_id, headers=headers, topic=topic)
    already = peek(message)
    if already is None or not already.fixed:
        meta = metadata_of(message)
        meta.share([metadata_of(event) for event in events])
        meta.from_system |= any(isinstance(event, SystemEvent) for event in events)
    return fix(message, None, session_id=session_id, headers=headers, topic=topic)
