"""A short soak: processes that are killed while others publish and handle lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.board import MODES, quantile
from benchmarks.soak.picture import draw
from benchmarks.soak.runner import Soak, soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_short_soak_loses_nothing_and_is_drawn(tmp_path: Path) -> None:
    found = soak(tmp_path, 4.0, rate=150.0, kill_every=0.9, sample_every=0.5)

    assert len(found.kills) >= 3
    assert found.acknowledged > 300
    assert found.lost == dict.fromkeys(MODES, 0)
    assert all(sample.memory > 0 and sample.file > 0 for sample in found.samples)
    assert "0 messages lost" in draw(found)
    saved = tmp_path / "soak.json"
    found.save(saved)
    assert Soak.load(saved) == found


def test_a_soak_finds_what_was_acknowledged_too_early(tmp_path: Path) -> None:
    found = soak(tmp_path, 2.5, rate=2000.0, kill_every=0.8, is_control=True)

    assert min(found.lost.values()) > 0


def test_latencies_are_read_from_buckets() -> None:
    counts = [0] * 128
    counts[40] = 99
    counts[80] = 1
    median, p99 = quantile(counts, 0.5), quantile(counts, 0.995)
    assert median is not None
    assert p99 is not None
    assert 0.001 < median < 0.002
    assert 1.0 < p99 < 1.5
    assert quantile([0] * 128, 0.5) is None
