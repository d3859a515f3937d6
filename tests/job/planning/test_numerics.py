"""Alternatives of precision, optimizer and LoRA: the best that the user named, with what each of the others would take."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import ddltool as dt
from ddltool.analyzers.job.planning.numerics import best_of, combinations
from ddltool.analyzers.job.planning.options import Goal
from ddltool.decision import Decision, Option
from ddltool.errors import Infeasible, InputError
from ddltool.job import DeviceOffer, Job
from ddltool.plans import Assignment, Plan
from tests.conftest import Cli


def job(**numerics: object) -> Job:
    return Job(
        name="gpt",
        model="zoo:gpt2",
        max_workers=1,
        batch_size=8,
        devices=[DeviceOffer(type="H100", count=1)],
        **numerics,
    )  # type: ignore[arg-type]


def plan_of(step_s: float, price: float | None = None) -> Plan:
    option = Option(
        strategy="bsp", devices={"H100": 1}, compute_s=step_s, iteration_s=step_s, throughput=1 / step_s,
        determinism="D0", price_per_sample=price,
    )  # fmt: skip
    decision = Decision(objective="fastest", picked="bsp", baseline=option, options=[option], words=["Use it."])
    row = Assignment(device_type="H100", devices=1, ests_per_device=0, local_batch_size=8, compute_s=step_s)
    return Plan(
        job="gpt", strategy="bsp", iteration_s=step_s, throughput=1 / step_s, max_workers=1, batch_size=8,
        assignments=[row], est_count=0, waste=0.0, overload_factor=step_s, status="feasible", gap=0.0,
        solve_seconds=0.0, decision=decision,
    )  # fmt: skip


def test_the_fastest_of_the_named_is_picked_and_each_has_its_figures() -> None:
    steps_s = {"bf16": 1.0, "fp8": 0.72}
    jobs = [job(precision=name) for name in steps_s]
    _, plan = best_of(jobs, lambda one: plan_of(steps_s[one.precision]), Goal())
    assert plan.iteration_s == 0.72
    assert plan.decision is not None
    assert [(row.name, row.saves) for row in plan.decision.named] == [("fp8", 0.0), ("bf16", pytest.approx(0.28))]
    assert plan.decision.words[0].startswith("With fp8: ")
    assert plan.decision.words[-1] == "You named 2 choices; the fastest step has fp8. fp8: 720 ms; bf16: 1 s, 39% more."


def test_a_gain_too_small_to_change_anything_keeps_the_first() -> None:
    steps_s = {"adamw": 1.0, "adamw-8bit": 0.99}
    jobs = [job(optimizer=name) for name in steps_s]
    _, plan = best_of(jobs, lambda one: plan_of(steps_s[one.optimizer]), Goal())
    assert plan.iteration_s == 1.0


def test_the_cheapest_is_picked_by_price() -> None:
    figures = {"bf16": (1.0, 1e-6), "fp8": (0.7, 2e-6)}
    jobs = [job(precision=name) for name in figures]
    _, plan = best_of(jobs, lambda one: plan_of(*figures[one.precision]), Goal(objective="cheapest", step_samples=8))
    assert plan.iteration_s == 1.0


def test_what_does_not_fit_is_listed_and_why() -> None:
    def planned(one: Job) -> Plan:
        if one.lora is None:
            raise Infeasible("memory: 3.0 GiB missing; it would fit on 2 H100")
        return plan_of(1.0)

    _, plan = best_of([job(), job(lora=16)], planned, Goal())
    assert plan.decision is not None
    assert [(row.name, row.why_not) for row in plan.decision.named] == [
        ("LoRA 16", ""),
        ("full", "memory: 3.0 GiB missing"),
    ]


def test_where_none_fits_the_first_says_why() -> None:
    def planned(one: Job) -> Plan:
        raise Infeasible(f"memory: {one.precision}")

    with pytest.raises(Infeasible, match="memory: bf16"):
        best_of([job(precision="bf16"), job(precision="fp8")], planned, Goal())


def test_more_than_twelve_are_refused() -> None:
    assert len(combinations(["bf16", "fp8"], ["adam"], [None, 8, 16])) == 6
    with pytest.raises(InputError, match="--precision: makes 18 plans"):
        combinations(["fp32", "bf16", "fp8"], ["adam", "adamw"], [None, 8, 16])


def test_types_without_a_rate_for_a_named_precision_are_left_out(cli: Cli) -> None:
    """Of two precisions the one that all types have is still planned on all of them."""
    result = cli(
        "plan", "zoo:gpt_small", "--devices", "2xH100,2xA100", "--precision", "fp8", "--batch-size", "64", "--json"
    )
    assert result.code == 0
    assert "note: A100 left out: no rate for fp8 in the datasheet" in result.err
    assert {row["device_type"] for row in json.loads(result.out)["assignments"]} == {"H100"}
    alone = cli("plan", "zoo:gpt_small", "--devices", "2xA100", "--precision", "fp8", "--batch-size", "64")
    assert (alone.code, alone.error_line.partition(";")[0]) == (2, "--precision: A100 has no rate for fp8")


def convolutions(count: int, width: int) -> tuple[nn.Module, torch.Tensor]:
    """Blocks of a convolution between batch norms, and two images."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(count):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.zeros(2, 3, 32, 32)


