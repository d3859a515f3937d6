"""Pictures and the page: well-formed, self-contained, escaped, repeatable; and rendered by a real browser."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.reporting.charts import (
    _LINE_COLOURS,
    Lane,
    Line,
    Panel,
    Span,
    draw_bars,
    draw_intervals,
    draw_lines,
    draw_phases,
    draw_spans,
    draw_timeline,
    merge_bars,
)
from ddltool.analyzers.reporting.page import PICTURE_COLOURS, TEMPLATE, render
from ddltool.analyzers.reporting.section import Picture, Section, Table, counted, few, filled
from ddltool.analyzers.reporting.style import INK, KIND_COLOURS, PHASE_COLOURS

VOID = {"meta", "br", "hr", "img", "link", "input"}


def panels(count: int) -> list[Panel]:
    edges = np.sort(np.random.default_rng(0).uniform(0, 1, 2 * count))
    kinds = [("recv", "compute", "send")[i % 3] for i in range(count)]
    lane = Lane(name="channel:0", start_s=edges[0::2], end_s=edges[1::2], kinds=kinds)
    return [
        Panel(title="random order", lanes=[lane, lane], makespan_s=1.0),
        Panel(title="TAC", lanes=[lane], makespan_s=0.9),
    ]


def every_picture() -> dict[str, Callable[[], str]]:
    x = np.array([4.0, 8.0, 16.0])
    spans = [("V100", [Span(0.0, 1.0, "compute", "EST 1"), Span(1.0, 1.2, "waiting")])]
    return {
        "timeline": draw_timeline(panels(30)),
        "phases": draw_phases([("rank 0", {"compute": 0.2, "wait": 0.1, "sync": 0.05})]),
        "lines": draw_lines([Line(label="1 replica", x=x, y=x / 100)], xlabel="batch", ylabel="step", title="Steps"),
        "bars": draw_bars([("fifo", 2.0)], xlabel="time", title="Times", seconds=True),
        "spans": draw_spans(spans, title="A step", colours={"compute": "#C98600", "waiting": "#808080"}),
        "intervals": draw_intervals([("gamma", 1.0, 0.5, 2.0)], xlabel="x", title="Intervals"),
    }


@pytest.mark.parametrize("name", list(every_picture()))
def test_pictures(name: str) -> None:
    drawn = every_picture()[name]()
    for root in both(drawn):
        assert root.attrib["width"] == "100%"
        assert "viewBox" in root.attrib
    assert drawn == every_picture()[name]()
    assert "currentColor" in drawn
    assert "#010203" not in drawn
    assert "T00:00" not in drawn  # no time stamp


def test_pictures_say_what_they_show() -> None:
    assert "random order: 1 s" in every_picture()["timeline"]()


def test_a_long_timeline_stays_small() -> None:
    assert len(draw_timeline(panels(5000))()) < 2_000_000


def test_nothing_is_drawn_and_no_plotting_library_loaded_before_somebody_looks() -> None:
    code = (
        "import sys\nfrom ddltool.analyzers.reporting import result_sections, plan_section\n"
        "from ddltool.analyzers.reporting.charts import draw_bars\n"
        "draw_bars([('a', 1.0)], xlabel='x', title='t')\nassert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


bars = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.2)), max_size=40)


@given(bars, st.floats(0, 0.1))
@settings(deadline=None)
def test_merged_bars_cover_what_was_there_and_little_more(items: list[tuple[float, float]], resolution: float) -> None:
    start = np.array([low for low, _ in items])
    end = start + np.array([width for _, width in items])
    merged = merge_bars(start, end, resolution)
    for low, high in zip(start, end, strict=True):
        assert high <= low or any(a <= low and high <= b for a, b in merged)
    for (_, one), (two, _) in itertools.pairwise(merged):
        assert two - one >= resolution
    exact = sum(b - a for a, b in merge_bars(start, end, 0.0))
    assert sum(b - a for a, b in merged) <= exact + resolution * max(0, len(items) - 1) + 1e-9


def page(title: str = "A report") -> str:
    table = Table(caption="Figures", header=("a", "b"), rows=[("<b>1</b>", "2")], label="measured")
    blocks = [
        Picture(draw=draw, caption=name, label="simulated", table=table, unfolded=False)
        for name, draw in every_picture().items()
    ]
    section = Section(title=title, lead=[title], blocks=[*blocks, table])
    return render(title, [section], summary=["All of it."], generated_by="ddltool")


class Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_balanced_self_contained_and_repeatable() -> None:
    html = page()
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    assert html == page()
    assert "<script" not in html
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert not re.search(r'(src|href)="(?!#)', without_namespaces)
    assert not re.search(r"url\((?!#)", without_namespaces)
    assert "http" not in without_namespaces
    ids = re.findall(r' id="([^"]*)"', html)
    assert len({name for name in ids if not re.fullmatch(r"[mhp][0-9a-f]+", name)}) > 0


def test_labels_and_numbers_are_there() -> None:
    html = page()
    assert html.count('<span class="badge">simulated</span>') == len(every_picture())
    assert html.count("<details>") == len(every_picture())
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_text_is_escaped() -> None:
    html = page('<script>alert("x")</script>')
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "&lt;b&gt;1&lt;/b&gt;" in html


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(), encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-sync",
    ]
    shot = tmp_path / "page.png"
    subprocess.run(
        ["chromium", *flags, f"--user-data-dir={tmp_path / 'user'}", "--window-size=900,2600", f"--screenshot={shot}",
         (tmp_path / "page.html").as_uri()],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    from matplotlib.image import imread

    pixels = imread(shot)[..., :3]
    ink = (np.abs(pixels - pixels[0, 0]).sum(axis=2) > 0.1).mean()
    assert 0.02 < ink < 0.9
    for colour in ((0, 114, 178), (201, 134, 0), (0, 158, 115)):  # recv, compute and send are all visible
        assert (np.abs(pixels - np.array(colour) / 255).max(axis=2) < 0.02).sum() > 200


# Colours, by the formulas of WCAG 2.2 and of Machado, Oliveira and Fernandes (2009, full severity)

DEFICIENCIES = {
    "none": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, two: str) -> float:
    light = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, two))
    return (light[1] + 0.05) / (light[0] + 0.05)


def lab(colour: np.ndarray) -> np.ndarray:
    part = TO_XYZ @ np.clip(colour, 0, 1) / [0.9505, 1, 1.089]
    part = np.where(part > 0.008856, np.cbrt(part), 7.787 * part + 16 / 116)
    return np.array([116 * part[1] - 16, 500 * (part[0] - part[1]), 200 * (part[1] - part[2])])


def schemes() -> dict[str, dict[str, str]]:
    """Return the page's colours by name, light and dark, from its style sheet."""
    light, dark = (
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", part)) for part in TEMPLATE.read_text().split("@media")[:2]
    )
    return {"light": light, "dark": {**light, **dark}}


