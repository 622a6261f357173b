"""The one thread that writes: what has arrived is one commit, with what rides in it."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, final

from msgbus.journal.operations import Append
from msgbus.journal.ports import CommitParticipant
from msgbus.journal.records import Member
from msgbus.journal.sqlite.claims import JournalSteps
from msgbus.journal.sqlite.faults import closed
from msgbus.journal.sqlite.groups import (
    CommitGroup,
    GroupWriter,
    Renewals,
    WriteRequest,
    answer,
)
from msgbus.journal.sqlite.retention import Retainer
from msgbus.runtime.event_loop import Runtime, current_runtime

MOST: Final = 1000
"""Operations in one group."""


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
        self._runtime: Runtime | None = None

    # -- on the event loop ---------------------------------------------------------------------

    def attach(self, participants: Sequence[CommitParticipant], member: Member | None) -> None:
        """Let these ride in every commit; see `Deliveries.attach`."""
        self._runtime = current_runtime(self._runtime)
        self._groups.attach(participants, member, self._runtime)

    def request(
        self,
        work: Callable[[JournalSteps], Any] | None,
        appends: Sequence[Append] = (),
        weight: int = 1,
    ) -> WriteRequest:
        """Make a request of the running task."""
        # Kept from call to call: nearly always there is one event loop only.
        runtime = self._runtime = current_runtime(self._runtime)
        return WriteRequest(runtime, work, appends, weight)

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

    def _start(self) -> None:
        if self._is_closed:
            raise closed(self._path)
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
            if requests or (self.renewals.next <= time.monotonic() and not is_last):
                self._commit(requests)
            if self._must_look:
                self._look()
            if retainer is not None and is_trimming:
                retainer.step()

    def _sleep(self) -> None:
        """Wait until something arrives, the end has come, or a member must be renewed."""
        with self._guard:
            if self._arrivals or self._is_closed or self._must_look:
                return
            self._is_asleep = True
        if self._bell.acquire(timeout=self.renewals.patience()):
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
                weight += request.weight
                if weight > MOST and taken:
                    self._arrivals = requests[taken:]
                    del requests[taken:]
                    break
            is_last = self._is_closed and not self._arrivals
        return [request for request in requests if not request.is_abandoned], is_last

    def _commit(self, requests: list[WriteRequest]) -> None:
        writes = [request for request in requests if not request.is_read]
        if len(writes) != len(requests):
            self._groups.read(requests)
            if not writes:
                answer(requests, (), None)
                return
        groups = [self._groups.write(writes)]
        if groups[0].is_full:
            groups += self._write_again(writes)
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

    def _write_again(self, requests: list[WriteRequest]) -> list[CommitGroup]:
        """Write a group on a full disk after some room was made, then one request at a time."""
        groups: list[CommitGroup] = []
        if self._retainer is not None and self._retainer.make_room():
            groups.append(self._groups.write(requests))
            if not groups[-1].is_full:
                return groups
        if len(requests) > 1:
            groups += [self._groups.write([request]) for request in requests]
        return groups
