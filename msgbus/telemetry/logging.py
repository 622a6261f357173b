"""Log events with stable names and key/value data.

If the application has configured structlog, events go there. Otherwise they go to the
standard logger `msgbus`, so that warnings and errors are seen even by a program that has
set up no logging at all. The library itself configures nothing, and never logs payloads.

Every name is listed in the reference; a name is part of the public contract.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final, final

_standard: Final = logging.getLogger("msgbus")


@final
class _Log:
    """One door for all log events of the library."""

    def debug(self, name: str, **data: Any) -> None:
        self._write(logging.DEBUG, name, data)

    def info(self, name: str, **data: Any) -> None:
        self._write(logging.INFO, name, data)

    def warning(self, name: str, **data: Any) -> None:
        self._write(logging.WARNING, name, data)

    def error(self, name: str, **data: Any) -> None:
        self._write(logging.ERROR, name, data)

    def _write(self, level: int, name: str, data: dict[str, Any]) -> None:
        # Not imported unless the application has: structlog costs a quarter of a second.
        structlog = sys.modules.get("structlog")
        if structlog is not None and structlog.is_configured():
            method = logging.getLevelName(level).lower()
            try:
                getattr(structlog.get_logger("msgbus"), method)(name, **data)
            except Exception as error:  # a broken log must not end a lane
                data = {**data, "structlog_error": type(error).__name__}
            else:
                return
        if _standard.isEnabledFor(level):
            text = " ".join([name, *(f"{key}={value}" for key, value in data.items())])
            _standard.log(level, text, extra={"msgbus": {"event": name, **data}})


log: Final = _Log()
