"""One section of a result: sentences, tables and pictures, made once, shown by the terminal and by the report alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ddltool.analyzers.reporting.figures import Figure
from ddltool.errors import shortened as shortened  # the sections take it from here

Label = Literal["measured", "predicted", "simulated", "read", "fitted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under a header; ``label`` says where the figures come from.

    Of more than ``head`` rows the rest folds away; how many are left out is said.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    label: Label
    head: int = 10
    text_columns: int = 1
    """So many columns from the left hold words; of the others those in which no cell begins as a figure does."""
    spare: Sequence[str] = ()
    """Columns that go first, in this order, where the terminal is too narrow for all."""

    def without(self, name: str) -> Table:
        """Return the table without the column of that name."""
        place = list(self.header).index(name)
        return replace(
            self,
            header=[*self.header[:place], *self.header[place + 1 :]],
            rows=[[*row[:place], *row[place + 1 :]] for row in self.rows],
            text_columns=self.text_columns - (place < self.text_columns),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Figures under each other with a caption; their numbers stand in the table, which is all that a terminal shows."""

    figures: Sequence[Figure]
    caption: str
    label: Label
    table: Table | None = None
    unfolded: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One result: plain sentences, pictures, tables."""

    title: str
    lead: Sequence[str]
    blocks: Sequence[Picture | Table] = field(default_factory=tuple)
    anchor: str = ""
    """Its place on a page."""


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
