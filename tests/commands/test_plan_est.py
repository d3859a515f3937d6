"""``ddltool plan --strategy est`` with an order of objectives, nodes, and several jobs.
What jobs name: fitted models and fields that no plan can be made of are told with the file that they stand in.
``ddltool plan SOURCE --devices``: a job without a file, the whole run in time and money, and what is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.planning.failures import Failures
from ddltool.analyzers.job.planning.job_inputs import fabrics_of, job_of, written_in
from ddltool.analyzers.job.planning.options import PlanOptions
from ddltool.commands.main import run
from ddltool.commands.plan_options import SAVED as SAVED_IN_JOB
from ddltool.errors import InputError
from ddltool.goodput_model import ThroughputParams
from ddltool.graph import read_graph
from ddltool.job import DeviceOffer, Job
from tests.conftest import Cli

JOB = """
name: mixed
max_workers: 16
batch_size: 32
cluster: cluster.yaml
devices:
  - {type: V100, capability_per_s: 3.1, price_per_hour: 2.5}
  - {type: P100, capability_per_s: 2.4, price_per_hour: 1.4}
  - {type: T4, capability_per_s: 1.0, price_per_hour: 0.5}
"""
CLUSTER = """
nodes:
  - {name: big, count: 1, devices: {type: V100, count: 4}}
  - {name: mid, count: 2, devices: {type: P100, count: 2}}
  - {name: small, count: 4, devices: {type: T4}}
