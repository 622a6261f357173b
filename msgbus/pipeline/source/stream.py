"""Reading a journal as a stream: offsets are in Spark's checkpoint, so a restart goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from msgbus.errors import PipelineError, TrimmedError
from msgbus.pipeline.arrow import Batch
from msgbus.pipeline.source.journal_file import batches
from msgbus.pipeline.source.options import ReadOptions
from msgbus.pipeline.source.ranges import Bounds, Range, bounds_of, split
from msgbus.pipeline.source.reader import columns_of, query_of


class JournalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what was added since the last micro-batch. `{"offset": n}` says that n was read."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns_of(options.table, schema)
        self._target: int | None = None
        """Where to end, if the query is to end with what is there now."""

    # Spark's names.

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Where a new query begins; one with a checkpoint does not ask."""
        found = self._bounds()
        start = self._options.starting_offsets
        if start == "latest":
            return {"offset": found.last}
        if isinstance(start, int):
            return {"offset": min(max(start, found.first), found.last + 1) - 1}
        return {"offset": found.first - 1}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """How far the next micro-batch goes: to the head, or to the limit."""
        begin = int(start["offset"])
        last = self._bounds().last
        if begin > last:
            message = (
                f"The stream has read up to {begin}, and the journal {self._options.path} ends at "
                f"{last}: it is another file, or an older copy. Use the journal that the "
                f"checkpoint belongs to, or begin with a new checkpoint."
            )
            raise PipelineError(message)
        if self._target is not None:
            last = max(begin, min(last, self._target))
        if isinstance(limit, ReadMaxRows):
            last = min(last, begin + limit.max_rows)
        return {"offset": last}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """As many rows as the option says, or all."""
        most = self._options.max_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember where the journal ends now."""
        self._target = self._bounds().last

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        """The head, for the query's progress: the difference is its lag."""
        return {"offset": self._bounds().last}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Ranges of one micro-batch."""
        low, high = int(start["offset"]) + 1, int(end["offset"])
        trimmed = self._bounds().trimmed
        if trimmed >= low:
            if self._options.fail_on_data_loss:
                raise TrimmedError(path=self._options.path, wanted=low, first=trimmed + 1)
            low = trimmed + 1
        return split(low, high, self._options.partitions)

    def read(self, partition: InputPartition) -> Iterator[Batch]:
        """The rows of one range; runs on a worker."""
        if not isinstance(partition, Range):
            return iter(())
        options = self._options
        query = query_of(options, self._columns, partition)
        return batches(query._replace(may_lack=not options.fail_on_data_loss), options.engine)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: Spark's checkpoint says how far it is."""

    def stop(self) -> None:
        """Nothing to let go of: connections are opened for one question."""

    def _bounds(self) -> Bounds:
        return bounds_of(self._options.path, self._options.table)
