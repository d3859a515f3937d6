"""Measures what ddltool costs a training script, by alternating runs with it on and off.

Start at :func:`measure_overhead`. On is ``DDLTOOL_HOLD=1`` (the goodput agent does all its work but does not change the
batch, so that both runs train alike), off is ``DDLTOOL_OFF=1`` (``attach(config)`` is ``attach(None)``, and the agent
only hands out batches). Each pair of runs gives a ratio; the result is the median over the pairs, with an interval that
assumes nothing about the noise. As a program (``python -m``) this module is the clock of one run: it runs the script
unchanged and times its steps.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.special import bdtr

from ddltool.analyzers.job.goodput.curve import interval_ranks
from ddltool.artifacts import write_text
from ddltool.errors import InputError
from ddltool.results import OverheadInterval, OverheadResult, OverheadRun

CONFIDENCE = 0.95
# A traceback's last line, such as "ValueError: ...", also with torchrun's prefix "[rank1]: ".
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b.*)", re.MULTILINE)
ENDING_S = 40.0
"""Seconds that torchrun may take to end its workers before it is killed."""
PATIENCE_S = 1.0
"""Seconds that a rank waits after its last step, for others to receive what it has sent."""


def ratio_interval(ratios: Sequence[float], confidence: float = CONFIDENCE) -> OverheadInterval:
    """Return the median of ``ratios`` with a distribution-free interval: from the k-th smallest to the k-th largest value.

    By the binomial distribution it is the narrowest such interval that contains the true median with at least
    ``confidence``. With too few values for one (fewer than 6 at 95 %) it is the whole range, and the result's confidence
    is the lower one that this has.

    >>> ratio_interval([1.0, 1.3, 1.1, 1.2, 1.4, 1.5, 1.6, 1.7]).low
    1.0
    """
    ordered = sorted(ratios)
    first, last = interval_ranks(len(ordered), confidence)
    coverage = 1 - 2 * float(bdtr(first, len(ordered), 0.5))
    return OverheadInterval(
        median=float(np.median(ordered)), low=ordered[first], high=ordered[last], confidence=max(coverage, 0.0)
    )


def verdict(interval: OverheadInterval, limit: float) -> Literal["within", "above", "not decided"]:
    """Return how the cost, which is ``ratio - 1`` for the ratios in ``interval``, compares with ``limit``.

    ``limit``: share of a step. The result is "not decided" if the interval contains the limit, or has less than 95 %
    confidence.
    """
    if interval.confidence < CONFIDENCE:
        return "not decided"
    if interval.low - 1 > limit:
        return "above"
    return "within" if interval.high - 1 <= limit else "not decided"


def measure_overhead(
    command: Sequence[str],
    *,
    pairs: int = 10,
    steps: int = 60,
    replicas: int = 1,
    limit: float | None = None,
    timeout_s: float = 3600.0,
    progress: Callable[[int], None] = lambda done: None,
) -> OverheadResult:
    """Return the cost of ddltool to a script: the ratios on / off of seconds per step (wall clock and CPU) over pairs of runs.

    Args:
        command: the script and its arguments.
        pairs: number of pairs of runs.
        steps: optimizer steps after which each run ends; the first quarter, at most 10, is warm-up.
        replicas: number of processes; more than one are started by torchrun.
        limit: a share of a step, for the verdict; None: no verdict.
        timeout_s: seconds that a run may take.
        progress: called with the number of runs that are done.

    Raises InputError for a script that fails, makes too few steps or takes too long.
    """
    demand_script(command)
    warmup = min(10, max(steps // 4, 1))
    runs: dict[bool, list[OverheadRun]] = {True: [], False: []}
    for pair in range(pairs):
        # On and off come first alternately, so that a drift of the machine's speed favours neither.
        order_of_runs = (True, False) if pair % 2 == 0 else (False, True)
        for is_on in order_of_runs:
            runs[is_on].append(_run(command, is_on, steps, warmup, replicas, timeout_s))
            progress(len(runs[True]) + len(runs[False]))
    run_pairs = list(zip(runs[True], runs[False], strict=True))
    wall = ratio_interval([on.wall_s / off.wall_s for on, off in run_pairs])
    cpu = ratio_interval([on.cpu_s / off.cpu_s for on, off in run_pairs])
    overall = None
    if limit is not None:
        verdicts = {verdict(wall, limit), verdict(cpu, limit)}
        # The overall verdict is the worse of those on wall clock and on CPU seconds.
        worst_first: tuple[Literal["above", "not decided", "within"], ...] = ("above", "not decided", "within")
        overall = next(word for word in worst_first if word in verdicts)
    return OverheadResult(
        script=shlex.join(command),
        replicas=replicas,
        limit=limit,
        verdict=overall,
        wall=wall,
        cpu=cpu,
        on=runs[True],
        off=runs[False],
    )


def _run(command: Sequence[str], is_on: bool, steps: int, warmup: int, replicas: int, timeout_s: float) -> OverheadRun:
    """Run the script once; return its wall-clock seconds (of the slowest rank) and CPU seconds (of all ranks) per step.

    ``is_on``: whether ddltool does its work or is switched off; ``warmup``: number of first steps that are left out of
    the result. The other arguments and the errors are those of :func:`measure_overhead`.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("DDLTOOL_OFF", "DDLTOOL_HOLD")}
    environment["DDLTOOL_HOLD" if is_on else "DDLTOOL_OFF"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "times")
        clock = ("-m", "ddltool.runtime.measuring.overhead", str(file), str(steps), *command)
        code, errors = run_script(clock, replicas, environment, command[0], timeout_s)
        files = [file.with_name(f"{file.name}.{rank}") for rank in range(replicas)]
        if code or not all(path.exists() for path in files):
            raise failure_of_script(command, code, errors)
        # By rank and step: (wall clock, CPU seconds) at the step's end.
        stamps = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    steps_made = min(len(rank_stamps) for rank_stamps in stamps)
    if steps_made < warmup + 2:
        problem = f"made {steps_made} optimizer steps, of which {warmup} are warm-up"
        raise InputError(command[0], problem, "let it train for longer, or ask for fewer --steps")
    # A stamp is the end of a step, so the first stamp after warm-up only begins one.
    timed_steps = steps_made - 1 - warmup
    # Of the timed steps: (wall clock, CPU seconds) by rank.
    spans_s = [np.subtract(rank_stamps[steps_made - 1], rank_stamps[warmup]) for rank_stamps in stamps]
    wall_s, cpu_s = np.transpose(spans_s) / timed_steps
    return OverheadRun(steps=steps_made, wall_s=float(wall_s.max()), cpu_s=float(cpu_s.sum()))


