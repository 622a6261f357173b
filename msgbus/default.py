"""The process-wide default bus, for programs that want one. The library never uses it."""

from __future__ import annotations

import threading
from typing import Final

from msgbus.bus.bus import MessageBus

_lock: Final = threading.Lock()
_default: list[MessageBus] = []


def get_bus() -> MessageBus:
    """The default bus of this process, made on first use; safe to call from any thread.

    A convenience for scripts and small programs. Anything larger makes its own
    `MessageBus` and passes it on: then two of them, or a test, do not share handlers.
    """
    with _lock:
        if not _default:
            _default.append(MessageBus())
        return _default[0]
