"""The smallest file that both type checkers must accept."""

from typing import assert_type


def first(items: list[int]) -> int:
    return items[0]


assert_type(first([1, 2]), int)
