"""ResilientMessageBus: a message bus that only assembles more around each handler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from textwrap import indent
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, cast
from weakref import WeakKeyDictionary

import anyio
from typing_extensions import Unpack

from msgbus.bus.bus import MessageBus
from msgbus.bus.context import frame_about
from msgbus.errors import (
    ConfigurationError,
    DeadLetterError,
    MessageDepthError,
    Refusal,
)
from msgbus.handlers.config import BusConfig
from msgbus.messages.message import Event, Message, R, SystemEvent, first_message, metadata_of
from msgbus.messages.system_events import RetryScheduledEvent
from msgbus.middleware.concurrency import ConcurrencyLimitMiddleware
from msgbus.middleware.rate_limit import RateLimitMiddleware
from msgbus.resilience.breaker import CircuitBreaker
from msgbus.resilience.circuits import Circuits
from msgbus.resilience.config import CircuitBreakerConfig, RateLimit, RetryAttempt, RetryConfig
from msgbus.resilience.dead_letters import DeadLetterQueue
from msgbus.resilience.guard import Guard, marking
from msgbus.resilience.letters import DeadLetterEntry
from msgbus.resilience.memory_store import MemoryDeadLetterStore
from msgbus.resilience.policy import Breaker, Policy, PolicyBook, PolicyOptions, Target, describe
from msgbus.resilience.redelivery import redeliver
from msgbus.resilience.stores import DeadLetterStore
from msgbus.runtime.arguments import refuse_unknown
from msgbus.runtime.timeouts import with_timeout
from msgbus.telemetry.logging import ids_of, log
from msgbus.telemetry.redaction import redact_exception
from msgbus.telemetry.stats import BusStats

if TYPE_CHECKING:
    from msgbus.bus.context import Frame
    from msgbus.bus.lanes.lane import Lane
    from msgbus.bus.plans import CommandPlan
    from msgbus.bus.session import BusSession
    from msgbus.handlers.filters import FilterLike
    from msgbus.handlers.injection import Call, Resolver
    from msgbus.handlers.registration import Registration
    from msgbus.handlers.registry import HandlerRegistry, IRegistry
    from msgbus.messages.results import CommandResult, FailedResult
    from msgbus.middleware.chain import Middleware
    from msgbus.resilience.retry import Trouble
    from msgbus.runtime.clock import Clock
    from msgbus.runtime.event_loop import Runtime
    from msgbus.subscriptions.config import RetryTiers


DEFAULT_RETRY: Final = RetryConfig()
DEFAULT_BREAKER: Final = CircuitBreakerConfig()


class BusOptions(TypedDict, total=False):
    """What a resilient bus takes as every bus does."""

    registry: IRegistry | None
    registries: Sequence[HandlerRegistry]
    middleware: Sequence[Middleware]
    filters: Sequence[FilterLike]
    provide: Mapping[Any, object] | None
    resolver: Resolver | None
    journal: str | object | None
    clock: Clock | None


class ResilientMessageBus(MessageBus):
    """A `MessageBus` whose handlers are retried, guarded and, in the end, not forgotten.

    One stated order around each handler, outermost first: middleware per message, fallback,
    retry, breaker, bulkhead, rate limit, timeout, middleware per attempt, the handler.

    An open circuit fails commands at once, with `CircuitOpenError`; a lane waits for it, so
    that an outage does not burn its backlog. A `Refusal` passes through untouched: nothing
    broke. Everything else is as on a plain bus. `start` opens the dead letters first, and raises
    `DeadLetterStoreError` if that fails. Circuits and dead letters stay when the bus is stopped
    and started again.

    Args:
        config: Sizes and times.
        retry: Whether and when to try again; `None` for never.
        breaker: When to stop calling a handler for a while; each function has its own
            circuit, in all sessions, unless a `CircuitBreaker` or a name is given to share.
            `None` for never.
        timeout: Seconds that one try may take.
        bulkhead: How many calls of one handler may run at once.
        rate_limit: How many calls of one handler may begin per second.
        fallback: What to answer when all else failed: a value, or a function of message
            and error.
        dead_letters: Where to keep what fails for good: a store, a queue, `"memory"` for
            up to 10,000 letters in memory, `None` for nowhere. Unless given, in the journal
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
        self._policies = PolicyBook(default)
        self._guards: WeakKeyDictionary[Registration, Guard] = WeakKeyDictionary()
        super().__init__(config, **options)
        self._circuits = Circuits(self._core, breaker)
        if isinstance(breaker, CircuitBreaker):
            self._circuits.adopt(breaker)
        self._are_letters_journaled = dead_letters == "auto" and options.get("journal") is not None
        if dead_letters == "auto":
            dead_letters = self._in_journal() if self._are_letters_journaled else "memory"
        self._letters = _queue_of(dead_letters, self._core.clock)
        if self._letters is not None:
            self._letters.connect(partial(redeliver, self._core))
            self._letters.on_event(self._letter_told)

    # -- policies ----------------------------------------------------------------------------

    def policy(self, target: Target, **changes: Unpack[PolicyOptions]) -> None:
        """Say what is different for a message class and its subclasses, or for one handler.

        Parts that are not named stay as they are; `None` leaves a part out. What is said of a
        handler comes before what is said of its message class, and that before the default.

        Raises:
            ConfigurationError: There is no such part, or its value is impossible.
            BusStateError: The bus runs; what is around a handler is built once for each start.
        """
        self._core.require_set_up("Policies")
        breaker = changes.get("breaker")
        if isinstance(breaker, CircuitBreaker):
            self._circuits.adopt(breaker)
        self._policies.change(target, cast("Mapping[str, Any]", changes))
        self._guards.clear()
        self._circuits.let_go()
        for session in self._core.sessions.values():
            session.attachments.clear()
        for lane in self._core.lanes.values():
            lane.is_retried = self.is_retried(lane.registration)
        self._core.refresh()

    def describe(self, message_type: type[Message]) -> str:
        """What stands around each handler of `message_type`, in words, outermost first."""
        registry = self._core.registry
        handlers = list(registry.event_handlers(message_type, None))
        command = registry.command_handler(message_type, None)
        if command is not None:
            handlers.append(command)
        if not handlers:
            return f"{message_type.__name__} has no handler on this bus."
        texts: list[str] = []
        for registration in handlers:
            self._guard(registration, None)  # its circuit has its final name now
            lines = indent(self.policy_in_words(registration), "  ")
            texts.append(f"{message_type.__name__} in {registration.name}:\n{lines}")
        return "\n".join(texts)

    def policy_in_words(self, registration: Registration) -> str:
        """What stands around one handler, outermost first; for the bus's parts."""
        policy = self._policy_of(registration)
        if registration.timeout is not None:
            policy = replace(policy, timeout=registration.timeout)
        circuit = self._circuits.name_of(registration, policy.breaker)
        return "\n".join(describe(policy, circuit))

    def _policy_of(self, registration: Registration) -> Policy:
        policy = self._policies.of(registration)
        if self._core.is_durable(registration) and self._tiers(registration) is not None:
            # Its subscription tries again, and still knows after a restart how often it has.
            return replace(policy, retry=None)
        return policy

    # -- dead letters ------------------------------------------------------------------------

    @property
    def dead_letters(self) -> DeadLetterQueue:
        """What failed for good: to look at, edit, replay or discard.

        Raises:
            ConfigurationError: This bus keeps none.
        """
        if self._letters is None:
            message = "This bus keeps no dead letters: it was made with dead_letters=None."
            raise ConfigurationError(message)
        return self._letters

    def _in_journal(self) -> DeadLetterStore:
        # Not at the top: a bus without a journal does not pay for one.
        from msgbus.journal.letters import JournalDeadLetterStore

        # Asked for when it is needed: a journal is opened at the first use.
        return JournalDeadLetterStore(lambda: self.journal)

    async def _start(self, runtime: Runtime) -> None:
        """As on every bus; opens the dead letters first."""
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
        """Open the dead letters in the journal; called once there is one."""
        if self._letters is not None and self._are_letters_journaled:
            await self._letters.open()

    async def _journal_closing(self) -> None:
        """Write what died on the way, while there is a journal to write to."""
        if self._letters is not None:
            await self._letters.store.flush()
            self._letters.store.size()  # the last that can be known

    async def _close_down(self) -> None:
        """What died on the way is safe in its store when the bus has stopped."""
        try:
            await super()._close_down()
        finally:
            if self._letters is not None:
                await self._letters.close()

    def _failed(self, frame: CommandResult[R], error: Exception, elapsed: float) -> FailedResult[R]:
        result = super()._failed(frame, error, elapsed)
        error = result.peek_exception()
        if isinstance(error, MessageDepthError) and frame.parent is not None:
            return result  # the outermost of the calls is kept; hundreds may be below it
        plan: CommandPlan = frame.owner
        # `execute` gives the result to its caller, who sees the failure.
        letter = self._bury(
            frame, frame.message, plan.registration, error, scope=plan.scope, answered=True
        )
        if letter is not None:
            result.tell("dead_letter", letter.letter_id)
        return result

    def event_failed(self, lane: Lane, event: Event, error: BaseException) -> None:
        """Keep an event that its handler could not handle.

        Of durable handlers the journal decides: another try, or a dead letter.
        """
        if lane.is_durable:
            return
        if isinstance(error, Exception):
            self._bury(
                frame_about(event),
                event,
                lane.registration,
                error,
                scope=lane.session_id,
                answered=False,
            )

    def _bury(
        self,
        frame: Frame | None,
        message: Message,
        registration: Registration,
        error: Exception,
        *,
        scope: str | None,
        answered: bool,
    ) -> DeadLetterEntry | None:
        is_about_us = isinstance(message, SystemEvent) or metadata_of(message).from_system
        if self._letters is None or isinstance(error, Refusal) or is_about_us:
            return None
        if not self._policies.of(registration).dead_letters:
            return None
        context = None if frame is None else frame.context
        trouble: Trouble | None = None if context is None else context.trouble
        now = self._core.clock.time()
        attempts = 1 if context is None else context.attempt
        if self._core.durability is not None:
            self._core.durability.recorder.buried(message, registration.name, attempts, error)
        return self._letters.add(
            message,
            handler=registration.name,
            error=error,
            attempts=attempts,
            first_attempt=now if trouble is None else trouble.first_attempt,
            last_attempt=now if trouble is None else trouble.last_attempt,
            reason="not retried" if trouble is None else trouble.reason,
            answered=answered,
            scope=scope,
            target=registration.target_key,
        )

    def _report_unobserved(self, result: FailedResult[Any]) -> None:
        super()._report_unobserved(result)
        letter_id = result.metadata.get("dead_letter")
        runtime = self._core.runtime
        if isinstance(letter_id, str) and runtime is not None:
            # Called by the garbage collector, in any thread and at any moment.
            task = partial(self._mark_unanswered, letter_id)

            def begin() -> None:
                with suppress(RuntimeError):  # trio takes no task while its run ends
                    runtime.spawn(task, name="msgbus unanswered letter")

            runtime.call_soon(begin)

    async def _mark_unanswered(self, letter_id: str) -> None:
        try:
            await self.dead_letters.mark_unanswered(letter_id)
        except DeadLetterError as error:  # it stays out of `replay_all`, and is still there
            log.warning("letter_not_marked", letter_id=letter_id, error=redact_exception(error))

    def _letter_told(self, event: SystemEvent) -> None:
        self._core.lifecycle.tell(type(event), None, lambda: event, session_id=event.session_id)

    # -- circuits ----------------------------------------------------------------------------

    @property
    def circuits(self) -> Mapping[str, CircuitBreaker]:
        """The circuits of all handlers, and those that were named, by name.

        A circuit belongs to a function: all sessions that register it share it, and those
        that come later find it as it was left.
        """
        return MappingProxyType(self._circuits.by_name)

    def circuit(self, name: str, config: CircuitBreakerConfig | None = None) -> CircuitBreaker:
        """The circuit of this name, made if there is none: to share, to watch or to open.

        A handler's own circuit has the handler's name.

        Raises:
            ConfigurationError: There is one already, with another config.
        """
        self._make_circuits(name)
        return self._circuits.named(name, config)

    def _make_circuits(self, name: str) -> None:
        """Make the circuits of the bus's own handlers of this name, if they were not yet."""
        for session_id, registration in self._core.registry.registrations():
            if session_id is None and registration.name == name:
                self._guard(registration, None)

    # -- around each handler -------------------------------------------------------------------

    def assemble(
        self, registration: Registration, call: Call, session: BusSession | None = None
    ) -> Call:
        """Put a bound handler inside everything that belongs around it; see the class."""
        core = self._core
        guard = self._guard(registration, session)
        call = core.limit_time(registration, core.wrap(registration, call, "attempt"))
        if registration.timeout is None and guard.policy.timeout is not None:
            call = with_timeout(call, guard.policy.timeout, registration.name, core.clock)
        call = core.observed(registration, call, session, "attempt")
        for limit in guard.limits:
            call = _inside(limit, call)
        if registration.batch:
            call = _on_a_copy(call)
        call = guard.around(call)
        if any(entry.per == "message" for entry in core.middleware):
            call = marking(call)
        return core.wrap(registration, call, "message")

    def retry_tiers(self, registration: Registration) -> RetryTiers:
        """How often a durable handler tries again: as its policy says.

        A policy that cannot be kept in a journal is followed in the process, around each
        delivery.
        """
        from msgbus.subscriptions.config import RetryTiers

        return self._tiers(registration) or RetryTiers(max_attempts=1)

    def _tiers(self, registration: Registration) -> RetryTiers | None:
        from msgbus.subscriptions.tiers import tiers_of

        retry = self._policies.of(registration).retry
        return None if retry is None else tiers_of(retry)

    def writes_names(self) -> bool:
        """Whether wire names leave this process: also in dead letters that are kept in a file."""
        letters = self._letters
        in_file = letters is not None and not isinstance(letters.store, MemoryDeadLetterStore)
        return in_file or super().writes_names()

    def is_retried(self, registration: Registration) -> bool:
        """Whether a failed list is tried again by its policy, and not by its worker."""
        return self._policies.of(registration).retry is not None

    def _guard(self, registration: Registration, session: BusSession | None) -> Guard:
        """The handler's guard, which stays while chains are built anew around it."""
        guards: Any = self._guards if session is None else session.attachments
        guard: Guard | None = guards.get(registration)
        if guard is None:
            guard = guards[registration] = self._make_guard(registration, session)
        return guard

    def _make_guard(self, registration: Registration, session: BusSession | None) -> Guard:
        policy = self._policy_of(registration)
        circuit: CircuitBreaker | None = None
        breaker = policy.breaker
        is_new = (
            isinstance(breaker, CircuitBreakerConfig)
            and self._circuits.known(registration, breaker) is None
        )
        if is_new and session is not None:
            # The bus's own handlers have the first right to their names.
            self._make_circuits(registration.name)
        if breaker is not None:
            circuit = self._circuits.of(registration, breaker)
        limits: list[Middleware] = []
        if policy.rate_limit is not None:
            rate = policy.rate_limit
            rate = rate if isinstance(rate, RateLimit) else RateLimit(per_second=rate)
            limits.append(RateLimitMiddleware(rate.per_second, burst=rate.burst))
        if policy.bulkhead is not None:
            limits.append(ConcurrencyLimitMiddleware(policy.bulkhead))
        return Guard(
            registration.name,
            policy,
            circuit,
            self._core.clock,
            limits=limits,
            waits=not registration.is_command,
            on_retry=self._retry_scheduled,
            on_failure=None if session is None else self._circuits.keep,
        )

    def _retry_scheduled(self, retry: RetryAttempt) -> None:
        message = first_message(retry.message)
        text = redact_exception(retry.error)
        log.warning(
            "retry_scheduled",
            bus=self.config.name,
            handler=retry.handler,
            **ids_of(message),
            attempt=retry.attempt,
            delay=retry.delay,
            error=text,
            traceback=retry.error,
        )
        self._core.lifecycle.tell(
            RetryScheduledEvent,
            message,
            lambda: RetryScheduledEvent(
                handler=retry.handler,
                message_type=type(message).__name__,
                failed_id=metadata_of(message).message_id,
                attempt=retry.attempt,
                delay=retry.delay,
                error=text,
            ),
        )

    def stats(self) -> BusStats:
        """All counters at this moment."""
        circuits = {name: one.state.value for name, one in self.circuits.items()}
        return replace(super().stats(), circuits=circuits)

    def _count_dead_letters(self) -> int:
        return 0 if self._letters is None else self._letters.size


def _inside(limit: Middleware, call: Call) -> Call:
    return lambda message: limit(message, call)


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


def _on_a_copy(call: Call) -> Call:
    # A handler that works its list off must not leave the next try without events.
    return lambda events: call(events.copy())
