"""Every strategy planned, emitted, run and verified on this machine: processes as devices, with real CPU limits.

    python benchmarks/planned_runs.py                  # about ten minutes on idle cores
    python benchmarks/planned_runs.py --steps 12 --cluster pair --strategies bsp,lb-bsp

Each device is a process in a control group of its own (root on Linux). ``ddltool profile`` measures each type's step while
the other devices compute, for they share caches, memory and perhaps a core's two threads; pilot runs with equal shares,
before, between and after those, measure what the exchange takes here and how far one run is from another; then each
strategy is planned from these, its launcher is emitted and started, and ``ddltool verify`` reads its telemetry. FSDP2 and
HSDP are planned from the model and the links that ``ddltool network`` measures under the same limits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_limit import CpuLimits

from ddltool.analyzers.job.diagnosing.verification import verify
from ddltool.analyzers.job.placement.problem import from_job
from ddltool.analyzers.job.planning.job_inputs import capabilities_of, devices_of
from ddltool.analyzers.job.planning.layouts import layouts_of
from ddltool.analyzers.job.planning.options import PlanOptions
from ddltool.analyzers.job.planning.planning import auto_plan, parameters_of, with_compute
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.measured.feedback import read_run
from ddltool.artifacts import load, save
from ddltool.decision import Layout, Option
from ddltool.errors import DdlToolError, Infeasible
from ddltool.job import Job
from ddltool.links import Link
from ddltool.plans import Enforcement, Plan, RankEnforcement
from ddltool.results import NetworkResult
from ddltool.tables import read_table

CLUSTERS = {
    "mixed": {"fast": (2, 0.5), "slow": (2, 0.25)},
    "pair": {"fast": (1, 0.8), "slow": (1, 0.4)},
    "even": {"fast": (4, 0.4)},
}
"""By cluster and type: how many devices, and the share of a core that each has."""
PILOTED = ("bsp", "lb-bsp", "est", "goodput", "elastic-bsp")
SHARDED = ("ddp", "fsdp", "hsdp")
RUNS = {"mixed": PILOTED, "pair": ("bsp", "lb-bsp", "elastic-bsp"), "even": SHARDED}
BATCH, LIMIT_S = 4, 240.0

MODEL = """
import os
from pathlib import Path

import torch
from torch import nn

WIDTH, TOKENS = 256, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, inputs):
        return inputs + self.layers(inputs)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def make_model():
    groups = os.environ.get("CPU_GROUPS", "").split(":")
    rank = int(os.environ.get("RANK", "0"))
    if rank < len(groups) and groups[rank]:  # from here on this process is a device of its type
        Path(groups[rank], "cgroup.procs").write_text(str(os.getpid()))
    torch.manual_seed(0)
    return Network(), torch.randn(8, TOKENS, WIDTH)
"""
TRAIN = """
import json, os, sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool import runtime
from model import TOKENS, WIDTH, make_model

torch.set_num_threads(1)
torch.manual_seed(1)
steps, plan = int(sys.argv[1]), json.load(open(os.environ["DDLTOOL_ENFORCE"]))
data = torch.randn(steps * plan["total_batch_size"], TOKENS, WIDTH)
dataset, loss_of = TensorDataset(data, data.flip(0)), nn.MSELoss()
if plan["strategy"] == "elastic-bsp":
    from ddltool.runtime.servers import follow

    model = make_model()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, answers in follow("enforce.json", model, optimizer, dataset):
        loss_of(model(inputs), answers).backward()
    sys.exit()
dist.init_process_group("gloo")
model = make_model()[0]
if plan["strategy"] == "est":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in runtime.ElasticTrainer.planned("enforce.json", model, optimizer, loss_of, dataset).epoch(0):
        pass
