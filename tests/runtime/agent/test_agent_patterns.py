"""What a loop under the agent can get wrong beyond the table of patterns: schedules, other datasets."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltool.errors import InputError
from ddltool.runtime.agent.agent import GoodputAgent
from tests.helpers.agent_workers import scripted
from tests.helpers.runtime_workers import crew
from tests.helpers.training_patterns import Pattern, make

RANKS, TOTAL = 2, 17


def follows(made: Pattern, model: nn.Module, **options: Any) -> GoodputAgent:
    given = {
        "initial_batch_size": TOTAL,
        "max_batch_size": TOTAL,
        "max_local_batch_size": -(-TOTAL // (RANKS * made.accumulation)),
        "adapt": False,
        "scheduler": None if made.per_epoch else made.scheduler,
        "rule": "constant",
    } | options
    return GoodputAgent(model, made.optimizer, made.dataset, **given)


def differing(rank: int) -> str:
    """Return what ranks are told whose datasets have the same length and other samples."""
    made = make("plain")
    made.dataset.tensors[0][0] += rank
    with pytest.raises(InputError) as refused:
        follows(made, DistributedDataParallel(made.model))
    return str(refused.value)


def test_datasets_that_differ_are_refused() -> None:
    for told in crew().run(differing):
        assert told.startswith("dataset: content of samples: differs between rank 0")


def scheduled(rank: int, script: dict[int, tuple[int, int]], hand: bool) -> Any:
    """Train one epoch of 51 samples, 4 at first, under a schedule of its 13 steps; return its rates."""
    made = make("plain")
    scheduler = torch.optim.lr_scheduler.LinearLR(made.optimizer, 1.0, 0.0, total_iters=13)
    model: nn.Module = DistributedDataParallel(made.model) if dist.is_initialized() else made.model
    rates, steps = [], 0
    with scripted(script):
        agent = follows(
            made,
            model,
            initial_batch_size=4,
            max_batch_size=16,
            max_local_batch_size=16,
            adapt=True,
            interval_steps=2,
            background=False,
            scheduler=None if hand else scheduler,
        )
        try:
            for batch in agent.batches(0):
                agent.loss(made.loss(model, batch)).backward()
                made.optimizer.step()
                steps += 1
                if hand:
                    scheduler.step()
                rates.append((agent.sampler.position, made.optimizer.param_groups[0]["lr"]))
        except InputError as error:
            return str(error)
        agent.close()
    return rates


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_schedule_of_steps_goes_with_the_samples(ranks: int) -> None:
    script = {0: (12, 0)}
    for rates in crew().run(scheduled, script, False) if ranks == 2 else [scheduled(0, script, False)]:
        assert len(rates) == 2 + 4  # 4 + 4 samples, then 12 each, the last 7
        for position, rate in rates:
            done = 13 if position == 51 else position // 4
            assert rate == pytest.approx(0.1 * (1 - done / 13))
    told = scheduled(0, script, True)
    assert told.startswith(
        "the learning rate: changes from step to step of an epoch, but larger batches make fewer steps"
    )


def test_a_step_that_was_passed_over_is_no_progress() -> None:
    made = make("scaled_with_overflow")
    agent = follows(made, made.model, max_local_batch_size=TOTAL, rule="linear")
    for step, batch in enumerate(agent.batches(0)):
        made.scaler.scale(agent.loss(made.loss(made.model, batch))).backward()
        made.update(step)
        made.optimizer.zero_grad()
    assert agent.sampler.position == len(made.dataset)
    assert agent.progress == len(made.dataset) / TOTAL - 1
    agent.close()


def test_a_refusal_that_nobody_catches_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    made = make("iterable_dataset")
    with pytest.raises(InputError) as refused:
        follows(made, made.model)
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(InputError, refused.value, None)
    assert ended.value.code == 2
    told = "dataset: is a Endless, an IterableDataset; give a map-style dataset (with __len__ and __getitem__)"
    assert capsys.readouterr().err == f"error: {told}\n"
