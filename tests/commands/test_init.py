"""``ddltool init``: what nvidia-smi, Slurm and Kubernetes show becomes files that ``plan`` takes as they are."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from ddltool.analyzers.step.measured.machines import read_nodes
from ddltool.artifacts import load
from ddltool.job import Cluster, read_job

GRAPH = Path(__file__).parents[2] / "fixtures" / "graphs" / "resnet32-training.graph.json.gz"


def gpu(product: str, mib: int, mig: str = "N/A") -> str:
    return f"""
	<gpu id="00000000:07:00.0">
		<product_name>{product}</product_name>
		<product_brand>NVIDIA</product_brand>
		<mig_mode>
			<current_mig>{mig}</current_mig>
			<pending_mig>{mig}</pending_mig>
		</mig_mode>
		<fb_memory_usage>
			<total>{mib} MiB</total>
			<reserved>551 MiB</reserved>
			<used>4 MiB</used>
		</fb_memory_usage>
	</gpu>"""


def smi(*gpus: str) -> str:
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
	<timestamp>Sat Nov 21 10:11:12 2026</timestamp>
	<driver_version>550.54.15</driver_version>
	<attached_gpus>{len(gpus)}</attached_gpus>{"".join(gpus)}
</nvidia_smi_log>
"""


SLURM = """NodeName=gpu01 Arch=x86_64 CoresPerSocket=32
   CPUAlloc=0 CPUEfctv=64 CPUTot=64 CPULoad=0.01
   AvailableFeatures=ib,rack1
   ActiveFeatures=ib,rack1
   Gres=gpu:v100:4(S:0-1)
   NodeAddr=gpu01 NodeHostName=gpu01 Version=23.02.6
   OS=Linux 5.14.0-362.el9.x86_64 #1 SMP PREEMPT_DYNAMIC
   RealMemory=1031000 AllocMem=0 FreeMem=1010101 Sockets=2 Boards=1
   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   CfgTRES=cpu=64,mem=1031000M,billing=64,gres/gpu=4,gres/gpu:v100=4

NodeName=gpu02 Arch=x86_64 CoresPerSocket=32
   Gres=gpu:v100:4
   State=MIXED+PLANNED ThreadsPerCore=1

NodeName=gpu03 Arch=x86_64 CoresPerSocket=32
   Gres=gpu:v100:4
   State=IDLE+DRAIN ThreadsPerCore=1
   Reason=bad fan [root@2026-11-01T10:00:00]

NodeName=gpu04 Arch=x86_64
   Gres=gpu:v100:4
   State=DOWN* ThreadsPerCore=1

NodeName=gpu05 Arch=x86_64 CoresPerSocket=24
   Gres=gpu:nvidia_a100-sxm4-80gb:8(S:0-1),gpu:t4:1,shard:64
   State=ALLOCATED ThreadsPerCore=2

NodeName=gpu06 Arch=x86_64 CoresPerSocket=24
   Gres=gpu:a100_1g.10gb:7
   State=IDLE ThreadsPerCore=2

NodeName=gpu07 Arch=x86_64 CoresPerSocket=24
   ActiveFeatures=ib,l40s
   Gres=gpu:2
   State=IDLE ThreadsPerCore=2

NodeName=cpu01 Arch=x86_64 CoresPerSocket=24
   Gres=(null)
   State=IDLE ThreadsPerCore=2
"""


def pod_host(name: str, product: str | None, room: dict[str, str], **spec: Any) -> dict[str, Any]:
    labels = {"kubernetes.io/hostname": name, **({"nvidia.com/gpu.product": product} if product else {})}
    ready = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": spec.pop("ready", "True")}]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**labels, "nvidia.com/gpu.memory": "24576"}},
        "spec": spec,
        "status": {"allocatable": {"cpu": "63", "memory": "515Gi", **room}, "conditions": ready},
    }


