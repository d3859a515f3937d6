"""One self-contained page that asks for nothing and runs scripts of its own alone; light and dark, phone and print.

Start at :func:`render`. What artifacts hold is text, or data in a block that no browser runs; a policy in the page's head
names the scripts by their hashes and forbids every other one, and every address.
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
# Names come from files that others wrote: one of ten thousand characters must not hide everything else.
_LONGEST_CELL, _LONGEST_WORD, _LONGEST_HEAD, _LONGEST_TITLE, _WRAPPED_FROM = 160, 64, 32, 90, 20
_MOST_ROWS, _NOT_FOLDED = 300, 3
_FIGURE = re.compile(r"[<>=x+\-−$]*\s*(\d|inf\b)")
_UNITS = re.compile(r"(?<=\d) (?=(?:s|ms|us|ns|B|KiB|MiB|GiB|TiB)\b)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]{1,30}")


def render(
    title: str, sections: Sequence[Section], *, summary: Sequence[str], generated_by: str, first: Section | None = None
) -> str:
    """Return the page as HTML text, with all text escaped.

    ``summary``: sentences under the title. ``first``: the section whose verdict the page opens with; None: no verdict.
    ``generated_by``: who made the page, at its end.
    """
    environment = _environment()
    slots: Slots = {}
    charts: list[Spec] = []

    def hosts(picture: Picture) -> list[tuple[str, Sequence[Point]]]:
        """Return (id, what a reader may explore) of the places into which the script draws a picture's figures."""
        charts.extend(spec(figure, slots) for figure in picture.figures)
        first_index = len(charts) - len(picture.figures)
        points = [figure.points if isinstance(figure, Explorer) else () for figure in picture.figures]
        return [(f"chart-{first_index + index}", each) for index, each in enumerate(points)]

    # The policy in the page's head allows these two scripts and no other.
    hashes = [_hash_of(script()), _hash_of(_PAGE)]
    environment.globals |= {"hosts_of": hosts, "script_hashes": hashes}
    page = environment.get_template(TEMPLATE.name)
    text = page.render(title=title, sections=sections, summary=summary, generated_by=generated_by, first=first)
    parts = [_drawing(charts)] if charts else []
    return text.replace(_DRAWING, "\n".join([*parts, f"<script>{_PAGE}</script>"]), 1)


def fragment(section: Section) -> str:
    """Return one section as HTML without scripts, for a notebook: pictures are drawn in it, all text is escaped."""
    environment = _environment()

    def images(picture: Picture) -> list[tuple[str, str]]:
        """Return (SVG in base64, what it shows) of a picture's figures."""
        return [
            (base64.b64encode(drawn([figure], "svg")).decode(), visible(shortened(figure.title, _LONGEST_CELL)))
            for figure in picture.figures
        ]

    environment.globals |= {"images_of": images}
    return environment.get_template("fragment.html").render(section=section)


def _environment() -> Environment:
    """Return the environment of the templates: it escapes all text, and refuses variables that are not given."""
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
# Stands in the template where the script goes, in a form that no escaped text can take.
_DRAWING = "<!-- drawing -->"


def _drawing(charts: Sequence[Spec]) -> str:
    """Return the specifications as a block of data, and the script that draws them."""
    data = json.dumps({"config": CONFIG, "charts": charts}, separators=(",", ":"))
    for letter in "<>&":  # JSON's escapes: no text of an artifact can then end the block
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" id="charts">{data}</script>\n<script>{script()}</script>'


def _hash_of(text: str) -> str:
    """Return a script's SHA-256 in base64, by which the page's security policy allows this script and no other."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _sentence(text: str) -> Markup:
    """Return running text as HTML in which no line ends between a number and its unit, or within an option's name."""
    escaped = str(escape(_UNITS.sub("\N{NO-BREAK SPACE}", visible(text))))
    return Markup(_OPTION.sub(r'<span class="option">\g<0></span>', escaped))


Cell = tuple[str, Markup]
"""A cell's text, and the attribute that gives its class."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """A table's cells: the head, and the rest, which is folded and capped."""

    named: str
    """Its caption."""
    header: list[Cell]
    head: list[list[Cell]]
    rest: list[list[Cell]]
    rest_said: str
    """How many rows are folded, and how many are left out."""


def _grid(table: Table) -> _Grid:
    """Return a table's cells for the page: the first rows, and the rest, which folds away, up to 300 rows in all.

    Text is cut to what is readable; cells with words and long cells have a class of their own. Three rows more than the
    head are not worth a fold.
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
    header = [_cell(cell, marked, _LONGEST_HEAD) for cell, marked in zip(table.header, is_words, strict=True)]
    caption = visible(shortened(table.caption, _LONGEST_CELL))
    return _Grid(
        caption, header, cells[:head_count], cells[head_count:], f"{len(cells) - head_count:,} more rows{left_out_text}"
    )


def _holds_words(cells: Sequence[str]) -> bool:
    """Return whether a column holds words: some cell is filled, and none begins as a figure does."""
    filled = [cell for cell in cells if cell not in ("", "-")]
    return bool(filled) and not any(_FIGURE.match(cell) for cell in filled)


def _cell(text: str, words: bool, longest: int | None = None) -> Cell:
    """Return a cell, cut to ``longest`` characters, with its class.

    ``longest`` None: text with blanks may be longer than one word, which does not wrap and would fill a phone's screen.
    ``words``: its column holds words.
    """
    cell_text = shortened(text, longest or (_LONGEST_CELL if " " in text else _LONGEST_WORD))
    names = [name for name, holds in (("words", words), ("long", len(cell_text) > _WRAPPED_FROM)) if holds]
    class_attribute = Markup(' class="{}"').format(escape(" ".join(names))) if names else Markup()
    return visible(cell_text), class_attribute
