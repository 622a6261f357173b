"""What the ready middleware ask about the delivery they are in.

They read the frame itself: a `Context` is made only for those who send something from it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeAlias, cast

from msgbus.bus.context import current_frame
from msgbus.errors import ConfigurationError
from msgbus.messages.message import Message
from msgbus.runtime.clock import Clock, SystemClock

KeyOf: TypeAlias = Callable[[Any], Hashable | None]
"""From a message to what it is counted under; `None` leaves the message alone."""

_SYSTEM_CLOCK: Final = SystemClock()


def current_handler() -> str:
    """The name of the handler at work; `"unknown"` where a middleware is called by hand."""
    frame = current_frame.get()
    return "unknown" if frame is None else cast("str", frame.owner.name)


def current_attempt() -> int:
    """1 on the first try, more on a retry."""
    frame = current_frame.get()
    return 1 if frame is None else frame.attempt


def clock_at_hand(own: Clock | None) -> Clock:
    """The middleware's own clock if it was given one, else that of the bus at work."""
    if own is not None:
        return own
    frame = current_frame.get()
    return _SYSTEM_CLOCK if frame is None else cast("Clock", frame.owner.bus.clock)


def refuse_foreign_loop() -> None:
    """Raise where a handler runs on another thread than the event loop of its bus.

    Raises:
        ForeignLoopError: It does: those who wait for each other would never be woken.
    """
    frame = current_frame.get()
    if frame is not None:
        frame.owner.bus.require_home("wait in a middleware of")


def messages_in(handled: Any) -> Sequence[Message]:
    """The events of a list, or the one message."""
    return cast("list[Message]", handled) if isinstance(handled, list) else (handled,)


def require_above_zero(name: str, value: float | None) -> None:
    """Raise unless `value` is above zero, or left out.

    Raises:
        ConfigurationError: It is not.
    """
    if value is not None and not value > 0:
        message = f"{name} must be above 0, not {value}."
        raise ConfigurationError(message)
