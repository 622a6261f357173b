"""`Holds`: how far subscriptions hold back a trim, and which of them it steps over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, final

from msgbus.journal.records import Cursor
from msgbus.journal.reports import Retention
from msgbus.journal.sqlite.questions import QuestionReader
from msgbus.journal.sqlite.reads import SKIPPED, WARNED
from msgbus.journal.sqlite.schema import write_meta
from msgbus.telemetry.logging import log

_WARNED: Final = "SELECT key FROM msgbus_meta WHERE key >= ? AND key < ?"
_FORGET: Final = "DELETE FROM msgbus_meta WHERE key = ?"


class _Warning(NamedTuple):
    """A subscription that holds back more than it may."""

    name: str
    acked: int
    unheld: int
    is_served: bool
    fix: str


@final
class Holds:
    """What one trim knows of the subscriptions that hold it back; copied for each step.

    Who was warned is in the file, as a trim may be made by any process, and a warning comes
    before anything is removed. Nothing here is changed in place.
    """

    def __init__(self, retention: Retention, now: float) -> None:
        self._retention = retention
        self._now = now
        self._is_examined = False
        self.overdue: frozenset[str] = frozenset()
        """Subscriptions that hold back more than they may."""
        self._skips: frozenset[str] = frozenset()
        """Those that were warned long enough ago."""
        self.skipped: Mapping[str, int] = {}
        """Messages that were removed before a subscription was given them, at most."""
        self._warnings: tuple[_Warning, ...] = ()
        self._removed: Mapping[str, tuple[int, int]] = {}
        """First and last offset of those."""

    def limit(
        self, reader: QuestionReader, behind: Sequence[Cursor], goal: int, unheld: int
    ) -> int:
        """Return the offset up to which to remove.

        Args:
            reader: Reads in the open transaction, which also gets the warnings.
            behind: Cursors before the goal.
            goal: The offset up to which nothing has to be kept for other reasons.
            unheld: The offset up to which no subscription should hold anything back.
        """
        if self._retention.has_holds and not self._is_examined:
            self._is_examined = True
            self._examine(reader, behind, unheld)
        limits = [
            max(cursor.acked, unheld if cursor.name in self._skips else 0) for cursor in behind
        ]
        return min(limits, default=goal)

    def _examine(self, reader: QuestionReader, behind: Sequence[Cursor], unheld: int) -> None:
        """Warn of those that hold back too much; forget the warnings of those that caught up."""
        connection = reader.connection
        lowest: dict[str, int] = {}
        for cursor in behind:
            lowest[cursor.name] = min(cursor.acked, lowest.get(cursor.name, cursor.acked))
        self.overdue = frozenset(name for name, acked in lowest.items() if acked < unheld)
        known = connection.execute(_WARNED, (WARNED, WARNED[:-1] + ";")).fetchall()
        for (key,) in known:
            if key.removeprefix(WARNED) not in lowest:
                connection.execute(_FORGET, (key,))
        served = {name for member in reader.members() for name in member.serves}
        for name in sorted(self.overdue):
            since = reader.note(WARNED + name)
            if since is None:
                write_meta(connection, WARNED + name, repr(self._now))
                self._warnings += (self._warning(name, lowest[name], unheld, name in served),)
            elif self._may_skip(float(since)):
                self._skips |= {name}

    def _may_skip(self, since: float) -> bool:
        is_over = self._now - since >= self._retention.warn_for
        return self._retention.beyond == "skip" and is_over

    def _warning(self, name: str, acked: int, unheld: int, is_served: bool) -> _Warning:
        fix = "serve it" if not is_served else "let it get on"
        then = "they are kept until then"
        if self._retention.beyond == "skip":
            then = f"else they are removed by a trim in {self._retention.warn_for:g} s or later"
        text = f"{fix}, seek it, or remove it with Remove({name!r}); {then}"
        return _Warning(name, acked, unheld, is_served, text)

    def in_flight(self, behind: Sequence[Cursor]) -> list[Cursor]:
        """Return cursors whose messages up to `fetched` were handed out, and stay."""
        return [one for one in behind if one.name in self._skips and one.acked < one.fetched]

    def count(
        self, reader: QuestionReader, behind: Sequence[Cursor], removed: Sequence[int]
    ) -> None:
        """Count messages that are removed before a subscription was given them."""
        for name in sorted(self._skips):
            fetched = min((one.fetched for one in behind if one.name == name), default=None)
            lost = [offset for offset in removed if fetched is not None and offset > fetched]
            if lost:
                count = reader.skipped(name) + len(lost)
                write_meta(reader.connection, SKIPPED + name, str(count))
                first, _ = self._removed.get(name, (lost[0], 0))
                self._removed = {**self._removed, name: (first, lost[-1])}
                self.skipped = {**self.skipped, name: self.skipped.get(name, 0) + len(lost)}

    def log_from(self, before: Holds, path: str) -> None:
        """Log what is new since a step before; removed messages when the trim ends."""
        for warning in self._warnings[len(before._warnings) :]:
            log.warning(
                "retention_held_back",
                journal=path,
                subscription=warning.name,
                offset=warning.acked,
                held_upto=warning.unheld,
                is_served=warning.is_served,
                fix=warning.fix,
            )
        if self.skipped and self.skipped is before.skipped:
            for name, count in self.skipped.items():
                first, last = self._removed[name]
                log.warning(
                    "messages_skipped",
                    journal=path,
                    subscription=name,
                    messages=count,
                    first=first,
                    last=last,
                )
