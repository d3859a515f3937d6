"""``ddltool simulate``: keys, agreement with its own parts, and one line for every kind of bad input.
What is beside ``ddltool simulate``, through the commands: sweeps, and questions about one job.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ddltool.analyzers.cluster.inputs import read_applications
from ddltool.analyzers.cluster.policies import POLICIES
from ddltool.analyzers.cluster.policies.pollux import Pollux
from ddltool.analyzers.cluster.search import JobCosts, choose_counts, search
from ddltool.commands import verbs
from tests.cluster.test_advise import write_state
from tests.conftest import Cli, Result

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "workloads"
PLACES, EPOCHS = "placement,local_bsz,step_time,sync_time", "progress,iteration,metric,grad_sqr,grad_var"
HEADER = "name,time,application,num_replicas,batch_size"
JOB = {"name", "application", "submit_s", "start_s", "finish_s", "jct_s", "restarts", "gpu_seconds"}


@pytest.fixture
def run(cli: Cli) -> Cli:
    def call(*arguments: object, workload: Path = FOLDER / "synthetic.csv") -> Result:
        return cli(
            "simulate", workload, "--cluster", FOLDER / "cluster.yaml", "--traces", FOLDER / "traces", *arguments
        )

    return call


def test_json_keeps_its_contract(run: Cli, tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    result = run("--policy", "all", "--json", "-o", written)
    assert result.code == 0, result.err
    document = result.document
    assert list(document["policies"]) == list(POLICIES)
    assert (document["jobs"], document["gpus"]) == (24, 16)
    assert written.is_file()
    for record in document["policies"].values():
        jobs = record["jobs"]
        assert len(jobs) == 24
        assert all(set(job) == JOB | {"finish_time_fairness"} for job in jobs)
        jct = np.array([job["finish_s"] - job["submit_s"] for job in jobs])
        assert [job["jct_s"] for job in jobs] == pytest.approx(jct.tolist())
        assert record["avg_jct_s"] == pytest.approx(jct.mean())
        assert record["p99_jct_s"] == pytest.approx(np.percentile(jct, 99))
        assert record["makespan_s"] == pytest.approx(
            max(job["finish_s"] for job in jobs) - min(job["submit_s"] for job in jobs)
        )
        used = sum(job["gpu_seconds"] for job in jobs)
        assert record["utilization"] == pytest.approx(used / (16 * record["makespan_s"]))
        fairness = [job["finish_time_fairness"] for job in jobs]
        assert record["finish_time_fairness"]["max"] == max(fairness)
        assert record["finish_time_fairness"]["share_below_1"] == pytest.approx(np.mean(np.array(fairness) < 1))
        assert record["wall_seconds"] > 0
        assert record["restarts"] == sum(job["restarts"] for job in jobs)
    averages = {name: record["avg_jct_s"] for name, record in document["policies"].items()}
    assert averages["pollux"] < averages["tiresias"] < averages["fifo"]
    assert document["policies"]["fifo"]["restarts"] == 0


def test_same_seed_same_result(run: Cli) -> None:
    first, second = (run("--json", "--seed", 3).document["policies"]["pollux"]["jobs"] for _ in range(2))
    assert first == second


def test_longer_restarts_cost_time(run: Cli) -> None:
    averages = [
        run("--policy", "fifo", "--json", "--restart-delay", delay).document["policies"]["fifo"]["avg_jct_s"]
        for delay in (0, 30, 120)
    ]
    assert averages == sorted(averages)
    assert averages[0] + 30 <= averages[1] + 1e-6


@pytest.mark.slow
def test_the_table_has_a_row_per_policy_within_80_columns(run: Cli) -> None:
    result = run("--policy", "fifo,pollux")
    assert result.code == 0
    said = " ".join(result.out.split())
    assert "24 jobs of synthetic.csv on 16 GPUs, under 2 policies. Simulated from measured traces." in said
    rows = [line.split()[0] for line in result.out.splitlines() if line.strip()]
    assert "fifo" in rows
    assert "pollux" in rows
    assert max(map(len, result.out.splitlines())) <= 80
    widest = run("--policy", "fifo,easyscale-heter", "--restart-delay", 86_400)
    assert max(map(len, widest.out.splitlines())) <= 80
    figures = next(line for line in widest.out.splitlines() if line.strip().startswith("easyscale-heter")).split()
    assert len(figures) == 7  # the share of fair ones goes where names are wide
    assert "Times in h" in widest.out
    assert float(figures[3]) > 100  # hours


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a,1,vision,1,64", "b,x,vision,1,64"], "row 2:time: is x; a number >= 0"),
        (["a,1,vision,1,64", "b,1e300,vision,1,64"], "row 2:time: is 1e+300; seconds, at most 315360000"),
        (["a,1,vision,0,64"], "row 1:num_replicas: is 0; a whole number >= 1"),
        (["a,1,vision,1.5,64"], "row 1:num_replicas: is 1.5; a whole number >= 1"),
        (["a,1,vision,1,64", "a,2,vision,1,64"], "row 2:name: 'a' stands in row 1 too; name each job once"),
        (["a,1,visoin,1,64"], "holds no traces of application 'visoin'; did you mean \"vision\"?"),
        (["a,1,vision,17,64"], "job a:num_replicas: wants 17 GPUs of 16; it could never start"),
        (["a,1,vision,1,32"], "job a:batch_size: is 32; vision has 64 to 1024"),
        (["a,1,vision,1,64,9"], "row 1: has 6 fields; the header has 5"),
        (["a,1,vision,1,64", "", "b,1,vision"], "row 2: has 3 fields; the header has 5"),
        (["a,1,,1,64"], "row 1:application: is empty"),
        ([], "workload.csv: has no rows; expected columns name, time, application"),
    ],
)
def test_a_bad_row_is_named(run: Cli, tmp_path: Path, rows: list[str], message: str) -> None:
    path = tmp_path / "workload.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")
    run("--policy", "fifo", workload=path).refuses(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "polux"), "unknown policy 'polux'; did you mean \"pollux\"?"),
        (("--policy", "all,fifo"), "--policy: is 'all' with others; give all alone, or names"),
        (("--policy", ","), "--policy: names no policy"),
        (("--interval", "0"), "--interval: is 0.0; from 1 to 604800 seconds"),
        (("--interval", "1e300"), "--interval: is 1e+300; from 1 to 604800 seconds"),
        (("--interval", "nan"), "--interval: is nan"),
        (("--interval", "1e-9"), "--interval: is 1e-09; from 1 to 604800 seconds"),
        (("--restart-delay", "1e300"), "--restart-delay: is 1e+300; from 0 to 86400 seconds"),
        (("--restart-delay", "-1"), "--restart-delay: is -1.0"),
        (("--interference", "1"), "--interference: is 1.0"),
        (("--restart-delay", "604800"), "--restart-delay: is 604800.0; from 0 to 86400 seconds"),
        (("--power", "nan"), "--power: is nan"),
        (("--power", "-1000"), "--power: is -1000.0; from -50 to 50"),
        (("--power", "51", "--policy", "all"), "--power: is 51.0; from -50 to 50"),
        (("--power", "-1", "--policy", "fifo, ours"), "--power: has no part in --policy fifo, ours; leave it out"),
        (("--power", "-1", "--policy", "polux"), "--policy: unknown policy 'polux'"),
        (("--mtbf", "0s"), "--mtbf: is 0 s; from 1 to"),
        (("--mtbf", "3h", "--repair", "0s"), "--repair: is 0 s; above 0"),
        (("--mtbf", "3h", "--checkpoint-interval", "0s"), "--checkpoint-interval: is 0 s; above 0"),
        (("--repair", "1h"), "--repair: needs --mtbf; say how often nodes fail"),
        (("--failure-seed", "0"), "--failure-seed: needs --mtbf"),
        (("--failures", "f.csv", "--repair", "1h"), "--repair: needs --mtbf; events say themselves"),
        (("--checkpoint-interval", "1h"), "--checkpoint-interval: needs --mtbf or --failures"),
        (("--price", "-1"), "--price:gpu: is -1; per GPU hour"),
        (("--price", "nan"), "--price: is nan; give a number"),
        (
            ("--policy", "fifo", "--goodput", "visoin=gp.json,noise=1,samples=100,batch=1"),
            "--goodput: 'visoin' is no application of the workload; did you mean \"vision\"?",
        ),
    ],
)
def test_a_bad_option_is_named(run: Cli, arguments: tuple[str, ...], message: str) -> None:
    run(*arguments).refuses(message)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("placements.csv", f"{PLACES}\n1x,16,1,0\n", "row 1:placement: is 1x"),
        ("placements.csv", f"{PLACES}\n1,16,1,2\n", "row 1:sync_time: is 2; it is a part of the step"),
        ("placements.csv", "placement,local_bsz,step_time\n1,16,1\n", "sync_time: no such column"),
        ("placements.csv", f"{PLACES}\n1,16,1e5,1\n", "row 1:step_time: is 100000; seconds"),
        ("placements.csv", f"{PLACES}\n1,16,1,0\n1,32,1,0.0", "row 2: has no end of line"),
        ("placements.csv", f"{PLACES}\n1,16,1,0,5\n", "row 1: has 5 fields; the header has 4"),
        ("placements.csv", "", "is empty; expected columns placement, local_bsz, step_time, sync_time"),
        (
            "validation-256.csv",
            f"{EPOCHS}\n1,1,1,1,1\n",
            "validation-256.csv: has 1 epochs; validation-1024.csv has 20",
        ),
        ("validation-x.csv", "progress\n1\n", "'x' is no batch size"),
        ("validation-64.csv", f"{EPOCHS}\n1,1,1,0,0\n", "row 1:grad_sqr: and grad_var"),
    ],
)
def test_a_bad_trace_is_named(cli: Cli, tmp_path: Path, name: str, text: str, message: str) -> None:
    traces = tmp_path / "traces"
    shutil.copytree(FOLDER / "traces", traces)
    (traces / "vision" / name).write_text(text, encoding="utf-8")
    files = (FOLDER / "synthetic.csv", "--cluster", FOLDER / "cluster.yaml", "--traces", traces)
    cli("simulate", *files, "--policy", "fifo").refuses(message)


def test_an_application_that_takes_longer_than_a_year_at_best_is_refused(cli: Cli, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    shutil.copytree(FOLDER / "traces", traces)
    for path in (traces / "vision").glob("validation-*.csv"):
        header, *rows = path.read_text().splitlines()
        grown = [",".join(str(float(each) * 1e8) for each in row.split(",")) for row in rows]
        path.write_text("\n".join([header, *grown]) + "\n")
    files = (FOLDER / "synthetic.csv", "--cluster", FOLDER / "cluster.yaml", "--traces", traces)
    cli("simulate", *files, "--policy", "fifo").refuses(
        "application vision: takes ", "years or more on any GPUs; a year at most"
    )


def test_an_output_is_no_input_and_no_other_output(cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "w")
    events = tmp_path / "w" / "events.csv"
    events.write_text("time,node,event\n1,0,leave\n9,0,join\n")
    folder = tmp_path / "w"
    trace, workload, cluster = (
        folder / "traces/vision/placements.csv",
        folder / "synthetic.csv",
        folder / "cluster.yaml",
    )
    kept = {path: path.read_bytes() for path in (trace, workload, cluster, events)}
    files = (workload, "--cluster", cluster, "--traces", folder / "traces", "--failures", events, "--policy", "fifo")
    for path in kept:
        for command, option in ((("simulate",), "-o"), (("simulate", "sweep"), "--csv")):
            cli(*command, *files, option, path).refuses(f"{option}: ", "is one of the inputs")
    cli("simulate", "sweep", *files, "-o", tmp_path / "x", "--csv", tmp_path / "x").refuses("is written by -o too")
    assert {path: path.read_bytes() for path in kept} == kept
    assert not (tmp_path / "x").exists()


def test_bad_node_events_are_named_by_file_and_row(run: Cli, tmp_path: Path) -> None:
    events = tmp_path / "events.csv"
    for rows, message in [
        ("1,0,fail\n2,9,fail\n", "events.csv:row 2:node: is 9; nodes are 0 to 3"),
        ("1,0,fail\n2,1,\n", "events.csv:row 2:event: is empty; one of fail, leave, join"),
        ("1,0,fail,5\n", "events.csv:row 1: has 4 fields; the header has 3"),
        ("", "events.csv: has no rows; expected columns time, node, event"),
    ]:
        events.write_text("time,node,event\n" + rows)
        run("--policy", "fifo", "--failures", events).refuses(message)
    events.write_text("time,node,event\n" + "".join(f"0,{node},leave\n" for node in range(3)))
    stuck = run("--policy", "fifo", "--failures", events)
    assert stuck.code == 3
    assert "cannot run: nodes 0, 1, 2 do not come back and it wants" in stuck.error_line
    assert "of the 4 GPUs that are left; policy fifo gives no GPUs to" in stuck.error_line


def test_what_takes_long_besides_replays_says_what_it_is_at(
    run: Cli, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    said: list[str] = []

    @contextmanager
    def recorded(title: str, total: int | None = None) -> Iterator[Callable[[int, str], None]]:
        titles.append(title if total is None else f"{title} of {total}")
        yield lambda done, remark: said.append(f"{done}: {remark}")

    monkeypatch.setitem(verbs._LISTENERS, "stage", recorded)  # type: ignore[index]
    assert run("--policy", "fifo").code == 0
    assert titles == ["reading synthetic.csv", "fifo of 24"]
    assert said[0].startswith("0: 0 of 24 jobs, 0.0 simulated hours")
    assert re.fullmatch(r"(\d+): \1 of 24 jobs, 2\.\d simulated hours", said[-1])
    shared = ("--cluster", FOLDER / "cluster.yaml", "--traces", FOLDER / "traces")
    assert cli("simulate", "trials", "vision", *shared, "--policy", "srtf").code == 0
    assert titles[2:] == ["fixed-128 of 100", "srtf of 100"]
    assert cli("simulate", "autoscale", "vision", *shared[2:]).code == 0
    assert titles[4:] == ["vision under 5 scaling rules"]


def test_traces_of_several_gpu_types_and_folders_are_put_together(tmp_path: Path) -> None:
    source, first, second = FOLDER / "traces" / "vision", tmp_path / "speeds" / "vision", tmp_path / "runs" / "vision"
    first.mkdir(parents=True)
    second.mkdir(parents=True)
    text = (source / "placements.csv").read_text(encoding="utf-8").splitlines()
    (first / "placements-slow.csv").write_text("\n".join([*text, ""]), encoding="utf-8")
    halved = [text[0]]
    for line in text[1:]:
        placement, local, step, sync = line.split(",")
        halved.append(f"{placement},{local},{float(step) / 2},{float(sync) / 2}")
    (first / "placements-fast.csv").write_text("\n".join([*halved, ""]), encoding="utf-8")
    for path in source.glob("validation-*.csv"):
        shutil.copy(path, second)
    application = read_applications([tmp_path / "speeds", tmp_path / "runs"], ["vision"])["vision"]
    slow, fast = (application.step_times((4, 2), 100, name) for name in ("slow", "fast"))
    assert slow[0] == pytest.approx(2 * fast[0])
    assert not application.runs_on("other")


# The search behind Pollux, against every allocation there is.


def every_allocation(choices: list[JobCosts], gpus: list[int]) -> float:
    """Return the least total cost over all allocations with at most one spanning job on a node."""
    each = []
    for choice in choices:
        options = []
        for counts in itertools.product(*(range(size + 1) for size in gpus)):
            used = tuple((node, count) for node, count in enumerate(counts) if count)
            total = sum(counts)
            if used == choice.base and used:
                cost = choice.keep
            elif total < len(choice.across):
                cost = float(choice.across[total] if len(used) > 1 else choice.within[total])
            else:
                continue
            options.append((cost, np.array(counts), np.array(counts) * (len(used) > 1) > 0))
        each.append(options)
    best = np.inf
    for chosen in itertools.product(*each):
        used = sum(counts for _, counts, _ in chosen)
        shared = sum(spans.astype(int) for _, _, spans in chosen)
        if (used <= np.array(gpus)).all() and (shared <= 1).all():
            best = min(best, sum(cost for cost, _, _ in chosen))
    return best


def some_choices(chance: np.random.Generator, jobs: int, gpus: list[int]) -> list[JobCosts]:
    """Return jobs with concave speedups that lose some across nodes, some of them running already."""
    pollux = Pollux()
    free, spanning = list(gpus), [False] * len(gpus)
    made = []
    for _ in range(jobs):
        most = int(chance.integers(1, sum(gpus) + 1))
        speed = np.arange(most + 1) ** chance.uniform(0.3, 1.0)
        across = speed * chance.uniform(0.4, 1.0)
        base: tuple[tuple[int, int], ...] = ()
        if chance.random() < 0.6:
            counts = [int(chance.integers(0, left + 1)) for left in free]
            spans = sum(count > 0 for count in counts) > 1
            if 0 < sum(counts) <= most and not (spans and any(s and c for s, c in zip(spanning, counts, strict=True))):
                base = tuple((node, count) for node, count in enumerate(counts) if count)
                free = [left - count for left, count in zip(free, counts, strict=True)]
                spanning = [was or (spans and count > 0) for was, count in zip(spanning, counts, strict=True)]
        held = sum(count for _, count in base)
        factor = chance.uniform(0.3, 1.0)
        within_cost, across_cost = pollux.cost(speed * factor), pollux.cost(across * factor)
        within_cost[max(gpus) + 1 :] = np.inf
        across_cost[:2] = np.inf
        now = (across if len(base) > 1 else speed)[held]
        keep = float(pollux.cost(np.array([now]))[0]) if base else np.inf
        made.append(JobCosts(within=within_cost, across=across_cost, base=base, keep=keep))
    return made


def test_the_search_finds_the_optimum_of_small_clusters() -> None:
    chance = np.random.default_rng(5)
    ratios = []
    for _ in range(60):
        gpus = [2, 2] if chance.random() < 0.5 else [3, 1]
        choices = some_choices(chance, int(chance.integers(1, 5)), gpus)
        least = every_allocation(choices, gpus)
        found = search(choices, gpus)
        assert found.bound <= least * (1 + 1e-9)
        assert least <= found.cost * (1 + 1e-9)
        ratios.append(found.cost / least)
    assert np.mean(np.array(ratios) < 1 + 1e-9) >= 0.95
    assert max(ratios) < 1.05


def test_counts_are_exact() -> None:
    chance = np.random.default_rng(1)
    for _ in range(50):
        costs = [chance.random(int(chance.integers(1, 6))) for _ in range(3)]
        least = min(
            sum(cost[count] for cost, count in zip(costs, counts, strict=True))
            for counts in itertools.product(*(range(len(cost)) for cost in costs))
            if sum(counts) <= 6
        )
        counts, total = choose_counts(costs, 6)
        assert total == pytest.approx(least)
        assert sum(counts) <= 6
        assert sum(cost[count] for cost, count in zip(costs, counts, strict=True)) == pytest.approx(least)


@pytest.mark.parametrize("power", [-2.0, -1.0, 0.0, 1.0])
def test_the_summed_cost_is_the_power_mean(power: float) -> None:
    pollux = Pollux(power=power)
    speedups = np.array([0.5, 1.0, 2.5, 0.2])
    means = {0.0: float(np.prod(speedups) ** 0.25)}
    expected = means.get(power) or float(np.mean((speedups + 1e-3) ** power) ** (1 / power))
    total = float(pollux.cost(speedups).sum())
    fitness = math.exp(-total / 4) if power == 0 else (-np.sign(power) * total / 4) ** (1 / power)
    assert fitness == pytest.approx(expected)
    assert (np.diff(pollux.cost(np.array([0.0, 0.1, 1.0, 3.0]))) < 0).all()  # faster always costs less


MIXED = """kind: ddltool.cluster
name: mixed
nodes:
  - {name: slow, count: 2, devices: {type: gpu, count: 4}}
  - {name: fast, count: 1, devices: {type: other, count: 8}}
