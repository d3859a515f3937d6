"""How commands print: tables, or with --json one JSON document, on stdout; remarks and progress on stderr."""

from __future__ import annotations

import json
import sys
import textwrap
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

from ddltool.analyzers.answers.reporting.section import Section, Table
from ddltool.artifacts import save
from ddltool.commands.options import VOICE
from ddltool.errors import visible

# If stderr is no terminal: seconds before a stage's first line of progress, and between later lines.
_FIRST_LINE_S, _NEXT_LINES_S = 10.0, 10.0


class _Plain(Console):
    """A console that prints texts literally: without markup, and control characters as escapes."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, with texts made :func:`visible`."""
        super().print(*(visible(printed) if isinstance(printed, str) else printed for printed in objects), **options)


def out() -> Console:
    """Return the console for results on stdout: as wide as the terminal, else 80 columns."""
    return _Plain(width=None if sys.stdout.isatty() else 80, highlight=False, markup=False)


def err() -> Console:
    """Return the console for notes and progress on stderr: as wide as the terminal, else 200 columns."""
    return _Plain(stderr=True, highlight=False, markup=False, width=None if sys.stderr.isatty() else 200)


def note(text: str) -> None:
    """Print a remark on stderr, unless ``-q`` is given."""
    if not VOICE.quiet:
        err().print(text, soft_wrap=True)


def say(text: str) -> None:
    """Print a sentence on stdout on one line, which the terminal wraps."""
    out().print(text, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout. Raises ValueError for NaN and infinities, which JSON does not have."""
    if isinstance(document, BaseModel):
        document = document.model_dump(mode="json")
    sys.stdout.write(json.dumps(document, indent=1, allow_nan=False) + "\n")


_LONGEST_UNBROKEN_NAME, _LONGEST_HEADING, _LONGEST_FIGURE = 48, 13, 24
"""Most characters of a first column whose cells are kept on one line (longer ones would leave no room for the figures), of a
line of a text column's heading, and of a figure: longer cells are words, which are wrapped."""


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str | None = None,
    text_columns: int = 1,
) -> Grid:
    """Return a table for the terminal that fits 80 columns.

    Headings are broken between words and at hyphens, figures never. Cells of the first column are not wrapped, unless one is
    longer than 48 characters.

    Args:
        title: stands above the table.
        columns: the headings.
        rows: the cells, as many in each row as there are columns.
        caption: stands below the table; None: nothing does.
        text_columns: how many of the first columns are text; the others are figures, which are right-aligned.
    """
    caption_text = Text(visible(caption)) if caption else None
    grid = Grid(title=Text(visible(title)), box=SIMPLE, caption=caption_text, title_justify="left")
    grid.min_width = min(len(title), 80)  # a title is wrapped to its table's width
    grid.caption_justify = "left"
    rows = list(rows)
    is_first_unbroken = max((len(row[0]) for row in rows if row), default=0) <= _LONGEST_UNBROKEN_NAME
    for column_index, column in enumerate(columns):
        is_text = (
            column_index < text_columns or max((len(row[column_index]) for row in rows), default=0) > _LONGEST_FIGURE
        )
        justify: JustifyMethod = "left" if is_text else "right"
        is_unbroken = is_first_unbroken if column_index == 0 else not is_text
        heading = visible(column)
        if column_index < text_columns:
            heading = "\n".join(textwrap.wrap(heading, _LONGEST_HEADING))
        grid.add_column(Text(heading), justify=justify, overflow="fold", no_wrap=is_unbroken)
        if 0 < column_index < text_columns:  # what has no blank, such as a device's name, is not broken either
            words = [word for row in rows for word in row[column_index].split()]
            longest = max(map(len, (*words, *heading.split())), default=0)
            grid.columns[-1].min_width = min(longest, _LONGEST_HEADING)
    if not is_first_unbroken:
        grid.columns[0].min_width = _LONGEST_UNBROKEN_NAME * 2 // 3  # rich would fold it into a few letters a line
    for row in rows:
        grid.add_row(*(Text(visible(cell)) for cell in row))
    return grid


_ROWS_SHOWN = 32  # a table of at most this many rows is shown whole


