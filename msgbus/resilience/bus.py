"""`ResilientMessageBus`: a message bus with retries, circuit breakers and dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from textwrap import indent
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, cast

import anyio
from typing_extensions import Unpack, override

from msgbus.bus.assembly import Assembly
from msgbus.bus.bus import MessageBus
from msgbus.bus.config import BusConfig
from msgbus.errors import (
    ConfigurationError,
)
from msgbus.messages.message import (
    Message,
    SystemEvent,
)
from msgbus.resilience.assembly import ResilientAssembly
from msgbus.resilience.breaker import CircuitBreaker
from msgbus.resilience.config import (
    DEFAULT_RETRY,
    CircuitBreakerConfig,
    RateLimit,
    RetryConfig,
)
from msgbus.resilience.dead_letters.queue import DeadLetterQueue
from msgbus.resilience.dead_letters.redelivery import redeliver
from msgbus.resilience.dead_letters.store import DeadLetterStore
from msgbus.resilience.policy import Breaker, Policy, PolicyOptions, PolicyTable, Target
from msgbus.runtime.arguments import refuse_unknown
from msgbus.telemetry.stats import BusStats

if TYPE_CHECKING:
    from msgbus.handlers.filters import FilterLike
    from msgbus.handlers.injection import Resolver
    from msgbus.handlers.registry import HandlerRegistry, IRegistry
    from msgbus.journal.ports import Journal
    from msgbus.middleware.chain import Middleware
    from msgbus.runtime.clock import Clock
    from msgbus.runtime.event_loop import Runtime


DEFAULT_BREAKER: Final = CircuitBreakerConfig()


class BusOptions(TypedDict, total=False):
    """Options that a resilient bus shares with `MessageBus`."""

    registry: IRegistry | None
    registries: Sequence[HandlerRegistry]
    middleware: Sequence[Middleware]
    filters: Sequence[FilterLike]
    provide: Mapping[Any, object] | None
    resolver: Resolver | None
    journal: str | Journal | None
    clock: Clock | None


class ResilientMessageBus(MessageBus):
    """A `MessageBus` with retries, circuit breakers, limits, fallbacks and dead letters.

    The order around each handler, outermost first: middleware per message, fallback, retry,
    breaker, bulkhead, rate limit, timeout, middleware per attempt, the handler.

    An open circuit fails commands at once, with `CircuitOpenError`; a lane waits for it, so
    that an outage does not fail its backlog. A `Refusal` passes through: it is not a failure.
    Everything else is as on a plain bus. `start` opens the dead letters first, and raises
    `DeadLetterStoreError` if that fails. Circuits and dead letters stay when the bus is stopped
    and started again.

    Args:
        config: Sizes and times.
        retry: Whether and when to retry; `None` for never.
        breaker: When to stop calling a handler for a while; each function has its own
            circuit, in all sessions, unless a `CircuitBreaker` or a name is given to share.
            `None` for never.
        timeout: Seconds that one attempt may take.
        bulkhead: How many calls of one handler may run at once.
        rate_limit: How many calls of one handler may begin per second.
        fallback: The reply when everything else failed: a value, or a function of message
            and error.
        dead_letters: Where to store messages that finally failed: a store, a queue, `"memory"`
            for up to 10,000 letters in memory, `None` for nowhere. By default in the journal
            of the bus, and in memory if it has none.
        options: As for `MessageBus`.
    """

    def __init__(
        self,
        config: BusConfig | None = None,
        *,
        retry: RetryConfig | None = DEFAULT_RETRY,
        breaker: Breaker | None = DEFAULT_BREAKER,
        timeout: float | None = None,
        bulkhead: int | None = None,
        rate_limit: RateLimit | float | None = None,
        fallback: Any = None,
        dead_letters: DeadLetterQueue | DeadLetterStore | Literal["auto", "memory"] | None = "auto",
        **options: Unpack[BusOptions],
    ) -> None:
        names = (*PolicyOptions.__annotations__, "dead_letters", *BusOptions.__annotations__)
        refuse_unknown("ResilientMessageBus", options, names)
        default = Policy(
            retry=retry,
            breaker=breaker,
            timeout=timeout,
            bulkhead=bulkhead,
            rate_limit=rate_limit,
            fallback=fallback,
        )
        self._default = default
        super().__init__(config, **options)
        if isinstance(breaker, CircuitBreaker):
            self._circuits.adopt(breaker)
        self._are_letters_journaled = dead_letters == "auto" and options.get("journal") is not None
        if dead_letters == "auto":
            dead_letters = self._in_journal() if self._are_letters_journaled else "memory"
        self._letters = self._assembly.letters = _queue_of(dead_letters, self._state.clock)
        if self._letters is not None:
            self._letters.connect(partial(redeliver, self._state), self._letter_settled)
            self._letters.on_event(self._publish_letter_event, self._state.may_want)

    @override
    def _make_assembly(self) -> Assembly:
        policies, breaker = PolicyTable(self._default), self._default.breaker
        self._assembly = ResilientAssembly(self._state, policies, breaker)
        self._circuits = self._assembly.circuits
        return self._assembly

    # -- policies ----------------------------------------------------------------------------

    def policy(self, target: Target, **changes: Unpack[PolicyOptions]) -> None:
        """Change the policy of a message class and its subclasses, or of one handler.

        Parts that are not named stay as they are; `None` removes a part. The policy of a
        handler comes before that of its message class, and that before the default.

        Raises:
            ConfigurationError: There is no such part, or its value is not allowed.
            BusStateError: The bus runs; call chains are built once for each start.
        """
        self._state.require_set_up("Policies")
        breaker = changes.get("breaker")
        if isinstance(breaker, CircuitBreaker):
            self._circuits.adopt(breaker)
        self._assembly.policies.change(target, cast("Mapping[str, Any]", changes))
        self._assembly.guards.clear()
        self._circuits.forget_unused()
        for session in self._state.sessions.values():
            session.attachments.clear()
        for lane in self._state.lanes.values():
            lane.is_retried = self._assembly.is_retried(lane.registration)
        self._state.refresh()

    def describe(self, message_type: type[Message]) -> str:
        """Describe the policy of each handler of `message_type` as text, outermost first."""
        registry = self._state.registry
        handlers = list(registry.event_handlers(message_type, None))
        command = registry.command_handler(message_type, None)
        if command is not None:
            handlers.append(command)
        if not handlers:
            return f"{message_type.__name__} has no handler on this bus."
        texts: list[str] = []
        for registration in handlers:
            self._assembly.guard(registration, None)  # its circuit has its final name now
            lines = indent(self._assembly.describe(registration), "  ")
            texts.append(f"{message_type.__name__} in {registration.name}:\n{lines}")
        return "\n".join(texts)

    # -- dead letters ------------------------------------------------------------------------

    @property
    def dead_letters(self) -> DeadLetterQueue:
        """The dead letters: find, edit, replay or discard them.

        Raises:
            ConfigurationError: The bus was made with `dead_letters=None`.
        """
        if self._letters is None:
            message = "This bus keeps no dead letters: it was made with dead_letters=None."
            raise ConfigurationError(message)
        return self._letters

    def _in_journal(self) -> DeadLetterStore:
        # Not at the top: a bus without a journal does not import one.
        from msgbus.resilience.dead_letters.journal_store import JournalDeadLetterStore

        # A function: the journal is opened at first use.
        return JournalDeadLetterStore(lambda: self.journal, clock=self._state.clock)

    async def _start(self, runtime: Runtime) -> None:
        """Open the dead letters, then start as every bus does."""
        if self._letters is None or self._are_letters_journaled:
            await super()._start(runtime)
            return
        await self._letters.open()
        try:
            await super()._start(runtime)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._letters.close()
            raise

    async def _journal_opened(self) -> None:
        """Open the dead letters in the journal."""
        if self._letters is not None and self._are_letters_journaled:
            await self._letters.open()

    async def _journal_closing(self) -> None:
        """Flush the dead letters before the journal is closed."""
        if self._letters is not None:
            await self._letters.store.flush()
            self._letters.store.size()  # cached for when the journal is closed

    async def _close_down(self) -> None:
        """Close the dead letters last, so that all are in their store."""
        try:
            await super()._close_down()
        finally:
            if self._letters is not None:
                await self._letters.close()

    async def _letter_settled(self) -> None:
        """Let durable handlers go on with what was parked behind a letter."""
        if self._state.durability is not None:
            await self._state.durability.look()

    def _publish_letter_event(self, event: SystemEvent) -> None:
        self._state.system_events.publish(
            type(event), None, lambda: event, session_id=event.session_id
        )

    # -- circuits ----------------------------------------------------------------------------

    @property
    def circuits(self) -> Mapping[str, CircuitBreaker]:
        """The circuits of all handlers, and those that were named, by name.

        A circuit belongs to a function: all sessions that register it share it, later ones
        included.
        """
        return MappingProxyType(self._circuits.by_name)

    def circuit(self, name: str, config: CircuitBreakerConfig | None = None) -> CircuitBreaker:
        """Get the circuit of this name, made if there is none: to share, inspect or open it.

        A handler's own circuit has the handler's name.

        Raises:
            ConfigurationError: There is one already, with another config.
        """
        self._assembly.make_circuits(name)
        return self._circuits.named(name, config)

    def stats(self) -> BusStats:
        """All counters at this moment."""
        circuits = {name: one.state.value for name, one in self.circuits.items()}
        return replace(super().stats(), circuits=circuits)

    def _count_dead_letters(self) -> int:
        return 0 if self._letters is None else self._letters.size


def _queue_of(
    given: DeadLetterQueue | DeadLetterStore | Literal["memory"] | None, clock: Clock
) -> DeadLetterQueue | None:
    if given is None or isinstance(given, DeadLetterQueue):
        return given
    if isinstance(given, str):
        if given != "memory":
            message = (
                f'dead_letters={given!r} is not known. Give "memory", None, or a store such as '
                f"SqliteDeadLetterStore({given!r})."
            )
            raise ConfigurationError(message)
        return DeadLetterQueue(clock=clock)
    return DeadLetterQueue(given, clock=clock)