def test_a_model_of_images_is_told_what_channels_last_would_save() -> None:
    """As much as a plan with it then is faster; a model of words is told nothing of it."""
    how = {"devices": "1xA100", "batch_size": 2048, "precision": "bf16"}
    images = convolutions(4, 128)
    found, last = dt.plan(images, **how), dt.plan(images, **how, channels_last=True)
    assert found.decision is not None
    assert last.decision is not None
    saved = 1 - last.iteration_s / found.iteration_s
    assert found.decision.would_save["channels_last"] == pytest.approx(saved, abs=0.005)
    assert saved > 0.05
    assert "channels_last" not in last.decision.would_save
    text = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64)), torch.zeros(2, 16, dtype=torch.long)
    words = dt.plan(text, devices="1xA100", batch_size=16, precision="bf16")
    assert words.decision is not None
    assert "channels_last" not in words.decision.would_save
    assert last.run is not None
    assert last.run.channels_last


def test_a_small_model_is_told_that_it_waits_for_python() -> None:
    """One GPU is as fast as two there, and under DDP's hooks faster."""
    how = {"devices": "2xH100", "batch_size": 8, "precision": "bf16"}
    small = convolutions(8, 32)
    found, compiled = dt.plan(small, **how), dt.plan(small, **how, compile=True)
    for plan, helps in ((found, "a larger batch or --compile may"), (compiled, "a larger batch may")):
        assert plan.decision is not None
        assert f"{helps} gain more than devices" in plan.decision.words[1]
        assert sum(row.devices for row in plan.assignments) == 1
    for samples in (512, 8192):  # at 512 a device waits for less than a hundredth of its step
        large = dt.plan(small, devices="2xH100", batch_size=samples, precision="bf16")
        assert large.decision is not None
        assert "Python" not in large.decision.words[1]


def test_what_exchanges_gradients_has_hooks_and_what_is_not_modelled_compiled_is_left_out() -> None:
    how = {"devices": "4xA100", "batch_size": 64, "precision": "bf16"}
    small = convolutions(8, 32)
    compared, compiled = (dt.plan(small, **how, compile=compiles).decision for compiles in (False, True))
    assert compared is not None
    assert compiled is not None
    added = {option.strategy: option.other_s for option in compared.options if sum(option.devices.values()) == 4}
    assert added["elastic-bsp"] == pytest.approx(added["est"], rel=0.01)
    assert added["est"] > 1e-4
    assert {"est", "elastic-bsp"} <= compiled.left_out.keys()
    with pytest.raises(InputError, match="compile: is not modelled for est"):
        dt.plan(small, **how, compile=True, strategy="est")
