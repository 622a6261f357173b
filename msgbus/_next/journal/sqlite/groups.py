"""Group commit: many callers' writes as one transaction, each undone on its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, final

from msgbus._next.journal.errors import MemberEndedError, StaleError
from msgbus._next.journal.operations import Append
from msgbus._next.journal.ports import CommitParticipant
from msgbus._next.journal.records import Member
from msgbus._next.journal.sqlite.claims import JournalSteps
from msgbus._next.journal.sqlite.renewals import Renewals
from msgbus._next.journal.sqlite.requests import WriteRequest
from msgbus.journal.sqlite.faults import is_undecodable
from msgbus.journal.sqlite.readers import lenient
from msgbus.runtime.event_loop import Runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception


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
        del group.lost[group.lost_before :]
        for request in group.requests:
            request.fail_with_all(error, self._path)

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
            group.lost.append(request.error.member.id)

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
