"""The safe cursor: the offset up to which everything is done, whatever the order of the acks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import final


@final
class SafeCursor:
    """Moves over what was read and is done; never back, and never over what is open.

    Offsets have gaps: messages that were trimmed, or are somebody else's. So it does not count
    on the next offset being one more; it knows which offsets were read, in their order.
    """

    def __init__(self, offset: int) -> None:
        self._order: deque[int] = deque()
        self._open: set[int] = set()
        self.position = offset
        """Everything up to here is done."""
        self.looked = offset
        """Everything up to here was read, or looked at and passed by."""
        self.persisted = offset
        """Everything up to here is done, and the journal knows it."""
        self.acks = 0
        """Moves since the last successful write."""

    @property
    def is_dirty(self) -> bool:
        """Whether the journal does not know the newest position."""
        return self.position > self.persisted

    @property
    def open(self) -> int:
        """Messages that were read and are not done."""
        return len(self._open)

    @property
    def span(self) -> int:
        """Messages from the oldest open one on, done or not."""
        return len(self._order)

    def read(self, offset: int) -> None:
        """A message was read, and is to be delivered."""
        if offset <= self.looked:
            message = f"Offset {offset} was read after {self.looked}; the order is lost."
            raise ValueError(message)
        self._order.append(offset)
        self._open.add(offset)
        self.looked = offset

    def pass_by(self, offset: int) -> None:
        """There is nothing else for this subscription up to `offset`."""
        if offset <= self.looked:
            return
        if self._order and self._order[-1] not in self._open:
            self._order.pop()  # two such places in a row are one
        self._order.append(offset)
        self.looked = offset
        self._advance()

    def done(self, offset: int) -> bool:
        """A message is done with; whether that was news."""
        if offset not in self._open:
            return False
        self._open.discard(offset)
        self.acks += 1
        self._advance()
        return True

    def position_after(self, offsets: Collection[int]) -> int:
        """Where it would be if these were done: for the transaction that makes them so."""
        position = self.position
        for offset in self._order:
            if offset in self._open and offset not in offsets:
                break
            position = offset
        return position

    def written(self, position: int) -> None:
        """The journal has confirmed this position. Only then is the cursor clean."""
        if position > self.persisted:
            self.persisted = position
            self.acks = 0

    def _advance(self) -> None:
        while self._order and self._order[0] not in self._open:
            self.position = self._order.popleft()
