"""Group commit: many callers' writes as one transaction, each undone on its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple, final

from msgbus.errors import JournalError, JournalFullError, MemberEndedError, StaleError
from msgbus.journal.operations import Append
from msgbus.journal.ports import CommitParticipant
from msgbus.journal.records import Member
from msgbus.journal.sqlite.claims import JournalSteps, Renewals
from msgbus.journal.sqlite.faults import is_the_file, is_undecodable, translate
from msgbus.journal.sqlite.readers import lenient
from msgbus.runtime.event_loop import Runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception


@final
class WriteRequest:
    """A write of one caller, and its outcome.

    The writer's thread fills `value` or `error`; the reply is given on the event loop of the
    caller.
    """

    # No slots: what is seldom set stays on the class, which makes the common case cheap.
    value: Any = None
    error: BaseException | None = None
    is_abandoned = False
    """The caller was cancelled; what is not written yet need not be."""
    is_read = False
    """Whether `work` only reads."""
    is_of_user = False
    """Whether `work` runs statements of the user, whose faults are the caller's."""
    on_commit: Callable[[Any], None] | None = None
    """Called with the value on the writer's thread, once it is committed."""

    def __init__(
        self,
        runtime: Runtime,
        work: Callable[[JournalSteps], Any] | None,
        appends: Sequence[Append] = (),
        weight: int = 1,
    ) -> None:
        self.runtime = runtime
        self.reply = runtime.reply()
        self.work = work
        """What to do in a savepoint of its own; `None` for plain appends."""
        self.appends = appends
        """Plain appends: those of many callers become one statement."""
        self.weight = weight
        """Number of its operations."""

    def result(self) -> Any:
        """Return the value or raise the error, once the reply is there."""
        if self.error is not None:
            raise self.error
        return self.value

    def fail(self, error: BaseException, path: str) -> None:
        """Set the error: of SQLite as ours, but a fault in a statement of the user as it is."""
        self.value, self.error = None, error
        if isinstance(error, sqlite3.Error) and (not self.is_of_user or is_the_file(error)):
            self.error = translate(error, path)
            self.error.__cause__ = error

    def fail_with_all(self, error: BaseException, path: str) -> None:
        """Set the error of a commit that failed as a whole."""
        self.value, self.error = None, as_journal_error(error, path)


def as_journal_error(error: BaseException, path: str) -> JournalError:
    """Make an error of ours for one that a commit failed with."""
    if isinstance(error, sqlite3.Error):
        failure = translate(error, path)
    elif isinstance(error, JournalError):
        failure = JournalError(str(error), path=path)
    else:
        failure = JournalError(f"The journal {path} failed: {redact_exception(error)}", path=path)
    failure.__cause__ = error
    return failure


class Attached(NamedTuple):
    """Participants of every commit, and their member."""

    participants: tuple[CommitParticipant, ...] = ()
    member: Member | None = None
    runtime: Runtime | None = None


@final
class CommitGroup:
    """One commit and its outcome."""

    def __init__(self, requests: Sequence[WriteRequest], attached: Attached) -> None:
        self.requests = requests
        self.attached = attached
        self.riding: list[tuple[CommitParticipant, bool]] = []
        """Whose operations were asked for, and whether they were applied."""
        self.lost: list[int] = []
        """Members that were found to be ended."""
        self.lost_before = 0
        """How many of them before this commit."""
        self.error: BaseException | None = None
        self.is_full = False
        """Whether it failed because the disk is full."""
        self.has_changes = False
        self.head = 0
        self.calls: list[Callable[[], object]] = []
        """What to call on the event loop of `runtime` before the callers go on."""
        self.runtime = attached.runtime


