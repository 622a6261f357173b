"""Conformance tests of journals, to inherit: for msgbus's own journals, and for yours.

```python
class TestMyJournal(JournalConformance):
    def make(self, clock):
        return MyJournal("...", clock=clock)
```

Each test opens a journal of its own with `make` and closes it. The tests are coroutines: run
them with pytest-asyncio, anyio or trio.
"""

from __future__ import annotations

from msgbus.testing.conformance.journals.cursors import CursorTests, LeaseTests
from msgbus.testing.conformance.journals.durable import DurableTests, SqlTests
from msgbus.testing.conformance.journals.kit import make_record, read_all
from msgbus.testing.conformance.journals.messages import MessageTests, QuestionTests
from msgbus.testing.conformance.journals.schedules import LetterTests, ScheduleTests

__all__ = [
    "DurableConformance",
    "JournalConformance",
    "SqlConformance",
    "make_record",
    "read_all",
]


class JournalConformance(
    MessageTests, QuestionTests, CursorTests, LeaseTests, LetterTests, ScheduleTests
):
    """What every journal must do."""


class SqlConformance(JournalConformance, SqlTests):
    """What a journal must do if users' tables are in its transactions."""


class DurableConformance(JournalConformance, DurableTests):
    """What a journal must do if it outlives the process: `make` opens the same one again."""
