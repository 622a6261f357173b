"""The one thread that writes: what has arrived is one commit, with what rides in it."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, final

from msgbus.errors import JournalError, JournalFullError, MemberEndedError, StaleError
from msgbus.journal.operations import Append, Operation, Pass
from msgbus.journal.ports import CommitParticipant
from msgbus.journal.records import Member
from msgbus.journal.sqlite.claims import JournalSteps, Renewals
from msgbus.journal.sqlite.faults import closed, forked, is_the_file, is_undecodable, translate
from msgbus.journal.sqlite.files import MEMORY
from msgbus.journal.sqlite.readers import lenient
from msgbus.journal.sqlite.retention import Retainer, checkpoint
from msgbus.runtime.event_loop import Runtime, current_runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

P = ParamSpec("P")
T = TypeVar("T")

MOST: Final = 1000
"""Operations in one group."""

_PLAIN_ERRORS: Final = (Exception, KeyboardInterrupt, SystemExit)
"""What a function may raise in the task of its caller; not `CancelledError` and the like."""


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
        operations: Sequence[Operation],
        member: Member | None,
        work: Callable[[JournalSteps], Any] | None,
    ) -> None:
        self.runtime = runtime
        self.reply = runtime.reply()
        self.operations = operations
        self.member = member
        """On whose behalf."""
        self.work = work
        """What to do instead of applying the operations."""
        is_plain = work is None and member is None
        if is_plain and (len(operations) != 1 or type(operations[0]) is not Append):
            is_plain = {*map(type, operations)} <= {Append}
        self.is_plain = is_plain
        """Whether it only appends: such requests of many callers become one statement."""

    def fail(self, error: BaseException, path: str) -> None:
        """Set the error: of SQLite as ours, but a fault in a statement of the user as it is."""
        self.value, self.error = None, error
        if not self.is_of_user:
            # Whoever waits for the journal can deal with its errors, and with no MemoryError.
            if isinstance(error, sqlite3.Error | MemoryError) or not isinstance(error, Exception):
                self.error = as_journal_error(error, path)
        elif isinstance(error, sqlite3.Error):
            if is_the_file(error):
                self.error = as_journal_error(error, path)
        elif isinstance(error, StopIteration) or not isinstance(error, _PLAIN_ERRORS):
            message = (
                f"A function for the journal {path} raised {type(error).__name__}, which would "
                f"mean something else to the event loop. Nothing of it was written."
            )
            self.error = JournalError(message, path=path)
            self.error.__cause__ = error

    def fail_with_all(self, error: BaseException, path: str) -> None:
        """Set the error of a commit that failed as a whole."""
        self.value, self.error = None, as_journal_error(error, path)


def as_journal_error(error: BaseException, path: str) -> JournalError:
    """Make an error of ours for one that a commit failed with."""
    if isinstance(error, sqlite3.Error):
        failure = translate(error, path)
    elif isinstance(error, JournalError):
        kind = JournalFullError if isinstance(error, JournalFullError) else JournalError
        failure = kind(str(error), path=path)
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
        self.culprit: WriteRequest | None = None
        """Whose statement rolled back all of it, as `INSERT OR ROLLBACK` does."""
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
                    try:
                        request.on_commit(request.value)
                    except BaseException as error:
                        log.error("journal_callback_failed", error=redact_exception(error))
        self._settle(group)
        return group

    def read(self, requests: Sequence[WriteRequest]) -> None:
        """Run those that only read, outside any transaction."""
        for request in requests:
            if request.is_read:
                try:
                    assert request.work is not None  # noqa: S101 (no operation only reads)
                    request.value = self._read_on(request.work, self._steps)
                except BaseException as error:
                    request.fail(error, self._path)

    def _fail(self, group: CommitGroup, error: BaseException) -> None:
        group.error = error
        group.is_full = isinstance(as_journal_error(error, self._path), JournalFullError)
        del group.lost[group.lost_before :]
        for request in group.requests:
            if request is not group.culprit:
                request.fail_with_all(error, self._path)
        try:
            self._transaction.roll_back()
        except BaseException as another:  # the next one begins with that
            log.error("journal_rollback_failed", error=redact_exception(another))
        if not group.requests:  # nobody else would hear of it
            reason = redact_exception(error)
            log.warning("member_renewal_failed", journal=self._path, error=reason)

    def _check_attached(self, group: CommitGroup) -> None:
        """Leave out the participants of a member that was ended."""
        member, transaction = group.attached.member, self._transaction
        if member is None or member.id in transaction.known_members:
            return
        if not transaction.has_member(member.id):
            group.lost.append(member.id)
            group.attached = Attached(runtime=group.attached.runtime)

    # -- the requests --------------------------------------------------------------------------

    def _run_all(self, group: CommitGroup) -> None:
        together: list[WriteRequest] = []
        for request in group.requests:
            request.error = None  # of an attempt before, on a full disk
            if request.is_plain:
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
        appends: list[Any] = [one for request in requests for one in request.operations]
        try:
            if len(appends) > 1 or (appends and appends[0].queue is not None):
                results = transaction.attempt(store.append_new, appends)
            else:  # one row or none: there is nothing to undo
                results = store.append_new(appends) if appends else []
        except Exception:
            if not transaction.connection.in_transaction:
                raise
            for request in requests:
                self._run(request, group)
            return
        start = 0
        for request in requests:
            end = start + len(request.operations)
            request.value = results[start:end]
            start = end

    def _run(self, request: WriteRequest, group: CommitGroup) -> None:
        """Run one request; what it did is undone if it raises."""
        transaction = self._transaction
        try:
            request.value = self._read_on(transaction.attempt, self._do, request)
        except BaseException as error:
            request.fail(error, self._path)
            if not transaction.connection.in_transaction:
                is_file = isinstance(error, sqlite3.Error) and is_the_file(error)
                group.culprit = request if request.is_of_user and not is_file else None
                raise
            if isinstance(error, MemberEndedError):
                group.lost.append(error.member_id)

    def _do(self, request: WriteRequest) -> Any:
        if request.work is not None:
            return request.work(self._steps)
        return self._steps.store.apply(request.operations, request.member)

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
            is_undone = True
            try:
                operations = participant.operations(transaction.appended, before)
                if len(operations) == 1 and type(operations[0]) is Pass:
                    # The commonest of all needs no savepoint: refused, it has changed nothing.
                    is_undone = False
                    self._steps.store.apply(operations, member)
                    group.has_changes = True
                elif operations:
                    transaction.attempt(self._steps.store.apply, operations, member)
                    group.has_changes = True
            except Exception as error:
                is_refused = isinstance(error, StaleError)
                if not transaction.connection.in_transaction or not (is_refused or is_undone):
                    raise
                if not is_refused:
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


@final
class CommitWriter:
    """Runs requests in groups, on a thread of its own.

    What arrives while a group is being committed forms the next one. A lone request is
    committed at once. The one timer is that of the renewals.
    """

    def __init__(
        self, steps: JournalSteps, retainer: Retainer | None, on_commit: Callable[..., None]
    ) -> None:
        self._path = steps.store.path
        self._transaction = steps.store.transaction
        self._retainer = retainer
        self._on_commit = on_commit
        self.renewals = Renewals()
        self._groups = GroupWriter(steps, self.renewals)
        self._arrivals: list[WriteRequest] = []
        self._must_look = False
        """Somebody wants to know whether other processes have committed."""
        self._is_asleep = False
        self._bell = threading.Lock()
        self._bell.acquire()  # rung by a release
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        """`None` if nothing was written yet, or if the interpreter, as it ends, starts none."""
        self._here = threading.Lock()
        """Held by the one that writes without the thread."""
        self._is_closed = False
        self._closed_by = closed
        """Makes the error for what comes later."""
        self._runtime: Runtime | None = None

    # -- on the event loop ---------------------------------------------------------------------

    def attach(self, participants: Sequence[CommitParticipant], member: Member | None) -> None:
        """Let these ride in every commit; see `Deliveries.attach`."""
        self._runtime = current_runtime(self._runtime)
        self._groups.attach(participants, member, self._runtime)

    def request(
        self,
        operations: Sequence[Operation] = (),
        member: Member | None = None,
        *,
        work: Callable[[JournalSteps], Any] | None = None,
    ) -> WriteRequest:
        """Make a request of the running task."""
        # Kept from call to call: nearly always there is one event loop only.
        runtime = self._runtime = current_runtime(self._runtime)
        return WriteRequest(runtime, operations, member, work)

    async def run(self, request: WriteRequest) -> Any:
        """Return the value of a request, once it is committed."""
        # Under the lock, so that nothing can arrive when the thread has seen the end.
        with self._guard:
            if self._thread is None or self._is_closed:
                self._start()
            self._arrivals.append(request)
            if self._is_asleep:
                self._is_asleep = False
                self._bell.release()
        if self._thread is None:
            with self._here:
                self._commit(self._take()[0])
        try:
            await request.reply
        except BaseException:
            # If the writer has not come to it yet, it need not be written.
            request.is_abandoned = True
            raise
        if request.error is not None:
            raise request.error
        return request.value

    def forked(self) -> None:
        """Refuse everything from now on: there is no thread in this process."""
        self._is_closed, self._closed_by = True, forked
        self._thread, self._arrivals, self._is_asleep = None, [], False
        self._guard, self._bell = threading.Lock(), threading.Lock()  # may be held by nobody

    def _start(self) -> None:
        if self._is_closed:
            raise self._closed_by(self._path)
        # A daemon: a program that forgets to close must still be able to end.
        thread = threading.Thread(target=self._work, name="msgbus journal writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
        else:
            self._thread = thread

    def _wake(self) -> None:
        if self._is_asleep:
            self._is_asleep = False
            self._bell.release()

    def look_for_others(self) -> None:
        """Let the thread find out whether other processes have committed, and tell."""
        with self._guard:
            self._must_look = True
            self._wake()

    def close(self) -> threading.Thread | None:
        """Take nothing new; return the thread, which ends when all that came before is done."""
        with self._guard:
            self._is_closed = True
            self._wake()
            return self._thread

    # -- on the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        is_last, retainer = False, self._retainer
        while not is_last:
            is_trimming = retainer is not None and retainer.is_trimming
            if not is_trimming:
                self._sleep()
            requests, is_last = self._take()
            try:
                if requests or (self.renewals.next <= time.monotonic() and not is_last):
                    self._commit(requests)
                if self._must_look:
                    self._look()
                if retainer is not None and retainer.is_trimming:
                    retainer.step()
            except BaseException as error:  # without this thread, all callers would wait for ever
                self._answer_all(requests, error)

    def _answer_all(self, requests: list[WriteRequest], error: BaseException) -> None:
        log.error("journal_callback_failed", error=redact_exception(error))
        for request in requests:
            if request.value is None and request.error is None:
                request.fail_with_all(error, self._path)
        answer(requests, (), None)

    def _sleep(self) -> None:
        """Wait until something arrives, the end has come, or a member must be renewed."""
        with self._guard:
            if self._arrivals or self._is_closed or self._must_look:
                return
            self._is_asleep = True
        due = self.renewals.next
        patience = -1 if due == inf else max(0.0, due - time.monotonic())
        if self._bell.acquire(timeout=patience):
            return
        with self._guard:
            if self._is_asleep:
                self._is_asleep = False
                return
        self._bell.acquire()  # it was rung at the last moment

    def _take(self) -> tuple[list[WriteRequest], bool]:
        """Return what has arrived, at most one group, and whether it is the last."""
        with self._guard:
            requests, self._arrivals = self._arrivals, []
            weight = 0
            for taken, request in enumerate(requests):
                weight += len(request.operations) or 1
                if weight > MOST and taken:
                    self._arrivals = requests[taken:]
                    del requests[taken:]
                    break
            is_last = self._is_closed and not self._arrivals
        return [request for request in requests if not request.is_abandoned], is_last

    def _commit(self, requests: list[WriteRequest]) -> None:
        writes = requests
        if self._path == MEMORY:  # others read on connections of their own
            writes = [request for request in requests if not request.is_read]
            self._groups.read(requests)
            if requests and not writes:
                answer(requests, (), None)
                return
        groups = [self._groups.write(writes)]
        if groups[0].error is not None:
            groups += self._write_again(groups[0])
        for group in groups[:-1]:
            answer((), group.calls, group.runtime)
        if any(group.has_changes for group in groups):
            self._on_commit(groups[-1].head)
        answer(requests, groups[-1].calls, groups[-1].runtime)
        if self._retainer is not None:
            self._retainer.look(groups[-1].head)

    def _look(self) -> None:
        self._must_look = False
        with suppress(sqlite3.Error):  # being recovered: the next look will see
            if self._transaction.has_others():
                self._on_commit(self._transaction.reader.head(), others=True)

    def _write_again(self, failed: CommitGroup) -> list[CommitGroup]:
        """Write a group again if something can be done about its failure.

        Without the request that rolled it back; on a full disk as far as that is possible.
        """
        groups: list[CommitGroup] = []
        requests = failed.requests
        while failed.culprit is not None:
            requests = [request for request in requests if request is not failed.culprit]
            if not requests:
                return groups
            failed = self._groups.write(requests)
            groups.append(failed)
        if failed.is_full:
            groups += self._write_on_full_disk(requests)
        return groups

    def _write_on_full_disk(self, requests: Sequence[WriteRequest]) -> list[CommitGroup]:
        """Write as many requests as possible.

        First what ends work, in the space of the reserve: only so can old messages be removed.
        Then, after a trim, what adds to the journal; together, or else one request at a time.
        """
        groups: list[CommitGroup] = []
        retainer = self._retainer
        checkpoint(self._transaction.connection)
        if retainer is not None and retainer.open_reserve():
            groups.append(self._groups.write([one for one in requests if not _adds(one)]))
            retainer.make_room()
            requests = [one for one in requests if _adds(one)]
        if requests:
            groups.append(self._groups.write(requests))
            if groups[-1].is_full and len(requests) > 1:
                groups += [self._groups.write([request]) for request in requests]
        return groups


def _adds(request: WriteRequest) -> bool:
    """Whether a request makes the journal larger, rather than to end work."""
    return request.is_of_user or any(type(one) is Append for one in request.operations)


# -- answers ---------------------------------------------------------------------------------------


def answer(
    requests: Sequence[WriteRequest], calls: Sequence[Callable[[], object]], runtime: Runtime | None
) -> None:
    """Run `calls` on the event loop `runtime`, then wake the callers: one call to each loop."""
    # By runtime, not by loop: callers on one loop share theirs, as the writer keeps it.
    for where in {request.runtime for request in requests}:
        several = [request for request in requests if request.runtime is where]
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