def shown(colour: str, scheme: dict[str, str]) -> str:
    """Return a picture's colour as the page shows it."""
    if colour == INK:
        return scheme["ink"]
    variables = {own: variable.removeprefix("var(--").removesuffix(")") for own, variable in PICTURE_COLOURS}
    name = variables.get(colour.lower())
    return scheme[name] if name else colour


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_and_pictures_stand_out_from_the_paper(mode: str) -> None:
    scheme = schemes()[mode]
    assert contrast(scheme["ink"], scheme["paper"]) >= 7
    assert contrast(scheme["faint"], scheme["paper"]) >= 4.5
    assert contrast(scheme["on-blue"], scheme["blue"]) >= 4.5
    assert contrast("#000000", KIND_COLOURS["compute"]) >= 4.5  # what stands on bars of computation
    for colour in (*_LINE_COLOURS, *KIND_COLOURS.values(), *PHASE_COLOURS.values()):
        assert contrast(shown(colour, scheme), scheme["paper"]) >= 3, colour


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_of_one_picture_can_be_told_apart(mode: str, deficiency: str) -> None:
    seen = np.array(DEFICIENCIES[deficiency])
    for colours in (_LINE_COLOURS, tuple(KIND_COLOURS.values()), tuple(PHASE_COLOURS.values())):
        for one, two in itertools.combinations([shown(colour, schemes()[mode]) for colour in colours], 2):
            assert np.linalg.norm(lab(seen @ linear(one)) - lab(seen @ linear(two))) > 10, (one, two)


