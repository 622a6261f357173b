"""Card, bank account and social security numbers, recognised by their check digits."""

import re
from typing import Final

from msgbus.telemetry.redaction import MARKER

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


# --- Bank accounts (IBAN, ISO 13616) -------------------------------------------------------------

# Up to 30 characters after the check digits, in groups or not; the country determines how many
# of them belong to it.
IBANS = re.compile(
    r"(?<![A-Za-z0-9])(?P<country>[A-Za-z]{2})(?P<rest>\d{2}(?:[ ]?[A-Za-z0-9]){11,30}+)", re.ASCII
)
_LENGTHS: Final = """
    AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20
    EG29 ES24 FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30
    KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24
    PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23 TN24 TR26 UA29 VA22
    VG24 XK20
"""
_IBAN_LENGTHS: Final = {entry[:2]: int(entry[2:]) for entry in _LENGTHS.split()}


def swap_iban(match: Match) -> str:
    """Replace a bank account number, if its length and its check digits are right."""
    country = match["country"].upper()
    length = _IBAN_LENGTHS.get(country, 3) - len(country)
    taken = re.match(rf"(?:[ ]?[A-Za-z0-9]){{{length}}}(?![A-Za-z0-9])", match["rest"])
    if taken is None or not _passes_mod_97(country, taken[0].replace(" ", "").upper()):
        return match[0]
    return f"{match['country']}{MARKER}{match['rest'][taken.end() :]}"


def _passes_mod_97(country: str, rest: str) -> bool:
    """Tell whether the check digits (ISO/IEC 7064) are right."""
    return int("".join(str(int(char, 36)) for char in f"{rest[2:]}{country}{rest[:2]}")) % 97 == 1


# --- Social security numbers of the United States ------------------------------------------------

SSNS = re.compile(
    r"(?<![\w-])(?P<secret>(?!000|666|9\d\d)\d{3}-(?!00)\d{2}-(?!0000)\d{4})(?![\w-])", re.ASCII
)
