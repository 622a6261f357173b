"""The current delivery as middleware sees it: handler, attempt, clock, messages.

Read from the frame: a `Context` is made only for a handler that uses one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeAlias, cast

from msgbus.errors import ConfigurationError
from msgbus.messages.frame import BusHost, Frame, current_frame
from msgbus.messages.message import Message
from msgbus.runtime.clock import Clock, SystemClock

KeyOf: TypeAlias = Callable[[Any], Hashable | None]
"""Maps a message to the key it is counted under; `None` exempts the message."""

_SYSTEM_CLOCK: Final = SystemClock()


def current_handler() -> str:
    """Name of the current handler; `"unknown"` outside of a bus."""
    frame = current_frame.get()
    return "unknown" if frame is None else cast("str", frame.owner.name)


def current_attempt() -> int:
    """Number of the current attempt, from 1."""
    frame = current_frame.get()
    return 1 if frame is None else frame.attempt


def current_clock(own: Clock | None) -> Clock:
    """The middleware's own clock if it has one, else that of the current bus."""
    if own is not None:
        return own
    frame = current_frame.get()
    return _SYSTEM_CLOCK if frame is None else _host(frame).clock


def refuse_foreign_loop() -> None:
    """Raise if the handler runs on another event loop than its bus.

    Raises:
        ForeignLoopError: It does: waiting messages would never be woken.
    """
    frame = current_frame.get()
    if frame is not None:
        _host(frame).require_own_thread("wait in a middleware of")


def messages_in(handled: Any) -> Sequence[Message]:
    """The events of a list, or the single message."""
    return cast("list[Message]", handled) if isinstance(handled, list) else (handled,)


def require_above_zero(name: str, value: float | None) -> None:
    """Raise unless `value` is above zero or `None`.

    Raises:
        ConfigurationError: It is not.
    """
    if value is not None and not value > 0:
        message = f"{name} must be above 0, not {value}."
        raise ConfigurationError(message)


def _host(frame: Frame) -> BusHost:
    host: BusHost = frame.owner.host
    return host
