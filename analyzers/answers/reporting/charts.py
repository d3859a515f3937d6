"""Draws figures as Vega-Lite specifications for a page, and as SVG and PNG files, by Altair and vl-convert.

Colours in specifications are the page's CSS variables, so that one drawing serves light, dark and print; files get the
light colours. Names come from files that anybody made: they are only used as data, never in an expression or in a tooltip's
title, which Vega-Lite compiles into an expression. A chart's data are rows (dicts), whose fields its encodings name, with
a type behind a colon: ``x:Q`` is a quantity, ``name:N`` a name.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import vl_convert

from ddltool.analyzers.answers.reporting.figures import LINES_DRAWN, Bars, Explorer, Figure, Heat, Lanes, Line, Lines
from ddltool.errors import shortened, visible
from ddltool.units import show_bytes, show_seconds, show_span

Row = dict[str, Any]
Spec = dict[str, Any]
Chart = Any  # the result of altair.layer, whose types also allow a facet
Slots = dict[str, dict[str, int]]
"""Family to name to the name's position in the order of colours."""

# Okabe and Ito's colours, which colour-blind readers can distinguish, with enough contrast on white; those of dark pages
# are in the page's style sheet.
COLOURS: Mapping[str, str] = {
    "ink": "#1a1a1a",
    "paper": "#ffffff",
    "faint": "#5f6368",
    "line": "#d0d4d9",
    "on-blue": "#ffffff",
    "blue": "#0072b2",
    "red": "#d55e00",
    "green": "#009e73",
    "pink": "#cc79a7",
    "orange": "#c98600",
    "grey": "#808080",
    "sky": "#56b4e9",
    "yellow": "#d6c800",
}
INK = "var(--ink)"
PAPER = "var(--paper)"
FAINT = "var(--faint)"
BLUE = "var(--blue)"
SERIES = tuple(f"var(--{name})" for name in ("blue", "red", "green", "pink", "ink"))
AREAS = tuple(f"var(--{name})" for name in ("blue", "red", "green", "pink", "orange", "sky", "yellow", "grey"))
KINDS: Mapping[str, str] = {
    **{"recv": BLUE, "compute": "var(--orange)", "send": "var(--green)"},
    **{"communication": BLUE, "sync": BLUE, "waiting": "var(--grey)", "wait": "var(--grey)", "other": "var(--pink)"},
}
_DASHES = ([1, 0], [7, 3], [2, 2], [8, 3, 2, 3], [12, 3], [1, 3])
# Of lines at fixed values; no figure has more than three.
_FIXED_DASHES = ([4, 4], [2, 3], [8, 3])
# Pixels of a figure's width in a file and of the height of a lane or a bar; pixels of a PNG for each of these.
_WIDTH = 640
_LANE_HEIGHT = 24
_PNG_SCALE = 2
_NUMBER = ",.4~r"
# Vega expressions: a text on a bar is drawn if it has room, and thin bars have no edge.
_PIXELS = "abs(scale('x', datum.end) - scale('x', datum.start))"
_TEXT_OPACITY = alt.ExprRef(f"{_PIXELS} > 7 * length(datum.text) + 3 ? 1 : 0")
_EDGE_WIDTH = alt.ExprRef(f"{_PIXELS} > 6 ? 0.6 : 0")
# Possible marks of an axis of durations, in seconds: from a millisecond to a thousand days.
_MARKED_TIMES = (
    *(1e-3, 0.01, 0.1, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18_000, 36_000),
    *(86_400, 172_800, 432_000, 864_000, 8.64e6, 8.64e7),
)


def _in_units(units: Mapping[str, float], smallest: str) -> str:
    """Return the Vega expression of an axis label in the largest unit that the value reaches.

    ``units``: sizes by name, the largest first; ``smallest``: the expression of a label below all of them.
    """
    larger = (
        f"datum.value >= {size} ? format(datum.value / {size}, ',') + ' {unit}' : " for unit, size in units.items()
    )
    return "".join(larger) + smallest


