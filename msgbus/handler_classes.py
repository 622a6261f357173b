"""Handler classes: made by the bus from what it provides, once or for each message."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast, final

from msgbus.handlers.signatures import Signature, method_of, read_constructor


@final
class HandlerClass:
    """A class that was registered as a handler.

    Raises:
        HandlerSignatureError: No object of it can be made.
    """

    def __init__(self, cls: type, *, per_message: bool) -> None:
        self.cls: type[Any] = cls
        self.method = cast("str", method_of(cls))
        self.per_message = per_message
        """Whether it is made for each message, even if what it asks for lives longer."""
        read_constructor(cls)

    @cached_property
    def constructor(self) -> Signature:
        """What its constructor asks for.

        Read at the first use, not when it is registered: a decorator above, such as
        `@dataclass`, may give it another.
        """
        return read_constructor(self.cls)
