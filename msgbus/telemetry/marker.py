"""The text that stands for a secret; apart from the rules, which are compiled only when needed."""

from typing import Final

MARKER: Final = "[redacted]"
"""What a secret is replaced by."""
