"""``ddltool emit``: what the launchers start, what Kubernetes accepts, what torch does with the settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddltool import runtime
from ddltool.analyzers.answers.emitting.enforcement import not_expressed, to_enforcement
from ddltool.analyzers.answers.emitting.kubernetes import manifests
from ddltool.analyzers.answers.emitting.layout import LaunchSettings, cluster_name, label_value, layout, plan_hash
from ddltool.artifacts import load, save
from ddltool.errors import InputError
from ddltool.plans import Assignment, BucketSetting, Enforcement, Plan, PrefetchSetting, StepSettings, Superstep
from ddltool.runtime.hook.job import loaded
from tests.answers.emitting.test_enforcement import BLOCKS, plan
from tests.conftest import Cli
from tests.helpers.emit_workers import emitted_compiled, emitted_ddp, emitted_fsdp2
from tests.helpers.processes import free_port
from tests.helpers.runtime_workers import crew

PATIENCE_S = 100.0


MIXED = plan(("T4", 1, 4), ("V100", 2, 12))


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def shims(tmp_path: Path) -> Path:
    """A folder with stand-ins for Slurm on one machine: node names are loopback addresses, tasks are processes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    executable(folder / "scontrol", '#!/bin/bash\nIFS=,; for host in $3; do echo "$host"; done\n')
    executable(
        folder / "srun",
        f"""#!{sys.executable}
import os, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith(("--kill-on-bad-exit", "--cpus-per-task"))]
parts = [[]]
for word in words:
    parts.append([]) if word == ":" else parts[-1].append(word)
tasks = []
for part in parts:
    group = part.pop(0).removeprefix("--het-group=") if part[0].startswith("--het-group=") else None
    nodes = os.environ["SLURM_JOB_NODELIST" + (f"_HET_GROUP_{{group}}" if group is not None else "")]
    for node in nodes.split(","):
        tasks.append(subprocess.Popen(part, env={{**os.environ, "SLURMD_NODENAME": node}}))
sys.exit(max(task.wait() for task in tasks))
""",
    )
    return folder


def fake_torchrun(folder: Path) -> None:
    """A torchrun that only tells how it was called, in one write: bash's own printf has one for each line."""
    executable(folder / "torchrun", '#!/bin/bash\nexec env printf "%s\\n" "$#" "$@"\n')


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1", **variables}
    # A session of its own, so that a launch that hangs is ended with all that it started.
    with subprocess.Popen(
        command, env=environment, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def options(words: list[str]) -> dict[str, str]:
    """The options of a torchrun command line, and the rest as "script"."""
    found = {}
    while words[0].startswith("--"):
        found[words[0]] = words[1]
        words = words[2:]
    return {**found, "script": json.dumps(words)}


# -- names, hash, nodes


@given(st.text(max_size=90), st.text(max_size=90))
def test_any_job_name_becomes_a_label_and_two_stay_two(one: str, other: str) -> None:
    for text in (one, other):
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", cluster_name(text))
        assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", label_value(text))
    assert (cluster_name(one) == cluster_name(other)) == (one == other)


def test_a_good_name_stays() -> None:
    assert cluster_name("resnet50-v1") == "resnet50-v1"
    assert cluster_name("7b").startswith("job-7b-")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"waste": float("nan")}, "waste: is nan; give a finite number"),
        ({"gap": float("inf")}, "gap: is inf; give a finite number"),
        ({"sharding": {"kind": "ddp", "replicate": 4, "shard": 1}}, "sharding is 4 x 1 processes, and world_size 3"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(MIXED.model_dump(mode="json") | change))
    with pytest.raises(InputError, match=problem):
        load(tmp_path / "plan.json", Plan)


