"""``plan --strategy goodput``: the choice against a search through everything, and what is refused."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest

from ddltool.analyzers.job.goodput.throughput import ThroughputParams, iteration_time_s, sync_time_s
from ddltool.analyzers.job.planning.goodput_plan import plan_goodput
from ddltool.analyzers.job.planning.split import NEAR_BEST
from ddltool.artifacts import save
from ddltool.decision import LEAST_GAIN
from ddltool.errors import Infeasible
from ddltool.goodput_model import Goodput
from ddltool.job import Constraints, GoodputSection
from tests.conftest import Cli, job

SLOW = ThroughputParams(
    alpha_grad_s=0.02,
    beta_grad_s=0.002,
    alpha_sync_local_s=0.01,
    beta_sync_local_s=0.001,
    alpha_sync_node_s=0.05,
    beta_sync_node_s=0.004,
    gamma=1.5,
)
FAST = ThroughputParams(**{**SLOW.model_dump(), "beta_grad_s": 0.001})
SECTION = GoodputSection(
    noise_scale=300.0,
    initial_batch_size=16,
    max_batch_size=120,
    max_local_batch_size=20,
    devices_per_node=2,
    epoch_samples=1000,
)


ONE_TYPE = Constraints(homogeneous=True)
mixing = partial(job, {"A": (5, None, 1.0), "B": (4, None, 3.0)}, max_workers=4, goodput=SECTION)
asked = partial(mixing, constraints=ONE_TYPE)


def by_search(models: dict[str, tuple[ThroughputParams, int]]) -> float:
    """Every type, number of devices, local batch and number of accumulation steps."""
    best = 0.0
    for params, count in models.values():
        for replicas in range(1, count + 1):
            for local in range(1, 21):
                for steps in range(60):
                    total = replicas * local * (steps + 1)
                    if not 16 <= total <= 120:
                        continue
                    seconds = float(iteration_time_s(params, -(-replicas // 2), replicas, local, steps))
                    best = max(best, total / seconds * (300 + 16) / (300 + total))
    return best


def test_the_choice_is_the_best_of_all() -> None:
    made = plan_goodput(asked(), SECTION, {"A": SLOW, "B": FAST})
    assert made.goodput is not None
    assert made.goodput.goodput_per_s == pytest.approx(by_search({"A": (SLOW, 5), "B": (FAST, 4)}), rel=1e-9)
    choice = made.goodput
    assert choice.total_batch_size == choice.num_replicas * choice.local_batch_size * (choice.accumulation_steps + 1)
    assert made.throughput * 4 * choice.efficiency == pytest.approx(choice.goodput_per_s)
    assert made.world_size == choice.num_replicas
    assert made.iteration_s == pytest.approx(choice.total_batch_size / (made.throughput * 4))


def mixes_by_search(
    models: dict[str, ThroughputParams], counts: tuple[int, int], totals: range, phi: float, memory: int
) -> float:
    """Every number of devices of two types, every total and every way to share it out, in one pass."""
    best = 0.0
    pairs = [(params.alpha_grad_s, params.beta_grad_s) for params in models.values()]
    for used in itertools.product(*(range(count + 1) for count in counts)):
        devices = sum(used)
        if not devices:
            continue
        kinds = [kind for kind, number in enumerate(used) for _ in range(number)]
        sync_s = max(float(sync_time_s(params, -(-devices // 2), devices)) for params in models.values())
        gamma = min(params.gamma for params in models.values())
        for sizes in itertools.product(range(1, memory + 1), repeat=devices):
            total = sum(sizes)
            if total in totals:
                slowest_s = max(pairs[kind][0] + pairs[kind][1] * size for kind, size in zip(kinds, sizes, strict=True))
                seconds = (slowest_s**gamma + sync_s**gamma) ** (1 / gamma)
                best = max(best, total / seconds * (phi + totals[0]) / (phi + total))
    return best


@pytest.mark.parametrize(
    ("phi", "ratio", "counts"), [(20.0, 2.0, (2, 1)), (200.0, 3.0, (1, 2)), (1e5, 4.0, (2, 2)), (5.0, 1.5, (1, 1))]
)
def test_no_mix_of_devices_with_another_total_or_split_makes_more_progress(
    phi: float, ratio: float, counts: tuple[int, int]
) -> None:
    """Total, devices and an unequal split together: never below the best of all, and above the best of one type."""
    models = {"A": SLOW, "B": SLOW.model_copy(update={"beta_grad_s": SLOW.beta_grad_s / ratio})}
    section = SECTION.model_copy(
        update={"noise_scale": phi, "initial_batch_size": 6, "max_batch_size": 40, "max_local_batch_size": 11}
    )
    wanted = job({"A": (counts[0], None, 1.0), "B": (counts[1], None, 1.0)}, max_workers=4, goodput=section)
    made = plan_goodput(wanted, section, models)
    found = made.split or made.goodput
    assert found is not None
    best = mixes_by_search(models, counts, range(6, 41), phi, 11)
    assert (found.goodput_per_s or 0.0) >= best * (1 - LEAST_GAIN) * (1 - NEAR_BEST)
    if made.split is not None:
        assert (found.goodput_per_s or 0.0) >= best * (1 - NEAR_BEST)
        assert sum(row.devices * row.local_batch_size for row in made.assignments) == made.split.total_batch_size
        assert made.throughput * made.batch_size == pytest.approx(made.split.total_batch_size / made.iteration_s)
        assert made.split.efficiency == pytest.approx((phi + 6) / (phi + made.split.total_batch_size))


def test_unlike_devices_train_together_where_it_pays() -> None:
    """More noise makes larger batches worth it, which the slower type then helps with."""
    together = plan_goodput(mixing(), SECTION.model_copy(update={"noise_scale": 1e4}), {"A": SLOW, "B": FAST})
    assert {row.device_type for row in together.assignments} == {"A", "B"}
    sizes = {row.device_type: row.local_batch_size for row in together.assignments}
    assert sizes["B"] > sizes["A"]
    assert together.split is not None
    assert together.split.equal_s is None or together.split.equal_s > together.iteration_s
    alone = plan_goodput(mixing(constraints=ONE_TYPE), SECTION, {"A": SLOW, "B": FAST})
    assert alone.goodput is not None


def test_limits_on_devices_and_money_are_kept() -> None:
    two = plan_goodput(asked(constraints=Constraints(max_devices=2, homogeneous=True)), SECTION, {"A": SLOW, "B": FAST})
    assert two.goodput is not None
    assert two.goodput.goodput_per_s == pytest.approx(by_search({"A": (SLOW, 2), "B": (FAST, 2)}), rel=1e-9)
    poor = plan_goodput(
        asked(constraints=Constraints(max_price_per_hour=4.0, homogeneous=True)), SECTION, {"A": SLOW, "B": FAST}
    )
    assert poor.goodput is not None
    assert poor.goodput.goodput_per_s == pytest.approx(by_search({"A": (SLOW, 4), "B": (FAST, 1)}), rel=1e-9)
    with pytest.raises(Infeasible, match="no number of the offered devices"):
        plan_goodput(asked(constraints=Constraints(max_price_per_hour=0.5)), SECTION, {"A": SLOW, "B": FAST})


def test_the_elastic_table_keeps_the_total_batch() -> None:
    made = plan_goodput(asked(), SECTION, {"A": SLOW})
    assert made.goodput is not None
    total = made.goodput.total_batch_size
    assert [row.world_size for row in made.goodput.elastic] == [1, 2, 3, 4, 5]
    for row in made.goodput.elastic:
        if row.accumulation_steps is None:
            assert row.reason
            continue
        more = row.ranks_with_one_more
        counts = [more, row.world_size - more] if more else [row.world_size]
        assert sum(sum(passes) * count for passes, count in zip(row.local_batch_sizes, counts, strict=True)) == total
        assert max(max(passes) for passes in row.local_batch_sizes) <= 20
        assert row.steps_per_epoch == -(-1000 // total)
        assert set(row.learning_rates) == {"linear", "sqrt", "adascale", "legw"}
        assert row.learning_rates["linear"] == pytest.approx(total / 16)


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    params = ThroughputParams(**SLOW.model_dump())
    model = Goodput(sources=["x"], params=params, rmsle=0.0, mape=0.0, samples=9, fit_seconds=0.0, undetermined=[])
    save(model, tmp_path / "goodput.json")
    text = """kind: ddltool.job
name: digits
max_workers: 4
batch_size: 4
devices: [{type: A, count: 5, goodput: goodput.json}]
"""
    section = "goodput: {noise_scale: 300, initial_batch_size: 16, max_batch_size: 120, max_local_batch_size: 20}\n"
    (tmp_path / "job.yaml").write_text(text + section)
    document = cli("plan", tmp_path / "job.yaml", "--strategy", "goodput", "--json").document
    assert document["strategy"] == "goodput"
    assert document["goodput"]["goodput_per_s"] > 0
    shown = cli("plan", tmp_path / "job.yaml", "--strategy", "goodput").out
    assert "Elastic: how to keep a total batch of" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    (tmp_path / "bare.yaml").write_text(text)
    assert (
        "goodput: is missing; add goodput:" in cli("plan", tmp_path / "bare.yaml", "--strategy", "goodput").error_line
    )
    (tmp_path / "none.yaml").write_text(text.replace(", goodput: goodput.json", "") + section)
    assert "made by ddltool fit" in cli("plan", tmp_path / "none.yaml", "--strategy", "goodput").error_line
