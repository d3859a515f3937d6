"""The whole loop in Python: a module with a DataLoader's batch, predicted, planned, emitted, verified, read again."""

from __future__ import annotations

import json
import logging
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import ddltool as dt
from ddltool.analyzers.step.tracing.batches import divide_batch, loss_against, samples_in
from ddltool.artifacts import Artifact
from tests.house.test_docs import put

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
WIDTH, CLASSES = 8, 3


class One(nn.Module):
    """Takes one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class WithLoss(One):
    """Takes targets where they are given, and returns (output, loss)."""

    def forward(self, x: Tensor, targets: Tensor | None = None, verbose: bool = False) -> Any:  # type: ignore[override]
        output = self.layer(x)
        return output, None if targets is None else nn.functional.cross_entropy(output, targets)


class OfMapping(One):
    """Takes the batch as it is."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return self.layer(batch["x"])


X, Y = torch.randn(4, WIDTH), torch.tensor([0, 1, 2, 1])
FORMS: list[tuple[nn.Module, Any]] = [
    (One(), X),
    (One(), (X, Y)),
    (One(), [X, Y]),
    (One(), {"x": X, "label": Y}),
    (WithLoss(), (X, Y)),
    (WithLoss(), {"x": X, "targets": Y}),
    (OfMapping(), {"x": X, "y": Y}),
]


@pytest.mark.parametrize(("module", "batch"), FORMS, ids=lambda case: type(case).__name__)
def test_any_form_of_batch_is_the_same_work(module: nn.Module, batch: Any) -> None:
    """The floating-point work of a step is that of (module, inputs), which is traced without a batch."""
    plain = dt.predict((One(), X), "A100", batch_sizes=[4, 16]).rows
    found = dt.predict(module, "A100", batch=batch, batch_sizes=[4, 16]).rows
    assert [row.local_batch_size for row in found] == [4, 16]
    assert dt.predict(module, "A100", batch=batch).rows[0].local_batch_size == 4
    for row, other in zip(found, plain, strict=True):
        assert row.step_time_s == pytest.approx(other.step_time_s, rel=0.15)
        assert row.peak_memory_bytes == pytest.approx(other.peak_memory_bytes, abs=200)
    assert [name for name, _ in module.named_parameters()] == ["layer.weight", "layer.bias"]
    assert type(module).forward is vars(type(module)).get("forward", One.forward)


def test_what_a_batch_is_divided_into() -> None:
    assert divide_batch(One(), (X, Y)).targets is Y
    assert divide_batch(One(), {"x": X, "label": Y}).targets is Y
    whole = divide_batch(WithLoss(), (X, Y))
    assert whole.targets is None
    assert whole.has_loss
    assert len(whole.example) == 2
    assert len(divide_batch(WithLoss(), (X, Y, Y)).example) == 2  # verbose is a setting, no part of a batch
    assert divide_batch(OfMapping(), {"a": X}).takes_mapping
    assert samples_in({"n": 1, "x": X}) == 4


@pytest.mark.parametrize(
    ("shape", "example", "expected"),
    [
        ((4, 3), Y, lambda out: nn.functional.cross_entropy(out, torch.zeros(4, dtype=torch.long))),
        (
            (4, 5, 7),
            torch.zeros(4, 5, dtype=torch.long),
            lambda out: nn.functional.cross_entropy(out.reshape(20, 7), torch.zeros(20, dtype=torch.long)),
        ),
        (
            (4, 3, 6, 6),
            torch.zeros(4, 6, 6, dtype=torch.long),
            lambda out: nn.functional.cross_entropy(out, torch.zeros(4, 6, 6, dtype=torch.long)),
        ),
        ((4, 5), torch.zeros(4, 5), lambda out: (out**2).mean()),
        ((4, 5, 2), torch.zeros(4, 9, 9), lambda out: out.mean()),
    ],
)
def test_the_loss_against_targets(
    shape: tuple[int, ...], example: Tensor, expected: Callable[[Tensor], Tensor]
) -> None:
    output = torch.randn(*shape)
    assert torch.allclose(loss_against(example)(output), expected(output))


