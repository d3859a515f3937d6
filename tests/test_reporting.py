"""Pictures and the page: well-formed, self-contained, escaped, repeatable; and rendered by a real browser."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.reporting.page import Picture, Section, Table, render
from ddltool.analyzers.reporting.pictures import (
    Lane,
    Panel,
    Series,
    curve_svg,
    devices_svg,
    line_svg,
    makespan_svg,
    merge_bars,
    phases_svg,
    timeline_svg,
)

VOID = {"meta", "br", "hr", "img", "link", "input"}


def panels(count: int) -> list[Panel]:
    edges = np.sort(np.random.default_rng(0).uniform(0, 1, 2 * count))
    kinds = [("recv", "compute", "send")[i % 3] for i in range(count)]
    lane = Lane(name="channel:0", start_s=edges[0::2], end_s=edges[1::2], kinds=kinds)
    return [
        Panel(title="random order", lanes=[lane, lane], makespan_s=1.0),
        Panel(title="TAC", lanes=[lane], makespan_s=0.9),
    ]


def every_picture() -> dict[str, str]:
    x = np.array([4.0, 8.0, 16.0])
    series = Series(label="1 replica", batch=x, step_s=x / 100, spread_s=x / 1000, line_batch=x, line_s=x / 99)
    return {
        "timeline": timeline_svg(panels(30)),
        "makespan": makespan_svg([("random", 1.0, 0.9, 1.2), ("tac", 0.8, 0.8, 0.8)], 0.7),
        "curve": curve_svg([series]),
        "phases": phases_svg([("rank 0", {"compute": 0.2, "wait": 0.1, "sync": 0.05})]),
        "line": line_svg([3.0, 2.0, 1.0], xlabel="step", ylabel="loss", title="Loss"),
        "devices": devices_svg([("V100", 1.0, "2 ESTs"), ("T4", 0.0, "")]),
    }


@pytest.mark.parametrize("name", list(every_picture()))
def test_pictures(name: str) -> None:
    svg = every_picture()[name]
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert root.attrib["width"] == "100%"
    assert "viewBox" in root.attrib
    assert svg == every_picture()[name]
    assert "currentColor" in svg
    assert "#010203" not in svg
    assert "T00:00" not in svg  # no time stamp


def test_pictures_say_what_they_show() -> None:
    shown = every_picture()
    assert "random order: 1 s" in shown["timeline"]
    assert "1 replica, measured" in shown["curve"]
    assert "1 replica, fitted" in shown["curve"]


def test_a_long_timeline_stays_small() -> None:
    assert len(timeline_svg(panels(5000))) < 1_000_000


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
    blocks = [Picture(svg=svg, caption=name, label="simulated", table=table) for name, svg in every_picture().items()]
    section = Section(anchor="one", title=title, lead=[title], blocks=[*blocks, table])
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
    for colour in ((0, 114, 178), (230, 159, 0), (0, 158, 115)):  # recv, compute and send are all visible
        assert (np.abs(pixels - np.array(colour) / 255).max(axis=2) < 0.02).sum() > 200