@final
class GroupWriter:
    """Writes groups of requests, with what rides in them; used on the writer's thread."""

    def __init__(self, steps: JournalSteps, renewals: Renewals) -> None:
        self._steps = steps
        self._transaction = steps.store.transaction
        self._path = steps.store.path
        self._renewals = renewals
        self._attached = Attached()

    def attach(
        self, participants: Sequence[CommitParticipant], member: Member | None, runtime: Runtime
    ) -> None:
        """Let these ride from now on; called on the event loop."""
        self._attached = Attached(tuple(participants), member, runtime)

    def write(self, requests: Sequence[WriteRequest]) -> CommitGroup:
        """Fill `value` or `error` of each; when this returns, what succeeded is on disk."""
        for request in requests:
            request.error = None  # of an attempt before, on a full disk
        reads = [request for request in requests if request.is_read]
        writes = [request for request in requests if not request.is_read] if reads else requests
        for request in reads:
            self._run(request, partial(_work_of(request), self._steps))
        group = CommitGroup(writes, self._attached)
        if not reads or writes:
            self._write(group)
        return group

    def _write(self, group: CommitGroup) -> None:
        try:
            self._steps.begin(is_feeding=bool(group.attached.participants))
            before = self._transaction.head
            self._check_members(group)
            self._run_all(group)
            self._ride(group, before)
            self._transaction.commit()
        except BaseException as error:  # a caller must never be left waiting
            self._fail(group, error)
        self._settle(group)

    def _fail(self, group: CommitGroup, error: BaseException) -> None:
        try:
            self._transaction.roll_back()
        except sqlite3.Error as another:
            log.error("journal_rollback_failed", error=redact_exception(another))
        group.error = error
        group.is_full = isinstance(as_journal_error(error, self._path), JournalFullError)
        del group.lost[group.lost_before :]
        for request in group.requests:
            request.fail_with_all(error, self._path)
        if not group.requests:  # nobody else would hear of it
            reason = redact_exception(error)
            log.warning("member_renewal_failed", journal=self._path, error=reason)

    # -- before the requests -------------------------------------------------------------------

    def _check_members(self, group: CommitGroup) -> None:
        group.lost += self._renewals.renew(self._steps)
        self._check_attached(group)
        group.lost_before = len(group.lost)

    def _check_attached(self, group: CommitGroup) -> None:
        member = group.attached.member
        if member is not None and not self._steps.has(member.id):
            group.lost.append(member.id)
            group.attached = Attached(runtime=group.attached.runtime)

    # -- the requests --------------------------------------------------------------------------

    def _run_all(self, group: CommitGroup) -> None:
        for is_append, run in groupby(group.requests, key=_is_append):
            together = list(run)
            if is_append and self._append_all(together):
                continue
            for request in together:
                self._run_one(request, group)

    def _append_all(self, requests: list[WriteRequest]) -> bool:
        """Write appends of many callers as one statement; tell whether all of them are new."""
        store = self._steps.store
        appends: list[Append] = []
        for request in requests:
            appends += request.appends
        try:
            if len(appends) == 1 and appends[0].queue is None:
                results = store.append(appends)
            else:
                results = self._transaction.attempt(partial(store.append_new, appends))
        except Exception:
            if not self._transaction.connection.in_transaction:
                raise
            return False
        start = 0
        for request in requests:
            end = start + len(request.appends)
            request.value = results[start:end]
            start = end
        return True

    def _run_one(self, request: WriteRequest, group: CommitGroup) -> None:
        work = partial(_work_of(request), self._steps)
        self._run(request, partial(self._transaction.attempt, work))
        if isinstance(request.error, MemberEndedError):
            group.lost.append(request.error.member_id)

    def _run(self, request: WriteRequest, work: Callable[[], Any]) -> None:
        connection = self._transaction.connection
        was_writing = connection.in_transaction
        try:
            request.error = None
            request.value = self._read_on(work)
        except BaseException as error:
            if was_writing and not connection.in_transaction:
                raise
            request.fail(error, self._path)

    def _read_on(self, work: Callable[[], Any]) -> Any:
        """Run `work`; again if it meets text that is none, whose row is damaged."""
        connection = self._transaction.connection
        try:
            return work()
        except sqlite3.OperationalError as error:
            if not is_undecodable(error) or connection.text_factory is lenient:
                raise
        connection.text_factory = lenient
        return work()

    # -- what rides ----------------------------------------------------------------------------

    def _ride(self, group: CommitGroup, before: int) -> None:
        self._check_attached(group)
        group.has_changes = bool(group.requests)
        for participant in group.attached.participants:
            group.riding.append((participant, False))
            if self._is_applied(participant, group, before):
                group.riding[-1] = (participant, True)

    def _is_applied(self, participant: CommitParticipant, group: CommitGroup, before: int) -> bool:
        try:
            operations = participant.operations(self._transaction.appended, before)
            if operations:
                member = group.attached.member
                self._transaction.attempt(partial(self._steps.store.apply, operations, member))
                group.has_changes = True
        except Exception as error:
            if not self._transaction.connection.in_transaction:
                raise
            if not isinstance(error, StaleError):
                log.error("journal_participant_failed", error=redact_exception(error))
            return False
        return True

    # -- after the commit ----------------------------------------------------------------------

    def _settle(self, group: CommitGroup) -> None:
        """Tell everybody how it ended, and collect what to call on the event loop."""
        is_committed = group.error is None
        group.head = self._transaction.head
        group.has_changes = group.has_changes and is_committed
        if is_committed:
            for request in group.requests:
                if request.on_commit is not None and request.error is None:
                    request.on_commit(request.value)
        self._lose(group)
        for participant, is_applied in group.riding:
            call = _ask(partial(participant.committed, is_applied and is_committed))
            if call is not None:
                group.calls.append(call)

    def _lose(self, group: CommitGroup) -> None:
        """Leave out the participants of a member that was ended, and tell its process."""
        attached = self._attached
        if attached.member is not None and attached.member.id in group.lost:
            self._detach(attached)
        for runtime, call in self._renewals.calls(group.lost):
            if group.runtime is None:
                group.runtime = runtime
            if runtime.token is group.runtime.token:
                group.calls.append(call)
            else:
                runtime.call_soon(call)

    def _detach(self, attached: Attached) -> None:
        # Unless others were attached meanwhile, on the event loop.
        if self._attached is attached:
            self._attached = Attached()


