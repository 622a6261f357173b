"""Checksums of rows in Arrow batches, as the journal computes them.

The columns of a batch are joined at once; only the CRC of what came out is taken row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from itertools import pairwise
from typing import Any, Final, NamedTuple
from zlib import crc32

from msgbus.journal.sqlite.messages import NONE
from msgbus.pipeline.arrow import Array, pa

np: Any = import_module("numpy")
pc: Any = import_module("pyarrow.compute")

_SEPARATOR: Final = b"\x1f"
_NONE: Final = NONE.encode()
_NOTHING: Final = b""


class Covered(NamedTuple):
    """The parts of a row that its checksum covers, in the order in which it does."""

    numbers: tuple[str, ...]
    texts: tuple[str, ...]
    rest: tuple[str, ...] = ()


def damaged(parts: Mapping[str, Array], covered: Covered) -> Array | None:
    """Return which rows do not fit their checksum; `None` if all do."""
    joined = _joined(parts, covered)
    offset, count = joined.offset, len(joined)
    _, ends, data = joined.buffers()
    bounds = np.frombuffer(ends, np.int32)[offset : offset + count + 1].tolist()
    content = memoryview(data) if data is not None else memoryview(b"")
    found = np.fromiter(
        (crc32(content[start:end]) for start, end in pairwise(bounds)), np.int64, count
    )
    wrong = found != _as_numbers(parts["crc"], -1)
    return pa.array(wrong) if wrong.any() else None


def _joined(parts: Mapping[str, Array], covered: Covered) -> Array:
    first = parts[covered.numbers[0]]
    numbers = np.empty((len(first), len(covered.numbers)), np.int64)
    for index, name in enumerate(covered.numbers):
        numbers[:, index] = _as_numbers(parts[name], 0)
    packed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(8 * len(covered.numbers)), len(first), [None, pa.py_buffer(numbers)]
    ).cast(pa.binary())
    texts = _join([parts[name] for name in covered.texts], _SEPARATOR, _NONE)
    rest = [parts[name] for name in covered.rest]
    return _join([packed, texts, *rest], _NOTHING, _NOTHING)


def _as_numbers(values: Array, instead: int) -> Any:
    """Return eight bytes for each value, those of a float as they are."""
    filled = values.fill_null(instead).to_numpy(zero_copy_only=False)
    return filled.view(np.int64)


def _join(columns: list[Array], separator: bytes, instead: bytes) -> Array:
    return pc.binary_join_element_wise(
        *columns, separator, null_handling="replace", null_replacement=instead
    )