def test_the_hash_is_that_of_the_canonical_json(tmp_path: Path) -> None:
    import hashlib

    save(MIXED, tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    shuffled = dict(sorted(document.items(), reverse=True))
    (tmp_path / "other.json").write_text(json.dumps(shuffled, indent=7))
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert plan_hash(load(tmp_path / "other.json", Plan)) == hashlib.sha256(text.encode()).hexdigest()
    assert plan_hash(MIXED.model_copy(update={"job": "other"})) != plan_hash(MIXED)


@given(
    st.lists(st.tuples(st.sampled_from("ABC"), st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_every_rank_gets_a_process_on_a_node_of_its_type(
    rows: list[tuple[str, int, int]], per_node: int | None
) -> None:
    made = plan(*rows)
    types = [name for name, count, _ in rows for _ in range(count)]
    placed = layout(made, per_node)
    found: list[str] = []
    nodes = 0
    for group in placed.groups:
        assert (group.first_rank, group.first_node) == (len(found), nodes)
        assert per_node is None or group.processes_per_node <= per_node
        found += [group.device_type] * group.processes
        nodes += group.nodes
    assert found == types
    assert placed.nodes == nodes
    assert placed.assumed == (per_node is None)


def test_the_plans_own_number_of_nodes_counts() -> None:
    cost = {"choice": "several nodes", "num_nodes": 2, "num_replicas": 6, "compute_s": 1.0, "sync_s": 0.1}
    made = plan(("A", 6, 4), network={**cost, "best_steps": {}})
    assert [(g.nodes, g.processes_per_node) for g in layout(made).groups] == [(2, 3)]
    assert not layout(made).assumed
    with pytest.raises(InputError, match="no device 'V10' in the plan; did you mean \"V100\""):
        layout(MIXED, {"V10": 1})


# -- scripts


@pytest.mark.parametrize("script", ["train.py", "'my train.py' --name 'a $HOME \"b\"'"])
def test_torchrun_starts_what_the_plan_says(cli: Cli, tmp_path: Path, shims: Path, script: str) -> None:
    fake_torchrun(shims)
    save(plan(("T4", 3, 4), ("V100", 4, 12), job="a\n#b; rm -rf /"), tmp_path / "plan.json")
    made = cli("emit", tmp_path / "plan.json", "--target", "torchrun", "-o", tmp_path / "launch.sh", "--script", script,
               "--devices-per-node", "T4=2,V100=2")  # fmt: skip
    assert made.code == 0, made.err
    counts = []
    for node in range(4):
        ran = run(["bash", str(tmp_path / "launch.sh"), "x y"], shims, NODE_RANK=str(node), MASTER_ADDR="h 0")
        assert ran.returncode == 0, ran.stderr
        found = options(ran.stdout.splitlines()[1:])
        assert (found["--nnodes"], found["--node-rank"], found["--master-addr"]) == ("4", str(node), "h 0")
        assert json.loads(found["script"]) == [*shlex.split(script), "x y"]
        counts.append(int(found["--nproc-per-node"]))
    assert counts == [2, 1, 2, 2]
    assert load(tmp_path / "enforce.json", Enforcement).world_size == 7
    for wrong in ("4", "-1", "x", ""):
        assert run(["bash", str(tmp_path / "launch.sh")], shims, NODE_RANK=wrong, MASTER_ADDR="h").returncode > 0


@pytest.mark.parametrize("rows", [(("A", 4, 8),), (("T4", 3, 4), ("V100", 4, 12))], ids=["alike", "mixed"])
@pytest.mark.parametrize(("target", "per_node"), [("torchrun", 8), ("torchrun", 2), ("slurm", 8), ("slurm", 2)])
def test_scripts_are_clean(
    cli: Cli, tmp_path: Path, rows: tuple[tuple[str, int, int], ...], target: str, per_node: int
) -> None:
    """To bash, and to shellcheck where it is installed."""
    save(plan(*rows), tmp_path / "plan.json")
    script = tmp_path / "start.sh"
    cli("emit", tmp_path / "plan.json", "--target", target, "-o", script, "--devices-per-node", per_node)
    checks = [["bash", "-n"], *([[found, "-s", "bash"]] if (found := shutil.which("shellcheck")) else [])]
    for check in checks:
        ran = subprocess.run([*check, str(script)], capture_output=True, text=True, timeout=PATIENCE_S)
        assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def test_slurm_gives_every_process_the_planned_rank(cli: Cli, tmp_path: Path, shims: Path) -> None:
    """A heterogeneous job of one node with two processes and one with one, through torch's own torchrun."""
    save(plan(("V100", 2, 12), ("T4", 1, 4)), tmp_path / "plan.json")
    (tmp_path / "say.py").write_text(
        "import os, pathlib\n"
        "keys = ('RANK', 'WORLD_SIZE', 'GROUP_RANK', 'LOCAL_RANK', 'SLURMD_NODENAME', 'DDLTOOL_PLAN_SHA256')\n"
        "assert os.path.exists(os.environ['DDLTOOL_ENFORCE'])\n"
        "pathlib.Path('rank' + os.environ['RANK']).write_text(' '.join(os.environ[key] for key in keys))\n"
    )
    made = cli("emit", tmp_path / "plan.json", "--target", "slurm", "-o", tmp_path / "slurm.sh", "--script", "say.py",
               "--devices-per-node", "2", "--queue", "long", "--json")  # fmt: skip
    ran = run(
        ["bash", str(tmp_path / "slurm.sh")], shims, SLURM_JOB_ID="7", MASTER_PORT=str(free_port()),
        SLURM_JOB_NODELIST_HET_GROUP_0="127.0.0.1", SLURM_JOB_NODELIST_HET_GROUP_1="127.0.0.2",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    sha = made.document["plan_sha256"]
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(3)] == [
        f"0 3 0 0 127.0.0.1 {sha}",
        f"1 3 0 1 127.0.0.1 {sha}",
        f"2 3 1 0 127.0.0.2 {sha}",
    ]
    text = (tmp_path / "slurm.sh").read_text()
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    first, second = (["--nodes=1", "--ntasks-per-node=1", f"--cpus-per-task={n}", "--partition=long"] for n in (8, 4))
    assert asked == [
        "--job-name=mixed", f"--comment=ddltool-plan-sha256:{sha}", "--output=%x-%j.out",
        *first, "--gres=gpu:v100:2", "hetjob", *second, "--gres=gpu:t4:1",
    ]  # fmt: skip
    assert text.index("hetjob") < text.index("set -euo")  # sbatch stops reading at the first command


def test_slurm_of_equal_nodes_is_no_heterogeneous_job(cli: Cli, tmp_path: Path, shims: Path) -> None:
    fake_torchrun(shims)
    save(plan(("A", 4, 8)), tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", "slurm", "-o", tmp_path / "s.sh", "--devices-per-node", "2",
        "--resource", "none")  # fmt: skip
    assert "hetjob" not in (tmp_path / "s.sh").read_text()
    assert "gres" not in (tmp_path / "s.sh").read_text().partition("set -euo")[0].lower()
    ran = run(["bash", str(tmp_path / "s.sh")], shims, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n1,n2")
    assert sorted(re.findall(r"--node-rank\n(\d)", ran.stdout)) == ["0", "1"]
    assert "n1" in ran.stdout
    assert "20007" in ran.stdout


# -- Kubernetes


def objects(made: Plan, per_node: int | None, kind: Any, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    usual = {"script": ["train.py"], "image": "me/job:1", "queue": "team", "resource": "nvidia.com/gpu", "kind": kind}
    return manifests(made, to_enforcement(made), layout(made, per_node), LaunchSettings(**(usual | changes)))


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ((("A", 8, 4),), "TrainJob"),
        ((("A", 8, 4),), "JobSet"),
        ((("T4", 3, 4), ("V100", 4, 12), ("A100", 1, 30)), "JobSet"),
    ],
)
def test_published_models_know_every_field(rows: tuple[tuple[str, int, int], ...], kind: str) -> None:
    """Through the classes that Kubeflow generates from its definitions and back: an unknown field would be lost."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    config, job = objects(plan(*rows), 2, kind)
    classes = {"TrainJob": "TrainerV1alpha1TrainJob", "JobSet": "JobsetV1alpha2JobSet"}
    assert getattr(models, classes[kind]).from_dict(job).to_dict() == job
    assert config["kind"] == "ConfigMap"
    job["spec"]["surprise"] = 1
    assert getattr(models, classes[kind]).from_dict(job).to_dict() != job


@pytest.mark.parametrize("kind", ["TrainJob", "JobSet"])
def test_the_apis_own_schemas_take_what_is_in_the_manifest(kind: str) -> None:
    """The ConfigMap, and of the JobSet its jobs and pods; strictly, so that an unknown field is refused."""
    schemas = pytest.importorskip("kubernetes_validate")
    config, job = objects(plan(("A", 8, 4)), 2, kind)
    parts = [config]
    for one in job["spec"].get("replicatedJobs", []):
        about = {"metadata": {"name": one["name"]}}
        parts.append({"apiVersion": "batch/v1", "kind": "Job", **about, "spec": one["template"]["spec"]})
    for part in parts:
        schemas.validate(part, "1.32", strict=True)
        with pytest.raises(schemas.ValidationError):
            schemas.validate({**part, "surprise": 1}, "1.32", strict=True)


def test_pods_start_what_the_plan_says(tmp_path: Path, shims: Path) -> None:
    """The command of every pod, run by a shell as the node would: ranks of nodes, processes, script, address."""
    fake_torchrun(shims)
    script = ["my train.py", "$(RANK) $$x"]
    _, job = objects(plan(("T4", 1, 4), ("V100", 4, 12)), 2, "JobSet", script=script)
    seen = []
    for one in job["spec"]["replicatedJobs"]:
        spec = one["template"]["spec"]
        assert spec["completions"] == spec["parallelism"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        for index in range(spec["completions"]):
            command = [word.replace("$$", "$") for word in container["command"]]  # as Kubernetes does
            ran = run(command, shims, JOB_COMPLETION_INDEX=str(index))
            found = options(ran.stdout.splitlines()[1:])
            assert json.loads(found["script"]) == script
            assert found["--master-addr"] == "mixed-g0-0-0.mixed"
            processes = int(found["--nproc-per-node"])
            assert container["resources"]["limits"] == {"nvidia.com/gpu": str(processes)}
            seen.append((int(found["--node-rank"]), pod["nodeSelector"]["ddltool/device-type"], processes))
    assert seen == [(0, "T4", 1), (1, "V100", 2), (2, "V100", 2)]


def test_the_manifest_carries_config_hash_and_queue(cli: Cli, tmp_path: Path) -> None:
    made = plan(("A", 4, 8), job="Ünlabelled " + "x" * 90)
    save(made, tmp_path / "plan.json")
    said = cli("emit", tmp_path / "plan.json", "--target", "kubernetes", "-o", tmp_path / "k.yaml", "--queue", "team",
               "--devices-per-node", "2", "--script", "train.py --lr $(LR)")  # fmt: skip
    assert said.code == 0, said.err
    assert said.out.startswith(f"wrote {tmp_path / 'k.yaml'}: 4 processes")
    assert "not expressed by kubernetes: node labels: nodes must carry ddltool/device-type" in said.err
    text = (tmp_path / "k.yaml").read_text()
    for line in said.err.splitlines():
        assert line.replace("not expressed by kubernetes", "# Not expressed here") in text
    config, job = [document for document in yaml.safe_load_all(text) if document]
    assert Enforcement.model_validate_json(config["data"]["enforce.json"]) == to_enforcement(made)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["metadata"]["annotations"]["ddltool/plan-sha256"] == plan_hash(made)
    assert (job["spec"]["trainer"]["numNodes"], job["spec"]["trainer"]["numProcPerNode"]) == (2, 2)
    assert job["spec"]["trainer"]["command"] == ["torchrun", "train.py", "--lr", "$$(LR)"]
    patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    assert (
        patch["template"]["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    )


# -- settings, executed


def test_the_ddp_module_forms_the_planned_buckets(cli: Cli, tmp_path: Path) -> None:
    """Names that the module itself never saw: the buckets are told by DDP's own log."""
    setting = BucketSetting(bucket_cap_mb=0.004, buckets=[["x"]], step_s=1.0, default_step_s=2.0)
    made = plan(("A", 2, 8), ddp=setting)
    save(made, tmp_path / "plan.json")
    assert cli("emit", tmp_path / "plan.json", "--target", "ddp", "-o", tmp_path / "ddp_plan.py").code == 0
    few = crew().run(emitted_ddp, str(tmp_path / "ddp_plan.py"), {"bucket_cap_mb": 25})
    many = crew().run(emitted_ddp, str(tmp_path / "ddp_plan.py"), {})
    for sha, sizes, _ in many:
        assert (sha, sizes) == (plan_hash(made), [8, 8])
    assert many[0][2] == many[1][2] > few[0][2] == 1


def test_the_fsdp2_module_gathers_in_the_planned_order(cli: Cli, tmp_path: Path) -> None:
    ahead = {"layers.0": ["layers.2", "layers.1"]}
    setting = PrefetchSetting(units=BLOCKS, forward=ahead, backward={}, step_s=1.0, default_step_s=2.0)
    save(plan(("A", 2, 8), fsdp2=setting), tmp_path / "plan.json")
    assert cli("emit", tmp_path / "plan.json", "--target", "fsdp2", "-o", tmp_path / "f.py").code == 0
    for order in crew().run(emitted_fsdp2, str(tmp_path / "f.py")):
        gathers = [name for name in order if name.startswith("layers.")]
        assert gathers[:3] == ["layers.0", "layers.2", "layers.1"]


def test_the_modules_compile_as_planned(cli: Cli, tmp_path: Path) -> None:
    """Block by block under FSDP2, whose hooks stay outside; the model as a whole under DDP."""
    setting = PrefetchSetting(units=BLOCKS, forward={}, backward={}, step_s=1.0, default_step_s=2.0)
    ddp = BucketSetting(bucket_cap_mb=25.0, buckets=[["x"]], step_s=1.0, default_step_s=2.0)
    for compiles in (True, False):
        save(plan(("A", 2, 8), fsdp2=setting, ddp=ddp, run=StepSettings(compile=compiles)), tmp_path / "plan.json")
        for target, found in (("fsdp2", [False, *[compiles] * 4]), ("ddp", [compiles])):
            cli("emit", tmp_path / "plan.json", "--target", target, "-o", tmp_path / f"{target}.py").done()
            assert crew().run(emitted_compiled, str(tmp_path / f"{target}.py")) == [found] * 2


# -- what is left out, what is refused


def test_what_a_target_cannot_say_is_listed(cli: Cli, tmp_path: Path) -> None:
    setting = BucketSetting(bucket_cap_mb=1.0, buckets=[["x"]], step_s=1.0, default_step_s=2.0)
    rows = [Assignment(device_type="A", devices=2, ests_per_device=2, local_batch_size=8),
            Assignment(device_type="B", devices=1, ests_per_device=1, local_batch_size=4)]  # fmt: skip
    made = plan(assignments=rows, ddp=setting, est_count=5)

    def nouns(target: Any) -> list[str]:
        return [gap.partition(":")[0] for gap in not_expressed(made, target, layout(made))]

    for target in ("torchrun", "slurm", "kubernetes"):
        assert nouns(target) == ["logical workers", "nodes"]
    assert not_expressed(made, "hook")[0].startswith("logical workers: ")
    assert [gap.partition(":")[0] for gap in not_expressed(made, "ddp")] == [
        "weights of uneven gradients", "logical workers", "device types",
    ]  # fmt: skip
    save(made, tmp_path / "plan.json")
    said = cli("emit", tmp_path / "plan.json", "--target", "ddp", "-o", tmp_path / "d.py", "--json").document
    assert said["not_expressed"] == not_expressed(made, "ddp")
    for gap in said["not_expressed"]:
        assert f"# Not expressed here: {gap}" in (tmp_path / "d.py").read_text()


def test_the_hooks_config_names_its_plan(cli: Cli, tmp_path: Path) -> None:
    save(MIXED, tmp_path / "plan.json")
    said = cli("emit", tmp_path / "plan.json", "-o", tmp_path / "enforce.json", "--json").document
    assert load(tmp_path / "enforce.json", Enforcement).plan_sha256 == said["plan_sha256"] == plan_hash(MIXED)
    assert said["not_expressed"] == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--target", "slrum"], "unknown target 'slrum'; did you mean \"slurm\""),
        (["--target", "fsdp2"], "plan:fsdp2: is missing"),
        (["--target", "ddp"], "plan:ddp: is missing"),
        (["--image", "x"], "--image: has no part in --target hook; leave it out"),
        (["--target", "slurm", "--kind", "JobSet"], "--kind: has no part in --target slurm"),
        (["--target", "torchrun", "--devices-per-node", "0"], "--devices-per-node: 0 is below 1"),
        (["--target", "torchrun", "--devices-per-node", "T4=1,T4=2"], "--devices-per-node: gives T4 twice"),
        (["--target", "torchrun", "--devices-per-node", "K80=1"], "no device 'K80' in the plan"),
        (["--target", "torchrun", "--script", "'open"], "--script: cannot be split"),
        (["--target", "torchrun", "--script", "a\nb"], "--script: names no script, or holds a line break"),
        (["--target", "kubernetes", "--kind", "TrainJob"], "TrainJob: has one kind of node, the plan needs node 0: T4"),
        (["--target", "kubernetes", "--kind", "PodJob"], "unknown kind 'PodJob'"),
        (["--target", "kubernetes", "--label-value", "K80=Tesla"], "--label-value: unknown label-value 'K80'; known: "),
        (["--target", "kubernetes", "--label-value", "T4"], "--label-value: 'T4' is not TYPE=VALUE"),
        (["--target", "kubernetes", "--label-value", "T4=a: b"], "--label-value: 'T4=a: b' is not TYPE=VALUE"),
        (["--target", "slurm", "--label-value", "T4=a"], "--label-value: has no part in --target slurm"),
        (["--target", "kubernetes", "--queue", "a b"], "--queue: is 'a b'"),
        (["--target", "slurm", "--queue", "a\n#SBATCH x"], "--queue: is 'a #SBATCH x'"),
        (["--target", "kubernetes", "--image", "a b"], "--image: is 'a b'"),
        (["--target", "kubernetes", "--image", "a\nb: c"], "--image: is 'a b: c'"),
        (["--target", "kubernetes", "--image", ""], "--image: is ''"),
        (["--target", "torchrun", "--script", "-x"], "--script: begins with '-x', which is no script"),
        (["--target", "slurm", "--script", "a\x1bb"], "--script: names no script, or holds a line break"),
        (["--telemetry", ""], "--telemetry: is '', which is no name of a file"),
        (["--telemetry", "a\nb"], "--telemetry: is 'a b', which is no name of a file"),
        (["--json", "-o", "-"], "--json: cannot share stdout with -o -"),
    ],
)
def test_wrong_wishes_are_one_line_and_leave_nothing(cli: Cli, tmp_path: Path, arguments: list[str], line: str) -> None:
    save(MIXED, tmp_path / "plan.json")
    output = [] if "-o" in arguments else ["-o", str(tmp_path / "out")]
    made = cli("emit", tmp_path / "plan.json", *arguments, *output)
    assert made.code == 2
    assert line in made.error_line.replace("\\n", " ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


def test_nodes_are_chosen_by_the_labels_that_they_have(cli: Cli, tmp_path: Path) -> None:
    """With the labels of NVIDIA's device plugin; a type without a value of its own keeps its name."""
    save(MIXED, tmp_path / "plan.json")
    given = ("--node-label", "nvidia.com/gpu.product", "--label-value", "T4=Tesla-T4")
    made = cli("emit", tmp_path / "plan.json", "--target", "kubernetes", *given, "-o", tmp_path / "k.yaml").done()
    found = re.findall(r"nvidia\.com/gpu\.product: (\S+)", (tmp_path / "k.yaml").read_text())
    types = {row.device_type for row in MIXED.assignments}
    assert set(found) == (types - {"T4"}) | {"Tesla-T4"}
    assert "nvidia.com/gpu.product with the values Tesla-T4" in made.err


def test_a_launcher_is_not_the_config_it_brings(cli: Cli, tmp_path: Path) -> None:
    save(MIXED, tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", "torchrun", "-o", tmp_path / "enforce.json").refuses(
        "is written by -o too"
    )


def test_the_launchers_config_goes_before_the_scripts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDLTOOL_ENFORCE", str(tmp_path / "brought.json"))
    save(to_enforcement(plan(("A", 2, 8))), tmp_path / "brought.json")
    config, where = loaded("enforce.json")
    assert (config.world_size, where) == (2, str(tmp_path / "brought.json"))


def test_a_plan_with_a_server_starts_one_more_process(cli: Cli, tmp_path: Path, shims: Path) -> None:
    fake_torchrun(shims)
    figures = {"lookahead": 3, "superstep_s": 1.0, "iterations": {"V100": 1}, "mini_batches": 4}
    superstep = Superstep(**figures, waiting_s=0.0, total_waiting_s=0.0, iteration_gap=0)
    served = plan(("V100", 4, 8), strategy="elastic-bsp", superstep=superstep)
    save(served, tmp_path / "plan.json")
    for target in ("kubernetes", "slurm", "ddp", "fsdp2"):
        made = cli("emit", tmp_path / "plan.json", "--target", target, "-o", tmp_path / "out")
        assert (made.code, "has no parameter server" in made.error_line) == (2, True)
    made = cli("emit", tmp_path / "plan.json", "--target", "torchrun", "-o", tmp_path / "launch.sh",
               "--devices-per-node", "2")  # fmt: skip
    assert "script: train.py is started, and there is none here (--script names yours)" in made.err
    assert "script: train.py is started" in (tmp_path / "launch.sh").read_text()
    counts = []
    for node in range(2):
        ran = run(["bash", str(tmp_path / "launch.sh")], shims, NODE_RANK=str(node), MASTER_ADDR="h")
        counts.append(options(ran.stdout.splitlines()[1:])["--nproc-per-node"])
    assert counts == ["2", "3"]
    assert load(tmp_path / "enforce.json", Enforcement).superstep == superstep
    with pytest.raises(InputError, match=r"strategy: is elastic-bsp.*ddltool\.runtime\.servers\.follow"):
        runtime.attach(tmp_path / "enforce.json")
    with pytest.raises(ValueError, match="superstep is that of strategy elastic-bsp; make the plan again"):
        to_enforcement(served.model_copy(update={"superstep": None}))


def test_a_config_that_no_config_map_holds_is_refused() -> None:
    with pytest.raises(InputError, match="enforce.json: is larger than"):
        objects(plan(("A", 20_000, 4)), 8, "TrainJob")


@pytest.mark.parametrize("target", ["torchrun", "slurm", "kubernetes", "ddp"])
def test_a_long_name_of_a_job_is_shortened(cli: Cli, tmp_path: Path, target: str) -> None:
    job = "head" + "n" * 10_000 + "tail"
    setting = BucketSetting(bucket_cap_mb=25.0, buckets=[["w"]], step_s=1.0, default_step_s=1.0)
    save(MIXED.model_copy(update={"job": job, "ddp": setting}), tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", target, "-o", tmp_path / "out").done()
    lines = [line for line in (tmp_path / "out").read_text(encoding="utf-8").splitlines() if "enforce.json" not in line]
    named = [line for line in lines if "head" in line and "tail" in line]
    assert named
    if target != "kubernetes":
        assert max(map(len, named)) < 300


@pytest.mark.parametrize("name", ["registry.example:5000/team/job:1.2", "me/job@sha256:" + "0" * 64])
def test_names_of_images_are_taken(cli: Cli, tmp_path: Path, name: str) -> None:
    save(MIXED, tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", "kubernetes", "--image", name, "-o", tmp_path / "out.yaml").done()
    assert f"image: {name}" in (tmp_path / "out.yaml").read_text(encoding="utf-8")
