"""Records of a picture's content: lines, bars, spans over time, a heat map; :mod:`.charts` draws them.

Sections contain these records, so that no plotting library is loaded until a page or a file is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ddltool.arrays import Floats

LINES_DRAWN, BARS_DRAWN = 8, 24
# A bar beyond this ratio, or below one over it, leaves nothing of the others.
MOST_DRAWN = 1e12
# Spans closer than this share of the axis become one: it is less than a pixel of a wide page.
_RESOLUTION = 1 / 1200


@dataclass(frozen=True, kw_only=True, slots=True)
class _Figure:
    """The fields of every figure."""

    title: str
    """Text for screen readers; also drawn above the figure if ``headed``."""
    headed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Line:
    """A named line through the points (x, y), both (n,), with a band from ``low`` to ``high``, (n,).

    ``dots``: measured points (x, y) beside it, of any number.
    """

    label: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    dots: tuple[Floats, Floats] | None = None
    texts: Sequence[str] = ()
    """A text beside each point."""


def line(label: str, records: Iterable[Any], x: str, y: str) -> Line:
    """Return the line through the records' fields ``x`` and ``y`` (paths for :func:`value_of`), in the records' order."""
    pairs = [(value_of(record, x), value_of(record, y)) for record in records]
    points = np.array(pairs, dtype=np.float64).reshape(-1, 2)  # also without records
    return Line(label=label, x=points[:, 0], y=points[:, 1])


def value_of(record: Any, path: str) -> Any:
    """Return the value at a path in a record, mapping or tuple (by index): ``a.b`` is field b of field a.

    None if a part of the path is None or, in a mapping, missing.
    """
    value = record
    for name in path.split("."):
        if value is None:
            return None
        if isinstance(value, tuple):
            value = value[int(name)]
        elif isinstance(value, Mapping):
            value = value.get(name)
        else:
            value = getattr(value, name)
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines(_Figure):
    """Lines, of which eight are drawn, by colour and dash; ``levels`` and ``marks``: named straight lines at a y or an x."""

    lines: Sequence[Line]
    xlabel: str
    ylabel: str
    draw: Literal["line", "steps", "points", "areas"] = "line"
    """``steps``: y holds until the next x; ``areas``: such steps, stacked, in eight colours."""
    x_axis: Literal["linear", "log", "bytes", "durations"] = "linear"
    """``bytes`` and ``durations`` (in seconds) are logarithmic, with labels in readable units."""
    log_y: bool = False
    seconds: bool = False
    """Whether y is in seconds; the axis then has a readable unit."""
    whole: str = ""
    """The axes (``x``, ``y`` or ``xy``) of counts, which have ticks at whole numbers alone."""
    levels: Sequence[tuple[str, float]] = ()
    marks: Sequence[tuple[str, float]] = ()
    family: str = ""
    """What the labels name, such as "policy": a name of one family has the same colour in all figures of a page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars(_Figure):
    """One horizontal bar per named value, with the value as text at its end."""

    rows: Sequence[tuple[str, float]]
    xlabel: str
    seconds: bool = False
    level: tuple[str, float] | None = None
    """(name, value) of a line across all bars, such as the baseline."""
    log: bool = False
    """Whether the axis is logarithmic: bars begin at ``level``, and all values are above zero."""
    intervals: Sequence[tuple[float, float] | None] = ()
    """(low, high) of each value, drawn as whiskers; None: not known. Empty: known for no value."""
    dots: bool = False
    """Whether dots are drawn in place of bars, for values without a natural zero."""
    marked: tuple[str, Sequence[bool]] | None = None
    """(name of a class, whether each bar is in it): its bars have another colour."""
    unmarked: str = ""
    """The name of the class of the other bars."""
    family: str = ""
    """See :class:`Lines`; each bar then has a colour of its own."""


@dataclass(frozen=True, slots=True)
class Span:
    """A bar from ``start`` to ``end`` seconds, coloured by its kind; ``text`` is drawn on it if there is room."""

    start: float
    end: float
    kind: str
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes(_Figure):
    """Named lanes of bars over time in seconds; ``mark``: (name, seconds) of a moment."""

    lanes: Sequence[tuple[str, Sequence[Span]]]
    xlabel: str = "time"
    mark: tuple[str, float] | None = None
    until: float = 0.0
    """The axis reaches at least to here, so that figures below each other have the same axis."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Heat(_Figure):
    """A heat map of ``values``, (n, m), over whole numbers x, (n,), and y, (m,), which has equal ratios.

    ``best``: the best y of each x, (n,), drawn as a line; NaN: there is none.
    """

    x: Floats
    y: Floats
    values: Floats
    best: Floats
    xlabel: str
    ylabel: str
    what: str
    """The title of the scale of colours: what ``values`` are."""
    marks: Sequence[tuple[str, float]] = ()
    """(name, x) of vertical lines."""
    known: float | None = None
    """The largest x that data support; the map is faded beyond it. None: all."""


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
    if len(points) <= 1:
        return []
    are_priced = all(point.price is not None for point in points)
    title = f"{unit.capitalize()} per second against {'money' if are_priced else 'memory'}"
    return [Explorer(title=title, headed=True, points=points, unit=unit, priced=are_priced)]


Figure = Lines | Bars | Lanes | Heat | Explorer


def merged(spans: Sequence[Span], whole_s: float) -> list[Span]:
    """Return the spans sorted by kind and start, without empty ones, those of one kind merged that a screen cannot separate.

    Spans with a text are not merged. This keeps pages of thousands of bars small. ``whole_s``: seconds that the axis
    covers.
    """
    spans_by_kind: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda each: (each.start, each.end)):
        if span.end <= span.start:
            continue
        same_kind = spans_by_kind.setdefault(span.kind, [])
        last = same_kind[-1] if same_kind else None
        if last is not None and not (last.text or span.text) and span.start - last.end < _RESOLUTION * whole_s:
            same_kind[-1] = Span(last.start, max(last.end, span.end), span.kind)
        else:
            same_kind.append(span)
    return [span for same_kind in spans_by_kind.values() for span in same_kind]


def stacked(phases: Mapping[str, float], start: float = 0.0) -> list[Span]:
    """Return the phases (seconds by kind) as spans one after another from ``start`` on, without those of 0 seconds."""
    spans = []
    for kind, length in phases.items():
        if length > 0:
            spans.append(Span(start, start + length, kind))
            start += length
    return spans
