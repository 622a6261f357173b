"""The messages of one flow as trees of cause and effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgbus.journal.records import FlowNode, Record


def flow_trees(records: Sequence[Record]) -> tuple[FlowNode, ...]:
    """Put each record below the one that caused it, without recursion: chains may be long.

    Records come in the order of their offsets. What has no cause among them is a root.
    """
    known = {record.message_id for record in records}
    children: defaultdict[str | None, list[FlowNode]] = defaultdict(list)
    # A cause is recorded before its effects in nearly every case, so going backwards finds
    # all effects of a message before the message itself. Depth settles the other cases.
    for record in sorted(records, key=lambda one: (-one.depth, -one.offset)):
        below = sorted(children.pop(record.message_id, ()), key=_offset)
        node = FlowNode(record, tuple(below))
        cause = record.causation_id
        children[cause if cause in known and cause != record.message_id else None].append(node)
    # Whatever is left hangs on a cause that was seen before it: damaged depths at worst.
    return tuple(sorted((node for nodes in children.values() for node in nodes), key=_offset))


def _offset(node: FlowNode) -> int:
    return node.record.offset
