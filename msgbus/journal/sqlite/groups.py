"""Group commit: many callers' writes as one transaction, each a part of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, final

from msgbus.journal.sqlite.faults import is_the_file, translate
from msgbus.journal.sqlite.requests import Request
from msgbus.journal.sqlite.store import Store


@final
class Groups:
    """Writes groups of requests, and says what became of each."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, requests: Sequence[Request]) -> None:
        """Fill `value` or `error` of each; when this returns, what succeeded is on disk."""
        try:
            self._store.begin()
        except Exception as error:
            # A lock that was waited for in vain; once for all of them is enough.
            for request in requests:
                self._fail(request, error)
            return
        try:
            self._write_parts(requests)
            self._store.commit()
        except Exception as error:
            self._store.rollback()
            if len(requests) == 1:
                self._fail(requests[0], error)
                return
            # One of them may be too big for what is left of the disk: the rest must not
            # suffer for it.
            for request in requests:
                self.write([request])

    def _write_parts(self, requests: Sequence[Request]) -> None:
        for is_append, group in groupby(requests, key=_is_append):
            together = list(group)
            if is_append and len(together) > 1 and self._append_all(together):
                continue
            for request in together:
                self._write_one(request)

    def _append_all(self, requests: list[Request]) -> bool:
        """Many appends as one statement, which is most of the speed; false if one is special."""
        records = [record for request in requests for record in request.records]
        try:
            acks = self._store.attempt(lambda: self._store.append_new(records))
        except Exception:
            if not self._store.connection.in_transaction:
                raise
            return False
        start = 0
        for request in requests:
            end = start + len(request.records)
            request.value = acks[start:end]
            start = end
        return True

    def _write_one(self, request: Request) -> None:
        request.error = None
        try:
            request.value = self._store.attempt(self._work_of(request))
        except Exception as error:
            if not self._store.connection.in_transaction:
                raise
            self._fail(request, error)

    def _work_of(self, request: Request) -> Callable[[], Any]:
        store = self._store
        if request.work is None:
            records = request.records
            return lambda: store.append(records)
        work = request.work
        return lambda: work(store)

    def _fail(self, request: Request, error: Exception) -> None:
        """Note the error: the file's trouble as ours, a statement's fault as it is."""
        request.value = None
        request.error = error
        if isinstance(error, sqlite3.Error) and is_the_file(error):
            request.error = translate(error, self._store.path)
            request.error.__cause__ = error


def _is_append(request: Request) -> bool:
    return request.work is None
