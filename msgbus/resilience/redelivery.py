"""Handing a dead letter's message to the one handler it died in, and to no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import anyio

from msgbus.errors import BusClosedError, ConfigurationError
from msgbus.messages import Command, Event, Message
from msgbus.queue import Gated

if TYPE_CHECKING:
    from msgbus.core import BusCore
    from msgbus.lanes import Lane


async def redeliver(core: BusCore, message: Message, handler: str) -> Exception | None:
    """Have `handler` handle `message` once more; what it failed with, if it did."""
    core.require_open("replay dead letters on")
    if isinstance(message, Command):
        result = await core.bus.execute(cast("Command[object]", message))
        return None if result.success else cast("Exception", result.exception)
    event = cast("Event", message)
    lane = _lane_of(core, event, handler)
    if lane is None:
        text = (
            f"There is no handler named {handler!r} for {type(event).__name__} any more, so its "
            f"dead letter cannot be replayed. Register it under that name, or discard the letter."
        )
        return ConfigurationError(text)
    core.require_runtime()
    done = anyio.Event()
    item = Gated(event, None, (), lambda _: done.set())
    # One pair that no publish has counted: without this more would be handled than admitted.
    core.ledger.event(type(event).__name__).pairs += 1
    lane.queue.push(item)
    await done.wait()
    if item.is_handled:
        return None
    if isinstance(item.error, Exception):
        return item.error
    return BusClosedError(f"The bus stopped before {handler} was done with it.")


def _lane_of(core: BusCore, event: Event, handler: str) -> Lane | None:
    durable = None if core.durability is None else core.durability.subscribers.named(handler)
    if durable is not None:
        return core.lane_of(durable.registration, None)
    session = core.sessions.get(event.session_id) if event.session_id else None
    session_id = None if session is None else session.session_id
    for registration in core.registry.event_handlers(type(event), session_id):
        if registration.name == handler:
            return core.lane_of(registration, session)
    return None
