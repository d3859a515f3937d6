"""Figures and the page: drawn as told, self-contained, escaped, repeatable; colours that can be told apart."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddltool as dt
from ddltool.analyzers.answers.reporting.charts import COLOURS, INK, KINDS, SERIES, Slots, drawn, spec
from ddltool.analyzers.answers.reporting.figures import Bars, Figure, Heat, Lanes, Line, Lines, Span, merged, stacked
from ddltool.analyzers.answers.reporting.graph_section import graph_section
from ddltool.analyzers.answers.reporting.page import TEMPLATE, render
from ddltool.analyzers.answers.reporting.section import Picture, Section, Table, without_empty_columns
from ddltool.errors import few
from ddltool.graph import read_graph
from ddltool.units import counted

VOID = {"meta", "br", "hr", "img", "link", "input"}
X = np.array([4.0, 8.0, 16.0])
LINE = Line(label="1 replica", x=X, y=X / 100, low=X / 110, high=X / 90, dots=(X, X / 99))
FIGURES: dict[str, Figure] = {
    "lines": Lines(title="Steps", lines=[LINE], xlabel="batch", ylabel="step", seconds=True, levels=[("goal", 0.1)]),
    "areas": Lines(title="Held", lines=[LINE], xlabel="hours", ylabel="GPUs", draw="areas"),
    "bars": Bars(title="Times", rows=[("one", 0.0123), ("two", 0.5)], xlabel="time", seconds=True),
    "ratios": Bars(
        title="Ratios",
        rows=[("better", 0.01), ("worse", 50.0)],
        xlabel="ratio",
        log=True,
        level=("baseline", 1.0),
        intervals=[(0.005, 0.02), None],
        marked=("failed", [False, True]),
        unmarked="passed",
    ),
    "spans": Lanes(
        title="A step",
        headed=True,
        lanes=[("V100", [Span(0.0, 1.0, "compute", "EST 1"), Span(1.0, 1.2, "waiting")])],
        mark=("step ends", 1.2),
    ),
    "heat": Heat(
        title="Goodput",
        x=np.arange(1.0, 4.0),
        y=np.array([32.0, 64.0]),
        values=np.array([[1.0, 2.0], [2.0, np.nan], [3.0, 4.0]]),
        best=np.array([32.0, 64.0, np.nan]),
        xlabel="GPUs",
        ylabel="batch",
        what="goodput",
        known=2,
    ),
}
SHOWN = {
    "lines": {"1 replica", "goal", "batch", "step (ms)"},
    "areas": {"hours"},
    "bars": {"12.3 ms", "500 ms", "time (ms)", "one", "two"},
    "ratios": {"0.01", "50", "failed", "passed", "baseline"},
    "spans": {"A step", "V100", "compute", "waiting", "step ends", "EST 1", "time (s)"},
    "heat": {"goodput", "GPUs", "not supported by data"},
}


def words(svg: bytes) -> set[str]:
    return {element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text")}


@pytest.mark.parametrize("name", list(FIGURES))
def test_a_figure_shows_its_names_and_values(name: str) -> None:
    svg = drawn([FIGURES[name]], "svg")
    assert words(svg) >= SHOWN[name]
    again = drawn([FIGURES[name]], "svg")
    assert re.sub(rb"gradient_\d+", b"", svg) == re.sub(rb"gradient_\d+", b"", again)
    assert b"var(--" not in svg


def test_figures_of_one_file_stand_under_each_other() -> None:
    one, two = drawn([FIGURES["bars"]], "svg"), drawn([FIGURES["bars"], FIGURES["spans"]], "svg")
    heights = [float(ElementTree.fromstring(svg).attrib["height"]) for svg in (one, two)]
    assert heights[1] > heights[0] + 50
    assert words(two) >= SHOWN["bars"] | SHOWN["spans"]
    assert drawn([FIGURES["bars"]], "png").startswith(b"\x89PNG\r\n\x1a\n")


def test_values_are_those_that_were_given() -> None:
    made = spec(FIGURES["ratios"])
    rows = {row["name"]: row for values in made["datasets"].values() for row in values if "value" in row}
    assert {name: row["value"] for name, row in rows.items()} == {"better": 0.01, "worse": 50.0}
    assert (rows["better"]["low"], rows["better"]["high"]) == (0.005, 0.02)
    assert "low" not in rows["worse"]


def test_names_of_a_family_keep_their_colours_over_a_page() -> None:
    slots: Slots = {}
    first = Bars(title="a", rows=[("fifo", 1.0), ("srtf", 2.0)], xlabel="x", family="policy")
    second = Bars(title="b", rows=[("srtf", 1.0), ("pollux", 2.0)], xlabel="x", family="policy")
    colours = [_colours(spec(figure, slots)) for figure in (first, second)]
    assert colours[0]["srtf"] == colours[1]["srtf"]
    assert len(set(colours[0].values()) | set(colours[1].values())) == 3


def _colours(made: Any) -> dict[str, str]:
    scale = next(layer["encoding"]["color"]["scale"] for layer in made["layer"] if "color" in layer["encoding"])
    return dict(zip(scale["domain"], scale["range"], strict=True))


def test_equal_names_stay_apart() -> None:
    assert {"a", "a (2)", "a (3)"} <= words(drawn([Bars(title="t", rows=[("a", 1.0)] * 3, xlabel="x")], "svg"))


def test_an_axis_that_counts_has_whole_numbers_only() -> None:
    line = Line(label="a", x=np.array([0.0, 1.0, 2.0]), y=np.array([1.0, 1.0, 1.0]))
    svg = drawn([Lines(title="Jobs", lines=[line], xlabel="step", ylabel="jobs", whole="xy")], "svg")
    ticks = [text for text in words(svg) if re.fullmatch(r"[\d.]+", text)]
    assert {"0", "1", "2"} <= set(ticks)
    assert all("." not in text for text in ticks)


def test_nothing_is_loaded_before_somebody_looks() -> None:
    code = (
        "import sys\nfrom ddltool.analyzers.answers.reporting import fit_sections, graph_section, plan_section\n"
        "from ddltool.analyzers.answers.reporting import result_sections, simulation_section, telemetry_section\n"
        "assert not {'altair', 'vl_convert'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


spans = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.2)), max_size=40)


@given(spans)
def test_merged_spans_cover_what_was_there_and_little_more(items: list[tuple[float, float]]) -> None:
    given_ = [Span(low, low + width, "recv") for low, width in items]
    found = merged(given_, 1.2)
    for span in given_:
        assert span.end <= span.start or any(one.start <= span.start and span.end <= one.end for one in found)
    for one, two in itertools.pairwise(found):
        assert two.start - one.end >= 1.2 / 1200
    exact, ends = 0.0, 0.0
    for span in sorted(given_, key=lambda one: one.start):
        exact += max(0.0, span.end - max(span.start, ends))
        ends = max(ends, span.end)
    assert sum(one.end - one.start for one in found) <= exact + 0.001 * len(items) + 1e-9


def test_phases_follow_each_other() -> None:
    assert stacked({"compute": 2.0, "wait": 1.0}) == [Span(0.0, 2.0, "compute"), Span(2.0, 3.0, "wait")]


def test_a_long_timeline_stays_small() -> None:
    edges = np.sort(np.random.default_rng(0).uniform(0, 1, 20_000))
    lane = [Span(low, high, "recv") for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)]
    assert len(json.dumps(spec(Lanes(title="t", lanes=[("channel:0", merged(lane, 1.0))])))) < 200_000


def page(title: str = "A report") -> str:
    table = Table(caption="Figures", header=("a", "b"), rows=[("<b>1</b>", "2")], label="measured")
    blocks = [
        Picture(figures=[figure], caption=name, label="simulated", table=table) for name, figure in FIGURES.items()
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
    markup = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert html.count("<script") == 3
    assert not re.search(r'(src|href)="(?!#)', markup)
    assert not re.search(r"url\((?!#)", markup)
    assert "http:" not in markup
    assert "https:" not in markup
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "unsafe-eval" not in policy[1]


def test_labels_and_numbers_are_there() -> None:
    html = page()
    assert html.count('<span class="badge">simulated</span>') == len(FIGURES)
    assert html.count("<details open>") == len(FIGURES)
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


@pytest.mark.parametrize(
    "name", ['<script>alert("x")</script>', "</script><img src=x>", "<!-- <script>", "<!-- drawing -->"]
)
def test_text_and_data_are_escaped(name: str) -> None:
    bars = Bars(title=name, headed=True, rows=[(name, 1.0)], xlabel=name, level=(name, 1.0), family="policy")
    picture = Picture(figures=[bars], caption=name, label="read")
    html = render(name, [Section(title=name, lead=[name], blocks=[picture])], summary=[name], generated_by=name)
    assert html.count("<script") == html.count("</script>") == 3
    data = re.search(r'id="charts">(.*?)</script>', html)
    assert data is not None
    assert "<img" not in html[: data.end()]
    assert "<!--" not in html[: data.end()]
    assert name in json.dumps(json.loads(data[1]), ensure_ascii=False).replace('\\"', '"')


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
    """Return a chart's colour as the page shows it."""
    return scheme[colour.removeprefix("var(--").removesuffix(")")]