_TIMES = _in_units({"d": 86400, "h": 3600, "min": 60, "s": 1}, "1000 * datum.value + ' ms'")
_BYTES = _in_units({"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}, "datum.value + ' B'")
_SIDE = {"labelColor": INK, "titleColor": INK, "tickColor": FAINT, "domainColor": FAINT, "titleFontWeight": "normal"}
CONFIG: Spec = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {**_SIDE, "gridColor": "var(--line)", "labelFontSize": 12, "titleFontSize": 12}
    | {"labelLimit": 240, "labelOverlap": "greedy", "labelSeparation": 6},
    "axisX": {"labelFlush": 20},  # a number at an end of its axis does not reach out of the picture
    "legend": {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12, "labelLimit": 300}
    | {"symbolOpacity": 1, "titleFontWeight": "normal"},
    "title": {"color": INK, "fontSize": 13, "fontWeight": "normal", "anchor": "start", "offset": 8, "limit": 640},
    "text": {"color": INK, "fontSize": 12},
    "rule": {"color": INK},
}


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return (factor from seconds, unit) of an axis up to ``longest_s``: s, ms or us, so that labels are short."""
    if not 0 < longest_s < 1:
        return 1.0, "s"
    return (1e3, "ms") if longest_s >= 1e-3 else (1e6, "us")


def spec(figure: Figure, slots: Slots | None = None) -> Spec:
    """Return the Vega-Lite specification of one figure, as wide as its container, in the page's colours.

    ``slots`` is filled with the colours of names: figures of one page share it, so that a name keeps its colour.
    """
    specification = _specification(figure, {} if slots is None else slots)
    name_by_rows: dict[str, str] = {}
    for layer in (specification, *specification["layer"]):  # rows of several layers are stored once
        if "data" not in layer:
            continue
        rows = json.dumps(layer["data"]["values"])
        layer["data"] = {"name": name_by_rows.setdefault(rows, f"rows{len(name_by_rows)}")}
    autosize = {"type": "fit-x", "contains": "padding"}
    datasets = {name: json.loads(rows) for rows, name in name_by_rows.items()}
    return {**specification, "width": "container", "autosize": autosize, "datasets": datasets}


def drawn(figures: Sequence[Figure], file_format: str, width: int = _WIDTH) -> bytes:
    """Return figures, one below the other, as the bytes of a file; ``file_format``: svg or png; ``width``: pixels of a plot."""
    text = json.dumps(_concatenated(figures, width))
    if file_format == "svg":
        return vl_convert.vegalite_to_svg(text, allowed_base_urls=[]).encode()
    return vl_convert.vegalite_to_png(text, scale=_PNG_SCALE, allowed_base_urls=[])


def altair_chart(figures: Sequence[Figure]) -> alt.VConcatChart:
    """Return figures, one below the other, as an Altair chart, which a notebook shows and a script may change or save."""
    return alt.VConcatChart.from_dict(_concatenated(figures))


def _concatenated(figures: Sequence[Figure], width: int = _WIDTH) -> Spec:
    """Return one specification of figures below each other, each ``width`` pixels wide, in the colours of light pages.

    In a concatenation the x scale of figure k is called ``concat_k_x``; expressions that name it ``x`` are changed. All
    legends get as many columns as the one with the longest entries has room for.
    """
    slots: Slots = {}
    views = list[Spec]()
    parameters = list[Spec]()
    legend_columns = 8
    for figure in figures:
        view = {**_specification(figure, slots), "width": width}
        schema = view.pop("$schema")
        parameters += view.pop("params", [])
        entry_width = view.pop("usermeta")["key"]  # see _layered; on a page, a script chooses the columns
        legend_columns = max(1, min(legend_columns, width // entry_width))
        views.append(json.loads(json.dumps(view).replace("scale('x'", f"scale('concat_{len(views)}_x'")))
    together = {"$schema": schema, "vconcat": views, "params": parameters, "config": {**CONFIG, "background": PAPER}}
    together["config"]["legend"] = {**CONFIG["legend"], "columns": legend_columns}
    together["resolve"] = {"scale": {"color": "independent", "strokeDash": "independent"}}
    coloured: Spec = json.loads(re.sub(r"var\(--([a-z-]+)\)", lambda match: COLOURS[match[1]], json.dumps(together)))
    return coloured


def _specification(figure: Figure, slots: Slots) -> Spec:
    """Return the specification of one figure, without width and configuration, in the page's colours.

    ``slots``: the colours that names of each family have got so far; new names are added.
    """
    draw_by_type: dict[type, Callable[..., Chart]] = {Lines: _lines, Bars: _bars, Lanes: _lane_chart, Heat: _heat}
    draw_by_type[Explorer] = _explorer
    chart = draw_by_type[type(figure)](figure, slots).properties(description=visible(figure.title))
    if figure.headed:
        chart = chart.properties(title=name_of(figure.title, 80))
    specification: Spec = chart.to_dict(validate=False)
    del specification["config"]  # Altair's own; the page has another
    return specification


@functools.cache
def script() -> str:
    """Return the script that draws a page's charts: Vega, Vega-Lite and our own part. Made once, as it takes long."""
    # HTML would end the script at a text in it that looks like its end.
    bundle: str = vl_convert.javascript_bundle(_SNIPPET)
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


# The page is painted before its charts are drawn, so that the answer is read at once. Legends get as many columns as have
# room, and long names of lanes less room on a phone.
_SNIPPET = """
const {config, charts} = JSON.parse(document.getElementById("charts").textContent);
const painted = new Promise((then) => requestAnimationFrame(() => setTimeout(then)));
globalThis.drawn = painted.then(() => Promise.all(charts.map((chart, place) => {
  const host = document.getElementById("chart-" + place), room = host.clientWidth;
  const own = structuredClone(config);
  own.legend.columns = Math.max(1, Math.floor(room / chart.usermeta.key));
  own.legend.labelLimit = room - 60;
  own.title.limit = room;
  own.axis.labelLimit = room < 500 ? 110 : 240;
  return vegaEmbed(host, chart, {config: own, actions: false, renderer: "svg", ast: true, defaultStyle: false,
    tooltip: {disableDefaultStyle: true}});
})));
globalThis.drawn.finally(() => { document.documentElement.dataset.drawn = "yes"; });
"""


def name_of(text: str, longest: int = 34) -> str:
    """Return a name shortened to ``longest`` characters and made printable, for a picture."""
    return visible(shortened(text, longest))


def _distinct_names(texts: Iterable[str]) -> list[str]:
    """Return :func:`name_of` of all texts, each different: a second "a" becomes "a (2)"."""
    names: list[str] = []
    for text in map(name_of, texts):
        same_count = sum(name == text or name.startswith(f"{text} (") for name in names)
        names.append(f"{text} ({same_count + 1})" if text in names else text)
    return names


def _chart(rows: Sequence[Row]) -> alt.Chart:
    """Return a chart of rows, without marks yet."""
    return alt.Chart(alt.Data(values=list(rows)))  # type: ignore[no-untyped-call]


def _tips(titles: Mapping[str, str]) -> list[alt.Tooltip]:
    """Return tooltips of fields (such as ``x:Q``) by their titles; numbers have four significant digits."""
    return [
        alt.Tooltip(field, title=title, format=_NUMBER if field.endswith(":Q") else alt.Undefined)
        for field, title in titles.items()
    ]


def _titled(label: str, unit: str) -> str:
    """Return an axis's title with its unit in brackets; ``unit`` "": without."""
    return f"{label} ({unit})" if unit else label


def _colour_positions(names: Sequence[str], family: str, slots: Slots) -> list[int]:
    """Return the position of each name in the order of colours.

    Names of a ``family`` (such as policies) keep their positions over a page, by ``slots``, to which new ones are added;
    with family "" they count from 0.
    """
    if not family:
        return list(range(len(names)))
    position_by_name = slots.setdefault(family, {})
    return [position_by_name.setdefault(name, len(position_by_name)) for name in names]


def _legend(names: Sequence[str], **options: Any) -> alt.Legend | None:
    """Return a legend above the picture; None, which hides it, for a single name."""
    return alt.Legend(orient="top", title=None, **options) if len(names) > 1 else None


def _layered(layers: Sequence[alt.Chart], height: int, names: Sequence[str] = ()) -> Chart:
    """Return layers as one chart, ``height`` pixels high.

    Its ``usermeta`` has the width of the longest entry of the legend (7 pixels a letter, and 48 for the symbol), from
    which the page's script chooses the number of the legend's columns.
    """
    entry_width = 7 * max(map(len, names), default=0) + 48
    return alt.layer(*layers).properties(height=height, usermeta={"key": entry_width})


def _rule_layers(
    axis: str, values: Sequence[tuple[str, float]], colour: alt.Color, dash: alt.StrokeDash
) -> list[alt.Chart]:
    """Return straight lines at (name, value) of ``axis`` ("x" or "y") as a list of one layer; [] without values.

    ``colour`` and ``dash``: the encodings by name.
    """
    if not values:
        return []
    rows = [{"name": name, axis: value} for name, value in values]
    channel = {axis: alt.X("x:Q") if axis == "x" else alt.Y("y:Q")}
    return [_chart(rows).mark_rule(strokeWidth=1.5).encode(**channel, color=colour, strokeDash=dash)]


def _veil_beyond(known_until: float | None, last: float) -> list[alt.Chart]:
    """Return layers that fade the picture from x = ``known_until`` to ``last``, where no data support it; [] for None."""
    if known_until is None or known_until >= last:
        return []
    rows = [{"left": known_until + 0.5, "right": last + 0.5, "why": "not supported by data"}]
    chart = _chart(rows)
    x = alt.X("left:Q")
    # The label is above the plot, whose marks would cross it.
    label = chart.mark_text(align="right", baseline="bottom", dy=-3, color=FAINT)
    veil = chart.mark_rect(color=PAPER, opacity=0.55)
    return [
        veil.encode(x=x, x2="right:Q", tooltip=alt.Tooltip("why:N", title="beyond")),
        chart.mark_rule(color=FAINT, strokeDash=[3, 3]).encode(x=x),
        label.encode(x=alt.X("right:Q"), y=alt.value(0), text="why:N"),
    ]


def _tick_options(is_whole: bool) -> dict[str, Any]:
    """Return the options of an axis; ``is_whole``: its values are counts, and ticks are at whole numbers alone."""
    return {"tickMinStep": 1, "format": ",d"} if is_whole else {}


def _x_scale_and_axis(figure: Lines, values: np.ndarray[Any, Any]) -> tuple[alt.Scale, alt.Axis]:
    """Return the scale and the axis of x, with marks at round values; ``values``, (n,): all x that are drawn."""
    low, high = (float(values.min()), float(values.max())) if values.size else (1.0, 1.0)
    if figure.x_axis == "bytes":
        powers = range(int(np.floor(np.log2(max(low, 1)))), int(np.ceil(np.log2(max(high, 1)))) + 1)
        marks = [float(2**power) for power in powers[:: math.ceil(len(powers) / 5)]]  # at most five
        return alt.Scale(type="log", base=2, nice=False), alt.Axis(values=marks, labelExpr=_BYTES, grid=False)
    if figure.x_axis == "durations":
        times = [seconds for seconds in _MARKED_TIMES if low <= seconds <= high] or [low]
        marks = times[:: math.ceil(len(times) / 8)]  # at most eight
        return alt.Scale(type="log", nice=False), alt.Axis(values=marks, labelExpr=_TIMES, grid=False)
    if figure.x_axis == "log" and low > 0:
        return alt.Scale(type="log", nice=False), alt.Axis(format=_NUMBER, tickCount=6, grid=False)
    axis = alt.Axis(grid=False, tickCount=8, **_tick_options("x" in figure.whole))
    return alt.Scale(zero=False, nice=False, padding=6 if figure.draw == "points" else 0), axis


def _lines(figure: Lines, slots: Slots) -> Chart:
    """Return the chart of lines, steps, points or stacked areas, with their bands, dots and lines at fixed values.

    ``slots``: the colours that names of each family have got so far; new names are added.
    """
    drawn_lines = figure.lines[:LINES_DRAWN]
    labels = _distinct_names([line.label for line in drawn_lines])
    named_lines = list(zip(labels, drawn_lines, strict=True))
    fixed_names: list[str] = []  # of lines at a fixed y, then of those at a fixed x
    if figure.draw != "areas":
        fixed_names = _distinct_names([name for name, _ in (*figure.levels, *figure.marks)])
    colour, dash = _colour_and_dash(figure, labels, fixed_names, slots)
    scale, unit = time_unit(_highest(figure, drawn_lines)) if figure.seconds else (1.0, "")
    x, y = _line_axes(figure, drawn_lines, unit)
    tips = _tips({"name:N": "line", "x:Q": "x", "y:Q": "y"})
    rows = [row for name, line in named_lines for row in _line_rows(line, name, scale)]
    if figure.draw == "areas":
        area = _chart(rows).mark_area(interpolate="step-after", stroke=PAPER, strokeWidth=0.3)
        y["stack"] = "zero"
        return _layered([area.encode(x=x, y=y, color=colour, tooltip=tips)], 260, labels)

    interpolate: Any = "step-after" if figure.draw == "steps" else "linear"
    # Layers from the back to the front: bands, lines, points, texts, measured dots, fixed values. Texts and dots have rows
    # of their own.
    curves = _chart(rows).encode(x=x, y=y, color=colour)
    layers: list[alt.Chart] = []
    line_tips = tips
    if band_rows := [row for row in rows if "low" in row]:
        band = _chart(band_rows).mark_area(opacity=0.2, interpolate=interpolate)
        low = alt.Y("low:Q", title=y["title"], scale=y["scale"])
        layers.append(band.encode(x=x, y=low, y2="high:Q", color=colour))
        line_tips = [*tips, *_tips({"low:Q": "low", "high:Q": "high"})]
    layers.append(curves.mark_line(interpolate=interpolate, strokeWidth=2).encode(strokeDash=dash))
    # Points of plain lines are invisible: they are there for tooltips.
    is_seen = figure.draw == "points" or any(line.x.size == 1 for line in drawn_lines)
    points = curves.mark_point(filled=True, size=45 if is_seen else 120, opacity=float(is_seen))
    layers.append(points.encode(tooltip=line_tips))
    if text_rows := _text_rows(drawn_lines, scale):
        layers.append(_chart(text_rows).mark_text(align="left", dx=7, dy=-7, color=INK).encode(x=x, y=y, text="text:N"))
    if dots := _dot_rows(named_lines, scale):
        is_sparse = len(dots) < 1000
        cloud = _chart(dots).mark_point(filled=True, size=36 if is_sparse else 10, opacity=0.85 if is_sparse else 0.4)
        layers.append(cloud.encode(x=x, y=y, color=colour, tooltip=tips))
    fixed_values = [value * scale for _, value in figure.levels] + [value for _, value in figure.marks]
    named_values = list(zip(fixed_names, fixed_values, strict=True))
    layers += _rule_layers("y", named_values[: len(figure.levels)], colour, dash)
    layers += _rule_layers("x", named_values[len(figure.levels) :], colour, dash)
    return _layered(layers, 230, [*labels, *fixed_names])


def _text_rows(lines: Sequence[Line], scale: float) -> list[Row]:
    """Return a row of data for each text beside a point of a line; ``scale``: the factor on y."""
    return [
        {"x": float(x_at), "y": float(value) * scale, "text": name_of(text)}
        for line in lines
        for x_at, value, text in zip(line.x, line.y, line.texts, strict=False)
    ]


def _dot_rows(named_lines: Sequence[tuple[str, Line]], scale: float) -> list[Row]:
    """Return a row of data for each measured point of the lines, given as (name, line); ``scale``: the factor on y."""
    rows: list[Row] = []
    for name, line in named_lines:
        if line.dots is not None:
            dots_x, dots_y = line.dots
            rows += [
                {"name": name, "x": float(x_at), "y": float(value) * scale}
                for x_at, value in zip(dots_x, dots_y, strict=True)
            ]
    return rows


def _highest(figure: Lines, lines: Sequence[Line]) -> float:
    """Return the largest y of the lines, their bands and dots, and the fixed values; 0 if there is none."""
    arrays = []
    for line in lines:
        arrays.append(line.y if line.high is None else line.high)
        if line.dots is not None:
            _, dots_y = line.dots
            arrays.append(dots_y)
    highest_values = [float(array.max()) for array in arrays if array.size]
    return max([*highest_values, *(value for _, value in figure.levels)], default=0.0)


def _colour_and_dash(
    figure: Lines, labels: Sequence[str], fixed_names: Sequence[str], slots: Slots
) -> tuple[alt.Color, alt.StrokeDash]:
    """Return the encodings of lines by colour and by dash.

    ``labels``: the names of the lines; ``fixed_names``: those of lines at fixed values, which have the text's colour.
    ``slots``: see :func:`spec`; with it a name keeps its colour and dash on all figures of the family.
    """
    areas = figure.draw == "areas"
    names = [*labels, *fixed_names]
    positions = _colour_positions(labels, figure.family, slots)
    colours = AREAS if areas else SERIES
    line_colours = [colours[position % len(colours)] for position in positions] + [INK] * len(fixed_names)
    dashes = [_DASHES[position % len(_DASHES)] for position in positions]
    dashes += _FIXED_DASHES[: len(fixed_names)]
    legend = _legend(names, symbolType="square" if areas else "stroke", symbolSize=260)
    return (
        alt.Color("name:N", scale=alt.Scale(domain=names, range=line_colours), legend=legend),
        alt.StrokeDash("name:N", scale=alt.Scale(domain=names, range=dashes), legend=legend),
    )


def _line_axes(figure: Lines, lines: Sequence[Line], unit: str) -> tuple[alt.X, alt.Y]:
    """Return the encodings of x and y for lines; ``unit``: that of y, "" for none."""
    all_x = np.concatenate([*(line.x for line in lines), *(line.dots[0] for line in lines if line.dots)])
    x_scale, x_axis = _x_scale_and_axis(figure, all_x)
    y_scale = alt.Scale(type="log", nice=False) if figure.log_y else alt.Scale(zero=True)
    y_axis = alt.Axis(tickCount=6, gridOpacity=0.6, **_tick_options("y" in figure.whole))
    return (
        alt.X("x:Q", scale=x_scale, axis=x_axis, title=figure.xlabel),
        alt.Y("y:Q", scale=y_scale, axis=y_axis, title=_titled(figure.ylabel, unit)),
    )


def _line_rows(line: Line, name: str, scale: float) -> list[Row]:
    """Return a row of data for each point of a line, with the ends of its band; ``scale``: the factor on y."""
    rows: list[Row] = [
        {"name": name, "x": _short(x_at), "y": _short(y_value * scale)}
        for x_at, y_value in zip(line.x, line.y, strict=True)
    ]
    if line.low is not None and line.high is not None:
        for row, low, high in zip(rows, line.low, line.high, strict=True):
            row |= {"low": _short(low * scale), "high": _short(high * scale)}
    return rows


def _short(value: float) -> float:
    """Return a number rounded to six significant digits, more than a screen shows: it keeps the page small."""
    return float(f"{value:.6g}")


def _lanes_axis(names: Sequence[str]) -> alt.Y:
    """Return the y axis of lanes or bars, one for each name, in the order given."""
    scale = alt.Scale(domain=list(names), paddingInner=0.3, paddingOuter=0.2)
    axis = alt.Axis(ticks=False, domain=False, labelPadding=6)
    return alt.Y("name:N", title=None, sort=None, scale=scale, axis=axis)


def _bars(figure: Bars, slots: Slots) -> Chart:
    """Return the chart of a horizontal bar, or dot, for each named value, with its interval and its value as text.

    ``slots``: the colours that names of each family have got so far; new names are added.
    """
    names = _distinct_names([name for name, _ in figure.rows])
    values = [value for _, value in figure.rows]
    interval_ends = [end for pair in figure.intervals if pair is not None for end in pair]
    level = figure.level[1] if figure.level else None
    extremes = [*values, *interval_ends, *([] if level is None else [level])]
    scale, unit = time_unit(max(extremes)) if figure.seconds else (1.0, "")
    bar_start = (level or 1.0) * scale if figure.log else 0.0  # a logarithmic axis has no 0 to begin at
    low = min(extremes) * scale
    high = max(extremes) * scale
    x_scale, axis = _bar_scale_and_axis(low, high, is_log=figure.log)
    x = alt.X("value:Q", scale=x_scale, axis=axis, title=_titled(figure.xlabel, unit))
    rows = _bar_rows(figure, names, scale)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    colour = _bar_colour(figure, kinds, slots)
    tips = _tips({"name:N": "name", "shown:N": "value"} | ({"interval:N": "interval"} if interval_ends else {}))
    # Layers from the back to the front: bars, whiskers, texts, the level.
    chart = _chart(rows).encode(y=_lanes_axis(names), x=x)
    if figure.dots:
        layers = [chart.mark_point(filled=True, size=70).encode(color=colour, tooltip=tips)]
    else:
        layers = [chart.mark_bar().encode(x2=alt.datum(bar_start), color=colour, tooltip=tips)]
    if interval_ends:
        spread = _chart([row for row in rows if "low" in row]).encode(y=_lanes_axis(names), tooltip=tips)
        whisker = spread.mark_rule(strokeWidth=1.5).encode(x=alt.X("low:Q", scale=x_scale), x2="high:Q")
        cap = spread.mark_tick(thickness=1.5, size=9, color=INK)
        layers += [whisker, *(cap.encode(x=alt.X(f"{end}:Q")) for end in ("low", "high"))]
    # A text is drawn behind the end of its bar; a bar of a logarithmic axis may reach to the left.
    for side, sign in (("left", 1), ("right", -1)):
        side_rows = [row for row in rows if (row["value"] >= bar_start) == (side == "left")]
        if side_rows and not figure.dots:
            text = _chart(side_rows).mark_text(align=side, dx=5 * sign)  # type: ignore[arg-type]
            layers.append(text.encode(y=_lanes_axis(names), x=alt.X("text_at:Q"), text="shown:N"))
    if figure.level is not None:
        level_name, level_value = figure.level
        level_at = level_value * scale
        layers += _level_layers(name_of(level_name), level_at, right=level_at > 0.6 * high)
    return _layered(layers, _LANE_HEIGHT * len(names), kinds)


def _bar_scale_and_axis(low: float, high: float, *, is_log: bool) -> tuple[alt.Scale, alt.Axis]:
    """Return the scale and the axis of bars whose values and intervals reach from ``low`` to ``high``, in drawn units.

    Beside the longest bar there is room for its text. A linear axis begins at 0.
    """
    if is_log:
        ratio = max(high / low, 1.1) ** 0.25
        domain = [low / ratio, high * ratio]
        axis = alt.Axis(values=_log_marks(*domain), format=_NUMBER, gridOpacity=0.6)
    else:
        domain = [0, 1.35 * high if high > 0 else 1.0]
        axis = alt.Axis(tickCount=5, gridOpacity=0.6)
    return alt.Scale(type="log" if is_log else alt.Undefined, nice=False, domain=domain), axis


def _bar_colour(figure: Bars, kinds: Sequence[str], slots: Slots) -> alt.Color:
    """Return the encoding of bars by colour; ``kinds``: the names that the bars' rows have as "kind".

    Bars in the marked class are red, the others blue, with a legend if there are any; without such a class names of one
    family keep their colour over a page, by ``slots``, to which new names are added.
    """
    legend = None
    if figure.marked is not None:
        marked_name, are_marked = figure.marked
        colour_by_kind = {figure.unmarked: BLUE, marked_name: "var(--red)"}
        colours = [colour_by_kind[kind] for kind in kinds]
        if any(are_marked):
            legend = _legend(["", ""])
    else:
        colours = [SERIES[position % len(SERIES)] for position in _colour_positions(kinds, figure.family, slots)]
    return alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=colours), legend=legend)


