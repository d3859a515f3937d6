"""One self-contained page: no network, no scripts; light and dark, phone and print. Start at :func:`render`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from ddltool.errors import shortened as shortened  # the sections take it from here
from ddltool.errors import visible

Label = Literal["measured", "predicted", "simulated", "read"]

# Names come from files that others wrote: one of ten thousand characters must not hide everything else.
_LONGEST_CELL, _LONGEST_TITLE, _WRAPPED_FROM = 160, 90, 36
_MOST_ROWS = 300
_FIGURE = re.compile(r"[<>=x+\-−]*\s*(\d|inf\b)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under a header; ``label`` says where the figures come from.

    With ``head`` rows the rest folds away, and rows beyond 300 are left out; the page gives both numbers.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    label: Label
    head: int | None = None
    text_columns: int = 1
    """So many columns from the left hold words; of the others those in which no cell begins as a figure does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An SVG element with its caption; its numbers stand in the table under it, folded unless ``unfolded``."""

    svg: str
    caption: str
    label: Label
    table: Table | None = None
    unfolded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of the page: plain sentences, pictures, tables."""

    anchor: str
    title: str
    lead: Sequence[str]
    blocks: Sequence[Picture | Table] = field(default_factory=tuple)


_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --faint: #5f6368; --line: #d0d4d9; --soft: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --paper: #16181b; --faint: #a5abb3; --line: #3c4147; --soft: #212429; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 58rem; } a { color: inherit; } nav { margin: 1rem 0; font-size: .95rem; }
nav a { display: inline-block; margin-right: 1rem; }
.faint, figcaption, .caption { color: var(--faint); font-size: .9rem; }
figure { margin: 1rem 0; padding: .8rem; border: 1px solid var(--line); border-radius: 6px; }
.drawing { overflow-x: auto; } figcaption { margin-top: .5rem; }
figure svg { display: block; min-width: 36rem; max-width: 48rem; height: auto; }
.scroll { overflow-x: auto; margin: .2rem 0 .8rem; } .caption { margin-top: .8rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right;
  white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child, .words { text-align: left; }
td.long { white-space: normal; min-width: 16rem; text-align: left; }
thead th { border-bottom: 1px solid var(--line); }
tbody tr + tr td { border-top: 1px solid var(--soft); }
.badge { display: inline-block; padding: 0 .45rem; border: 1px solid currentColor; border-radius: 1rem; font-size: .75rem; }
details { margin-top: .5rem; } summary { cursor: pointer; color: var(--faint); font-size: .9rem; }
@media print {
  :root { --ink: #000000; --paper: #ffffff; --faint: #444444; --line: #bbbbbb; --soft: #eeeeee; color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 11pt; } nav { display: none; } figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; } figure svg { min-width: 0; } .drawing, .scroll { overflow: visible; }
}
"""


def render(title: str, sections: Sequence[Section], *, summary: Sequence[str], generated_by: str) -> str:
    """Return the page as HTML text. All text is escaped; only the pictures' SVG is taken as it is."""
    links = " ".join(f'<a href="#{_text(section.anchor)}">{_title(section.title)}</a>' for section in sections)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_title(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_title(title)}</h1>",
        *(f"<p>{_text(line)}</p>" for line in summary),
        f"<nav>{links}</nav><main>",
        *(_section(section) for section in sections),
        f'</main><p class="faint">{_text(generated_by)}</p>',
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _text(text: str) -> str:
    """Return text for HTML: escaped, with what would turn the writing direction or is no character made visible."""
    return escape(visible(text))


def _title(text: str) -> str:
    return _text(shortened(text, _LONGEST_TITLE))


def _section(section: Section) -> str:
    lead = "".join(f"<p>{_text(line)}</p>" for line in section.lead)
    blocks = "".join(_picture(block) if isinstance(block, Picture) else _table(block) for block in section.blocks)
    return f'<section id="{_text(section.anchor)}"><h2>{_title(section.title)}</h2>{lead}{blocks}</section>'


def _badge(label: Label) -> str:
    return f'<span class="badge">{label}</span>'


def _picture(picture: Picture) -> str:
    numbers = ""
    if picture.table is not None:
        opened = " open" if picture.unfolded else ""
        numbers = f"<details{opened}><summary>numbers</summary>{_table(picture.table)}</details>"
    caption = f"<figcaption>{_badge(picture.label)} {_text(picture.caption)}</figcaption>"
    return f'<figure><div class="drawing">{picture.svg}</div>{caption}{numbers}</figure>'


def _table(table: Table) -> str:
    """Return the table; of a long one the head, the rest folded and capped, with the numbers of rows said."""
    rows = table.rows
    head = len(rows) if table.head is None or len(rows) <= table.head + 3 else table.head
    # A caption element would be as narrow as its table.
    text = f'<div class="caption">{_badge(table.label)} {_text(table.caption)}</div>{_grid(table, rows[:head])}'
    if head == len(rows):
        return text
    rest = rows[head:_MOST_ROWS]
    left_out = len(rows) - head - len(rest)
    said = f"{len(rest):,} more rows" + (f"; the last {left_out:,} of {len(rows):,} are left out" if left_out else "")
    return f"{text}<details><summary>{said}</summary>{_grid(table, rest)}</details>"


def _grid(table: Table, rows: Sequence[Sequence[str]]) -> str:
    shown = table.rows[:_MOST_ROWS]
    words = [
        place < table.text_columns or _holds_words([row[place] for row in shown if place < len(row)])
        for place in range(len(table.header))
    ]
    head = "".join(_cell("th", cell, marked) for cell, marked in zip(table.header, words, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell("td", cell, marked) for cell, marked in zip(row, words, strict=True)) + "</tr>"
        for row in rows
    )
    named = _text(shortened(table.caption, _LONGEST_CELL))
    return f'<div class="scroll"><table aria-label="{named}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _holds_words(cells: Sequence[str]) -> bool:
    """Return whether a column holds words: something is there, and nothing of it begins as a figure does."""
    filled = [cell for cell in cells if cell not in ("", "-")]
    return bool(filled) and not any(_FIGURE.match(cell) for cell in filled)


def _cell(tag: str, text: str, words: bool) -> str:
    shown = shortened(text, _LONGEST_CELL)
    names = [name for name, holds in (("words", words), ("long", len(shown) > _WRAPPED_FROM)) if holds]
    marked = f' class="{" ".join(names)}"' if names else ""
    return f"<{tag}{marked}>{_text(shown)}</{tag}>"