"""
PARAMS = {
    "alpha_grad_s": 0.01, "beta_grad_s": 0.001, "alpha_sync_local_s": 0.02, "beta_sync_local_s": 0.002,
    "alpha_sync_node_s": 0.4, "beta_sync_node_s": 0.05, "gamma": 1.5,
}  # fmt: skip
GOODPUT = {
    "kind": "ddltool.goodput", "schema_version": 1, "sources": ["x"], "params": PARAMS, "rmsle": 0, "mape": 0,
    "samples": 1, "fit_seconds": 0, "undetermined": [],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "second.yaml").write_text(JOB.replace("16", "8").replace("mixed", "second"))
    (tmp_path / "goodput.json").write_text(json.dumps(GOODPUT))
    (tmp_path / "networked.yaml").write_text(JOB + "network: goodput.json\n")
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:  # type: ignore[type-arg]
    assert run(["plan", *(str(argument) for argument in arguments), "--strategy", "est", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert isinstance(made, dict)
    return made


def devices(made: dict) -> dict[str, int]:  # type: ignore[type-arg]
    found: dict[str, int] = {}
    for row in made["assignments"]:
        found[row["device_type"]] = found.get(row["device_type"], 0) + row["devices"]
    return found


def test_an_order_of_objectives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert devices(plan(capsys, folder / "job.yaml")) == {"V100": 4, "P100": 4}
    assert devices(plan(capsys, folder / "job.yaml", "--prefer", "price")) == {"T4": 1}
    assert devices(plan(capsys, folder / "job.yaml", "--prefer", "devices, throughput")) == {"V100": 1}


def test_nodes_and_network(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(capsys, folder / "networked.yaml")
    assert (made["network"]["num_nodes"], made["network"]["num_replicas"]) == (3, 8)
    assert made["network"]["sync_s"] == pytest.approx(0.4 + 0.05 * 6)
    assert made["iteration_s"] == pytest.approx((made["overload_factor"] ** 1.5 + 0.7**1.5) ** (1 / 1.5))
    slow = {**GOODPUT, "params": {**PARAMS, "alpha_sync_node_s": 9.0}}
    (folder / "goodput.json").write_text(json.dumps(slow))
    assert devices(plan(capsys, folder / "networked.yaml")) == {"V100": 4}
    assert run(["plan", str(folder / "networked.yaml"), "--strategy", "est"]) == 0
    assert "one node: 4 devices on 1" in capsys.readouterr().out


def test_several_jobs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for share in ("sum", "max-min"):
        made = plan(capsys, folder / "job.yaml", "--with", folder / "second.yaml", "--share", share)
        assert made["gap"] == 0
        used = [devices(job["plan"]) for job in made["jobs"]]
        assert all(sum(each.get(name, 0) for each in used) <= 4 for name in ("V100", "P100", "T4"))
        smallest = min(job["relative"] for job in made["jobs"])
        assert made["value"] == pytest.approx(
            smallest if share == "max-min" else sum(j["relative"] for j in made["jobs"])
        )
    assert run(["plan", str(folder / "job.yaml"), "--strategy", "est", "--with", str(folder / "second.yaml")]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["job.yaml", "--strategy", "bsp", "--prefer", "price"], "--prefer: has no part in --strategy bsp"),
        (["job.yaml", "--strategy", "est", "--prefer", "speed"], "objective: unknown objective 'speed'"),
        (["networked.yaml", "--strategy", "est", "--prefer", "price"], "--prefer: does not go with network"),
        (
            ["job.yaml", "--strategy", "est", "--with", "second.yaml", "--share", "fair"],
            "--share: unknown share 'fair'",
        ),
        (["job.yaml", "--strategy", "est", "--with", "networked.yaml"], "network: is not part of a joint plan"),
        (["job.yaml", "--strategy", "est", "--max-gap", "3"], "--max-gap: has no part in --strategy est"),
        (["job.yaml", "--strategy", "lb-bsp", "--top-k", "3"], "--top-k: has no part in --strategy lb-bsp"),
        (["job.yaml", "--strategy", "est", "--share", "sum"], "--share: has no part in a plan of one job"),
        (
            ["job.yaml", "--strategy", "est", "--with", "second.yaml", "--top-k", "2"],
            "--top-k: has no part in a plan of several",
        ),
        *(
            (
                ["job.yaml", "--strategy", "est", "--with", "second.yaml", option, value],
                f"{option}: has no part in a plan of several jobs; leave it out, or leave out --with",
            )
            for option, value in (("--prefer", "price"), ("--graph", "none.json"), ("--output", "x.json"))
        ),
        (["job.yaml", "--time-limit", "nan"], "--time-limit: is nan; give a number"),
        (["job.yaml", "--time-limit", "0"], "--time-limit: is 0; give a number of at least 0.01"),
    ],
)
def test_what_does_not_go_together(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    assert run(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_network_needs_nodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = JOB.replace("cluster: cluster.yaml", "network: goodput.json").replace("}", ", count: 4}")
    (folder / "alone.yaml").write_text(alone)
    assert run(["plan", str(folder / "alone.yaml"), "--strategy", "est"]) == 2
    assert "network: needs cluster: beside it" in capsys.readouterr().err


def limited(folder: Path, name: str, constraints: str, text: str = JOB) -> Path:
    """Write a job with constraints."""
    path = folder / name
    path.write_text(f"{text}constraints: {{{constraints}}}\n")
    return path


@pytest.mark.parametrize("strategy", ["auto", "bsp", "lb-bsp", "elastic-bsp", "est"])
def test_no_strategy_is_slower_than_the_job_allows(
    folder: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    """Whatever is planned reaches min_throughput, and one that cannot is refused with both figures."""
    reached = {"bsp": 12.19, "est": 19.2, "lb-bsp": 25.6, "elastic-bsp": 26, "auto": 26}[strategy]
    for least in (6, 13, 30):
        file = limited(folder, "fast.yaml", f"min_throughput: {least}")
        code = run(["plan", str(file), "--strategy", strategy, "--json"])
        shown = capsys.readouterr()
        if code == 0:
            assert json.loads(shown.out)["throughput"] >= least
        else:
            assert code == 3
            assert f"fast.yaml: {'no strategy has a plan: ' if strategy == 'auto' else ''}" in shown.err
            assert f"min_throughput: at least {least}" in shown.err
        assert code == (0 if least <= reached else 3)


def test_auto_maps_over_several_types_when_one_is_not_enough(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(limited(folder, "mixed.yaml", "min_throughput: 13")), "--json"]) == 0
    options = {each["strategy"]: each for each in json.loads(capsys.readouterr().out)["decision"]["options"]}
    assert options["est"]["determinism"] == "D0"
    assert len(options["est"]["devices"]) > 1
    assert options["est"]["throughput"] >= 13
    assert run(["plan", str(limited(folder, "one.yaml", "min_throughput: 12")), "--json"]) == 0
    options = {each["strategy"]: each for each in json.loads(capsys.readouterr().out)["decision"]["options"]}
    assert (options["est"]["determinism"], len(options["est"]["devices"])) == ("D1", 1)


def test_unknown_kernels_are_not_hardware_agnostic(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(limited(folder, "d2.yaml", "determinism: D2")), "--strategy", "est", "--json"]) == 0
    shown = capsys.readouterr()
    assert len(devices(json.loads(shown.out))) == 1
    assert "D2: nothing says which kernels the model uses, so the plan keeps to one device type" in shown.err
    sure = limited(folder, "sure.yaml", "determinism: D2, hardware_agnostic: true")
    assert len(devices(plan(capsys, sure))) > 1


def test_the_job_that_cannot_run_or_has_to_wait_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broke = limited(folder, "broke.yaml", "max_price_per_hour: 0.1", JOB.replace("mixed", "broke"))
    assert run(["plan", str(folder / "job.yaml"), "--strategy", "est", "--with", str(broke)]) == 3
    assert "broke.yaml: max_price_per_hour" in capsys.readouterr().err
    slow = limited(folder, "slow.yaml", "min_throughput: 40", JOB.replace("mixed", "slow"))
    assert run(["plan", str(folder / "job.yaml"), "--strategy", "est", "--with", str(slow)]) == 3
    assert f"error: {slow}: min_throughput: at least 40" in capsys.readouterr().err
    first = limited(folder, "first.yaml", "min_throughput: 15")
    second = limited(folder, "later.yaml", "min_throughput: 12", JOB.replace("mixed", "later"))
    made = plan(capsys, first, "--with", second)
    (waiting,) = (job for job in made["jobs"] if job["plan"] is None)
    found = re.search(
        r"waits: on what the others leave it would reach ([0-9.]+) mini-batches/s, below its", waiting["waits"]
    )
    assert found is not None
    assert 0 < float(found[1]) < 15


SOURCE_JOB = """\
name: same
max_workers: 4
batch_size: 8
devices:
  - {type: V100, count: 2, capability_per_s: 3.0}
  - {type: T4, count: 2, capability_per_s: 1.0}
