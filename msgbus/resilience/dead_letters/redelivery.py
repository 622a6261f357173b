"""Redelivery of a dead letter's message to the one handler that it failed in."""

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
    from msgbus.bus.session import SessionState
    from msgbus.handlers.registration import Registration
    from msgbus.resilience.dead_letters.entry import DeadLetterEntry
    from msgbus.subscriptions.in_flight import InFlight


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
    # The letter of an enqueued command is that of its queue; another one is written by the bus.
    delivery = await _delivery_of(state, letter) if letter.subscription else None
    result = await state.command_runner.perform(
        command, session=session, is_replay=delivery is None, delivery=delivery
    )
    if result.success:
        return result.value
    if not result.attempts:
        # Only an open circuit prevents the call of a command's handler.
        raise UndeliverableLetterError("circuit open")
    return result.unwrap()


async def _deliver(
    state: BusState, letter: DeadLetterEntry, event: Event, session: SessionState | None
) -> None:
    registration = _handler_of(state, letter, event, session)
    durable = None if state.durability is None else state.durability.handlers.of(registration)
    if durable is None:
        await _handle(state, registration, event, session, None)
        return
    delivery = await _delivery_of(state, letter)
    async with durable.held():
        await _handle(state, registration, event, session, delivery)


async def _handle(
    state: BusState,
    registration: Registration,
    event: Event,
    session: SessionState | None,
    delivery: InFlight | None,
) -> None:
    done = anyio.Event()
    item = Gated(event, None, (), lambda _: done.set(), delivery=delivery)
    # Counted here, as no publish has: otherwise more would be handled than admitted.
    state.counters.event(type(event).__name__).pairs += 1
    state.lane_of(registration, session).queue.push(item)
    await done.wait()
    if delivery is not None and delivery.is_ended and not delivery.is_lost:
        return  # a transaction has acknowledged it: what came after does not count
    if isinstance(item.error, Exception):
        raise item.error
    if not item.is_handled:
        raise UndeliverableLetterError("the bus stopped before its handler was done with it")


async def _delivery_of(state: BusState, letter: DeadLetterEntry) -> InFlight | None:
    """Return the claimed row of a letter in the journal of the bus: it fences its handler."""
    from msgbus.resilience.dead_letters.rows import delivery_of

    assert state.durability is not None  # noqa: S101 (only its handlers have such letters)
    return await delivery_of(state.durability.journal, letter)


def _session_of(state: BusState, letter: DeadLetterEntry) -> SessionState | None:
    if letter.scope is None:
        return None
    session = state.sessions.get(letter.scope)
    if session is None:
        raise UndeliverableLetterError("its session is not live")
    return session


def _handler_of(
    state: BusState, letter: DeadLetterEntry, event: Event, session: SessionState | None
) -> Registration:
    handlers = state.registry.event_handlers(type(event), letter.scope, letter.topic)
    found = [one for one in handlers if not state.is_durable(one) and _is_of(letter, one, session)]
    if state.durability is not None and session is None:
        durable = state.durability.handlers.named(letter.handler)
        if durable is not None and letter.target in ("", durable.registration.target_key):
            found.append(durable.registration)
    if len(found) > 1:
        raise UndeliverableLetterError(f"{len(found)} handlers are named {letter.handler!r}")
    if not found:
        raise _no_handler(letter)
    return found[0]


def _is_of(
    letter: DeadLetterEntry, registration: Registration, session: SessionState | None
) -> bool:
    """Tell whether the letter belongs to this handler."""
    return (
        registration.name == letter.handler
        and letter.target in ("", registration.target_key)
        and (session is None or session.owns(registration))
    )


def _no_handler(letter: DeadLetterEntry) -> UndeliverableLetterError:
    where = "on this bus" if letter.scope is None else "in its session"
    target = letter.target or letter.message_type
    return UndeliverableLetterError(f"no handler named {letter.handler!r} for {target} {where}")
