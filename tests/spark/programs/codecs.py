"""A codec of payloads, where workers can import it."""

from __future__ import annotations


class Flipped:
    """Turns every bit, and says in front that it has: bytes that are no text, nor JSON."""

    MARK = b"\x00\xff"

    def encode(self, payload: bytes) -> bytes:
        return self.MARK + bytes(255 - one for one in payload)

    def decode(self, stored: bytes) -> bytes:
        if not stored.startswith(self.MARK):
            message = "this was stored by another codec"
            raise ValueError(message)
        return bytes(255 - one for one in stored[len(self.MARK) :])


flipped = Flipped()
