"""Names of a package that are imported at their first use."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable
from importlib import import_module


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a package from its `if TYPE_CHECKING:` block.

    Each name is then written once, for readers, type checkers and the import alike.
    """
    modules: dict[str, str] = {}

    def names() -> list[str]:
        if not modules:
            modules.update(_imports_for_types(package))
        return sorted(modules)

    def load(name: str) -> object:
        known = names()
        if name == "__all__":
            return known
        if name not in modules:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message)
        value: object = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, names


def _imports_for_types(package: str) -> dict[str, str]:
    """Read which names a package imports for type checkers, and from where."""
    module = sys.modules[package]
    lines = linecache.getlines(module.__file__ or "", vars(module))  # from a zip file, too
    tree = ast.parse("".join(lines))
    blocks = [one for one in tree.body if isinstance(one, ast.If)]
    return {
        alias.name: node.module
        for block in blocks
        if ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
