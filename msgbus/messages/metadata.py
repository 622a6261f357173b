"""The data that rides beside a message: ids, cause, session, headers.

It is never a field of the message: not in its schema, its equality or a request body.
It is made as late as possible, because most messages in a process are handled without
anybody asking for their id: a message passes through up to three stages.

1. nothing yet (`None`);
2. `ROOT`: it has been sent, from outside any handler, with nothing to remember;
3. a `Metadata` object: somebody looked, or there is a cause, a session or a header.

One that is read from a store may come with `StoredMetadata`, which is fetched at the first look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, final

from uuid_utils import uuid7

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

# Guards only the first look at an id. Two worker threads handling one event may look at
# the same moment, and both must see the same id. Reentrant: the collector may run in between,
# and a failed result that nobody looked at asks for an id when it is collected.
_first_look = threading.RLock()


@final
class Root:
    """Marks a message that was sent as a root and that nobody has looked at."""

    __slots__ = ()
    fixed = True
    session_id = None
    topic = None
    from_system = False
    hops = 0


ROOT: Final = Root()


class Metadata:
    """Who a message is and where it came from.

    `fixed` is set when the message is first executed or published; from then on its
    cause, correlation and session stay as they are. `depth` is how many causes are above;
    `hops` and `chain` say how it came into the frame that handles it, and are not kept.
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
        "place",
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
        self.place: tuple[int, float] | None = None
        """Where and when a journal has recorded it: offset, seconds since the epoch."""

    @property
    def message_id(self) -> str:
        """A UUIDv7 as text, made on the first look."""
        if self._message_id is None:
            with _first_look:
                if self._message_id is None:
                    self._message_id = str(uuid7())
        return self._message_id

    @property
    def correlation_id(self) -> str:
        """The id of the message that began the whole flow; a root's own id."""
        return self._correlation_id or self.message_id

    @property
    def root_id(self) -> str:
        """The id of the message at the beginning of the chain of causes; a root's own id."""
        return self._root_id or self.message_id

    @property
    def created_at(self) -> datetime:
        """The time in the id."""
        milliseconds = int(self.message_id.replace("-", "")[:12], 16)
        return datetime.fromtimestamp(milliseconds / 1000, tz=UTC)

    def inherit(self, parent: Metadata, *, parent_is_system: bool) -> None:
        """Take cause, correlation, session and headers from the message being handled."""
        self.causation_id = parent.message_id
        self._correlation_id = parent.correlation_id
        self.session_id = parent.session_id
        self.headers = parent.headers
        self._root_id = parent.root_id
        self.depth = parent.depth + 1
        self.from_system = parent_is_system or parent.from_system

    def share(self, handled: Sequence[Metadata]) -> None:
        """Take over what all messages of a list have in common."""
        first = handled[0]
        if all(one.correlation_id == first.correlation_id for one in handled):
            self._correlation_id = first.correlation_id
        if all(one.session_id == first.session_id for one in handled):
            self.session_id = first.session_id
        if all(one.headers == first.headers for one in handled):
            self.headers = first.headers
        self.from_system = any(one.from_system for one in handled)

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Put `headers` over the ones it has."""
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
class StoredMetadata(Metadata):
    """Metadata of a stored message, fetched by `load(place)` when somebody looks at it.

    A class of its own: a `__getattr__` makes every look slower, and only these need one.
    """

    __slots__ = ("_load", "_stored_at")

    def __init__(self, load: Callable[[int], Metadata], place: int) -> None:
        self._load = load
        self._stored_at = place

    def __getattr__(self, name: str) -> Any:
        # Called for empty slots; all are, until the first look.
        if name not in Metadata.__slots__:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message)
        loaded = self._load(self._stored_at)
        for slot in Metadata.__slots__:
            setattr(self, slot, getattr(loaded, slot))
        return getattr(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain metadata: what loads it may be a part of something large.
        return Metadata, (), self.__getstate__()
