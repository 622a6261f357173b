"""Log events with stable names and key/value data.

If the application has configured structlog, events go there. Otherwise they go to the
standard logger `msgbus`, so that warnings and errors are shown even without any logging setup.
The library configures nothing, and never logs payloads.

Values cannot forge log lines: line breaks and other control characters in them are escaped, here
and nowhere else. Only a traceback has several lines, each of which begins with `  | `.

All names are listed in the reference, and are part of the public contract.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias, final

from msgbus.telemetry.tracebacks import redacted_traceback

_msgbus: Final = logging.getLogger("msgbus")

# Control characters, line separators, what changes the direction of text, and lone surrogates,
# which no file can be written with.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


class EventLogger(Protocol):
    """A logger of events with keys, such as structlog's."""

    def debug(self, event: str, **keys: Any) -> Any:
        """Log details."""
        ...

    def info(self, event: str, **keys: Any) -> Any:
        """Log normal operation."""
        ...

    def warning(self, event: str, **keys: Any) -> Any:
        """Log a possible problem."""
        ...

    def error(self, event: str, **keys: Any) -> Any:
        """Log an error."""
        ...


StandardLogger: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any]"


@final
class EventLog:
    """Write log events to one logger; to that of the library unless given.

    If the logger raises, the event goes to the standard logger `msgbus`.

    The key `traceback` takes an exception, or text of several lines. It is formatted only if
    the level is enabled.
    """

    def __init__(self, logger: EventLogger | StandardLogger | None = None) -> None:
        self._is_default = logger is None
        self._standard: StandardLogger = _msgbus
        self._given: Any = None
        self._bound: Any = None
        self._configured: object = None
        self.is_enabled: Callable[[int], bool] = self._is_enabled
        """Whether events of a level are written."""
        if isinstance(logger, logging.Logger | logging.LoggerAdapter):
            self._standard = logger
            self.is_enabled = logger.isEnabledFor
        else:
            self._given = logger

    def debug(self, name: str, /, **data: Any) -> None:
        """Log details."""
        self._write(logging.DEBUG, name, data)

    def info(self, name: str, /, **data: Any) -> None:
        """Log normal operation."""
        self._write(logging.INFO, name, data)

    def warning(self, name: str, /, **data: Any) -> None:
        """Log a possible problem."""
        self._write(logging.WARNING, name, data)

    def error(self, name: str, /, **data: Any) -> None:
        """Log an error."""
        self._write(logging.ERROR, name, data)

    def _is_enabled(self, level: int) -> bool:
        logger = self._bound_logger()
        if logger is None:
            return self._standard.isEnabledFor(level)
        try:
            is_enabled_for = getattr(logger, "is_enabled_for", None) or logger.isEnabledFor
            return bool(is_enabled_for(level))
        except Exception:  # not every logger has such a method
            return True

    def _bound_logger(self) -> Any:
        """The structured logger, bound once per configuration, as binding takes microseconds."""
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
        if not self.is_enabled(level):
            return  # before a traceback is formatted
        logger = self._structured()
        shown, lines = _rendered(data)
        if logger is not None:
            method = logging.getLevelName(level).lower()
            # structlog's renderer for the console puts any other key than `stack` into one line.
            stack = {"stack": lines} if lines else {}
            try:
                getattr(logger, method)(name, **shown, **stack)
            except Exception as error:  # a broken log must not end a lane
                shown["logger_error"] = type(error).__name__
            else:
                return
        if self._standard.isEnabledFor(level):
            text = " ".join([name, *(f"{key}={escaped(f'{shown[key]}')}" for key in shown)])
            if lines:
                text = f"{text}\n{lines}"
                shown["traceback"] = lines
            self._standard.log(level, text, extra={"msgbus": {"event": name, **shown}})


log: Final = EventLog()


def escaped(text: str) -> str:
    """Replace characters that could end a log line, or change how it is shown."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _rendered(data: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Escape all values; the traceback is returned apart from them, line by line."""
    shown = {
        key: escaped(value) if isinstance(value, str) else value
        for key, value in data.items()
        if key != "traceback"
    }
    traceback: BaseException | str | None = data.get("traceback")
    if isinstance(traceback, BaseException):
        traceback = redacted_traceback(traceback)
    lines = traceback.rstrip("\n").split("\n") if traceback else []
    return shown, "\n".join(f"  | {escaped(line)}" for line in lines)
