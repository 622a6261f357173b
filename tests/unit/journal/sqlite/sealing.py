"""A codec that hides and authenticates, and bytes of a file that are moved behind its back."""

from __future__ import annotations

import hmac
import sqlite3
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes
from typing import Any, Final

from msgbus.journal.records import DeliveryRecord, Outcome
from msgbus.journal.sqlite import columns
from msgbus.journal.sqlite.messages import (
    MESSAGE,
    _checksum as message_checksum,  # pyright: ignore[reportPrivateUsage]
)


class Sealing:
    """Encrypts and signs with the standard library only: a test, no cryptography.

    It never returns the same bytes twice.
    """

    def __init__(self, key: bytes = b"key") -> None:
        self._key = key
        self.encoded: list[bytes] = []
        """What it was told of the bytes that it was given."""

    def encode(self, payload: bytes, associated: bytes) -> bytes:
        self.encoded.append(associated)
        nonce = token_bytes(16)
        hidden = self._mixed(payload, nonce)
        return self._signature(hidden, nonce, associated) + nonce + hidden

    def decode(self, payload: bytes, associated: bytes) -> bytes:
        signature, nonce, hidden = payload[:32], payload[32:48], payload[48:]
        if signature != self._signature(hidden, nonce, associated):
            message = "The signature does not fit."
            raise RuntimeError(message)
        return self._mixed(hidden, nonce)

    def _signature(self, hidden: bytes, nonce: bytes, associated: bytes) -> bytes:
        return hmac.digest(self._key, nonce + associated + b"\n" + hidden, "sha256")

    def _mixed(self, content: bytes, nonce: bytes) -> bytes:
        blocks = range(len(content) // 64 + 1)
        stream = b"".join(blake2b(nonce, key=self._key, salt=b"%d" % n).digest() for n in blocks)
        return bytes(one ^ other for one, other in zip(content, stream, strict=False))


sealing: Final = Sealing()
other: Final = Sealing(b"other")
CODEC: Final = f"{__name__}:sealing"
"""Where Spark's workers find it."""


def _delivery_checksum(*values: Any) -> int:
    offset, handler, time, attempt, message_id, word, wait, run, error = values
    outcome = Outcome(word)
    found = (message_id, handler, attempt, outcome, wait, run, time, error, offset or None)
    return int(columns.delivery_row(DeliveryRecord(*found), None)[-1])


TABLES: Final[dict[str, tuple[str, Callable[..., int]]]] = {
    "messages": (MESSAGE, message_checksum),
    "pending": (
        columns.PENDING,
        columns._pending_checksum,  # pyright: ignore[reportPrivateUsage]
    ),
    "letters": (columns.LETTER, columns.checksum),
    "results": (columns.RESULT, columns.checksum),
    "deliveries": (columns.DELIVERY, _delivery_checksum),
    "instances": (columns.INSTANCE, columns.checksum),
}
"""Columns and checksum of each table."""


def _base64(content: bytes) -> str:
    return b64encode(content).decode()


def rewrite(path: Path, table: str, change: str, where: str = "1") -> None:
    """Change columns by SQL, and make all checksums fit: only a codec can notice it.

    What a codec stores in a column of text is in base64.
    """
    names, checksum = TABLES[table]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.create_function("base64", 1, _base64)
        connection.create_function("unbase64", 1, b64decode)
        done = connection.execute(f"UPDATE msgbus_{table} SET {change} WHERE {where}")
        assert done.rowcount > 0
        for row in connection.execute(f"SELECT {names} FROM msgbus_{table}").fetchall():
            keys = " AND ".join(f"{name} IS ?" for name in names.split(", ")[:-1])
            values = (checksum(*row[:-1]), *row[:-1])
            connection.execute(f"UPDATE msgbus_{table} SET crc = ? WHERE {keys}", values)
