"""The pytest plugin, in a sample project of its own: fixtures, gates, new baselines."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ddltool.graph import Graph, Op, write_graph
from ddltool.plans import Plan

pytest_plugins = ["pytester"]

PLUGIN = "ddltool.commands.pytest_plugin"
_POINTS = {point.value for point in importlib.metadata.entry_points(group="pytest11")}
# Where the package is installed with its entry point, pytest has the plugin already.
_LOAD = () if PLUGIN in _POINTS else ("-p", PLUGIN)
# Other plugins are imported anew in every inner session; they are not what is tested.
LOAD = (*_LOAD, "-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:xdist")


def plan(iteration_s: float) -> Plan:
    figures: dict[str, Any] = {"job": "j", "strategy": "est", "max_workers": 2, "batch_size": 8, "est_count": 2}
    figures |= {"waste": 0.0, "overload_factor": iteration_s, "status": "optimal", "gap": 0.0, "solve_seconds": 0.1}
    devices = {"device_type": "T4", "devices": 2, "ests_per_device": 1, "local_batch_size": 8}
    return Plan(**figures, iteration_s=iteration_s, throughput=2 / iteration_s, assignments=[devices])  # type: ignore[list-item]


@pytest.fixture
def sample(pytester: pytest.Pytester) -> Path:
    """A project with a plan, a graph and a profile in its folder of baselines, and a test of the plan."""
    folder = pytester.mkdir("ddltool-baselines")
    (folder / "plan.json").write_text(plan(1.0).model_dump_json(), encoding="utf-8")
    op = Op(name="x", kind="compute", resource="compute:0", duration_s=1.0)
    write_graph(Graph.from_ops("g", "inference", [op]), folder / "g.graph.json.gz")
    row = {"device": "cpu", "num_nodes": 1, "num_replicas": 1, "local_batch_size": 8, "step_time_s": 0.1}
    pd.DataFrame([{**row, "sync_time_s": 0.0, "step_time_spread_s": 0.001, "repeats": 9}]).to_csv(
        folder / "profile.csv", index=False
    )
    return folder


def gate_of(pytester: pytest.Pytester, iteration_s: float, call: str) -> None:
    """Write a test that gates a plan of that time, held in a file, in the form ``call`` names it."""
    pytester.path.joinpath("now.json").write_text(plan(iteration_s).model_dump_json(), encoding="utf-8")
    pytester.makepyfile(
        f"""
        import json
        from pathlib import Path
        from ddltool.artifacts import load
        from ddltool.plans import Plan

        def test_plan(assert_gate):
            path = Path("now.json")
            document, plan = json.loads(path.read_text()), load(path, Plan)
            verdict = assert_gate({call})
            assert verdict.passed and verdict.checks
        """
    )


def test_the_fixtures_read_the_folder(pytester: pytest.Pytester, sample: Path) -> None:
    pytester.makepyfile(
        """
        def test_all(ddltool_dir, ddltool_graph, ddltool_plan, ddltool_profile):
            assert ddltool_dir.name == "ddltool-baselines"
            assert len(ddltool_graph("g.graph.json.gz")) == 1
            assert ddltool_plan("plan.json").iteration_s == 1.0
            assert list(ddltool_profile("profile.csv")["local_batch_size"]) == [8]
            assert ddltool_plan("plan.json").model_dump()["kind"] == "ddltool.plan"

        def test_missing(ddltool_plan):
            ddltool_plan("none.json")

        def test_outside(ddltool_plan):
            ddltool_plan("../secret.json")
        """
    )
    result = pytester.runpytest_inprocess(*LOAD)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*none.json: no such file*"])
    result.stdout.fnmatch_lines(["*is not inside*"])
    result.stdout.no_fnmatch_line("*Traceback*")


@pytest.mark.parametrize("current", ["path", "str(path)", "plan", "document"])
def test_a_gate_passes_and_fails(pytester: pytest.Pytester, sample: Path, current: str) -> None:
    gate_of(pytester, 1.04, f'{current}, "plan.json"')
    pytester.runpytest_inprocess(*LOAD).assert_outcomes(passed=1)
    gate_of(pytester, 1.2, f'{current}, "plan.json"')
    result = pytester.runpytest_inprocess(*LOAD)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*2 of 3 checks failed against *plan.json*", "*iteration_s increase <= 5%: 1.2 s*1.05 s*"]
    )
    result.stdout.fnmatch_lines(["*pytest --ddltool-update*"])


def test_rules_come_from_the_call_then_the_configuration(pytester: pytest.Pytester, sample: Path) -> None:
    gate_of(pytester, 1.2, 'plan, "plan.json", rules=["iteration_s increase <= 30%"]')
    pytester.runpytest_inprocess(*LOAD).assert_outcomes(passed=1)
    pytester.path.joinpath("ddltool.toml").write_text('[gate.rules]\nplan = ["devices == 2"]\n', encoding="utf-8")
    gate_of(pytester, 1.2, 'plan, "plan.json"')
    pytester.runpytest_inprocess(*LOAD).assert_outcomes(passed=1)
    gate_of(pytester, 1.2, 'plan, "plan.json", rules=["itertion_s <= 3"]')
    result = pytester.runpytest_inprocess(*LOAD)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(['*did you mean "iteration_s"*'])


def test_update_accepts_a_new_baseline(pytester: pytest.Pytester, sample: Path) -> None:
    gate_of(pytester, 1.2, 'plan, "plan.json"')
    result = pytester.runpytest_inprocess(*LOAD, "--ddltool-update")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["ddltool: wrote baseline *plan.json"])
    assert json.loads((sample / "plan.json").read_text())["iteration_s"] == 1.2
    assert sorted(os.listdir(sample)) == ["g.graph.json.gz", "plan.json", "profile.csv"]  # nothing half-written
    pytester.runpytest_inprocess(*LOAD).assert_outcomes(passed=1)


def test_update_keeps_absolute_limits(pytester: pytest.Pytester, sample: Path) -> None:
    gate_of(pytester, 1.2, 'plan, "plan.json", rules=["iteration_s <= 1.1", "throughput >= -5%"]')
    pytester.runpytest_inprocess(*LOAD, "--ddltool-update").assert_outcomes(failed=1)
    assert json.loads((sample / "plan.json").read_text())["iteration_s"] == 1.0


def test_a_first_baseline_in_a_folder_of_ones_own(pytester: pytest.Pytester) -> None:
    gate_of(pytester, 1.0, 'path, "sub/new.json.gz"')
    result = pytester.runpytest_inprocess(*LOAD, "--ddltool-dir", "mine")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no such baseline*--ddltool-update*"])
    pytester.runpytest_inprocess(*LOAD, "--ddltool-dir", "mine", "--ddltool-update").assert_outcomes(passed=1)
    assert (pytester.path / "mine" / "sub" / "new.json.gz").is_file()
    pytester.runpytest_inprocess(*LOAD, "--ddltool-dir", "mine").assert_outcomes(passed=1)
    pytester.makeini("[pytest]\nddltool_dir = mine\n")
    pytester.runpytest_inprocess(*LOAD).assert_outcomes(passed=1)


def test_frames_and_graphs_are_gated_and_written(pytester: pytest.Pytester, sample: Path) -> None:
    path = pytester.makepyfile(
        """
        def test_frame(assert_gate, ddltool_profile):
            frame = ddltool_profile("profile.csv")
            assert assert_gate(frame, "profile.csv").noise_test
            assert_gate(frame, "new.csv", rules=["step_time_s <= 1 s"])

        def test_graph(assert_gate, ddltool_graph):
            assert_gate(ddltool_graph("g.graph.json.gz"), "new.graph.json.gz")

        def test_slower(assert_gate, ddltool_profile):
            frame = ddltool_profile("profile.csv")
            assert_gate(frame.assign(step_time_s=0.2), "profile.csv")

        def test_wrong_name(assert_gate, ddltool_profile):
            assert_gate(ddltool_profile("profile.csv"), "profile.json")

        def test_nothing_to_gate(assert_gate):
            assert_gate(3, "profile.csv")
        """
    )
    result = pytester.runpytest_inprocess(*LOAD, "--ddltool-update", "--deselect", f"{path.name}::test_slower")
    result.assert_outcomes(passed=2, failed=2, deselected=1)
    result.stdout.no_fnmatch_line("*During handling*")
    result.stdout.fnmatch_lines(["*name it .csv*", "*cannot gate a int*"])
    result = pytester.runpytest_inprocess(
        *LOAD, *(f"{path.name}::test_{name}" for name in ("frame", "graph", "slower"))
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*step_time_s increase <= 5%: 200 ms*"])


def test_a_session_without_gates_imports_nothing_heavy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_light():
            assert not {"numpy", "pydantic", "pandas", "torch"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess(*LOAD).assert_outcomes(passed=1)


def test_update_does_not_replace_a_baseline_of_another_kind(pytester: pytest.Pytester, sample: Path) -> None:
    (sample / "plan.json").write_text('{"kind": "ddltool.figures", "figures": {"a": 1.0}}', encoding="utf-8")
    gate_of(pytester, 1.0, "path, 'plan.json', ['iteration_s <= 9']")
    result = pytester.runpytest("--ddltool-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*plan.json: is a ddltool.figures; the current artifact is a ddltool.plan*"])
    assert "figures" in (sample / "plan.json").read_text(encoding="utf-8")


def test_update_replaces_a_broken_baseline(pytester: pytest.Pytester, sample: Path) -> None:
    (sample / "plan.json").write_text("{", encoding="utf-8")
    gate_of(pytester, 1.0, "path, 'plan.json', ['iteration_s <= 9']")
    pytester.runpytest("--ddltool-update").assert_outcomes(passed=1)
    assert json.loads((sample / "plan.json").read_text(encoding="utf-8"))["kind"] == "ddltool.plan"


def test_two_tests_cannot_write_one_baseline(pytester: pytest.Pytester, sample: Path) -> None:
    pytester.path.joinpath("now.json").write_text(plan(2.0).model_dump_json(), encoding="utf-8")
    pytester.path.joinpath("then.json").write_text(plan(3.0).model_dump_json(), encoding="utf-8")
    pytester.makepyfile(
        """
        def test_one(assert_gate):
            assert_gate("now.json", "plan.json", ["iteration_s <= 9"])

        def test_two(assert_gate):
            assert_gate("then.json", "./plan.json", ["iteration_s <= 9"])
        """
    )
    result = pytester.runpytest("--ddltool-update")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*plan.json: is the baseline of *::test_one too; give each test*"])
    assert json.loads((sample / "plan.json").read_text(encoding="utf-8"))["iteration_s"] == 2.0
