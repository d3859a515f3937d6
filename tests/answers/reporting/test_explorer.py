"""The explorer: every row a point, the frontier against brute force, commands that give their row again, in a browser."""

from __future__ import annotations

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
from ddltool.analyzers.answers.reporting.figures import Explorer, Point, explorer
from ddltool.analyzers.answers.reporting.plan_section import plan_section
from ddltool.analyzers.answers.reporting.predict_section import predict_section
from ddltool.analyzers.answers.reporting.section import Picture, Section
from ddltool.artifact_files import read
from ddltool.commands.main import run
from ddltool.units import show_money, show_seconds
from tests.helpers.browser import chromium, needs_chromium

PREDICT = "ddltool predict zoo:cifarnet --device A100,L4 --batch-sizes 4,64,100000 --compile"
PLAN = "ddltool plan zoo:cifarnet --devices 2xA100,2xL4 --price A100=2,L4=1 --batch-size 256 --nic 100Gbit"


def made(command: str, path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the artifact that a command prints, written to ``path`` and read again."""
    capsys.readouterr()
    assert run([*shlex.split(command)[1:], "--json"]) == 0, command
    path.write_text(capsys.readouterr().out)
    content = read(path)
    return getattr(content, "attrs", {}).get("prediction", content)


def explored(section: Section) -> Explorer | None:
    """Return the explorer among a section's figures; None where it has none."""
    figures = [figure for block in section.blocks if isinstance(block, Picture) for figure in block.figures]
    return next((figure for figure in figures if isinstance(figure, Explorer)), None)


def drawn(figure: Explorer, **values: Any) -> list[list[tuple[float, float]]]:
    """Return where Vega puts points, and rings around those on the frontier, with its parameters at ``values``."""
    chart = {**spec(figure), "width": 400, "config": CONFIG}
    for parameter in chart["params"]:
        parameter |= {"value": values[parameter["name"]]} if parameter["name"] in values else {}
    svg = vl_convert.vegalite_to_svg(json.dumps(chart))
    found = re.findall(r'aria-label="[^":]*: ([\d.]+); [^":]*: ([\d.]+)(; name)?', svg)
    return [sorted({(float(x), float(y)) for x, y, name in found if bool(name) is point}) for point in (True, False)]


@pytest.mark.parametrize("seed", range(4))
def test_the_frontier_is_that_of_brute_force_over_what_is_shown(seed: int) -> None:
    rng = random.Random(seed)
    points = [
        Point(
            traits={"device": rng.choice("AB"), "batch": rng.choice((4, 16))},
            step_s=1.0,
            range_s=(0.5, 2.0),
            rate=float(rng.randint(1, 9)),
            memory_bytes=1.0,
            price=float(rng.randint(1, 9)),
            fits=rng.random() < 0.7,
        )
        for _ in range(24)
    ]
    [figure] = explorer(points, "samples")
    for device, batch in itertools.product((None, "A"), (None, 4)):
        kept = [
            one for one in points if device in (None, one.traits["device"]) and batch in (None, one.traits["batch"])
        ]
        fitting = {(one.price or 0.0, one.rate) for one in kept if one.fits}
        best = [(x, y) for x, y in fitting if not any(a <= x and b >= y and (a, b) != (x, y) for a, b in fitting)]
        everything = sorted({(one.price, one.rate) for one in kept})
        assert drawn(figure, only0=device, only1=batch) == [everything, sorted(best)]
    assert drawn(figure, only2="does not fit") == [
        sorted({(one.price, one.rate) for one in points if not one.fits}),
        [],
    ]


def test_every_predicted_row_is_a_point_whose_command_gives_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = made(PREDICT, tmp_path / "predict.json", capsys)
    figure = explored(predict_section(result))
    assert figure is not None
    points = {(point.memory_bytes, point.rate, point.fits) for point in figure.points}
    assert points == {(row.reserved_bytes, row.samples_per_s, row.fits) for row in result.rows}
    chart = spec(figure)
    assert [len(rows) for rows in chart["datasets"].values()] == [6]
    controls = [parameter["bind"] for parameter in chart["params"] if isinstance(parameter.get("bind"), dict)]
    assert {control["name"]: len(control["options"]) for control in controls} == {
        "device ": 3,
        "batch ": 4,
        "memory ": 3,
    }
    assert chart["description"] == chart["title"] == "Samples per second against memory"
    [again] = made(result.command_of(result.rows[-2]), tmp_path / "again.json", capsys).rows
    assert again == result.rows[-2]
    alone = result.model_copy(update={"rows": [again.model_copy(update={"price_per_million_samples": 2.0})]})
    assert explored(predict_section(alone)) is None
    priced = explored(predict_section(alone.model_copy(update={"rows": alone.rows * 2})))
    assert priced is not None
    assert priced.title == "Samples per second against money"
    told = again.model_copy(update={"price_per_million_samples": 2.0, "tokens_per_s": 128 * again.samples_per_s})
    of_tokens = explored(predict_section(alone.model_copy(update={"rows": [told] * 2})))
    assert of_tokens is not None
    assert (of_tokens.unit, of_tokens.points[0].price) == ("tokens", pytest.approx(2.0 / 128))
    assert '"price of a million tokens ($)"' in json.dumps(spec(of_tokens))


def test_every_layout_of_a_plan_is_a_point_whose_command_gives_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = made(PLAN, tmp_path / "plan.json", capsys)
    figure = explored(plan_section(plan, "plan.json"))
    assert figure is not None
    layouts = {(layout.devices_text, layout.step_s) for layout in plan.decision.layouts if layout.step_s}
    assert layouts <= {(point.traits["on"], point.step_s) for point in figure.points}
    by_verb = {point.command.split()[1]: point for point in figure.points}
    [row] = made(by_verb["predict"].command, tmp_path / "row.json", capsys).rows
    assert (row.step_time_s, row.peak_memory_bytes) == (by_verb["predict"].step_s, by_verb["predict"].memory_bytes)
    again = explored(plan_section(made(by_verb["plan"].command, tmp_path / "again.json", capsys), "plan.json"))
    assert again is not None
    assert list(again.points) == list(figure.points)
    # A price is of what the speed beside it counts.
    [samples, tokens] = [
        next(block.table for block in plan_section(each, "a").blocks if isinstance(block, Picture))
        for each in (plan, plan.model_copy(update={"decision": plan.decision.model_copy(update={"step_tokens": 2560})}))
    ]
    assert [table.header[-3:] for table in (samples, tokens)] == [
        ["samples/s", "$/M", "remark"],
        ["tokens/s", "$/M", "remark"],
    ]
    assert "$/M: dollars for a million samples" in samples.caption
    assert "$/M: dollars for a million tokens" in tokens.caption
    price = next(option.price_per_sample for option in plan.decision.options if not option.why_not)
    assert [table.rows[0][-2] for table in (samples, tokens)] == [show_money(1e6 * price), show_money(1e5 * price)]


def test_plain_ddp_on_all_devices_is_a_row_though_others_are_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "ddltool plan zoo:bert_small --devices 8xA100,4xL4 --batch-size 960"
    made_plan = made(command, tmp_path / "plan.json", capsys)
    blocks = plan_section(made_plan, "a").blocks
    table = next(block.table for block in blocks if isinstance(block, Picture))
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    [layout] = [
        layout
        for layout in made_plan.decision.layouts
        if layout.text == "DDP" and layout.local_batch_sizes == {"A100": 80, "L4": 80}
    ]
    assert len(rows) == 10
    assert [row["step"] for row in rows if (row["how"], row["on"]) == ("DDP", "8 A100 + 4 L4")] == [
        show_seconds(layout.step_s)
    ]


@needs_chromium
def test_a_browser_explores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    for name, command in {"predict": PREDICT, "plan": PLAN}.items():
        made(command, tmp_path / f"{name}.json", capsys)
    assert run(["report", str(tmp_path / "predict.json"), str(tmp_path / "plan.json"), "-o", str(page)]) == 0
    assert page.stat().st_size < 2e6
    points = "document.querySelectorAll('#chart-0 .role-mark path[aria-label*=what]')"
    code, names, button = (f"document.querySelector('.command {tag}')" for tag in ("code", "select", "button"))
    with chromium(tmp_path) as browser:
        for width, dark in itertools.product((390, 1280), (True, False)):
            browser.open(page, width=width, dark=dark)
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.value("[...document.querySelectorAll('select')].every(one => one.labels.length)")
        for place in (1, 5):
            said = browser.value(f"{points}[{place}].getAttribute('aria-label')")
            device, batch = re.findall(r"what: (\w+), GPUs 1, batch (\d+)", said)[0]
            browser.click(f"{points}[{place}]")
            browser.demand(f"{code}.textContent.includes('--device {device} --batch-sizes {batch} ')")
        browser.click(button)
        browser.demand(f"{button}.textContent === 'copied'")
        browser.value(f"{names}.selectedIndex = 0, {names}.dispatchEvent(new Event('change'))")
        assert browser.value(f"{code}.textContent === {names}.value")
        browser.click("document.querySelector('#chart-0 .role-legend-symbol path')")
        browser.demand(f"{points}.length === 3")
        assert browser.complaints() == []
