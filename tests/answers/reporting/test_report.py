"""``ddltool report``: every kind has its section, figures are right, bad files change nothing, a browser shows it well."""

from __future__ import annotations

import gzip
import json
import re
import statistics
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import vl_convert
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.answers.reporting.fit_sections import goodput_section
from ddltool.analyzers.answers.reporting.plan_section import plan_section
from ddltool.analyzers.answers.reporting.section import Picture
from ddltool.analyzers.answers.reporting.telemetry_section import binned
from ddltool.artifact_files import ORDER, ReadArtifact, read_any, with_distinct_names
from ddltool.commands.main import load
from ddltool.errors import InputError, shortened
from ddltool.goodput_model import Goodput
from ddltool.plans import Plan
from ddltool.units import show_seconds
from tests.helpers.browser import Browser, chromium, needs_chromium
from tests.helpers.report_artifacts import STRATEGIES, artifacts_in, write_telemetry


def made(*arguments: str | Path) -> None:
    load("report").main([str(argument) for argument in arguments], standalone_mode=False)


@pytest.fixture(scope="module")
def artifacts(every_artifact: Path) -> list[Path]:
    return artifacts_in(every_artifact)


@pytest.fixture(scope="module")
def page(artifacts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    made(*reversed(artifacts), "-o", path, "--title", "Everything")
    return path


def sections_of(html: str) -> dict[str, str]:
    return dict(re.findall(r'<section id="([^"]*)">(.*?)</section>', html, flags=re.DOTALL))


def parts_of(html: str) -> tuple[str, str, str]:
    """Return a page without its scripts, the data of its charts, and the scripts that run."""
    found = re.fullmatch(
        r'(.*)<script type="application/json" id="charts">(.*?)</script>\n<script>(.*?)</script>\n<script>(.*?)</script>(.*)',
        html,
        re.DOTALL,
    )
    assert found is not None
    text = found[1] + found[5]
    assert "<script" not in text
    return text, found[2], found[3] + found[4]


def cells(section: str, first: str) -> list[str]:
    """Return the cells of the row that begins with a word."""
    rows = re.findall(r"<tr>(.*?)</tr>", section)
    found = [[unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]
    return next(row for row in found if row and row[0] == first)


def named(artifacts: list[Path], name: str) -> Path:
    return next(path for path in artifacts if path.name == name)


# What is there


def test_every_kind_has_its_section_in_the_order_of_data_flow(artifacts: list[Path], page: Path) -> None:
    kinds = [name.rsplit("-", 1)[0] for name in sections_of(page.read_text())]
    assert list(dict.fromkeys(kinds)) == list(ORDER)
    assert len(kinds) == len(artifacts)


def test_every_section_has_figures_with_their_numbers_and_says_where_they_come_from(page: Path) -> None:
    for name, section in sections_of(page.read_text()).items():
        figures = re.findall(r"<figure>(.*?)</figure>", section, flags=re.DOTALL)
        assert figures, name
        for figure in figures:
            assert all(
                part in figure for part in ('class="drawing"', '<span class="badge">', "<table", "<details open>")
            ), name


def test_twenty_artifacts_make_a_page_below_three_megabytes(artifacts: list[Path], page: Path) -> None:
    assert len(artifacts) >= 20
    assert page.stat().st_size < 3_000_000


def test_the_same_files_give_the_same_page(artifacts: list[Path], tmp_path: Path) -> None:
    for name in ("one.html", "two.html"):
        made(named(artifacts, "toy.json.gz"), named(artifacts, "telemetry.jsonl"), "-o", tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_json_lists_the_sections(artifacts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate, plan = named(artifacts, "gate.json"), named(artifacts, "plan-est.json")
    made(gate, plan, "-o", tmp_path / "r.html", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "ddltool.report"
    assert document["bytes"] == (tmp_path / "r.html").stat().st_size
    assert [(row["section"], row["kind"], row["file"]) for row in document["sections"]] == [
        ("plan-1", "ddltool.plan", str(plan)),
        ("gate-1", "ddltool.gate", str(gate)),
    ]


def test_a_page_opens_with_what_failed_else_with_the_plan(artifacts: list[Path], page: Path, tmp_path: Path) -> None:
    def card(html: str) -> str:
        found = re.search(r'<div class="card (.*?)</header>', html, re.DOTALL)
        assert found is not None
        return unescape(re.sub(r"<[^>]*>", " ", found[1]))

    failed = json.loads(named(artifacts, "gate.json").read_text())["checks"]
    text = card(page.read_text())
    assert text.startswith("bad")
    assert f"FAILED: {sum(not check['passed'] for check in failed)} of {len(failed)} checks" in text
    made(
        *(path for path in artifacts if path.name.startswith(("plan-", "telemetry", "goodput"))),
        "-o",
        tmp_path / "r.html",
    )
    plan = json.loads(named(artifacts, "plan-auto.json").read_text())
    text = card((tmp_path / "r.html").read_text())
    answer = plan["decision"]["words"][0]
    assert answer in " ".join(text.split())  # a number and its unit are not parted
    assert "How sure" in text
    assert "ddltool emit plan-auto.json" in text
    section = plan_section(Plan.model_validate(plan), "p.json")
    assert section.verdict is not None
    assert section.verdict.answer == section.lead[0] == answer
    shown = " ".join(re.sub(r"<[^>]+>", "", unescape((tmp_path / "r.html").read_text())).split())
    assert shown.count(answer) == 3  # the page's head, the list of answers, the section: once each


# Figures, against the files themselves


def test_each_ranks_medians_are_those_of_the_rows(artifacts: list[Path], page: Path) -> None:
    path = named(artifacts, "telemetry.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    section = next(part for part in sections_of(page.read_text()).values() if "Telemetry: telemetry.jsonl" in part)
    table = section[section.index("Median step of each rank") :]
    for rank in sorted({row["rank"] for row in rows}):
        own = [row for row in rows if row["rank"] == rank and row["step"] >= 3]
        wanted = [
            show_seconds(statistics.median(row[name] for row in own))
            for name in ("compute_s", "wait_s", "sync_s", "step_s")
        ]
        assert cells(table, str(rank))[3:7] == wanted


def test_a_plan_beside_telemetry_is_held_against_it(artifacts: list[Path], page: Path) -> None:
    verified = json.loads(named(artifacts, "verification.json").read_text())["iteration"]
    section = next(part for part in sections_of(page.read_text()).values() if "Telemetry: telemetry.jsonl" in part)
    row = cells(section[section.index("Predicted by plan-est.json") :], "step")
    error = verified["predicted_s"] / verified["measured_s"] - 1
    assert row[1:] == [show_seconds(verified["predicted_s"]), show_seconds(verified["measured_s"]), f"{error:+.1%}"]
    others = r"Not compared with [^<]*plan-elastic-bsp.json \(telemetry is of 4 processes, the plan of 6\)"
    assert re.search(others, section)


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    paths = [Path(text) for text in ("a/x/plan.json", "b/x/plan.json", "a/graph.json", "plan.json", "a/graph.json")]
    found = with_distinct_names([ReadArtifact(kind="plan", path=path, content=None) for path in paths])
    assert [one.name for one in found] == ["a/x/plan.json", "b/x/plan.json", "graph.json", "plan.json", "graph.json"]


def test_the_order_of_the_toy_graph(artifacts: list[Path], page: Path) -> None:
    from ddltool.analyzers.step.transfers.efficiency import compare
    from ddltool.graph import read_graph

    comparison = compare(read_graph(named(artifacts, "toy.json.gz")), samples=20).schedules
    section = next(part for part in sections_of(page.read_text()).values() if "Graph: toy.json.gz" in part)
    for name, result in (("random", comparison["random"]), ("TIC", comparison["tic"]), ("TAC", comparison["tac"])):
        assert cells(section, name)[1] == show_seconds(result.makespan_s)
        assert cells(section, name)[3] == f"{result.efficiency:.3f}"


@pytest.mark.parametrize("strategy", [*STRATEGIES, "goodput"])
def test_plans_of_every_strategy(artifacts: list[Path], page: Path, strategy: str) -> None:
    plan = json.loads(named(artifacts, f"plan-{strategy}.json").read_text())
    section = next(part for part in sections_of(page.read_text()).values() if f"plan-{strategy}.json" in part)
    assert f"{plan['throughput']:.4g} mini-batches/s" in section
    table = next(part for part in re.findall(r"<table.*?</table>", section, re.DOTALL) if "local batch" in part)
    place = [unescape(cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", table)].index("local batch")
    for row in plan["assignments"]:
        assert cells(table, row["device_type"])[place] == f"{row['local_batch_size']:,}"
    shown = {
        "est": ("DDP buckets", "next best", "should travel"),
        "lb-bsp": ("the equal split",),
        "elastic-bsp": ("Iterations until the barrier",),
        "auto": ("Strategies, each on the devices", "usual:"),
        "goodput": ("Elastic: how to keep", "scaling pays until"),
    }
    for words in shown.get(strategy, ()):
        assert words in section


def test_unfinished_jobs_are_counted_as_by_hand(artifacts: list[Path], page: Path) -> None:
    jobs = json.loads(named(artifacts, "simulation.json").read_text())["policies"]["fifo"]["jobs"]
    last = max(
        job["finish_s"]
        for policy in json.loads(named(artifacts, "simulation.json").read_text())["policies"].values()
        for job in policy["jobs"]
    )
    section = sections_of(page.read_text())["simulation-1"]
    table = section[section.index("Unfinished jobs at nine times") :]
    at = np.linspace(0, last, 200)[round(199 * 4 / 8)]
    count = sum(job["submit_s"] <= at < job["finish_s"] for job in jobs)
    assert cells(table, f"{at:,.0f}")[1] == str(count)
    assert count > 0


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 10)), min_size=1, max_size=60), st.integers(1, 20))
def test_bins_hold_every_value_once(items: list[tuple[int, float]], points: int) -> None:
    step, value = np.array([at for at, _ in items]), np.array([what for _, what in items])
    found, width = binned("x", step, value, points, band=True)
    assert len(found.x) <= points
    parts: dict[int, list[float]] = {}
    for at, what in items:
        parts.setdefault((at - int(step.min())) // width, []).append(what)
    assert found.low is not None
    assert found.high is not None
    assert len(parts) == len(found.x)
    for place, number in enumerate(sorted(parts)):
        assert found.y[place] == pytest.approx(statistics.median(parts[number]))
        assert found.low[place] <= found.y[place] <= found.high[place]
    assert width == 1 or (width - 1) * points < step.max() - step.min() + 1


@given(st.text(max_size=60), st.integers(3, 30))
def test_shortened_keeps_both_ends(text: str, most: int) -> None:
    found = shortened(text, most)
    assert len(found) == min(len(text), most)
    if len(text) > most:
        tail = (most - 1) // 2
        assert found == text[: most - 1 - tail] + "…" + text[-tail:]


# Bad input


BAD = {
    "cut.json": ('{"kind": "ddltool.plan", "job": "a', "is not valid JSON"),
    "unknown.json": ('{"kind": "ddltool.zoo", "schema_version": 1}', "has no section"),
    "nothing.json": ('{"a": 1}', "is missing"),
    "half.json": ('{"kind": "ddltool.gate", "schema_version": 1}', "is missing"),
    "rows.json": ('{"kind": "ddltool.profile", "rows": []}', "is no list of rows"),
    "page.html": ("<html>", "is no artifact by its name"),
    "other.jsonl": ('{"kind": "ddltool.balance_event"}\n', "has no section"),
    "event.jsonl": ('{"kind": "ddltool.sync", "event": "stop"}\n', "event"),
    "field.jsonl": ('{"kind": "ddltool.telemetry", "step": -1}\n', "step"),
    "columns.csv": ("a,b\n1,2\n", "has no column"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_and_nothing_is_written(artifacts: list[Path], tmp_path: Path, name: str) -> None:
    text, words = BAD[name]
    bad, output = tmp_path / name, tmp_path / "report.html"
    bad.write_text(text)
    output.write_text("the page of yesterday")
    with pytest.raises(InputError) as caught:
        made(named(artifacts, "gate.json"), bad, named(artifacts, "barrier.json"), "-o", output)
    assert str(bad) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert output.read_text() == "the page of yesterday"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({name, "report.html"})


@pytest.mark.parametrize("tail", [b'{"kind": "ddltool.tele', b'{"device": "\xe2\x82'])
def test_a_line_that_is_being_written_is_left_out(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "telemetry.jsonl"
    write_telemetry(path, steps=10)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert len(read_any(path).content) == 40
    path.write_bytes(whole + tail + b"\n" + whole)
    with pytest.raises(InputError, match="telemetry.jsonl"):
        read_any(path)


def test_a_running_job_gives_a_fresh_page(tmp_path: Path) -> None:
    path, output = tmp_path / "telemetry.jsonl", tmp_path / "r.html"
    for steps in (6, 9):
        write_telemetry(path, steps=steps)
        made(path, "-o", output)
        assert f"steps 0 to {steps - 1} of 4 ranks" in output.read_text()


def test_compressed_files_are_read(artifacts: list[Path], tmp_path: Path) -> None:
    for name in ("telemetry.jsonl", "profile.csv", "plan-bsp.json"):
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(named(artifacts, name).read_bytes()))
        assert read_any(packed).kind == read_any(named(artifacts, name)).kind


# Hostile names, large files

HOSTILE = [
    '<script>alert("x")</script>',
    pytest.param("&amp;<b>'\"", marks=pytest.mark.slow),
    pytest.param("\u202egnp.exe\u202c", marks=pytest.mark.slow),
    "$\\frac{1}{0}$ _{^",
    pytest.param("_hidden", marks=pytest.mark.slow),
    "x" * 10_000,
    "字\u0000\u001b[31m\u2028",
    "\ud800",
    "</svg></section><img src=x onerror=y>",
]


def expressions_of(chart: dict[str, Any]) -> list[str]:
    """Return every expression that Vega evaluates for a chart."""
    compiled = json.loads(json.dumps(vl_convert.vegalite_to_vega(json.dumps({**chart, "width": 600}))))
    found: list[str] = []

    def walk(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for inner, content in value.items():
                walk(content, inner)
        elif isinstance(value, list):
            for content in value:
                walk(content, key)
        elif isinstance(value, str) and key in ("signal", "expr", "update", "init", "test"):
            found.append(value)

    walk({key: value for key, value in compiled.items() if key != "data"}, "")
    for source in compiled["data"]:
        walk(source.get("transform", []), "")
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(artifacts: list[Path], tmp_path: Path, name: str) -> None:
    plan = json.loads(named(artifacts, "plan-bsp.json").read_text())
    plan["job"] = name
    plan["assignments"][0]["device_type"] = name.replace("\ud800", "?")
    gate = json.loads(named(artifacts, "gate.json").read_text())
    gate["checks"][0] |= {"metric": name, "rule": name, "note": name}
    gate["current"] = [name]
    ops = [
        {"name": f"recv {name}", "kind": "recv", "resource": "channel:0", "duration_s": 1.0, "parameter": name},
        {"name": name, "kind": "compute", "resource": "compute:0", "duration_s": 2.0, "inputs": [f"recv {name}"]},
    ]
    graph = {"kind": "ddltool.graph", "schema_version": 1, "name": name, "mode": "inference", "ops": ops}
    files = {"plan.json": plan, "gate.json": gate, "graph.json": graph}
    for file, document in files.items():
        (tmp_path / file).write_text(json.dumps(document))
    try:
        write_telemetry(tmp_path / "t.jsonl", steps=6, device=name)
    except (UnicodeEncodeError, ValueError):  # a lone surrogate cannot be written that way
        write_telemetry(tmp_path / "t.jsonl", steps=6)
    output = tmp_path / "r.html"
    made(*(tmp_path / file for file in [*files, "t.jsonl"]), "-o", output, "--title", name)
    html = output.read_text()
    text, data, code = parts_of(html)
    assert "<img" not in text + data
    assert not re.search("[<>&]", data)
    assert not re.search("[\u202a-\u202e\u2028\x00\x1b]", text + data)
    assert "alert" not in code
    assert len(html) - len(code) < 1_000_000
    assert list(sections_of(html)) == ["graph-1", "plan-1", "telemetry-1", "gate-1"]
    for chart in json.loads(data)["charts"]:
        assert not [expression for expression in expressions_of(chart) if name[:20] in expression]


@pytest.mark.slow
def test_a_hundred_thousand_rows_make_a_small_page(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    write_telemetry(path, ranks=8, steps=12_500)
    made(path, "-o", tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text()
    assert len(html) < 3_000_000
    assert "100,000 rows" in html
    assert "Each point stands for 53 steps" in html


def test_a_long_table_says_what_it_leaves_out(tmp_path: Path) -> None:
    ops: list[dict[str, Any]] = []
    for number in range(1000):
        parameter = {"kind": "recv", "resource": "channel:0", "duration_s": 1e-3, "parameter": f"p{number}"}
        before = [f"op/{number - 1}"] if number else []
        compute = {
            "kind": "compute",
            "resource": "compute:0",
            "duration_s": 1e-3,
            "inputs": [*before, f"recv/{number}"],
        }
        ops += [{"name": f"recv/{number}", **parameter}, {"name": f"op/{number}", **compute}]
    graph = {"kind": "ddltool.graph", "schema_version": 1, "name": "chain", "mode": "inference", "ops": ops}
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    made(tmp_path / "graph.json", "-o", tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text()
    assert "290 more rows; the last 700 of 1,000 are left out" in html
    assert html.count("<td") < 3000


def test_a_graph_that_takes_no_time_has_no_picture(tmp_path: Path) -> None:
    op = {"name": "a", "kind": "compute", "resource": "compute:0", "duration_s": 0.0}
    graph = {"kind": "ddltool.graph", "schema_version": 1, "name": "nothing", "mode": "inference", "ops": [op]}
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    made(tmp_path / "graph.json", "-o", tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text()
    assert "Nothing in this graph takes any time." in html
    assert "<figure" not in html
    assert html.count("<script") == 1  # what sorts tables; nothing is there to draw


@pytest.mark.parametrize(("iterations", "drawn"), [(7, "7"), (150, "150 iterations")])
def test_many_iterations_become_one_bar_that_says_so(
    artifacts: list[Path], tmp_path: Path, iterations: int, drawn: str
) -> None:
    plan = json.loads(named(artifacts, "plan-elastic-bsp.json").read_text())
    plan["superstep"]["iterations"] = dict.fromkeys(plan["superstep"]["iterations"], iterations)
    plan["superstep"]["mini_batches"] = iterations * sum(row["devices"] for row in plan["assignments"])
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    made(tmp_path / "plan.json", "-o", tmp_path / "r.html")
    texts = re.findall(r'"text":"([^"]*)"', (tmp_path / "r.html").read_text())
    assert drawn in texts
    assert ("1" in texts) == (iterations == 7)


def test_remarks_on_every_rank_do_not_fill_the_page(artifacts: list[Path], tmp_path: Path) -> None:
    found = json.loads(named(artifacts, "verification.json").read_text())
    found["refit"] = [f"rank {rank} trained on 64 samples per step" for rank in range(64)]
    (tmp_path / "verification.json").write_text(json.dumps(found))
    made(tmp_path / "verification.json", "-o", tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text()
    assert "Rank 3 trained on 64 samples per step." in html
    assert "And 60 more of the kind." in html
    assert "ank 4 trained" not in html


# A real browser

# Letters of a picture that reach out of it, and pairs of texts that lie over each other, of the pictures that are shown.
_TEXTS = (
    "[...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width).map(s => [s, "
    "[...s.querySelectorAll('text')].filter(t => t.textContent.trim() && getComputedStyle(t).opacity > 0)"
    ".map(t => [t.textContent, t.getBoundingClientRect()])])"
)
CUT_LETTERS = (
    f"{_TEXTS}.flatMap(([s, texts]) => {{const b = s.getBoundingClientRect(); return texts.filter(([_, r]) => "
    "r.left < b.left - 1 || r.right > b.right + 1 || r.top < b.top - 1 || r.bottom > b.bottom + 1)"
    ".map(([text]) => `${s.closest('section').id}: ${text}`)})"
)
COVERED_LETTERS = (
    f"{_TEXTS}.flatMap(([s, texts]) => texts.flatMap(([one, a], i) => texts.slice(i + 1).filter(([_, b]) => "
    "Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && "
    "Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)"
    ".map(([other]) => `${s.closest('section').id}: ${one} | ${other}`)))"
)
SCROLLING_PICTURES = "[...document.querySelectorAll('.drawing')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
# A real mouse over the first bar of a section, and what the page then says of it.
BAR = "document.querySelector('#simulation-1 .mark-rect path')"


# A table of many rows, most of them folded away, with times in several units.
FOLDED = "document.querySelector('.grid:has(.rest) table[aria-label^=Step]').closest('.grid')"
WAITING = 4


def demand_sorting(browser: Browser, width: int) -> None:
    """A click on a head sorts all rows by size, units told, a second one the other way; folded rows stay folded."""
    texts = f"[...{FOLDED}.querySelectorAll('tbody tr')].map(r => r.cells[{WAITING}].textContent)"
    seen = f"[...{FOLDED}.querySelectorAll('tbody tr')].filter(r => r.getBoundingClientRect().height).length"
    before, shown = browser.value(texts), browser.value(seen)
    assert 0 < shown < len(before)
    units = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}

    def size(text: str) -> float:
        number, unit = text.split()
        return float(number) * units[unit]

    for sign in (1, -1):
        browser.click(f"{FOLDED}.querySelectorAll('th')[{WAITING}]")
        order = sorted(map(size, before), reverse=sign < 0)
        browser.demand(texts, lambda found, order=order: [size(text) for text in found] == order)
        assert sorted(browser.value(texts)) == sorted(before)
        assert browser.value(seen) == shown
    browser.click(f"{FOLDED}.querySelector('.fold')")
    browser.demand(f"{seen} == {len(before)}")


def demand_scrolling(browser: Browser) -> None:
    """A link of the navigation brings its section to the top, and the navigation stays in sight."""
    browser.value("scrollTo(0, 0)")
    browser.click("document.querySelector('nav a[href=\"#barrier-1\"]')")
    browser.demand("location.hash == '#barrier-1'")
    for element, least, most in (("#barrier-1", 0, 80), ("nav", -1, 20)):
        top = f"document.querySelector('{element}').getBoundingClientRect().top"
        browser.demand(top, lambda found, least=least, most=most: least <= found < most)


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(page: Path, tmp_path: Path, dark: bool) -> None:
    """Deque's rules of accessibility, with `pip install axe-core-python`."""
    axe = Path(pytest.importorskip("axe_core_python").__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    with chromium(tmp_path) as browser:
        browser.open(page, width=1280, dark=dark)
        browser.value(f"{axe};1")
        found = (
            "axe.run({resultTypes: ['violations']}).then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))"
        )
        assert browser.value(found) == []
        assert len(browser.value("axe.getRules()")) > 50


@needs_chromium
def test_a_browser_shows_everything(page: Path, tmp_path: Path) -> None:
    wide = (
        "[...document.querySelectorAll('main p, h1, h2, figure, .caption, .drawing, .scroll, figcaption, nav')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    cut = (
        "[...document.querySelectorAll('[id^=plan] .scroll')].filter(e => e.innerText.includes('elastic-bsp'))"
        ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => [e.scrollWidth, e.clientWidth, e.innerText])"
    )
    sections = "[...document.querySelectorAll('section')].map(s => [s.id, s.getBoundingClientRect().height])"
    drawings = (
        "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect())"
        ".filter(r => r.width && (r.width < 300 || r.height < 60))"
    )
    shown = "[...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width).length"
    figures = "document.querySelectorAll('.drawing').length"
    with chromium(tmp_path) as browser:
        for width, dark in ((1280, False), (390, True)):
            browser.open(page, width=width, dark=dark)
            assert browser.complaints() == []
            assert browser.requests() == [page.as_uri()]
            assert browser.value("document.documentElement.scrollWidth") == width
            assert browser.value(wide) == []
            if width == 1280:  # no table of the strategies is cut behind a scroll bar
                assert browser.value(cut) == []
            heights = dict(browser.value(sections))
            assert list(heights) == list(sections_of(page.read_text()))
            assert min(heights.values()) > 200
            assert browser.value(f"{drawings}.length") == 0
            assert browser.value(shown) == browser.value(figures) > 20
            assert not browser.value(CUT_LETTERS)
            assert not browser.value(COVERED_LETTERS)
            assert browser.value(SCROLLING_PICTURES) == 0
            paper = browser.value("getComputedStyle(document.body).backgroundColor")
            assert paper == ("rgb(22, 24, 27)" if dark else "rgb(255, 255, 255)")
            browser.call("Input.dispatchMouseEvent", type="mouseMoved", **browser.point(BAR))
            browser.demand("document.getElementById('vg-tooltip-element')?.innerText.includes('value')")
            demand_sorting(browser, width)
            demand_scrolling(browser)
        browser.open(page, width=800, dark=True, media="print")
        assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_letters_in_pictures_can_be_read(page: Path, tmp_path: Path, dark: bool) -> None:
    small = (
        "Math.min(...[...document.querySelectorAll('svg text')].filter(t => t.getBoundingClientRect().width)"
        ".map(t => parseFloat(getComputedStyle(t).fontSize) * Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b)))"
    )
    with chromium(tmp_path) as browser:
        browser.open(page, width=390, dark=dark)
        assert browser.value(small) >= 9.0
        ink = browser.value("getComputedStyle(document.querySelector('svg text')).fill")
        assert ink == ("rgb(232, 234, 237)" if dark else "rgb(26, 26, 26)")


@pytest.mark.parametrize(
    ("undetermined", "rows", "known"),
    [
        (["beta_sync_local_s", "alpha_sync_node_s", "beta_sync_node_s"], [(1, 1), (1, 2)], 2),
        (["alpha_sync_local_s", "beta_sync_local_s", "alpha_sync_node_s"], [(1, 1)], 1),
        (["alpha_sync_node_s", "beta_sync_node_s"], [(1, 1), (1, 8)], 4),
        ([], [(1, 1), (1, 4), (2, 8)], 8),
        ([], [(1, 1), (4, 16)], 16),
        ([], None, 16),
        (["alpha_sync_node_s"], None, 4),
        (["beta_sync_local_s", "alpha_sync_node_s"], None, 2),
        (["alpha_sync_local_s", "beta_sync_local_s", "alpha_sync_node_s"], None, 1),
        ([], [(1, 1), (1, 8)], 4),
    ],
)
def test_where_data_end_the_goodput_section_says_so(
    undetermined: list[str], rows: list[tuple[int, int]] | None, known: int
) -> None:
    params = {"alpha_grad_s": 0.02, "beta_grad_s": 0.001, "alpha_sync_local_s": 0.01, "beta_sync_local_s": 0.0}
    params |= {"alpha_sync_node_s": 0.0, "beta_sync_node_s": 0.0, "gamma": 1.0}
    fitted = Goodput.model_validate(
        {"sources": ["p.csv"], "params": params, "rmsle": 0.01, "mape": 0.01, "samples": 8, "fit_seconds": 0.1}
        | {"undetermined": undetermined}
    )
    profile = None
    if rows is not None:
        profile = pd.DataFrame(
            [
                {"device": "T4", "num_nodes": nodes, "num_replicas": replicas, "local_batch_size": 32}
                for nodes, replicas in rows
            ]
        )
    section = goodput_section(fitted, "g.json", profile, None)
    picture = section.blocks[-1]
    assert isinstance(picture, Picture)
    assert picture.table is not None
    noun = "replica" if rows is None else "GPU"
    if known == 16:
        assert f"Scaling pays until 16 {noun}s." in picture.caption
        assert "data" not in picture.table.header
        return
    # Free synchronisation makes more of anything pay: nothing of that may be said beyond the data.
    assert f"Beyond {known} {noun}{'s' if known > 1 else ''} (faded) no data support it: " in picture.caption
    assert "Whether scaling pays beyond is not known." in picture.caption
    assert [row[-1] for row in picture.table.rows] == ["yes"] * known + ["no"] * (16 - known)
    assert all(figure.known == known for figure in picture.figures)  # type: ignore[union-attr]
    if "alpha_sync_node_s" in undetermined:  # no jump at the first GPU of a second node, of which nothing is known
        speedups = [float(row[5]) for row in picture.table.rows]
        assert speedups[4] <= speedups[3] * 5 / 4 + 0.01
