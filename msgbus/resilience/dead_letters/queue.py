"""`DeadLetterQueue`: finds, replays, edits and discards dead letters, and reports what it lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

from typing_extensions import Unpack

from msgbus.errors import BusStateError, DeadLetterError, LetterNotFoundError
from msgbus.messages.message import Message, Query, SystemEvent, set_meta
from msgbus.messages.metadata import Metadata
from msgbus.messages.system_events import (
    DeadLetterDroppedEvent,
    DeadLetteredEvent,
    DeadLetterRefusedEvent,
)
from msgbus.resilience.dead_letters.entry import (
    DeadLetterEntry,
    LetterStatus,
    edited_letter,
    letter_about,
)
from msgbus.resilience.dead_letters.files import (
    Destination,
    ImportReport,
    read_letters,
    write_letters,
)
from msgbus.resilience.dead_letters.filters import (
    LetterFilters,
    LetterQuery,
    MessageTypes,
    ReplayFilters,
    checked_limit,
    letters_meant,
)
from msgbus.resilience.dead_letters.memory import MemoryDeadLetterStore
from msgbus.resilience.dead_letters.replay import (
    LetterReplayReport,
    OnProgress,
    OnSettled,
    Redeliver,
    Replayer,
    ReplayOutcome,
)
from msgbus.resilience.dead_letters.store import (
    DeadLetterStore,
    LetterGroup,
    LetterPage,
    Notice,
    discarded,
    edited,
    unanswered,
)
from msgbus.runtime.arguments import require_members
from msgbus.runtime.clock import Clock, SystemClock
from msgbus.runtime.event_loop import current_runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

if TYPE_CHECKING:
    from msgbus.runtime.event_loop import Runtime

Letter: TypeAlias = "DeadLetterEntry | str"
"""A letter, or its id."""

IsWanted: TypeAlias = "Callable[[type[SystemEvent]], bool]"
"""Tells whether somebody wants events of a class; may be called in any thread."""


@final
class DeadLetterQueue:
    """Messages that handlers could not handle, kept until somebody decides.

    Letters and letter ids serve equally as arguments. All times are by the clock.

    Args:
        store: Where letters are kept; in memory, up to 10,000, unless given.
        clock: Where time comes from; the system's unless given.
    """

    def __init__(self, store: DeadLetterStore | None = None, *, clock: Clock | None = None) -> None:
        if store is not None:
            fix = "Give a store such as SqliteDeadLetterStore(path), or all of DeadLetterStore."
            require_members(store, DeadLetterStore, "The store of dead letters", fix)
        self.store: DeadLetterStore = MemoryDeadLetterStore() if store is None else store
        self._clock: Clock = SystemClock() if clock is None else clock
        self._replayer = Replayer(self.store, self._clock)
        self._redeliver: Redeliver | None = None
        self.store.listen(self._lost)
        self.added = 0
        """Letters that were taken."""
        self.dropped = 0
        """Letters dropped by a full store."""
        self.refused = 0
        """Letters that were not taken, or could not be kept."""
        self._counting = threading.Lock()
        self._runtime: Runtime | None = None
        """Where callbacks run; in the thread that found out, if there is none."""
        self._callbacks: list[tuple[Callable[[SystemEvent], object], IsWanted | None]] = []

    @property
    def size(self) -> int:
        """Letters that are dead and kept; read at once, from any thread."""
        return self.store.size()

    async def open(self) -> None:
        """Open the store, and take back letters whose replay ended with its process.

        From now on callbacks run on this event loop, whichever thread finds something out.

        Raises:
            DeadLetterStoreError: The store cannot be opened.
        """
        self._runtime = current_runtime()
        await self.store.open()
        await self.store.release()

    async def close(self) -> None:
        """Keep what was added, and close the store."""
        await self.store.close()
        self._runtime = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def connect(self, redeliver: Redeliver, on_settled: OnSettled | None = None) -> None:
        """Set the function that hands a message to one handler once more.

        `redeliver` gets the letter: `letter.message` with its own id, and by `letter.handler`,
        `letter.scope` and `letter.target` the one handler it is of. It gives the handler's
        reply, or raises what the handler raised; it may `add` the letter again itself. If that
        handler cannot be reached it raises `UndeliverableLetterError`. `on_settled` is called
        when messages that were parked behind a letter may go on.
        """
        self._redeliver = redeliver
        if on_settled is not None:
            self._replayer.on_settled = on_settled

    def on_event(
        self, callback: Callable[[SystemEvent], object], is_wanted: IsWanted | None = None
    ) -> None:
        """Call this with each `DeadLetteredEvent`, `...DroppedEvent` and `...RefusedEvent`.

        Args:
            callback: The function.
            is_wanted: Tells whether to make and pass an event of a class; always unless given.
        """
        self._callbacks.append((callback, is_wanted))

    # -- letters come --------------------------------------------------------------------------

    def add(
        self,
        message: Message,
        *,
        handler: str,
        error: BaseException,
        attempts: int,
        first_attempt: datetime | float,
        last_attempt: datetime | float | None = None,
        reason: str,
        answered: bool = False,
        scope: str | None = None,
        target: str = "",
    ) -> DeadLetterEntry | None:
        """Add a message that finally failed; return its letter, or `None` if it was refused.

        Never waits and never raises: the caller has trouble enough. What is refused is counted,
        logged and told. A message that was dead-lettered by this handler before updates its
        letter; the one returned is about this time only. Queries only read: they are neither
        kept nor counted.

        Args:
            message: What could not be handled.
            handler: The name of the handler.
            error: What it raised last.
            attempts: Attempts since it was last dead-lettered.
            first_attempt: Time of the first; a moment, or the clock's `time()`.
            last_attempt: Time of the last; now unless given.
            reason: Why it was dead-lettered.
            answered: Whether the command's caller sees the failure.
            scope: The session whose handler it is; the bus's unless given.
            target: What the handler is registered for, as `Registration.target_key` says it.
        """
        if isinstance(message, Query):
            return None
        try:
            letter = letter_about(
                message,
                handler=handler,
                error=error,
                attempts=attempts,
                first_attempt=first_attempt,
                last_attempt=self._clock.time() if last_attempt is None else last_attempt,
                reason=reason,
                answered=answered,
                scope=scope,
                target=target,
            )
            refused = self.store.add(letter)
        except Exception as trouble:  # the border to the store
            self._refuse(type(message).__wire__.name, handler, None, redact_exception(trouble))
            return None
        if refused is not None:
            self._lost(Notice("refused", letter, refused))
            return None
        with self._counting:
            self.added += 1
        if self._callbacks:
            self._tell(DeadLetteredEvent, letter, letter.reason)
        return letter

    def _refuse(self, message_type: str, handler: str, letter_id: str | None, reason: str) -> None:
        """Count and log a message that did not become a letter, or was not kept."""
        with self._counting:
            self.refused += 1
        log.error(
            "dead_letter_refused",
            message_type=message_type,
            handler=handler,
            letter_id=letter_id,
            reason=reason,
        )

    def _lost(self, notice: Notice) -> None:
        """Count, log and report a letter that is lost; called in any thread."""
        letter, reason = notice.letter, notice.reason
        event_type: type[SystemEvent] = DeadLetterRefusedEvent
        if notice.kind == "refused":
            self._refuse(letter.message_type, letter.handler, letter.letter_id, reason)
        else:
            event_type = DeadLetterDroppedEvent
            with self._counting:
                self.dropped += 1
            log.warning(
                "dead_letter_dropped",
                message_type=letter.message_type,
                handler=letter.handler,
                letter_id=letter.letter_id,
                reason=reason,
            )
        self._tell(event_type, letter, reason)

    def _tell(self, event_type: type[SystemEvent], letter: DeadLetterEntry, reason: str) -> None:
        """Call those who listen, on the event loop of the queue."""
        runtime, event = self._runtime, None
        if runtime is not None and runtime.thread_id != threading.get_ident():
            runtime.call_soon(partial(self._tell, event_type, letter, reason))
            return
        for callback, is_wanted in self._callbacks:
            try:
                if is_wanted is None or is_wanted(event_type):
                    event = event or _event(event_type, letter, reason)
                    callback(event)
            except Exception as error:  # the border to user code
                log.error(
                    "dead_letter_callback_failed", error=redact_exception(error), traceback=error
                )

    # -- letters are looked at -------------------------------------------------------------------

    def find(
        self,
        message_type: MessageTypes = None,
        *,
        limit: int | None = None,
        **filters: Unpack[LetterFilters],
    ) -> LetterQuery:
        """Find letters that fit all of this, in the order in which they first came.

        Await it for a list, or go through it with `async for`. `since` and `until` (not
        included) are about its last attempt.
        """
        return LetterQuery(self.store, letters_meant(message_type, filters), checked_limit(limit))

    async def page(
        self,
        message_type: MessageTypes = None,
        *,
        after: str | None = None,
        limit: int = 100,
        **filters: Unpack[LetterFilters],
    ) -> LetterPage:
        """Return one page of the same; `after` is the `cursor` of the page before."""
        checked_limit(limit)
        which = letters_meant(message_type, filters)
        return (await self.store.page(which, after=after, limit=limit)).whole()

    async def get(self, letter_id: Letter) -> DeadLetterEntry:
        """Return one letter, as it is now.

        Raises:
            LetterNotFoundError: There is none of this id.
        """
        return _found(await self.store.get(_id(letter_id)), letter_id)

    async def count(
        self, message_type: MessageTypes = None, **filters: Unpack[LetterFilters]
    ) -> int:
        """Return the number of letters that fit."""
        return await self.store.count(letters_meant(message_type, filters))

    async def groups(
        self, message_type: MessageTypes = None, **filters: Unpack[LetterFilters]
    ) -> Sequence[LetterGroup]:
        """Group letters by error type, handler and message type; the largest group first."""
        return await self.store.groups(letters_meant(message_type, filters))

    # -- letters are dealt with ------------------------------------------------------------------

    async def discard(self, letter: Letter, reason: str) -> DeadLetterEntry:
        """Discard a letter, which stays as a record; those parked behind it go on.

        Raises:
            LetterNotFoundError: There is no such letter.
            LetterStateError: It is being replayed, or was dealt with in another way.
        """
        found = await self.store.change(_id(letter), lambda old: discarded(old, reason))
        await self._replayer.on_settled()
        return _found(found, letter)

    async def mark_unanswered(self, letter: Letter) -> DeadLetterEntry:
        """Note that a command's caller got no answer, so that `replay_all` takes it along.

        Raises:
            LetterNotFoundError: There is no such letter.
        """
        return _found(await self.store.change(_id(letter), unanswered), letter)

    async def edit(self, letter: Letter, **changes: Any) -> DeadLetterEntry:
        """Change fields of a letter's message: a new letter, to be replayed in its place.

        The new message has an id of its own, the old one's as its cause, and the same
        correlation, session and headers. The old letter is marked as edited, in the same step.

        Raises:
            LetterNotFoundError: There is no such letter.
            LetterStateError: It is not dead.
            LetterEditError: The message would not be valid.
            UnreadableLetterError: The message's class is not imported.
        """
        old = await self.get(letter)
        new = edited_letter(old, changes)
        step = partial(edited, successor=new)
        found = await self.store.change(old.letter_id, step, successor=new)
        await self._replayer.on_settled()
        _found(found, letter)
        return new

    async def replay(self, letter: Letter) -> ReplayOutcome:
        """Hand a letter's message to the handler that failed, and to no other.

        The message keeps its id. A letter that is done is skipped, so that a second replay
        does nothing; so is one that another process replays at this moment. A letter whose
        handler is not here is skipped too, and stays as it is: the handler must have the same
        name, be registered for the same messages, on the bus or in a live session of the same
        id. A failure updates the letter. If the process dies on the way, the letter is dead
        again: should that be after the handler has succeeded and before this is noted, a replay
        repeats its effect.

        Raises:
            LetterNotFoundError: There is no such letter.
            BusStateError: No bus is connected.
        """
        redeliver = self._connected()
        return await self._replayer.replay(await self.get(letter), redeliver)

    async def replay_all(
        self,
        message_type: MessageTypes = None,
        *,
        rate: float | None = None,
        dry_run: bool = False,
        progress: OnProgress | None = None,
        answered: bool = False,
        **filters: Unpack[ReplayFilters],
    ) -> LetterReplayReport:
        """Replay all dead letters that fit, one by one, in the order in which they came.

        Each is attempted once, and letters that come from now on are left for the next time. It may
        be cancelled, or killed, and called again: what was handled is not handled again, but
        for the one letter that was being handled when the process was killed. Several
        processes may do it at once, and share the letters. One that cannot be read, claimed or
        delivered is counted as failed or skipped, and does not stop the others.

        Args:
            message_type: Which messages; all unless given.
            rate: Letters a second; as fast as they are handled unless given.
            dry_run: Deliver nothing; only count, and find letters that cannot be read.
            progress: Called after each letter with how many are through, and how many there are.
            answered: Also replay commands whose caller saw the failure.
            **filters: As for `find`.

        Raises:
            BusStateError: No bus is connected.
        """
        if rate is not None and rate <= 0:
            raise DeadLetterError(f"rate is {rate}; it must be above 0 letters a second.")
        redeliver = _nobody if dry_run else self._connected()
        await self.store.release()
        which = letters_meant(message_type, filters)
        return await self._replayer.replay_all(
            replace(which, status=LetterStatus.DEAD, upto=await self.store.head()),
            redeliver,
            answered=answered,
            rate=rate,
            dry_run=dry_run,
            progress=progress,
        )

    async def export(
        self,
        destination: Destination,
        message_type: MessageTypes = None,
        **filters: Unpack[LetterFilters],
    ) -> int:
        """Write letters to a file, one JSON object a line; return how many. All unless filtered.

        Raises:
            DeadLetterError: The file cannot be written.
        """
        filters.setdefault("status", None)
        return await write_letters(self.store, letters_meant(message_type, filters), destination)

    async def import_(self, source: Destination) -> ImportReport:
        """Add the letters of an exported file; those that are there already stay as they are.

        Every line is checked, field by field, before any letter is added.

        Raises:
            DeadLetterError: A line is no letter; then nothing was added.
        """
        return await read_letters(self.store, source)

    # -- inside --------------------------------------------------------------------------------

    def _connected(self) -> Redeliver:
        if self._redeliver is None:
            raise BusStateError(
                "These dead letters belong to no bus, so there is nobody to handle them. Use "
                "bus.dead_letters of a ResilientMessageBus, or connect(...) a function."
            )
        return self._redeliver


def _id(letter: Letter) -> str:
    return letter if isinstance(letter, str) else letter.letter_id


def _found(found: DeadLetterEntry | None, letter: Letter) -> DeadLetterEntry:
    if found is None:
        raise LetterNotFoundError(_id(letter))
    return found


async def _nobody(letter: DeadLetterEntry) -> object:
    raise AssertionError(f"a dry run delivered {letter.letter_id}")


def _event(event_type: type[SystemEvent], letter: DeadLetterEntry, reason: str) -> SystemEvent:
    """Make the event about a letter, caused by the letter's message."""
    values = {name: getattr(letter, name) for name in event_type.model_fields}
    event = event_type(**{**values, "reason": reason})
    meta = Metadata(
        correlation_id=letter.correlation_id,
        causation_id=letter.message_id,
        session_id=letter.session_id,
        headers=letter.headers,
        fixed=True,
    )
    set_meta(event, meta)
    return event