"""
FITTED_JOB = """\
name: fitted
max_workers: 4
batch_size: 8
devices: [{type: V100, count: 4, goodput: fit.json}]
goodput: {max_batch_size: 256, max_local_batch_size: 64}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(SOURCE_JOB)
    Path("fitted.yaml").write_text(FITTED_JOB)
    return tmp_path


def write_fit(**changed: float) -> None:
    params = {**dict.fromkeys(ThroughputParams.model_fields, 0.01), "gamma": 1.0, **changed}
    document = {
        **{"kind": "ddltool.goodput", "schema_version": 1, "sources": [], "undetermined": [], "params": params},
        **{"rmsle": 0.0, "samples": 8},
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


@pytest.mark.parametrize("strategy", ["auto", "lb-bsp", "goodput"])
def test_a_model_whose_passes_take_no_number(here: Path, cli: Cli, strategy: str) -> None:
    write_fit(alpha_grad_s=5e-324, beta_grad_s=0.0)
    result = cli("plan", "fitted.yaml", "--strategy", strategy)
    assert result.code == 2
    assert result.error_line.startswith("fit.json:params: say that a pass over 8 samples takes ")


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        ("weight: 0", 2, "b.yaml:weight: is 0; give a number above 0 (at least 1e-09)"),
        ("constraints: {min_throughput: 1e6}", 3, "b.yaml: min_throughput: at least 1e+06"),
        ("constraints: {memory_per_worker_gib: 4}", 2, "b.yaml:devices.T4.memory_gib: is missing"),
    ],
)
def test_a_joint_plan_names_the_file_at_fault(here: Path, cli: Cli, lines: str, code: int, message: str) -> None:
    """Both jobs are of one name: only the file tells them apart."""
    Path("b.yaml").write_text(f"{SOURCE_JOB}{lines}\n")
    result = cli("plan", "a.yaml", "--strategy", "est", "--with", "b.yaml")
    assert result.code == code
    assert result.error_line.startswith(message)


