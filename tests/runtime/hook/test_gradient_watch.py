"""Gradients that are not finite are told once, by the rank that made them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltool import runtime
from ddltool.artifacts import save
from ddltool.runtime.hook import gradient_watch
from ddltool.runtime.hook.gradient_watch import watch_gradients
from tests.helpers.runtime_workers import crew, enforcement, loss_of, make_data, make_model


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def told_in_training(rank: int, config: str, spoiled_rank: int) -> list[str]:
    """Train four steps on 3 + 13 samples, in the third of which one rank's samples are NaN; return what was logged."""
    heard = _Heard()
    gradient_watch.log.addHandler(heard)
    try:
        model = DistributedDataParallel(make_model(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook = runtime.attach(config, model=model, optimizer=optimizer)
        size = (3, 13)[rank]
        for step in range(4):
            inputs, answers = make_data(size)
            optimizer.zero_grad()
            spoils = step == 2 and rank == spoiled_rank
            hook.loss(loss_of(model, inputs * float("nan") if spoils else inputs, answers)).backward()
            optimizer.step()
    finally:
        gradient_watch.log.removeHandler(heard)
    return heard.lines


@pytest.mark.parametrize(
    ("spoiled_rank", "whose"), [(0, ("this rank's own", None)), (1, ("another rank's", "this rank's own"))]
)
def test_the_rank_that_made_them_says_so(tmp_path: Path, spoiled_rank: int, whose: tuple[str, str | None]) -> None:
    save(enforcement([3, 13]), tmp_path / "enforce.json")
    told = crew().run(told_in_training, str(tmp_path / "enforce.json"), spoiled_rank)
    for rank, words in enumerate(whose):
        assert len(told[rank]) == (words is not None)
        for line in told[rank]:
            assert line.startswith(f"rank {rank}, step 2: gradients are not finite by {words} samples, in ")


def trained(gradients: list[torch.Tensor], updates: int, found_inf: bool = False) -> None:
    """Let a watched optimizer make updates with these gradients."""
    model = nn.ParameterList([nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=found_inf)
    watch_gradients(model, optimizer, 0)
    for value, gradient in zip(model, gradients, strict=True):
        value.grad = gradient
    if found_inf:
        optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
    for _ in range(updates):
        optimizer.step()


def spoiled(*shape: int, at: int) -> torch.Tensor:
    made = torch.zeros(*shape)
    made.view(-1)[at] = float("inf")
    return made


@pytest.mark.parametrize(
    ("gradient", "updates"),
    [
        (spoiled(5, at=4), 4),  # its turn comes every third update
        (spoiled(3, 1024, at=3000), 9),  # and of a large one other values each time
        (spoiled(8, 4, 3, 3, at=0).contiguous(memory_format=torch.channels_last), 24),
        (spoiled(4, 2, at=1).to_sparse(), 4),
    ],
)
def test_each_parameter_has_its_turn(gradient: torch.Tensor, updates: int, caplog: pytest.LogCaptureFixture) -> None:
    trained([torch.zeros(2), torch.zeros(3), gradient], updates)
    assert [record.getMessage().partition("gradients")[2] for record in caplog.records] == [
        " are not finite, in 1 of 3 parameters, first 2; training goes on with them"
    ]


def test_finite_ones_and_those_of_a_scaler_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    trained([torch.full((4,), 3e38), torch.zeros(0)], 3)
    trained([spoiled(3, at=0)], 3, found_inf=True)
    watch_gradients(nn.ReLU(), torch.optim.SGD([torch.zeros(1)]), 0)
    assert caplog.records == []
