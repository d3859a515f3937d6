"""The explorer: every row a point, the frontier against brute force, commands that give their row again, in a browser."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from ddltool.analyzers.answers.reporting.charts import CONFIG, spec
from ddltool.analyzers.answers.reporting.figures import Explorer, Point
from ddltool.analyzers.answers.reporting.plan_section import plan_section
from ddltool.analyzers.answers.reporting.predict_section import predict_section
from ddltool.analyzers.answers.reporting.section import Picture, Section
from ddltool.artifact_files import read
from ddltool.commands.main import run
from ddltool.graph_results import PredictResult
from ddltool.plans import Plan
from tests.helpers.browser import chromium, needs_chromium

PREDICT = ["predict", "zoo:cifarnet", "--device", "A100,L4", "--batch-sizes", "4,64,100000", "--compile"]
PLAN = [
    "plan",
    "zoo:cifarnet",
    "--devices",
    "2xA100,2xL4",
    "--price",
    "A100=2,L4=1",
    "--batch-size",
    "256",
    "--nic",
    "100Gbit",
]


def printed(words: list[str]) -> Any:
    """Return the JSON document that a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        assert run([*words, "--json"]) == 0, words
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("explored")
    for name, words in {"predict": PREDICT, "plan": PLAN}.items():
        (folder / f"{name}.json").write_text(json.dumps(printed(words)))
    return {path.stem: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def prediction(files: dict[str, Path]) -> PredictResult:
    return read(files["predict"]).attrs["prediction"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plan(files: dict[str, Path]) -> Plan:
    return read(files["plan"])  # type: ignore[no-any-return]


def explorer_of(section: Section) -> Explorer | None:
    """Return the explorer among a section's figures; None where it has none."""
    pictures = [block for block in section.blocks if isinstance(block, Picture)]
    return next((each for block in pictures for each in block.figures if isinstance(each, Explorer)), None)


def drawn(figure: Explorer, **values: Any) -> tuple[set[tuple[float, float]], set[tuple[float, float]]]:
    """Return where Vega puts points, and rings around those on the frontier, with its parameters at ``values``."""
    made = {**spec(figure), "width": 400, "config": CONFIG}
    for parameter in made["params"]:
        parameter["value"] = values.pop(parameter["name"], parameter.get("value"))
        if parameter["value"] is None and "select" in parameter:
            del parameter["value"]
    assert not values
    svg = vl_convert.vegalite_to_svg(json.dumps(made))
    found = re.findall(r'aria-label="x: ([\d.]+); y: ([\d.]+)(; name)?', svg)
    points, rings = (
        {(float(x), float(y)) for x, y, name in found if bool(name) is is_point} for is_point in (True, False)
    )
    return points, rings


def brute_force(points: list[Point]) -> set[tuple[float, float]]:
    """Return the places of the points that fit to which no other fitting one is better in x or y and as good in both."""
    places = {(point.x, point.y) for point in points if point.fits}
    return {(x, y) for x, y in places if not any((a, b) != (x, y) and a <= x and b >= y for a, b in places)}


@pytest.mark.parametrize("seed", range(6))
def test_the_frontier_follows_what_is_shown(seed: int) -> None:
    rng = random.Random(seed)
    points = [
        Point(
            name=f"row {row}",
            x=float(rng.randint(1, 9)),
            y=float(rng.randint(1, 9)),
            traits={"device": rng.choice(("A", "B")), "batch": rng.choice((4, 16))},
            tips={"step": "1 s"},
            fits=rng.random() < 0.7,
        )
        for row in range(24)
    ]
    figure = Explorer(title="t", points=points, xlabel="x", ylabel="y")
    for device, batch in itertools.product((None, "A"), (None, 4)):
        kept = [
            point
            for point in points
            if device in (None, point.traits["device"]) and batch in (None, point.traits["batch"])
        ]
        shown, rings = drawn(figure, only_trait0=device, only_trait1=batch)
        assert shown == {(point.x, point.y) for point in kept}
        assert rings == brute_force(kept)
    assert drawn(figure, only_fits="does not fit") == (
        {(point.x, point.y) for point in points if not point.fits},
        set(),
    )


def test_every_row_is_a_point_with_its_figures(prediction: PredictResult) -> None:
    figure = explorer_of(predict_section(prediction))
    assert figure is not None
    rows = sorted(prediction.rows, key=lambda row: -row.samples_per_s)
    assert [(point.x, point.y) for point in figure.points] == [
        (row.reserved_bytes / 2**30, row.samples_per_s) for row in rows
    ]
    assert {point.fits for point in figure.points} == {True, False}
    made = spec(figure)
    [data] = made["datasets"].values()
    assert len(data) == len(rows) == 6
    controls = {
        one["bind"]["name"].strip(): one["bind"]["labels"]
        for one in made["params"]
        if "input" in (one.get("bind") or ())
    }
    assert controls == {
        "device": ["all", "A100", "L4"],
        "batch": ["all", "4", "64", "100000"],
        "memory": ["all", "does not fit", "fits"],
    }
    assert made["description"] == made["title"] == "Samples per second against memory"
    assert "80 % range" in figure.points[0].tips


def test_one_row_has_no_explorer(prediction: PredictResult) -> None:
    assert explorer_of(predict_section(prediction.model_copy(update={"rows": prediction.rows[:1]}))) is None


def test_prices_are_the_x_where_all_rows_have_one(prediction: PredictResult) -> None:
    rows = [row.model_copy(update={"price_per_million_samples": 2.0 + row.local_batch_size}) for row in prediction.rows]
    figure = explorer_of(predict_section(prediction.model_copy(update={"rows": rows})))
    assert figure is not None
    assert figure.title == "Samples per second against money"
    assert {point.x for point in figure.points} == {6.0, 66.0, 100_002.0}
    assert figure.points[0].tips["per 1M"].startswith("$")


def test_the_command_of_a_predicted_row_gives_it_again(prediction: PredictResult) -> None:
    row = prediction.rows[-2]
    program, *words = shlex.split(prediction.command_of(row))
    assert program == "ddltool"
    assert "--compile" in words
    [again] = PredictResult.model_validate_json(json.dumps(printed(words))).rows
    assert again == row


def test_the_commands_of_a_plan_give_its_choices_again(plan: Plan) -> None:
    figure = explorer_of(plan_section(plan, "plan.json"))
    assert figure is not None
    assert plan.decision is not None
    rates = {(layout.devices_text, 256 / layout.step_s) for layout in plan.decision.layouts if layout.step_s}
    drawn_rates = {(str(point.traits["on"]), point.y) for point in figure.points}
    assert all(any(on == where and rate == pytest.approx(y) for where, y in drawn_rates) for on, rate in rates)
    assert {point.command.split()[1] for point in figure.points} == {"plan", "predict"}
    alone = next(point for point in figure.points if "predict" in point.command)
    [row] = printed(shlex.split(alone.command)[1:])["rows"]
    assert row["samples_per_s"] == pytest.approx(alone.y)
    together = next(point for point in figure.points if "predict" not in point.command)
    again = Plan.model_validate_json(json.dumps(printed(shlex.split(together.command)[1:])))
    found = explorer_of(plan_section(again, "plan.json"))
    assert found is not None
    assert list(found.points) == list(figure.points)


@needs_chromium
def test_a_browser_explores(files: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert run(["report", *map(str, files.values()), "-o", str(page), "-q"]) == 0
    assert page.stat().st_size < 2e6
    code, points = (
        "document.querySelector('.command code').textContent",
        "document.querySelectorAll('#chart-0 .role-mark path[aria-label*=what]')",
    )
    with chromium(tmp_path) as browser:
        for width, dark in itertools.product((1280, 390), (False, True)):
            browser.open(page, width=width, dark=dark)
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.complaints() == []
            unlabelled = (
                "[...document.querySelectorAll('.vega-bindings select, .command select')].filter(e => !e.labels.length)"
            )
            assert browser.value(f"{unlabelled}.length") == 0
        browser.open(page, width=1280)
        assert browser.value(f"{points}.length") == 6
        for place in (1, 5):
            said = browser.value(f"{points}[{place}].getAttribute('aria-label')")
            browser.click(f"{points}[{place}]")
            device, batch = re.findall(r"what: (\w+), GPUs 1, batch (\d+)", said)[0]
            browser.demand(code, lambda text: f"--device {device} --batch-sizes {batch} " in text)  # noqa: B023
        browser.click("document.querySelector('.command button')")
        browser.demand("document.querySelector('.command button').textContent", lambda text: text == "copied")
        list_of = "document.querySelector('.command select')"
        browser.value(f"{list_of}.selectedIndex = 0, {list_of}.dispatchEvent(new Event('change'))")
        assert browser.value(code) == browser.value(f"{list_of}.value")
        control = "document.querySelector('#chart-0 .vega-bindings select')"
        browser.value(f"{control}.selectedIndex = 1, {control}.dispatchEvent(new Event('change'))")
        browser.demand(f"{points}.length", lambda count: count == 3)
        assert browser.complaints() == []
