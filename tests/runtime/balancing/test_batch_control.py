"""Load balancing in real gloo processes: sizes follow speeds, samples come once, gradients stay those of the whole batch."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddltool.analyzers.job.balancing.algorithm2 import Algorithm2Settings
from ddltool.analyzers.job.balancing.control import SpeedPolicy
from ddltool.artifacts import save
from ddltool.errors import DdlToolError
from ddltool.runtime.balancing.control import Manager, balance, least_samples, local_batch_norm
from ddltool.runtime.balancing.partitioned import PartitionedData, _Migration
from ddltool.telemetry import BalanceEvent
from tests.helpers.balance_workers import (
    REFUSALS,
    SHORT_WINDOWS,
    accumulated,
    broken_migration,
    dataset,
    known_sizes,
    migrate,
    mismatched_partitions,
    refusal,
    resumed,
    together,
    train,
)
from tests.helpers.runtime_workers import crew, enforcement, gradient_errors

SLOW = (0.1, 0.9), (0.9, 0.1)


def by_step(answers: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return list(zip(*(answer["steps"] for answer in answers), strict=True))


@pytest.mark.parametrize("predictor", ["ema", "last"])
def test_sizes_follow_the_speeds_and_nothing_else_changes(predictor: str, tmp_path: Path) -> None:
    """One rank takes nine times as long per sample, then the other one."""
    events = str(tmp_path / "events.jsonl")
    answers = crew().run(train_with, {"predictor": predictor, "events": events}, "cpu", *SLOW)
    steps = by_step(answers)
    assert all(sum(sizes) == 32 for sizes in steps)
    assert steps[0] == (16, 16)
    assert steps[29] == (29, 3)
    assert steps[-1] == (3, 29)
    for epoch in range(4):
        seen = Counter(number for answer in answers for number in answer["seen"][epoch])
        assert seen == Counter(range(320))
    for one, other in zip(*(answer["parameters"] for answer in answers), strict=True):
        assert torch.equal(one, other)
    rows = [BalanceEvent.model_validate_json(line) for line in Path(events).read_text().splitlines()]
    assert rows
    assert all(sum(row.sizes) == 32 and row.event == "resize" for row in rows)
    assert tuple(rows[-1].sizes) == answers[0]["sizes"] == answers[1]["sizes"]


def train_with(rank: int, more: dict[str, Any], *arguments: Any) -> dict[str, Any]:
    return train(rank, *arguments, **more)


def test_training_is_that_of_one_process_with_whole_batches() -> None:
    answers = crew().run(train_with, {"epochs": 3}, "cpu", *SLOW)
    order = []
    for epoch in range(3):
        rows, places = [], [0, 0]
        for sizes in by_step(answers)[10 * epoch : 10 * epoch + 10]:
            for rank, size in enumerate(sizes):
                rows += answers[rank]["seen"][epoch][places[rank] : places[rank] + size]
                places[rank] += size
        order.append(rows)
    for ours, theirs in zip(answers[0]["parameters"], together(order), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_algorithm_2_in_the_background(tmp_path: Path) -> None:
    events = str(tmp_path / "events.jsonl")
    answers = crew().run(train_with, {"trial": SHORT_WINDOWS, "events": events}, "gpu", (0.1, 0.9), (0.1, 0.9))
    steps = by_step(answers)
    assert all(sum(sizes) == 32 for sizes in steps)
    assert steps[:2] == [(16, 16)] * 2
    assert steps[-1][0] >= 22
    for epoch in range(4):
        assert Counter(number for answer in answers for number in answer["seen"][epoch]) == Counter(range(320))
    assert [answer["threads"] for answer in answers] == [[], []]
    assert {BalanceEvent.model_validate_json(line).event for line in Path(events).read_text().splitlines()} >= {
        "resize"
    }


def test_steps_of_several_batches_are_judged_by_their_mean() -> None:
    """Gradient accumulation: three batches of 8 in a step; what is left of an epoch still is not judged."""
    manager = Manager(SpeedPolicy([4, 4], predictor="last"), skip=0)
    rest = np.tile([0.5, 1.0, 0.5], (2, 1))
    assert manager(np.column_stack(([12.0, 12.0], [3.0, 1.0], rest))).tolist() == [2.0, 6.0]
    assert manager(np.column_stack(([6.0, 11.0], [1.0, 9.0], rest))).tolist() == [2.0, 6.0]
    assert manager(np.column_stack(([4.0, 12.0], [3.0, 3.0], rest))).tolist() == [2.0, 6.0]
    assert manager(np.column_stack(([4.0, 12.0], [1.0, 3.0], rest))).tolist() == [4.0, 4.0]
    manager.interval_s = 1.0
    for samples, seconds in ((4.0, 0.25), (12.0, 0.75), (1.0, 0.0625)):  # the next report follows full batches' time
        assert manager.sizes_and_steps_to_report(np.column_stack(([samples] * 2, [seconds] * 2, rest)))[-1] == 4


def test_events_name_the_last_step_of_a_report_of_several(tmp_path: Path) -> None:
    """Steps of 0.25 s and a report each second: after step 0 come the reports of steps 1 to 4 and 5 to 8."""
    events = tmp_path / "events.jsonl"
    manager = Manager(SpeedPolicy([4, 4], predictor="last"), events, skip=0)
    manager.interval_s, rest = 1.0, np.tile([0.5, 1.0, 0.5], (2, 1))
    for samples, seconds in (([4.0, 4.0], 0.25), ([16.0, 16.0], 1.0), ([16.0, 16.0], [1.0, 0.333])):
        report = np.column_stack((samples, np.broadcast_to(seconds, 2), rest))
        assert manager.sizes_and_steps_to_report(report)[-1] == 4
    rows = [BalanceEvent.model_validate_json(line) for line in events.read_text().splitlines()]
    assert [(row.event, row.step, row.sizes) for row in rows] == [("resize", 8, [2, 6])]


def test_one_process_alone_remembers_where_it_was() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with balance(model, optimizer, dataset(20), total_batch=4) as balancer:  # type: ignore[arg-type]
        for number, (features, labels) in enumerate(balancer.dataloader(), 1):
            balancer.loss(torch.nn.functional.cross_entropy(model(features), labels)).backward()
            if number % 2 == 0:
                optimizer.step()
            if number == 3:
                break
        assert balancer.state_dict()["sampler"]["position"] == 8


def test_a_straggler_beyond_help_is_told_once(tmp_path: Path) -> None:
    """Its one sample takes longer than the other rank's 31."""
    events = tmp_path / "events.jsonl"
    crew().run(train_with, {"trial": SHORT_WINDOWS, "events": str(events)}, "gpu", (0.01, 12.0), (0.01, 12.0))
    rows = [BalanceEvent.model_validate_json(line) for line in events.read_text().splitlines()]
    advice = [row for row in rows if row.event == "remove_straggler"]
    assert [row.rank for row in advice] == [1]
    assert advice[0].sizes == [31, 1]


