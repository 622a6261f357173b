"""`Context`: the message being handled, its session, and ways to send more messages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, cast, final

from typing_extensions import TypeVar, override

from msgbus.bus.protocols import E, SendingMethods
from msgbus.messages.frame import (
    BatchItemFrame,
    HandlingContext,
    context_of,
    current_frame,
    fix_in_frame,
    frame_context_type,
)
from msgbus.messages.message import Event, Message, require_event, topic_of

if TYPE_CHECKING:
    from msgbus.bus.bus import MessageBus
    from msgbus.bus.session import BusSession
    from msgbus.bus.streams import EventStream, Expectation, Where

F = TypeVar("F", bound=Callable[..., Any])
Bus_co = TypeVar("Bus_co", bound="MessageBus", default="MessageBus", covariant=True)


def current_context() -> Context | None:
    """Get the context of the running handler; `None` outside of handlers.

    Works in sync handlers, in functions they call and in tasks they start.
    """
    frame = current_frame.get()
    return None if frame is None else cast("Context", context_of(frame))


def _in_context(method: F) -> F:
    """Call a method of the bus in this context, from any task."""
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


@frame_context_type
@final
class Context(HandlingContext, SendingMethods, Generic[Bus_co]):
    """The handling of one message. Ask for it with a parameter annotated `Context`.

    `Context[ResilientMessageBus]` is the same, and tells type checkers what `context.bus` is.
    """

    __slots__ = ()

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
        """Whether `bus.replay` delivers the message again; do not repeat external effects."""
        return self._frame.is_replay

    @property
    def topic(self) -> str:
        """The topic of the message: the one it was published under, else its class's."""
        return topic_of(self.message)

    def emit(self, event: Event) -> None:
        """Publish `event` once the handler, and all middleware around it, have succeeded.

        If they fail, the event is dropped. Works in sync handlers too.
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
        """Make one event of a batch the cause of what is sent inside."""
        frame = BatchItemFrame(event, self._frame, self)
        token = current_frame.set(frame)
        try:
            yield
        finally:
            current_frame.reset(token)

    def __repr__(self) -> str:
        return f"<Context of {type(self.message).__name__} in {self.handler}>"
