"""Import an object named as `module:name`, in any process."""

from __future__ import annotations

import importlib
from typing import Any

from msgbus.errors import PipelineOptionError


def import_string(target: str, *, option: str = "target") -> Any:
    """Import the object that `module:name` names.

    Raises:
        PipelineOptionError: There is no such module, or it has no such name.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        message = f"{target!r} names no object: write module:Name, such as shop:Totals."
        raise PipelineOptionError(message, option=option)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0] and error.name != module_name:
            raise
        message = (
            f"There is no module {module_name!r} here. Run from the folder that it is in, or "
            f"install it."
        )
        raise PipelineOptionError(message, option=option) from None
    if not hasattr(module, name):
        message = f"The module {module_name!r} has no {name!r}."
        raise PipelineOptionError(message, option=option)
    return getattr(module, name)