"""


def test_a_mixed_cluster_runs_all_policies_that_can_and_names_those_that_cannot(cli: Cli, tmp_path: Path) -> None:
    cluster = tmp_path / "mixed.yaml"
    cluster.write_text(MIXED, encoding="utf-8")
    files = (FOLDER / "synthetic.csv", "--cluster", cluster, "--traces", FOLDER / "traces")
    result = cli("simulate", *files, "--policy", "all", "--json").done()
    assert [name for name in POLICIES if name not in result.document["policies"]] == ["optimus", "pollux"]
    refused = cli("simulate", *files, "--policy", "fifo,pollux")
    assert refused.code == 2
    assert "policy pollux: knows one GPU type, and the cluster has gpu, other" in refused.error_line
    assert refused.out == ""


WORKLOAD = FOLDER / "synthetic.csv"
SHARED = ("--cluster", FOLDER / "cluster.yaml", "--traces", FOLDER / "traces")


def test_a_sweep_has_the_figures_of_single_replays(cli: Cli, tmp_path: Path) -> None:
    shutil.copyfile(FOLDER / "synthetic.csv", tmp_path / "again.csv")
    files = (FOLDER / "synthetic.csv", tmp_path / "again.csv")
    swept = cli(
        *("simulate", "sweep", *files, *SHARED, "--policy", "fifo,srtf", "--compare", "srtf,fifo"),
        *("--csv", tmp_path / "rows.csv", "--json"),
    ).done()
    single = cli("simulate", files[0], *SHARED, "--policy", "fifo,srtf", "--json").document["policies"]
    cells = swept.document["cells"]
    assert [(cell["workload"], cell["policy"]) for cell in cells] == [
        (name, policy) for name in ("synthetic", "again") for policy in ("fifo", "srtf")
    ]
    for cell in cells:
        assert cell["figures"]["avg_jct_s"] == single[cell["policy"]]["avg_jct_s"]
    with (tmp_path / "rows.csv").open() as rows:
        assert len(list(csv.DictReader(rows))) == 4
    measures = {row["measure"]: row for row in swept.document["comparison"]["comparisons"]}
    change = single["srtf"]["avg_jct_s"] / single["fifo"]["avg_jct_s"]
    assert any(row["ratio"] == pytest.approx(change) for row in measures.values())
    shown = cli("simulate", "sweep", files[0], *SHARED, "--policy", "fifo,srtf", "--compare", "srtf,fifo")
    assert "Change from fifo to srtf" in shown.out
    assert max(len(line) for line in shown.out.splitlines()) <= 80


def test_gpus_held_over_time_add_up(cli: Cli) -> None:
    found = cli("simulate", FOLDER / "synthetic.csv", *SHARED, "--policy", "fifo,ours", "--json").document
    for record in found["policies"].values():
        usage = record["usage"]
        assert usage["time_s"] == sorted(usage["time_s"])
        assert 0 < max(usage["gpus"]) <= 16
        spans = zip(usage["time_s"], usage["time_s"][1:], usage["gpus"], strict=False)
        held = sum(gpus * (end - begin) for begin, end, gpus in spans)
        assert held == pytest.approx(sum(job["gpu_seconds"] for job in record["jobs"]), rel=0.05)


def test_the_advice_is_the_functions(cli: Cli, tmp_path: Path) -> None:
    state = write_state(tmp_path)
    shown = cli("simulate", "advise", state, "-o", tmp_path / "advice.json").done()
    assert ("Resize from" in shown.out) or ("Stay on" in shown.out)
    assert json.loads((tmp_path / "advice.json").read_text())["kind"] == "ddltool.advice"


def test_the_first_local_batch_is_the_baseline(cli: Cli, tmp_path: Path) -> None:
    made = cli("simulate", "trials", "vision", "--policy", "fifo", "--local-batch", "32,16,64", "--json").done()
    assert list(made.document["policies"]) == ["fixed-32", "fixed-16", "fixed-64", "fifo"]
    assert made.document["search"]["local_batch_size"] == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "w.csv", "v.csv"), "Got unexpected extra argument"),
        (("simulate", "w.csv", "--local-batch", "4"), "No such option: --local-batch"),
        (("simulate",), "Missing argument 'WORKLOAD.csv'"),
        (("simulate", WORKLOAD, *SHARED[2:]), "--cluster: is missing"),
        (("simulate", "autoscale", "a", "--mtbf", "3h"), "No such option: --mtbf"),
        (("simulate", "autoscale", "nothing"), "nothing"),
        (("simulate", "autoscale", ""), "APP: is empty"),
        (("simulate", "advise", "x.yaml"), "x.yaml: no such file"),
        (("simulate", "trials", "a", *SHARED[2:]), "--cluster: is missing"),
        (("simulate", "trials", "vision", "--local-batch", "0"), "--local-batch: 0 is below 1"),
        (("simulate", "generate", "--policy", "pollux"), "No such option: --policy"),
        (("simulate", "convert", "w.csv", "--failure-seed", "0"), "No such option: --failure-seed"),
        (("simulate", "sweep", WORKLOAD, "--metrics"), "No such option: --metrics"),
        (("simulate", "sweep", WORKLOAD, "--price", "T4=1"), "price"),
        (("simulate", "sweep", WORKLOAD, "--power", "1000"), "--power: is 1000.0; from -50 to 50"),
        (("simulate", "sweep", WORKLOAD, *SHARED, "--goodput", "vision"), "--goodput: is 'vision'"),
        (("simulate", "sweep", WORKLOAD, *SHARED, "--goodput", "vision=x.json"), "vision: lacks noise"),
        (("simulate", "sweep", WORKLOAD, "--compare", "ours"), "--compare: is 'ours'; two policies"),
        (
            ("simulate", "sweep", WORKLOAD, "--policy", "fifo", "--compare", "fifo,sia"),
            "two policies of those replayed: fifo",
        ),
        (("simulate", "sweep", WORKLOAD, "--engine", "cloud"), "--engine: unknown engine 'cloud'"),
        (("simulate", "sweep", WORKLOAD, WORKLOAD), "is given twice"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    cli(*arguments).refuses(message)
    assert not list(tmp_path.glob("*.csv"))
