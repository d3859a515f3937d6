"""A script is run once more, alone, and its first gradients are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddltool.artifacts import save
from ddltool.errors import InputError
from ddltool.runtime.measuring.script_check import check_script
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
)
"""What is made of a rank's batch without a gradient, or by place, which no graph shows."""


def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> tuple[bool, str]:
    assert SAID in EXAMPLE
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save(enforcement([12, 20]), tmp_path / "enforce.json")
    Path("train.py").write_text(
        EXAMPLE.replace(SAID, loss if loss.startswith("hook") else f"hook.loss({loss})"), encoding="utf-8"
    )
    found = check_script(["train.py"])
    assert json.loads(found.model_dump_json())["replicas"] == 2
    return found.equal, found.line


@pytest.mark.slow
def test_a_script_that_is_right_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    equal, line = checked(tmp_path, monkeypatch, LOSS.replace("(inputs)", "(nn.functional.dropout(inputs, 0.5))"))
    assert equal
    assert line.startswith("gradients of 3 steps equal to ")


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
        InputError, match=r"failed with exit code 1: error: loss: what it is a mean over cannot be read"
    ):
        checked(tmp_path, monkeypatch, f"({LOSS} + model(inputs).std())")
    with pytest.raises(InputError, match=r"error: loss: is a mean over 14 terms for 12 samples on rank 0, but over 30"):
        checked(tmp_path, monkeypatch, f"(sum({PART} for part in (slice(5), slice(5, None))) / 2)")
    with pytest.raises(InputError, match=r"absent.py: is no file"):
        check_script(["absent.py"])