def test_a_joint_plan_keeps_the_names_of_the_jobs(here: Path, cli: Cli) -> None:
    Path("b.yaml").write_text(SOURCE_JOB.replace("same", "other"))
    result = cli("plan", "a.yaml", "--strategy", "est", "--with", "b.yaml", "--json")
    assert [each["plan"]["job"] for each in result.document["jobs"]] == ["same", "other"]


@pytest.mark.parametrize("strategy", ["auto", "est", "bsp"])
def test_a_plan_of_one_job_names_its_file_too(here: Path, cli: Cli, strategy: str) -> None:
    Path("b.yaml").write_text(f"{SOURCE_JOB}constraints: {{memory_per_worker_gib: 4}}\n")
    result = cli("plan", "b.yaml", "--strategy", strategy)
    assert result.code == 2
    assert result.error_line.startswith("b.yaml:devices.T4.memory_gib: is missing; ")


def test_an_objective_in_the_place_of_a_strategy_is_told_where_it_belongs(cli: Cli) -> None:
    result = cli("plan", "any.yaml", "--strategy", "fastest")
    assert (result.code, result.err) == (2, "error: --strategy: fastest is an objective; give --objective fastest\n")


GRAPH = Path(__file__).parents[2] / "fixtures" / "graphs" / "resnet32-training.graph.json.gz"


def test_nodes_are_shared_in_proportion_and_workers_divide_the_batch() -> None:
    made = job_of("zoo:resnet32", "A100=8,V100=4@1.5", nodes=3, batch_size=32, precision="bf16", optimizer=None)
    assert [(it.type, it.count, it.per_node, it.price_per_hour) for it in made.devices] == [
        ("A100", 8, 4, None),
        ("V100", 4, 4, 1.5),
    ]
    assert (made.max_workers, made.batch_size, made.precision, made.name) == (8, 4, "bf16", "resnet32")
    assert [it.per_node for it in job_of("m", "A100=20,L4=3").devices] == [8, 3]
    assert job_of("m", "L4=2,L4=3").devices[0].count == 5  # two lines of one type


def test_what_is_said_of_the_job_reaches_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Job] = []

    def planned(job: Job, *rest: object, **more: object) -> None:
        seen.append(job)
        raise InputError("job", "was seen", "that is all")

    monkeypatch.setattr("ddltool.commands.plan.read_with_specs", planned)
    said = ("--precision", "amp", "--optimizer", "sgd", "--sequence-length", 512, "--batch-size", 16)
    assert cli("plan", "timm:resnet18", "--devices", "A100=8", *said).code == 2
    job = seen[0]
    assert (job.precision, job.optimizer, job.sequence_length, job.max_workers * job.batch_size) == (
        "fp16",
        "sgd",
        512,
        16,
    )


