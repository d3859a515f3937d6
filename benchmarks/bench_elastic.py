"""What elastic training costs: context switches, gradient handling, memory and traffic, side by side.

    python benchmarks/bench_elastic.py [--steps 20] [--quick]

One thread per process. Printed are: the share of a step that goes into switching logical workers (one process, four
workers; CPU time, so that a busy machine counts less) and into keeping their gradients apart; the peak memory of a
process against the number of its workers, each in a fresh process; the time of the ordered reduction over two
processes against ``all_reduce`` of the same gradients, taking turns, with the bytes that each process receives by count;
and the time until every logical worker has its first batch after a start, with data workers shared and not.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from ddltool.runtime.elastic.contexts import Contexts
from ddltool.runtime.elastic.ordered_mean import MIB, OrderedMean
from ddltool.runtime.elastic.processes import Processes
from ddltool.runtime.elastic.sample_feed import BatchTask, SampleFeed
from ddltool.runtime.elastic.trainer import ElasticTrainer


def conv_net(width: int = 32) -> nn.Module:
    """Return a convolutional network with BatchNorm and dropout for 32 x 32 images (2.8 M parameters at width 32)."""
    stages: list[nn.Module] = []
    inputs = 3
    for outputs in (width, 2 * width, 4 * width, 8 * width):
        stages += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    tail = [nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * width, 64 * width), nn.ReLU(), nn.Linear(64 * width, 10)]
    return nn.Sequential(*stages, *tail)


def trainer_of(model: nn.Module, workers: int, batch: int, **options: Any) -> ElasticTrainer:
    """Return a trainer on random images."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(1024, 3, 32, 32), torch.arange(1024) % 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    return ElasticTrainer(model, optimizer, loss, dataset, max_workers=workers, batch_size=batch, **options)


class Stopwatch:
    """Adds up the CPU time that a method takes, over all calls."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds = 0.0
        real: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return real(*args, **options)
            finally:
                self.seconds += time.thread_time() - begin

        setattr(owner, name, timed)


def shares(steps: int) -> list[dict[str, Any]]:
    """Measure, on one process with four workers, what share of a step goes where."""
    torch.set_num_threads(1)
    watches = {
        "enter": Stopwatch(Contexts, "enter"),
        "leave": Stopwatch(Contexts, "leave"),
        "take": Stopwatch(OrderedMean, "take"),
        "finish": Stopwatch(OrderedMean, "finish"),
    }
    rows = []
    for name, width, batch in (("conv net, 4 images", 16, 4), ("conv net, 16 images", 32, 16)):
        trainer = trainer_of(conv_net(width), 4, batch)
        made, begin = 0, 0.0
        for step in trainer.epoch(0):
            if step.number == 3:
                begin = time.thread_time()
                for watch in watches.values():
                    watch.seconds = 0.0
            made = step.number - 3
            if made == min(steps, trainer.steps_per_epoch - 4):
                break
        whole = time.thread_time() - begin
        switch = watches["enter"].seconds + watches["leave"].seconds
        rows.append(
            {
                "model": name,
                "step_ms": 1e3 * whole / made,
                "switch_us": 1e6 * switch / made / 4,
                "switch_share": switch / whole,
                "take_share": watches["take"].seconds / whole,
                "finish_share": watches["finish"].seconds / whole,
            }
        )
    return rows


def peak_memory(rank: int, size: int, folder: str, workers: int) -> None:
    """Train two steps in a fresh process and leave its peak memory in ``folder``."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    trainer = trainer_of(conv_net(96), workers, 4)
    for step in trainer.epoch(0):
        if step.number == 2:
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    gradients = sum(value.numel() * value.element_size() for value in trainer.model.parameters()) / MIB
    buffers = sum(value.numel() * value.element_size() for value in trainer.model.buffers()) / MIB
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump({"peak_mib": peak, "gradients_mib": gradients, "buffers_mib": buffers}, file)