def demand_script(command: Sequence[str]) -> None:
    """Raise InputError unless the first word of ``command`` is the path of a file."""
    if not Path(command[0]).is_file():
        raise InputError(command[0], "is no file", "name a training script")


def failure_of_script(command: Sequence[str], code: int, errors: str) -> InputError:
    """Return the error for a script that ended with the exit ``code``, with the likeliest reason from its stderr.

    That is ddltool's first error line, or else the last exception that is not torchrun's own, or else the last line.
    ``errors``: the stderr.
    """
    ddltool_errors = [line for line in errors.splitlines() if line.startswith("error: ")]
    exceptions = [line for line in _ERROR.findall(errors) if "ChildFailedError" not in line]
    lines = errors.strip().splitlines()
    likeliest_first = [*ddltool_errors, *exceptions[-1:], *lines[-1:]]
    reason = likeliest_first[0] if likeliest_first else ""
    return InputError(command[0], f"failed with exit code {code}: {reason}", "see to it that it runs by itself")


def run_script(
    command: Sequence[str], replicas: int, environment: dict[str, str], name: str, timeout_s: float
) -> tuple[int, str]:
    """Run a Python command to its end, by torchrun for several ``replicas``; return (exit code, stderr).

    ``command``: the interpreter's arguments; ``environment``: all its variables; ``name``: the script, for the message.
    All its processes are ended, also by an exception. Raises InputError when it takes longer than ``timeout_s``.
    """
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(replicas))
    argv = [sys.executable, *(torchrun if replicas > 1 else ()), *command]
    child = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace")
    try:
        _, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise InputError(name, f"took longer than {timeout_s:g} s", "ask for fewer --steps") from None
    finally:
        if child.poll() is None:
            child.terminate()  # torchrun ends its workers after SIGTERM, but cannot after SIGKILL
            try:
                child.communicate(timeout=ENDING_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
    return child.returncode, errors


def _clock() -> None:
    """Run a script and time its steps; the command line is: file for the times, number of steps, script, its arguments.

    Every rank stamps wall clock and its own CPU seconds (of all threads, without data workers, which are processes)
    after each ``optimizer.step()``, by torch's global hook, so the clock is the same whether ddltool is on or off. The
    stamps go into a JSON file per rank, ``FILE.RANK``. After the last wanted step the process exits.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    file = Path(sys.argv[1])
    steps = int(sys.argv[2])
    script = sys.argv[3]
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(script).resolve().parent)  # as the interpreter does for a script
    stamps: list[tuple[float, float]] = []
    target = file.with_name(f"{file.name}.{os.environ.get('RANK', '0')}")

    def write() -> None:
        """Write the stamps atomically, so that a reader finds all or none."""
        write_text(target, json.dumps(stamps))

    def stamp_step(*_: object) -> None:
        """Stamp a step that an optimizer has made; after the last one, write the stamps and exit the process."""
        stamps.append((time.perf_counter(), time.process_time()))
        if len(stamps) == steps:
            write()
            time.sleep(PATIENCE_S)
            os._exit(0)  # in the middle of the script, as the rest of it is not measured

    register_optimizer_step_post_hook(stamp_step)
    runpy.run_path(script, run_name="__main__")
    write()


if __name__ == "__main__":
    _clock()