@pytest.mark.parametrize(
    ("ask", "line"),
    [
        (lambda: dt.predict(One(), "A100", batch=16), "batch: is 16, a number; give batch_sizes=16"),
        (lambda: dt.predict(One(), "A100", batch=["a"]), "batch: a list without a tensor is no batch"),
        (lambda: dt.predict(WithLoss(), "A100", batch={"targets": Y, "z": Y}), "has no 'x'"),
        (lambda: dt.plan(One()), "devices: is missing"),
        (lambda: dt.plan(["torchrun", "a.py"], devices="8xH100", batch=X), "has no part beside a job or a command"),
        (lambda: dt.plan("held:One", devices="8xH100"), "was a model of a program that has ended"),
        (lambda: dt.Job.from_dict({"nme": "a"}), "job:nme: unknown field 'nme'; did you mean \"name\""),
        (lambda: dt.Cluster.from_dict({"nodes": []}), "cluster:nodes"),
        (lambda: dt.devices("H10"), "unknown device 'H10'"),
        (lambda: dt.plan("zoo:cifarnet", devices="4xH100").emit("slurn"), "slurn"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(ask: Callable[[], Any], line: str) -> None:
    with pytest.raises(dt.InputError, match=re.escape(line)):
        ask()


def test_devices_may_be_a_text_a_dict_or_a_cluster() -> None:
    cluster = dt.Cluster.from_dict(
        {"nodes": [{"name": "a", "count": 2, "devices": {"type": "H100", "count": 4}, "nic": "4x200Gbit"}]}
    )
    plans = [dt.plan("zoo:cifarnet", devices=devices, nodes=2) for devices in ("H100=8", {"H100": 8})]
    own, other = (plan.model_copy(update={"solve_seconds": 0.0}) for plan in plans)
    assert own == other
    on_cluster = dt.plan("zoo:cifarnet", devices=cluster)
    assert on_cluster.devices_per_node == {"H100": 4}
    slow = cluster.nodes[0].model_copy(update={"nic": None, "nic_gbit": 1.0})
    slower = dt.plan("zoo:cifarnet", "bsp", devices=cluster.model_copy(update={"nodes": [slow]}))
    assert slower.iteration_s >= on_cluster.iteration_s


def test_each_device_has_the_batch_and_no_model_is_taken_for_another(caplog: pytest.LogCaptureFixture) -> None:
    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    caplog.set_level(logging.INFO, "ddltool")
    narrow, wide = (dt.plan(Net(width), "bsp", devices="2xH100,1xV100", batch=(X, Y)) for width in (16, 16384))
    assert "12 samples a step, 3 x 4" in caplog.text
    assert narrow.job == wide.job == "Net"
    assert wide.iteration_s > narrow.iteration_s


def test_lengths_may_be_held(tmp_path: Path) -> None:
    lengths = [8, 1, 1, 2, 9, 9, 3, 3, 4, 5, 6, 7]
    file = tmp_path / "a.txt"
    file.write_text("\n".join(map(str, lengths)))
    asked: dict[str, Any] = {"replicas": 2, "total_batch": 4, "limit": 0}
    by_file, held, frame = (
        dt.balance(given, **asked) for given in (file, lengths, pd.DataFrame({"tokens": np.array(lengths)}))
    )
    assert by_file.remedies == held.remedies == frame.remedies
    assert list(held.to_frame().index) == [*held.remedies]


def test_every_result_is_shown_saved_and_made_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run-plan.json", "telemetry.jsonl", "profile.csv"):
        put(name)
    made = dt.plan("zoo:cifarnet", devices="8xH100")
    results: list[Artifact] = [
        dt.devices(),
        dt.devices("H100", product=["1024x1024x1024"]),
        dt.predict("zoo:cifarnet", "H100", batch_sizes=64),
        made,
        made.emit("accelerate"),
        dt.verify("run-plan.json", "telemetry.jsonl"),
        dt.fit("profile.csv"),
        dt.balance([1, 2, 3, 4, 5, 6, 7, 8, 9], replicas=2, total_batch=4, limit=0),
    ]
    for result in results:
        assert len(result.to_frame()) >= 1
        assert "<script" not in result._repr_html_()
        result.save("result.json")
        assert json.loads(Path("result.json").read_text())["kind"].startswith("ddltool.")
    assert [*dt.devices().to_frame()["name"]] == [device.name for device in dt.devices().devices]
    for result in (results[0], *results[2:4], *results[5:8]):
        assert result.chart().to_dict()["$schema"]
    held = dt.verify(dt.read("run-plan.json"), dt.read("telemetry.jsonl"))
    told = dt.verify("run-plan.json", "telemetry.jsonl")
    assert held.model_copy(update={"plan": told.plan, "telemetry": told.telemetry}) == told
    assert not told.passed  # its batches are others than the plan's


def test_the_loop_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first scripts of docs/api.md, as a reader would copy them; between them the job runs as it was planned."""
    monkeypatch.chdir(tmp_path)
    loop, check = re.findall(r"^```python\n(# \w+\.py\n.*?)^```$", PAGE.read_text(), re.M | re.S)[:2]
    assert len([line for line in loop.splitlines() if line.strip() and not line.startswith("#")]) <= 15
    for name, text in (("loop.py", loop), ("check.py", check)):
        Path(name).write_text(text)
    plan = runpy.run_path("loop.py")["plan"]
    assert "torchrun" in Path("launch.sh").read_text()
    rows = [
        {"kind": "ddltool.telemetry", "schema_version": 1, "step": step, "rank": rank, "world_size": plan.world_size}
        | {"num_nodes": 1, "device": row.device_type, "batch": row.local_batch_size, "total_batch": 0}
        | {"compute_s": row.compute_s, "wait_s": 0.0, "sync_s": 0.0, "step_s": plan.iteration_s, "memory_bytes": 1.0}
        for step in range(20)
        for rank, row in enumerate(row for row in plan.assignments for _ in range(row.devices))
    ]
    total = sum(row["batch"] for row in rows[: plan.world_size])
    Path("telemetry.jsonl").write_text("".join(json.dumps(row | {"total_batch": total}) + "\n" for row in rows))
    run = runpy.run_path("check.py")["run"]
    assert run.passed
    assert run.iteration.error == pytest.approx(0, abs=0.01)
    assert Path("report.html").stat().st_size > 10_000
