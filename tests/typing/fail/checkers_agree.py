"""The smallest file that both type checkers must reject, each in its own words."""


def first(items: list[int]) -> int:
    return items[0]


first("ab")  # expect: mypy[arg-type] pyright[reportArgumentType]
text: str = first([1])  # expect: mypy[assignment] pyright[reportAssignmentType]
