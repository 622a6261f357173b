"""Which rows and columns of a table are wanted, and how that is said to the data source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, TypeAlias

from msgbus.pipeline.source.options import microseconds
from msgbus.pipeline.source.selection import Where, conditions, where_values
from msgbus.pipeline.source.tables import Table

Bound: TypeAlias = int | datetime
"""An offset (of a delivery: its id), or a time; one without a zone counts as UTC."""


class Asked(NamedTuple):
    """Rows from `since` on and before `until`, where columns have certain values."""

    table: Table
    since: Bound | None = None
    until: Bound | None = None
    columns: Sequence[str] | None = None
    where: Where | None = None

    @property
    def names(self) -> list[str]:
        """The columns to give."""
        return list(self.table.columns if self.columns is None else self.columns)

    @property
    def needed(self) -> list[str]:
        """The columns to read: those that only the conditions need come last."""
        bounds = [one for one in (self.since, self.until) if one is not None]
        used = {"time" if isinstance(one, datetime) else self.table.position for one in bounds}
        used.update(self.where or ())
        return [*self.names, *sorted(used - set(self.names))]

    def options(self) -> dict[str, str]:
        """The same, as options of the data source.

        Raises:
            PipelineOptionError: There is no such column, or it cannot be compared so.
        """
        options = {"table": self.table.name}
        bounds = ((self.since, "start", "since"), (self.until, "end", "until"))
        for bound, offset, time in bounds:
            if isinstance(bound, datetime):
                options[time] = str(microseconds(bound))
            elif bound is not None:
                options[offset] = str(bound)
        if self.where is not None:
            conditions(self.table, where=self.where)  # says what is wrong here and now
            options["where"] = json.dumps(where_values(self.where))
        return options
