"""Messages on their way to their key: every one arrives once, in one place, in order."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, strategies as st

from msgbus.pipeline import replay
from msgbus.pipeline.arrow import Batch, pa
from msgbus.pipeline.replay import IN_A_BUCKET, MOST_BUCKETS, TOGETHER, packer, split_keys, unpacked

SCHEMA = pa.schema([("offset", pa.int64()), ("key", pa.string())])

Rows = list[tuple[int, str | None]]

KEYS = st.sampled_from(["ann", "bo", "cy", "ünal", "", None])


def batch_of(rows: Rows) -> Batch:
    offsets, keys = [row[0] for row in rows], [row[1] for row in rows]
    arrays = [pa.array(offsets, pa.int64()), pa.array(keys, pa.string())]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def shuffled(tasks: list[list[Rows]], buckets: int) -> list[Batch]:
    """What Spark makes of the packs of some tasks: sorted by bucket and first offset."""
    pack = packer(buckets, "key")
    packs = [
        row
        for task in tasks
        for batch in pack(batch_of(rows) for rows in task)
        for row in batch.to_pylist()
    ]
    packs.sort(key=lambda row: (row["bucket"], row["first"]))
    return [pa.RecordBatch.from_pylist([row]) for row in packs]


@st.composite
def tasks(draw: st.DrawFn) -> list[list[Rows]]:
    """Messages in batches of tasks; far apart and overlapping, as the files of a lake may be."""
    near = st.integers(1, 60)
    far = st.integers(1, 9).map(lambda one: one * 2 * TOGETHER)
    offsets = draw(st.lists(near | far, unique=True, max_size=60))
    rows: Rows = [(one, draw(KEYS)) for one in offsets]
    made: list[list[Rows]] = [[], [], []]
    while rows:
        size = draw(st.integers(1, 9))
        # A task reads its rows in order; what the others have lies in between.
        made[draw(st.integers(0, 2))].append(sorted(rows[:size]))
        rows = rows[size:]
    return made


@given(tasks=tasks(), buckets=st.integers(1, 5))
def test_every_message_arrives_once_in_the_bucket_of_its_key_and_in_order(
    tasks: list[list[Rows]], buckets: int
) -> None:
    sent = sorted(row for task in tasks for rows in task for row in rows if row[1] is not None)
    arrived: dict[str, list[int]] = defaultdict(list)
    places: dict[str, set[int]] = defaultdict(set)

    for bucket, batch in unpacked(shuffled(tasks, buckets), SCHEMA):
        for row in batch.to_pylist():
            arrived[row["key"]].append(row["offset"])
            places[row["key"]].add(bucket)

    assert sorted((one, key) for key, found in arrived.items() for one in found) == sent
    assert all(found == sorted(found) for found in arrived.values())
    assert all(len(found) == 1 for found in places.values())


def test_neighbours_travel_together_and_others_do_not() -> None:
    near: list[Rows] = [[(1, "ann")], [], [(2, "ann")]]
    far: list[Rows] = [[(3 + TOGETHER, "ann")], [(1, "ann")]]

    assert [_ends(one) for one in shuffled([near], 1)] == [(1, 2)]
    assert [_ends(one) for one in shuffled([far], 1)] == [(1, 1), (3 + TOGETHER, 3 + TOGETHER)]


def test_large_messages_travel_in_packs_of_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_BYTES", 1000)
    large: list[Rows] = [[(number, "x" * 600)] for number in range(1, 7)]

    assert [_ends(one) for one in shuffled([large], 1)] == [(1, 2), (3, 4), (5, 6)]


def _ends(batch: Any) -> tuple[int, int]:
    (row,) = batch.to_pylist()
    return row["first"], row["last"]


@pytest.mark.parametrize(
    ("rows", "tasks", "buckets"),
    [
        (0, 1, 1),
        (IN_A_BUCKET, 1, 1),
        (IN_A_BUCKET + 1, 1, 2),
        (20 * IN_A_BUCKET, 4, 20),
        (10**10, 1, MOST_BUCKETS),
        (10**10, 200, 400),
        (10**10, 2000, 2000),
    ],
)
def test_buckets_are_as_many_as_keep_states_few(rows: int, tasks: int, buckets: int) -> None:
    assert split_keys(rows, tasks) == (tasks, buckets)
