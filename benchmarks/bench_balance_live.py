"""Load balancing in real training: examples/balance_digits.py on 4 gloo processes, and partitioned digits on 5.

    python benchmarks/bench_balance_live.py --speed        # BSP, LB-BSP and known speeds; the slow worker changes at step 60
    python benchmarks/bench_balance_live.py --cpu-limit    # real computation, one worker with less CPU; moves midway; 3 seeds
    python benchmarks/bench_balance_live.py --accuracy     # equal batches, unequal weighted, unequal plain; 3 seeds
    python benchmarks/bench_balance_live.py --partitions   # two classes per rank: samples that move, that stay, i.i.d.; 3 seeds

With --speed, speeds are emulated by sleeping per sample (see the example). --cpu-limit needs a writable cpu control group;
with --compete it is a process in the worker's group that takes half of its share. Accuracy is on 360 held-out digits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpu_limit import CpuLimits

from ddltool.errors import InputError

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "balance_digits.py"
MOVE_AT = 60
SIZES = "89,21,12,6"  # the paper's


def torchrun(processes: int, script: Path, *options: object) -> Any:
    """Return what rank 0 printed as JSON."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        processes,
        script,
        *options,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(list(map(str, command)), env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            answer, complaints = process.communicate()
        except BaseException:
            process.terminate()  # the launcher ends its workers
            raise
    if process.returncode:
        sys.exit(complaints[-2000:])
    return json.loads(answer.strip().splitlines()[-1])


def typical(rows: list[dict[str, Any]], begin: int, end: int) -> float:
    """Return the median seconds of steps [begin, end), the tails of epochs left out: every twelfth step is one."""
    return statistics.median(row["seconds"] for row in rows[begin:end] if row["step"] % 12 != 11)


def speed(per_sample_ms: float) -> None:
    """Train with emulated speeds in every way and print the step times."""
    runs = {}
    for name, mode in (
        ("BSP", "bsp"),
        ("known speeds", "oracle"),
        ("LB-BSP, EMA", "cpu"),
        ("LB-BSP, Algorithm 2", "gpu"),
    ):
        options = ("--mode", mode, "--epochs", 10, "--move-at", MOVE_AT, "--per-sample-ms", per_sample_ms, "--rows")
        runs[name] = torchrun(4, EXAMPLE, *options)["rows"]
    print("median ms of steps    20-59  gain   61-64  65-79  80-119  gain   sizes at 59, at the end")
    spans = {
        name: [typical(rows, *span) for span in ((20, 60), (61, 65), (65, 80), (80, 120))]
        for name, rows in runs.items()
    }
    for name, times in spans.items():
        gains = [(spans["BSP"][at] - times[at]) / (spans["BSP"][at] - spans["known speeds"][at]) for at in (0, 3)]
        sizes = [tuple(runs[name][at]["sizes"]) for at in (58, -1)]
        shown = [f"{value * 1e3:.0f}" for value in times]
        print(
            f"{name:20}  {shown[0]:>5}  {gains[0]:4.0%}   {shown[1]:>5}  {shown[2]:>5}  {shown[3]:>6}  {gains[1]:4.0%}   "
            f"{sizes[0]} {sizes[1]}"
        )


def compete(steps: int) -> None:
    """Two processes, on the core of one a third that computes: equal batches and LB-BSP, in turns."""
    for mode in ("bsp", "cpu", "bsp", "cpu"):
        options = (
            "--mode",
            mode,
            "--compete",
            "--width",
            100_000,
            "--epochs",
            -(-steps // 6),
            "--total-batch",
            256,
            "--move-at",
            10**6,
        )
        rows = torchrun(2, EXAMPLE, *options, "--rows")["rows"]
        print(f"{mode:4} {typical(rows, 20, len(rows)) * 1e3:6.0f} ms, sizes {tuple(rows[-1]['sizes'])}", flush=True)


LIMITED = {2: (0.30, 0.10), 4: (0.30, 0.10)}  # shares of a core: of each other worker, of the slow one
VARIANTS = {"bsp": "BSP", "oracle": "limits known", "cpu": "LB-BSP, EMA", "gpu": "LB-BSP, Algorithm 2"}


def cpu_limit(options: argparse.Namespace) -> None:
    """Real CPU limits: worker n - 1 is slow, from the middle of the run on worker 0."""
    processes, variants = options.processes, options.variants.split(",")
    usual, slow = LIMITED[processes]
    shares = (usual, usual / 2) if options.compete else (usual, slow)  # a rival in its group takes half
    limits = [usual] * (processes - 1) + [usual if options.compete else slow]
    found = []
    for seed in range(options.seeds):
        with CpuLimits(tuple(limits)) as groups:
            given = {
                "variants": variants,
                "shares": shares,
                "groups": list(map(str, groups.groups)),
                "compete": options.compete,
                "steps": options.steps,
                "move_at": options.steps // 2,
                "trials": options.trials,
                "total_batch": 64 * processes,
                "channels": 64,
                "seed": seed,
            }
            found.append(torchrun(processes, Path(__file__).resolve(), "--limited-worker", json.dumps(given)))
    slowed = "with a rival in it" if options.compete else f"{slow:.0%}"
    load = os.getloadavg()[2]
    print(f"{processes} processes, {usual:.0%} of a core each, one {slowed}; load of the machine {load:.0f}")
    tell_limited(found, variants, options.steps)
    if options.per_step:
        print(json.dumps(found))


def tell_limited(found: list[dict[str, Any]], variants: list[str], steps: int) -> None:
    """Medians over the second half before and after the move, the mean over all; gains in the oracle's gain; all seeds."""
    move_at = steps // 2
    spans = ((move_at // 2, move_at), (steps - move_at // 2, steps), (0, steps))
    names = [f"{begin}-{end - 1}" for begin, end in spans[:2]]
    print(
        f"{'median ms of steps':20}  {names[0]:>6}  gain  {names[1]:>6}  gain  mean of all  gain   settled by seed",
        end="",
    )
    print("                back after  sizes before, at the end")

    def taken(run: dict[str, Any], name: str, at: int) -> list[float]:
        return run[name]["seconds"][slice(*spans[at])]

    def gain(runs: list[dict[str, Any]], name: str, at: int) -> tuple[float, float]:
        """Return seconds and the share of the oracle's gain."""
        middle = statistics.mean if at == 2 else statistics.median
        times = {key: middle(value for run in runs for value in taken(run, key, at)) for key in ("bsp", "oracle", name)}
        return times[name], (times["bsp"] - times[name]) / (times["bsp"] - times["oracle"])

    for name in variants:
        pooled = [gain(found, name, at) for at in range(3)]
        shown = "  ".join(
            f"{1e3 * time:{width}.0f}  {share:4.0%}" for (time, share), width in zip(pooled, (6, 6, 11), strict=True)
        )
        single = ", ".join("/".join(f"{gain([run], name, at)[1]:.0%}" for at in (0, 1)) for run in found)
        back = ", ".join(str(back_after(run, name, move_at)) for run in found)
        sizes = [tuple(found[0][name]["sizes"][at]) for at in (move_at - 1, -1)]
        print(f"{VARIANTS[name]:20}  {shown}   {single:30}  {back:>10}  {sizes[0]} {sizes[1]}")


def back_after(run: dict[str, Any], name: str, move_at: int) -> int | None:
    """Return the steps after the move until the median of three has 80 % of the oracle's gain."""
    bsp, best = (statistics.median(run[key]["seconds"][move_at:]) for key in ("bsp", "oracle"))
    after = run[name]["seconds"][move_at:]
    enough = bsp - 0.8 * (bsp - best)
    return next((at for at in range(len(after) - 2) if statistics.median(after[at : at + 3]) <= enough), None)


def accuracy() -> None:
    """Train with equal, weighted and plainly averaged batches and print the accuracies."""
    print("                       accuracy after epoch 1     2     4     10   each seed after 10")
    for name, options in (
        ("equal", ("--mode", "bsp")),
        ("unequal, weighted", ("--sizes", SIZES)),
        ("unequal, plain", ("--sizes", SIZES, "--naive")),
    ):
        runs = [torchrun(4, EXAMPLE, *options, "--per-sample-ms", 0, "--seed", seed)["accuracy"] for seed in range(3)]
        means = [sum(run[epoch] for run in runs) / 3 for epoch in (0, 1, 3, 9)]
        print(f"{name:20}  {'  '.join(f'{value:.3f}' for value in means):>44}   {[round(run[9], 3) for run in runs]}")


def partitions_worker() -> None:
    """One of 5 ranks: rank r begins with digits 2 r and 2 r + 1, batches are 8, 12, 16, 20 and 24 (the paper's by 8)."""
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import TensorDataset

    from ddltool.runtime.balancing.control import BalanceOptions, balance
    from ddltool.runtime.balancing.partitioned import PartitionedData

    dist.init_process_group("gloo")
    rank, sizes, steps = dist.get_rank(), (8, 12, 16, 20, 24), 180
    torch.set_num_threads(1)
    images, targets = load_digits(return_X_y=True)
    found = {}
    for seed in range(3):
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
        features, labels = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(targets)[order]
        for name in ("i.i.d.", "moving", "staying"):
            torch.manual_seed(seed)
            model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            train = TensorDataset(features[:1437], labels[:1437])
            balancer = balance(model, optimizer, train, sizes=sizes, options=BalanceOptions(enabled=False))
            mine = labels[:1437] // 2 == rank
            threshold = 2.0 if name == "moving" else 1e9
            data = PartitionedData((features[:1437][mine], labels[:1437][mine]), threshold=threshold, seed=seed)
            loader, step, changed = balancer.dataloader(seed=seed), 0, None
            stream = iter(loader)
            while step < steps:
                if name == "i.i.d.":
                    batch = next(stream, None)
                    if batch is None:
                        balancer.set_epoch(step)
                        stream = iter(loader)
                        continue
                else:
                    batch = data.next_batch(sizes[rank])
                optimizer.zero_grad()
                balancer.loss(nn.functional.cross_entropy(model(batch[0]), batch[1])).backward()
                optimizer.step()
                step += 1
                if name != "i.i.d." and data.after_step(sizes):
                    changed = step
            with torch.no_grad():
                right = (model.module(features[1437:]).argmax(1) == labels[1437:]).float().mean().item()
            found[f"{name} {seed}"] = (right, changed, data.partitions, [round(count, 1) for count in data.counts])
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def partitions() -> None:
    found = torchrun(5, Path(__file__).resolve(), "--worker")
    print("          accuracy by seed        moved at step  partitions at the end            traversals since")
    for name in ("i.i.d.", "moving", "staying"):
        rows = [found[f"{name} {seed}"] for seed in range(3)]
        print(f"{name:8}  {[round(row[0], 3) for row in rows]}  {rows[0][1]!s:>13}  {rows[0][2]}  {rows[0][3]}")


def main() -> None:
    """Run what was asked for, or be a worker of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument(
        "--compete",
        action="store_true",
        help="a real competing process; needs two cores to itself, or --cpu-limit as well",
    )
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--partitions", action="store_true")
    parser.add_argument("--per-sample-ms", type=float, default=4.0)
    parser.add_argument("--cpu-limit", action="store_true", help="real computation under real CPU limits (cgroup)")
    parser.add_argument("--processes", type=int, choices=sorted(LIMITED), default=2, help="for --cpu-limit")
    parser.add_argument("--steps", type=int, default=100, help="for --cpu-limit and --compete")
    parser.add_argument("--seeds", type=int, default=3, help="for --cpu-limit")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="for --cpu-limit, bsp and oracle among them")
    parser.add_argument(
        "--per-step", action="store_true", help="for --cpu-limit: every step's seconds and sizes as JSON"
    )
    parser.add_argument(
        "--trials", type=int, default=9, help="for --cpu-limit: steps to try each fixed size beforehand"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limited-worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.limited_worker:
        from balance_limited import work

        work(options.limited_worker)
    if options.cpu_limit:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the groups are removed on the way out
        try:
            cpu_limit(options)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
    if options.worker:
        partitions_worker()
    if options.speed:
        speed(options.per_sample_ms)
    elif options.compete and not options.cpu_limit:
        compete(options.steps)
    if options.accuracy:
        accuracy()
    if options.partitions:
        partitions()


if __name__ == "__main__":
    main()
