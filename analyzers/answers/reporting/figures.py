"""What a picture shows, as records: lines, bars, spans over time, a heat map. :mod:`.charts` draws them.

A section holds these; no plotting library is loaded before somebody asks for a page or a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ddltool.arrays import Floats

LINES_DRAWN = 8
# Bars closer than this share of the axis cannot be told apart and become one: less than a pixel of a wide page.
_RESOLUTION = 1 / 1200


@dataclass(frozen=True, kw_only=True, slots=True)
class _Figure:
    title: str
    """What a reader without eyes is told; drawn above the figure where ``headed``."""
    headed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Line:
    """A named line through (x, y), both (n,): a band from ``low`` to ``high`` (n,), measured ``dots`` (x, y) of any number."""

    label: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    dots: tuple[Floats, Floats] | None = None
    texts: Sequence[str] = ()
    """What stands beside each point."""


def line(label: str, records: Iterable[Any], x: str, y: str) -> Line:
    """Return the line through two fields of records, in their order; ``x`` and ``y``: paths as of :func:`value_of`."""
    points = np.array([(value_of(record, x), value_of(record, y)) for record in records], dtype=np.float64).reshape(
        -1, 2
    )
    return Line(label=label, x=points[:, 0], y=points[:, 1])


def value_of(record: Any, path: str) -> Any:
    """Return the value at a path in a record, mapping or tuple (by index): ``a.b`` is field b of field a.

    None where a part on the way is None or, in a mapping, missing.
    """
    for name in path.split("."):
        if record is None:
            return None
        if isinstance(record, tuple):
            record = record[int(name)]
        else:
            record = record.get(name) if isinstance(record, Mapping) else getattr(record, name)
    return record


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines(_Figure):
    """Up to eight lines, told apart by colour and dash; ``levels`` and ``marks`` are named values of y and of x."""

    lines: Sequence[Line]
    xlabel: str
    ylabel: str
    draw: Literal["line", "steps", "points", "areas"] = "line"
    """``steps``: y holds until the next x; ``areas``: such steps, stacked, a colour for each of eight."""
    x_axis: Literal["linear", "log", "bytes", "durations"] = "linear"
    """``bytes`` and ``durations`` (in seconds) are logarithmic in units that people read."""
    log_y: bool = False
    seconds: bool = False
    """y is in seconds; the axis takes a readable unit."""
    whole: str = ""
    """The axes (``x``, ``y`` or both) that count, and have no ticks between."""
    levels: Sequence[tuple[str, float]] = ()
    marks: Sequence[tuple[str, float]] = ()
    family: str = ""
    """What the labels name (``policy``): such names keep their colours over a page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars(_Figure):
    """One bar per named value, the value behind it."""

    rows: Sequence[tuple[str, float]]
    xlabel: str
    seconds: bool = False
    level: tuple[str, float] | None = None
    """A named line across all, such as the baseline."""
    log: bool = False
    """Logarithmic, bars begin at ``level``; all values are above zero."""
    intervals: Sequence[tuple[float, float] | None] = ()
    """(low, high) of each value, drawn as whiskers; None: none is known. Empty: of no value."""
    dots: bool = False
    """Dots in place of bars, for what has no zero."""
    marked: tuple[str, Sequence[bool]] | None = None
    """A kind, and which bars are of it: these have another colour; the others are ``unmarked``."""
    unmarked: str = ""
    family: str = ""
    """As of :class:`Lines`; each bar then has a colour of its own."""


@dataclass(frozen=True, slots=True)
class Span:
    """A bar from ``start`` to ``end`` seconds, coloured by its kind; ``text`` is shown where there is room."""

    start: float
    end: float
    kind: str
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes(_Figure):
    """A lane per named row with its bars over time in seconds; ``mark`` is a named moment."""

    lanes: Sequence[tuple[str, Sequence[Span]]]
    xlabel: str = "time"
    mark: tuple[str, float] | None = None
    until: float = 0.0
    """The axis reaches this far at least: figures under each other then share it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Heat(_Figure):
    """``values`` (n, m) over whole x (n,) and y (m,) of equal ratios, and the ``best`` y of each x, NaN where there is none."""

    x: Floats
    y: Floats
    values: Floats
    best: Floats
    xlabel: str
    ylabel: str
    what: str
    """The words for ``values``, over their scale of colours."""
    marks: Sequence[tuple[str, float]] = ()
    known: float | None = None
    """Beyond this x no data support what is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One thing to choose, with its figures and the command that gives it again (empty: none does)."""

    traits: Mapping[str, str | int]
    """What a reader filters by, the same of every point; the first gives colour and shape."""
    step_s: float
    range_s: tuple[float | None, float | None]
    """80 % of measured steps are expected in it."""
    rate: float
    memory_bytes: float
    price: float | None = None
    """Of a million samples."""
    fits: bool = True
    command: str = ""

    @property
    def name(self) -> str:
        """The point's traits in words, all but the first with their names."""
        first, *others = self.traits.items()
        return ", ".join([str(first[1]), *(f"{name} {value}" for name, value in others)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Explorer(_Figure):
    """Rates of points over money where all have a price, else over memory; filtered, with the frontier of what fits."""

    points: Sequence[Point]
    unit: str
    """Of the rates: ``samples`` or ``tokens`` per second."""
    priced: bool


def explorer(points: Sequence[Point], unit: str) -> list[Explorer]:
    """Return the points as one figure; none where there is nothing to compare. ``unit``: of their rates, samples or tokens."""
    priced = all(point.price is not None for point in points)
    title = f"{unit.capitalize()} per second against {'money' if priced else 'memory'}"
    return [Explorer(title=title, headed=True, points=points, unit=unit, priced=priced)] if len(points) > 1 else []


Figure = Lines | Bars | Lanes | Heat | Explorer


def merged(spans: Sequence[Span], whole_s: float) -> list[Span]:
    """Return spans by kind and start, without empty ones; neighbours too close to tell apart on a screen become one.

    ``whole_s``: seconds that the axis covers. Spans with a text stay as they are. A page of thousands of bars stays
    small.
    """
    spans_by_kind: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda each: (each.start, each.end)):
        if span.end <= span.start:
            continue
        kind_spans = spans_by_kind.setdefault(span.kind, [])
        last = kind_spans[-1] if kind_spans else None
        is_plain = last is not None and not (last.text or span.text)
        if last is not None and is_plain and span.start - last.end < _RESOLUTION * whole_s:
            kind_spans[-1] = Span(last.start, max(last.end, span.end), span.kind)
        else:
            kind_spans.append(span)
    return [span for kind_spans in spans_by_kind.values() for span in kind_spans]


def stacked(phases: Mapping[str, float], start: float = 0.0) -> list[Span]:
    """Return the phases that take time (seconds by kind) as spans one after the other from ``start`` on."""
    spans = []
    for kind, length in phases.items():
        if length > 0:
            spans.append(Span(start, start + length, kind))
            start += length
    return spans
