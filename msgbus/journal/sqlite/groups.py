"""Group commit: many callers' writes as one transaction, each undone on its own."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, ParamSpec, TypeVar, final

from msgbus.errors import JournalError, JournalFullError, MemberEndedError, StaleError
from msgbus.journal.operations import Append
from msgbus.journal.ports import CommitParticipant
from msgbus.journal.records import Member
from msgbus.journal.sqlite.claims import JournalSteps
from msgbus.journal.sqlite.faults import is_the_file, is_undecodable, translate
from msgbus.journal.sqlite.readers import lenient
from msgbus.runtime.event_loop import Runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

P = ParamSpec("P")
T = TypeVar("T")


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
        group = CommitGroup(requests, self._attached)
        transaction, renewals = self._transaction, self._renewals
        try:
            transaction.begin(is_feeding=bool(group.attached.participants))
            before = transaction.head
            if renewals.next <= time.monotonic():
                group.lost += renewals.renew(self._steps)
            self._check_attached(group)
            group.lost_before = len(group.lost)
            self._run_all(group)
            self._ride(group, before)
            transaction.commit()
        except BaseException as error:  # a caller must never be left waiting
            self._fail(group, error)
        else:
            for request in requests:
                if request.on_commit is not None and request.error is None:
                    request.on_commit(request.value)
        self._settle(group)
        return group

    def read(self, requests: Sequence[WriteRequest]) -> None:
        """Run those that only read, outside any transaction."""
        for request in requests:
            if request.is_read:
                try:
                    request.value = self._read_on(_work_of(request), self._steps)
                except BaseException as error:
                    request.fail(error, self._path)

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

    def _check_attached(self, group: CommitGroup) -> None:
        """Leave out the participants of a member that was ended."""
        member = group.attached.member
        if member is not None and not self._transaction.has_member(member.id):
            group.lost.append(member.id)
            group.attached = Attached(runtime=group.attached.runtime)

    # -- the requests --------------------------------------------------------------------------

    def _run_all(self, group: CommitGroup) -> None:
        together: list[WriteRequest] = []
        for request in group.requests:
            request.error = None  # of an attempt before, on a full disk
            if request.work is None:
                together.append(request)
                continue
            if together:
                self._append_all(together, group)
                together = []
            self._run(request, group)
        if together:
            self._append_all(together, group)

    def _append_all(self, requests: list[WriteRequest], group: CommitGroup) -> None:
        """Write appends of many callers as one statement; if one is refused, one by one."""
        store, transaction = self._steps.store, self._transaction
        appends = [one for request in requests for one in request.appends]
        try:
            if len(appends) == 1 and appends[0].queue is None:
                results = store.append(appends)
            else:
                results = transaction.attempt(store.append_new, appends)
        except Exception:
            if not transaction.connection.in_transaction:
                raise
            for request in requests:
                self._run(request, group)
            return
        start = 0
        for request in requests:
            end = start + len(request.appends)
            request.value = results[start:end]
            start = end

    def _run(self, request: WriteRequest, group: CommitGroup) -> None:
        """Run one request; what it did is undone if it raises."""
        transaction = self._transaction
        try:
            request.value = self._read_on(transaction.attempt, _work_of(request), self._steps)
        except BaseException as error:
            if not transaction.connection.in_transaction:
                raise
            request.fail(error, self._path)
            if isinstance(error, MemberEndedError):
                group.lost.append(error.member_id)

    def _read_on(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`; again if it meets text that is none, whose row is damaged."""
        connection = self._transaction.connection
        try:
            return function(*args, **kwargs)
        except sqlite3.OperationalError as error:
            if not is_undecodable(error) or connection.text_factory is lenient:
                raise
        connection.text_factory = lenient
        return function(*args, **kwargs)

    # -- what rides ----------------------------------------------------------------------------

    def _ride(self, group: CommitGroup, before: int) -> None:
        self._check_attached(group)
        group.has_changes = bool(group.requests)
        transaction, member = self._transaction, group.attached.member
        for participant in group.attached.participants:
            group.riding.append((participant, False))
            try:
                operations = participant.operations(transaction.appended, before)
                if operations:
                    transaction.attempt(self._steps.store.apply, operations, member)
                    group.has_changes = True
            except Exception as error:
                if not transaction.connection.in_transaction:
                    raise
                if not isinstance(error, StaleError):
                    log.error("journal_participant_failed", error=redact_exception(error))
            else:
                group.riding[-1] = (participant, True)

    # -- after the commit ----------------------------------------------------------------------

    def _settle(self, group: CommitGroup) -> None:
        """Tell everybody how it ended, and collect what to call on the event loop."""
        is_committed = group.error is None
        group.head = self._transaction.head
        group.has_changes = group.has_changes and is_committed
        if group.lost:
            self._lose(group)
        for participant, is_applied in group.riding:
            try:
                call = participant.committed(is_applied and is_committed)
            except Exception as error:
                log.error("journal_participant_failed", error=redact_exception(error))
            else:
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


