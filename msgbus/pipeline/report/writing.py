"""From a pipeline to a file."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from msgbus.pipeline import jobs
from msgbus.pipeline.report.collect import collect
from msgbus.pipeline.report.page import render

if TYPE_CHECKING:
    from msgbus.pipeline.asked import Bound
    from msgbus.pipeline.pipeline import Pipeline


def write_report(
    pipe: Pipeline,
    path: str | os.PathLike[str],
    *,
    since: Bound | None = None,
    until: Bound | None = None,
    stuck_after: float = 300.0,
    now: datetime | None = None,
) -> Path:
    """Write the report of a pipeline's messages between two bounds; see `Pipeline.report`."""
    messages = pipe.messages(since=since, until=until, columns=jobs.MESSAGE_COLUMNS)
    deliveries = pipe.deliveries()
    if since is not None or until is not None:
        # Deliveries belong to their messages, whenever they were.
        mine = messages.select("message_id")
        deliveries = deliveries.join(mine, "message_id", "left_semi").select(*deliveries.columns)
    data = collect(messages, deliveries, source=pipe.path, now=now, stuck_after=stuck_after)
    target = Path(path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(render(data), encoding="utf-8")
    temporary.replace(target)
    return target
