"""Redaction hides values that are secrets, and nothing else."""

import subprocess
import sys
import uuid

import pytest
from hypothesis import given, strategies as st

from msgbus.telemetry.redaction import (
    redact,
)
from tests.unit.telemetry.samples import INNOCENT, SECRETS


@pytest.mark.parametrize(
    ("text", "secret", "expected"),
    [pytest.param(*case, id=name) for name, *case in SECRETS],
)
def test_a_secret_is_replaced_and_its_surroundings_stay(
    text: str, secret: str, expected: str
) -> None:
    assert secret in text
    result = redact(text)
    assert secret not in result
    assert result == expected


@pytest.mark.parametrize("text", INNOCENT, ids=lambda text: str(text)[:40])
def test_an_innocent_text_survives_unchanged(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "secret"), [pytest.param(text, secret, id=name) for name, text, secret, _ in SECRETS]
)
def test_a_secret_is_found_anywhere_in_a_log_record(text: str, secret: str) -> None:
    record = f"2024-01-15 10:30:00,123 ERROR orders: delivery 7 failed ({text}\n) after 3 tries"
    assert secret not in redact(record)


@given(st.uuids())
def test_a_uuid_survives_unchanged(value: uuid.UUID) -> None:
    assert redact(f"message {value} lost") == f"message {value} lost"


@given(st.datetimes())
def test_a_timestamp_survives_unchanged(value: object) -> None:
    assert redact(f"since {value}") == f"since {value}"


# Larger ones may well be card numbers that went through a column of floats.
@given(st.floats(-1e12, 1e12))
def test_a_measured_float_survives_unchanged(value: float) -> None:
    assert redact(f"took {value} s") == f"took {value} s"


def test_importing_the_bus_compiles_no_rules() -> None:
    code = "import sys, msgbus, msgbus.telemetry.redaction; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()

    assert "msgbus.telemetry.redaction" in loaded
    assert not [name for name in loaded if name.startswith("msgbus.telemetry.redaction.")]