def _work_of(request: WriteRequest) -> Callable[[JournalSteps], Any]:
    if request.work is not None:
        return request.work
    appends = request.appends
    return lambda steps: steps.store.append(appends)


# -- answers ---------------------------------------------------------------------------------------


def answer(
    requests: Sequence[WriteRequest], calls: Sequence[Callable[[], object]], runtime: Runtime | None
) -> None:
    """Run `calls` on the event loop `runtime`, then wake the callers: one call to each loop."""
    # By runtime, not by loop: callers on one loop share theirs, as the writer keeps it.
    waiting: dict[Runtime, list[WriteRequest]] = {}
    for request in requests:
        waiting.setdefault(request.runtime, []).append(request)
    for where, several in waiting.items():
        if calls and runtime is not None and (where is runtime or where.token is runtime.token):
            where.call_soon(partial(_wake, several, calls))
            calls = ()
        else:
            where.call_soon(partial(_wake, several, ()))
    if calls and runtime is not None:
        runtime.call_soon(partial(_wake, (), calls))


def _wake(requests: Sequence[WriteRequest], calls: Sequence[Callable[[], object]]) -> None:
    """Run `calls`, then wake the callers; on their event loop."""
    for call in calls:
        try:
            call()
        except Exception as error:
            # On trio it would end the program, and the callers would wait for ever.
            log.error("journal_callback_failed", error=redact_exception(error))
    for request in requests:
        reply = request.reply
        if not reply.done():
            reply.set_result(None)


# -- members of this process -----------------------------------------------------------------------


class JoinedMember(NamedTuple):
    """A member that joined through this journal object."""

    id: int
    every: float | None
    """Seconds between renewals; `None` if the caller renews it."""
    on_lost: Callable[[], object] | None
    runtime: Runtime


@final
class Renewals:
    """The members that joined through one journal object; used on the writer's thread."""

    def __init__(self) -> None:
        self._joined: dict[int, JoinedMember] = {}
        self._times: dict[int, float] = {}
        """When each must be renewed, by the monotonic clock."""
        self.next = inf
        """When the first of them must be."""

    def add(self, joined: JoinedMember) -> None:
        """Renew a member from now on."""
        self._joined[joined.id] = joined
        if joined.every is not None:
            self._times[joined.id] = time.monotonic() + joined.every
            self._plan()

    def drop(self, member: int) -> JoinedMember | None:
        """Renew a member no more; from any thread."""
        if self._times.pop(member, None) is not None:
            self._plan()
        return self._joined.pop(member, None)

    def _plan(self) -> None:
        self.next = min(list(self._times.values()), default=inf)

    def patience(self) -> float:
        """Return the seconds until a member must be renewed; -1 for ever."""
        return -1 if self.next == inf else max(0.0, self.next - time.monotonic())

    def renew(self, steps: JournalSteps) -> list[int]:
        """Renew those that are due; return those that were ended."""
        now = time.monotonic()
        lost: list[int] = []
        for member, due in list(self._times.items()):
            joined = self._joined.get(member)
            if due > now or joined is None:
                continue
            # Also if the commit fails: a full disk is no reason to try without a pause.
            self._times[member] = now + (joined.every or 0.0)
            if not steps.count_renewal(member):
                lost.append(member)
        self._plan()
        return lost

    def calls(self, lost: list[int]) -> list[tuple[Runtime, Callable[[], Any]]]:
        """Forget members that were ended; return what to call, and on which event loop."""
        found = [self.drop(member) for member in lost]
        return [(one.runtime, one.on_lost) for one in found if one is not None and one.on_lost]
