"""A codec of payloads, where workers can import it."""

from __future__ import annotations

from hashlib import blake2b


class Flipped:
    """Turns every bit, and says in front whose payload it is: bytes that are no text, nor JSON."""

    def encode(self, payload: bytes, associated: bytes) -> bytes:
        return self.mark(associated) + bytes(255 - one for one in payload)

    def decode(self, payload: bytes, associated: bytes) -> bytes:
        mark = self.mark(associated)
        if not payload.startswith(mark):
            message = "this was stored by another codec, or for another message"
            raise ValueError(message)
        return bytes(255 - one for one in payload[len(mark) :])

    @staticmethod
    def mark(associated: bytes) -> bytes:
        return b"\x00\xff" + blake2b(associated, digest_size=8).digest()


flipped = Flipped()
