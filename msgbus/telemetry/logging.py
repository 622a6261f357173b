"""Log events with stable names and key/value data.

If the application has configured structlog, events go there. Otherwise they go to the
standard logger `msgbus`, so that warnings and errors are seen even by a program that has
set up no logging at all. The library itself configures nothing, and never logs payloads.

Every name is listed in the reference; a name is part of the public contract.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias, final

_msgbus: Final = logging.getLogger("msgbus")


class EventLogger(Protocol):
    """A logger of events with keys, as structlog's are."""

    def debug(self, event: str, **keys: Any) -> Any:
        """Log details."""
        ...

    def info(self, event: str, **keys: Any) -> Any:
        """Log what happens."""
        ...

    def warning(self, event: str, **keys: Any) -> Any:
        """Log what may be wrong."""
        ...

    def error(self, event: str, **keys: Any) -> Any:
        """Log what is wrong."""
        ...


StandardLogger: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any]"


@final
class Log:
    """Write log events to one logger; to that of the library if none is given.

    A logger that raises harms nobody: the event goes to the standard logger `msgbus`.
    """

    def __init__(self, logger: EventLogger | StandardLogger | None = None) -> None:
        self._is_default = logger is None
        self._standard: StandardLogger = _msgbus
        self._given: Any = None
        self._bound: Any = None
        self._configured: object = None
        self.is_enabled: Callable[[int], bool] = self._is_enabled
        """Whether events of a level are written; asked before an event is made."""
        if isinstance(logger, logging.Logger | logging.LoggerAdapter):
            self._standard = logger
            self.is_enabled = logger.isEnabledFor
        else:
            self._given = logger

    def debug(self, name: str, /, **data: Any) -> None:
        """Log details."""
        self._write(logging.DEBUG, name, data)

    def info(self, name: str, /, **data: Any) -> None:
        """Log what happens."""
        self._write(logging.INFO, name, data)

    def warning(self, name: str, /, **data: Any) -> None:
        """Log what may be wrong."""
        self._write(logging.WARNING, name, data)

    def error(self, name: str, /, **data: Any) -> None:
        """Log what is wrong."""
        self._write(logging.ERROR, name, data)

    def _is_enabled(self, level: int) -> bool:
        logger = self._bound_logger()
        if logger is None:
            return self._standard.isEnabledFor(level)
        try:
            asked = getattr(logger, "is_enabled_for", None) or logger.isEnabledFor
            return bool(asked(level))
        except Exception:  # not every logger can be asked
            return True

    def _bound_logger(self) -> Any:
        """The structured logger, bound once for each configuration: that takes microseconds."""
        structlog = sys.modules.get("structlog")
        if structlog is None or not structlog.is_configured():
            return self._given
        config = structlog.get_config()
        configured = (config["wrapper_class"], config["logger_factory"])
        if configured != self._configured:
            logger = self._structured()
            self._bound = logger.bind() if hasattr(logger, "bind") else logger
            self._configured = configured
        return self._bound

    def _structured(self) -> Any:
        if not self._is_default:
            return self._given
        # Not imported unless the application has: structlog costs a quarter of a second.
        structlog = sys.modules.get("structlog")
        if structlog is not None and structlog.is_configured():
            return structlog.get_logger("msgbus")
        return None

    def _write(self, level: int, name: str, data: dict[str, Any]) -> None:
        logger = self._structured()
        if logger is not None:
            method = logging.getLevelName(level).lower()
            try:
                getattr(logger, method)(name, **data)
            except Exception as error:  # a broken log must not end a lane
                data = {**data, "logger_error": type(error).__name__}
            else:
                return
        if self._standard.isEnabledFor(level):
            extra = {"msgbus": {"event": name, **data}}
            self._standard.log(level, _text(name, data), extra=extra)


def _text(name: str, data: dict[str, Any]) -> str:
    """Write an event as one line; a traceback below it."""
    line = " ".join([name, *(f"{key}={data[key]}" for key in data if key != "traceback")])
    return f"{line}\n{data['traceback'].rstrip()}" if data.get("traceback") else line


log: Final = Log()
