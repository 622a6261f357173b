"""Jobs over the tables of a journal: pure functions from DataFrame to DataFrame.

Each takes `messages` and, where it needs them, `deliveries`, from wherever they come: a journal,
the lake, or both together. None of them runs anything; Spark does, when the result is asked for.
"""

from msgbus.pipeline.jobs.attempts import MESSAGE_COLUMNS, tries
from msgbus.pipeline.jobs.causes import cause_of
from msgbus.pipeline.jobs.failures import dead_letters, failures, retries
from msgbus.pipeline.jobs.flows import chains, depths, effects
from msgbus.pipeline.jobs.metrics import histogram, merge_histogram, percentiles
from msgbus.pipeline.jobs.sessions import sessions, timeline
from msgbus.pipeline.jobs.stuck import slowest, stuck
from msgbus.pipeline.jobs.throughput import merge_throughput, throughput

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
    "percentiles",
    "retries",
    "sessions",
    "slowest",
    "stuck",
    "throughput",
    "timeline",
    "tries",
]
