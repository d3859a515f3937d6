"""``ddltool plan SOURCE --devices``: a job without a file, the whole run in time and money, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ddltool.analyzers.job.planning.job_inputs import job_of
from ddltool.errors import InputError
from ddltool.job import Job
from tests.conftest import Result

Cli = Callable[..., Result]
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


def test_a_run_in_hours_and_money_from_a_graph(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GRAPH.parent)  # a long path's name would take lines of its own
    asked = ("plan", GRAPH.name, "--devices", "V100=4@2,T4=4@0.5", "--batch-size", 256, "--bandwidth", "10Gbit")
    run = ("--samples", "50k", "--epochs", 90)
    found = cli(*asked, *run, "--json").document
    assert found["devices_per_node"] == dict.fromkeys({row["device_type"] for row in found["assignments"]}, 4)
    took = found["decision"]["run"]
    assert took["samples"] == 50_000 * 90
    assert took["hours"] == pytest.approx(took["samples"] / 256 * found["iteration_s"] / 3600)
    shown = cli(*asked, *run, "--mtbf", "50h,30s")
    first = shown.out.splitlines()[1]
    assert first.startswith("Use ")
    assert "The whole run takes" in shown.out
    assert "a checkpoint every" in " ".join(shown.out.split())
    assert max(len(line) for line in shown.out.splitlines()) <= 80
    cheap = cli(*asked, *run, "--objective", "cheapest", "--json").document
    assert cheap["decision"]["run"]["price"] <= took["price"] * (1 + 1e-9)
    late = cli(*asked, *run, "--deadline", "1s")
    assert late.code == 3
    assert "deadline: the whole run takes" in late.error_line


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
        (("--mtbf", "0s"), "--mtbf: is '0s'"),
        (("--objective", "fewest-devices"), "--objective: fewest-devices needs something to keep"),
        (("--samples", 5, "--budget", 1), "devices.V100.price_per_hour: is missing"),
    ],
)
def test_what_a_run_lacks_is_said(cli: Cli, options: tuple[object, ...], error: str) -> None:
    found = cli("plan", GRAPH, "--devices", "V100=4", "--bandwidth", "10Gbit", *options)
    assert found.code == 2
    assert error in found.error_line


def test_options_of_a_short_job_have_no_part_beside_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: a\nmax_workers: 2\ndevices: [{type: V100, count: 2, capability_per_s: 1}]\n"
    )
    found = cli("plan", tmp_path / "job.yaml", "--batch-size", 4)
    assert (found.code, "--batch-size: has no part in a plan of a job.yaml" in found.error_line) == (2, True)
