"""A section of a result: sentences, tables and pictures, which both the terminal and the report show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from ddltool.analyzers.answers.reporting.figures import Figure, value_of
from ddltool.units import show_bytes, show_seconds

Record = TypeVar("Record")
Column = str | Callable[[Record], object]
"""A column's cells: the path of a record's field, with a format (``split.error:+.1%``) or the unit that its name implies
(``sync_s``); or a function of the record."""
Label = Literal["measured", "predicted", "simulated", "read"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under a header; ``label`` says where the figures come from. Rows after the first ``head`` are folded."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    label: Label
    head: int = 10
    text_columns: int = 1
    """Number of columns from the left that have words, in any case; of the others those without numbers have words."""
    spare: Sequence[str] = ()
    """Names of columns that a narrow terminal leaves out, in this order."""

    def without(self, name: str) -> Table:
        """Return the table without the column ``name``, which it must have."""
        index = list(self.header).index(name)
        return replace(
            self,
            header=[*self.header[:index], *self.header[index + 1 :]],
            rows=[[*row[:index], *row[index + 1 :]] for row in self.rows],
            text_columns=self.text_columns - (index < self.text_columns),  # one fewer if it was among them
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Figures one below the other with a caption, and the table of their numbers, which is all that a terminal shows."""

    figures: Sequence[Figure]
    caption: str
    label: Label
    table: Table | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The answer of a result in one sentence, how sure it is, and what to do next."""

    answer: str
    sure: str = ""
    """How sure the answer is, in words; "": nothing is said of that."""
    then: str = ""
    """What to do next, in words, or a command; "": nothing is said of that."""
    good: bool | None = None
    """Whether the answer is good news; None: neither good nor bad."""
    minor: bool = False
    """Whether a page should rather open with another verdict."""

    def says(self, line: str) -> bool:
        """Return whether a line of a section's lead repeats the verdict; a page then leaves the line out."""
        return line in (self.answer, f"How sure: {self.sure}") or bool(self.then and line.startswith("Next: "))


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One result: sentences (``lead``), pictures and tables; ``details`` and ``more`` are shown last, and only with ``-v``."""

    title: str
    lead: Sequence[str]
    blocks: Sequence[Picture | Table] = field(default_factory=tuple)
    details: Sequence[str] = ()
    more: Sequence[Picture | Table] = ()
    anchor: str = ""
    """Its HTML id on a page, ``KIND-NUMBER``."""
    verdict: Verdict | None = None


Blocks = list[Picture | Table]


def tabled(
    caption: str,
    label: Label,
    records: Iterable[Record],
    columns: Mapping[str, Column[Record]],
    *,
    names: tuple[str, Iterable[str]] | None = None,
    **layout: Any,
) -> Table:
    """Return a table with a row for each record and a column (by its header) for each entry of ``columns``.

    ``label``: where the figures come from. ``names``: (header, cells) of a first column. ``layout``: further fields of
    :class:`Table`.
    """
    rows = [[_shown(record, column) for column in columns.values()] for record in records]
    header = list(columns)
    if names is not None:
        header = [names[0], *header]
        rows = [[first, *row] for first, row in zip(names[1], rows, strict=True)]
    return Table(caption=caption, header=header, rows=rows, label=label, **layout)


def _shown(record: Record, column: Column[Record]) -> str:
    """Return a record's cell in a column: the result of its function, or its field in the column's format."""
    if not isinstance(column, str):
        return cell(column(record))
    path, _, form = column.partition(":")
    return cell(value_of(record, path), path, form)


def cell(value: Any, unit: str = "", form: str = "") -> str:
    """Return a value as a table shows it: in the format ``form``, else in the unit at the end of ``unit``, a field's name.

    None is "-", a text stays as it is; a float without a unit has four significant digits.

    >>> cell(None), cell(1200), cell(0.00153, "wait_s"), cell(1536, "size_bytes"), cell(0.05, form="+.1%")
    ('-', '1,200', '1.53 ms', '1.5 KiB', '+5.0%')
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if form:
        return format(value, form)
    if unit.endswith("_bytes_per_s"):
        return f"{show_bytes(value)}/s"
    if unit.endswith("_s") and not unit.endswith("_per_s"):
        return show_seconds(value)
    if unit.endswith("_bytes"):
        return show_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def pictured(caption: str, table: Table, *figures: Figure) -> Picture:
    """Return a picture of the figures with the table of their numbers; its label is the table's."""
    return Picture(figures=figures, caption=caption, label=table.label, table=table)


def how_many_drawn(drawn: int, things: Sequence[object], noun: str) -> str:
    """Return a remark for a caption that only ``drawn`` of the ``things``, called ``noun``, are drawn; "" if all are.

    >>> how_many_drawn(2, "abc", "lines"), how_many_drawn(3, "abc", "lines")
    (' 2 of 3 lines are drawn.', '')
    """
    return f" {drawn} of {len(things)} {noun} are drawn." if len(things) > drawn else ""


def without_empty_columns(table: Table) -> Table:
    """Return the table without columns whose cells are all empty or "-"; the first column stays."""
    kept_columns = [
        column
        for column in range(len(table.header))
        if not column or any(row[column] not in ("", "-") for row in table.rows)
    ]
    return replace(
        table,
        header=[table.header[column] for column in kept_columns],
        rows=[[row[column] for column in kept_columns] for row in table.rows],
        text_columns=sum(column < table.text_columns for column in kept_columns),
    )
