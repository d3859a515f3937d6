"""``ddltool gate``: exit codes, every output, the configuration, and the examples for continuous integration.
The pytest plugin, in a sample project of its own: fixtures, gates, new baselines.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import json
import math
import os
import shlex
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from ddltool.analyzers.answers.gating.metrics import extract
from ddltool.analyzers.answers.gating.rules import default_rules
from ddltool.analyzers.answers.gating.verdict import judge, read_config, rules_for
from ddltool.commands.main import run
from ddltool.errors import InputError
from ddltool.graph import Graph, Op, write_graph
from ddltool.plans import Plan
from tests.conftest import Cli

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "ci"
JOB = """\
kind: ddltool.job
schema_version: 1
name: job
max_workers: 8
batch_size: 32
devices:
  - {type: V100, count: 2, capability_per_s: 4.0}
  - {type: T4, count: 4, capability_per_s: 1.5}
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job, its plan est.json, and the worse plan of an equal split bsp.json."""
    place = tmp_path_factory.mktemp("planned")
    with contextlib.chdir(place):
        Path("job.yaml").write_text(JOB, encoding="utf-8")
        for strategy in ("est", "bsp"):
            assert run(["plan", "job.yaml", "--strategy", strategy, "-o", f"{strategy}.json"]) == 0
    return place


@pytest.fixture
def project(planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, which is the working folder."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.chdir(shutil.copytree(planned, tmp_path, dirs_exist_ok=True))
    return tmp_path


def test_a_gate_that_passes(cli: Cli, project: Path) -> None:
    result = cli("gate", "est.json", "--baseline", "bsp.json")
    assert (result.code, result.err) == (0, "")
    assert "passed: 3 checks" in result.out
    assert max(map(len, result.out.splitlines())) <= 80


def test_a_gate_that_fails_names_check_baseline_and_limit(cli: Cli, project: Path) -> None:
    est, bsp = (json.loads(Path(name).read_text())["iteration_s"] for name in ("est.json", "bsp.json"))
    assert bsp > 1.05 * est
    result = cli("gate", "bsp.json", "--baseline", "est.json")
    assert result.code == 1
    line = result.error_line
    assert line.startswith("2 of 3 checks failed: iteration_s increase <= 5%: ")
    for value in (bsp, est, 1.05 * est):
        assert f"{1000 * value:.3g} ms" in line
    assert "FAIL" in result.out


def test_json_keeps_its_contract(cli: Cli, project: Path) -> None:
    arguments = ("gate", "bsp.json", "--baseline", "est.json", "--github", "--json", "--rule", "throughput>=-5%")
    result = cli(*arguments, "--rule", "iteration_s <= 2 s")
    assert result.code == 1
    document = result.document
    assert (document["kind"], document["artifact"], document["passed"]) == ("ddltool.gate", "ddltool.plan", False)
    first, second = document["checks"]
    est = json.loads(Path("est.json").read_text())
    assert (first["name"], first["passed"]) == ("throughput >= -5%", False)
    assert first["baseline"] == est["throughput"]
    assert first["limit"] == pytest.approx(0.95 * est["throughput"])
    assert (second["limit"], second["passed"], second["noise"]) == (2.0, True, None)
    annotations = [line for line in result.err.splitlines() if line.startswith("::")]
    assert len(annotations) == 1
    assert annotations[0].startswith("::error file=bsp.json,line=1,title=")


def test_all_files_are_written_whether_it_passes_or_fails(
    cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    for current, baseline, code in (("est.json", "bsp.json", 0), ("bsp.json", "est.json", 1)):
        outputs = ("--junit", "gate.xml", "--sarif", "gate.sarif", "--github")
        assert cli("gate", current, "--baseline", baseline, *outputs).code == code
        suite = ElementTree.parse("gate.xml").getroot().find("testsuite")
        assert suite is not None
        assert suite.get("failures") == ("2" if code else "0")
        results = json.loads(Path("gate.sarif").read_text())["runs"][0]["results"]
        assert len(results) == (2 if code else 0)
    text = Path("summary.md").read_text()
    assert text.index("gate: passed (") < text.index("gate: 2 of ") < text.index("checks failed")


def profile(path: str, seconds: float, seed: int, spread: float = 0.03, repeats: int = 10) -> Path:
    """Write a profile of four batch sizes with noise of a relative ``spread``."""
    random, rows = np.random.default_rng(seed), []
    for batch in (8, 16, 32, 64):
        times = seconds * batch * (1 + spread * random.standard_normal(repeats))
        low, median, high = np.percentile(times, [25, 50, 75])
        row = {"device": "cpu", "num_nodes": 1, "num_replicas": 2, "local_batch_size": batch, "step_time_s": median}
        rows.append({**row, "sync_time_s": 0.001, "step_time_spread_s": high - low, "repeats": repeats})
    pd.DataFrame(rows).to_csv(path, index=False)
    return Path(path)


def test_measured_profiles_are_judged_with_their_noise(cli: Cli, project: Path) -> None:
    before, same, slower = profile("a.csv", 0.01, 1), profile("b.csv", 0.01, 2), profile("c.csv", 0.013, 3)
    assert cli("gate", same, "--baseline", before).code == 0
    result = cli("gate", slower, "--baseline", before, "--json")
    failed = {check["metric"] for check in result.document["checks"] if not check["passed"]}
    assert "step_time_s" in failed
    assert all(name.startswith("step_time_s") for name in failed)
    noisy = profile("d.csv", 0.011, 4, spread=0.2, repeats=5)
    check = cli("gate", noisy, "--baseline", before, "--rule", "step_time_s <= +0%", "--json").document["checks"][0]
    assert (check["passed"], check["in_noise"]) == (True, True)
    assert "inside the noise" in check["note"]
    assert check["current"] > check["limit"]
    told = cli("gate", noisy, "--baseline", before, "--rule", "step_time_s <= +0%")
    assert "noise" in told.out
    assert "studentised" in told.out


def test_several_files_are_repeats(cli: Cli, project: Path) -> None:
    now = [profile(f"n{seed}.csv", 0.02, seed, repeats=1) for seed in range(5)]
    before = [profile(f"b{seed}.csv", 0.01, 10 + seed, repeats=1) for seed in range(5)]
    options = [argument for path in before for argument in ("--baseline", path)]
    result = cli("gate", *now, *options, "--rule", "step_time_s <= +5%", "--json")
    assert result.code == 1
    assert result.document["checks"][0]["noise"]["p"] < 0.01
    single = cli("gate", now[0], "--baseline", before[0], "--rule", "step_time_s <= +5%", "--json")
    assert "without repeats" in single.document["checks"][0]["note"]


def test_telemetry_is_read(cli: Cli, project: Path) -> None:
    row: dict[str, Any] = {"kind": "ddltool.telemetry", "schema_version": 1, "world_size": 1, "num_nodes": 1, "rank": 0}
    row |= {"device": "cpu", "batch": 8, "total_batch": 8, "wait_s": 0.0, "sync_s": 0.0, "memory_bytes": 1.0}
    lines = [json.dumps({**row, "step": n, "compute_s": 0.01, "step_s": 0.02 + 1e-4 * (n % 7)}) for n in range(60)]
    Path("telemetry.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert cli("gate", "telemetry.jsonl", "--baseline", "telemetry.jsonl").code == 0
    assert cli("gate", "telemetry.jsonl", "--rule", "step_s <= 15 ms").code == 1
    Path("bad.jsonl").write_text(lines[0].replace("0.01", '"fast"') + "\n", encoding="utf-8")
    assert "line 1:compute_s" in cli("gate", "bad.jsonl", "--rule", "step_s <= 15 ms").error_line


@pytest.mark.parametrize(
    "command",
    [
        ("trace", str(ROOT / "fixtures" / "graphs" / "alexnet_v2-training.graph.json.gz"), "--samples", "3", "--json"),
        ("barrier", str(ROOT / "fixtures" / "barrier" / "times.csv"), "--json"),
    ],
    ids=["trace", "barrier"],
)
def test_printed_documents_are_artifacts_too(cli: Cli, project: Path, command: tuple[str, ...]) -> None:
    document = cli(*command).document
    Path("now.json").write_text(json.dumps(document), encoding="utf-8")
    assert cli("gate", "now.json", "--baseline", "now.json").code == 0
    listed = cli("gate", "now.json", "--metrics", "--json").document["metrics"]
    found = {metric["name"]: metric["value"] for metric in listed}
    if command[0] == "trace":
        tac = document["schedules"]["tac"]
        assert (found["efficiency/tac"], found["iteration_s/tac"]) == (tac["efficiency"], tac["makespan_s"])
        assert found["parameter_bytes"] == document["graph"]["parameter_bytes"]
        assert found["exposed_s/ddp/best"] == document["collectives"]["ddp"]["best"]["exposed_s"]
        assert cli("gate", "now.json", "--rule", f"efficiency/tac >= {tac['efficiency'] + 0.01}").code == 1
    else:
        assert found["waiting_time_s/zipline"] == document["algorithms"]["zipline"]["waiting_time_s"]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all parts of a document, four levels deep."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(*at, key) for key, _ in inner]
    return found if len(at) == 3 else found + [place for one in found for place in places(_part(value, one[-1:]), one)]


def _part(value: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        value = value[key]
    return value


def test_damaged_documents_are_told_or_still_gated(cli: Cli, project: Path) -> None:
    graph = str(ROOT / "fixtures" / "graphs" / "alexnet_v2-training.graph.json.gz")
    documents = [cli("trace", graph, "--samples", "2", "--json").document, json.loads(Path("est.json").read_text())]
    documents.append(cli("barrier", ROOT / "fixtures" / "barrier" / "times.csv", "--json").document)
    random, told = Random(5), list[str]()
    for whole in documents:
        spots = places(whole)
        for _ in range(100):
            damaged = copy.deepcopy(whole)
            place = random.choice(spots)
            holder = _part(damaged, place[:-1])
            holder[place[-1]] = random.choice(["x", None, -1, math.inf, math.nan, [], {}, True, 1e308, [1], {"a": 1}])
            try:
                figures = extract(damaged, "damaged").metrics
                judge(default_rules(whole["kind"]), figures, extract(whole, "whole").metrics)
            except InputError as error:
                told.append(str(error))
    assert len(told) > 50
    assert all(len(line.splitlines()) == 1 for line in told)


def test_a_folder_of_baselines_and_a_configuration(cli: Cli, project: Path) -> None:
    Path("main").mkdir()
    Path("main/bsp.json").write_bytes(Path("est.json").read_bytes())
    assert cli("gate", "bsp.json", "--baseline", "main").code == 1
    assert "no such file" in cli("gate", "est.json", "--baseline", "main").error_line
    text = '[gate]\nbaseline = "main"\n[gate.rules]\nplan = ["iteration_s increase <= 200%"]\n'
    Path("ddltool.toml").write_text(text, encoding="utf-8")
    document = cli("gate", "bsp.json", "--json").document
    assert (document["passed"], document["rules_from"]) == (True, "ddltool.toml")
    assert document["baseline"] == ["main/bsp.json"]
    # What the command line says comes first.
    assert cli("gate", "bsp.json", "--rule", "iteration_s increase <= 1%").code == 1
    Path("other.toml").write_text('[gate.rules]\nplan = ["devices <= 1"]\n', encoding="utf-8")
    assert cli("gate", "bsp.json", "--config", "other.toml").error_line.count("devices <= 1") == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[gate", "not valid TOML"),
        ("[other]", "no table [gate]"),
        ("[gate]\nrule = 3", 'did you mean "rules"'),
        ("[gate]\nlevel = 2.0", "give a number below 1"),
        ("[gate]\nbaseline = 3", "is 3; give a text"),
        ("[gate]\nrules = 3", "give a mapping"),
        ('[gate.rules]\nplans = ["a <= 1"]', 'did you mean "plan"'),
        ("[gate.rules]\nplan = 3", "give a list"),
    ],
)
def test_configurations_that_are_wrong_are_told(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "ddltool.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_config(path)
    assert part in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["est.json"], "give --baseline"),
        (["est.json", "--baseline", "job.yaml"], "'ddltool.job' has no figures"),
        (["est.json", "--baseline", "t.csv"], "one kind"),
        (["est.json", "--rule", "iteration <= 1"], 'did you mean "iteration_s"'),
        (["est.json", "--rule", "iteration_s"], "is no rule"),
        (["est.json", "t.csv", "--rule", "iteration_s <= 1"], "expected 'ddltool.plan'"),
        (["est.json", "--rule", "gap <= 1", "--level", "2"], "between 0 and 1"),
        (["est.json", "--rule", "gap <= 1", "--junit", "no/such/gate.xml"], "cannot be written"),
        (["none.json"], "no such file"),
        (["est.json", "--config", "none.toml"], "no such file"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, project: Path, arguments: list[str], part: str) -> None:
    profile("t.csv", 0.01, 1)
    cli("gate", *arguments).refuses(part)


# ---- examples


def _of_github(template: dict[Any, Any]) -> tuple[list[str], list[str]]:
    """The commands of GitHub's workflow, and the files that it uploads."""
    assert set(template) == {"name", True, "permissions", "jobs"}  # YAML 1.1 reads the key `on` as true
    steps = template["jobs"]["gate"]["steps"]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    uploads = [step["with"] for step in steps if "upload" in step.get("uses", "")]
    return [step["run"] for step in steps if "run" in step], [uploads[0]["sarif_file"], *uploads[1]["path"].split()]


