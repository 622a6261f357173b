"""Every test of the core runs twice: on a plain bus, and on a resilient one.

A resilient bus is a plain bus in every other respect. Its stages are all in place here,
but none of them ever has anything to do.
"""

from __future__ import annotations

from typing import Any, Final, cast

import pytest

import msgbus
import tests.fakes
from msgbus import BusConfig
from msgbus.resilience import CircuitBreakerConfig, ResilientMessageBus, RetryConfig

ABOUT_THE_PLAIN_BUS: Final = {
    "test_benchmarks": "measures the plain bus",
    "test_exports": "is about the names of the package",
    "test_messages": "is about messages, before any bus",
    "test_options": "is about signatures, and calls nothing",
    "test_queue": "is about the queue alone",
    "test_registry": "is about the registry alone",
    "test_signatures": "is about functions, before any bus",
}
"""Test modules that run once."""

_WHOLE_ONCE: Final = "a list is tried again by its policy, here not at all, not by its worker"

_BULKHEAD: Final = "a bulkhead and a rate limit refuse a command on another event loop"

NOT_THE_SAME: Final = {
    "test_a_command_runs_in_its_callers_task_and_may_not_send_from_there": _BULKHEAD,
    "test_a_wait_for_all_work_hears_of_a_command_on_another_loop": _BULKHEAD,
    "test_a_failed_list_is_retried_whole_then_singly_and_only_the_bad_event_fails": _WHOLE_ONCE,
    "test_a_failed_list_of_one_is_retried_too": _WHOLE_ONCE,
    "test_a_handler_may_empty_the_list_it_was_given": _WHOLE_ONCE,
    "test_a_list_that_succeeds_the_second_time_is_not_split": _WHOLE_ONCE,
    "test_ten_thousand_sessions_leave_memory_where_it_was": "takes half a minute; what is more "
    "in a resilient bus is counted by test_sessions_leave_one_circuit_behind",
}
"""Tests that run once, each with what a resilient bus does otherwise on purpose."""


class InertBus(ResilientMessageBus):
    """A resilient bus with every stage in place and nothing to do for it."""

    def __init__(self, config: BusConfig | None = None, **options: Any) -> None:
        super().__init__(
            config,
            retry=RetryConfig(max_retries=0),
            breaker=CircuitBreakerConfig(failure_threshold=10**9),
            timeout=10**6,
            bulkhead=10**6,
            rate_limit=10**9,
            **options,
        )


def _runs_twice(metafunc: pytest.Metafunc) -> bool:
    path = metafunc.definition.path
    module = cast("Any", metafunc).module  # pytest does not say what it is
    return (
        getattr(module, "MessageBus", None) is msgbus.MessageBus
        and path.stem not in ABOUT_THE_PLAIN_BUS
        and metafunc.function.__name__ not in NOT_THE_SAME
        and path.parent.name in ("unit", "bus", "handlers", "messages", "properties")
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _runs_twice(metafunc):
        metafunc.parametrize("kind_of_bus", ["plain", "resilient"], indirect=True)


@pytest.fixture(autouse=True)
def kind_of_bus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind: str = getattr(request, "param", "plain")
    if kind == "resilient":
        monkeypatch.setattr(cast("Any", request).module, "MessageBus", InertBus)
        monkeypatch.setattr(tests.fakes, "MessageBus", InertBus)
    return kind
