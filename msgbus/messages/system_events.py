"""System events, which the bus publishes about itself to handlers of their exact class."""

from __future__ import annotations

from typing import Final

from msgbus.messages.message import SystemEvent


class CommandStartedEvent(SystemEvent):
    """A command is about to be handled."""

    command_type: str
    command_id: str
    handler: str


class CommandResultEvent(SystemEvent):
    """A command succeeded or failed."""

    command_type: str
    command_id: str
    handler: str
    success: bool
    error: str | None = None
    duration: float


class SessionStartEvent(SystemEvent):
    """A session has started; `session_id` is its id."""


class SessionEndEvent(SystemEvent):
    """A session has ended and its handlers are removed; `session_id` is its id."""

    error: str | None = None
    """The error that its block raised, redacted."""

    leftovers: int = 0
    """(event, handler) pairs of its own handlers that were not finished in time."""


class EventHandlerFailedEvent(SystemEvent):
    """An event handler failed on one event."""

    handler: str
    event_type: str
    event_id: str
    error_type: str
    error: str


class EventRefusedEvent(SystemEvent):
    """An event could not be published, and no caller was waiting for the receipt."""

    event_type: str
    event_id: str
    reason: str


class RetryScheduledEvent(SystemEvent):
    """An attempt of a handler failed, and a retry follows."""

    handler: str
    message_type: str
    failed_id: str
    attempt: int
    """The number of the failed attempt, from 1."""

    delay: float
    """Seconds until the next attempt."""

    error: str


class CircuitOpenedEvent(SystemEvent):
    """A circuit breaker has opened and refuses calls for `retry_after` seconds."""

    circuit: str
    reason: str
    retry_after: float


class CircuitHalfOpenedEvent(SystemEvent):
    """A circuit breaker lets a few trial calls through."""

    circuit: str


class CircuitClosedEvent(SystemEvent):
    """A circuit breaker has closed: calls succeed again."""

    circuit: str
    reason: str


class DeadLetteredEvent(SystemEvent):
    """A message was dead-lettered; `causation_id` is its id."""

    letter_id: str
    message_type: str
    handler: str
    error_type: str
    error: str
    attempts: int
    reason: str
    answered: bool


class DeadLetterDroppedEvent(SystemEvent):
    """A full store dropped a dead letter: its message is lost."""

    letter_id: str
    message_type: str
    handler: str
    error: str
    reason: str


class DeadLetterRefusedEvent(SystemEvent):
    """The store refused a dead letter: its message is lost."""

    letter_id: str
    message_type: str
    handler: str
    error: str
    reason: str


COMMAND_EVENTS: Final = frozenset({CommandStartedEvent, CommandResultEvent})
