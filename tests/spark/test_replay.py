"""A replay in Spark gives the rows of the plain fold, on random histories too."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic import BaseModel
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from msgbus import Event, pipeline
from msgbus.errors import PipelineOptionError
from msgbus.journal import (
    DeliveryRecord,
    MessageCodec,
    Outcome,
    Record,
    SqliteJournal,
    State,
    upcasts,
)
from msgbus.journal.operations import Append, Note, Put
from msgbus.messages.message import metadata_of
from msgbus.pipeline import Pipeline, Projection, fold
from msgbus.testing.conformance.journal.kit import LETTER, TIME, make_row
from tests.counts import RANDOM_HISTORIES
from tests.evidence import Evidence
from tests.spark.kit import append, with_journal


class Moved(Event, name="replay.Moved", version=2, key="who"):
    who: str
    step: int


class Jumped(Moved, name="replay.Jumped"):
    height: float = 0.0


class Rested(Event, name="replay.Rested"):
    who: str | None
    place: str = ""


class Noise(Event, name="replay.Noise", key="who"):
    who: str


@upcasts(Moved, from_version=1)
def _step_was_text(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "step": int(fields["step"])}


class Walk(BaseModel):
    who: str
    steps: int = 0
    events: int = 0
    trail: str = ""
    """Depends on the order of all events."""
    places: list[str] = []


class Walks(Projection[Walk, Moved | Rested]):
    def key(self, event: Moved | Rested) -> str | None:
        return event.who

    def initial(self, key: str) -> Walk:
        return Walk(who=key)

    def apply(self, state: Walk, event: Moved | Rested) -> Walk:
        steps = event.step if isinstance(event, Moved) else 0
        places = [*state.places, event.place] if isinstance(event, Rested) else state.places
        trail = f"{crc32(f'{state.trail} {event!r} {event.session_id}'.encode()):x}"
        return Walk(
            who=state.who,
            steps=state.steps + steps,
            events=state.events + 1,
            trail=trail,
            places=places,
        )

    def result(self, key: str, state: Walk) -> Walk | None:
        return state if state.steps >= 0 else None


WHO = st.sampled_from(["ann", "bo", "cy", "ünal", ""])
EVENTS = st.one_of(
    st.builds(Moved, who=WHO, step=st.integers(-5, 9)),
    st.builds(Jumped, who=WHO, step=st.integers(-5, 9), height=st.floats(0, 2)),
    st.builds(Rested, who=WHO | st.none(), place=st.text(max_size=3)),
    st.builds(Noise, who=WHO),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Record], list[int]]:
    """Records in the order of arrival, and the places of those that are given up on."""
    codec = MessageCodec()
    records: list[Record] = []
    for number, event in enumerate(draw(st.lists(EVENTS, max_size=40))):
        # Late: what happened earlier arrives later.
        record = codec.encode(event, time=TIME + number - draw(st.sampled_from([0, 0, 0, 30])))
        if record.name == "replay.Moved" and draw(st.booleans()):
            step = record.json()["step"]
            payload = b'{"who":"%s","step":"%d"}' % (record.json()["who"].encode(), step)
            record = record._replace(version=1, payload=payload)
        records.append(record._replace(session_id=draw(st.sampled_from([None, "s1"]))))
    if records:
        places = st.lists(st.integers(0, len(records) - 1), max_size=6)
        for place in draw(places):
            records.append(records[place])  # sent again under the same id
        return records, draw(places)
    return records, []


async def write(journal: SqliteJournal, records: Sequence[Record], lost: Sequence[int]) -> None:
    offsets = [(await journal.commit([Append(record)]))[0].offset for record in records]
    dead = {offsets[place]: records[place] for place in lost}
    for offset, one in dead.items():
        note = DeliveryRecord(one.message_id, "walker", 3, Outcome.DEAD_LETTERED, 0, 0, TIME, "no")
        row = make_row("walker", offset, State.DEAD, attempt=3, error="no")
        await journal.commit([Note(note), Put(row, LETTER)])


def replayed(pipe: Pipeline, projection: Any, **options: Any) -> list[Any]:
    """The rows of a replay as models, sorted by key."""
    rows = pipe.replay(projection, **options).collect()
    model = Walk
    return sorted((model(**row.asDict(recursive=True)) for row in rows), key=lambda row: row.who)


def folded(path: Path, projection: Any, **options: Any) -> list[Any]:
    return with_journal(path, lambda journal: fold(journal, projection, **options))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough for several tasks and batches, with keys that are spread over all of them."""
    made = tmp_path_factory.mktemp("replay") / "walks.db"
    codec = MessageCodec()
    events: list[Event] = []
    for number in range(12_000):
        who = f"walker {number * 7919 % 61}"
        events.append(
            Moved(who=who, step=number % 9 - 3)
            if number % 3
            else Rested(who=who, place=str(number))
        )
    records = [codec.encode(one, time=TIME + place) for place, one in enumerate(events)]
    for start in range(0, len(records), 3000):
        append(made, records[start : start + 3000])
    return made


