"""Keys that are parked: those with a dead letter, for as long as it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from msgbus.subscriptions.ledger import Ledger

_UNKNOWN: Final = 0


@final
class Parking:
    """Knows one dead letter of each parked key, and looks whether it is still there."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._letters: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._letters)

    def __contains__(self, key: object) -> bool:
        return key in self._letters

    def clear(self) -> None:
        """Park nothing, until the next dead letter."""
        self._letters.clear()

    def add(self, key: str) -> None:
        """A message of this key has become a dead letter."""
        # One that is known is enough; to find out the number of the new one is not cheap.
        self._letters.setdefault(key, _UNKNOWN)

    async def load(self) -> None:
        """Park the keys of all dead letters."""
        self._letters = await self._ledger.letters_by_key()

    async def look(self, key: str) -> None:
        """Unpark a key whose dead letters were all replayed or dropped."""
        known = self._letters.get(key)
        if known is None:
            return
        if known == _UNKNOWN or not await self._ledger.has_letter(known):
            # Only keys that are parked: `clear` may have let others go.
            there = await self._ledger.letters_by_key()
            self._letters = {key: there[key] for key in self._letters if key in there}
