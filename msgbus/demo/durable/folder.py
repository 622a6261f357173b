"""Where the second act keeps its files, and how a new run begins without the old ones."""

from __future__ import annotations

from pathlib import Path
from typing import Final, final

DEFAULT: Final = Path(".demo")
MARK: Final = "# Made by python -m msgbus.demo, which begins anew at each run.\n*\n"
"""What is in the folder's own .gitignore; by it the demo knows its folder again."""


class DemoError(Exception):
    """The demo cannot go on, and says why."""


@final
class Folder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "shop.db"
        self.report = path / "report.html"

    @property
    def url(self) -> str:
        """The journal, as a bus wants to be told."""
        return f"sqlite:///{self.journal.resolve().as_posix()}"

    def diary(self, worker: int) -> Path:
        """What a worker wrote down."""
        return self.path / f"receipts-{worker}.txt"

    def begin_anew(self) -> None:
        """Make the folder, or remove what a former run has left in it.

        Raises:
            DemoError: There are files in it, and it was not made by the demo.
        """
        mark = self.path / ".gitignore"
        if self.path.exists() and not _is_ours(mark) and any(self.path.iterdir()):
            message = (
                f"{self.path} has files in it that are not the demo's, and the demo would "
                f"replace some. Name another folder: --folder PATH."
            )
            raise DemoError(message)
        self.path.mkdir(parents=True, exist_ok=True)
        mark.write_text(MARK, encoding="utf-8")
        for pattern in ("shop.db*", "receipts-*.txt", "report.html"):
            for old in self.path.glob(pattern):
                old.unlink()


def _is_ours(mark: Path) -> bool:
    return mark.is_file() and mark.read_text(encoding="utf-8") == MARK
