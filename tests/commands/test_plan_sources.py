"""What jobs name: fitted models and fields that no plan can be made of are told with the file that they stand in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result

Cli = Callable[..., Result]
PARAMS = (
    "alpha_grad_s",
    "beta_grad_s",
    "alpha_sync_local_s",
    "beta_sync_local_s",
    "alpha_sync_node_s",
    "beta_sync_node_s",
)
JOB = """\
name: same
max_workers: 4
batch_size: 8
devices:
  - {type: V100, count: 2, capability_per_s: 3.0}
  - {type: T4, count: 2, capability_per_s: 1.0}
"""
FITTED = """\
name: fitted
max_workers: 4
batch_size: 8
devices: [{type: V100, count: 4, goodput: fit.json}]
goodput: {max_batch_size: 256, max_local_batch_size: 64}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(JOB)
    Path("fitted.yaml").write_text(FITTED)
    return tmp_path


def write_fit(**changed: float) -> None:
    params = {**dict.fromkeys(PARAMS, 0.01), "gamma": 1.0, **changed}
    document = {
        "kind": "ddltool.goodput",
        "schema_version": 1,
        "sources": [],
        "undetermined": [],
        "params": params,
        "rmsle": 0.0,
        "samples": 8,
    }
    Path("fit.json").write_text(json.dumps({**document, "fit_seconds": 0.1, "mape": 0.0}))


@pytest.mark.parametrize("strategy", ["auto", "est", "bsp", "lb-bsp", "elastic-bsp", "goodput"])
def test_a_model_whose_passes_take_no_time(here: Path, cli: Cli, strategy: str) -> None:
    write_fit()
    assert cli("plan", "fitted.yaml", "--strategy", strategy).code == 0
    write_fit(alpha_grad_s=0.0, beta_grad_s=0.0)
    result = cli("plan", "fitted.yaml", "--strategy", strategy)
    wanted = "fit.json:params: say that a pass takes no time; alpha_grad_s or beta_grad_s must be above 0"
    assert (result.code, result.out, result.error_line) == (2, "", wanted)


@pytest.mark.parametrize("changed", [{"beta_grad_s": 1e308}, {"alpha_grad_s": 5e-324, "beta_grad_s": 0.0}])
@pytest.mark.parametrize("strategy", ["auto", "lb-bsp", "goodput"])
def test_a_model_whose_passes_take_no_number(here: Path, cli: Cli, strategy: str, changed: dict[str, float]) -> None:
    write_fit(**changed)
    result = cli("plan", "fitted.yaml", "--strategy", strategy)
    assert result.code == 2
    assert result.error_line.startswith("fit.json:params: say that a pass over 8 samples takes ")


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        ("weight: 1e308", 2, "b.yaml:weight: is 1e+308; give a number of at most 1e+09"),
        ("weight: 0", 2, "b.yaml:weight: is 0; give a number above 0"),
        ("constraints: {min_throughput: 1e6}", 3, "b.yaml: min_throughput: at least 1e+06"),
        ("constraints: {memory_per_worker_gib: 4}", 2, "b.yaml:devices.T4.memory_gib: is missing"),
        (
            "constraints: {max_price_per_hour: 1e12}",
            2,
            "b.yaml:constraints.max_price_per_hour: is 1000000000000.0; give a",
        ),
    ],
)
def test_a_joint_plan_names_the_file_at_fault(here: Path, cli: Cli, lines: str, code: int, message: str) -> None:
    """Both jobs are of one name: only the file tells them apart."""
    Path("b.yaml").write_text(f"{JOB}{lines}\n")
    result = cli("plan", "a.yaml", "--strategy", "est", "--with", "b.yaml")
    assert result.code == code
    assert result.error_line.startswith(message)


def test_a_joint_plan_keeps_the_names_of_the_jobs(here: Path, cli: Cli) -> None:
    Path("b.yaml").write_text(JOB.replace("same", "other"))
    result = cli("plan", "a.yaml", "--strategy", "est", "--with", "b.yaml", "--json")
    assert [each["plan"]["job"] for each in result.document["jobs"]] == ["same", "other"]


@pytest.mark.parametrize("strategy", ["auto", "est", "bsp"])
def test_a_plan_of_one_job_names_its_file_too(here: Path, cli: Cli, strategy: str) -> None:
    Path("b.yaml").write_text(f"{JOB}constraints: {{memory_per_worker_gib: 4}}\n")
    result = cli("plan", "b.yaml", "--strategy", strategy)
    assert result.code == 2
    assert result.error_line.startswith("b.yaml:devices.T4.memory_gib: is missing; ")


def test_an_objective_in_the_place_of_a_strategy_is_told_where_it_belongs(cli: Cli) -> None:
    result = cli("plan", "any.yaml", "--strategy", "fastest")
    assert (result.code, result.err) == (2, "error: --strategy: fastest is an objective; give --objective fastest\n")