def test_files_have_the_pages_light_colours() -> None:
    assert {name: schemes()["light"][name] for name in COLOURS} == COLOURS


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_and_charts_stand_out_from_the_paper(mode: str) -> None:
    scheme = schemes()[mode]
    assert contrast(scheme["ink"], scheme["paper"]) >= 7
    assert contrast(scheme["faint"], scheme["paper"]) >= 4.5
    assert contrast(scheme["on-blue"], scheme["blue"]) >= 4.5
    assert contrast("#000000", scheme["orange"]) >= 4.5  # what stands on bars of computation
    for colour in (*SERIES, *KINDS.values(), INK):
        assert contrast(shown(colour, scheme), scheme["paper"]) >= 3, colour


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_of_one_chart_can_be_told_apart(mode: str, deficiency: str) -> None:
    seen = np.array(DEFICIENCIES[deficiency])
    groups = ("recv compute send", "compute wait sync", "compute communication waiting other")
    for colours in (SERIES, *([KINDS[kind] for kind in group.split()] for group in groups)):
        for one, two in itertools.combinations([shown(colour, schemes()[mode]) for colour in colours], 2):
            assert np.linalg.norm(lab(seen @ linear(one)) - lab(seen @ linear(two))) > 10, (one, two)


def test_empty_columns_go_and_numbers_of_things_are_words() -> None:
    rows = [("x", "-", "1", ""), ("y", "", "-", "")]
    table = Table(caption="c", header=("a", "b", "c", "d"), rows=rows, label="read", text_columns=2)
    found = without_empty_columns(table)
    assert (list(found.header), found.text_columns) == (["a", "c"], 1)
    assert [list(row) for row in found.rows] == [["x", "1"], ["y", "-"]]
    assert (counted(0, "job"), counted(1, "job"), counted(1200, "job")) == ("0 jobs", "1 job", "1,200 jobs")
    assert few(["a", "b", "c"], most=2) == ["a", "b", "and 1 more of the kind"]
    assert few(["a" * 999]) == ["a" * 120 + "…" + "a" * 119]


