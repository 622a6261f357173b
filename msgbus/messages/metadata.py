"""Message metadata: ids, cause, session, headers.

It is not a field of the message: not in its schema, its equality or a request body. It is
made as late as possible, because the id of most messages is never read:

1. `None` before the message is sent;
2. `ROOT` once it is sent from outside any handler, with nothing to remember;
3. a `Metadata` object once it is read, or if there is a cause, a session or a header.

A message that is read from a store may have `StoredMetadata`, which is loaded at the first read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, final

from uuid_utils import uuid7

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

# Guards the first read of an id: two threads that handle one event must see the same id.
# Reentrant: the garbage collector may run in between, and a failed result that was never
# observed reads an id when it is collected.
_first_read = threading.RLock()


@final
class Root:
    """Metadata of a message that was sent as a root and never read."""

    __slots__ = ()
    fixed = True
    session_id = None
    topic = None
    from_system = False
    hops = 0


ROOT: Final = Root()


class Metadata:
    """Identity and cause of a message.

    `fixed` is set when the message is first executed or published; from then on its cause,
    correlation and session do not change. `depth` is the number of causes above it; `hops`
    and `chain` describe the nested handlings in this process, and are not stored.
    """

    __slots__ = (
        "_correlation_id",
        "_message_id",
        "_root_id",
        "causation_id",
        "chain",
        "depth",
        "fixed",
        "from_system",
        "headers",
        "hops",
        "recorded",
        "session_id",
        "topic",
    )

    def __init__(
        self,
        message_id: str | None = None,
        *,
        correlation_id: str | None = None,
        causation_id: str | None = None,
        session_id: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        topic: str | None = None,
        fixed: bool = False,
        from_system: bool = False,
        root_id: str | None = None,
        depth: int = 0,
    ) -> None:
        self._message_id = message_id
        self._correlation_id = correlation_id
        self.causation_id = causation_id
        self.session_id = session_id
        self.headers = headers
        self.topic = topic
        self.fixed = fixed
        self.from_system = from_system
        self._root_id = root_id
        self.depth = depth
        self.hops = 0
        self.chain: tuple[str, ...] = ()
        self.recorded: tuple[int, float] | None = None
        """Offset and time at which a journal recorded it; seconds since the epoch."""

    @property
    def message_id(self) -> str:
        """A UUIDv7 as text, made at the first read."""
        if self._message_id is None:
            with _first_read:
                if self._message_id is None:
                    self._message_id = str(uuid7())
        return self._message_id

    @property
    def correlation_id(self) -> str:
        """The id of the message that started the flow; of a root its own."""
        return self._correlation_id or self.message_id

    @property
    def root_id(self) -> str:
        """The id of the first message in the chain of causes; of a root its own."""
        return self._root_id or self.message_id

    def ids(self) -> tuple[str, str, str]:
        """Return the ids of the message, its flow and its root."""
        message_id = self._message_id or self.message_id
        return message_id, self._correlation_id or message_id, self._root_id or message_id

    @property
    def created_at(self) -> datetime:
        """The time in the id, in UTC."""
        milliseconds = int(self.message_id.replace("-", "")[:12], 16)
        return datetime.fromtimestamp(milliseconds / 1000, tz=UTC)

    def inherit(self, parent: Metadata, *, parent_is_system: bool) -> None:
        """Inherit cause, correlation, session and headers from the message being handled."""
        self.causation_id = parent.message_id
        self._correlation_id = parent.correlation_id
        self.session_id = parent.session_id
        self.headers = parent.headers
        self._root_id = parent.root_id
        self.depth = parent.depth + 1
        self.from_system = parent_is_system or parent.from_system

    def share(self, handled: Sequence[Metadata]) -> None:
        """Inherit what all messages of a batch have in common."""
        first = handled[0]
        if all(one.correlation_id == first.correlation_id for one in handled):
            self._correlation_id = first.correlation_id
        if all(one.session_id == first.session_id for one in handled):
            self.session_id = first.session_id
        if all(one.headers == first.headers for one in handled):
            self.headers = first.headers
        self.from_system = any(one.from_system for one in handled)

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add headers; they override existing ones."""
        self.headers = MappingProxyType({**self.headers, **headers})

    def __getstate__(self) -> dict[str, Any]:
        return {
            "message_id": self.message_id,
            "correlation_id": self._correlation_id,
            "causation_id": self.causation_id,
            "session_id": self.session_id,
            "headers": dict(self.headers),
            "topic": self.topic,
            "fixed": self.fixed,
            "from_system": self.from_system,
            "root_id": self._root_id,
            "depth": self.depth,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        headers = MappingProxyType(state.pop("headers"))
        Metadata.__init__(self, headers=headers, **state)


@final
class UnvalidatedMetadata(Metadata):
    """Metadata of a message that its class has not made: of a copy, or from `model_construct`.

    Its fields may hold anything, so a journal looks closer before it stores them.
    """

    __slots__ = ()


@final
class StoredMetadata(Metadata):
    """Metadata of a stored message, loaded by `load(index)` at the first read.

    A class of its own, because a `__getattr__` makes every read slower.
    """

    __slots__ = ("_index", "_load")

    def __init__(self, load: Callable[[int], Metadata], index: int) -> None:
        self._load = load
        self._index = index

    def __getattr__(self, name: str) -> Any:
        # Called for empty slots; all are empty until the first read.
        if name not in Metadata.__slots__:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message)
        loaded = self._load(self._index)
        for slot in Metadata.__slots__:
            setattr(self, slot, getattr(loaded, slot))
        return getattr(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain metadata: `load` may hold on to something large.
        return Metadata, (), self.__getstate__()
