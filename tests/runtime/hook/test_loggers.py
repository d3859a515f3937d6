"""``log_steps``: what a logger is given is what telemetry's file has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddltool import runtime
from ddltool.errors import InputError
from ddltool.runtime.hook.loggers import FIELDS

STEPS = 6


class Writer:
    """As TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


class Run:
    """As a run of W&B."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)


def trained(file: Path, logger: Any, **options: Any) -> list[dict[str, Any]]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = runtime.attach(None, model=model, optimizer=optimizer, telemetry=file)
    runtime.log_steps(hook, logger, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        hook.loss(model(torch.zeros(8, 4)).mean()).backward()
        optimizer.step()
    hook.close()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_logger_has_what_the_file_has(tmp_path: Path) -> None:
    writer, run, called = Writer(), Run(), list[dict[str, float]]()
    rows = trained(tmp_path / "a.jsonl", writer)[: STEPS - 1]
    assert writer.scalars == [
        (f"ddltool/{name}", row[name], row["step"]) for row in rows for name in FIELDS if name in row
    ]
    for logger, given in ((run, run.rows), (called.append, called)):
        rows = trained(tmp_path / f"{id(logger)}.jsonl", logger, every=2)[: STEPS - 1]
        expected = [row for row in rows if row["step"] % 2 == 0]
        assert [row["ddltool/step"] for row in given] == [row["step"] for row in expected]
        assert [row["ddltool/step_s"] for row in given] == [row["step_s"] for row in expected]


def test_what_is_no_logger_is_said(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = runtime.attach(None, model=model, optimizer=optimizer, telemetry=tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="a str has neither add_scalar nor log"):
        runtime.log_steps(hook, "tensorboard")
    with pytest.raises(InputError, match="every: is 0"):
        runtime.log_steps(hook, Run(), every=0)
    with pytest.raises(InputError, match="log_steps: needs telemetry"):
        runtime.log_steps(runtime.attach(None), Run())
