"""The wire names of message classes and of everything below them, as of now."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, final

from msgbus.messages.message import Message, classes_defined

if TYPE_CHECKING:
    from msgbus.journal.codec import MessageCodec


@final
class WireNames(Collection[str]):
    """Grows when a subclass is defined, so that none of its messages is passed over."""

    def __init__(
        self, message_types: type[Message] | tuple[type[Message], ...], codec: MessageCodec
    ) -> None:
        self._types = message_types if isinstance(message_types, tuple) else (message_types,)
        self._codec = codec
        self._seen = -1
        self._names: frozenset[str] = frozenset()

    def _now(self) -> frozenset[str]:
        defined = classes_defined()
        if self._seen != defined:
            self._seen = defined
            self._names = frozenset(
                name for one in self._types for name in _names(one, self._codec)
            )
        return self._names

    def __contains__(self, name: object) -> bool:
        # Names are never taken away; asked for every record that is appended.
        return name in self._names or name in self._now()

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def _names(message_type: type[Message], codec: MessageCodec) -> Iterator[str]:
    """Also makes the classes known, so that their records can be decoded."""
    codec.learn(message_type)
    yield message_type.__wire__.name
    for subclass in message_type.__subclasses__():
        yield from _names(subclass, codec)
    yield from codec.other_names(message_type)


def type_named(name: str, base: type[Message], codec: MessageCodec) -> type[Message] | None:
    """The class of this wire name below `base`, if this process has one; it becomes known."""
    known = codec.type_of(name)
    if known is None:
        known = _find(name, base)
        if known is not None:
            codec.learn(known)
    return known


def _find(name: str, base: type[Message]) -> type[Message] | None:
    if base.__wire__.name == name:
        return base
    below = (_find(name, subclass) for subclass in base.__subclasses__())
    return next((found for found in below if found is not None), None)
