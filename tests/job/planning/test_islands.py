"""``ddltool plan --devices A+B --link-between RATE``: figures that follow from the islands' own plans, and refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import ddltool as dt
from ddltool.analyzers.job.barriers.islands import FragmentExchange, Rounds
from ddltool.analyzers.job.planning.islands import _shares_by_speed, island_texts, link_of
from ddltool.errors import InputError
from ddltool.island_results import IslandsPlan
from ddltool.links import Link
from ddltool.runtime import OuterSteps
from tests.conftest import Cli
from tests.helpers.processes import message_of

SMALL = ("plan", "zoo:cifarnet", "--devices", "1xV100+1xT4", "--link-between", "100Mbit,1ms", "--time-limit", "2")


def by_hand(
    plan: IslandsPlan, every: list[int], step_s: list[float], overlap: int, *, fragments: int, bits: int
) -> float:
    """Seconds of a total batch: a round's, by the samples that all islands make in it."""
    between = Link(kind="plain", bytes_per_s=plan.link_bytes_per_s, latency_s=plan.link_latency_s)
    exchange = FragmentExchange(elements=plan.parameters, islands=2, link=between, bits=bits, fragments=fragments)
    rounds = Rounds(step_s=step_s, every=every, fragment_s=exchange.fragment_s, fragments=fragments, overlap=overlap)
    made = sum(steps * one.samples for steps, one in zip(every, plan.islands, strict=True))
    return rounds.round_s * plan.total_batch / made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("islands")


def test_a_plan_of_unequal_islands(cli: Cli, folder: Path) -> None:
    file = folder / "plan.json"
    found = cli(
        *SMALL, "--batch-size", "64", "--outer-every", "1,4,20", "--fragments", "2", "--outer-bits", "16", "--overlap", "2",
        "--json", "-o", file,
    )  # fmt: skip
    assert "fragments: are 2, and an island takes 1 inner steps" in found.err
    assert found.code == 2
    found = cli(
        *SMALL, "--batch-size", "64", "--outer-every", "4,20,100", "--fragments", "2", "--outer-bits", "16", "--overlap",
        "2", "--json", "-o", file,
    )  # fmt: skip
    assert found.code == 0, found.err
    plan = dt.read(file)
    assert isinstance(plan, IslandsPlan)
    assert found.document == json.loads(file.read_text())
    assert [one.devices for one in plan.islands] == ["1xV100", "1xT4"]
    assert [one.samples for one in plan.islands] == [32, 32]
    assert plan.parameters == round(sum(each.size_bytes for each in plan.islands[0].plan.parameters) / 4)
    fast, slow = plan.islands
    assert fast.samples_by_speed is not None
    assert slow.samples_by_speed is not None
    assert fast.samples_by_speed + slow.samples_by_speed == 64
    assert fast.samples_by_speed > slow.samples_by_speed
    options = {"fragments": 2, "bits": 16}
    for row in plan.rows:
        steps = _shares_by_speed([fast.step_s, slow.step_s], 2 * row.outer_every)
        own = [fast.step_s, slow.step_s]
        ends = [fast.step_by_speed_s or 0.0, slow.step_by_speed_s or 0.0]
        equal = [row.outer_every] * 2
        expected = {
            "equal": by_hand(plan, equal, own, min(2, row.outer_every - 1), **options),
            "samples": by_hand(plan, equal, ends, min(2, row.outer_every - 1), **options),
        }
        if min(steps) >= 2:
            expected["steps"] = by_hand(plan, steps, own, min(2, min(steps) - 1), **options)
        assert row.ways == pytest.approx(expected)
        assert row.overlapped_s == min(row.ways.values())
        assert row.step_s >= row.overlapped_s * (1 - 1e-9)
        assert row.sent_bytes == plan.parameters * 2
        assert row.published is None  # images
    assert [row.overlapped_s for row in plan.rows] == sorted((row.overlapped_s for row in plan.rows), reverse=True)
    assert plan.best.overlapped_s <= 1.05 * min(row.overlapped_s for row in plan.rows)
    assert {step.name for step in plan.synchronous} == {"one job", "DDP between islands"}
    assert plan.good_enough == (plan.synchronous[0].step_s <= 1.05 * plan.best.overlapped_s)
    assert fast.outer_bytes == 8 * plan.parameters
    assert fast.free_bytes is not None
    assert fast.free_bytes > 0
    settings = OuterSteps.settings_of(str(file), 1)
    assert settings["every"] == plan.best.inner_steps[1]
    assert (settings["optimizer"], settings["fragments"], settings["bits"]) == ((0.7, 0.9), 2, 16)
    with pytest.raises(InputError, match=r"^island: is 2; .* has 0 to 1$"):
        OuterSteps.settings_of(str(file), 2)