def _of_gitlab(template: dict[Any, Any]) -> tuple[list[str], list[str]]:
    """The commands of GitLab's job, and the files that it keeps."""
    (job,) = template.values()
    assert set(job) == {"image", "rules", "before_script", "script", "artifacts"}
    return job["script"], [*job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]]


@pytest.mark.parametrize(("file", "read"), [("github-gate.yml", _of_github), ("gitlab-gate.yml", _of_gitlab)])
def test_the_pipelines_run_here(
    cli: Cli, project: Path, file: str, read: Callable[[dict[Any, Any]], tuple[list[str], list[str]]]
) -> None:
    lines, kept = read(yaml.safe_load((EXAMPLES / file).read_text(encoding="utf-8")))
    commands = [shlex.split(line) for line in lines if line.startswith("ddltool ")]
    assert [command[1] for command in commands] == ["plan", "gate"]
    Path("ddltool-baselines").mkdir()
    Path("ddltool-baselines/plan.json").write_bytes(Path("est.json").read_bytes())
    for command in commands:
        assert cli(*command[1:]).code == 0
    assert all(Path(path).is_file() for path in kept)


def test_the_pre_commit_hook_and_the_rules_run_here(cli: Cli, project: Path) -> None:
    settings = yaml.safe_load((EXAMPLES / "pre-commit-config.yaml").read_text(encoding="utf-8"))
    (hook,) = settings["repos"][0]["hooks"]
    assert {"id", "name", "entry", "language"} <= set(hook)
    Path("ddltool.toml").write_bytes((EXAMPLES / "ddltool.toml").read_bytes())
    Path("ddltool-baselines").mkdir()
    for baseline, code in (("est.json", 0), ("bsp.json", 0)):
        Path("ddltool-baselines/plan.json").write_bytes(Path(baseline).read_bytes())
        Path("plan.json").write_bytes(Path("est.json").read_bytes())
        assert cli(*shlex.split(hook["entry"])[1:]).code == code
    Path("plan.json").write_bytes(Path("bsp.json").read_bytes())
    Path("ddltool-baselines/plan.json").write_bytes(Path("est.json").read_bytes())
    assert cli(*shlex.split(hook["entry"])[1:]).code == 1
    for kind in ("plan", "profile"):
        rules, origin = rules_for(f"ddltool.{kind}", [], read_config(Path("ddltool.toml")))
        assert (len(rules) > 1, origin) == (True, "ddltool.toml")


