"""What a handler may ask for: the message at hand, its session, and ways to send more.

While a message is handled, its *frame* is the current one. Frames are made for every
message, so they are built without a constructor and have only the slots that differ;
the `Context` around one is made only for handlers that ask.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Generic, cast, final

from typing_extensions import TypeVar, override

from msgbus.bus.protocols import E, SendingMethods
from msgbus.messages.message import (
    Event,
    Message,
    SystemEvent,
    fix,
    metadata_of,
    peek,
    require_event,
    topic_of,
)
from msgbus.messages.metadata import Metadata, Root

if TYPE_CHECKING:
    from msgbus.bus.bus import MessageBus
    from msgbus.bus.session import BusSession
    from msgbus.bus.streams import EventStream
    from msgbus.expectations import Expectation, Where

F = TypeVar("F", bound=Callable[..., Any])
Bus_co = TypeVar("Bus_co", bound="MessageBus", default="MessageBus", covariant=True)


class Frame:
    """One handling of one message: by a handler called from outside, as it stands.

    Subclasses have slots for what is different in other places.
    """

    __slots__ = ("_depth", "context", "message", "owner")

    message: Any
    """The message; in a batch handler the first of the list."""
    events: list[Event] | None = None
    """The list, in a batch handler."""
    owner: Any
    """The command plan or lane that handles it: has `.bus` and `.name`."""
    context: Context | None
    """Made when somebody asks for it."""
    deadline: float | None = None
    """Clock time by which it must be done."""
    on_lane: bool = False
    """Whether a lane is somewhere above: then a publish must never wait."""
    first_attempt: int = 1
    """The number of the first try in this frame; more in a list that is tried again."""
    is_retried_later: bool = False
    """Whether the journal has it tried again, so that nobody need do so at once."""
    parent: Frame | None = None
    """The frame this one was called from."""
    is_replay: bool = False
    """Whether it shows history, which has been handled in its time."""
    _depth: int

    @property
    def depth(self) -> int:
        """How many handlings led to this one; see `msgbus.bus.monitoring.depth`.

        Found at the first look, which is when something is sent from here: most frames are
        never asked. After that it stays, as the message itself may be sent on.
        """
        try:
            return self._depth
        except AttributeError:
            handled = [self.message] if self.events is None else self.events
            self._depth = max(meta.hops if (meta := peek(one)) else 0 for one in handled)
            return self._depth

    @property
    def attempt(self) -> int:
        """1 for the first try. Only what fails is tried again, so that is kept in the context."""
        return self.first_attempt if self.context is None else self.context.attempt


@final
class EventFrame(Frame):
    """One event on a lane; its worker fills the slots."""

    __slots__ = ()
    on_lane = True


@final
class RetriedFrame(Frame):
    """One event on a lane that was tried before, perhaps by another process."""

    __slots__ = ("first_attempt",)
    on_lane = True

    def __init__(self, attempt: int) -> None:
        self.first_attempt = attempt


@final
class ListFrame(Frame):
    """A list of events on a lane."""

    __slots__ = ("events", "first_attempt")
    on_lane = True

    def __init__(self, events: list[Event], owner: Any, attempt: int) -> None:
        self.message = events[0]
        self.events = events
        self.owner = owner
        self.context = None
        self.first_attempt = attempt


@final
class ReplayFrame(Frame):
    """An event of the past, or a list of them, shown to one handler."""

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
class _NarrowedFrame(Frame):
    """One event of a list, inside `context.handling(event)`."""

    __slots__ = ("is_replay", "on_lane", "parent")

    def __init__(self, event: Event, outer: Frame, context: Context) -> None:
        self.message = event
        self.owner = outer.owner
        self.context = context
        self.on_lane = outer.on_lane
        self.is_replay = outer.is_replay
        self.parent = outer


current_frame: Final[ContextVar[Frame | None]] = ContextVar("msgbus_frame", default=None)


def frame_about(event: Event) -> Frame | None:
    """The frame at hand if it handles `event`; `None` if the event failed before its handler."""
    frame = current_frame.get()
    if frame is None:
        return None
    handled = [frame.message] if frame.events is None else frame.events
    return frame if any(one is event for one in handled) else None


def current_context() -> Context | None:
    """The context of the handler that is running here; `None` outside of handlers.

    Works in sync handlers, in functions they call and in tasks they start.
    """
    frame = current_frame.get()
    return None if frame is None else context_of(frame)


def context_of(frame: Frame) -> Context:
    """The one context of a frame."""
    context = frame.context
    if context is None:
        context = frame.context = Context()
        context._frame = frame  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        context.attempt = frame.first_attempt
        context.trouble = None
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
    """Fix where `message` came from, sent while `frame` is being handled.

    In a batch handler there is no one cause; correlation, session and headers are taken
    over only where all events of the list agree.
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