def _ask(committed: Callable[[], Callable[[], object] | None]) -> Callable[[], object] | None:
    try:
        return committed()
    except Exception as error:
        log.error("journal_participant_failed", error=redact_exception(error))
        return None


def _is_append(request: WriteRequest) -> bool:
    return request.work is None


def _work_of(request: WriteRequest) -> Callable[[JournalSteps], Any]:
    if request.work is not None:
        return request.work
    appends = request.appends
    return lambda steps: steps.store.append(appends)


# -- answers ---------------------------------------------------------------------------------------


def answer(
    requests: Iterable[WriteRequest], calls: Sequence[Callable[[], object]], runtime: Runtime | None
) -> None:
    """Run `calls` on the event loop `runtime`, then wake the callers: one call to each loop."""
    # By runtime, not by loop: callers on one loop share theirs, as the writer keeps it.
    for where, waiting in groupby(requests, key=_runtime):
        if runtime is not None and calls and where.token is runtime.token:
            where.call_soon(_Answer(list(waiting), calls))
            calls = ()
        else:
            where.call_soon(_Answer(list(waiting)))
    if calls and runtime is not None:
        runtime.call_soon(_Answer([], calls))


_runtime: Final = attrgetter("runtime")


@final
class _Answer:
    """Runs on the event loop of the callers."""

    __slots__ = ("_calls", "_requests")

    def __init__(
        self, requests: list[WriteRequest], calls: Sequence[Callable[[], object]] = ()
    ) -> None:
        self._requests = requests
        self._calls = calls

    def __call__(self) -> None:
        for call in self._calls:
            try:
                call()
            except Exception as error:
                # On trio it would end the program, and the callers would wait for ever.
                log.error("journal_callback_failed", error=redact_exception(error))
        for request in self._requests:
            if not request.reply.done():
                request.reply.set_result(None)
