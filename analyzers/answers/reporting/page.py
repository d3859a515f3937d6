"""The report as one self-contained HTML page that loads nothing; light and dark, for screens, phones and print.

Start at :func:`render`. The contents of artifacts are escaped text, or data in a block that no browser runs; a security
policy in the page's head allows two scripts by their hashes, and forbids any other and any address.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ddltool.analyzers.answers.reporting.charts import CONFIG, Slots, Spec, drawn, script, spec
from ddltool.analyzers.answers.reporting.figures import Explorer, Point
from ddltool.analyzers.answers.reporting.section import Picture, Section, Table
from ddltool.errors import shortened, visible

TEMPLATE = Path(__file__).with_name("page.html")
# Names come from files that anybody made, so text is limited: characters of a cell, of a single word, of a column's head, of
# a title; and the length from which a cell counts as long.
_LONGEST_CELL = 160
_LONGEST_WORD = 64
_LONGEST_HEAD = 32
_LONGEST_TITLE = 90
_WRAPPED_FROM = 20
_MOST_ROWS, _NOT_FOLDED = 300, 3
_FIGURE = re.compile(r"[<>=x+\-−$]*\s*(\d|inf\b)")
_UNITS = re.compile(r"(?<=\d) (?=(?:s|ms|us|ns|B|KiB|MiB|GiB|TiB)\b)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]{1,30}")


def render(
    title: str, sections: Sequence[Section], *, summary: Sequence[str], generated_by: str, first: Section | None = None
) -> str:
    """Return the page as HTML text, with all text escaped.

    ``summary``: sentences under the title. ``first``: the section whose verdict the page opens with; None: no verdict.
    ``generated_by``: the program and its version, named at the page's end.
    """
    environment = _environment()
    slots: Slots = {}
    charts: list[Spec] = []

    def add_charts(picture: Picture) -> list[tuple[str, Sequence[Point]]]:
        """Add a picture's figures to ``charts``; return for each (id of its HTML element, points that readers filter).

        Only an :class:`Explorer` has such points. The template calls it for each picture, and makes the elements; the
        script then draws chart k into the element "chart-k".
        """
        first_index = len(charts)
        charts.extend(spec(figure, slots) for figure in picture.figures)
        points = [figure.points if isinstance(figure, Explorer) else () for figure in picture.figures]
        return [(f"chart-{first_index + index}", each) for index, each in enumerate(points)]

    # The policy in the page's head allows these two scripts and no other.
    hashes = [_hash_of(script()), _hash_of(_PAGE)]
    environment.globals |= {"add_charts": add_charts, "script_hashes": hashes}
    page = environment.get_template(TEMPLATE.name)
    text = page.render(title=title, sections=sections, summary=summary, generated_by=generated_by, first=first)
    parts = [_drawing(charts)] if charts else []
    return text.replace(_DRAWING, "\n".join([*parts, f"<script>{_PAGE}</script>"]), 1)


def fragment(section: Section) -> str:
    """Return one section as HTML for a notebook: without scripts, pictures as images, all text escaped."""
    environment = _environment()

    def images(picture: Picture) -> list[tuple[str, str]]:
        """Return (SVG in base64, its text for screen readers) of each figure of a picture."""
        return [
            (base64.b64encode(drawn([figure], "svg")).decode(), visible(shortened(figure.title, _LONGEST_CELL)))
            for figure in picture.figures
        ]

    environment.globals |= {"images_of": images}
    return environment.get_template("fragment.html").render(section=section)


def _environment() -> Environment:
    """Return the templates' environment: it escapes all text, and raises an error for a variable that is not given."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.globals |= {"grid_of": _grid}
    environment.filters |= {
        "plain": visible,
        "sentence": _sentence,
        "title_of": lambda text: visible(shortened(text, _LONGEST_TITLE)),
    }
    return environment


_PAGE = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
# The mark in the template that is replaced by the script; escaped text cannot contain it.
_DRAWING = "<!-- drawing -->"


def _drawing(charts: Sequence[Spec]) -> str:
    """Return HTML with the specifications as a block of JSON, and the script that draws them."""
    data = json.dumps({"config": CONFIG, "charts": charts}, separators=(",", ":"))
    for letter in "<>&":  # JSON's escapes: no text of an artifact can then end the block
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" id="charts">{data}</script>\n<script>{script()}</script>'


def _hash_of(text: str) -> str:
    """Return a script's SHA-256 in base64, by which the page's security policy allows it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _sentence(text: str) -> Markup:
    """Return running text as escaped HTML that never breaks between a number and its unit, or within an option's name."""
    escaped = str(escape(_UNITS.sub("\N{NO-BREAK SPACE}", visible(text))))
    return Markup(_OPTION.sub(r'<span class="option">\g<0></span>', escaped))


Cell = tuple[str, Markup]
"""(text, HTML attribute ``class`` or nothing)."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """A table for the page: its first rows, and the rest, which is folded."""

    named: str
    """The caption."""
    header: list[Cell]
    head: list[list[Cell]]
    rest: list[list[Cell]]
    rest_said: str
    """The sentence on the rows that are folded, and on those that are left out."""


def _grid(table: Table) -> _Grid:
    """Return a table for the page: its first ``head`` rows, then the folded rest, at most 300 rows in all.

    Nothing is folded if the rest is three rows or fewer. Long text is shortened; cells with words, and long ones, get a
    class of their own.
    """
    is_whole = len(table.rows) <= table.head + _NOT_FOLDED
    rows_shown = table.rows if is_whole else table.rows[:_MOST_ROWS]
    is_words = [
        column < table.text_columns or _holds_words([row[column] for row in rows_shown if column < len(row)])
        for column in range(len(table.header))
    ]
    cells = [[_cell(cell, marked) for cell, marked in zip(row, is_words, strict=True)] for row in rows_shown]
    head_count = len(cells) if is_whole else table.head
    left_out = len(table.rows) - len(cells)
    left_out_text = f"; the last {left_out:,} of {len(table.rows):,} are left out" if left_out else ""
    return _Grid(
        named=visible(shortened(table.caption, _LONGEST_CELL)),
        header=[_cell(cell, marked, _LONGEST_HEAD) for cell, marked in zip(table.header, is_words, strict=True)],
        head=cells[:head_count],
        rest=cells[head_count:],
        rest_said=f"{len(cells) - head_count:,} more rows{left_out_text}",
    )


def _holds_words(cells: Sequence[str]) -> bool:
    """Return whether a column has words: some cell is filled, and none begins with a number (or a sign before one)."""
    filled = [cell for cell in cells if cell not in ("", "-")]
    return bool(filled) and not any(_FIGURE.match(cell) for cell in filled)


def _cell(text: str, words: bool, longest: int | None = None) -> Cell:
    """Return a cell with its class, shortened to ``longest`` characters.

    ``longest`` None: 160, or 64 for a single word, which cannot wrap on a phone's screen. ``words``: whether its column
    has words.
    """
    cell_text = shortened(text, longest or (_LONGEST_CELL if " " in text else _LONGEST_WORD))
    class_names = []
    if words:
        class_names.append("words")
    if len(cell_text) > _WRAPPED_FROM:
        class_names.append("long")
    class_attribute = Markup(' class="{}"').format(escape(" ".join(class_names))) if class_names else Markup()
    return visible(cell_text), class_attribute
