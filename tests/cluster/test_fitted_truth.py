"""A job's truth from a fitted model: against Pollux's formulas, through the simulator, and through the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.cluster.cluster import ClusterSpec
from ddltool.analyzers.cluster.job import JobSpec
from ddltool.analyzers.cluster.policies.gangs import Fifo
from ddltool.analyzers.cluster.policies.pollux import Pollux
from ddltool.analyzers.cluster.simulator import simulate
from ddltool.analyzers.cluster.truth import FittedJob, fitted_application
from ddltool.analyzers.job.goodput.throughput import ThroughputParams, efficiency, iteration_time_s, throughput_per_s
from ddltool.errors import InputError
from tests.conftest import Cli
from tests.helpers.workloads import FITTED, FOLDER, write_goodput

JOB = FittedJob(noise_scale=900.0, total_samples=2e5, batch_size=64, max_batch_size=4096, max_local_batch_size=256)


@given(st.integers(64, 4096), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 256))
def test_times_and_gains_are_those_of_the_formulas(batch: int, placement: list[int], local: int) -> None:
    made = fitted_application("a", {"*": FITTED}, JOB)
    step, sync = made.step_times(tuple(placement), local)
    assert step == pytest.approx(iteration_time_s(FITTED, len(placement), sum(placement), local))
    assert step - sync == pytest.approx(0.05 + 0.002 * local)
    gain = batch / 64 * float(efficiency(900.0, batch, 64))
    assert made.gain(batch, 3) == pytest.approx(gain)
    assert made.iterations(batch, made.max_epochs - 1) == pytest.approx(2e5 / 64 / gain, rel=1e-3)


def test_a_rigid_job_takes_the_samples_over_the_goodput() -> None:
    applications = {"a": fitted_application("a", {"*": FITTED}, JOB)}
    spec = JobSpec(name="j", submit_s=0.0, application="a", num_replicas=4, batch_size=512)
    made = simulate([spec], applications, ClusterSpec.homogeneous(2, 4), Fifo()).jobs[0]
    speed = float(throughput_per_s(FITTED, 1, 4, 128)) * float(efficiency(900.0, 512, 64))
    assert made.finish_s == pytest.approx(60 + 30 + 2e5 / speed)
    assert made.useful_samples == pytest.approx(2e5)
    adaptive = simulate([spec], applications, ClusterSpec.homogeneous(2, 4), Pollux()).jobs[0]
    assert adaptive.useful_samples == pytest.approx(2e5)
    assert adaptive.restarts > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("noise_scale", float("nan")),
        ("noise_scale", -1.0),
        ("total_samples", 1.0),
        ("total_samples", float("inf")),
        ("max_batch_size", 63),
        ("batch_size", 0),
        ("max_local_batch_size", 0),
    ],
)
def test_values_that_make_no_sense_are_refused(field: str, value: float) -> None:
    fields = {name: getattr(JOB, name) for name in FittedJob.__dataclass_fields__}
    with pytest.raises(InputError):
        FittedJob(**(fields | {field: value}))
    nothing = ThroughputParams(**(FITTED.model_dump() | {"alpha_grad_s": 0.0, "beta_grad_s": 0.0}))
    with pytest.raises(InputError, match="one gradient takes 0 s"):
        fitted_application("a", {"*": nothing}, JOB)


@pytest.fixture
def fitted(tmp_path: Path) -> Path:
    return write_goodput(tmp_path / "goodput.json")


def test_the_command_replays_fitted_jobs_and_says_what_it_assumes(cli: Cli, tmp_path: Path, fitted: Path) -> None:
    workload = tmp_path / "w.csv"
    workload.write_text("name,time,application,num_replicas,batch_size\nj,0,mine,4,512\nk,50,vision,1,128\n")
    model = f"mine={fitted},noise=900,samples=2e5,batch=64,max-batch=4096,max-local=256"
    base = ("simulate", workload, "--cluster", FOLDER / "cluster.yaml", "--policy", "fifo")
    result = cli(*base, "--traces", FOLDER / "traces", "--goodput", model, "--json", "--price", "2").done()
    assert "its errors are not replayed" in result.document["assumptions"][0]
    assert "constant noise scale 900" in result.err
    speed = float(throughput_per_s(FITTED, 1, 4, 128)) * float(efficiency(900.0, 512, 64))
    record = result.document["policies"]["fifo"]
    job = record["jobs"][0]
    assert job["finish_s"] == pytest.approx(60 + 30 + 2e5 / speed)
    assert job["cost"] == pytest.approx(2 * job["gpu_seconds"] / 3600)
    assert record["cost"]["jobs"] == pytest.approx(sum(each["cost"] for each in record["jobs"]))
    for bad, message in [
        (f"mine={fitted},noise=900,samples=2e5", "--goodput mine: lacks batch"),
        (f"mine={fitted},noise=x,samples=2e5,batch=64", "--goodput mine:noise: 'x' is no number"),
        (f"mine={fitted},noise=nan,samples=2e5,batch=64", "--goodput mine:noise: is nan"),
        (f"mine={tmp_path / 'none.json'},noise=1,samples=2e5,batch=64", "none.json"),
        ("mine", "--goodput: is 'mine'; APP=FILE"),
    ]:
        cli(*base, "--traces", FOLDER / "traces", "--goodput", bad).refuses(message)
    assert "--traces: are missing for application 'vision'" in cli(*base, "--goodput", model).error_line


def test_failures_and_tables_through_the_command(cli: Cli, tmp_path: Path) -> None:
    events = tmp_path / "events.csv"
    events.write_text("time,node,event\n600,0,fail\n1500,0,join\n2000,1,leave\n")
    base = ("simulate", FOLDER / "synthetic.csv", "--cluster", FOLDER / "cluster.yaml", "--traces", FOLDER / "traces")
    lost = ("--failures", events, "--mtbf", "2h", "--repair", "10m", "--checkpoint-interval", "5m")
    result = cli(*base, *lost, "--json").done()
    assert result.document["failures"] == {
        "mtbf_s": 7200.0,
        "repair_s": 600.0,
        "checkpoint_interval_s": 300.0,
        "checkpoint_s": 0.0,
        "events": 3,
        "seed": 0,
    }
    record = result.document["policies"]["pollux"]
    assert record["job_failures"] == sum(job["failures"] for job in record["jobs"]) > 0
    assert record["lost_gpu_hours"] * 3600 == pytest.approx(sum(job["lost_gpu_seconds"] for job in record["jobs"]))
    assert record["availability"] < 1
    saving = cli(*base, "--mtbf", "2h", "--checkpoint-write", "20s", "--policy", "fifo", "--json").done().document
    assert saving["failures"]["checkpoint_interval_s"] is None  # each job's own
    free = cli(*base, "--mtbf", "2h", "--policy", "fifo", "--json").done().document
    assert free["failures"]["checkpoint_interval_s"] == 600.0
    assert saving["policies"]["fifo"]["avg_jct_s"] > free["policies"]["fifo"]["avg_jct_s"]
    shown = cli(*base, *lost, "--metrics", "--price", "0.5", "--policy", "fifo,easyscale-heter")
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "medium" in shown.out
    for option, value, message in [
        ("--mtbf", "0", "mtbf: is 0 s"),
        ("--mtbf", "soon", "--mtbf: 'soon' is not a duration"),
        ("--price", "x", "--price: 'x' is no number"),
        ("--price", "V100=1", "--price: unknown price 'V100'"),
        ("--failures", FOLDER / "synthetic.csv", "node: no such column"),
    ]:
        cli(*base, option, value).refuses(message)
    events.write_text("time,node,event\n600,0,fial\n")
    assert "row 1:event: is fial; one of fail, leave, join" in cli(*base, "--failures", events).error_line
    events.write_text("time,node,event\n600,99,fail\n")
    assert "events.csv:row 1:node: is 99; nodes are 0 to" in cli(*base, "--failures", events).error_line