def show(section: Section, *written: Path | None) -> None:
    """Print a result's sentences and tables, and the names of the files ``written`` (None: no file).

    The verdict's answer comes first; the title is left out if the sentences begin with that. Pictures are not drawn, only their
    tables printed; details are printed with ``-v`` alone. A table that is too wide for the terminal loses spare columns.
    """
    console = out()
    lead, blocks = [*section.lead], [*section.blocks]
    answer_text = section.verdict.answer if section.verdict is not None else ""
    if not (lead and lead[0] == answer_text):
        lead = [answer_text, section.title, *(line for line in lead if line != answer_text)]
    if VOICE.verbose:
        lead += section.details
        blocks += section.more
    for line in filter(None, lead):
        console.print(line)
    for block in blocks:
        figures = block if isinstance(block, Table) else block.table  # a picture has its figures as a table, or none
        if figures is None:
            continue
        grid = _grid_of(figures)
        for name in figures.spare:  # the names of columns that it can do without
            width = console.measure(grid, options=console.options.update(width=1000)).maximum  # with nothing wrapped
            if name in figures.header and width > console.width:
                figures = figures.without(name)
                grid = _grid_of(figures)
        console.print(grid)
    tell_written(*written)


def finish(result: BaseModel, section: Callable[[], Section], output: Path | None, as_json: bool) -> None:
    """Save a result to the file ``output`` (None: do not), and print it as :func:`answer` does.

    ``section``: makes the section that is printed unless ``as_json``; then the result is printed as one JSON document.
    """
    if output is not None:
        save(result, output)
    answer(result, section, as_json, output)


def answer(result: BaseModel, section: Callable[[], Section], as_json: bool, *written: Path | None) -> None:
    """Print a result: as one JSON document (``as_json``), else as its section, with the names of the files ``written``.

    ``section``: makes the section of sentences and tables; called only if it is printed. ``written``: files to which the result
    was saved; None: no file.
    """
    if as_json:
        print_json(result)
    else:
        show(section(), *written)


def _grid_of(figures: Table) -> Grid:
    """Return a section's table for the terminal; of more than ``_ROWS_SHOWN`` rows only the first ``figures.head``."""
    rows = figures.rows if len(figures.rows) <= _ROWS_SHOWN else figures.rows[: figures.head]
    hidden_count = len(figures.rows) - len(rows)
    caption = f"{hidden_count:,} more rows: --json has all" if hidden_count else None
    title = figures.caption if figures.label == "read" else f"{figures.caption} ({figures.label})"
    return table(title, figures.header, rows, caption=caption, text_columns=figures.text_columns)


def tell_written(*paths: Path | None) -> None:
    """Print one line for each file that was written; None, a file that was not asked for, is skipped."""
    for path in paths:
        if path is not None:
            say(f"wrote {path}")


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[[int, str], None]]:
    """Show the progress of a stage, the body, on stderr; yield a function of (number of units done, remark).

    ``total``: number of units; None: unknown. A terminal shows a bar, any other stderr a line every ten seconds, printed
    by a thread. ``-v`` prints the stage's seconds at its end; ``-q`` shows no progress.
    """
    begin_s = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = err()
    is_over = threading.Event()
    with Progress(
        *columns, console=console, transient=True, disable=VOICE.quiet or not console.is_terminal
    ) as progress_bars:
        task = progress_bars.add_task(title, total=total)

        def advance(done: int, remark: str = "") -> None:
            """Move the bar to ``done`` units, with a remark beside the title."""
            progress_bars.update(task, completed=done, description=f"{title} {remark}".rstrip())

        def print_lines() -> None:
            """Print a line of progress every ten seconds until the stage is over; runs in a thread."""
            pause_s = _FIRST_LINE_S
            while not is_over.wait(pause_s):
                done_text = f" ({progress_bars.tasks[0].completed:.0f} of {total})" if total else ""
                seconds = time.monotonic() - begin_s
                console.print(
                    f"{progress_bars.tasks[0].description}{done_text}: {seconds:.0f} s so far", soft_wrap=True
                )
                pause_s = _NEXT_LINES_S

        if not (console.is_terminal or VOICE.quiet):
            threading.Thread(target=print_lines, daemon=True).start()
        try:
            yield advance
        finally:
            is_over.set()
    if VOICE.verbose:
        note(f"{title}: {time.monotonic() - begin_s:.1f} s")