def test_sizes_that_the_script_knows() -> None:
    answers = crew().run(known_sizes)
    assert [steps for steps, _ in answers] == [[8] * 4 + [20] * 6, [24] * 4 + [12] * 6]
    assert Counter(number for _, numbers in answers for number in numbers) == Counter(range(320))


@pytest.mark.parametrize("cluster", ["cpu", "gpu"])
def test_a_checkpoint_in_mid_epoch_loses_and_repeats_nothing(cluster: str) -> None:
    answers = crew().run(resumed, cluster)
    assert all(same for _, _, same in answers)
    seen = Counter(number for before, after, _ in answers for number in (*before, *after))
    assert seen == Counter(range(320))


@pytest.mark.parametrize(
    ("passes", "workers", "no_sync", "output"),
    [
        (2, False, True, ""),
        pytest.param(2, True, True, "dict", marks=pytest.mark.slow),
        (3, True, True, "tuple"),
        (3, False, True, "record"),
        (2, False, False, ""),
        pytest.param(1, True, True, "", marks=pytest.mark.slow),
    ],
)
def test_accumulation_over_batches_of_changing_sizes(passes: int, workers: bool, no_sync: bool, output: str) -> None:
    """Sizes change within a step; the result is the mean over all its samples, and a checkpoint counts all its batches.

    100 samples in batches of 8 leave a shorter batch at the end, which with 3 passes is left without an update.
    """
    case = {"passes": passes, "workers": workers, "no_sync": no_sync, "output": output}
    answers = crew().run(accumulated, case)
    done = 100 // (8 * passes) * 8 * passes
    steps = -(-100 // 8)
    whole = 100 if steps % passes == 0 else done
    seen = Counter(number for before, after, *_ in answers for number in (*before, *after))
    assert max(seen.values()) == 1
    assert sum(seen.values()) in (whole, done)
    assert len(answers[0][0]) + len(answers[1][0]) == 16 * passes
    assert Counter(number for *_, anew, _ in answers for number in anew) == Counter(range(100))
    assert max(error for *_, error in answers) < 1e-4


@pytest.mark.parametrize(("cluster", "least"), [("cpu", None), ("gpu", None), ("cpu", 3)])
def test_a_model_with_batch_norm_trains_beside_a_slow_rank(cluster: str, least: int | None) -> None:
    """101 samples: 6 steps of 16, and 5 that two ranks with 3 each cannot share."""
    trial = Algorithm2Settings(step=3, window=1, fine_window=1)
    job = {"norm": True, "least": least, "samples": 101, "total": 16, "epochs": 3, "predictor": "last", "trial": trial}
    answers = crew().run(train_with, job, cluster, (0.1, 2.0), (0.1, 2.0))
    steps = by_step(answers)
    number = 2 if least is None else least
    assert answers[0]["least"] == number
    assert min(map(min, steps)) == number  # reached by the slow rank, and never less
    last = [16, 5] if number == 2 else [15, 6]
    assert [sum(sizes) for sizes in steps] == ([16] * 5 + last) * 3
    for epoch in range(3):
        assert Counter(place for answer in answers for place in answer["seen"][epoch]) == Counter(range(101))


def test_two_where_a_layer_normalizes_over_the_local_batch() -> None:
    def norms(*layers: nn.Module) -> str | None:
        return local_batch_norm(nn.Sequential(nn.Linear(2, 2), *layers))

    assert norms(nn.BatchNorm2d(2)) == "1"
    assert norms(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2))) == "1.1"
    assert norms(nn.LayerNorm(2), nn.SyncBatchNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2)) is None
    assert norms(nn.BatchNorm1d(2).eval()) is None  # frozen
    assert norms(nn.BatchNorm1d(2, track_running_stats=False).eval()) == "1"  # never uses anything but the batch
    assert local_batch_norm(nn.Sequential(nn.BatchNorm1d(2)).eval()) == "0"  # trained later
    assert least_samples(nn.BatchNorm1d(2), None, 2, 4) == 2
    assert least_samples(nn.BatchNorm1d(2), 1, 2, 4) == 1
    assert least_samples(nn.Linear(2, 2), None, 2, 4) == 1


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_on_all_ranks(case: str) -> None:
    for answer in crew().run(refusal, case):
        assert REFUSALS[case][1] in answer
        assert "\n" not in answer


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("compress", [None, "ours", "bf16", "fp16"])
@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}])
def test_accumulation_unused_parameters_and_compression(
    passes: int, compress: str | None, ddp: dict[str, Any], tmp_path: Path
) -> None:
    """Against one process with all samples; one layer of the model has no part in the loss.

    In bfloat16 the error is that of its eight bits; scaling in float32 first, as ours does, rounds once less.
    """
    save(enforcement([3, 13]), tmp_path / "enforce.json")
    steps = [[(3, 13)] * passes] * 3
    given = str(tmp_path / "enforce.json"), steps, torch.float32, ddp, 1.0, (0,), compress
    worst = max(max(errors) for errors, _ in crew().run(gradient_errors, *given))
    assert worst < {None: 1e-6, "ours": 2e-3, "bf16": 4e-3, "fp16": 4e-4}[compress]
    if compress is not None:
        assert worst > 1e-6  # it has been rounded, so it has been compressed


