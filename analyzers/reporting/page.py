"""One self-contained page: no network, no scripts; light and dark, phone and print. Start at :func:`render`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Literal

from ddltool.errors import shortened as shortened  # the sections take it from here
from ddltool.errors import visible

Label = Literal["measured", "predicted", "simulated", "read"]

# Names come from files that others wrote: one of ten thousand characters must not hide everything else.
_LONGEST_CELL, _LONGEST_WORD, _LONGEST_HEAD, _LONGEST_TITLE, _WRAPPED_FROM = 160, 64, 32, 90, 36
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
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --faint: #5f6368; --line: #d0d4d9; --soft: #f3f5f7;
  --edge: #8a9099; --blue: #0072b2; --on-blue: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --paper: #16181b; --faint: #a5abb3; --line: #3c4147; --soft: #212429;
    --edge: #7d848d; --blue: #2a8fd6; --on-blue: #000000; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 58rem; } a { color: inherit; } nav { margin: 1rem 0; font-size: .95rem; }
nav a { display: inline-block; margin-right: 1rem; }
.faint, figcaption, .caption { color: var(--faint); font-size: .9rem; }
figcaption, .caption { max-width: 58rem; } figcaption, figure .caption { width: 0; min-width: 100%; }
figure { margin: 1rem 0; padding: .8rem; border: 1px solid var(--line); border-radius: 6px;
  width: fit-content; min-width: min(100%, 50rem); max-width: 100%; }
.drawing { overflow-x: auto; } figcaption { margin-top: .5rem; }
figure svg { display: block; max-width: 48rem; height: auto; } .drawing > svg { min-width: 36rem; }
.narrow { display: none; } .narrow svg { max-width: 30rem; }
.scroll { overflow-x: auto; margin: .2rem 0 .3rem; } .caption { margin-top: .8rem; }
.scroll { background: linear-gradient(to left, var(--paper) 60%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(to left, var(--edge), transparent) right / .5rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right;
  white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child, .words { text-align: left; }
td.long { white-space: normal; min-width: 16rem; text-align: left; }
thead th { border-bottom: 1px solid var(--line); }
tbody tr + tr td { border-top: 1px solid var(--soft); }
.badge { display: inline-block; padding: 0 .45rem; border: 1px solid currentColor; border-radius: 1rem; font-size: .75rem; }
details { margin-top: .5rem; } summary { cursor: pointer; color: var(--faint); font-size: .9rem; }
@media (max-width: 40rem) {
  body { padding: 1rem .75rem 2rem; } figure { padding: .6rem; }
  .wide { display: none; } .narrow { display: block; }
  table { font-size: .85rem; line-height: 1.4; } th, td { padding-right: .6rem; } td.long { min-width: 11rem; }
  th:first-child, td:first-child:not(.long) { position: sticky; left: 0; background: var(--paper);
    background-clip: padding-box; }
}
@media print {
  :root { --ink: #000000; --paper: #ffffff; --faint: #444444; --line: #bbbbbb; --soft: #eeeeee; color-scheme: light;
    --blue: #0072b2; --on-blue: #ffffff; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav, details[open] > summary { display: none; }
  table { font-size: 8.5pt; } th, td { padding: .12rem .7rem .12rem 0; }
  th, .words, td.long { white-space: normal; overflow-wrap: break-word; }
  td.long { min-width: 10rem; } .drawing, .scroll { overflow: visible; } .scroll { background: none; }
  figure { min-width: 0; width: auto; border: 0; padding: 0; }
  .drawing, figcaption, .caption, details, .scroll, tr { break-inside: avoid; } thead { display: table-header-group; }
  h2, section > p, .drawing, .caption { break-after: avoid; } figure svg, .drawing > svg { min-width: 0; max-width: 44rem; }
}
"""
# Colours of pictures that the page changes in dark mode: a picture's own blue is too dark there for thin lines.
_PICTURE_COLOURS = (("#0072b2", "var(--blue)"), ("#fffffe", "var(--on-blue)"), ("#fefffe", "var(--paper)"))
_UNITS = re.compile(r"(?<=\d) (?=(?:s|ms|us|ns|B|KiB|MiB|GiB|TiB)\b)")