# Charts that are drawn for two widths


def both(html: str) -> list[ElementTree.Element]:
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)]
    assert re.findall(r'<div class="(\w+)"><svg', html) == ["wide", "narrow"]
    return found


def words(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter() if element.tag.endswith("}text")]


def test_a_chart_comes_for_a_screen_and_for_a_phone() -> None:
    wide, narrow = both(draw_bars([("one", 0.0123), ("two", 0.5)], xlabel="time", title="Times", seconds=True)())
    assert [float(svg.attrib["viewBox"].split()[2]) for svg in (wide, narrow)] == [8 * 72, pytest.approx(4.2 * 72)]
    for svg in (wide, narrow):
        assert {"12.3 ms", "500 ms", "time (ms)", "one", "two"} <= set(words(svg))
    ids = [set(re.findall(r'id="(\w+)"', ElementTree.tostring(svg, encoding="unicode"))) for svg in (wide, narrow)]
    assert not ids[0] & ids[1]  # what is hidden lends nothing


def test_an_axis_that_counts_has_whole_numbers_only() -> None:
    line = Line(label="a", x=np.array([0.0, 1.0, 2.0]), y=np.array([1.0, 1.0, 1.0]))
    for svg in both(draw_lines([line], xlabel="step", ylabel="jobs", title="Jobs", whole="xy")()):
        ticks = [text for text in words(svg) if re.fullmatch(r"[\d.]+", text)]
        assert ticks
        assert all("." not in text for text in ticks)


@pytest.mark.parametrize("draw", ["line", "steps", "points"])
def test_a_single_point_is_seen(draw: str) -> None:
    line = Line(label="a", x=np.array([3.0]), y=np.array([1.0]))
    drawn = draw_lines([line], xlabel="x", ylabel="y", title="One", draw=draw)()  # type: ignore[arg-type]
    assert drawn.lower().count("#0072b2") >= 2 * 2  # a marker, at both widths


def test_ratios_over_many_decades_begin_at_the_baseline() -> None:
    rows = [("better", 0.01), ("worse", 50.0)]
    failed = ("failed", [False, True])
    drawn = draw_bars(
        rows, xlabel="x", title="t", level=("baseline", 1.0), from_level=True, marked=failed, unmarked="ok"
    )
    for svg in both(drawn()):
        assert {"0.01", "50", "failed", "ok", "baseline"} <= set(words(svg))


def test_empty_columns_go_and_numbers_of_things_are_words() -> None:
    rows = [("x", "-", "1", ""), ("y", "", "-", "")]
    table = Table(caption="c", header=("a", "b", "c", "d"), rows=rows, label="read", text_columns=2)
    found = filled(table)
    assert (list(found.header), found.text_columns) == (["a", "c"], 1)
    assert [list(row) for row in found.rows] == [["x", "1"], ["y", "-"]]
    assert (counted(0, "job"), counted(1, "job"), counted(1200, "job")) == ("0 jobs", "1 job", "1,200 jobs")
    assert few(["a", "b", "c"], most=2) == ["a", "b", "and 1 more of the kind"]
    assert few(["a" * 999]) == ["a" * 120 + "…" + "a" * 119]


def test_no_line_ends_between_a_number_and_its_unit() -> None:
    html = render("t", [Section(title="b", lead=["12 ms of 3 steps, 4 s"])], summary=[], generated_by="d")
    assert "12\N{NO-BREAK SPACE}ms of 3 steps, 4\N{NO-BREAK SPACE}s" in html
