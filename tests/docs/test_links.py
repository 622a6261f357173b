"""Links inside the documentation lead somewhere, and the picture is up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.pages import ROOT, page_id, pages, prose

LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"`[^`\n]+`")


def links(page: Path) -> list[str]:
    """Targets of all links to files of the repository."""
    text = CODE.sub("", prose(page))
    targets = [match["target"] for match in LINK.finditer(text)]
    return [unquote(target) for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return set(plain)


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page

        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    pending = [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        pending += [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]

    assert set(pages()) - reached == set()


def test_the_picture_is_what_its_script_draws() -> None:
    images = ROOT / "docs" / "images"
    drawing = runpy.run_path(str(images / "make_flow.py"))["drawing"]

    assert (images / "flow.svg").read_text(encoding="utf-8") == drawing()


@pytest.mark.parametrize("name", ["breaker", "attempts"])
def test_the_pictures_of_states_are_what_their_script_draws(name: str) -> None:
    images = ROOT / "docs" / "images"
    drawing = runpy.run_path(str(images / "make_states.py"))[name]

    assert (images / f"{name}.svg").read_text(encoding="utf-8") == drawing()
