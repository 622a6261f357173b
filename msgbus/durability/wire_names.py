"""The wire names of a message class and of everything below it, as of now."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, final

from msgbus.messages import Message, classes_defined

if TYPE_CHECKING:
    from msgbus.journal.codec import MessageCodec


@final
class WireNames(Collection[str]):
    """Grows when a subclass is defined, so that none of its messages is passed over."""

    def __init__(self, message_type: type[Message], codec: MessageCodec) -> None:
        self._type = message_type
        self._codec = codec
        self._seen = -1
        self._names: frozenset[str] = frozenset()

    def _now(self) -> frozenset[str]:
        defined = classes_defined()
        if self._seen != defined:
            self._seen = defined
            self._names = frozenset(_names(self._type, self._codec))
        return self._names

    def __contains__(self, name: object) -> bool:
        return name in self._now()

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
