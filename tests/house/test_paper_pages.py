"""The pages on the papers, the tutorial and the lists: links lead somewhere, commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.test_docs import REPO, check_options

DOCS = REPO / "docs"
PAGES = [*sorted((DOCS / "papers").glob("*.md")), DOCS / "tutorial.md", DOCS / "faq.md", DOCS / "formats.md"]
HEADINGS = ("## What is implemented", "## Where we differ, and why", "## What we measured", "## What we could not")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert links
    for link in links:
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.is_file(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES[:-3], ids=lambda page: page.stem)
def test_pages_on_papers_say_what_they_should_with_commands_that_exist(page: Path) -> None:
    text = page.read_text()
    assert [text.find(heading) for heading in HEADINGS] == sorted(text.find(heading) for heading in HEADINGS)
    assert all(heading in text for heading in HEADINGS)
    commands = re.findall(r"`((?:python|ddltool|torchrun) [^`]+)`", text)
    elsewhere = re.findall(r"\]\(\.\./[\w-]+\.md#[\w-]+\)", text)  # the parts of other pages that show how
    assert len(commands) + len(elsewhere) >= 3
    for command in commands:
        if len(command.split()) > 2 or command.startswith("python"):
            check_options(command)
    for module in re.findall(r"`((?:analyzers|runtime|fixtures|tests|examples)/[\w/]+\.py)`", text):
        assert (REPO / module).is_file(), module


def test_every_paper_has_a_page() -> None:
    assert {page.stem for page in PAGES[:-3]} == {"tictac", "pollux", "easyscale", "lb-bsp", "elasticbsp"}