def _log_marks(low: float, high: float) -> list[float]:
    """Return the marks of a logarithmic axis: powers of ten, and 2 and 5 times these if there are only one or two.

    ``low`` and ``high``: the ends of the axis, above 0.
    """
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    parts = (1, 2, 5) if sum(low <= 10.0**power <= high for power in powers) <= 2 else (1,)
    marks = [part * 10.0**power for power in powers[:: max(1, len(powers) // 6)] for part in parts]
    return [mark for mark in marks if low <= mark <= high]


def _bar_rows(figure: Bars, names: Sequence[str], scale: float) -> list[Row]:
    """Return a row of data for each bar: its value times ``scale``, its kind (for the colour), its text and the text's x.

    A row has "name", "value", "shown" (the text), "kind" and "text_at", with an interval also "low", "high" and
    "interval" (the text). ``names``: of the bars.
    """
    show_value = show_seconds if figure.seconds else _number
    rows: list[Row] = []
    for index, (name, (_, value)) in enumerate(zip(names, figure.rows, strict=True)):
        kind = name if figure.family else "bars"
        if figure.marked is not None:
            marked_name, are_marked = figure.marked
            kind = marked_name if are_marked[index] else figure.unmarked
        row: Row = {"name": name, "value": _short(value * scale), "shown": show_value(value), "kind": kind}
        row["text_at"] = row["value"]
        interval = figure.intervals[index] if figure.intervals else None
        if interval is not None:
            low, high = interval
            row |= {"low": _short(low * scale), "high": _short(high * scale)}
            row["interval"] = f"{show_value(low)} .. {show_value(high)}"
            row["text_at"] = max(row["value"], row["high"])
        if figure.level is not None:
            _, level = figure.level
            if 0.8 * level < row["text_at"] / scale < level:
                row["text_at"] = level * scale  # behind the level's line, which would cross the letters
        rows.append(row)
    return rows


def _number(value: float) -> str:
    """Return a value as text at the end of its bar: from 1,000 on in full, other numbers with four significant digits."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _level_layers(name: str, position: float, *, right: bool) -> list[alt.Chart]:
    """Return the layers of a vertical line at ``position`` with its name above.

    ``right``: whether the name ends at the line, as there is no room on its right; else it begins there.
    """
    chart = _chart([{"name": name, "at": position}]).encode(x=alt.X("at:Q"))
    label = chart.mark_text(align="right" if right else "left", baseline="bottom", dy=-3)
    return [
        chart.mark_rule(strokeDash=[5, 4], strokeWidth=1.4).encode(tooltip=alt.Tooltip("name:N", title="line")),
        label.encode(y=alt.value(0), text="name:N"),
    ]


def _lane_chart(figure: Lanes, slots: Slots) -> Chart:
    """Return the chart of lanes over time: bars coloured by kind, with their texts where the bar is wide enough.

    ``slots`` changes nothing, because kinds have colours of their own.
    """
    names = _distinct_names([name for name, _ in figure.lanes])
    spans = [span for _, lane in figure.lanes for span in lane]
    mark_name, mark_s = figure.mark or ("", 0.0)
    longest = max([*(span.end for span in spans), figure.until, mark_s])
    scale, unit = time_unit(longest)
    rows: list[Row] = [
        {
            "name": name,
            "kind": span.kind,
            "text": name_of(span.text),
            "start": _short(span.start * scale),
            "end": _short(span.end * scale),
            "shown": show_seconds(span.end - span.start),
        }
        for name, (_, lane) in zip(names, figure.lanes, strict=True)
        for span in lane
    ]
    kinds = [kind for kind in KINDS if any(span.kind == kind for span in spans)]
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=kinds, range=[KINDS[kind] for kind in kinds]),
        legend=_legend(kinds, symbolType="square"),
    )
    domain = [0, 1.01 * longest * scale if longest > 0 else 1.0]
    x_scale = alt.Scale(nice=False, domain=domain)
    x = alt.X("start:Q", scale=x_scale, axis=alt.Axis(tickCount=6, gridOpacity=0.6), title=f"{figure.xlabel} ({unit})")
    chart = _chart(rows).encode(y=_lanes_axis(names))
    tips = _tips(
        {"name:N": "lane", "kind:N": "what", "text:N": "which", "shown:N": "takes", "start:Q": "from", "end:Q": "to"}
    )
    bars = chart.mark_bar(stroke=PAPER, strokeWidth=_EDGE_WIDTH).encode(x=x, x2="end:Q", color=colour, tooltip=tips)
    layers = [bars, *_bar_texts(rows, names, tips)]
    if figure.mark is not None:
        layers += _level_layers(name_of(mark_name), mark_s * scale, right=mark_s > 0.5 * longest)
    return _layered(layers, _LANE_HEIGHT * len(names), kinds)


def _bar_texts(rows: Sequence[Row], names: Sequence[str], tips: Sequence[alt.Tooltip]) -> Iterator[alt.Chart]:
    """Yield the layers of the texts in the bars ``rows``; the page hides a text that is wider than its bar.

    ``names``: of the lanes; ``tips``: what is shown of a bar under the pointer.
    """
    texts = [{**row, "middle": (row["start"] + row["end"]) / 2} for row in rows if row["text"]]
    # Texts are white on blue bars and black on all others.
    for kind in dict.fromkeys(row["kind"] for row in texts):
        ink = "var(--on-blue)" if KINDS[kind] == BLUE else "#000000"
        labels = _chart([row for row in texts if row["kind"] == kind]).mark_text(
            fontSize=11, color=ink, opacity=_TEXT_OPACITY
        )
        yield labels.encode(x=alt.X("middle:Q"), y=_lanes_axis(names), text="text:N", tooltip=tips)


_SHAPES = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-right", "triangle-left")


def _explorer(figure: Explorer, slots: Slots) -> Chart:
    """Return the chart of points with a control for each trait that differs, whose frontier follows what is shown.

    A filled point fits, a hollow one does not. The legend filters as well; scales stay as they are for all points.
    ``picked``: the row of the point that a page's script enlarges.
    """
    traits = [*figure.points[0].traits, "memory"]
    rows = _explorer_rows(figure)
    # Vega's expression of what is shown, with a clause for each control; null is its entry "all".
    shown = "true"
    parameters = [alt.param(name="picked", value=-1)]
    for place, trait in enumerate(traits):
        field = f"trait{place}"
        options = sorted({row[field] for row in rows}, key=lambda value: (isinstance(value, str), value))
        if len(options) > 1:
            control = alt.binding_select(
                options=[None, *options], labels=["all", *map(str, options)], name=f"{name_of(trait)} "
            )
            parameters.append(alt.param(name=f"only{place}", value=None, bind=control))
            shown += f" && (only{place} === null || datum.{field} === only{place})"
    fits = f"datum.trait{len(traits) - 1} === 'fits'"
    names = list(dict.fromkeys(row["name"] for row in rows))
    by_name = alt.selection_point(name="legend", fields=["name"], bind="legend")
    colours = [SERIES[place % len(SERIES)] for place in range(len(names))]
    shapes = [_SHAPES[place % len(_SHAPES)] for place in range(len(names))]
    xlabel = f"price of a million {figure.unit} ($)" if figure.priced else "memory of a process (GiB)"
    x = alt.X("x:Q", **_explored_axis(rows, "x", xlabel))
    y = alt.Y("y:Q", **_explored_axis(rows, "y", f"{figure.unit} per second"))
    best_first: list[Any] = [alt.SortField("x"), alt.SortField("y", order="descending")]
    # Of points in order of x the frontier keeps those whose y is above all before: the running maximum rises there.
    frontier = alt.Chart().transform_filter(fits).transform_window(best="max(y)", sort=best_first, frame=[None, 0])
    frontier = frontier.transform_window(before="lag(best)", sort=best_first)
    frontier = frontier.transform_filter("!isValid(datum.before) || datum.y > datum.before").encode(x=x, y=y)
    titles = {
        "what:N": "what",
        "step:N": "step",
        "range:N": "80 % range",
        "y:Q": f"{figure.unit}/s",
        "needs:N": "needs",
    }
    titles |= {"x:Q": f"$/M {figure.unit}"} if figure.priced else {}
    points = alt.Chart().encode(
        x=x,
        y=y,
        color=alt.Color("name:N", scale=alt.Scale(domain=names, range=colours), legend=_legend(names, symbolSize=90)),
        shape=alt.Shape("name:N", scale=alt.Scale(domain=names, range=shapes), legend=_legend(names, symbolSize=90)),
        size=alt.condition("datum.row === picked", alt.value(260), alt.value(80)),
        tooltip=_tips({**titles, f"trait{len(traits) - 1}:N": "memory"}),
    )
    layers = [
        frontier.mark_line(interpolate="step-after", color=FAINT, strokeWidth=1.5),
        frontier.mark_point(size=230, color=INK, strokeWidth=1.2),
        points.transform_filter(fits).mark_point(filled=True).add_params(by_name).properties(name="points"),
    ]
    if not all(point.fits for point in figure.points):  # an empty layer would be read out as a symbol without a name
        layers.append(points.transform_filter(f"!({fits})").mark_point(strokeWidth=2, fill=PAPER))
    chart = alt.layer(*layers, data=alt.Data(values=rows))  # type: ignore[no-untyped-call]
    chart = chart.transform_filter(shown).transform_filter(by_name).add_params(*parameters)
    return chart.properties(height=320, usermeta={"key": 7 * max(map(len, names)) + 48})


def _explorer_rows(figure: Explorer) -> list[Row]:
    """Return a row of data for each point: x is its price or memory (GiB), y its rate, ``trait0``, ... its traits.

    The last of these says whether it fits in memory.
    """
    rows: list[Row] = []
    for index, point in enumerate(figure.points):
        values = [name_of(value) if isinstance(value, str) else value for value in point.traits.values()]
        values.append("fits" if point.fits else "does not fit")
        spent = (point.price or 0.0) if figure.priced else point.memory_bytes / 2**30
        low, high = point.range_s
        row: Row = {
            "row": index,
            "what": name_of(point.name, 80),
            "name": str(values[0]),
            "x": _short(spent),
            "y": _short(point.rate),
            "step": show_seconds(point.step_s),
            "needs": show_bytes(point.memory_bytes),
            "range": "-" if low is None or high is None else show_span(low, high),
        }
        rows.append(row | {f"trait{place}": value for place, value in enumerate(values)})
    return rows


def _explored_axis(rows: Sequence[Row], field: str, title: str) -> dict[str, Any]:
    """Return the arguments of X or Y for a field: scale, axis and title over all rows, logarithmic where they are far apart."""
    low = min(row[field] for row in rows)
    high = max(row[field] for row in rows)
    is_log = low > 0 and high > 5 * low
    # With a fifth of room beyond both ends; a linear axis begins at 0.
    domain = [low / 1.2, high * 1.2] if is_log else [0, 1.1 * high or 1.0]
    marks = _log_marks(*domain) if is_log else alt.Undefined
    scale = alt.Scale(type="log" if is_log else alt.Undefined, domain=domain, nice=False)
    return {
        "scale": scale,
        "axis": alt.Axis(values=marks, tickCount=6, format=_NUMBER, gridOpacity=0.6),
        "title": title,
    }


def _heat(figure: Heat, slots: Slots) -> Chart:
    """Return the chart of values over x and a logarithmic y, with a line through the best y of each x.

    ``slots`` changes nothing, because the figure has no named colours.
    """
    # A cell reaches half a step between two y, as a factor, up and down.
    ratio = float(np.sqrt(figure.y[1] / figure.y[0]))
    rows: list[Row] = [
        # Cells overlap a little, as otherwise the background would show between them.
        {"left": x_at - 0.5, "right": x_at + 0.52, "low": _short(y / ratio), "high": _short(y * ratio**1.2)}
        | {"x": x_at, "y": round(float(y)), "value": _short(value)}
        for x_at, column in zip(figure.x.tolist(), figure.values, strict=True)
        for y, value in zip(figure.y, column, strict=True)
        if np.isfinite(value)
    ]
    x_axis = alt.Axis(grid=False, tickCount=8, **_tick_options(True))
    x_scale = alt.Scale(nice=False, zero=False, clamp=True, domain=[figure.x[0] - 0.5, figure.x[-1] + 0.5])
    x = alt.X("left:Q", scale=x_scale, axis=x_axis, title=figure.xlabel)
    y_range = [float(figure.y[0] / ratio), float(figure.y[-1] * ratio)]
    y_scale = alt.Scale(type="log", nice=False, clamp=True, domain=y_range)
    y = alt.Y("low:Q", scale=y_scale, axis=alt.Axis(format=_NUMBER, tickCount=5, grid=False), title=figure.ylabel)
    legend = alt.Legend(type="gradient", orient="top", title=figure.what, gradientLength=180, titleLimit=300)
    colour = alt.Color("value:Q", scale=alt.Scale(scheme="cividis", domainMin=0), legend=legend)
    tips = _tips({"x:Q": "count", "y:Q": "total batch", "value:Q": "goodput"})
    cells = _chart(rows).mark_rect(strokeWidth=0)
    best_rows = [
        {"x": x_at, "y": float(y)} for x_at, y in zip(figure.x.tolist(), figure.best, strict=True) if np.isfinite(y)
    ]
    best_line = _chart(best_rows).encode(x=alt.X("x:Q"), y=alt.Y("y:Q"))
    best_tips = _tips({"x:Q": "count", "y:Q": "best batch"})
    layers: list[alt.Chart] = [
        cells.encode(x=x, x2="right:Q", y=y, y2="high:Q", color=colour, tooltip=tips),
        best_line.mark_line(color="#ffffff", strokeWidth=4),
        best_line.mark_line(color="#000000", strokeWidth=1.5),
        best_line.mark_point(color="#000000", filled=True, size=30).encode(tooltip=best_tips),
        *_veil_beyond(figure.known, float(figure.x[-1])),
    ]
    for name, x_at in figure.marks:
        mark = _chart([{"name": name, "at": x_at}]).mark_rule(color="var(--red)", strokeDash=[5, 4], strokeWidth=2)
        layers.append(mark.encode(x=alt.X("at:Q"), tooltip=alt.Tooltip("name:N", title="line")))
    return _layered(layers, 260)
