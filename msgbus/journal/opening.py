"""From a URL to an open journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgbus.errors import JournalOpenError
from msgbus.journal.memory import MemoryJournal
from msgbus.journal.port import Journal
from msgbus.journal.sqlite import SqliteJournal

if TYPE_CHECKING:
    from msgbus.journal.codec import PayloadCodec
    from msgbus.runtime.clock import Clock


def open_journal(
    url: str, *, clock: Clock | None = None, codec: PayloadCodec | None = None
) -> Journal:
    """The journal that a URL names: `sqlite:///shop.db`, `sqlite:///:memory:` or `memory:`.

    Raises:
        JournalOpenError: There is no such journal, or it cannot be opened.
    """
    scheme, colon, _ = url.partition(":")
    if colon and scheme == "sqlite":
        return SqliteJournal(url, clock=clock, codec=codec)
    if url.rstrip("/") == "memory:":
        return MemoryJournal(clock=clock, codec=codec)
    message = (
        f"{url!r} is no journal that msgbus knows. Write sqlite:///shop.db for a file, "
        f"or memory: for one that ends with the process."
    )
    raise JournalOpenError(message)