def test_no_line_ends_between_a_number_and_its_unit() -> None:
    html = render("t", [Section(title="b", lead=["12 ms of 3 steps, 4 s"])], summary=[], generated_by="d")
    assert "12\N{NO-BREAK SPACE}ms of 3 steps, 4\N{NO-BREAK SPACE}s" in html


def test_a_graph_s_verdict_is_what_trace_says_of_ddp(tmp_path: Path) -> None:
    """The order of transfers is for parameter servers: a page speaks first of what a job of today uses."""
    traced = dt.trace("zoo:cifarnet", device="A100", bandwidth="1Gbit", samples=2, output=tmp_path / "graph.json")
    graph = read_graph(tmp_path / "graph.json")
    section = graph_section(graph, "graph.json")
    assert traced.collectives is not None
    assert section.verdict is not None
    assert section.verdict.answer == traced.collectives.ddp.verdict
    assert section.lead[1].startswith("Parameter servers: from random orders")
    # Of an inference step, or of one that names no network, nothing is known but the order.
    meta = {key: value for key, value in graph.meta.items() if key != "bandwidth_bytes_per_s"}
    ordered = graph_section(replace(graph, meta=meta), "graph.json")
    assert ordered.verdict is not None
    assert ordered.verdict.answer.startswith("TAC's order of transfers")
