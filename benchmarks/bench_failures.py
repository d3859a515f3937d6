"""Jobs that are killed at random: does the ledger add up, and is the goodput what the plan's model of failures expects?

    python benchmarks/bench_failures.py [--jobs 10] [--mtbf 40] [--seconds 60] [--at-once 5] [--stretches 1]
    python benchmarks/bench_failures.py --stretches 0.25,1,4 --picture docs/failures.png

A job is two gloo processes under the hook, whose steps sleep; its start and its checkpoints sleep, too, and one that is killed
is started again at once. Kills (SIGKILL to one process, then to the other, as a launcher does) come after exponential times,
whatever the job is at. Beforehand one job without kills is timed: its step, its checkpoint, its start. With these and the mean
time between kills the interval is Daly's, and the goodput predicted: nothing of the killed jobs is in it. Measured is what the
telemetry of the hook says through the ledger of ``ddltool verify``; the wall clock is this script's own. ``--stretches``
multiplies the interval.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltool import runtime
from ddltool.analyzers.answers.reporting.charts import drawn
from ddltool.analyzers.answers.reporting.figures import Line, Lines
from ddltool.analyzers.job.diagnosing.ledger import LOST, RESTART, STEPS, ledger
from ddltool.analyzers.job.planning.failures import Failures
from ddltool.results import Ledger
from ddltool.tables import read_table

RANKS, STEP_S, SAVE_S, START_S = 2, 0.15, 0.25, 0.8
TIMED_STEPS, TIMED_EVERY = 60, 15
_LOOKS_S = 3600.0  # selectors take no month
_LOADED = ["torch._dynamo", "ddltool.runtime.hook.attaching", "ddltool.runtime.hook.telemetry", __name__]


def train(rank: int, folder: Path, attempt: int, until: int, every: int) -> None:
    """Be one process of an attempt: go on from the last checkpoint to step ``until``, saving after each ``every`` steps."""
    torch.set_num_threads(1)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    path, made = folder / "checkpoint.pt", 0
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{attempt}", rank=rank, world_size=RANKS)
    model = DistributedDataParallel(nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hook = runtime.attach(None, model=model, optimizer=optimizer, telemetry=folder / "telemetry.jsonl")
    if rank == 0:
        (folder / f"begin-{attempt}").write_text(str(time.time()))
    time.sleep(START_S)
    if path.exists():
        made = torch.load(path)["made"]
        hook.resumed(made)
    while made < until:
        time.sleep(STEP_S)
        hook.loss(model(torch.ones(8, 64)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        made += 1
        if made % every == 0 and made < until:
            with hook.checkpoint():
                time.sleep(SAVE_S)
                if rank == 0:
                    torch.save({"made": made}, folder / "new.pt")
                    (folder / "new.pt").rename(path)  # a kill leaves the old one or the new one
                dist.barrier()
    hook.close()
    if rank == 0:
        (folder / "end").write_text(str(time.time()))


def killed(folder: Path, mtbf_s: float, until: int, every: int, seed: int) -> int:
    """Run a job to its end, killing it every ``mtbf_s`` seconds on average, and return how often that was."""
    context, chance = multiprocessing.get_context("forkserver"), random.Random(seed)
    kill_at_s = time.monotonic() + chance.expovariate(1 / mtbf_s)
    for attempt in range(1_000_000):
        crew = [context.Process(target=train, args=(rank, folder, attempt, until, every)) for rank in range(RANKS)]
        for process in crew:
            process.start()
        alive = list(crew)
        while alive and (left_s := kill_at_s - time.monotonic()) > 0:
            wait([process.sentinel for process in alive], timeout=min(left_s, _LOOKS_S))
            if any(process.exitcode for process in alive):
                raise RuntimeError(f"a process of {folder} failed by itself")
            alive = [process for process in alive if process.exitcode is None]
        if not alive:
            return attempt
        for process in chance.sample(crew, len(crew)):
            process.kill()
        for process in crew:
            process.join()
        if all(process.exitcode == 0 for process in crew):  # it ended in that very moment
            return attempt
        kill_at_s = time.monotonic() + chance.expovariate(1 / mtbf_s)
    raise RuntimeError("the job never ends")


def read(folder: Path) -> Ledger:
    """Return the ledger of the job in a folder."""
    made = ledger(read_table(folder / "telemetry.jsonl"), str(folder))
    assert made is not None
    return made


def clock_s(folder: Path) -> float:
    """Return the seconds from the job's first hook to its end, by its own clock; hooks that saw no step are nothing's."""
    first = int(read_table(folder / "telemetry.jsonl")["restarts"].iloc[0])
    return float((folder / "end").read_text()) - float((folder / f"begin-{first}").read_text())


def timed(folder: Path, mtbf_s: float) -> tuple[Failures, float]:
    """Return what a job without kills says of checkpoints and restarts, and the seconds of its step."""
    begin_s = time.time()
    killed(folder, 1e9, TIMED_STEPS, TIMED_EVERY, 0)
    made = read(folder)
    before_hook_s = float((folder / "begin-0").read_text()) - begin_s
    return Failures(
        mtbf_s=mtbf_s,
        checkpoint_s=made.parts_s["checkpoint"] / made.checkpoints,
        restart_s=made.parts_s[RESTART] + before_hook_s,
    ), sum(made.parts_s[part] for part in STEPS) / made.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One killed job: its ledger, its own clock, how often it was killed."""

    ledger: Ledger
    clock_s: float
    kills: int

    @property
    def trained_s(self) -> float:
        """Seconds of steps that were kept."""
        return sum(self.ledger.parts_s[part] for part in STEPS)


