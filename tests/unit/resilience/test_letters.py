"""One dead letter: what it says, and how its message comes back."""

from __future__ import annotations

import dataclasses
import json
import pickle
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    computed_field,
    field_serializer,
)

from msgbus import Command, Event
from msgbus.errors import DeadLetterError, UnreadableLetterError
from msgbus.messages.message import fix
from msgbus.resilience import DeadLetterEntry, LetterStatus
from msgbus.resilience.dead_letters.entry import (
    decoded,
    edited_letter,
    from_data,
    letter_about,
    letter_id_of,
    message_classes,
)
from tests.unit.resilience.letter_fakes import CardCharged, ChargeCard

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def about(message: Command[Any] | Event, error: BaseException | None = None) -> DeadLetterEntry:
    return letter_about(
        message,
        handler="charge",
        error=ConnectionError("down") if error is None else error,
        attempts=2,
        first_attempt=NOON,
        last_attempt=NOON,
        reason="retries exhausted",
    )


def stored(letter: DeadLetterEntry) -> DeadLetterEntry:
    """The letter as another process reads it."""
    return from_data(json.loads(json.dumps(letter.data())))


# -- what it says ------------------------------------------------------------------------------


def test_a_letter_says_what_its_message_was_and_where_it_came_from() -> None:
    cause = ChargeCard(order=1)
    event = CardCharged(order=7)
    fix(cause, None, session_id="s", headers={"tenant": "acme"})
    fix(event, cause, topic="a.b")

    letter = about(event)

    assert (letter.message_id, letter.message_type) == (event.message_id, "letters.CardCharged")
    assert (letter.version, letter.kind, letter.topic) == (2, "event", "a.b")
    assert (letter.causation_id, letter.correlation_id) == (cause.message_id, cause.message_id)
    assert (letter.session_id, dict(letter.headers)) == ("s", {"tenant": "acme"})
    assert json.loads(letter.payload) == {"order": 7, "note": ""}
    assert (letter.status, letter.replays, letter.note) == (LetterStatus.DEAD, 0, None)


def test_a_letter_of_a_command_says_so() -> None:
    assert about(ChargeCard()).kind == "command"


def test_a_letter_is_read_only() -> None:
    letter = about(ChargeCard())

    with pytest.raises(dataclasses.FrozenInstanceError):
        letter.attempts = 9  # type: ignore[misc]


def test_a_letters_id_is_that_of_its_message_and_handler() -> None:
    event = CardCharged()

    assert about(event).letter_id == letter_id_of(event.message_id, "charge")
    assert letter_id_of(event.message_id, "charge") != letter_id_of(event.message_id, "ship")
    assert letter_id_of(event.message_id, "charge").startswith(event.message_id)


def test_times_are_aware_and_in_utc() -> None:
    east = timezone(timedelta(hours=2))
    letter = letter_about(
        ChargeCard(), handler="h", error=ValueError(), attempts=1, reason="r",
        first_attempt=NOON.replace(tzinfo=None), last_attempt=datetime(2026, 1, 1, 14, tzinfo=east),
    )  # fmt: skip

    assert (letter.first_attempt, letter.last_attempt) == (NOON, NOON)
    assert letter.last_attempt.tzinfo is UTC


# -- secrets -----------------------------------------------------------------------------------


def test_secrets_in_error_traceback_and_reason_are_not_stored() -> None:
    try:
        raise ConnectionError("cannot reach https://bob:hunter2@db.example/x")
    except ConnectionError as error:
        letter = letter_about(
            ChargeCard(), handler="h", error=error, attempts=1, first_attempt=NOON,
            last_attempt=NOON, reason="password=hunter2",
        )  # fmt: skip

    assert "hunter2" not in json.dumps(letter.data())
    assert letter.error.startswith("ConnectionError: cannot reach https://")
    assert letter.error_type == "ConnectionError"
    assert "test_letters.py" in letter.traceback


def test_a_secret_field_is_not_stored_and_such_a_letter_is_not_replayed_without_it() -> None:
    class Login(Command, name="letters.Login"):
        password: SecretStr

    letter = stored(about(Login(password=SecretStr("hunter2"))))

    assert "hunter2" not in letter.payload
    with pytest.raises(UnreadableLetterError, match=r"letters\.Login .*secret.*field_serializer"):
        _ = letter.message


def test_a_secret_field_with_a_serializer_of_its_own_is_stored() -> None:
    class Unlock(Command, name="letters.Unlock"):
        code: SecretStr

        @field_serializer("code", when_used="json")
        def _plain(self, code: SecretStr) -> str:
            return code.get_secret_value()

    message = stored(about(Unlock(code=SecretStr("1234")))).message

    assert message == Unlock(code=SecretStr("1234"))


def test_an_unprintable_error_makes_a_letter() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    letter = about(ChargeCard(), BrokenError())

    assert letter.error == "BrokenError: <unprintable>"
    assert "BrokenError" in letter.traceback


# -- messages come back ------------------------------------------------------------------------


class Odd(Event, name="letters.Odd"):
    model_config = ConfigDict(strict=True)

    amount: Decimal
    when: datetime
    tags: frozenset[str]
    renamed: int = Field(alias="wire-name")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> Decimal:
        return self.amount * 2