else:
    model = runtime.shard(model, "enforce.json") if plan["sharding"] else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hook = runtime.attach("enforce.json", model=model, optimizer=optimizer, dataset=dataset)
    for inputs, answers in hook.dataloader(batch_size=1, drop_last=True):
        optimizer.zero_grad()
        passes = hook.accumulation_steps + 1
        for part, answer in zip(inputs.chunk(passes), answers.chunk(passes)):
            hook.loss(loss_of(model(part), answer)).backward()
        optimizer.step()
    hook.close()
dist.destroy_process_group()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One planned run."""

    cluster: str
    name: str
    devices: str
    predicted_s: float
    low_s: float | None
    high_s: float | None
    measured_s: float
    samples: int

    @property
    def inside(self) -> bool:
        """Whether the interval of the prediction holds what was measured."""
        return self.low_s is not None and self.high_s is not None and self.low_s <= self.measured_s <= self.high_s


def ddltool(folder: Path, *arguments: object, groups: Sequence[Path] = (), within: Path | None = None) -> str:
    """Run a command in ``folder``, its models in ``groups`` or all of it ``within`` one; return what it printed."""
    environment = {**os.environ, "CPU_GROUPS": ":".join(map(str, groups)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ddltool", *map(str, arguments)]
    if within is not None:
        command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(within), *command]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        sys.exit(f"{' '.join(command[3:])}: {done.stderr[-2000:]}")
    return done.stdout


@contextlib.contextmanager
def busy(groups: Sequence[Path]) -> Iterator[None]:
    """Let a process compute in each group meanwhile, as the other devices of a job do."""
    text = (
        "import sys, torch; torch.set_num_threads(1); a = torch.randn(256, 256); print(flush=True)\nwhile True: a @ a"
    )
    command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"']
    others = [
        subprocess.Popen([*command, str(group), sys.executable, "-c", text], stdout=subprocess.PIPE) for group in groups
    ]
    try:
        for process in others:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def launch(folder: Path, nodes: int, groups: Sequence[Path], *arguments: object) -> None:
    """Start ``launch.sh`` on every node, here, and wait; end all where one fails or the time is up."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **{**os.environ, "CPU_GROUPS": ":".join(map(str, groups)), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"},
        **{
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
        },
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    started = []
    try:
        for node in range(nodes):
            with (folder / f"node{node}.log").open("w") as log:
                process = subprocess.Popen(
                    ["bash", "launch.sh", *map(str, arguments)],
                    cwd=folder, env={**environment, "NODE_RANK": str(node)}, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            started.append(process)
        for node, process in enumerate(started):
            if process.wait(LIMIT_S):
                told = (folder / f"node{node}.log").read_text()
                sys.exit("\n".join(line for line in told.splitlines() if "rror" in line)[:2000])
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run(plan: Plan, folder: Path, groups: Mapping[str, Sequence[Path]], steps: int) -> None:
    """Emit a plan for torchrun and run it for so many steps."""
    save(plan, folder / "plan.json")
    (folder / "telemetry.jsonl").unlink(missing_ok=True)
    ddltool(folder, "emit", "plan.json", "--target", "torchrun", "-o", "launch.sh", "--script", f"train.py {steps}")
    left = {name: iter(each) for name, each in groups.items()}
    ranks = [next(left[entry.device_type]) for entry in load(folder / "enforce.json", Enforcement).ranks]
    launch(folder, len({row.device_type for row in plan.assignments}), ranks)


def pilot(job: Job, folder: Path, groups: Mapping[str, Sequence[Path]], steps: int) -> None:
    """Run equal shares on all devices, and add to ``pilot.jsonl``."""
    types = [offer.type for offer in job.devices for _ in range(offer.count)]
    size = job.max_workers * job.batch_size // len(types)
    ranks = [
        RankEnforcement(rank=rank, device_type=name, ests=1, local_batch_size=size) for rank, name in enumerate(types)
    ]
    total = size * len(types)
    about = {"job": job.name, "world_size": len(types), "total_batch_size": total, "telemetry": "pilot.jsonl"}
    save(Enforcement(strategy="bsp", ranks=ranks, **about), folder / "enforce.json")
    text = f'export DDLTOOL_ENFORCE="{folder}/enforce.json"\nexec torchrun --standalone --nproc-per-node {len(types)} '
    (folder / "launch.sh").write_text(f'{text}train.py "$@"\n')
    launch(folder, 1, [group for each in groups.values() for group in each], steps)


def given(**more: object) -> PlanOptions:
    """Return what the command line would say beside the job."""
    return PlanOptions(**more)  # type: ignore[arg-type]


def sharded(job: Job, folder: Path, kind: str) -> tuple[Plan, Layout]:
    """Return the fastest plan of a kind of sharding, without checkpointing, on all devices; and its layout."""
    path, found_network = folder / "job.yaml", NetworkResult.model_validate_json((folder / "network.json").read_text())
    rate, latency = found_network.bandwidth_bytes_per_s, found_network.latency_s
    link = Link(kind="plain", bytes_per_s=rate, latency_s=latency)
    fabrics = {it.type: Fabric(inside=link, between=link, gpus_per_node=it.count) for it in job.devices}
    capabilities = capabilities_of(job, folder, str(path), lambda text: None)
    layouts = layouts_of(job, devices_of(job, str(path)), fabrics)
    assert layouts is not None
    problem = from_job(job, capabilities)
    layouts = layouts.at_speeds(capabilities, job.batch_size)
    for found in layouts.search(problem, equal=True)[0]:
        shape = found.layout
        if (shape.sharding, shape.checkpointing, sum(shape.devices.values())) == (kind, "none", job.max_workers):
            made = with_compute(layouts.plan(found, problem, "bsp"), capabilities)
            buckets, prefetch = layouts.communication(found)
            parameters = parameters_of(layouts.work.traced.at(job.batch_size), ordered=False)
            return made.model_copy(update={"ddp": buckets, "fsdp2": prefetch, "parameters": parameters}), shape
    raise Infeasible(f"no layout of kind {kind}")


def job_of(cluster: str, folder: Path) -> Job:
    """Return the job of a cluster, whose types' fits are in ``folder``."""
    offers = [
        {"type": name, "count": count, "per_node": count, "goodput": f"{name}.json"}
        for name, (count, _) in CLUSTERS[cluster].items()
    ]
    total = sum(count for count, _ in CLUSTERS[cluster].values())
    more: dict[str, object] = {"max_workers": 2 * total}
    if cluster == "even":
        spec = {"architecture": "CPU", "peak_flops": {"float32": 5e10}, "memory_bytes_per_s": 1e10, "memory_gib": 4}
        offers = [{**offer, "spec": spec} for offer in offers]
        more = {"max_workers": total, "model": f"{folder}/model.py:make_model"}
    else:
        section = {"max_batch_size": 16 * total, "max_local_batch_size": 16, "noise_scale": 64.0}
        more["goodput"] = {**section, "initial_batch_size": BATCH * 2 * total}
    document = {
        "name": cluster,
        "batch_size": BATCH * (2 if cluster == "even" else 1),
        "devices": offers,
        "optimizer": "sgd",
    }
    return Job.model_validate({**document, **more})


def runs(cluster: str, wanted: Sequence[str], steps: int, folder: Path) -> Iterator[Row]:
    """Yield the planned runs of one cluster."""
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(TRAIN)
    shares = tuple(share for count, share in CLUSTERS[cluster].values() for _ in range(count))
    with CpuLimits(shares) as limits:
        left = iter(limits.groups)
        groups = {name: [next(left) for _ in range(count)] for name, (count, _) in CLUSTERS[cluster].items()}
        job = job_of(cluster, folder)
        for name, each in groups.items():
            if cluster != "even":
                pilot(job, folder, groups, steps // 2)
            sizes = ("--batch-sizes", "4,8,16", "--repeats", max(20, steps), "--warmup", 10, "--threads", 1)
            where = ("--device-name", name, "-o", f"{name}.csv")
            with busy([group for every in groups.values() for group in every if group != each[0]]):
                ddltool(folder, "profile", "model.py:make_model", *sizes, *where, groups=each[:1])
            ddltool(folder, "fit", f"{name}.csv", "-o", f"{name}.json")
        if cluster == "even":
            with CpuLimits((sum(shares),)) as together:
                asked = ("network", "--replicas", len(shares), "-o", "network.json")
                ddltool(folder, *asked, within=together.groups[0])
        if cluster != "even":
            pilot(job, folder, groups, steps // 2)
        for name in wanted:
            option: Option | Layout | None
            try:
                if cluster == "even":
                    made, option = sharded(job, folder, name)
                else:
                    asked = given(telemetry=folder / "pilot.jsonl")
                    made = auto_plan(job, folder / "job.yaml", asked, name)
                    if name == "elastic-bsp":  # the pilots do not tell what its servers take: the first run does
                        run(made, folder, groups, steps // 2)
                        (folder / "telemetry.jsonl").rename(folder / "servers.jsonl")
                        made = auto_plan(job, folder / "job.yaml", given(telemetry=folder / "servers.jsonl"), name)
                    options = made.decision.options if made.decision is not None else []
                    option = next((it for it in options if it.strategy == made.strategy), None)
                run(made, folder, groups, steps)
                found = verify(made, read_run(read_table(folder / "telemetry.jsonl"), "telemetry.jsonl"))
            except DdlToolError as error:
                print(f"{cluster} {name}: {error}", flush=True)
                continue
            yield Row(
                cluster=cluster,
                name=name,
                devices=", ".join(
                    f"{row.devices} {row.device_type} x {row.local_batch_size}" for row in made.assignments
                ),
                predicted_s=option.step_s or 0.0 if isinstance(option, Layout) else made.iteration_s,
                low_s=None if option is None else option.low_s,
                high_s=None if option is None else option.high_s,
                measured_s=found.iteration.measured_s,
                samples=sum(row.devices * row.local_batch_size for row in made.assignments),
            )


def main() -> None:
    """Run what is asked for, and print the table and the ranking of each cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--cluster", choices=[*CLUSTERS, "all"], default="all")
    parser.add_argument("--strategies", help="of the clusters'; all by default")
    asked = parser.parse_args()
    rows: list[Row] = []
    print("cluster  strategy      predicted          interval        measured  inside  devices", flush=True)
    for cluster in CLUSTERS if asked.cluster == "all" else [asked.cluster]:
        names = [name for name in RUNS[cluster] if asked.strategies is None or name in asked.strategies.split(",")]
        with tempfile.TemporaryDirectory() as folder:
            for row in runs(cluster, names, asked.steps, Path(folder)):
                ends = (
                    "-"
                    if row.low_s is None or row.high_s is None
                    else f"{row.low_s * 1e3:.1f} to {row.high_s * 1e3:.1f}"
                )
                times = f"{row.predicted_s * 1e3:9.1f} ms {ends:>18} {row.measured_s * 1e3:9.1f} ms"
                print(
                    f"{cluster:8} {row.name:12} {times}  {'yes' if row.inside else 'NO':6}  {row.devices}", flush=True
                )
                rows.append(row)
    print(f"inside: {sum(row.inside for row in rows)} of {len(rows)}")
    for cluster in dict.fromkeys(row.cluster for row in rows):
        mine = [row for row in rows if row.cluster == cluster]
        for what, seconds in (("predicted", lambda row: row.predicted_s), ("measured", lambda row: row.measured_s)):
            order = sorted(mine, key=lambda row: seconds(row) / row.samples)
            print(f"{cluster}, {what}: {' < '.join(row.name for row in order)}")


if __name__ == "__main__":
    main()
