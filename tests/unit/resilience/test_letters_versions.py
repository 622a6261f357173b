"""Dead letters of older versions of a class come back through its upcasters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from msgbus import Event
from msgbus.errors import UnreadableLetterError
from msgbus.journal import upcasts
from msgbus.resilience import DeadLetterEntry
from msgbus.resilience.dead_letters.entry import edited_letter
from msgbus.testing.conformance.dead_letters import letter


class Moved(Event, name="letters.Moved", version=3):
    street: str
    town: str


@upcasts(Moved, from_version=1)
def _split(data: dict[str, Any]) -> dict[str, Any]:
    street, town = data["address"].split(", ")
    return {"street": street, "place": town}


@upcasts(Moved, from_version=2)
def _rename(data: dict[str, Any]) -> dict[str, Any]:
    return {"street": data["street"], "town": data["place"]}


def old_letter(payload: str, version: int) -> DeadLetterEntry:
    new = letter(message=Moved(street="", town=""))
    return replace(new, payload=payload, version=version, _message=None)


@pytest.mark.parametrize(
    ("payload", "version"),
    [
        ('{"address": "High Street, Ely"}', 1),
        ('{"street": "High Street", "place": "Ely"}', 2),
        ('{"street": "High Street", "town": "Ely"}', 3),
    ],
)
def test_a_letter_of_an_older_version_is_brought_up_to_date(payload: str, version: int) -> None:
    old = old_letter(payload, version)

    assert old.message == Moved(street="High Street", town="Ely")
    assert old.message.message_id == old.message_id
    assert edited_letter(old, {"town": "York"}).message == Moved(street="High Street", town="York")
    assert old.payload == payload


def test_an_upcaster_that_fails_leaves_the_letter_as_it_is() -> None:
    old = old_letter('{"address": "nowhere"}', 1)

    with pytest.raises(UnreadableLetterError, match="an upcaster of Moved failed on its version 1"):
        _ = old.message
