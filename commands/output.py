"""What commands print: tables for people on stdout, one JSON document with --json, everything else on stderr."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.box import SIMPLE
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid
from rich.text import Text

from ddltool.analyzers.reporting.section import Section, Table
from ddltool.artifacts import save
from ddltool.commands.options import VOICE
from ddltool.errors import visible

# A stage tells, where no bar can be drawn, after the first and then every so many seconds.
_FIRST_LINE_S, _NEXT_LINES_S = 10.0, 10.0


class _Plain(Console):
    """A console that shows the names in files as they are: no markup, nothing that a terminal would act on."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, texts made visible."""
        super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **options)


def out() -> Console:
    """Return the console for results: 80 columns when it is no terminal, no markup in the data."""
    return _Plain(width=None if sys.stdout.isatty() else 80, highlight=False, markup=False)


def err() -> Console:
    """Return the console for notes and progress."""
    return _Plain(stderr=True, highlight=False, markup=False, width=None if sys.stderr.isatty() else 200)


def note(text: str) -> None:
    """Print a remark on stderr, unless the command is to be quiet."""
    if not VOICE.quiet:
        err().print(text, soft_wrap=True)


def say(text: str) -> None:
    """Print a sentence on stdout, wrapped by whoever reads it."""
    out().print(text, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout. NaN and infinities are refused: they are no JSON."""
    if isinstance(document, BaseModel):
        document = document.model_dump(mode="json")
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False) + "\n")


_NAMED_WHOLE = 48
"""Characters of the first column, which is not broken up to there; a longer name leaves the figures no room."""


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str | None = None,
    text_columns: int = 1,
) -> Grid:
    """Return a table that fits 80 columns: the first ``text_columns`` are text, the others right-aligned figures."""
    below = Text(visible(caption)) if caption else None
    made = Grid(title=Text(visible(title)), box=SIMPLE, caption=below, title_justify="left")
    made.min_width = min(len(title), 80)  # a title is wrapped to its table's width
    made.caption_justify = "left"
    rows = list(rows)
    whole = max((len(row[0]) for row in rows if row), default=0) <= _NAMED_WHOLE
    for number, column in enumerate(columns):
        side: JustifyMethod = "left" if number < text_columns else "right"
        made.add_column(Text(visible(column)), justify=side, overflow="fold", no_wrap=number == 0 and whole)
    if not whole:
        made.columns[0].min_width = _NAMED_WHOLE * 2 // 3
    for row in rows:
        made.add_row(*(Text(visible(cell)) for cell in row))
    return made


_ROWS_SHOWN = 32


def show(section: Section, *written: Path | None) -> None:
    """Print a result: its sentences, its tables, and which files it was written to. Pictures are for the report."""
    console = out()
    console.print(section.title)
    for line in section.lead:
        console.print(line)
    for block in section.blocks:
        if (numbers := block if isinstance(block, Table) else block.table) is None:
            continue
        made = _table_of(numbers)
        for name in numbers.spare:
            width = console.measure(made, options=console.options.update(width=1000)).maximum  # nothing wrapped
            if name in numbers.header and width > console.width:
                numbers = numbers.without(name)
                made = _table_of(numbers)
        console.print(made)
    tell_written(*written)


def finish(found: BaseModel, section: Callable[[], Section], output: Path | None, as_json: bool) -> None:
    """Write a result where it was asked for, and print it: as one JSON document, or as its section."""
    if output is not None:
        save(found, output)
    answer(found, section, as_json, output)


def answer(found: BaseModel, section: Callable[[], Section], as_json: bool, *written: Path | None) -> None:
    """Print a result: as one JSON document, or as its section and which files it was written to."""
    if as_json:
        print_json(found)
    else:
        show(section(), *written)


def _table_of(numbers: Table) -> Grid:
    """Return a section's table, of many rows the first."""
    rows = numbers.rows if len(numbers.rows) <= _ROWS_SHOWN else numbers.rows[: numbers.head]
    left_out = len(numbers.rows) - len(rows)
    said = f"{left_out:,} more rows: --json has all" if left_out else None
    title = numbers.caption if numbers.label == "read" else f"{numbers.caption} ({numbers.label})"
    return table(title, numbers.header, rows, caption=said, text_columns=numbers.text_columns)


def tell_written(*places: Path | None) -> None:
    """Print which files were written, as far as any were asked for."""
    for place in places:
        if place is not None:
            say(f"wrote {place}")


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[[int, str], None]]:
    """Show on stderr how far a stage is; the yielded function sets the done count and a remark.

    A bar where stderr is a terminal. Elsewhere a line every ten seconds. With -v its seconds in the end; with -q nothing.
    """
    begin_s = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = err()
    over = threading.Event()
    with Progress(*columns, console=console, transient=True, disable=VOICE.quiet or not console.is_terminal) as bars:
        task = bars.add_task(title, total=total)

        def advance(done: int, remark: str = "") -> None:
            bars.update(task, completed=done, description=f"{title} {remark}".rstrip())

        def tell() -> None:
            pause_s = _FIRST_LINE_S
            while not over.wait(pause_s):
                done = f" ({bars.tasks[0].completed:.0f} of {total})" if total else ""
                seconds = time.monotonic() - begin_s
                console.print(f"{bars.tasks[0].description}{done}: {seconds:.0f} s so far", soft_wrap=True)
                pause_s = _NEXT_LINES_S

        if not (console.is_terminal or VOICE.quiet):
            threading.Thread(target=tell, daemon=True).start()
        try:
            yield advance
        finally:
            over.set()
    if VOICE.verbose:
        note(f"{title}: {time.monotonic() - begin_s:.1f} s")
