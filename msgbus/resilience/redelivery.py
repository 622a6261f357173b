"""Handing a dead letter's message to the one handler it died in, and to no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import anyio

from msgbus.bus.lanes.queue import Gated
from msgbus.errors import (
    BusClosedError,
    BusNotStartedError,
    ForeignLoopError,
    UndeliverableLetterError,
)
from msgbus.messages.message import Command, Event

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusCore
    from msgbus.bus.lanes.lane import Lane
    from msgbus.bus.session import BusSession
    from msgbus.handlers.registration import Registration
    from msgbus.resilience.letters import DeadLetterEntry


async def redeliver(core: BusCore, letter: DeadLetterEntry) -> object:
    """Have the letter's handler handle its message once more; what it replied.

    Raises:
        UndeliverableLetterError: That handler is not here, or cannot be called now.
    """
    message = letter.message
    try:
        core.require_open("replay dead letters on")
        if not isinstance(message, Command):
            core.require_runtime()
    except (BusClosedError, BusNotStartedError) as error:
        raise UndeliverableLetterError("the bus does not run") from error
    except ForeignLoopError as error:
        raise UndeliverableLetterError("the bus runs on another event loop") from error
    session = _session_of(core, letter)
    if isinstance(message, Command):
        command: Command[Any] = message  # pyright: ignore[reportUnknownVariableType]
        return await _execute(core, letter, command, session)
    await _deliver(core, letter, cast("Event", message), session)
    return None


async def _execute(
    core: BusCore, letter: DeadLetterEntry, command: Command[Any], session: BusSession | None
) -> object:
    found = core.registry.command_handler(type(command), letter.scope)
    if found is None or not _is_of(letter, found, session):
        raise _no_handler(letter)
    result = await core.bus.perform(command, session=session, is_replay=True)
    if result.success:
        return result.value
    if not result.attempts:
        # Only an open circuit keeps a command from its handler.
        raise UndeliverableLetterError("circuit open")
    return result.unwrap()


async def _deliver(
    core: BusCore, letter: DeadLetterEntry, event: Event, session: BusSession | None
) -> None:
    lane = _lane_of(core, letter, event, session)
    done = anyio.Event()
    item = Gated(event, None, (), lambda _: done.set())
    # One pair that no publish has counted: without this more would be handled than admitted.
    core.ledger.event(type(event).__name__).pairs += 1
    lane.queue.push(item)
    await done.wait()
    if isinstance(item.error, Exception):
        raise item.error
    if not item.is_handled:
        raise UndeliverableLetterError("the bus stopped before its handler was done with it")


def _session_of(core: BusCore, letter: DeadLetterEntry) -> BusSession | None:
    if letter.scope is None:
        return None
    session = core.sessions.get(letter.scope)
    if session is None:
        raise UndeliverableLetterError("its session is not live")
    return session


def _lane_of(
    core: BusCore, letter: DeadLetterEntry, event: Event, session: BusSession | None
) -> Lane:
    handlers = core.registry.event_handlers(type(event), letter.scope, letter.topic)
    found = [one for one in handlers if not core.is_durable(one) and _is_of(letter, one, session)]
    if core.durability is not None and session is None:
        durable = core.durability.subscribers.named(letter.handler)
        if durable is not None and letter.target in ("", durable.registration.target_key):
            found.append(durable.registration)
    if len(found) > 1:
        raise UndeliverableLetterError(f"{len(found)} handlers are named {letter.handler!r}")
    if not found:
        raise _no_handler(letter)
    return core.lane_of(found[0], session)


def _is_of(letter: DeadLetterEntry, registration: Registration, session: BusSession | None) -> bool:
    """Whether it is the handler that the letter is of."""
    return (
        registration.name == letter.handler
        and letter.target in ("", registration.target_key)
        and (session is None or session.owns(registration))
    )


def _no_handler(letter: DeadLetterEntry) -> UndeliverableLetterError:
    where = "on this bus" if letter.scope is None else "in its session"
    target = letter.target or letter.message_type
    return UndeliverableLetterError(f"no handler named {letter.handler!r} for {target} {where}")