@pytest.fixture
def pipe(path: Path, spark: SparkSession) -> Pipeline:
    return pipeline.open(str(path), spark)


def test_a_replay_is_the_fold_however_the_keys_are_split(pipe: Pipeline, path: Path) -> None:
    expected = folded(path, Walks)

    assert len(expected) == 61
    assert replayed(pipe, Walks) == expected
    assert replayed(pipe, Walks(), partitions=7) == expected


def test_the_key_may_be_a_field_a_function_or_what_messages_are_kept_under(
    pipe: Pipeline, path: Path
) -> None:
    class Kept(Walks):
        key: Any = None

    def last_letter(event: Moved | Rested) -> str | None:
        return None if event.who is None else event.who[-1]

    keys: list[tuple[Any, Any]] = [(Walks, "who"), (Walks, last_letter), (Kept, None)]
    for projection, key in keys:
        assert replayed(pipe, projection, key=key) == folded(path, projection, key=key)


def test_keys_are_split_into_at_least_one_part(pipe: Pipeline) -> None:
    with pytest.raises(PipelineOptionError, match="'partitions' is 0"):
        pipe.replay(Walks, partitions=0)


def test_a_replay_has_the_bounds_of_the_fold(pipe: Pipeline, path: Path) -> None:
    moment = datetime.fromtimestamp(TIME, UTC)
    bounds: list[dict[str, Any]] = [
        {"since": 5000, "until": 5100},
        {"since": moment + timedelta(seconds=9000)},
        {"until": moment + timedelta(seconds=77)},
    ]
    for one in bounds:
        assert replayed(pipe, Walks, **one) == folded(path, Walks, **one)