@pytest.mark.parametrize(
    ("devices", "more", "error"),
    [
        ("A100", {}, "--devices: 'A100' is not TYPE=N"),
        ("A100=0", {}, "--devices: 'A100=0' offers none"),
        ("A1000=8", {}, "--devices: unknown device 'A1000'; did you mean \"A100\""),
        ("A100=8,V100=4", {"nodes": 1}, "--nodes: is 1, for 12 devices of 2 types"),
        ("A100=8", {"nodes": 9}, "--nodes: is 9, for 8 devices of 1 type"),
        ("A100=8", {"precision": "fp4"}, "--precision: "),
        ("A100=8", {"nic": "fast"}, "--nic: "),
    ],
)
def test_what_is_wrong_names_its_option(devices: str, more: dict[str, object], error: str) -> None:
    with pytest.raises(InputError) as told:
        job_of("m", devices, **more)  # type: ignore[arg-type]
    assert str(told.value).startswith(error)


def test_a_speed_between_nodes_out_of_range_is_named() -> None:
    made = Job(name="m", max_workers=8, batch_size=1, devices=[DeviceOffer(type="A100", count=8, nic_gbit=1e20)])
    with pytest.raises(InputError, match=r"^nic_gbit: '1e\+20Gbit' is not a usable bandwidth"):
        fabrics_of(made, Path(), PlanOptions())


def test_a_run_in_hours_and_money_from_a_graph(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GRAPH.parent)  # a long path's name would take lines of its own
    asked = ("plan", GRAPH.name, "--devices", "V100=4@2,T4=4@0.5", "--batch-size", 256, "--bandwidth", "10Gbit")
    run = ("--samples", "50k", "--epochs", 90)
    found = cli(*asked, *run, "--json").document
    assert found["devices_per_node"] == dict.fromkeys({row["device_type"] for row in found["assignments"]}, 4)
    took = found["decision"]["run"]
    assert took["samples"] == 50_000 * 90
    assert took["hours"] == pytest.approx(took["samples"] / 256 * found["iteration_s"] / 3600)
    shown = cli(*asked, *run, "--mtbf", "50h", "--checkpoint-write", "30s")
    first = shown.out.splitlines()[0]
    assert first.startswith("Use ")
    assert "The whole run takes" in shown.out
    assert "a checkpoint every" in " ".join(shown.out.split())
    assert max(len(line) for line in shown.out.splitlines()) <= 80
    cheap = cli(*asked, *run, "--objective", "cheapest", "--json").document
    assert cheap["decision"]["run"]["price"] <= took["price"] * (1 + 1e-9)
    cli(*asked, *run, "--deadline", "1s").refuses("deadline: the whole run takes", code=3)


