"""One self-contained page: no network, no scripts; light and dark, phone and print. Start at :func:`render`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ddltool.analyzers.reporting.section import Picture, Section, Table
from ddltool.errors import shortened, visible

TEMPLATE = Path(__file__).with_name("page.html")
# Names come from files that others wrote: one of ten thousand characters must not hide everything else.
_LONGEST_CELL, _LONGEST_WORD, _LONGEST_HEAD, _LONGEST_TITLE, _WRAPPED_FROM = 160, 64, 32, 90, 36
_MOST_ROWS = 300
_FIGURE = re.compile(r"[<>=x+\-−]*\s*(\d|inf\b)")
_UNITS = re.compile(r"(?<=\d) (?=(?:s|ms|us|ns|B|KiB|MiB|GiB|TiB)\b)")
# Colours of pictures that the page changes in dark mode: a picture's own blue is too dark there for thin lines.
PICTURE_COLOURS = (("#0072b2", "var(--blue)"), ("#fffffe", "var(--on-blue)"), ("#fefffe", "var(--paper)"))


def render(title: str, sections: Sequence[Section], *, summary: Sequence[str], generated_by: str) -> str:
    """Return the page as HTML text. All text is escaped; only the pictures' SVG is taken as it is."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.globals["grid_of"] = _grid
    environment.filters |= {"drawing": _drawing, "plain": visible, "sentence": _sentence, "title_of": _title}
    page = environment.get_template(TEMPLATE.name)
    return page.render(title=title, sections=sections, summary=summary, generated_by=generated_by)


def _sentence(text: str) -> str:
    """Return running text for the page: no line ends between a number and its unit."""
    return _UNITS.sub("\N{NO-BREAK SPACE}", visible(text))


def _title(text: str) -> str:
    return visible(shortened(text, _LONGEST_TITLE))


def _drawing(picture: Picture) -> Markup:
    svg = picture.draw()
    for own, variable in PICTURE_COLOURS:
        svg = svg.replace(own, variable)
    return Markup(svg)


@dataclass(frozen=True, slots=True)
class _Cell:
    text: str
    mark: Markup
    """The attribute that gives its class."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """A table's cells: the head, and the rest, which is folded and capped."""

    named: str
    header: list[_Cell]
    head: list[list[_Cell]]
    rest: list[list[_Cell]]
    rest_said: str


def _grid(table: Table) -> _Grid:
    whole = len(table.rows) <= table.head + 3
    shown = table.rows if whole else table.rows[:_MOST_ROWS]
    words = [
        place < table.text_columns or _holds_words([row[place] for row in shown if place < len(row)])
        for place in range(len(table.header))
    ]
    rows = [[_cell(cell, marked) for cell, marked in zip(row, words, strict=True)] for row in shown]
    head = len(rows) if whole else table.head
    left_out = len(table.rows) - len(rows)
    said = f"; the last {left_out:,} of {len(table.rows):,} are left out" if left_out else ""
    header = [_cell(cell, marked, _LONGEST_HEAD) for cell, marked in zip(table.header, words, strict=True)]
    named = visible(shortened(table.caption, _LONGEST_CELL))
    return _Grid(named, header, rows[:head], rows[head:], f"{len(rows) - head:,} more rows{said}")


def _holds_words(cells: Sequence[str]) -> bool:
    """Return whether a column holds words: something is there, and nothing of it begins as a figure does."""
    filled = [cell for cell in cells if cell not in ("", "-")]
    return bool(filled) and not any(_FIGURE.match(cell) for cell in filled)


def _cell(text: str, words: bool, most: int | None = None) -> _Cell:
    # a sentence wraps, a name of one long word breaks anywhere and would fill a phone's screen
    shown = shortened(text, most or (_LONGEST_CELL if " " in text else _LONGEST_WORD))
    names = [name for name, holds in (("words", words), ("long", len(shown) > _WRAPPED_FROM)) if holds]
    mark = Markup(' class="{}"').format(escape(" ".join(names))) if names else Markup()
    return _Cell(visible(shown), mark)
