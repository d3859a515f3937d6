"""Sharding, checkpointing, batches and passes chosen together: every figure from the one cost model, the pick by its rule."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ddltool.analyzers.job.placement.problem import DeviceType, Problem
from ddltool.analyzers.job.planning.layout_figures import DeviceKind, LayoutCandidate
from ddltool.analyzers.job.planning.layouts import Layouts
from ddltool.analyzers.job.planning.options import Goal
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.costs.predict import predict
from ddltool.analyzers.step.costs.setting import Placement, Setting
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.work import WorkCurve, measure_work
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.decision import LEAST_GAIN, NothingFits
from ddltool.errors import Infeasible
from ddltool.links import parse_link, parse_nic
from ddltool.shipped import calibration, devices
from tests.helpers.sharding_workers import Gpt

MIB = 2.0**20
PRICES = {"A100": 4.0, "T4": 0.5}


@functools.cache
def work() -> WorkCurve:
    def build() -> TrainingStep:
        def loss(output: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(output.flatten(0, 1), output.new_zeros(output.shape[0] * 64, dtype=torch.long))

        module = Gpt(layers=4, width=128, length=64, words=512)
        return TrainingStep(name="gpt", module=module, inputs=(torch.zeros(2, 64, dtype=torch.long),), loss=loss)

    return measure_work(build)


def layouts(total: int, **usable_mib: float) -> Layouts:
    return planner(total, "adam", **usable_mib)


def planner(total: int, optimizer: str, **usable_mib: float) -> Layouts:
    """Layouts of :func:`work` on nodes of four."""
    kinds = {
        name: DeviceKind(
            model=cost_model(devices().device(name), calibration()),
            fabric=Fabric(inside=parse_link("nvlink3"), between=parse_nic("200Gbit"), gpus_per_node=4),
            usable_bytes=size * MIB,
            price_per_hour=PRICES[name],
        )
        for name, size in usable_mib.items()
    }
    return Layouts(work=work(), kinds=kinds, total=total, optimizer=optimizer)


def problem(total: int, **more: Any) -> Problem:
    limits = {key: more.pop(key) for key in ("max_devices", "single_type") if key in more}
    types = tuple(DeviceType(name=name, count=count, capability_per_s=Fraction(1)) for name, count in more.items())
    return Problem(job="gpt", max_workers=total, batch_size=1, devices=types, **limits)


def fitting(found: list[LayoutCandidate]) -> list[LayoutCandidate]:
    return [it for it in found if not it.layout.missing_bytes]


def held(kind: Any, shard: int, how: Any, size: int, *, sums: bool = False) -> float:
    peak = work().peak(size, Sharding(kind=kind, shard=shard, sums=sums), "adam", how)
    assert peak is not None
    return peak.total_bytes / MIB


def test_the_figures_are_those_of_predict() -> None:
    made = layouts(16, A100=1e6)
    model, fabric = made.kinds["A100"].model, made.kinds["A100"].fabric
    for it in fitting(made.search(problem(16, A100=8), equal=True)[0]):
        layout = it.layout
        if layout.devices != {"A100": 8}:
            continue
        kind = {"fsdp": "fsdp" if layout.reshard_after_forward else "zero2", "hsdp": f"hsdp:{layout.shard}"}
        setting = Setting(
            fabric=fabric, optimizer="adam", sharding=kind.get(layout.sharding, layout.sharding), accumulation=layout.passes,
            checkpointing=layout.checkpointing,
        )  # fmt: skip
        row = predict(work(), model, setting, [2 // layout.passes], [Placement(num_nodes=2, num_replicas=8)])[0]
        assert layout.step_s == pytest.approx(row.step_time_s)
        assert (layout.low_s, layout.high_s) == pytest.approx((row.predicted_low_s, row.predicted_high_s))
        assert layout.memory_bytes["A100"] == pytest.approx(row.peak_memory_bytes, abs=1)
        assert made.mfu(it, layout.step_s or 0.0) == pytest.approx(row.mfu)


def test_several_workers_on_a_device_keep_the_sum_of_their_gradients() -> None:
    made = layouts(16, A100=1e6)
    predicted = predict(
        work(), made.kinds["A100"].model, Setting(fabric=made.kinds["A100"].fabric, optimizer="adam", accumulation=2),
        [2], [Placement(num_nodes=1, num_replicas=4)],
    )[0]  # fmt: skip
    assert made.whole_bytes({"A100": 4}, 2, sums=True) == pytest.approx(predicted.peak_memory_bytes, abs=1)
    assert made.whole_bytes({"A100": 4}, 2) < predicted.peak_memory_bytes


def test_passes_are_as_few_as_the_memory_allows() -> None:
    room = held("ddp", 1, "none", 3, sums=True) + 0.1
    made = layouts(64, A100=room).search(problem(64, A100=8), equal=True)[0]
    plain = next(it.layout for it in made if it.layout.sharding == "ddp" and it.layout.checkpointing == "none")
    assert plain.passes == 3  # 8 samples of each, at most 3 at a time
    assert plain.memory_bytes["A100"] <= room * MIB < held("ddp", 1, "none", 4, sums=True) * MIB


def test_what_does_not_fit_is_listed_with_what_it_lacks() -> None:
    room = held("fsdp", 8, "none", 1) + 0.1
    made = layouts(8, A100=room).search(problem(8, A100=8))[0]
    lacking = [it.layout for it in made if it.layout.missing_bytes]
    ddp = next(it for it in lacking if it.sharding == "ddp" and it.checkpointing == "none")
    assert ddp.missing_bytes == pytest.approx((held("ddp", 1, "none", 1) - room) * MIB)
    assert ddp.step_s is None
    assert made[0].layout.sharding in ("fsdp", "hsdp")
    with pytest.raises(Infeasible, match="memory: a whole model in each process, with 1 sample, takes"):
        layouts(8, A100=room).whole_bytes({"A100": 8}, 1)


def test_where_nothing_fits_it_says_what_would() -> None:
    room = held("fsdp", 64, "full", 1) + 0.1
    with pytest.raises(NothingFits, match=r"missing; it would fit on (\d+) A100 \(FSDP2, full checkpointing\)") as told:
        layouts(4, A100=room).search(problem(4, A100=4))[0]
    assert all(layout.missing_bytes > 0 for layout in told.value.layouts)
    found = re.search(r"it would fit on (\d+) A100", str(told.value))
    assert found is not None
    enough = int(found[1])
    assert held("fsdp", enough, "full", 1) <= room < held("fsdp", enough // 2, "full", 1)


def test_unlike_devices_end_together() -> None:
    made = layouts(64, A100=1e6, T4=1e6)
    slow = {**made.kinds, "T4": replace(made.kinds["T4"], slower=4.0)}
    found = replace(made, kinds=slow).search(problem(64, A100=2, T4=2))[0]
    for it in fitting(found):
        sizes, counts = it.layout.local_batch_sizes, it.layout.devices
        assert sum(row.devices * row.size for row in it.rows) == 64
        if len(counts) == 2:
            assert sizes["A100"] > sizes["T4"]
            assert it.layout.sharding != "hsdp" or all(count % it.layout.shard == 0 for count in counts.values())


@pytest.mark.parametrize("room", [20.0, 1000.0])
def test_more_devices_or_memory_are_never_worse(room: float) -> None:
    """On hosts that issue ops at once: others are slower with DDP's hooks, for a model as small as this."""

    def without_host(room: float) -> Layouts:
        made = layouts(16, A100=room)
        model = made.kinds["A100"].model
        quick = replace(model, constants=replace(model.constants, issue_s=0.0, update_s=0.0))
        return made.changed(kinds={"A100": replace(made.kinds["A100"], model=quick)})

    value = without_host(room).value(Goal(step_samples=16))
    steps = []
    for count in (1, 2, 4, 8):
        try:
            steps.append(min(value(it.layout) for it in fitting(without_host(room).search(problem(16, A100=count))[0])))
        except NothingFits:
            steps.append(float("inf"))
    assert steps == sorted(steps, reverse=True)
    more = min(value(it.layout) for it in fitting(without_host(2 * room).search(problem(16, A100=8))[0]))
    assert more <= steps[-1] * (1 + 1e-9)