def test_what_failures_leave_of_a_run(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints as large as the model's state, written beside training; the remedies in time and money, the best said."""
    monkeypatch.chdir(GRAPH.parent)
    asked = ("plan", GRAPH.name, "--devices", "V100=4@2", "--batch-size", 256, "--bandwidth", "10Gbit")
    run = ("--samples", "50k", "--epochs", 9000, "--optimizer", "adamw")
    fails = ("--mtbf", "50h", "--storage", "1MB/s", "--checkpoint-copy", "2s", "--repair", "4h", "--spares", 1)
    made = cli(*asked, *run, *fails, "--json").done().document["decision"]
    found, took = made["failures"], made["run"]
    trained = read_graph(GRAPH).trained_bytes  # parameters, and both moments of Adam, in float32
    assert found["checkpoint_bytes"] == found["process_bytes"] == pytest.approx(3 * trained)
    model = Failures(mtbf_s=50 * 3600.0, checkpoint_s=2.0, write_s=3 * trained / 1e6, repair_s=4 * 3600.0, spares=1)
    assert found["write_s"] == pytest.approx(model.write_s)
    assert found["checkpoint_interval_s"] == took["checkpoint_interval_s"] == pytest.approx(model.interval_s(4))
    plain = cli(*asked, *run, "--json").done().document["decision"]["run"]
    for name, (goodput, paid) in model.remedies(4).items():
        assert found["remedies"][name]["goodput"] == pytest.approx(goodput)
        assert found["remedies"][name]["hours"] == pytest.approx(plain["hours"] / goodput)
        assert found["remedies"][name]["price"] == pytest.approx(plain["price"] / goodput * paid / 4)
    best = max(found["remedies"], key=lambda name: found["remedies"][name]["goodput"])
    assert found["remedy"] == best
    assert took["hours"] == pytest.approx(found["remedies"][best]["hours"])
    assert took["low_hours"] < plain["low_hours"] * took["hours"] / plain["hours"]  # when failures come is chance, too
    shown = cli(*asked, *run, *fails)
    text = " ".join(shown.out.split())
    assert "A checkpoint of 5.3 MiB stops training for 2 s and is written in 5.57 s beside it; one every" in text
    assert "; best: keep spares (waiting for a failed device 7" in text
    assert max(len(line) for line in shown.out.splitlines()) <= 80
    levels = cli(*asked, "--mtbf", "50h", "--memory-checkpoint", "2s,90%", "--json").done().document["decision"]
    assert (levels["run"], levels["failures"]["per_storage"]) == (None, 16)
    told = cli(*asked, *run, "--mtbf", "2h", "--notice", "2m", "--json").done().document["decision"]
    assert told["failures"]["checkpoint_interval_s"] is told["run"]["checkpoint_interval_s"] is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--samples", "many"), "--samples: 'many' is no number of them"),
        (("--epochs", 3), "--epochs: of how many samples is not said"),
        (("--tokens", "1B"), "--tokens: nothing says how many tokens a sample has"),
        (("--samples", "1M", "--epochs", 1e300), "--epochs: makes 1e+306 samples; give a run of up to 1e+30"),
        (("--deadline", "1h"), "--deadline: limits a whole run, and how long that is nobody says; give --samples or"),
        (("--budget", 5), "--budget: limits a whole run"),
        (("--samples", 5, "--tokens", 5), "--samples: has no part beside --tokens"),
        (("--mtbf", "0s"), "--mtbf: is 0 s; from 1 to 3.2e+10 seconds"),
        (("--mtbf", "9h", "--spares", 1, "--repair", "0s"), "--spares: have no part where failed devices are back"),
        (("--notice", "2m"), "--notice: needs --mtbf; say how often a device fails"),
        (("--mtbf", "9h", "--memory-checkpoint", "2s"), "--memory-checkpoint: is '2s'; write its time and the share"),
        (
            ("--mtbf", "9h", "--storage", "1GB/s", "--checkpoint-write", "2s"),
            "--storage: has no part beside --checkpoint",
        ),
        (("--mtbf", "9h", "--checkpoint-copy", "0s"), "--checkpoint-copy: is 0 s; give a time above 0"),
        (("--mtbf", "9h", "--restart", "9999h"), "--restart: is 3.59964e+07 s; at most 604800 seconds (a week)"),
        (("--objective", "fewest-devices"), "--objective: fewest-devices needs something to keep"),
        (("--samples", 5, "--budget", 1), "devices.V100.price_per_hour: is missing"),
    ],
)
def test_what_a_run_lacks_is_said(cli: Cli, options: tuple[object, ...], error: str) -> None:
    cli("plan", GRAPH, "--devices", "V100=4", "--bandwidth", "10Gbit", *options).refuses(error)


def test_a_run_that_failures_never_let_end_is_refused(cli: Cli) -> None:
    asked = ("plan", GRAPH, "--devices", "V100=4", "--bandwidth", "10Gbit", "--samples", "1M", "--mtbf", "10s")
    cli(*asked).refuses("fails every", "takes 60 s and a restart 300 s: less than 1% of the time trains", code=3)


TINY = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
# A value of each option that a saved job holds.
SAVED: dict[str, tuple[object, ...]] = {
    "nodes": ("--nodes", 3), "batch_size": ("--batch-size", 24), "precision": ("--precision", "bf16"),
    "sequence_length": ("--sequence-length", 32), "optimizer": ("--optimizer", "adamw-8bit"), "compile": ("--compile",),
    "channels_last": ("--channels-last",),
    "attention": ("--attention", "eager"), "offload": ("--offload", "optimizer"), "lora": ("--lora", 4),
    "load_in_4bit": ("--lora", 4, "--load-in-4bit"),
    "link": ("--link", "pcie3"), "nic": ("--nic", "25Gbit"), "bandwidth": ("--bandwidth", "2.34Gbit"),
    "price": ("--price", "H100=2.5"), "devices_file": ("--devices-file", "own.yaml"),
}  # fmt: skip


