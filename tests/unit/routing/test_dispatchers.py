"""Dispatchers: objects, sync and async functions, and other callables."""

from __future__ import annotations

import functools
import threading
from typing import Any

import anyio
import pytest

from msgbus import ConfigurationError
from msgbus.errors import DuplicateHandlerError, EngineFrozenError
from msgbus.routing import (
    DispatcherRegistry,
    DispatchStatus,
    EventEnvelope,
    MessageDispatchEngine,
)
from tests.unit.routing.engines import (
    COMMAND,
    EVENT,
    PLACED,
    TOPIC,
    Log,
    Reducer,
    engine_of,
    route,
)

# -- objects as dispatchers ----------------------------------------------------------------


async def test_a_registry_of_objects_goes_into_an_engine() -> None:
    registry = DispatcherRegistry()
    registry.register_dispatcher(Reducer())
    registry.freeze()
    engine = MessageDispatchEngine()
    engine.include(registry)
    engine.register_route(route("reducer"))
    engine.freeze()

    result = await engine.dispatch(TOPIC, PLACED)

    assert result.is_successful()
    assert result.outputs == ["shop.events.reduced"]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (DispatchStatus.HANDLER_ERROR, DispatchStatus.HANDLER_ERROR),
        (DispatchStatus.TIMEOUT, DispatchStatus.TIMEOUT),
        (DispatchStatus.SKIPPED, DispatchStatus.SKIPPED),
    ],
)
async def test_a_result_that_a_dispatcher_gives_counts_as_its_outcome(
    given: DispatchStatus, status: DispatchStatus
) -> None:
    result = await engine_of({"reducer": Reducer(given)}).dispatch(TOPIC, PLACED)

    assert result.status is status
    assert "hunter2" not in str(result.error_message)


def test_a_registry_finds_and_refuses() -> None:
    registry = DispatcherRegistry()
    reducer = Reducer()
    registry.register_dispatcher(reducer)

    assert list(registry) == [reducer]
    assert len(registry) == 1
    assert registry.get_dispatcher("reducer") is reducer
    assert registry.get_dispatchers(EVENT, "shop.OrderPlaced") == [reducer]
    assert registry.get_dispatchers(EVENT, "OrderShipped") == []
    assert registry.get_dispatchers(COMMAND) == []
    with pytest.raises(DuplicateHandlerError):
        registry.register_dispatcher(Reducer())
    with pytest.raises(ConfigurationError, match="lacks category, dispatcher_id"):
        registry.register_dispatcher(object())  # type: ignore[arg-type]
    assert registry.unregister_dispatcher("reducer")
    assert not registry.unregister_dispatcher("reducer")
    registry.freeze()
    assert registry.is_frozen
    with pytest.raises(EngineFrozenError):
        registry.register_dispatcher(Reducer())
    with pytest.raises(EngineFrozenError):
        registry.unregister_dispatcher("reducer")


# -- sync dispatchers ----------------------------------------------------------------------


async def test_a_sync_dispatcher_runs_in_a_thread() -> None:
    threads: list[int] = []

    def block(envelope: EventEnvelope[Any]) -> list[str]:
        threads.append(threading.get_ident())
        return ["out.a", "out.b"]

    result = await engine_of({"sync": block}).dispatch(TOPIC, PLACED)

    assert result.outputs == ["out.a", "out.b"]
    assert threads != [threading.get_ident()]


async def test_threads_for_sync_dispatchers_are_bounded() -> None:
    lock = threading.Lock()
    running = most = 0
    go = threading.Event()
    two = threading.Event()

    def block(envelope: EventEnvelope[Any]) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                two.set()
        go.wait(10)
        with lock:
            running -= 1

    engine = engine_of({"sync": block}, max_threads=2)
    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(engine.dispatch, TOPIC, PLACED)
        await anyio.to_thread.run_sync(two.wait)
        go.set()

    assert most == 2
    assert engine.get_structured_metrics().successful_dispatches == 8


@pytest.mark.parametrize("kind", ["partial", "object", "sync way to a coroutine"])
async def test_whatever_can_be_called_may_be_a_dispatcher(kind: str) -> None:
    log = Log()
    inner = log.named("inner")

    class Callable:
        async def __call__(self, envelope: EventEnvelope[Any]) -> None:
            log.ran.append("inner")

    async def with_option(option: int, envelope: EventEnvelope[Any]) -> None:
        log.ran.append("inner")

    def sync(envelope: EventEnvelope[Any]) -> Any:
        return inner(envelope)

    kinds: dict[str, Any] = {
        "partial": functools.partial(with_option, 1),
        "object": Callable(),
        "sync way to a coroutine": sync,
    }
    result = await engine_of({"d": kinds[kind]}).dispatch(TOPIC, PLACED)

    assert result.is_successful()
    assert log.ran == ["inner"]


@pytest.mark.parametrize("output", [5, ["fine", 6], ["not a..topic"], {"a": 1}])
async def test_an_output_that_is_no_topic_fails_the_dispatcher(output: Any) -> None:
    result = await engine_of({"d": Log().named("d", output)}).dispatch(TOPIC, PLACED)

    assert result.status is DispatchStatus.HANDLER_ERROR
    assert result.error_code == "INVALID_OUTPUT"
    assert result.outputs == []