def spawn(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Run ``function(rank, size, folder, *args)`` in fresh processes; return what each left in its file."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(function, args=(size, folder, *args), nprocs=size)
        answers = []
        for rank in range(size):
            with open(f"{folder}/{rank}.json") as file:
                answers.append(json.load(file))
    return answers


def received_mib(processes: Processes, gradient_mib: float) -> float:
    """Return what process 0 receives in a step, by count."""
    owners = processes.owners
    sums = sum(rank > 0 and owners[rank - 1] != 0 for rank in processes.runs[0])
    return gradient_mib * (sums + (owners[-1] != 0))


def reduction(rank: int, size: int, folder: str, repeats: int) -> None:
    """Time the ordered mean and ``all_reduce`` of the same gradients in turns; leave medians in ``folder``.

    All turns of a step come at once, so nothing of the chain is hidden behind a backward pass: its worst case.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    parameters = dict(conv_net(64).named_parameters())
    count = sum(value.numel() for value in parameters.values())
    times: dict[str, list[float]] = {"all_reduce": []}
    means = {}
    for workers in (size, 2 * size, 4 * size):
        processes = Processes.this(workers)
        means[f"chain, {workers} workers"] = OrderedMean(parameters, processes), processes
        times[f"chain, {workers} workers"] = []
    flat, gradients = torch.randn(count), [torch.ones_like(value) for value in parameters.values()]
    for _ in range(repeats):
        for name, row in times.items():
            dist.barrier()
            begin = time.perf_counter()
            if name == "all_reduce":
                dist.all_reduce(flat)
            else:
                mean, processes = means[name]
                for virtual_rank in processes.local:
                    for value, gradient in zip(parameters.values(), gradients, strict=True):
                        value.grad = gradient
                    mean.take(virtual_rank)
                mean.finish(torch.zeros(len(processes.local), 1, dtype=torch.float64))
            row.append(time.perf_counter() - begin)
    gradient_mib = 4 * count / MIB
    received = {"all_reduce": 2 * (size - 1) / size * gradient_mib}
    received |= {name: received_mib(processes, gradient_mib) for name, (_, processes) in means.items()}
    result = {name: (1e3 * statistics.median(row[2:]), received[name]) for name, row in times.items()}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(result, file)


def whole_steps(rank: int, size: int, folder: str, steps: int) -> None:
    """Time whole steps of two trainers in turns; leave medians in ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    times: dict[str, list[float]] = {}
    runs = {}
    for each in (1, 4):
        name = f"{each} workers each"
        runs[name] = trainer_of(conv_net(48), each * size, 8).epoch(0)
        times[name] = []
    for _ in range(steps):
        for name, run in runs.items():
            dist.barrier()
            begin = time.perf_counter()
            next(run)
            times[name].append(time.perf_counter() - begin)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump({name: 1e3 * statistics.median(row[3:]) for name, row in times.items()}, file)


def first_batches(repeats: int = 5, workers: int = 8, each: int = 4) -> dict[str, float]:
    """Return the median seconds until all logical workers of a process have their first batch, from a fresh start."""
    dataset = TensorDataset(torch.randn(1024, 3, 32, 32), torch.arange(1024) % 10)
    tasks = [BatchTask(rank, 0, step, 0, tuple(range(8))) for step in range(4) for rank in range(workers)]
    times: dict[str, list[float]] = {"shared": [], "one set per logical worker": []}
    for _ in range(repeats):
        for name, row in times.items():
            begin = time.perf_counter()
            if name == "shared":
                feeds = [SampleFeed(dataset, default_collate, workers=each)]
                source = feeds[0].batches(tasks)
                for _ in range(workers):
                    next(source)
            else:
                feeds = [SampleFeed(dataset, default_collate, workers=each) for _ in range(workers)]
                sources = [feed.batches(tasks[rank::workers]) for rank, feed in enumerate(feeds)]
                for source in sources:
                    next(source)
            row.append(time.perf_counter() - begin)
            for feed in feeds:
                feed.close()
    return {name: statistics.median(row) for name, row in times.items()}


def main() -> None:
    """Measure all and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="fewer memory measurements")
    parser.add_argument("--shares", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.shares:
        print(json.dumps(shares(given.steps)))
        return
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--shares", "--steps", str(given.steps)]
    for row in json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout):
        print(
            f"{row['model']}: step {row['step_ms']:.1f} ms, one switch {row['switch_us']:.0f} us, switches "
            f"{row['switch_share']:.2%} of the step, keeping gradients {row['take_share']:.2%}, "
            f"reduction {row['finish_share']:.2%}"
        )
    os.environ["OMP_NUM_THREADS"] = "1"
    counts = (1, 8) if given.quick else (1, 2, 4, 8)
    for size in (1, 2):
        for each in counts:
            answers = spawn(peak_memory, size, each * size)
            peaks = ", ".join(f"{answer['peak_mib']:.0f}" for answer in answers)
            gradients, buffers = answers[0]["gradients_mib"], answers[0]["buffers_mib"]
            print(
                f"{size} processes, {each} workers each: peak {peaks} MiB "
                f"(gradients {gradients:.1f} MiB, buffers {buffers:.3f} MiB)",
                flush=True,
            )
    for name, (time_ms, mib) in spawn(reduction, 2, 12)[0].items():
        print(f"2 processes, {name}: {time_ms:.1f} ms, {mib:.1f} MiB received by process 0")
    for name, time_ms in spawn(whole_steps, 2, 12)[0].items():
        print(f"2 processes, {name}: step {time_ms:.0f} ms")
    torch.set_num_threads(1)
    for name, seconds in first_batches().items():
        print(f"8 logical workers, 4 data workers {name}: first batches after {1e3 * seconds:.0f} ms")


if __name__ == "__main__":
    main()
