"""Ids that are the same whenever the same row is written, laid out as UUIDv7."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b
from typing import final
from uuid import UUID

from msgbus.journal.records import Record


@final
class Ids:
    """Gives ids to the messages of one write.

    An id is made of the row's time and of a hash of its content, so that a second write of the
    same rows is known to the journal. Rows that are equal in everything are told apart by
    counting them: which of them comes first makes no difference.
    """

    def __init__(self, scope: str = "") -> None:
        self._scope = scope
        self._seen: Counter[bytes] = Counter()

    def of(self, record: Record) -> str:
        """The id of a record; what it says of its own id does not count."""
        content = blake2b(_content(record, self._scope), digest_size=16).digest()
        nth = self._seen[content]
        self._seen[content] += 1
        if nth:
            content = blake2b(content + nth.to_bytes(8, "big"), digest_size=16).digest()
        return v7(int(record.time * 1000), int.from_bytes(content, "big"))


def v7(milliseconds: int, entropy: int) -> str:
    """A UUIDv7 of a time, and of the lowest 74 bits of a number."""
    time = max(0, milliseconds) & (2**48 - 1)
    high, low = (entropy >> 62) & 0xFFF, entropy & (2**62 - 1)
    return str(UUID(int=time << 80 | 7 << 76 | high << 64 | 2 << 62 | low))


def _content(record: Record, scope: str) -> bytes:
    fields = (
        scope,
        record.name,
        record.version,
        record.topic,
        record.key,
        record.kind.value,
        repr(record.time),
        record.correlation_id,
        record.causation_id,
        record.root_id,
        record.depth,
        record.session_id,
        _ordered(record.headers),
    )
    # With repr a text holds no separator, and None is not "None".
    return "\n".join(map(repr, fields)).encode() + b"\n" + record.payload


def _ordered(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(headers.items())
