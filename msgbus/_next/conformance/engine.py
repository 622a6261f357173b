"""`EngineConformance`: all tests that every engine must pass."""

from __future__ import annotations

from msgbus._next.conformance.commits import CommitTests
from msgbus._next.conformance.deliveries import DeliveryTests
from msgbus._next.conformance.fences import FenceTests
from msgbus._next.conformance.histories import HistoryTests
from msgbus._next.conformance.letters import LetterTests
from msgbus._next.conformance.log import LogTests
from msgbus._next.conformance.members import MemberTests
from msgbus._next.conformance.participants import ParticipantTests
from msgbus._next.conformance.partitions import PartitionTests
from msgbus._next.conformance.queues import QueueTests
from msgbus._next.conformance.rows import RowTests
from msgbus._next.conformance.seek import SeekTests


class EngineConformance(
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
    """Base of the tests of an engine: write `make` and `beside`, and run it with pytest."""