def test_objectives_are_ranked_by_what_they_name() -> None:
    made, asked = layouts(16, A100=1e4, T4=1e4), problem(16, A100=4, T4=4)
    fast, cheap, small = (
        made.search(asked, Goal(objective=name, step_samples=16))[0][0].layout  # type: ignore[arg-type]
        for name in ("fastest", "cheapest", "least-memory")
    )
    assert (fast.step_s or 0) <= (cheap.step_s or 0) * 1.03
    assert (cheap.price_per_sample or 0) <= (fast.price_per_sample or 0) * 1.03
    assert max(small.memory_bytes.values()) <= max(fast.memory_bytes.values())


def test_no_layout_in_any_number_of_passes_takes_less_memory() -> None:
    made, asked = layouts(16, A100=1e4), problem(16, A100=4)
    small = made.search(asked, Goal(objective="least-memory", step_samples=16))[0][0].layout
    others = [
        made._fastest_batching(asked.named((devices,)), sharding, recompute, True, least_passes=passes)
        for devices in range(1, 5)
        for sharding in made._shardings((devices,), asked)
        for recompute in made._recomputations()
        for passes in range(1, 16 // devices + 1)
    ]
    least = min(max(each.layout.memory_bytes.values()) for each in others if each is not None)
    assert max(small.memory_bytes.values()) <= least * (1 + LEAST_GAIN)
    assert small.passes > 1


def test_constraints_are_kept() -> None:
    made = layouts(16, A100=1e4, T4=1e4)
    for it in fitting(made.search(problem(16, A100=4, T4=4, max_devices=3))[0]):
        assert sum(it.layout.devices.values()) <= 3
    for it in fitting(made.search(problem(16, A100=4, T4=4, single_type=True))[0]):
        assert len(it.layout.devices) == 1


def test_buckets_are_chosen_with_the_layout() -> None:
    """Whichever layout is best by default settings, of those near it none is better with its own buckets or prefetch."""
    made = planner(64, "adam", T4=4000)
    slow = {
        name: replace(it, fabric=replace(it.fabric, between=parse_nic("40Gbit"))) for name, it in made.kinds.items()
    }
    made, goal, offered = replace(made, kinds=slow), Goal(step_samples=64), problem(64, T4=16)
    fit = [it for n in (2, 4, 6, 8, 12, 16) for it in made._layouts_on(offered, (n,), True, goal)[0]]

    def by_default(found: LayoutCandidate) -> float:
        return found.layout.step_s or 9.0

    def with_settings(found: LayoutCandidate) -> float:
        setting = next((it for it in made.communication(found) if it is not None), None)
        passes = found.layout.passes if found.sharding.gathers else 1
        saved = 0.0 if setting is None else (setting.default_step_s - setting.step_s) * passes
        return by_default(found) - max(0.0, saved)

    near = sorted(fit, key=by_default)[:8]
    least = min(map(with_settings, near))
    assert max(map(with_settings, near)) > 1.05 * least
    for first in near:
        assert with_settings(made._pick_with_settings(first, fit, goal)) <= 1.025 * least