@settings(
    max_examples=RANDOM_HISTORIES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(history=histories())
def test_random_histories_with_late_doubled_and_dead_events_give_the_rows_of_the_fold(
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
    evidence: Evidence,
    history: tuple[list[Record], list[int]],
) -> None:
    records, lost = history
    made = tmp_path_factory.mktemp("history") / "walks.db"

    async def main() -> list[Any]:
        async with SqliteJournal(made, reserve=0) as journal:
            await write(journal, records, lost)
            return await fold(journal, Walks)

    expected = asyncio.run(main())

    assert replayed(pipeline.open(str(made), spark), Walks, partitions=3) == expected
    # Each message counts once, in the order of its first arrival.
    first = {one.message_id: one for one in reversed(records)}
    counted = [one for one in first.values() if one.name != "replay.Noise"]
    keyed = [one for one in counted if one.json()["who"] is not None]
    assert sum(row.events for row in folded(made, AllWalks)) == len(keyed)
    evidence("replays against the plain fold on random histories", histories=1, events=len(keyed))


class AllWalks(Walks):
    def result(self, key: str, state: Walk) -> Walk:
        return state


def test_a_lake_whose_days_overlap_gives_the_rows_of_the_fold(
    pipe: Pipeline, path: Path, tmp_path: Path
) -> None:
    days = [60 * 60 * 24 * (number % 3) for number in range(900)]
    codec = MessageCodec()
    events = [Moved(who=f"walker {number % 7}", step=number % 5) for number in range(len(days))]
    records = [codec.encode(one, time=TIME + day) for one, day in zip(events, days, strict=True)]
    made = tmp_path / "walks.db"
    append(made, records[:800])
    live = pipeline.open(str(made), pipe.spark)
    live.export(tmp_path / "lake")
    append(made, records[800:])

    assert len(list((tmp_path / "lake" / "messages").glob("date=*"))) == 3
    assert replayed(live, Walks, partitions=2) == folded(made, Walks)
    for bounds in ({"until": 500}, {"since": 790, "until": 810}, {"since": 850}):
        assert replayed(live, Walks, **bounds) == folded(made, Walks, **bounds)


def test_settings_of_the_users_session_change_no_row(
    pipe: Pipeline, path: Path, tmp_path: Path
) -> None:
    class Kept(Walks):
        key: Any = None

    session = pipe.spark.newSession()
    session.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    session.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    session.conf.set("spark.sql.ansi.enabled", "false")
    session.conf.set("spark.sql.caseSensitive", "true")
    first: Any = pipe.spark
    first.createDataFrame([(1,)], "one int").count()  # which makes it the active one again
    made = tmp_path / "walks.db"
    shutil.copy(path, made)
    theirs = pipeline.open(str(made), session)

    expected = [folded(made, Walks, until=500), folded(made, Kept, until=500)]
    for _ in ("journal", "lake"):
        assert [replayed(theirs, one, until=500) for one in (Walks, Kept)] == expected
        mine, own = pipe.events(Moved, until=99), theirs.events(Moved, until=99)
        assert sorted(own.collect()) == sorted(mine.collect())
        theirs.export(tmp_path / "lake")


class Envelope(BaseModel):
    key: str
    seen: list[str] = []


class Envelopes(Projection[Envelope, Moved]):
    """What rides beside each event."""

    def initial(self, key: str) -> Envelope:
        return Envelope(key=key)

    def apply(self, state: Envelope, event: Moved) -> Envelope:
        meta = metadata_of(event)
        seen = (
            *(meta.message_id, meta.correlation_id, meta.causation_id, meta.session_id),
            *(dict(meta.headers), meta.topic, meta.root_id, meta.depth, event.created_at),
        )
        return Envelope(key=state.key, seen=[*state.seen, repr(seen)])


def test_events_have_everything_that_rode_beside_them(spark: SparkSession, tmp_path: Path) -> None:
    codec, made = MessageCodec(), tmp_path / "walks.db"
    root = codec.encode(Moved(who="ann", step=1), time=TIME)
    effect = codec.encode(Jumped(who="ann", step=2), time=TIME + 1)._replace(
        topic="walks.far",
        correlation_id=root.message_id,
        causation_id=root.message_id,
        root_id=root.message_id,
        depth=1,
        session_id="s1",
        headers={"tenant": "t1"},
    )
    append(made, [root, effect])

    rows = pipeline.open(str(made), spark).replay(Envelopes).collect()

    expected = folded(made, Envelopes)
    assert [Envelope(**row.asDict()) for row in rows] == expected
    assert "'tenant': 't1'" in expected[0].seen[1]


def test_a_damaged_event_fails_the_replay_and_says_where_unless_it_may_be_skipped(
    spark: SparkSession, tmp_path: Path
) -> None:
    codec = MessageCodec()
    events = [Moved(who="ann", step=1), Moved(who="ann", step=2), Rested(who="bo")]
    records = [codec.encode(one, time=TIME) for one in events]
    records[1] = records[1]._replace(payload=b'{"who":"ann","step":"far"}')
    records[2] = records[2]._replace(payload=b'{"who')
    append(tmp_path / "shop.db", records)
    pipe = pipeline.open(str(tmp_path / "shop.db"), spark)

    with pytest.raises(PythonException, match="At offset 2") as raised:
        pipe.replay(Walks).collect()
    rows = replayed(pipe, Walks, skip_corrupt=True)

    assert "skip_corrupt=True" in str(raised.value)
    assert [(row.who, row.steps) for row in rows] == [("ann", 1)]
    assert rows == folded(tmp_path / "shop.db", Walks, skip_corrupt=True)


def test_an_error_of_the_projection_says_at_which_event(pipe: Pipeline) -> None:
    class Failing(Walks):
        def apply(self, state: Walk, event: Moved | Rested) -> Walk:
            if state.events == 3:
                raise KeyError(state.who)
            return super().apply(state, event)

    with pytest.raises(PythonException, match=r"KeyError: 'walker \d+'\s+At offset \d+: replay"):
        pipe.replay(Failing).collect()


def test_rows_have_the_columns_of_the_model_even_if_there_are_none(
    spark: SparkSession, tmp_path: Path
) -> None:
    append(tmp_path / "empty.db", [])

    frame = pipeline.open(str(tmp_path / "empty.db"), spark).replay(Walks)

    assert frame.columns == ["who", "steps", "events", "trail", "places"]
    assert frame.collect() == []