@pytest.mark.parametrize("name", ["\udcff.json", "a\n::error::b.json"])
def test_any_name_of_a_file_is_gated(cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Names of files are bytes on Linux: one that is no UTF-8, and one that the runner would act on."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    Path(name).write_text('{"kind": "ddltool.figures", "figures": {"a": 1.0}}', encoding="utf-8")
    failed = cli("gate", name, "--rule", "a <= 0", "--junit", "j.xml", "--sarif", "s.json", "--github")
    assert failed.code == 1
    assert ElementTree.parse("j.xml").getroot().get("failures") == "1"
    assert json.loads(Path("s.json").read_text(encoding="utf-8"))["runs"][0]["results"]
    for text in (failed.out, failed.err, Path("summary.md").read_text(encoding="utf-8")):
        assert not any(line.lstrip().startswith("::error::b") for line in text.splitlines())
        assert all(character.isprintable() or character == "\n" for character in text)
    assert cli("gate", name, "--rule", "a <= 1", "--json").code == 0


def test_a_name_in_an_artifact_that_is_no_text(cli: Cli, project: Path) -> None:
    Path("sur.json").write_text('{"kind": "ddltool.figures", "figures": {"a\\ud800": 1.0}}', encoding="utf-8")
    cli("gate", "sur.json", "--rule", "* <= 0", "--junit", "j.xml", "--sarif", "s.json", "--github").refuses(
        r"a\ud800", code=1
    )


@pytest.mark.parametrize(
    ("now", "before", "change"),
    [(1e308, 0.3, None), (0.3, 1e308, -1.0), (1.7e308, 1e-308, None), (-1.7e308, 1.7e308, None), (2.0, 1.0, 1.0)],
)
@pytest.mark.parametrize("repeats", [1, 4])
def test_changes_beyond_what_a_number_holds(
    cli: Cli, project: Path, now: float, before: float, change: float | None, repeats: int
) -> None:
    """The figures are far apart; the report is whole, and JSON, and the page of the verdict is drawn."""
    for name, value in (("now", now), ("before", before)):
        document = {"kind": "ddltool.figures", "schema_version": 1, "figures": {"a_s": [value] * repeats}}
        Path(f"{name}.json").write_text(json.dumps(document))
    written = ["--junit", "j.xml", "--sarif", "s.json"]
    result = cli("gate", "now.json", "--baseline", "before.json", "--rule", "a_s increase <= 5%", "--json", *written)
    (check,) = result.document["checks"]
    assert result.code == (1 if now > before else 0)
    assert check["passed"] is (now < before)
    assert check["change"] == change if change is None else math.isclose(check["change"], change)
    assert all(value is None or not isinstance(value, float) or math.isfinite(value) for value in check.values())
    texts = (result.out, result.err, Path("j.xml").read_text(), Path("s.json").read_text())
    assert not any("inf" in text.replace("information", "") or "nan" in text for text in texts)
    ElementTree.parse("j.xml")
    json.loads(Path("s.json").read_text())
    Path("verdict.json").write_text(result.out)
    assert cli("report", "verdict.json", "-o", "page.html").code == 0


def test_the_page_of_a_verdict_about_texts(cli: Cli, project: Path) -> None:
    result = cli("gate", "est.json", "--baseline", "bsp.json", "--rule", "strategy unchanged", "--json")
    assert result.code == 1
    Path("verdict.json").write_text(result.out)
    assert cli("report", "verdict.json", "-o", "page.html").code == 0
    assert "== bsp" in Path("page.html").read_text()


@pytest.mark.parametrize(
    ("option", "value"), [("--baseline", "nothing.json"), ("--level", "0.05"), ("--junit", "j.xml"), ("--github", None)]
)
def test_the_list_of_metrics_takes_no_other_option(cli: Cli, project: Path, option: str, value: str | None) -> None:
    result = cli("gate", "est.json", "--metrics", option, *([] if value is None else [value]))
    assert (result.code, result.out) == (2, "")
    assert result.error_line == f"{option}: has no part in --metrics; leave it out"
    assert not Path("j.xml").exists()
    assert cli("gate", "est.json", "--metrics", "--json").document["artifact"] == "ddltool.plan"


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
