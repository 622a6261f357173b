"""Issue 20, point 5: redaction of the tables of secrets and of innocent texts."""

from typing import Final

import pytest

from msgbus.telemetry.redaction import redact
from tests.unit.telemetry.corpus import Row, read

_SECRETS: Final = read("secrets.txt")
_INNOCENT: Final = read("innocent.txt")


def _leaks(row: Row) -> bool:
    result = redact(row.text)
    return any(secret in result for secret in row.secrets)


def _changes(row: Row) -> bool:
    return redact(row.text) != row.text


def _names(rows: list[Row]) -> list[str]:
    return [row.name for row in rows]


def test_the_tables_are_large_and_each_secret_is_in_its_text() -> None:
    assert len(_SECRETS) >= 200
    assert len(_INNOCENT) >= 200
    assert all(row.secrets for row in _SECRETS)
    assert all(secret in row.text for row in _SECRETS for secret in row.secrets)


def test_at_least_95_percent_of_the_secrets_are_removed() -> None:
    leaks = [row for row in _SECRETS if _leaks(row)]
    assert len(leaks) <= 0.05 * len(_SECRETS), _names(leaks)


def test_at_most_2_percent_of_the_innocent_texts_are_changed() -> None:
    changed = [row for row in _INNOCENT if _changes(row)]
    assert len(changed) <= 0.02 * len(_INNOCENT), _names(changed)


@pytest.mark.parametrize("row", _SECRETS, ids=_names(_SECRETS))
def test_a_secret_is_removed_unless_it_is_a_known_leak(row: Row) -> None:
    assert _leaks(row) is row.known_fault, redact(row.text)


@pytest.mark.parametrize("row", _INNOCENT, ids=_names(_INNOCENT))
def test_an_innocent_text_is_unchanged_unless_known_to_be_changed(row: Row) -> None:
    assert _changes(row) is row.known_fault, redact(row.text)


@pytest.mark.parametrize("row", _SECRETS, ids=_names(_SECRETS))
def test_a_secret_is_removed_on_a_line_among_others(row: Row) -> None:
    result = redact(f"attempt 2 of 3 failed:\n{row.text}\nnext attempt in 5 s\n")
    assert any(secret in result for secret in row.secrets) is row.known_fault, result
    assert result.startswith("attempt 2 of 3 failed:\n")