def _in_context(method: F) -> F:
    """The method of the bus, called as the handler itself would: in any task, with its cause."""
    name = method.__name__

    @wraps(method)
    async def send(self: Context, *args: Any, **options: Any) -> Any:
        frame = current_frame.get()
        if frame is not None and frame.context is self:
            # Already current, or narrowed to one event by `handling`.
            return await getattr(self.bus, name)(*args, **options)
        # The context may be used from a task that was started before this handler.
        token = current_frame.set(self._frame)  # pyright: ignore[reportPrivateUsage]
        try:
            return await getattr(self.bus, name)(*args, **options)
        finally:
            current_frame.reset(token)

    return cast("F", send)


@final
class Context(SendingMethods, Generic[Bus_co]):
    """One handling of one message. Ask for it with a parameter annotated `Context`.

    `Context[ResilientMessageBus]` is the same, and tells type checkers what `context.bus` is.
    """

    __slots__ = ("_frame", "attempt", "emitted", "kept", "outgoing", "trouble")

    # It has no constructor: `context_of` fills the slots, which is measured to cost less.
    _frame: Frame
    attempt: int
    """1 on the first try, more on a retry; counted before the handler is called."""
    trouble: Any
    """For resilience: what has gone wrong with this message so far."""
    emitted: list[Event]
    kept: int
    """For resilience: how many of them were there before the first try."""
    outgoing: Callable[[], Mapping[str, str]] | None
    """For middleware: asked at each new message sent from here, for headers to put over
    those it inherits. The message at hand keeps its own."""

    @property
    def message(self) -> Message:
        """The message being handled; in a batch handler the first of the list."""
        message: Message = self._frame.message
        return message

    @property
    def bus(self) -> Bus_co:
        """The bus that handles it."""
        bus: Bus_co = self._frame.owner.bus
        return bus

    @property
    def session(self) -> BusSession | None:
        """The live session the message belongs to, if any."""
        session_id = self.message.session_id
        return None if session_id is None else self.bus.sessions.get(session_id)

    @property
    def handler(self) -> str:
        """The name of the handler."""
        name: str = self._frame.owner.name
        return name

    @property
    def deadline(self) -> float | None:
        """Clock time (`bus.clock.now()`) by which the caller wants an answer."""
        return self._frame.deadline

    @property
    def headers(self) -> Mapping[str, str]:
        """The message's headers; messages sent from here inherit them."""
        return self.message.headers

    @property
    def is_replay(self) -> bool:
        """Whether `bus.replay` shows the message again: what leaves the process need not."""
        return self._frame.is_replay

    @property
    def topic(self) -> str:
        """The topic of the message: the one it was published under, else its class's."""
        return topic_of(self.message)

    def emit(self, event: Event) -> None:
        """Publish `event` once the handler, and all middleware around it, have succeeded.

        If they fail, the event is forgotten: it speaks of something that did not happen.
        Works in sync handlers too.
        """
        require_event(event)
        # Its cause is fixed now: in a batch handler it depends on where this is called.
        frame = current_frame.get()
        mine = frame is not None and frame.context is self
        fix_in_frame(event, frame if mine else self._frame)
        self.emitted.append(event)

    execute = _in_context(SendingMethods.execute)
    publish = _in_context(SendingMethods.publish)
    publish_many = _in_context(SendingMethods.publish_many)
    request = _in_context(SendingMethods.request)
    enqueue = _in_context(SendingMethods.enqueue)

    @override
    def stream(self, event_type: type[E] | str, *, buffer: int = 1000) -> EventStream[E]:
        return self.bus.stream(event_type, buffer=buffer)

    @override
    def expect(
        self,
        event_type: type[E] | str,
        *,
        where: Where[E] | None = None,
        timeout: float | None = None,
    ) -> Expectation[E]:
        return self.bus.expect(event_type, where=where, timeout=timeout)

    @contextmanager
    def handling(self, event: Event) -> Generator[None]:
        """In a batch handler: what is sent inside is caused by this one event."""
        frame = _NarrowedFrame(event, self._frame, self)
        token = current_frame.set(frame)
        try:
            yield
        finally:
            current_frame.reset(token)

    def __repr__(self) -> str:
        return f"<Context of {type(self.message).__name__} in {self.handler}>"