def test_a_message_comes_back_equal_with_its_metadata() -> None:
    event = Odd.model_validate(
        {"amount": Decimal("1.10"), "when": NOON, "tags": frozenset({"a"}), "wire-name": 4}
    )
    fix(event, CardCharged(), session_id="s", headers={"a": "b"}, topic="t")

    letter = stored(about(event))
    message = letter.message

    assert message == event
    assert letter.message is message
    assert (message.message_id, message.created_at) == (event.message_id, event.created_at)
    assert (message.causation_id, message.correlation_id) == (
        event.causation_id, event.correlation_id,
    )  # fmt: skip
    assert (message.session_id, message.headers) == ("s", {"a": "b"})
    assert pickle.loads(pickle.dumps(message)).message_id == event.message_id


def test_a_sent_message_that_comes_back_does_not_take_another_cause() -> None:
    event = CardCharged()
    fix(event, None)

    message = stored(about(event)).message
    fix(message, ChargeCard())

    assert message.causation_id is None


def test_a_message_whose_class_is_not_imported_says_which_and_what_to_do() -> None:
    letter = stored(about(CardCharged(order=3)))
    letter = dataclasses.replace(letter, message_type="shop.Gone", origin="shop.messages:Gone")

    with pytest.raises(
        UnreadableLetterError, match=r"shop\.Gone .*Import .* shop\.messages"
    ) as caught:
        _ = letter.message

    assert caught.value.message_type == "shop.Gone"
    assert json.loads(letter.payload)["order"] == 3


def test_a_message_that_its_schema_refuses_says_which_field_and_what_to_do() -> None:
    letter = stored(about(CardCharged(order=3)))
    letter = dataclasses.replace(letter, payload='{"order": "three"}', version=1)

    with pytest.raises(
        UnreadableLetterError, match=r"version 1, .* order: .*edit\(letter"
    ) as caught:
        _ = letter.message

    assert "three" not in str(caught.value)  # a payload, perhaps a secret one


def test_of_two_classes_of_one_name_the_one_that_was_sent_comes_back() -> None:
    class Twin(Event, name="letters.Twin"):
        number: int = 1

    first = Twin

    class OtherTwin(Event, name="letters.Twin"):
        number: int = 2

    assert type(stored(about(first())).message) is first
    assert type(stored(about(OtherTwin())).message) is OtherTwin
    stranger = dataclasses.replace(stored(about(first())), origin="elsewhere:Twin")
    with pytest.raises(UnreadableLetterError, match=r"several classes .*Twin.*OtherTwin"):
        _ = stranger.message


def test_what_json_cannot_hold_makes_a_letter_that_cannot_be_replayed() -> None:
    class Holder(Event, name="letters.Holder"):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        file: Path
        thing: object

    class Thing:
        pass

    class Raises(Event, name="letters.Raises"):
        number: int = 1

        @field_serializer("number")
        def _fail(self, number: int) -> int:
            raise RuntimeError(str(number))

    letter = about(Holder(file=Path("x"), thing=Thing()))

    assert json.loads(letter.payload) == {"file": "x", "thing": "<Thing>"}
    unreadable = stored(about(Raises()))
    assert unreadable.payload == "null"
    with pytest.raises(UnreadableLetterError, match=r"letters\.Raises"):
        decoded(unreadable)


def test_every_class_is_met_once_however_often_it_is_inherited() -> None:
    classes = list(message_classes())

    assert len(classes) == len(set(classes))
    assert {ChargeCard, CardCharged} <= set(classes)


# -- as data -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"letter_id": "other"}, "letter_id"),
        ({"status": "asleep"}, "asleep"),
        ({"first_attempt": "noon"}, "noon"),
        ({"colour": "red"}, "colour"),
        ({"payload": 5}, "text"),
        ({"headers": 5}, "texts by name"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_is_no_letter_is_refused(change: dict[str, object], problem: str) -> None:
    data = {**about(ChargeCard()).data(), **change}

    with pytest.raises(DeadLetterError, match=problem):
        from_data(data)


def test_a_letter_without_a_field_is_refused() -> None:
    data = about(ChargeCard()).data()
    del data["handler"]

    with pytest.raises(DeadLetterError, match="handler"):
        from_data(data)


# -- what is not stored as it was sent ---------------------------------------------------------


class Parcel(BaseModel):
    weight: int = 1


class Fragile(Parcel):
    note: str = "this side up"


class Parcelled(Event, name="letters.Parcelled"):
    parcels: tuple[Parcel, ...] = ()
    number: int = 0


def test_a_message_that_would_come_back_as_another_is_not_replayed_from_the_store() -> None:
    event = Parcelled(parcels=(Parcel(), Fragile()))
    letter = about(event)

    assert letter.message is event
    assert json.loads(letter.payload)["parcels"] == [{"weight": 1}, {"weight": 1}]
    with pytest.raises(UnreadableLetterError, match=r"parcels\[1\] is not stored as it was sent"):
        _ = stored(letter).message


def test_such_a_letter_can_be_edited_if_the_field_is_given() -> None:
    letter = stored(about(Parcelled(parcels=(Fragile(),))))

    with pytest.raises(UnreadableLetterError, match=r"parcels\[0\]"):
        edited_letter(letter, {"number": 1})
    edited = edited_letter(letter, {"parcels": [{"weight": 3}]})
    assert stored(edited).message == Parcelled(parcels=(Parcel(weight=3),))
