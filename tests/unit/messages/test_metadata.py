"""Metadata of stored messages: fetched at the first look, and then as any other."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from msgbus import Event
from msgbus.messages import message as messages, metadata
from msgbus.messages.message import fix, metadata_of, set_meta
from msgbus.messages.metadata import Metadata, StoredMetadata


class Stored(Event):
    number: int


class Store:
    def __init__(self) -> None:
        self.looks: list[int] = []

    def load(self, place: int) -> Metadata:
        self.looks.append(place)
        return Metadata(
            f"id-{place}",
            correlation_id="flow",
            causation_id="cause",
            session_id="job",
            headers={"tenant": "t1"},
            topic="shop.stored",
            fixed=True,
            root_id="root",
            depth=3,
        )


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def message(store: Store) -> Stored:
    made = Stored(number=1)
    set_meta(made, StoredMetadata(store.load, 7))
    return made


def test_nothing_is_fetched_before_somebody_looks_and_then_once(
    message: Stored, store: Store
) -> None:
    assert (message.number, store.looks) == (1, [])
    assert message == Stored(number=1)
    assert store.looks == []

    assert message.session_id == "job"
    assert (message.message_id, message.correlation_id) == ("id-7", "flow")
    assert (message.causation_id, message.headers) == ("cause", {"tenant": "t1"})
    assert store.looks == [7]


def test_it_is_the_cause_of_other_messages(message: Stored) -> None:
    effect = Stored(number=2)

    fix(effect, message)

    meta = metadata_of(effect)
    assert (meta.causation_id, meta.correlation_id, meta.session_id) == ("id-7", "flow", "job")
    assert (meta.root_id, meta.depth, dict(meta.headers)) == ("root", 4, {"tenant": "t1"})


def test_pickling_keeps_it_and_not_what_loads_it(message: Stored) -> None:
    copy = pickle.loads(pickle.dumps(message))

    meta = metadata_of(copy)
    assert type(meta) is Metadata
    assert (meta.message_id, meta.session_id, meta.topic) == ("id-7", "job", "shop.stored")


def test_it_has_no_other_attributes(message: Stored, store: Store) -> None:
    meta: Any = metadata_of(message)

    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = meta.colour
    assert store.looks == []


@pytest.mark.parametrize("lock", [metadata._first_read, messages._making])  # pyright: ignore[reportPrivateUsage]
def test_a_failed_result_that_is_collected_while_an_id_is_made_hangs_nobody(lock: Any) -> None:
    """The collector runs where it likes, and an unobserved failure is logged with its id."""

    def look_again() -> None:
        with lock:  # as if the collector ran inside the first look at another message's id
            ids.append(Stored(number=1).message_id)

    ids: list[str] = []
    thread = threading.Thread(target=look_again, daemon=True)
    thread.start()
    thread.join(30)

    assert len(ids) == 1
