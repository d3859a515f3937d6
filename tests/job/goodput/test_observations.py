"""Telemetry as observations for a fit, and which of its runs is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from ddltool.analyzers.answers.reporting.report import section_of
from ddltool.analyzers.job.goodput.observations import from_frame
from ddltool.analyzers.job.goodput.throughput import ThroughputParams, iteration_time_s
from ddltool.artifact_files import read_any, read_artifact
from ddltool.errors import InputError
from ddltool.runtime.processes.line_files import prepare
from ddltool.telemetry import TelemetryRow, last_run, runs_of
from tests.conftest import Result
from tests.helpers.report_artifacts import write_telemetry

PARAMS = ThroughputParams(
    alpha_grad_s=0.02,
    beta_grad_s=0.01,
    alpha_sync_local_s=0.05,
    beta_sync_local_s=0.0,
    alpha_sync_node_s=0.0,
    beta_sync_node_s=0.0,
    gamma=1.0,
)


@pytest.mark.parametrize("passes", [None, 1, 4])
def test_samples_that_came_in_several_passes_are_counted_per_pass(passes: int | None) -> None:
    """Compute of the whole step and its batch are those of all passes; the model speaks of one."""
    count = passes or 1
    grad = 0.02 + 0.01 * 8
    row = {"rank": 0, "world_size": 2, "num_nodes": 1, "batch": 8 * count, "wait_s": 0.0}
    rows = [{**row, "step": step, "compute_s": grad * count, "sync_s": 0.05} for step in range(10)]
    if passes is not None:
        rows = [{**entry, "passes": passes} for entry in rows]
    seen = from_frame(pd.DataFrame(rows), "telemetry.jsonl")
    assert seen.local_batch_size.tolist() == [8.0]
    assert seen.grad_time_s.tolist() == pytest.approx([grad])
    assert seen.accumulation_steps.tolist() == [count - 1.0]
    assert seen.step_time_s[0] == pytest.approx(float(iteration_time_s(PARAMS, 1, 2, 8, count - 1)))


def table(*rows: tuple[str | None, int, int, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["run", "rank", "step", "world_size"])


# Each row: run, rank, step, processes; ranks write when they like.
NAMED = [("a", 0, 0, 2), ("a", 1, 0, 2), ("b", 1, 0, 2), ("a", 0, 1, 2), ("b", 0, 0, 2), ("b", 0, 1, 2)]


@pytest.mark.parametrize(
    ("rows", "runs"),
    [
        (NAMED, [0, 0, 1, 0, 1, 1]),
        ([(None, *row[1:]) for row in NAMED[:2]] + NAMED[2:3], [0, 0, 1]),  # a file that an earlier version began
        ([("", 0, 0, 2), ("", 1, 0, 2), ("", 0, 1, 2), ("", 1, 1, 2)], [0, 0, 0, 0]),
        ([("", 0, 0, 2), ("", 0, 1, 2), ("", 1, 0, 2), ("", 0, 0, 2), ("", 0, 1, 2)], [0, 0, 1, 1, 1]),  # rank 1 had died
        ([("", 0, 0, 2), ("", 1, 0, 2), ("", 0, 1, 1)], [0, 0, 1]),
    ],
)  # fmt: skip
def test_which_run_a_row_is_of(rows: list[tuple[str | None, int, int, int]], runs: list[int]) -> None:
    frame = table(*rows)
    assert runs_of(frame).tolist() == runs
    said: list[str] = []
    found = last_run(frame, "t.jsonl", said.append)
    assert found.index.tolist() == [place for place, run in enumerate(runs) if run == max(runs)]
    steps = len({rows[place][2] for place in found.index})
    assert said == ([f"t.jsonl: run 2 of 2, of {steps} steps"] if max(runs) else [])


def test_commands_take_the_last_run_and_fit_takes_all(
    tmp_path: Path, cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of which the second is the first, but twice as fast: what is said of both is said of the second alone."""
    monkeypatch.chdir(tmp_path)
    write_telemetry(Path("first.jsonl"), ranks=2, steps=30)
    first = [TelemetryRow.model_validate_json(line) for line in Path("first.jsonl").read_text().splitlines()]
    times = ("compute_s", "wait_s", "sync_s", "step_s")
    second = [row.model_copy(update={name: getattr(row, name) / 2 for name in times}) for row in first]
    for name, runs in {"second": [second], "both": [first, second]}.items():
        rows = [row.model_copy(update={"run": f"r{at}"}) for at, run in enumerate(runs) for row in run]
        Path(f"{name}.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in rows))
    for command in (["stragglers"], ["barrier"], ["balance", "--predictor", "last", "--warm-up", "20"]):
        alone, last = (cli(*command, f"{name}.jsonl", "--json") for name in ("second", "both"))
        assert (alone.code, last.code) == (0, 0), alone.err + last.err
        assert "both.jsonl: run 2 of 2, of 30 steps" in last.err
        texts = (made.out.replace("both.jsonl", "second.jsonl").splitlines() for made in (alone, last))
        one, other = ([line for line in text if "seconds" not in line] for text in texts)  # but for how long it took
        assert one == other
    lead = section_of(read_any(Path("both.jsonl"))).lead
    assert "Run 2 of 2, of 30 steps." in lead
    assert lead[0] == section_of(read_any(Path("second.jsonl"))).lead[0]
    assert read_artifact(Path("both.jsonl"))["rows"] == [
        {**row, "run": "r1"} for row in read_artifact(Path("second.jsonl"))["rows"]
    ]
    imported = cli("import", "both.jsonl", "--json")
    assert "both.jsonl: all of its 2 runs" in imported.err
    alone_rows, both_rows = (cli("import", name, "--json").document["rows"] for name in ("second.jsonl", "both.jsonl"))
    assert len(both_rows) == 2 * len(alone_rows)
    assert both_rows[len(alone_rows) :] == alone_rows


@pytest.mark.parametrize(
    ("held", "left"),
    [
        ('{"kind": "ddltool.telemetry"}\n{"kind": "ddl', '{"kind": "ddltool.telemetry"}\n'),
        ('{"kind": "ddltool.telemetry"}', '{"kind": "ddltool.telemetry"}\n'),  # whole, and only its end is missing
        ('{"kind": "ddltool.telemetry", "step', ""),
        ('{"kind": "ddltool.telemetry"}\n', '{"kind": "ddltool.telemetry"}\n'),
        ("", ""),
    ],
)
def test_a_file_is_made_ready_for_the_next_run(tmp_path: Path, held: str, left: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(held)
    prepare(path, "ddltool.telemetry", "telemetry")
    assert path.read_text() == left
    path.write_text("mine")
    with pytest.raises(InputError, match="holds something other than sync telemetry"):
        prepare(path, "ddltool.sync", "sync telemetry")
