"""The words of the field, in names, docstrings, errors and docs; and no class name twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import ROOT, pages

FORBIDDEN: Final = re.compile(
    r"""(?ix) \b (?:
        tries | bur(?:y|ied|ies) | fares? | in \s peace | whose \s turn
        | (?:in|at) [\s_] hand
        | (?:give[sn]?|gave|giving) [\s_] up
        | (?:tell|tells|told) \s of
        | (?:go|goes|gone|went) [\s_] home
        | (?:first|second|third|next|last|another|each|every|one|failed) \s try
        | places? \s in \s the \s (?:journal|log)
    ) \b"""
)
"""What the glossary has other words for: attempt, in flight, dead-letter, back off, offset."""

SOURCES: Final = sorted((ROOT / "msgbus").rglob("*.py"))


def words_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every text and every name that a module defines, with its line."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield line, node.value
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield line, node.name
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield line, node.id if isinstance(node, ast.Name) else node.attr


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_names_docstrings_and_errors_use_the_words_of_the_field(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    comments = enumerate(re.findall(r"(?m)^.*?(#\s.*)?$", text), 1)
    said = [*words_of(ast.parse(text)), *comments]

    found = [f"{line}: {match[0]}" for line, one in said for match in FORBIDDEN.finditer(one)]

    assert found == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_use_the_words_of_the_field(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)

    found = [f"{number}: {one[0]}" for number, line in lines for one in FORBIDDEN.finditer(line)]

    assert found == []


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(f"{file.relative_to(ROOT)}:{node.lineno}")

    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


@pytest.mark.parametrize("text", ["It is in hand.", "in_hand", "the first try", "gave up", "Tries"])
def test_a_forbidden_word_is_found(text: str) -> None:
    assert FORBIDDEN.search(text)
