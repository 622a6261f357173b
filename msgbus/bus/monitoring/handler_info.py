"""`HandlerInfo`: what is registered, where, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

from msgbus.handlers.signatures import location_of

if TYPE_CHECKING:
    from msgbus.bus.bus_state import BusState
    from msgbus.bus.session import SessionState
    from msgbus.handlers.delivery import Mode
    from msgbus.handlers.registration import Registration
    from msgbus.messages.message import Message


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HandlerInfo:
    """One registered handler, as it was when `handlers()` was called."""

    name: str
    """Its name in logs, metrics and dead letters."""

    kind: Literal["command", "event"]
    """The kind of message that it handles."""

    message_types: tuple[type[Message], ...]
    """The classes it takes, without those below them."""

    topic: str | None
    """The pattern of topics it is registered for, if it is not for classes."""

    session_id: str | None
    """The session it belongs to; `None` for a handler of the bus."""

    module: str
    """The module where its function, or the method of its class, is written."""

    line: int | None
    """The line there; `None` for builtins."""

    handler: object = field(compare=False)
    """The function, object or class that was registered."""

    made: Literal["once", "per message"] | None
    """For a class: whether one object handles all messages, or each gets its own."""

    priority: int
    """Higher runs first."""

    concurrency: int
    """How many events it handles at once; 1 for commands, which have no such limit."""

    batch: bool
    """Whether it is given lists of events."""

    timeout: float | None
    """Seconds that one attempt may take, as given at registration."""

    mode: Mode | None
    """How it shares the journal with other processes; `None` if it is called in memory."""

    subscription: str | None
    """Its name in the journal; `None` if it is called in memory."""

    policy: str | None
    """The policy of a `ResilientMessageBus`, as text; `None` on a plain bus."""

    @property
    def target(self) -> str:
        """What it is registered for, as text: class names, or the pattern of topics."""
        return self.topic or " | ".join(cls.__name__ for cls in self.message_types)

    @property
    def is_durable(self) -> bool:
        """Whether it reads the journal, and resumes at its cursor after a restart."""
        return self.mode is not None

    def __repr__(self) -> str:
        where = self.module if self.line is None else f"{self.module}:{self.line}"
        words = [f"{self.name} for {self.kind} {self.target}", where]
        words.append("bus" if self.session_id is None else f"session {self.session_id!r}")
        if self.kind == "event":
            words.append("in memory" if self.mode is None else f"durable {self.mode.name}")
        words += [f"priority {self.priority}"] if self.priority else []
        words += [f"{self.concurrency} at once"] if self.concurrency != 1 else []
        words += ["lists"] if self.batch else []
        words += [f"made {self.made}"] if self.made else []
        return f"<HandlerInfo {', '.join(words)}>"


def all_handlers(state: BusState) -> tuple[HandlerInfo, ...]:
    """List the handlers of the bus and of its live sessions."""
    return tuple(
        _info(state, registration, None if session_id is None else state.sessions.get(session_id))
        for session_id, registration in state.registry.registrations()
    )


def session_handlers(
    state: BusState, session: SessionState, *, inherited: bool
) -> tuple[HandlerInfo, ...]:
    """List the handlers of a session; with `inherited`, those of its bus that it uses too."""
    registered = list(state.registry.registrations())
    session_id = session.session_id
    own = [_info(state, one, session) for owner, one in registered if owner == session_id]
    if not inherited:
        return tuple(own)
    find = state.registry.command_handler
    others = [
        _info(state, one, None)
        for owner, one in registered
        if owner is None and (not one.is_command or find(one.message_type, session_id) is one)
    ]
    return (*own, *others)


def _info(state: BusState, registration: Registration, session: SessionState | None) -> HandlerInfo:
    module, line = location_of(registration.handler)
    providers = state.providers if session is None else session.providers
    made: Literal["once", "per message"] | None = None
    if registration.source is not None:
        made = "once" if providers.is_singleton(registration.source) else "per message"
    durability = state.durability
    durable = None if durability is None else durability.handlers.of(registration)
    pattern = registration.pattern
    return HandlerInfo(
        name=registration.name,
        kind="command" if registration.is_command else "event",
        message_types=registration.classes,
        topic=None if pattern is None else pattern.pattern,
        session_id=None if session is None else session.session_id,
        module=module,
        line=line,
        handler=registration.handler,
        made=made,
        priority=registration.priority,
        concurrency=registration.concurrency,
        batch=registration.batch,
        timeout=registration.timeout,
        mode=None if durable is None else durable.config.mode,
        subscription=None if durable is None else durable.name,
        policy=state.assembly.describe(registration),
    )
