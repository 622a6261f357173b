"""Messages of one flow as trees of cause and effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgbus.journal.records import Record
from msgbus.journal.reports import FlowNode


def flow_trees(records: Sequence[Record]) -> tuple[FlowNode, ...]:
    """Put each record below the one that caused it; one without a cause among them is a root.

    No recursion: chains may be long.
    """
    known = {record.message_id for record in records}
    children: defaultdict[str | None, list[FlowNode]] = defaultdict(list)
    # The deepest first: all effects of a message are there before the message itself.
    for record in sorted(records, key=lambda one: (-one.depth, -one.offset)):
        below = sorted(children.pop(record.message_id, ()), key=_offset)
        cause = record.causation_id
        is_root = cause not in known or cause == record.message_id
        children[None if is_root else cause].append(FlowNode(record, tuple(below)))
    # Not only the roots: a wrong depth must not hide a message.
    return tuple(sorted((node for nodes in children.values() for node in nodes), key=_offset))


def _offset(node: FlowNode) -> int:
    return node.record.offset
