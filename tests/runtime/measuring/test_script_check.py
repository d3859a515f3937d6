"""A script is run once more, alone, and its first gradients are compared."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ddltool.artifacts import load, save
from ddltool.errors import InputError
from ddltool.plans import Enforcement, ScriptProof
from ddltool.runtime.measuring.script_check import check_script
from ddltool.runtime.processes import checking
from ddltool.runtime.processes.checking import _reason, note_unchecked
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.without_dropout import WithoutDropout
from tests.helpers.runtime_workers import enforcement

EXAMPLE = (Path(__file__).parents[3] / "examples" / "train_hooked.py").read_text(encoding="utf-8")
LOSS = "nn.functional.cross_entropy(model(inputs), answers)"
SAID = f"hook.loss({LOSS})"

EACH = f'{LOSS[:-1]}, reduction="none")'
PART = LOSS.replace("inputs", "inputs[part]").replace("answers", "answers[part]")
UNSEEN = (
    f"((lambda gain: (gain - gain.mean()) / gain.std())(inputs.mean(1)) * {EACH}).mean()",
    f"((lambda weights: weights / weights.mean())(inputs.mean(1) ** 2) * {EACH}).mean()",
    f"((lambda mean: (1 + mean) * {EACH})(inputs.mean().detach())).mean()",
    f"(lambda part: {PART})(slice(len(answers) // 2))",
    f"(sum({PART} for part in (slice(5), slice(5, None))) / 2)",
)
"""What is made of a rank's batch without a gradient, or by place, which no graph shows."""


def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, *changes: tuple[str, str]) -> tuple[bool, str]:
    """Check the example with another loss and other ``changes`` of its text; return the answer."""
    text = EXAMPLE
    for old, new in ((SAID, loss if loss.startswith("hook") else f"hook.loss({loss})"), *changes):
        assert old in text
        text = text.replace(old, new)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save(enforcement([12, 20]), tmp_path / "enforce.json")
    Path("train.py").write_text(text, encoding="utf-8")
    found = check_script(["train.py"])
    assert json.loads(found.model_dump_json())["replicas"] == 2
    return found.equal, found.line


@pytest.mark.slow
def test_a_script_that_is_right_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    equal, line = checked(tmp_path, monkeypatch, LOSS.replace("(inputs)", "(nn.functional.dropout(inputs, 0.5))"))
    assert equal
    assert line.startswith("gradients of 40 steps equal to ")
    proof = load("enforce.json", Enforcement).checked
    assert proof is not None
    assert (proof.equal, proof.updates) == (True, 40)
    assert proof.largest_difference is not None
    assert proof.largest_difference < 1e-4


CLIPPED = "nn.utils.clip_grad_norm_(model.parameters(), 0.1); optimizer.step(); schedule.step()"
SCHEDULE = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"


@pytest.mark.slow
def test_a_tail_clipping_and_a_schedule_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """130 samples: four steps of 32, one of 2 (for two ranks); of 129 the last one is left out, also alone."""
    stepped = SCHEDULE + "; schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)"
    for samples in (130, 129):
        changes = ((":1500]", f":{samples}]"), (SCHEDULE, stepped), ("optimizer.step()", CLIPPED))
        equal, line = checked(tmp_path, monkeypatch, LOSS, *changes)
        assert equal, line
        assert line.startswith(f"gradients of {15 if samples == 130 else 12} steps equal to ")


@pytest.mark.slow
def test_rates_and_parameters_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = (SCHEDULE, SCHEDULE.replace("lr=0.1", "lr=0.1 * dist.get_world_size()"))
    equal, line = checked(tmp_path, monkeypatch, LOSS, scaled)
    assert not equal
    assert line.startswith("the learning rate of step 1 is 0.2, and 0.1 in one process: let it follow")
    parts = "1 + dist.get_world_size()"
    groups = f"[dict(params=[*model.parameters()][part::{parts}]) for part in range({parts})]"
    equal, line = checked(tmp_path, monkeypatch, LOSS, (SCHEDULE, SCHEDULE.replace("model.parameters()", groups)))
    assert (equal, line) == (False, "step 1 has 3 learning rates, and 2 in one process")
    equal, line = checked(tmp_path, monkeypatch, LOSS, scaled)
    proof = load("enforce.json", Enforcement).checked
    assert proof is not None
    assert not proof.equal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            f'hook.loss({LOSS} * len(answers) / 32, reduction="average")',
            "all are 0.5 times as large, so the loss is no mean over",
        ),
        *((loss, "a term of the loss is a mean over this rank's samples") for loss in UNSEEN),
    ],
)
def test_one_that_is_not_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, said: str) -> None:
    equal, line = checked(tmp_path, monkeypatch, loss)
    assert not equal
    assert said in line