def test_partitions_move_until_all_are_traversed_equally_often() -> None:
    answers = crew().run(migrate, (6, 2), 60, 0.5)
    one, other = answers
    assert one["partitions"] == other["partitions"] == (60, 20)
    assert (len(one["held"]), len(other["held"])) == (60, 20)
    assert sorted(one["held"] + other["held"]) == list(range(80))
    assert one["changed"] == other["changed"]
    assert len(one["changed"]) == 1
    used = np.array(one["used"]) + np.array(other["used"])
    assert used.max() - used.min() <= 1
    assert one["gap"] < 0.5 + 6 / 40 + 0.01


def test_equal_sizes_move_nothing() -> None:
    assert [answer["changed"] for answer in crew().run(migrate, (4, 4), 40, 0.5)] == [[], []]


def test_partitions_that_do_not_fit_together() -> None:
    for answer in crew().run(mismatched_partitions):
        assert answer.startswith("partition: differs between rank 0 (torch.float64 ()) and rank 1 (torch.float32 ())")


def test_a_migration_that_fails_is_told_on_all_ranks() -> None:
    for rank, answer in enumerate(crew().run(broken_migration)):
        assert answer == f"rank {rank}: moving samples between ranks has failed (the wire is cut)"


def test_a_migration_that_fails_while_ranks_ask_fails_on_all_of_them_at_the_next_step() -> None:
    """A rank says the same of its thread throughout a step, though that ends in the middle of it."""

    class FailsAfterTheQuestion(Future[list[tuple[torch.Tensor, ...]]]):
        def done(self) -> bool:
            was_done = super().done()
            if not was_done:
                self.set_exception(RuntimeError("the wire is cut"))
            return was_done

    data = PartitionedData((torch.arange(4),))
    nothing_given = torch.tensor([], dtype=torch.int64)
    migration = _Migration(moves=[], given_indices=nothing_given, received=FailsAfterTheQuestion())
    assert not data._finish_on_all_ranks(migration)
    with pytest.raises(DdlToolError, match=r"rank 0: moving samples between ranks has failed \(the wire is cut\)"):
        data._finish_on_all_ranks(migration)
