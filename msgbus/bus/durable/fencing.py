"""Fencing: refuse what a handler writes once another process has its message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from msgbus.errors import StaleError

if TYPE_CHECKING:
    from msgbus.journal.operations import Operation
    from msgbus.journal.records import Member
    from msgbus.messages.frame import Frame
    from msgbus.subscriptions.in_flight import InFlight


def deliveries_of(frame: Frame | None) -> Sequence[InFlight]:
    """Return the durable deliveries that led to what happens in `frame`, if any.

    Usually it is one; in a batch handler there are as many as events in its list.
    """
    while frame is not None and frame.delivery is None:
        frame = frame.parent
    if frame is None:
        return ()
    if not isinstance(frame.delivery, tuple):
        return (frame.delivery,)
    several = cast("tuple[InFlight | None, ...]", frame.delivery)
    return [one for one in several if one is not None]


def owned_deliveries(frame: Frame | None) -> Sequence[InFlight]:
    """Return the same, if they are still this process's own.

    Raises:
        StaleError: Another process has the message of one of them.
    """
    deliveries = deliveries_of(frame)
    _require_owned(deliveries)
    return deliveries


def guards_of(deliveries: Sequence[InFlight]) -> list[Operation]:
    """Return what refuses a commit of a handler if another process has its message by then.

    Raises:
        StaleError: Another process has it.
    """
    _require_owned(deliveries)
    # One that a commit of its handler has acknowledged goes to nobody else.
    return [guard for one in deliveries if not one.is_ended for guard in one.fences()]


def member_of(deliveries: Sequence[InFlight]) -> Member | None:
    """Return the member on whose behalf a handler commits."""
    return deliveries[0].member if deliveries else None


def _require_owned(deliveries: Sequence[InFlight]) -> None:
    for one in deliveries:
        if one.is_lost:
            message = (
                f"Message {one.offset} of {one.subscription!r} is with another process, as this "
                f"one had shown no sign of life; nothing more is written on its behalf."
            )
            raise StaleError(message)
