"""The one thread that writes: takes what has arrived, commits it as a group, answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, final

from msgbus.errors import JournalConflictError, JournalError, JournalFullError, MsgBusError
from msgbus.journal.records import Lease, Record
from msgbus.journal.sqlite.faults import closed, translated
from msgbus.journal.sqlite.groups import Groups
from msgbus.journal.sqlite.requests import Request, answer
from msgbus.journal.sqlite.store import Store
from msgbus.runtime.event_loop import Runtime, current_runtime
from msgbus.telemetry.logging import log
from msgbus.telemetry.redaction import redact_exception

MOST: Final = 1000
"""Records in one group."""


class _Kept(NamedTuple):
    """A lease that this thread renews."""

    lease: Lease
    every: float
    on_lost: Callable[[], object] | None
    runtime: Runtime


@final
class Writer:
    """Runs requests in groups, on a thread of its own.

    What arrives while a group is being committed forms the next one. There are no timers: a
    lone request is committed at once.
    """

    def __init__(
        self,
        store: Store,
        after_commit: Callable[[int], None],
        make_room: Callable[[], bool],
    ) -> None:
        self._store = store
        self._groups = Groups(store)
        self._after_commit = after_commit
        self._make_room = make_room
        self._arrivals: list[Request] = []
        self._is_asleep = False
        self._bell = threading.Lock()
        self._bell.acquire()  # rung by a release
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._is_closed = False
        self._runtime: Runtime | None = None
        self._kept: dict[str, _Kept] = {}
        self._renewals: dict[str, float] = {}

    async def run(self, work: Callable[[Store], Any], *, alone: bool = False) -> Any:
        """What `work` gives, once it is committed."""
        request = self.submit(work, (), alone=alone)
        try:
            await request.reply
        except BaseException:
            # If the writer has not come to it yet, it need not be written.
            request.is_abandoned = True
            raise
        return request.result()

    def submit(
        self,
        work: Callable[[Store], Any] | None,
        records: Sequence[Record],
        *,
        alone: bool = False,
    ) -> Request:
        """Have `work` done, or `records` appended; the caller waits for the reply."""
        # Kept from call to call: nearly always there is one event loop only.
        runtime = self._runtime = current_runtime(self._runtime)
        request = Request(runtime, work, records)
        if alone:
            request.alone = True
        # Under the lock, so that nothing can arrive when the thread has seen the end.
        with self._starting:
            if self._thread is None or self._is_closed:
                self._start()
            self._arrivals.append(request)
            if self._is_asleep:
                self._is_asleep = False
                self._bell.release()
        return request

    def _start(self) -> None:
        if self._is_closed:
            raise closed(self._store.path)
        # A daemon: a program that forgets to close must still be able to end.
        self._thread = threading.Thread(
            target=self._work, name="msgbus journal writer", daemon=True
        )
        self._thread.start()

    def close(self) -> threading.Thread | None:
        """Take nothing new; gives the thread, which ends when all that came before is done."""
        with self._starting:
            if not self._is_closed:
                self._is_closed = True
                if self._is_asleep:
                    self._is_asleep = False
                    self._bell.release()
            return self._thread

    # -- on the thread -----------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            requests, is_last = self._take()
            requests = [request for request in requests if not request.is_abandoned]
            if requests:
                self._write(requests)
            if is_last:
                return
            if self._kept:
                self._renew_due()

    def _take(self) -> tuple[list[Request], bool]:
        """What has arrived, at most one group, and whether it is the last."""
        self._sleep()
        with self._starting:
            taken, weight = 0, 0
            for request in self._arrivals:
                taken += 1
                weight += len(request.records) or 1
                if weight >= MOST or request.alone:
                    break
            requests = self._arrivals[:taken]
            del self._arrivals[:taken]
            return requests, self._is_closed and not self._arrivals

    def _sleep(self) -> None:
        """Until something arrives, the end has come, or a lease must be renewed."""
        with self._starting:
            if self._arrivals or self._is_closed:
                return
            self._is_asleep = True
        patience = self._patience()
        if self._bell.acquire(timeout=-1 if patience is None else patience):
            return
        with self._starting:
            if self._is_asleep:
                self._is_asleep = False
                return
        self._bell.acquire()  # it was rung at the last moment

    def _write(self, requests: list[Request]) -> None:
        last = requests.pop() if requests[-1].alone else None
        if requests:
            try:
                self._write_group(requests)
            except BaseException as error:
                self._fail(requests, error)
            answer(requests)
            self._look_after(self._store.head)
        if last is not None:
            self._write_alone(last)

    def _write_group(self, requests: list[Request]) -> None:
        self._groups.write(requests)
        refused = [one for one in requests if isinstance(one.error, JournalFullError)]
        if refused and self._make_room():
            for request in refused:
                request.error = None
            self._groups.write(refused)

    def _write_alone(self, request: Request) -> None:
        try:
            with translated(self._store.path):
                request.value = request.work(self._store) if request.work is not None else None
        except MsgBusError as error:
            request.error = error
        except BaseException as error:
            self._fail([request], error)
        answer([request])
        self._look_after(self._store.head)

    def _look_after(self, head: int) -> None:
        try:
            self._after_commit(head)
        except Exception as error:
            log.warning(
                "journal_trim_failed", journal=self._store.path, error=redact_exception(error)
            )

    def _fail(self, requests: list[Request], error: BaseException) -> None:
        """Never leave a caller waiting, whatever it was."""
        for request in requests:
            request.error = JournalError(
                f"The journal {self._store.path} failed: {redact_exception(error)}",
                path=self._store.path,
            )
            request.error.__cause__ = error

    # -- leases ------------------------------------------------------------------------------

    async def keep(self, lease: Lease, every: float, on_lost: Callable[[], object] | None) -> None:
        """Renew a lease every so many seconds, until it is dropped or lost."""
        kept = _Kept(lease, every, on_lost, current_runtime())

        def begin(store: Store) -> None:
            store.renew(lease)
            self._kept[lease.name] = kept
            self._renewals[lease.name] = time.monotonic() + every

        await self.run(begin)

    def drop(self, name: str) -> None:
        """Renew it no more; called on the thread."""
        self._kept.pop(name, None)
        self._renewals.pop(name, None)

    def _patience(self) -> float | None:
        """Seconds until a lease must be renewed."""
        if not self._renewals:
            return None
        return max(0.0, min(self._renewals.values()) - time.monotonic())

    def _renew_due(self) -> None:
        now = time.monotonic()
        names = [name for name, due in self._renewals.items() if due <= now]
        if not names:
            return
        lost: list[str] = []
        try:
            self._store.begin()
            for name in names:
                try:
                    self._store.renew(self._kept[name].lease)
                except JournalConflictError:
                    lost.append(name)
            self._store.commit()
        except Exception as error:
            self._store.rollback()
            log.warning(
                "lease_renewal_failed", journal=self._store.path, error=redact_exception(error)
            )
        for name in names:
            self._renewals[name] = time.monotonic() + self._kept[name].every
        for name in lost:
            kept = self._kept[name]
            self.drop(name)
            if kept.on_lost is not None:
                kept.runtime.call_soon(kept.on_lost)
