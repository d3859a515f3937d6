"""Draws figures: Vega-Lite specifications for a page, SVG and PNG files; Altair makes them, vl-convert brings the rest.

Colours stand in specifications as the page's CSS variables, so light, dark and print need no second drawing; files get
the light ones. Names come from files that others wrote: they are data here, never part of an expression or of a
tooltip's title, which Vega-Lite compiles into one.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import vl_convert

from ddltool.analyzers.answers.reporting.figures import LINES_DRAWN, Bars, Figure, Heat, Lanes, Line, Lines
from ddltool.errors import shortened, visible
from ddltool.units import show_seconds

Row = dict[str, Any]
Spec = dict[str, Any]
Chart = Any  # what altair.layer returns, which its types take for a facet as well
Slots = dict[str, dict[str, int]]
"""By family of names, the place of each in the order of colours."""

# Okabe and Ito's colours, which the colour-blind can tell apart, with enough contrast on light paper; a page's dark ones
# are in its style sheet.
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
INK, PAPER, FAINT, BLUE = "var(--ink)", "var(--paper)", "var(--faint)", "var(--blue)"
SERIES = tuple(f"var(--{name})" for name in ("blue", "red", "green", "pink", "ink"))
AREAS = tuple(f"var(--{name})" for name in ("blue", "red", "green", "pink", "orange", "sky", "yellow", "grey"))
KINDS: Mapping[str, str] = {
    **{"recv": BLUE, "compute": "var(--orange)", "send": "var(--green)"},
    **{"communication": BLUE, "sync": BLUE, "waiting": "var(--grey)", "wait": "var(--grey)", "other": "var(--pink)"},
}
_DASHES = ([1, 0], [7, 3], [2, 2], [8, 3, 2, 3], [12, 3], [1, 3])
_WIDTH, _SCALE, _LANE = 640, 2, 24
_NUMBER = ",.4~r"
# What stands on a bar is seen where it has room, and thin bars have no edge.
_PIXELS = "abs(scale('x', datum.end) - scale('x', datum.start))"
_SEEN = alt.ExprRef(f"{_PIXELS} > 7 * length(datum.text) + 3 ? 1 : 0")
_EDGE = alt.ExprRef(f"{_PIXELS} > 6 ? 0.6 : 0")
_MARKED_TIMES = (
    *(1e-3, 0.01, 0.1, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18_000, 36_000),
    *(86_400, 172_800, 432_000, 864_000, 8.64e6, 8.64e7),
)


def _in_units(units: Mapping[str, float], smallest: str) -> str:
    """Return the expression of an axis label in the largest unit that it reaches."""
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
    """Return the factor and the name of a unit that keeps axis labels short."""
    units = ((1.0, "s", 1.0), (1e3, "ms", 1e-3), (1e6, "us", 0.0))
    return next((scale, unit) for scale, unit, least in units if longest_s >= least) if longest_s > 0 else (1.0, "s")


def spec(figure: Figure, slots: Slots | None = None) -> Spec:
    """Return the Vega-Lite specification of one figure, as wide as what holds it, in the page's colours.

    ``slots`` collects which name has which colour, for the figures of one page.
    """
    made = _specified(figure, {} if slots is None else slots)
    names: dict[str, str] = {}
    for part in (made, *made["layer"]):  # rows that several layers draw stand there once
        if "data" not in part:
            continue
        rows = json.dumps(part["data"]["values"])
        part["data"] = {"name": names.setdefault(rows, f"rows{len(names)}")}
    autosize = {"type": "fit-x", "contains": "padding"}
    datasets = {name: json.loads(rows) for rows, name in names.items()}
    return {**made, "width": "container", "autosize": autosize, "datasets": datasets}


def drawn(figures: Sequence[Figure], file_format: str, width: int = _WIDTH) -> bytes:
    """Return figures, one under the other and ``width`` pixels wide inside, as the bytes of an SVG or PNG file."""
    text = json.dumps(_together(figures, width))
    if file_format == "svg":
        return vl_convert.vegalite_to_svg(text, allowed_base_urls=[]).encode()
    return vl_convert.vegalite_to_png(text, scale=_SCALE, allowed_base_urls=[])


def altair_chart(figures: Sequence[Figure]) -> alt.VConcatChart:
    """Return figures, one under the other, as an Altair chart, which a notebook shows and a script may change or save."""
    return alt.VConcatChart.from_dict(_together(figures))


def _together(figures: Sequence[Figure], width: int = _WIDTH) -> Spec:
    """Return the specification of figures under each other, in the colours of light paper."""
    slots: Slots = {}
    views: list[Spec] = []
    columns = 8
    for figure in figures:
        view = {**_specified(figure, slots), "width": width}
        schema = view.pop("$schema")
        columns = max(1, min(columns, width // view.pop("usermeta")["key"]))  # a page's script asks how wide it is
        views.append(json.loads(json.dumps(view).replace("scale('x'", f"scale('concat_{len(views)}_x'")))
    together = {"$schema": schema, "vconcat": views, "config": {**CONFIG, "background": PAPER}}
    together["config"]["legend"] = {**CONFIG["legend"], "columns": columns}
    together["resolve"] = {"scale": {"color": "independent", "strokeDash": "independent"}}
    made: Spec = json.loads(re.sub(r"var\(--([a-z-]+)\)", lambda found: COLOURS[found[1]], json.dumps(together)))
    return made


def _specified(figure: Figure, slots: Slots) -> Spec:
    drawing: dict[type, Callable[..., Chart]] = {Lines: _lines, Bars: _bars, Lanes: _lane_chart, Heat: _heat}
    chart = drawing[type(figure)](figure, slots).properties(description=visible(figure.title))
    if figure.headed:
        chart = chart.properties(title=name_of(figure.title, 80))
    made: Spec = chart.to_dict(validate=False)
    del made["config"]  # Altair's own, for which the page's stands in
    return made


@functools.cache
def script() -> str:
    """Return the one script of a page: Vega, Vega-Lite and what draws the specifications in the block ``charts``."""
    made: str = vl_convert.javascript_bundle(_SNIPPET)
    return made.replace("</script", "<\\/script").replace("<!--", "<\\!--")


# Legends get as many columns as have room, and long names of lanes less room on a phone.
_SNIPPET = """
const {config, charts} = JSON.parse(document.getElementById("charts").textContent);
Promise.all(charts.map((chart, place) => {
  const host = document.getElementById("chart-" + place), room = host.clientWidth;
  const own = structuredClone(config);
  own.legend.columns = Math.max(1, Math.floor(room / chart.usermeta.key));
  own.legend.labelLimit = room - 60;
  own.title.limit = room;
  own.axis.labelLimit = room < 500 ? 110 : 240;
  return vegaEmbed(host, chart, {config: own, actions: false, renderer: "svg", ast: true, defaultStyle: false,
    tooltip: {disableDefaultStyle: true}});
})).finally(() => { document.documentElement.dataset.drawn = "yes"; });
"""


def name_of(text: str, longest: int = 34) -> str:
    """Return a name as a picture can hold it: short and printable."""
    return visible(shortened(text, longest))


def _names(texts: Iterable[str]) -> list[str]:
    """Return names as a picture can hold them, no two alike."""
    made: list[str] = []
    for text in map(name_of, texts):
        again = sum(one == text or one.startswith(f"{text} (") for one in made)
        made.append(f"{text} ({again + 1})" if text in made else text)
    return made


def _chart(rows: Sequence[Row]) -> alt.Chart:
    return alt.Chart(alt.Data(values=list(rows)))  # type: ignore[no-untyped-call]


def _tips(titles: Mapping[str, str]) -> list[alt.Tooltip]:
    """Return what hovering shows: fields (``x:Q``) with their titles, numbers in four digits."""
    return [
        alt.Tooltip(field, title=title, format=_NUMBER if field.endswith(":Q") else alt.Undefined)
        for field, title in titles.items()
    ]


def _titled(label: str, unit: str) -> str:
    return f"{label} ({unit})" if unit else label


def _places(names: Sequence[str], family: str, slots: Slots) -> list[int]:
    """Return the place of each name in the order of colours: its own on a page, where it is of a family."""
    if not family:
        return list(range(len(names)))
    known = slots.setdefault(family, {})
    return [known.setdefault(name, len(known)) for name in names]


def _legend(names: Sequence[str], **options: Any) -> alt.Legend | None:
    return alt.Legend(orient="top", title=None, **options) if len(names) > 1 else None


def _layered(layers: Sequence[alt.Chart], height: int, names: Sequence[str] = ()) -> Chart:
    """Return layers as one chart, with the room in pixels that a name in its legend takes."""
    key = 7 * max(map(len, names), default=0) + 48
    return alt.layer(*layers).properties(height=height, usermeta={"key": key})


def _rule(mark: str, values: Sequence[tuple[str, float]], colour: alt.Color, dash: alt.StrokeDash) -> list[alt.Chart]:
    if not values:
        return []
    rows = [{"name": name, mark: value} for name, value in values]
    where = {mark: alt.X("x:Q") if mark == "x" else alt.Y("y:Q")}
    return [_chart(rows).mark_rule(strokeWidth=1.5).encode(**where, color=colour, strokeDash=dash)]


def _beyond(known: float | None, last: float) -> list[alt.Chart]:
    """Return a veil over what no data support."""
    if known is None or known >= last:
        return []
    rows = [{"left": known + 0.5, "right": last + 0.5, "why": "not supported by data"}]
    base = _chart(rows)
    x = alt.X("left:Q")
    words = base.mark_text(
        align="right", baseline="bottom", dy=-3, color=FAINT
    )  # above the plot, whose marks would cross it
    veil = base.mark_rect(color=PAPER, opacity=0.55)
    return [
        veil.encode(x=x, x2="right:Q", tooltip=alt.Tooltip("why:N", title="beyond")),
        base.mark_rule(color=FAINT, strokeDash=[3, 3]).encode(x=x),
        words.encode(x=alt.X("right:Q"), y=alt.value(0), text="why:N"),
    ]


def _whole(asked: bool) -> dict[str, Any]:
    """Return what an axis of whole numbers is marked by."""
    return {"tickMinStep": 1, "format": ",d"} if asked else {}


def _x_of(figure: Lines, values: np.ndarray[Any, Any]) -> tuple[alt.Scale, alt.Axis]:
    """Return the scale and the axis of x; ``values`` (n,) are all that are drawn."""
    low, high = (float(values.min()), float(values.max())) if values.size else (1.0, 1.0)
    if figure.x_axis == "bytes":
        powers = range(int(np.floor(np.log2(max(low, 1)))), int(np.ceil(np.log2(max(high, 1)))) + 1)
        marks = [float(2**power) for power in powers[:: max(1, -(-len(powers) // 5))]]
        return alt.Scale(type="log", base=2, nice=False), alt.Axis(values=marks, labelExpr=_BYTES, grid=False)
    if figure.x_axis == "durations":
        times = [at for at in _MARKED_TIMES if low <= at <= high] or [low]
        return alt.Scale(type="log", nice=False), alt.Axis(
            values=times[:: -(-len(times) // 8)], labelExpr=_TIMES, grid=False
        )
    if figure.x_axis == "log" and low > 0:
        return alt.Scale(type="log", nice=False), alt.Axis(format=_NUMBER, tickCount=6, grid=False)
    axis = alt.Axis(grid=False, tickCount=8, **_whole("x" in figure.whole))
    return alt.Scale(zero=False, nice=False, padding=6 if figure.draw == "points" else 0), axis


def _lines(figure: Lines, slots: Slots) -> Chart:
    shown, areas = figure.lines[:LINES_DRAWN], figure.draw == "areas"
    labels = _names([line.label for line in shown])
    extra = [] if areas else _names([name for name, _ in (*figure.levels, *figure.marks)])
    names, places = [*labels, *extra], _places(labels, figure.family, slots)
    tops = [top for line in shown for top in (line.y if line.high is None else line.high, *(line.dots or ())[1:])]
    highest = max([float(top.max()) for top in tops if top.size] + [value for _, value in figure.levels], default=0.0)
    scale, unit = time_unit(highest) if figure.seconds else (1.0, "")
    ylabel, colours = _titled(figure.ylabel, unit), AREAS if areas else SERIES
    # a line that stands for a fixed value is of the text's colour, as the fifth series is, with a dash of its own
    paints = [colours[place % len(colours)] for place in places] + [INK] * len(extra)
    dashes = [_DASHES[place % len(_DASHES)] for place in places] + [[4, 4], [2, 3], [8, 3]][: len(extra)]
    legend = _legend(names, symbolType="square" if areas else "stroke", symbolSize=260)
    colour = alt.Color("name:N", scale=alt.Scale(domain=names, range=paints), legend=legend)
    dash = alt.StrokeDash("name:N", scale=alt.Scale(domain=names, range=dashes), legend=legend)
    everything = np.concatenate([*(line.x for line in shown), *(line.dots[0] for line in shown if line.dots)])
    x_scale, x_axis = _x_of(figure, everything)
    x = alt.X("x:Q", scale=x_scale, axis=x_axis, title=figure.xlabel)
    y_scale = alt.Scale(type="log", nice=False) if figure.log_y else alt.Scale(zero=True)
    y_axis = alt.Axis(tickCount=6, gridOpacity=0.6, **_whole("y" in figure.whole))
    y = alt.Y("y:Q", scale=y_scale, axis=y_axis, title=ylabel)
    tips = _tips({"name:N": "line", "x:Q": "x", "y:Q": "y"})
    rows = [row for line, name in zip(shown, labels, strict=True) for row in _line_rows(line, name, scale)]
    if areas:
        area = _chart(rows).mark_area(interpolate="step-after", stroke=PAPER, strokeWidth=0.3)
        y["stack"] = "zero"
        return _layered([area.encode(x=x, y=y, color=colour, tooltip=tips)], 260, labels)
    interpolate: Any = "step-after" if figure.draw == "steps" else "linear"
    base = _chart(rows).encode(x=x, y=y, color=colour)
    layers: list[alt.Chart] = []
    if any("low" in row for row in rows):
        banded = _chart([row for row in rows if "low" in row]).mark_area(opacity=0.2, interpolate=interpolate)
        layers.append(banded.encode(x=x, y=alt.Y("low:Q", title=ylabel, scale=y_scale), y2="high:Q", color=colour))
        tips = [*tips, *_tips({"low:Q": "low", "high:Q": "high"})]
    layers.append(base.mark_line(interpolate=interpolate, strokeWidth=2).encode(strokeDash=dash))
    single = {line.label for line in shown if line.x.size == 1}
    seen = 1.0 if figure.draw == "points" or single else 0.0
    layers.append(base.mark_point(filled=True, size=45 if seen else 120, opacity=seen).encode(tooltip=tips))
    written = [
        {"x": float(at), "y": float(value) * scale, "text": name_of(text)}
        for line in shown
        for at, value, text in zip(line.x, line.y, line.texts, strict=False)
    ]
    if written:
        layers.append(_chart(written).mark_text(align="left", dx=7, dy=-7, color=INK).encode(x=x, y=y, text="text:N"))
    dots = [
        {"name": name, "x": float(at), "y": float(value) * scale}
        for line, name in zip(shown, labels, strict=True)
        for at, value in zip(*(line.dots or ((), ())), strict=True)
    ]
    if dots:
        size, opacity = (36, 0.85) if len(dots) < 1000 else (10, 0.4)
        cloud = _chart(dots).mark_point(filled=True, size=size, opacity=opacity)
        layers.append(cloud.encode(x=x, y=y, color=colour, tooltip=tips[:3]))
    fixed = [value * scale for _, value in figure.levels] + [value for _, value in figure.marks]
    values = list(zip(extra, fixed, strict=True))
    layers += _rule("y", values[: len(figure.levels)], colour, dash)
    layers += _rule("x", values[len(figure.levels) :], colour, dash)
    return _layered(layers, 230, names)


def _line_rows(line: Line, name: str, scale: float) -> list[Row]:
    rows: list[Row] = [
        {"name": name, "x": _short(x), "y": _short(y * scale)} for x, y in zip(line.x, line.y, strict=True)
    ]
    if line.low is not None and line.high is not None:
        for row, low, high in zip(rows, line.low, line.high, strict=True):
            row |= {"low": _short(low * scale), "high": _short(high * scale)}
    return rows


def _short(value: float) -> float:
    """Return a number with as many digits as a screen can show."""
    return float(f"{value:.6g}")


def _lanes_axis(names: Sequence[str]) -> alt.Y:
    scale = alt.Scale(domain=list(names), paddingInner=0.3, paddingOuter=0.2)
    axis = alt.Axis(ticks=False, domain=False, labelPadding=6)
    return alt.Y("name:N", title=None, sort=None, scale=scale, axis=axis)


def _bars(figure: Bars, slots: Slots) -> Chart:
    names = _names([name for name, _ in figure.rows])
    values = [value for _, value in figure.rows]
    ends = [end for pair in figure.intervals if pair is not None for end in pair]
    level = figure.level[1] if figure.level else None
    extremes = [*values, *ends, *([] if level is None else [level])]
    scale, unit = time_unit(max(extremes)) if figure.seconds else (1.0, "")
    start = (level or 1.0) * scale if figure.log else 0.0
    low, high = min(extremes) * scale, max(extremes) * scale
    if figure.log:
        ratio = max(high / low, 1.1) ** 0.25
        domain = [low / ratio, high * ratio]
        axis = alt.Axis(values=_log_marks(*domain), format=_NUMBER, gridOpacity=0.6)
    else:
        domain, axis = [0, 1.35 * high if high > 0 else 1.0], alt.Axis(tickCount=5, gridOpacity=0.6)
    x_scale = alt.Scale(type="log" if figure.log else alt.Undefined, nice=False, domain=domain)
    x = alt.X("value:Q", scale=x_scale, axis=axis, title=_titled(figure.xlabel, unit))
    rows = _bar_rows(figure, names, scale)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    if figure.marked is not None:
        paint = {figure.unmarked: BLUE, figure.marked[0]: "var(--red)"}
        colours = [paint[kind] for kind in kinds]
    else:
        colours = [SERIES[place % len(SERIES)] for place in _places(kinds, figure.family, slots)]
    legend = _legend(["", ""]) if figure.marked is not None and any(figure.marked[1]) else None
    colour = alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=colours), legend=legend)
    tips = _tips({"name:N": "name", "shown:N": "value"} | ({"interval:N": "interval"} if ends else {}))
    base = _chart(rows).encode(y=_lanes_axis(names), x=x)
    if figure.dots:
        layers = [base.mark_point(filled=True, size=70).encode(color=colour, tooltip=tips)]
    else:
        layers = [base.mark_bar().encode(x2=alt.datum(start), color=colour, tooltip=tips)]
    if ends:
        spread = _chart([row for row in rows if "low" in row]).encode(y=_lanes_axis(names), tooltip=tips)
        whisker = spread.mark_rule(strokeWidth=1.5).encode(x=alt.X("low:Q", scale=x_scale), x2="high:Q")
        cap = spread.mark_tick(thickness=1.5, size=9, color=INK)
        layers += [whisker, *(cap.encode(x=alt.X(f"{end}:Q")) for end in ("low", "high"))]
    for side, sign in (("left", 1), ("right", -1)):
        chosen = [row for row in rows if (row["value"] >= start) == (side == "left")]
        if chosen and not figure.dots:
            text = _chart(chosen).mark_text(align=side, dx=5 * sign)  # type: ignore[arg-type]
            layers.append(text.encode(y=_lanes_axis(names), x=alt.X("text_at:Q"), text="shown:N"))
    if figure.level is not None:
        layers += _level(name_of(figure.level[0]), figure.level[1] * scale, right=figure.level[1] * scale > 0.6 * high)
    return _layered(layers, _LANE * len(names), kinds)


def _log_marks(low: float, high: float) -> list[float]:
    """Return where a logarithmic axis is marked: powers of ten, and between them where these are few."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    parts = (1, 2, 5) if len(powers) <= 3 else (1,)
    marks = [part * 10.0**power for power in powers[:: max(1, len(powers) // 6)] for part in parts]
    return [mark for mark in marks if low <= mark <= high]


def _bar_rows(figure: Bars, names: Sequence[str], scale: float) -> list[Row]:
    marked = figure.marked[1] if figure.marked is not None else ()
    rows: list[Row] = []
    for place, (name, (_, value)) in enumerate(zip(names, figure.rows, strict=True)):
        said = show_seconds if figure.seconds else _number
        kind = name if figure.family else "bars"
        if figure.marked is not None:
            kind = figure.marked[0] if marked[place] else figure.unmarked
        row: Row = {"name": name, "value": _short(value * scale), "shown": said(value), "kind": kind}
        row["text_at"] = row["value"]
        pair = figure.intervals[place] if figure.intervals else None
        if pair is not None:
            row |= {"low": _short(pair[0] * scale), "high": _short(pair[1] * scale)}
            row |= {"interval": f"{said(pair[0])} .. {said(pair[1])}", "text_at": max(row["value"], row["high"])}
        if figure.level is not None and 0.8 * figure.level[1] < row["text_at"] / scale < figure.level[1]:
            row["text_at"] = figure.level[1] * scale  # else the line would go through the letters
        rows.append(row)
    return rows


def _number(value: float) -> str:
    """Return a value for the end of its bar: thousands in full, else four digits."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _level(name: str, at: float, *, right: bool) -> list[alt.Chart]:
    """Return a named vertical line, its name above it."""
    base = _chart([{"name": name, "at": at}]).encode(x=alt.X("at:Q"))
    words = base.mark_text(align="right" if right else "left", baseline="bottom", dy=-3)
    return [
        base.mark_rule(strokeDash=[5, 4], strokeWidth=1.4).encode(tooltip=alt.Tooltip("name:N", title="line")),
        words.encode(y=alt.value(0), text="name:N"),
    ]


def _lane_chart(figure: Lanes, slots: Slots) -> Chart:
    names = _names([name for name, _ in figure.lanes])
    spans = [span for _, lane in figure.lanes for span in lane]
    longest = max(
        [span.end for span in spans] + [figure.until] + ([figure.mark[1]] if figure.mark else []), default=0.0
    )
    scale, unit = time_unit(longest)
    rows: list[Row] = [
        {
            **{"name": name, "kind": span.kind, "text": name_of(span.text)},
            **{"start": _short(span.start * scale), "end": _short(span.end * scale)},
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
    scaled = alt.Scale(nice=False, domain=domain)
    x = alt.X("start:Q", scale=scaled, axis=alt.Axis(tickCount=6, gridOpacity=0.6), title=f"{figure.xlabel} ({unit})")
    base = _chart(rows).encode(y=_lanes_axis(names))
    tips = _tips(
        {"name:N": "lane", "kind:N": "what", "text:N": "which", "shown:N": "takes", "start:Q": "from", "end:Q": "to"}
    )
    bars = base.mark_bar(stroke=PAPER, strokeWidth=_EDGE).encode(x=x, x2="end:Q", color=colour, tooltip=tips)
    layers: list[alt.Chart] = [bars]
    texts = [{**row, "middle": (row["start"] + row["end"]) / 2} for row in rows if row["text"]]
    for kind in dict.fromkeys(row["kind"] for row in texts):
        ink = "var(--on-blue)" if KINDS[kind] == BLUE else "#000000"
        words = _chart([row for row in texts if row["kind"] == kind]).mark_text(fontSize=11, color=ink, opacity=_SEEN)
        layers.append(words.encode(x=alt.X("middle:Q"), y=_lanes_axis(names), text="text:N", tooltip=tips))
    if figure.mark is not None:
        layers += _level(name_of(figure.mark[0]), figure.mark[1] * scale, right=figure.mark[1] > 0.5 * longest)
    return _layered(layers, _LANE * len(names), kinds)


def _heat(figure: Heat, slots: Slots) -> Chart:
    ratio = float(np.sqrt(figure.y[1] / figure.y[0]))
    rows: list[Row] = [
        # a little over its neighbours, or the paper would be seen between them
        {"left": at - 0.5, "right": at + 0.52, "low": _short(y / ratio), "high": _short(y * ratio**1.2)}
        | {"x": at, "y": round(float(y)), "value": _short(value)}
        for at, column in zip(figure.x.tolist(), figure.values, strict=True)
        for y, value in zip(figure.y, column, strict=True)
        if np.isfinite(value)
    ]
    x_axis = alt.Axis(grid=False, tickCount=8, **_whole(True))
    x_scale = alt.Scale(nice=False, zero=False, clamp=True, domain=[figure.x[0] - 0.5, figure.x[-1] + 0.5])
    x = alt.X("left:Q", scale=x_scale, axis=x_axis, title=figure.xlabel)
    ends = [float(figure.y[0] / ratio), float(figure.y[-1] * ratio)]
    y_scale = alt.Scale(type="log", nice=False, clamp=True, domain=ends)
    y = alt.Y("low:Q", scale=y_scale, axis=alt.Axis(format=_NUMBER, tickCount=5, grid=False), title=figure.ylabel)
    legend = alt.Legend(type="gradient", orient="top", title=figure.what, gradientLength=180, titleLimit=300)
    colour = alt.Color("value:Q", scale=alt.Scale(scheme="cividis", domainMin=0), legend=legend)
    tips = _tips({"x:Q": "count", "y:Q": "total batch", "value:Q": "goodput"})
    map_ = _chart(rows).mark_rect(strokeWidth=0)
    best = [{"x": at, "y": float(y)} for at, y in zip(figure.x.tolist(), figure.best, strict=True) if np.isfinite(y)]
    line = _chart(best).encode(x=alt.X("x:Q"), y=alt.Y("y:Q"))
    tip = _tips({"x:Q": "count", "y:Q": "best batch"})
    layers: list[alt.Chart] = [
        map_.encode(x=x, x2="right:Q", y=y, y2="high:Q", color=colour, tooltip=tips),
        line.mark_line(color="#ffffff", strokeWidth=4),
        line.mark_line(color="#000000", strokeWidth=1.5),
        line.mark_point(color="#000000", filled=True, size=30).encode(tooltip=tip),
        *_beyond(figure.known, float(figure.x[-1])),
    ]
    for name, at in figure.marks:
        mark = _chart([{"name": name, "at": at}]).mark_rule(color="var(--red)", strokeDash=[5, 4], strokeWidth=2)
        layers.append(mark.encode(x=alt.X("at:Q"), tooltip=alt.Tooltip("name:N", title="line")))
    return _layered(layers, 260)
