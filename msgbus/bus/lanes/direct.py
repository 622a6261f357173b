"""Handling one event of a durable subscription: no queue and no worker in between."""

from __future__ import annotations

from types import CoroutineType
from typing import TYPE_CHECKING

from msgbus.handlers.filters import passes
from msgbus.messages.frame import Frame, current_frame
from msgbus.middleware.chain import not_awaited
from msgbus.telemetry.stats import Durations

if TYPE_CHECKING:
    from msgbus.bus.lanes.lane import Lane
    from msgbus.messages.message import Event

FOLD_AT = Durations.FOLD_AT


async def deliver(lane: Lane, event: Event, frame: Frame) -> None:
    """Call the handler of a lane, count it, and raise what it raises."""
    counts = lane.queue.counts
    invoke = lane.invoke
    assert invoke is not None  # noqa: S101 (lanes are opened when the bus starts)
    if len(counts.recent) >= FOLD_AT:
        counts.fold()
    counts.retried += frame.first_attempt > 1
    predicate = lane.registration.filter
    now = lane.host.clock.now
    token = current_frame.set(frame)
    began = now()
    try:
        if predicate is not None and not await passes(predicate, event):
            counts.filtered += 1
            return
        value = await invoke(event)
        if value is not None and type(value) is CoroutineType:
            value.close()
            raise not_awaited(lane.name, event)
        if frame.context is not None and frame.context.emitted:
            await lane.host.flush(frame)
    except Exception as error:
        counts.recent.append(now() - began)
        lane.host.event_failed(lane, event, error)
        raise
    except BaseException as error:
        if lane.host.require_runtime().is_ending(error):
            counts.abandoned += 1
            raise
        counts.recent.append(now() - began)
        lane.host.event_failed(lane, event, error)
        message = f"{lane.name} was cancelled by what it called, not by the bus."
        raise RuntimeError(message) from error
    finally:
        current_frame.reset(token)
    counts.recent.append(now() - began)
