"""Prometheus text read back as numbers, and sources to collect from."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from msgbus import (
    BusConfig,
    BusStats,
    Command,
)

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class PlaceOrder(Command):
    number: int = 0


async def ignore(message: object) -> None:
    pass


def parsed(text: str) -> Series:
    """All samples of an exposition; two of one name and labels are an error."""
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in series, f"twice: {key}"
            series[key] = sample.value
    return series


def value(series: Series, name: str, **labels: str) -> float | None:
    """One sample of the bus called `msgbus`, unless said otherwise."""
    return series.get((f"msgbus_{name}", frozenset({"bus": "msgbus", **labels}.items())))


class Source:
    """A bus that is nothing but its figures."""

    def __init__(self, stats: BusStats) -> None:
        self.config = BusConfig(name=stats.name)
        self.figures = stats

    def stats(self) -> BusStats:
        return self.figures


def empty(name: str = "msgbus") -> BusStats:
    return BusStats(name=name, state="running", commands={}, handlers={}, events={})
