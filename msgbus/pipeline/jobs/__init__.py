"""Jobs: pure functions from DataFrame to DataFrame over `messages` and `deliveries`.

Imported by the report and by users; import nothing of msgbus. Nothing runs before an action does.
"""

from msgbus.pipeline.jobs.attempts import MESSAGE_COLUMNS, named_deliveries
from msgbus.pipeline.jobs.failures import cause_of, dead_letters, failures, retries, slowest, stuck
from msgbus.pipeline.jobs.flows import chains, depths, effects, sessions, timeline
from msgbus.pipeline.jobs.metrics import (
    histogram,
    merge_histogram,
    merge_throughput,
    percentiles,
    throughput,
)

__all__ = [
    "MESSAGE_COLUMNS",
    "cause_of",
    "chains",
    "dead_letters",
    "depths",
    "effects",
    "failures",
    "histogram",
    "merge_histogram",
    "merge_throughput",
    "named_deliveries",
    "percentiles",
    "retries",
    "sessions",
    "slowest",
    "stuck",
    "throughput",
    "timeline",
]