def taint(key: str) -> list[dict[str, str]]:
    return [{"key": key, "value": "present", "effect": "NoSchedule"}]


KUBERNETES = {
    "apiVersion": "v1",
    "kind": "List",
    "items": [
        pod_host("a", "NVIDIA-L4", {"nvidia.com/gpu": "4"}, taints=taint("nvidia.com/gpu")),
        pod_host("b", "NVIDIA-L4", {"nvidia.com/gpu": "4"}),
        pod_host("c", "NVIDIA-L4", {"nvidia.com/gpu": "4"}, unschedulable=True),
        pod_host("d", "NVIDIA-L4", {"nvidia.com/gpu": "4"}, taints=taint("team/only")),
        pod_host("e", "NVIDIA-L4", {"nvidia.com/gpu": "4"}, ready="Unknown"),
        pod_host("f", "NVIDIA-RTX-9999", {"nvidia.com/gpu": "2"}),
        pod_host("g", "NVIDIA-A30", {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.6gb": "4"}),
        pod_host("h", None, {}),
        pod_host("i", "Tesla-T4-SHARED", {"nvidia.com/gpu": "8"}),
    ],
}
CASES = {
    "smi.xml": (
        smi(gpu("NVIDIA A100-SXM4-80GB", 81920), gpu("NVIDIA A100-SXM4-80GB", 81920))
        + smi(gpu("Tesla T4", 15360), gpu("NVIDIA A30", 24576, "Enabled")),
        {"A100-80GB": 2, "T4": 1},
        ["smi-1: a NVIDIA A30 in MIG mode"],
    ),
    "slurm.txt": (
        SLURM,
        {"V100": 8, "A100-80GB": 8, "T4": 1, "L40S": 2},
        [
            *("gpu03: is IDLE+DRAIN", "gpu04: is DOWN*", "gpu06: a100_1g.10gb is a slice", "cpu01: has no gpu in Gres"),
            "gpu05: holds several device types",
        ],
    ),
    "nodes.json": (
        json.dumps(KUBERNETES),
        {"L4": 8, "NVIDIA-RTX-9999": 2},
        [
            *(
                "c: is unschedulable",
                "d: has the taint team/only:NoSchedule",
                "e: is not ready",
                "g: has slices of GPUs",
            ),
            *("g, h: has no GPU that a pod", "i: Tesla-T4-SHARED is one GPU"),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_files_hold_what_the_list_shows_and_plan_takes_them(cli: Any, tmp_path: Path, name: str) -> None:
    text, counts, remarks = CASES[name]
    listed, folder = tmp_path / name, tmp_path / "job"
    listed.write_text(text)
    made = cli("init", "--nodes", listed, "--model", GRAPH, "-o", folder, "--json")
    assert (made.code, made.document["devices"]) == (0, counts)
    told = made.document["remarks"]
    assert all(any(line.startswith(remark) for line in told) for remark in remarks), told
    assert load(folder / "cluster.yaml", Cluster).device_counts() == counts
    job = read_job(folder / "job.yaml")
    assert {offer.type: offer.count for offer in job.devices} == {
        device: count for device, count in counts.items() if device not in made.document["unknown"]
    }
    planned = cli("plan", folder / "job.yaml", "--bandwidth", "25Gbit", "--json")
    assert (planned.code, planned.document["kind"]) == (0, "ddltool.plan"), planned.err


def test_an_unknown_device_is_kept_with_what_to_fill_in(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text(json.dumps(KUBERNETES["items"][5]))  # kubectl get node f -o json
    made = cli("init", "--nodes", tmp_path / "nodes.json", "--model", GRAPH, "-o", tmp_path)
    assert "note: NVIDIA-RTX-9999 is no device that ddltool knows: fill in its memory and speed" in made.err
    job = tmp_path / "job.yaml"
    assert "NVIDIA-RTX-9999" in cli("plan", job).error_line
    line = next(line for line in job.read_text().splitlines() if "spec:" in line)
    job.write_text(job.read_text().replace(line, line.replace("}  # spec", ", spec") + "}"))
    assert "memory_gib: 24," in line
    assert cli("plan", job, "--json").document["assignments"][0]["device_type"] == "NVIDIA-RTX-9999"


def test_this_machine_without_gpus_is_one_cpu(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    made = cli("init", "--model", GRAPH, "-o", tmp_path)
    assert (made.code, made.out.splitlines()[0]) == (0, "1 cpu on 1 node")
    assert cli("plan", tmp_path / "job.yaml", "--json").document["assignments"][0]["device_type"] == "cpu"
    before = (tmp_path / "job.yaml").read_bytes()
    assert "is there already; give --force" in cli("init", "-o", tmp_path).error_line
    assert (tmp_path / "job.yaml").read_bytes() == before
    assert cli("init", "--model", "train.py:make_model", "-o", tmp_path, "--force").out.endswith("--allow-code\n")


BOMB = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]><nvidia_smi_log>&b;</nvidia_smi_log>'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("hello\n", "is no list of nodes that ddltool knows"),
        (BOMB, "declares XML entities"),
        ("<a>" * 60 + "</a>" * 60, "begins with <a>"),
        ("<nvidia_smi_log><gpu>", "line 1: is not whole XML"),
        ("<html></html>", "begins with <html>"),
        ("<nvidia_smi_log><gpu></gpu></nvidia_smi_log>", "without <product_name>"),
        ("<nvidia_smi_log></nvidia_smi_log>", "no node with a device is free"),
        ("NodeName=a Gres=gpu:v100:x State=IDLE", "a.Gres: has 'gpu:v100:x'"),
        ("NodeName=a Gres=gpu:v100:9999 State=IDLE", "a has 9999 devices"),
        ("NodeName=a Gres=gpu:v100:4 State=DOWN*", "no node with a device is free for a job: a: is DOWN*"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"items": 3}', "items: is no list of nodes"),
        ('{"kind": "Pod", "metadata": {"name": "p"}}', "items: is no list of nodes"),
        ('{"items": [{"metadata": []}]}', "items[0].metadata.name: is missing"),
        ('{"items": [{"metadata": {"name": "a"}, "spec": 3}]}', "items[0].spec: is no mapping"),
        ('{"items": [{"metadata": {"name": "a"}, "spec": {"taints": [3]}}]}', "items[0].spec.taints: is no list"),
        (
            '{"items": [{"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "x"}}}]}',
            "allocatable.nvidia.com/gpu: is 'x'",
        ),
    ],
)
def test_bad_lists_end_in_one_line(cli: Any, tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "list").write_text(text)
    cli("init", "--nodes", tmp_path / "list", "-o", tmp_path / "out").refuses(problem)
    assert not (tmp_path / "out").exists()


def test_names_cannot_break_the_files(cli: Any, tmp_path: Path) -> None:
    item = pod_host("x: {#\n- y", 'V"100\n  - {type: evil}', {"nvidia.com/gpu": "1"})
    (tmp_path / "nodes.json").write_text(json.dumps(item))
    assert cli("init", "--nodes", tmp_path / "nodes.json", "-o", tmp_path).code == 0
    assert load(tmp_path / "cluster.yaml", Cluster).device_counts() == {'V"100\n  - {type: evil}': 1}


def test_several_lists_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("n1.xml", "n2.xml"):
        (tmp_path / name).write_text(smi(gpu("NVIDIA H100 80GB HBM3", 81559)))
    found = read_nodes([tmp_path / "n1.xml", tmp_path / "n2.xml"])
    assert [(node.name, node.device, node.memory_gib) for node in found.nodes] == [
        ("n1", "H100", 79.6),
        ("n2", "H100", 79.6),
    ]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(SLURM.encode())))
    assert read_nodes([Path("-")]).counts["V100"] == 8