def test_its_table_and_page(cli: Cli, folder: Path) -> None:
    """Of the plan that stands there: the answer first, no line longer than 80, a picture of the link's rate."""
    found = cli("report", folder / "plan.json", "-o", folder / "report.html")
    assert found.code == 0, found.err
    page = (folder / "report.html").read_text()
    assert "Time of a step by the rate of the link" in page
    from ddltool.analyzers.answers.reporting.islands_section import islands_section

    plan = dt.read(folder / "plan.json")
    section = islands_section(plan)
    assert section.lead[0].startswith("Synchronous is good enough: " if plan.good_enough else "Meet every ")
    assert "nobody has published a setting like these" in " ".join(section.lead)
    assert cli("gate", folder / "plan.json", "--baseline", folder / "plan.json").code == 0


def test_shares_are_the_best_of_all() -> None:
    """Inner steps, or samples, by speed: no other shares, one each at least, let the last arrive earlier."""
    for seconds, total in itertools.product(([1.0, 2.0], [0.3, 1.0, 1.1], [1.0, 9.0, 30.0]), (3, 8, 17)):
        shares = _shares_by_speed(seconds, total)
        assert sum(shares) == total
        others = (
            [*first, total - sum(first)]
            for first in itertools.product(range(1, total), repeat=len(seconds) - 1)
            if sum(first) < total
        )
        least = min(max(share * each for share, each in zip(other, seconds, strict=True)) for other in others)
        assert max(share * each for share, each in zip(shares, seconds, strict=True)) == pytest.approx(least)


def test_links_and_islands_as_texts() -> None:
    assert island_texts("8xH100 + 4xA100,4xL4") == ["8xH100", "4xA100,4xL4"]
    link = link_of("1Gbit,30ms")
    assert (link.bytes_per_s, link.latency_s) == (125e6, 0.03)
    assert link_of("1Gbit").latency_s == 50e-6


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--devices", "8xH100+", "--link-between", "1Gbit"),
            "--devices: '8xH100+' has an island without devices; for example 8xH100+8xA100",
        ),
        (
            ("--devices", "8xH100+8xA100"),
            "--link-between: is missing; say what joins the islands: 1Gbit, or 1Gbit,30ms",
        ),
        (
            ("--devices", "8xH100", "--link-between", "1Gbit"),
            "--link-between: has no part in a plan of devices on one network; "
            "separate islands by +: --devices 8xH100+8xA100",
        ),
        (
            ("--devices", "1xT4+1xT4", "--link-between", "fast"),
            "--link-between: 'fast' is not a bandwidth; write a number with a unit, such as 10Gbit or 1.2GB/s",
        ),
        (
            ("--devices", "1xT4+1xT4", "--link-between", "1Gbit", "--outer-every", "0,8"),
            "--outer-every: 0 is below 1; write whole numbers >= 1",
        ),
        (
            ("--devices", "1xT4+1xT4", "--link-between", "1Gbit", "--outer-bits", "5"),
            "--outer-bits: is 5; give 4, 8, 16 or 32",
        ),
        (
            ("--devices", "1xT4+1xT4", "--link-between", "1Gbit", "--tokens", "1B"),
            "--tokens: has no part in a plan of islands; leave it out",
        ),
        (
            ("--devices", "1xT4+1xT4", "--link-between", "1Gbit", "--batch-size", "1"),
            "--batch-size: is 1; give 2 (a sample for each island) or more",
        ),
        (
            ("--devices", "1xT4+1xNone", "--link-between", "1Gbit"),
            "--devices: ",
        ),
    ],
)
def test_nonsense_is_refused_in_a_line(cli: Cli, arguments: tuple[str, ...], line: str) -> None:
    found = cli("plan", "zoo:cifarnet", *arguments)
    assert found.code == 2
    last = [each for each in found.err.splitlines() if each.startswith("error: ")]
    assert len(last) == 1
    assert last[0].startswith(f"error: {line}")


def test_the_function_refuses_alike() -> None:
    def said(**options: Any) -> str:
        return message_of(dt.plan, "zoo:cifarnet", **options)

    assert said(devices="1xT4+1xT4").startswith("link_between: is missing") or said(devices="1xT4+1xT4").startswith(
        "--"
    )
    assert "island without devices" in said(devices="+1xT4", link_between="1Gbit")