def time_one(folder: Path, mtbf_s: float) -> tuple[Failures, float]:
    """Return :func:`timed` of the second job: the first start loads what the others find loaded."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_LOADED)
    for name in ("warm", "timed"):
        (folder / name).mkdir()
        found = timed(folder / name, mtbf_s)
    return found


def measure(
    folder: Path, failures: Failures, step_s: float, *, jobs: int, seconds: float, at_once: int
) -> tuple[float, list[Outcome]]:
    """Return the goodput that is predicted, and what became of the jobs, each of ``seconds`` of training."""
    every, until = max(1, round(failures.interval_s(1) / step_s)), round(seconds / step_s)

    def run(seed: int) -> Outcome:
        place = folder / str(seed)
        place.mkdir(parents=True)
        kills = killed(place, failures.mtbf_s, until, every, seed)
        return Outcome(ledger=read(place), clock_s=clock_s(place), kills=kills)

    with ThreadPoolExecutor(at_once) as pool:
        return 1 / failures.factor(1), list(pool.map(run, range(1, jobs + 1)))


def goodput(outcomes: Sequence[Outcome]) -> float:
    """Return the share of the jobs' wall clock that was training which lasted."""
    return sum(it.trained_s for it in outcomes) / sum(it.clock_s for it in outcomes)


def draw(path: Path, failures: Failures, dots: Mapping[float, float]) -> None:
    """Draw the share of the time that trains by the interval between checkpoints; ``dots``: measured, by interval (s)."""
    intervals_s = [min(dots) / 2 * (4 * max(dots) / min(dots)) ** (step / 60) for step in range(61)]
    shares = [1 / replace(failures, checkpoint_interval_s=each).factor(1) for each in intervals_s]
    line = Line(
        label="predicted",
        x=np.array(intervals_s),
        y=np.array(shares),
        dots=(np.array(list(dots)), np.array(list(dots.values()))),
    )
    figure = Lines(
        title=f"Goodput by the interval; dots: measured, a kill every {failures.mtbf_s:g} s",
        lines=[line],
        xlabel="training between checkpoints, s",
        ylabel="goodput",
        x_axis="log",
        marks=[("Daly", failures.interval_s(1))],
    )
    path.write_bytes(drawn([figure], "png", width=380))


def show(title: str, predicted: float, outcomes: Sequence[Outcome]) -> None:
    """Print a row for each job; ledger and parts against the job's own clock."""
    print(f"{title}\njob   kills   clock    ledger     parts    lost   restart   goodput")
    for number, it in enumerate(outcomes, 1):
        parts_s = it.ledger.parts_s
        print(
            f"{number:3} {it.kills:7} {it.clock_s:7.1f} {it.ledger.wall_s / it.clock_s - 1:+9.2%}"
            f"{sum(parts_s.values()) / it.clock_s - 1:+10.2%} {parts_s[LOST]:7.1f} {parts_s[RESTART]:9.1f} "
            f"{it.trained_s / it.clock_s:9.1%}"
        )
    found = goodput(outcomes)
    kills = sum(it.kills for it in outcomes)
    print(f"all {kills:7}   goodput {found:.1%}, predicted {predicted:.1%} ({predicted / found - 1:+.1%})", flush=True)


def main() -> None:
    """Time a job, then kill others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--mtbf", type=float, default=40.0, help="mean seconds between kills of a job")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training in each job")
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--stretches", default="1", help="of Daly's interval, with commas")
    parser.add_argument("--picture", type=Path)
    asked, dots = parser.parse_args(), dict[float, float]()
    with tempfile.TemporaryDirectory() as folder:
        failures, step_s = time_one(Path(folder), asked.mtbf)
        print(
            f"timed: a step {step_s:.4f} s, a checkpoint {failures.checkpoint_s:.3f} s, a start {failures.restart_s:.2f} s; "
            f"Daly's interval {failures.interval_s(1):.2f} s"
        )
        for stretch in map(float, asked.stretches.split(",")):
            tried = replace(failures, checkpoint_interval_s=stretch * failures.interval_s(1))
            place, many = Path(folder) / f"{stretch:g}", {"jobs": asked.jobs, "at_once": asked.at_once}
            predicted, outcomes = measure(place, tried, step_s, seconds=asked.seconds, **many)
            show(f"{stretch:g} x Daly's interval", predicted, outcomes)
            dots[tried.interval_s(1)] = goodput(outcomes)
            if asked.picture:
                draw(asked.picture, failures, dots)


if __name__ == "__main__":
    main()