def test_each_option_that_a_saved_job_holds_is_tried_below() -> None:
    beside = {"job", "devices", "save_job", "output", "as_json", "allow_code", "seed", "time_limit_s"}
    assert {*SAVED} == SAVED_IN_JOB - beside


@pytest.mark.slow
@settings(max_examples=8, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.sets(st.sampled_from(sorted(SAVED)), min_size=1, max_size=5))
def test_a_saved_job_has_the_answer_of_the_options_that_it_was_made_of(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(TINY))
    Path("own.yaml").write_text("kind: ddltool.devices\ndevices: [{name: OwnGPU, like: V100, memory_gib: 3}]\n")
    said = [word for name in sorted(names) for word in SAVED[name] if {"nic", "bandwidth"} - names or name != "nic"]
    devices = "4xH100,2xOwnGPU" if "devices_file" in names else "4xH100,2xA100"
    direct = cli("plan", "transformers:config.json", "--devices", devices, *said, "--save", "job.yaml", "--json")
    from_file = cli("plan", "job.yaml", "--json")
    assert (direct.code, from_file.code) == (0, 0), direct.err + from_file.err
    first, second = (json.loads(found.out) for found in (direct, from_file))
    for name in ("command", "solve_seconds"):
        del first[name], second[name]
    assert first == second


@pytest.mark.parametrize(
    "asked",
    [("predict", "--device", "Small"), ("plan", "--devices", "1xSmall", "--batch-size", 1, "--offload", "none")],
)
def test_each_remedy_where_nothing_fits_fits(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[object, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(TINY | {"vocab_size": 32000, "hidden_size": 512}))
    Path("own.yaml").write_text("kind: ddltool.devices\ndevices: [{name: Small, like: RTX4090, memory_gib: 1.42}]\n")
    command = (*asked, "--devices-file", "own.yaml", "transformers:config.json")
    refused = cli(*command)
    assert refused.code == 3
    options = re.search(r"(?:it fits|on these devices) with (.*)\n", refused.err)
    assert options is not None, refused.err
    remedies = options[1].split(" or ")
    assert "--precision bf16-pure" in remedies
    for remedy in remedies:
        assert cli(*command, *remedy.split()).code == 0, remedy


def test_what_no_job_holds_is_to_be_given_again(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_of = ("--samples", "1M", "--strategy", "bsp", "--latency", "1ms", "--bandwidth", "1Gbit")
    found = cli("plan", "zoo:cifarnet", "--devices", "2xA100", *run_of, "--save", "a.yaml")
    assert "note: a.yaml does not hold --strategy, --samples, --latency: give that again with it\n" in found.err
    model = Job(name="a", model="transformers:a/config.json", max_workers=1, devices=[DeviceOffer(type="A100")])
    assert written_in(model, Path("jobs")).model == "transformers:../a/config.json"
    assert written_in(model.model_copy(update={"model": "a.graph.json"}), Path("a")).model == "../a.graph.json"
    cards = cli("plan", "zoo:cifarnet", "--devices", "2xA100", "--bandwidth", "1Gbit", "--nic", "1Gbit")
    assert cards.err == "error: --nic: does not go with --bandwidth; cards by datasheet, or a rate as measured\n"


def test_options_of_a_short_job_have_no_part_beside_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: a\nmax_workers: 2\ndevices: [{type: V100, count: 2, capability_per_s: 1}]\n"
    )
    found = cli("plan", tmp_path / "job.yaml", "--batch-size", 4)
    assert (found.code, "--batch-size: has no part in a plan of a job.yaml" in found.error_line) == (2, True)
