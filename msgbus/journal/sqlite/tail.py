"""The newest messages, as this process has appended them: they need not be read from the file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, final, overload

from msgbus.journal import rows
from msgbus.journal.operations import Append
from msgbus.journal.ports import Claim, Scan
from msgbus.journal.records import Pending, Record, Selection, State

COMMITS: Final = 16
"""Commits whose messages are kept."""

MOST_BYTES: Final = 4_000_000
"""Bytes of payloads that are kept beside those of the newest commit."""


@final
class AppendedMessages(Sequence[Claim]):
    """What one commit appends, at offsets that follow each other; made when it is asked for."""

    def __init__(self, first: int) -> None:
        self.first = first
        """Offset of the first message."""
        self.appends: list[Append] = []
        self.size = 0
        """Bytes of their payloads; set when they are kept."""
        self._claims: dict[int, Claim] = {}

    @property
    def last(self) -> int:
        """Offset of the last message."""
        return self.first + len(self.appends) - 1

    def __len__(self) -> int:
        return len(self.appends)

    @overload
    def __getitem__(self, index: int) -> Claim: ...

    @overload
    def __getitem__(self, index: slice) -> list[Claim]: ...

    def __getitem__(self, index: int | slice) -> Claim | list[Claim]:
        if isinstance(index, slice):
            return [self._claim(place) for place in range(*index.indices(len(self)))]
        return self._claim(range(len(self))[index])

    def __iter__(self) -> Iterator[Claim]:
        return map(self._claim, range(len(self)))

    def _claim(self, place: int) -> Claim:
        claim = self._claims.get(place)
        if claim is None:
            claim = self._claims[place] = _claim(self.appends[place], self.first + place)
        return claim

    def cut(self, length: int) -> None:
        """Keep the first `length` messages only: the others were undone."""
        del self.appends[length:]
        self._claims.clear()


def _claim(append: Append, offset: int) -> Claim:
    record, queue, due, unique = append
    placed = Record._make((*record[:-1], offset))
    if queue is None:
        state, time = State.WAITING, record.time
        return Claim(
            Pending("", offset, 0, None, state, 0, 0.0, None, 0, False, None, time), placed
        )
    return Claim(rows.queued(queue, placed, offset, due, unique), placed)


@final
class Tail:
    """The messages of the last commits of this process, as long as nobody else has committed any.

    The thread of the writer adds to it; it is read on any thread.
    """

    def __init__(self) -> None:
        self._commits: tuple[AppendedMessages, ...] = ()

    def add(self, appended: AppendedMessages) -> None:
        """Keep what was just committed."""
        commits = self._commits
        if commits and commits[-1].last + 1 != appended.first:
            commits = ()  # another process has appended what lies between them
        appended.size = sum(len(one.record.payload) for one in appended.appends)
        first, size = max(len(commits) - COMMITS + 1, 0), sum(commit.size for commit in commits)
        while size > MOST_BYTES and first < len(commits):
            size -= commits[first].size
            first += 1
        self._commits = (*commits[first:], appended)

    def clear(self) -> None:
        """Forget all of it."""
        self._commits = ()

    def scan(
        self, after: int, limit: int, selection: Selection, partitions: Collection[int] | None
    ) -> Scan | None:
        """Read records behind an offset, as `Log.read`; `None` if they have to be read there."""
        commits = self._commits
        if not commits or not commits[0].first <= after + 1 <= commits[-1].last:
            return None
        found: list[Record | int] = []
        for commit in commits:
            for place in range(max(after + 1 - commit.first, 0), len(commit.appends)):
                record = commit.appends[place].record
                if not selection.takes(record):
                    continue
                if partitions is not None and selection.partition(record) not in partitions:
                    continue
                offset = commit.first + place
                found.append(Record._make((*record[:-1], offset)))
                if len(found) >= limit:
                    return Scan(found, offset)
        return Scan(found, commits[-1].last)
