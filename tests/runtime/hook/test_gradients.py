"""Weighted gradient averaging over real gloo processes, against one process that sees all samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddltool.artifacts import save
from ddltool.runtime.hook.pending_batches import leading_size
from tests.helpers.runtime_workers import (
    crew,
    enforcement,
    error_when_fed,
    error_with_an_idle_rank,
    failure_of_step,
    gradient_errors,
)

UNEVEN = [(3, 13)]
SMALL_BUCKETS = {"bucket_cap_mb": 0.001}
# A gradient is about 0.1; these are a few units in the last place of the sums.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Local batches of 3 and 13, no telemetry."""
    save(enforcement([3, 13]), tmp_path / "enforce.json")
    return str(tmp_path / "enforce.json")


def worst(config: str | None, steps: list[list[tuple[int, int]]], *options: object) -> float:
    """Return the largest gradient error of any step on any rank."""
    return max(max(errors) for errors, _ in crew().run(gradient_errors, config, steps, *options))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_unequal_batches_give_the_gradient_of_all_samples(config: str, dtype: torch.dtype) -> None:
    assert worst(config, [UNEVEN] * 3, dtype) < TOLERANCE[dtype]


def test_plain_averaging_is_far_off() -> None:
    """What the weighting is for; it also shows that the tests here can fail."""
    assert worst(None, [UNEVEN] * 3) > 1e-3


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([UNEVEN, [(1, 4)], UNEVEN], id="uneven tail"),
        pytest.param([[(3, 13)] * 3, [(3, 13)] * 2], id="accumulation"),
        pytest.param([[(13, 3)], [(8, 8)], [(2, 1)]], id="other batches than planned"),
    ],
)
def test_the_counted_samples_weigh_not_the_planned_ones(
    config: str, steps: list[list[tuple[int, int]]], dtype: torch.dtype
) -> None:
    assert worst(config, steps, dtype, SMALL_BUCKETS) < TOLERANCE[dtype]


def test_several_buckets_are_all_weighted(config: str) -> None:
    answers = crew().run(gradient_errors, config, [UNEVEN] * 3, torch.float64, SMALL_BUCKETS)
    assert all(buckets > 2 for _, buckets in answers)
    assert max(max(errors) for errors, _ in answers) < TOLERANCE[torch.float64]


def test_parameters_without_gradient_do_not_disturb(config: str) -> None:
    assert worst(config, [UNEVEN] * 4, torch.float64, SMALL_BUCKETS, 1.0, (0, 1)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(
    "ddp",
    [{"gradient_as_bucket_view": True}, {"find_unused_parameters": False, "static_graph": True}],
    ids=["views", "static graph"],
)
def test_ddp_options_that_change_the_buckets(config: str, ddp: dict[str, bool]) -> None:
    steps = [UNEVEN, [(1, 4)], UNEVEN, [(3, 13)] * 2]
    assert worst(config, steps, torch.float64, SMALL_BUCKETS | ddp) < TOLERANCE[torch.float64]


def test_a_scaled_loss_scales_the_gradient(config: str) -> None:
    assert worst(config, [UNEVEN], torch.float64, None, 1024.0) < 1024 * TOLERANCE[torch.float64]


def test_bfloat16_is_as_exact_as_its_eight_bits(config: str) -> None:
    """Half a unit in the last place (2^-9 relative) for each of four roundings of gradients up to 0.2."""
    assert worst(config, [UNEVEN, [(1, 4)], UNEVEN], torch.bfloat16) < 4 * 2**-9 * 0.2


def test_telemetry_does_not_change_gradients(tmp_path: Path) -> None:
    save(enforcement([3, 13], telemetry=str(tmp_path / "telemetry.jsonl")), tmp_path / "enforce.json")
    steps = [UNEVEN, [(1, 4)], UNEVEN]
    assert worst(str(tmp_path / "enforce.json"), steps, torch.float64, SMALL_BUCKETS) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(
    "way", ["positional", "keyword", "mapping", "announced", "announced columns", "evaluated between"]
)
def test_samples_are_counted_however_the_model_is_fed(config: str, way: str) -> None:
    assert max(crew().run(error_when_fed, config, way)) < TOLERANCE[torch.float32]


def test_a_rank_without_samples_weighs_nothing(config: str) -> None:
    assert max(crew().run(error_with_an_idle_rank, config)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (
            "no tensor",
            "forward: the batch cannot be counted by dimension 0 of the model's arguments (missing): planned are {} "
            "samples; call hook.count_samples(n) before each forward, or hook.loss(loss, count=n)",
        ),
        (
            "columns",
            "forward: the batch cannot be counted by dimension 0 of the model's arguments (6): planned are {} "
            "samples; call hook.count_samples(n) before each forward, or hook.loss(loss, count=n)",
        ),
        ("negative", "count_samples: is -1; give the number of samples, 0 or more"),
    ],
)
def test_steps_that_cannot_be_weighed_are_refused(config: str, way: str, message: str) -> None:
    assert crew().run(failure_of_step, config, way) == [message.format(3), message.format(13)]


def test_leading_size_finds_the_first_tensor_with_a_dimension() -> None:
    assert leading_size([]) is None
    assert leading_size(["text", 3, None, torch.tensor(1.0)]) is None
    assert leading_size([torch.tensor(1.0), [{"a": ("x", torch.zeros(5, 2))}], torch.zeros(9)]) == 5
    assert leading_size([torch.zeros(0, 4)]) == 0