def filled(table: Table) -> Table:
    """Return the table without the columns, but the first, in which no row has anything."""
    kept = [
        place
        for place in range(len(table.header))
        if not place or any(row[place] not in ("", "-") for row in table.rows)
    ]
    return replace(
        table,
        header=[table.header[place] for place in kept],
        rows=[[row[place] for place in kept] for row in table.rows],
        text_columns=sum(place < table.text_columns for place in kept),
    )


def few(remarks: Sequence[str], most: int = 4) -> list[str]:
    """Return the first remarks, each cut to a few lines, and of many how many more there are."""
    shown = [shortened(remark, 240) for remark in remarks[:most]]
    return [*shown, f"and {len(remarks) - most:,} more of the kind"] if len(remarks) > most else shown


def listed(names: Sequence[str], most: int) -> str:
    """Return names in a row, the first ``most`` of many."""
    shown = ", ".join(shortened(name, 60) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def counted(count: int, noun: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "barrier"), counted(2000, "barrier")
    ('1 barrier', '2,000 barriers')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def render(title: str, sections: Sequence[Section], *, summary: Sequence[str], generated_by: str) -> str:
    """Return the page as HTML text. All text is escaped; only the pictures' SVG is taken as it is."""
    links = " ".join(f'<a href="#{_text(section.anchor)}">{_title(section.title)}</a>' for section in sections)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_title(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_title(title)}</h1>",
        *(f"<p>{_sentence(line)}</p>" for line in summary),
        f"<nav>{links}</nav><main>",
        *(_section(section) for section in sections),
        f'</main><p class="faint">{_text(generated_by)}</p>',
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _text(text: str) -> str:
    """Return text for HTML: escaped, with what would turn the writing direction or is no character made visible."""
    return escape(visible(text))


def _sentence(text: str) -> str:
    """Return running text for HTML: no line ends between a number and its unit."""
    return _UNITS.sub("\N{NO-BREAK SPACE}", _text(text))


def _title(text: str) -> str:
    return _text(shortened(text, _LONGEST_TITLE))


def _section(section: Section) -> str:
    lead = "".join(f"<p>{_sentence(line)}</p>" for line in section.lead)
    blocks = "".join(_picture(block) if isinstance(block, Picture) else _table(block) for block in section.blocks)
    return f'<section id="{_text(section.anchor)}"><h2>{_title(section.title)}</h2>{lead}{blocks}</section>'


def _badge(label: Label) -> str:
    return f'<span class="badge">{label}</span>'


def _picture(picture: Picture) -> str:
    numbers = ""
    if picture.table is not None:
        opened = " open" if picture.unfolded else ""
        numbers = f"<details{opened}><summary>numbers</summary>{_table(picture.table)}</details>"
    caption = f"<figcaption>{_badge(picture.label)} {_sentence(picture.caption)}</figcaption>"
    svg = picture.svg
    for own, variable in _PICTURE_COLOURS:
        svg = svg.replace(own, variable)
    return f'<figure><div class="drawing">{svg}</div>{caption}{numbers}</figure>'


def _table(table: Table) -> str:
    """Return the table; of a long one the head, the rest folded and capped, with the numbers of rows said."""
    rows = table.rows
    head = len(rows) if table.head is None or len(rows) <= table.head + 3 else table.head
    # A caption element would be as narrow as its table.
    text = f'<div class="caption">{_badge(table.label)} {_sentence(table.caption)}</div>{_grid(table, rows[:head])}'
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
    # a sentence wraps, a name of one long word breaks anywhere and would fill a phone's screen
    most = _LONGEST_HEAD if tag == "th" else _LONGEST_CELL if " " in text else _LONGEST_WORD
    shown = shortened(text, most)
    names = [name for name, holds in (("words", words), ("long", len(shown) > _WRAPPED_FROM)) if holds]
    marked = f' class="{" ".join(names)}"' if names else ""
    return f"<{tag}{marked}>{_text(shown)}</{tag}>"
