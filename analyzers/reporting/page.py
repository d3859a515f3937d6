"""One self-contained page: no network, no scripts; light and dark, phone and print. Start at :func:`render`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

Label = Literal["measured", "predicted", "simulated", "read"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under a header; ``label`` says where the figures come from."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    label: Label


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An SVG element with its caption; its numbers stand in the table under it."""

    svg: str
    caption: str
    label: Label
    table: Table | None = None


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
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0; } a { color: inherit; } nav { margin: 1rem 0; font-size: .95rem; } nav a { margin-right: 1rem; }
.faint, figcaption, caption { color: var(--faint); font-size: .9rem; }
figure { margin: 1rem 0; padding: .8rem; border: 1px solid var(--line); border-radius: 6px; }
figure svg { display: block; max-width: 100%; height: auto; } figcaption { margin-top: .5rem; }
.scroll { overflow-x: auto; margin: .8rem 0; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .3rem; } th, td { padding: .25rem .8rem .25rem 0; text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 1px solid var(--line); }
tbody tr + tr td { border-top: 1px solid var(--soft); }
.badge { display: inline-block; padding: 0 .45rem; border: 1px solid currentColor; border-radius: 1rem; font-size: .75rem; }
details { margin-top: .5rem; } summary { cursor: pointer; color: var(--faint); font-size: .9rem; }
@media print { body { max-width: none; } details > * { display: block; }
  nav { display: none; } figure { break-inside: avoid; } }
"""


def render(title: str, sections: Sequence[Section], *, summary: Sequence[str], generated_by: str) -> str:
    """Return the page as HTML text. All text is escaped; only the pictures' SVG is taken as it is."""
    links = " ".join(f'<a href="#{escape(section.anchor)}">{escape(section.title)}</a>' for section in sections)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in summary),
        f"<nav>{links}</nav><main>",
        *(_section(section) for section in sections),
        f'</main><p class="faint">{escape(generated_by)}</p>',
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _section(section: Section) -> str:
    lead = "".join(f"<p>{escape(line)}</p>" for line in section.lead)
    blocks = "".join(_picture(block) if isinstance(block, Picture) else _table(block) for block in section.blocks)
    return f'<section id="{escape(section.anchor)}"><h2>{escape(section.title)}</h2>{lead}{blocks}</section>'


def _badge(label: Label) -> str:
    return f'<span class="badge">{label}</span>'


def _picture(picture: Picture) -> str:
    numbers = ""
    if picture.table is not None:
        numbers = f"<details><summary>numbers</summary>{_table(picture.table)}</details>"
    caption = f"<figcaption>{_badge(picture.label)} {escape(picture.caption)}</figcaption>"
    return f"<figure>{picture.svg}{caption}{numbers}</figure>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    caption = f"<caption>{_badge(table.label)} {escape(table.caption)}</caption>"
    return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