@pytest.mark.slow
def test_a_refusal_in_mid_training_is_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InputError, match=r"failed with exit code 1: error: loss: is said to be a mean over samples, but"
    ):
        checked(tmp_path, monkeypatch, f"({LOSS} + model(inputs).std())")
    made = load("enforce.json", Enforcement)
    assert made.checked is None
    with pytest.raises(InputError, match=r"absent.py: is no file"):
        check_script(["absent.py"])


def test_the_functions_and_layers_of_dropout_pass_everything_until_the_end() -> None:
    """Also where a backward pass computes a checkpointed forward pass again."""
    model = nn.Sequential(nn.Dropout(0.5), nn.LSTM(4, 4, num_layers=2, dropout=0.5))
    values = torch.ones(2, 3, 4, requires_grad=True)
    without = WithoutDropout(model)
    try:
        assert torch.equal(functional.dropout(values), values)
        assert torch.equal(functional.dropout(values, 0.9, True), values)
        assert torch.equal(torch.dropout(values, 0.9, True), values)
        assert torch.equal(model(values)[0], model(values)[0])
        attend = functional.scaled_dot_product_attention
        assert torch.equal(attend(values, values, values, None, 0.9), attend(values, values, values))
        checkpoint(lambda given: functional.dropout(given * given, 0.9), values, use_reentrant=False).sum().backward()
        assert values.grad is not None
        assert torch.equal(values.grad, 2 * values.detach())
    finally:
        without.end()
    assert (model[0].p, model[1].dropout) == (0.5, 0.5)
    assert not torch.equal(functional.dropout(values), values)


def test_sums_tell_how_far_tensors_are_apart() -> None:
    """Of a million values, a column of a matrix and a single value: within three standard deviations (9 % each)."""
    first = torch.randn(1000, 1024, generator=torch.Generator().manual_seed(0))
    column, single = first.clone(), first.clone()
    column[:, 7] += 1.0
    single[5, 5] += 100.0
    kept = [checking._array(each, "name", whole=False) for each in (first, column, single)]
    assert kept[0].shape == (checking.SUMS,)
    assert np.linalg.norm(kept[0]) == pytest.approx(float(first.norm()), rel=0.27)
    assert np.linalg.norm(kept[1] - kept[0]) == pytest.approx(1000**0.5, rel=0.27)
    assert np.linalg.norm(kept[2] - kept[0]) == pytest.approx(100.0, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "rank", "said"),
    [
        (None, 0, "was not checked against one process yet"),
        ({}, 0, None),
        (None, 1, None),
        ({"script_sha256": "0" * 64}, 0, "is another than was checked against one process"),
        ({"equal": False}, 0, "did not train as one process would when it was checked"),
    ],
)
def test_a_script_that_was_not_checked_is_told_so(
    changes: dict[str, object] | None,
    rank: int,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n", encoding="utf-8")
    monkeypatch.setattr("sys.argv", [str(script), "--epochs", "3"])
    proof = None
    if changes is not None:
        known = {"ddltool": "1", "torch": "2", "updates": 40, "largest_difference": 0.0, "equal": True}
        proof = ScriptProof(**{**known, "script_sha256": checking._script_sha256(), **changes})  # type: ignore[arg-type]
    job = DistributedJob(rank=rank, world_size=2, side=None)
    with caplog.at_level(logging.WARNING):
        note_unchecked("enforce.json", enforcement([1, 1], checked=proof), job)
    lines = [record.getMessage() for record in caplog.records]
    expected = f'enforce.json: train.py {said}: ddltool doctor --check "{script} --epochs 3"'
    assert lines == ([] if said is None else [expected])


def test_the_reason_for_other_gradients_is_the_first_that_holds() -> None:
    """All one multiple; else one that is missing, also where no gradient is there at all."""
    model = nn.Linear(2, 1)
    expected = {"weight": np.array([1.0, -2.0]), "bias": np.array([3.0])}
    doubled = {name: 2 * values for name, values in expected.items()}
    assert _reason(model, doubled, expected).startswith("all are 2 times as large, so the loss is no mean")
    other = {"weight": np.array([1.0, 2.0])}
    assert _reason(model, other, expected) == "bias has no gradient here"
    assert _reason(model, {}, expected) == "bias has no gradient here"
