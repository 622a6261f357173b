"""Redelivering a dead letter's message to the one handler that it failed in."""

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
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.lanes.lane import Lane
    from msgbus.bus.session import SessionState
    from msgbus.handlers.registration import Registration
    from msgbus.resilience.letters import DeadLetterEntry


async def redeliver(state: BusState, letter: DeadLetterEntry) -> object:
    """Deliver the letter's message to its handler again, and return the reply.

    Raises:
        UndeliverableLetterError: That handler is not registered, or cannot be called now.
    """
    message = letter.message
    try:
        state.require_open("replay dead letters on")
        if not isinstance(message, Command):
            state.require_runtime()
    except (BusClosedError, BusNotStartedError) as error:
        raise UndeliverableLetterError("the bus does not run") from error
    except ForeignLoopError as error:
        raise UndeliverableLetterError("the bus runs on another event loop") from error
    session = _session_of(state, letter)
    if isinstance(message, Command):
        command: Command[Any] = message  # pyright: ignore[reportUnknownVariableType]
        return await _execute(state, letter, command, session)
    await _deliver(state, letter, cast("Event", message), session)
    return None


async def _execute(
    state: BusState, letter: DeadLetterEntry, command: Command[Any], session: SessionState | None
) -> object:
    found = state.registry.command_handler(type(command), letter.scope)
    if found is None or not _is_of(letter, found, session):
        raise _no_handler(letter)
    result = await state.command_runner.perform(command, session=session, is_replay=True)
    if result.success:
        return result.value
    if not result.attempts:
        # Only an open circuit prevents the call of a command's handler.
        raise UndeliverableLetterError("circuit open")
    return result.unwrap()


async def _deliver(
    state: BusState, letter: DeadLetterEntry, event: Event, session: SessionState | None
) -> None:
    lane = _lane_of(state, letter, event, session)
    done = anyio.Event()
    item = Gated(event, None, (), lambda _: done.set())
    # Counted here, as no publish has: otherwise more would be handled than admitted.
    state.counters.event(type(event).__name__).pairs += 1
    lane.queue.push(item)
    await done.wait()
    if isinstance(item.error, Exception):
        raise item.error
    if not item.is_handled:
        raise UndeliverableLetterError("the bus stopped before its handler was done with it")


def _session_of(state: BusState, letter: DeadLetterEntry) -> SessionState | None:
    if letter.scope is None:
        return None
    session = state.sessions.get(letter.scope)
    if session is None:
        raise UndeliverableLetterError("its session is not live")
    return session


def _lane_of(
    state: BusState, letter: DeadLetterEntry, event: Event, session: SessionState | None
) -> Lane:
    handlers = state.registry.event_handlers(type(event), letter.scope, letter.topic)
    found = [one for one in handlers if not state.is_durable(one) and _is_of(letter, one, session)]
    if state.durability is not None and session is None:
        durable = state.durability.subscribers.named(letter.handler)
        if durable is not None and letter.target in ("", durable.registration.target_key):
            found.append(durable.registration)
    if len(found) > 1:
        raise UndeliverableLetterError(f"{len(found)} handlers are named {letter.handler!r}")
    if not found:
        raise _no_handler(letter)
    return state.lane_of(found[0], session)


def _is_of(
    letter: DeadLetterEntry, registration: Registration, session: SessionState | None
) -> bool:
    """Whether the letter belongs to this handler."""
    return (
        registration.name == letter.handler
        and letter.target in ("", registration.target_key)
        and (session is None or session.owns(registration))
    )


def _no_handler(letter: DeadLetterEntry) -> UndeliverableLetterError:
    where = "on this bus" if letter.scope is None else "in its session"
    target = letter.target or letter.message_type
    return UndeliverableLetterError(f"no handler named {letter.handler!r} for {target} {where}")
