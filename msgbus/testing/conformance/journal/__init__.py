"""Conformance tests of journals, to inherit: for msgbus's own engines, and for yours.

```python
class TestMyJournal(JournalConformance):
    def make(self):
        return MyJournal(new_place())

    def beside(self, journal):
        return MyJournal(journal.place)
```

`JournalConformance` has all that `Log`, `Members`, `Deliveries` and `Rows` ask for, a module for
each part. Add what your engine can do beside that: `QuestionConformance`, `LetterConformance`,
`SqlConformance` (the port `Tables`), `DurableConformance` (it outlives the process),
`ErasedConformance` and `DamageConformance` (its messages can be trimmed, or damaged).

Each test makes journals of its own and closes them. The tests are coroutines: run them with
pytest-asyncio, anyio or trio. They need no virtual time: what an engine does may take as long as
it takes. Imported by tests only.
"""

from __future__ import annotations

from msgbus.testing.conformance.journal.commits import CommitTests
from msgbus.testing.conformance.journal.damage import DamageConformance, ErasedConformance
from msgbus.testing.conformance.journal.deliveries import DeliveryTests
from msgbus.testing.conformance.journal.durable import DurableConformance
from msgbus.testing.conformance.journal.fences import FenceTests
from msgbus.testing.conformance.journal.histories import HistoryTests
from msgbus.testing.conformance.journal.invariants import broken_invariants
from msgbus.testing.conformance.journal.kit import make_record, read_all
from msgbus.testing.conformance.journal.letter_search import LetterConformance
from msgbus.testing.conformance.journal.letters import LetterTests
from msgbus.testing.conformance.journal.log import LogTests
from msgbus.testing.conformance.journal.members import MemberTests
from msgbus.testing.conformance.journal.participants import ParticipantTests
from msgbus.testing.conformance.journal.partitions import PartitionTests
from msgbus.testing.conformance.journal.questions import QuestionConformance
from msgbus.testing.conformance.journal.queues import QueueTests
from msgbus.testing.conformance.journal.rows import RowTests
from msgbus.testing.conformance.journal.seek import SeekTests
from msgbus.testing.conformance.journal.tables import SqlConformance

__all__ = [
    "DamageConformance",
    "DurableConformance",
    "ErasedConformance",
    "JournalConformance",
    "LetterConformance",
    "QuestionConformance",
    "SqlConformance",
    "broken_invariants",
    "make_record",
    "read_all",
]


class JournalConformance(
    LogTests,
    CommitTests,
    MemberTests,
    PartitionTests,
    DeliveryTests,
    FenceTests,
    RowTests,
    LetterTests,
    QueueTests,
    SeekTests,
    ParticipantTests,
    HistoryTests,
):
    """Tests that every journal must pass."""
