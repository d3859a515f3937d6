"""``import ddltool as dt``: a stable surface that loads nothing early, and does what the commands do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import ddltool as dt
from ddltool.profiles import read_profile
from ddltool.units import show_rate
from tests.conftest import Result

ROOT = Path(__file__).resolve().parents[2]
SURFACE = {
    *(
        *("trace", "predict", "profile", "fit", "plan", "simulate", "balance", "barrier", "gate", "report"),
        *("read", "record", "devices", "emit", "verify", "Job", "Cluster"),
    ),
    *("DdlToolError", "InputError", "Infeasible", "__version__"),
}
JOB = """
name: two
max_workers: 8
batch_size: 4
devices:
  - {type: V100, count: 4, capability_per_s: 3.1}
  - {type: T4, count: 4, capability_per_s: 1.0}
"""


def model() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(2, 3, 8, 8)


def test_the_surface_is_a_decision_and_is_documented() -> None:
    assert set(dt.__all__) == SURFACE
    page = (ROOT / "docs" / "api.md").read_text()
    assert set(re.findall(r"`dt\.(\w+)", page)) == SURFACE
    for name in SURFACE - {"__version__"}:
        assert getattr(dt, name).__doc__
        assert getattr(dt, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = dt.nothing


def test_importing_it_loads_nothing() -> None:
    code = "import sys; before = set(sys.modules); import ddltool; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = eval(done.stdout)
    ours = [name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names]
    assert ours == ["ddltool", "ddltool.showing"]
    assert not {"asyncio", "multiprocessing", "email", "pathlib"} & set(loaded)


def test_a_held_model_is_traced_as_a_named_one_and_stays_as_it_is(tmp_path: Path) -> None:
    held = model()
    weight = held[0][1].weight  # type: ignore[index]
    before = weight.detach().clone()
    held[0].eval()
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(2, 3, 8, 8)\n"
    )
    asked: dict[str, Any] = {"batch_sizes": [8, 32]}
    found = [dt.predict(source, "A100,T4", **asked).rows for source in (held, model, f"{file}:make")]
    rows = [[row.model_copy(update={"source": ""}) for row in one] for one in found]
    assert [one[0].source for one in found] == ["Sequential", "model", f"{file}:make"]
    assert rows[0] == rows[1] == rows[2]
    order = dt.trace(held, batch_size=8, samples=5, output=tmp_path / "graph.json")
    named = dt.trace(f"{file}:make", batch_size=8, samples=5)
    assert {key: one.makespan_s for key, one in order.schedules.items()} == {
        key: one.makespan_s for key, one in named.schedules.items()
    }
    assert dt.read(tmp_path / "graph.json").timed
    assert not held[0].training
    assert held[0][1].weight is weight  # type: ignore[index]
    assert weight.device.type == "cpu"
    assert torch.equal(weight, before)
    with pytest.raises(dt.InputError, match="a list is no model"):
        dt.predict([1], "A100", **asked)  # type: ignore[arg-type]
    with pytest.raises(dt.InputError, match="cannot be handed to other processes"):
        dt.profile(model()[0])


def test_functions_return_what_the_commands_print(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    made = dt.plan(tmp_path / "job.yaml", "est")
    result: Result = cli("plan", tmp_path / "job.yaml", "--strategy", "est", "--json")
    own, printed = json.loads(made.model_dump_json()), result.document
    for document in (own, printed):
        document.pop("solve_seconds")
    assert own == printed

    rows = ["device,num_nodes,num_replicas,local_batch_size,step_time_s,sync_time_s"]
    rows += [f"T4,1,{k},{m},{0.01 + 0.002 * m + 0.01 * (k > 1)},{0.01 * (k > 1)}" for k in (1, 2) for m in (4, 8, 16)]
    (tmp_path / "profile.csv").write_text("\n".join(rows) + "\n")
    fitted = dt.fit(tmp_path / "profile.csv")
    assert fitted.params == dt.fit(read_profile(tmp_path / "profile.csv")).params
    assert cli("fit", tmp_path / "profile.csv", "--json").document["params"] == fitted.params.model_dump()


def test_results_show_save_and_are_gated_and_reported(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    made = dt.plan(tmp_path / "job.yaml", "est")
    made.save(tmp_path / "plan.json")
    assert dt.read(tmp_path / "plan.json") == made
    frame = made.to_frame()
    assert isinstance(frame, pd.DataFrame)
    assert frame["device_type"].tolist() == [row.device_type for row in made.assignments]
    html = made._repr_html_()
    assert "<script" not in html
    assert f"{show_rate(made.throughput * made.batch_size)} samples/s" in html
    assert html.count("data:image/svg+xml") >= 1
    assert made.chart().to_dict()["vconcat"]
    with pytest.raises(dt.InputError, match="is no profile"):
        made.save(tmp_path / "plan.csv")

    steps = dt.predict(model(), "T4", batch_sizes=[4, 8])
    steps.save(tmp_path / "predicted.csv")
    assert read_profile(tmp_path / "predicted.csv")["local_batch_size"].tolist() == [4, 8]
    assert "80 % range" in steps._repr_html_()

    verdict = dt.gate(made, tmp_path / "plan.json", rules=["iteration_s increase <= 5%"])
    assert verdict.passed
    slower = made.model_copy(update={"iteration_s": 2 * made.iteration_s})
    assert not dt.gate(slower, made, rules=["iteration_s increase <= 5%"]).passed
    page = dt.report([made, verdict, tmp_path / "plan.json"], tmp_path / "r.html")
    assert [one.kind for one in page.sections] == ["ddltool.plan", "ddltool.plan", "ddltool.gate"]
    with pytest.raises(dt.InputError, match="has no section"):
        dt.report([object()], tmp_path / "r.html")


def test_hostile_names_stay_text_in_a_notebook(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    made = dt.plan(tmp_path / "job.yaml", "bsp")
    hostile = made.assignments[0].model_copy(update={"device_type": "<script>alert(1)</script>"})
    made = made.model_copy(update={"assignments": [hostile, *made.assignments[1:]]})
    assert "<script" not in made._repr_html_()
    assert "&lt;script&gt;" in made._repr_html_()


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Each code cell in one namespace, in order; its last expression is shown as a notebook shows it."""
    cells = json.loads((ROOT / "examples" / "first-look.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 4
    assert not any(cell.get("outputs") for cell in cells)  # results are made, not kept
    here = os.getcwd()
    os.chdir(tmp_path)
    space: dict[str, Any] = {}
    try:
        for text in code:
            exec(compile(text, "first-look.ipynb", "exec"), space)
    finally:
        os.chdir(here)
    assert space["verdict"].passed
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert "80 % range" in space["steps"]._repr_html_()
