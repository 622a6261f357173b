"""Card numbers in text: told from other long numbers by issuer and check digit."""

import re
from typing import Final

MARKER: Final = "[redacted]"
"""What a secret is replaced by."""

Match = re.Match[str]

# All-digit UUIDs look like grouped card numbers, so they are matched first and left alone. The
# digit run takes everything in one go, and its surroundings are judged afterwards: a lookaround
# here would retry a failing run from each of its groups.
DIGITS = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    r"|(?P<run>\d++(?:[ -]\d++)*+)",
    re.ASCII | re.IGNORECASE,
)
_GROUP = re.compile(r"\d+", re.ASCII)
_GLUED_BEFORE = re.compile(r"(?<!\\)[A-Za-z]\Z|\d\.\Z|\\[^nrt\W\d]\Z", re.ASCII)
_GLUED_AFTER = re.compile(r"[A-Za-z]", re.ASCII)
_CARD_LENGTHS = range(13, 20)
_MIN_GROUP: Final = 4


def swap_cards(match: Match) -> str:
    """Replace the card numbers within a run of digit groups."""
    run: str | None = match["run"]
    if run is None or len(run) < _CARD_LENGTHS.start:
        return match[0]
    groups = _free_groups(match)
    pieces: list[str] = []
    done = index = 0
    while index < len(groups):
        last = _card_end(run, groups, index)
        if last is not None:
            pieces += [run[done : groups[index][0]], MARKER]
            done, index = groups[last][1], last
        index += 1
    return "".join([*pieces, run[done:]])


def _free_groups(match: Match) -> list[tuple[int, int]]:
    """Return the spans of the digit groups that are not part of a word or of a decimal fraction."""
    spans = [group.span() for group in _GROUP.finditer(match["run"])]
    if _GLUED_BEFORE.search(match.string[max(0, match.start() - 2) : match.start()]):
        del spans[0]
    if _GLUED_AFTER.match(match.string, match.end()):
        del spans[-1:]
    return spans


def _card_end(run: str, groups: list[tuple[int, int]], first: int) -> int | None:
    """Return the index of the last group of the longest card number starting at ``first``."""
    digits = ""
    found: int | None = None
    for index in range(first, len(groups)):
        start, end = groups[index]
        if len(digits) + end - start > _CARD_LENGTHS.stop - 1:
            break
        digits += run[start:end]
        if _is_card(digits):
            found = index
        # Only the last group of a card number is ever shorter; dates and counters are not cards.
        if end - start < _MIN_GROUP:
            break
    return found


def _is_card(digits: str) -> bool:
    """Tell whether the digits are a plausible card number: length, issuer and check digit."""
    return len(digits) in _CARD_LENGTHS and _has_issuer(digits) and _passes_luhn(digits)


def _has_issuer(digits: str) -> bool:
    """Tell whether the number starts like one of a card network.

    Of the numbers starting with 2 only Mastercard's and Mir's ranges count: the others are mostly
    compact timestamps such as 20240115103000.
    """
    if digits[0] in "3456":
        return True
    prefix = int(digits[:4])
    return len(digits) >= 16 and (2200 <= prefix <= 2204 or 2221 <= prefix <= 2720)


def _passes_luhn(digits: str) -> bool:
    """Tell whether the check digit (ISO/IEC 7812) is right."""
    total = 0
    for index, digit in enumerate(map(int, reversed(digits))):
        doubled = digit * 2 if index % 2 else digit
        total += doubled - 9 if doubled > 9 else doubled
    return total % 10 == 0
