"""HTML that is safe by the way it is made: text is escaped, only `Markup` is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final, TypeAlias


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child: TypeAlias = str | int | float | Sequence["Child"] | None

_VOID: Final = frozenset({"br", "circle", "line", "meta", "path", "polyline", "rect"})

# Characters that HTML does not allow, and half characters, which no file can hold.
_FORBIDDEN: Final = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127), "�")


def text(value: object) -> Markup:
    """A value as text of a page."""
    if isinstance(value, Markup):
        return value
    clean = str(value).translate(_FORBIDDEN).encode("utf-8", "replace").decode()
    return Markup(escape(clean))


def el(name: str, /, *children: Child, **attributes: object) -> Markup:
    """An element. `class_` is the attribute `class`; `stroke_width` is `stroke-width`."""
    given = "".join(
        f' {key.strip("_").replace("_", "-")}="{text(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """Elements and texts one after the other; `None` is nothing."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, (str, int, float)):
            parts.append(text(child))
        else:
            parts.append(join(child))
    return Markup("".join(parts))


def _number(value: object) -> object:
    # Coordinates: a tenth of a pixel is enough, and keeps the file small.
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
