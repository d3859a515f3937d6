"""Which small mistakes in the analyzers' cores would their tests not see? Mutants of cosmic-ray, sampled, one at a time.

``make mutants`` draws fresh ones from a seed of the clock, which it prints; ``--seed`` draws them again. It prints, per
module, how many the module's own tests kill with the 95 % interval of that share (Wilson's), and the rest as diffs.
Every position of the source (outside annotations and dataclasses' options) is drawn at most once, with one of cosmic-ray's
operators at random.
A copy of the working tree is mutated, never the tree itself. Against a mutant run the tests that call the function it is
in (all, where none does), in a fork that has loaded what others wrote.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import cosmic_ray.plugins
import pytest
from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import use_mutation
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).parents[1]
ROOMS = ("toolkit", "commands", "analyzers", "runtime", "fixtures")
CORES = {
    "analyzers/answers/emitting/enforcement.py": "answers/emitting/test_enforcement.py",
    "analyzers/job/goodput/noise_scale.py": "job/goodput/test_noise_scale.py",
    "analyzers/step/transfers/timeline.py": "step/transfers/test_timeline.py step/transfers/test_order.py",
    "analyzers/step/costs/kernel_times.py": "step/costs/test_kernel_times.py",
    "analyzers/step/communication/nccl.py": "step/communication/test_nccl.py",
    "analyzers/step/costs/memory.py": "step/costs/test_memory.py",
    "analyzers/job/goodput/fit.py": "job/goodput/test_fit.py",
    "analyzers/job/balancing/minmax.py": (
        "job/planning/test_split.py job/balancing/test_algorithm2.py job/balancing/test_sizing.py"
    ),
    "analyzers/cluster/simulator.py": "cluster/test_simulator.py",
    "analyzers/cluster/policies/ours.py": "cluster/test_policies.py",
    "analyzers/job/planning/compare.py": "job/planning/test_decision.py",
    "analyzers/job/diagnosing/diagnosis.py": "job/diagnosing/test_stragglers.py",
    "analyzers/step/costs/predict.py": "step/costs/test_predict.py",
    "analyzers/step/transfers/order.py": "step/transfers/test_order.py",
    "analyzers/step/transfers/efficiency.py": (
        "step/transfers/test_order.py step/transfers/test_efficiency.py step/transfers/test_timeline.py"
    ),
    "analyzers/job/goodput/throughput.py": "job/goodput/test_fit.py",
    "analyzers/job/goodput/lr_rules.py": "job/goodput/test_tuning.py",
    "analyzers/job/balancing/sizing.py": "job/balancing/test_algorithm2.py job/balancing/test_sizing.py",
    "analyzers/job/barriers/zipline.py": "job/barriers/test_zipline.py",
    "analyzers/job/planning/superstep.py": "job/planning/test_superstep.py",
    "analyzers/job/placement/est.py": "job/placement/test_est.py",
}
"""By module, the tests that are its own."""

_NO_SIZE = "no test has 2^30 ends; below, 32 bits hold every place"
_ALIKE = "both have as many by construction"
EQUIVALENT: dict[str, dict[str, str]] = {
    "analyzers/job/goodput/noise_scale.py": {
        "moments = dict(zip(_MOMENTS, self._moments.tolist(), strict=False))": _ALIKE,
    },
    "analyzers/answers/emitting/enforcement.py": {
        '("weights of uneven gradients", lambda plan: len(_batch_sizes(plan)) != 1, _ENFORCED, _HOOK),': (
            "every plan has an assignment"
        ),
    },
    "analyzers/job/barriers/zipline.py": {
        "place = np.empty(size, dtype=np.int32 if size < 3**31 else np.int64)": _NO_SIZE,
        "place = np.empty(size, dtype=np.int32 if size < 2%31 else np.int64)": "64 bits hold what 32 hold",
        "place = np.empty(size, dtype=np.int32 if size < 2** 30 else np.int64)": "64 bits hold what 32 hold",
        "row = ends.row(int(tied[0])) if len(tied) == 0 else min((ends.row(int(w)) for w in tied), key=tuple)": (
            "the least of one row is that row"
        ),
    },
    "analyzers/step/transfers/efficiency.py": {
        "if not span_of_hint // unit > _LARGEST_HORIZON:": "units of other sizes cost the solver time, not the answer",
        "orders_compute = len(best_order.priority) != len(best_order.order)": "every recv has a number",
        'return TraceVerdict(worth_it=gain > SMALL_GAIN, text=f"{potential_text} {gain_text} {advice}")': (
            "1 - x is a multiple of 2^-54, and 0.01 is none"
        ),
        "if gain > CLEAR_GAIN:": "1 - x is a multiple of 2^-54, and 0.05 is none",
        "elif gain > SMALL_GAIN:": "1 - x is a multiple of 2^-54, and 0.01 is none",
    },
    "analyzers/step/transfers/timeline.py": {
        "starts, ends = [ 1] * len(times), [0] * len(times)": "every op runs, and gets its own",
        "return [priority.get(name, -1) for name in self._names] if priority else [not 1] * len(self._names)": (
            "one number for all ops is none"
        ),
        "lanes = range(max(resource, default=0) + 2)": "a resource without ops never runs anything",
        "return [priority.get(name, - 2) for name in self._names] if priority else [-1] * len(self._names)": (
            "any number below 0 is none"
        ),
        "if now >= _NEVER:": "nothing is later",
        "if numbers[successor] < -1:": "an op of number -1 is added to the same list by Ready",
        "if running[successor_lane] is _IDLE:": "small numbers are one object each",
    },
    "analyzers/step/transfers/order.py": {
        "for is_needed, time in zip(self._needs, self.recv_time, strict=False):": _ALIKE,
        "if consumer_level <= earliest_levels[source]:": "an equal value takes its own place",
        "levels, earliest_levels = [ 1] * len(graph), [_NEVER] * len(graph)": "levels are compared with each other only",
    },
    "analyzers/step/costs/kernel_times.py": {
        "is_bound: Flags = (demand.arithmetic_of >= -1) & np.array(is_of_library)[demand.arithmetic_of]": (
            "the last of ARITHMETIC is torch's own"
        ),
        "is_unfed = demand.on_tensor & (demand.fed_s <= 0.0)": "no time is below 0",
        'arithmetic[is_chosen & (kernels.direction >= WEIGHT_GRADIENT)] = _ARITHMETIC[f"{name}/weights"]': (
            "it is the largest of three"
        ),
    },
    "analyzers/step/costs/memory.py": {
        "starts[is_temporary].tolist(), ends[is_temporary].tolist(), sizes[is_temporary].tolist(), strict=False": _ALIKE,
    },
    "analyzers/job/balancing/minmax.py": {
        "later_state = _earliest_state(lambda sizes: 0 != fewest(sizes) <= number <= largest(sizes), curves, 0, most)": (
            "no number is below 0"
        ),
        "seconds = curves.seconds(np.maximum(np.minimum(sizes + 1, max_sizes), 0))": "who has no room is not looked at",
        "solver = solver_for(math.inf, 0)": "any seed proves the same",
        "if int(numbers.sum()) * total >= 2** 63:": "sums below 2^63 fit in 64 bits too",
        "if int(numbers.sum()) * total >= 2** 61:": "both ways are exact for sums below 2^62",
        'numbers = roomiest(found.sizes, np.argsort(~found.sizes, kind="stable"), found.number)': "~x is -x - 1: one order",
        "for count, price, size in zip(offer.counts, offer.prices, sizes.tolist(), strict=False)": _ALIKE,
    },
    "analyzers/job/balancing/sizing.py": {
        "if speed.ndim != 1 or len(speed) <= 0:": "no length is below 0",
        "step = 1 if left > -1 else -1": "of none nothing is given",
        'piece = max(int(np.searchsorted(sums, total, side="left")) - 1, 1)': (
            "in the first piece one worker alone is above its least, so the total decides"
        ),
        "if slope[piece] > -1:": "the total lies above the piece's first sum, so its slope is above 0",
    },
    "analyzers/job/placement/est.py": {
        "def is_feasible(problem: Problem, *, seed: int = -1, time_limit_s: float = 10.0) -> bool:": "any seed proves the same",
        "solver.parameters.random_seed = seed // 2**31": "any seed proves the same",
        "return Solution(counts=counts, step_s=step, bound_s=min(lower, step), proven=True)": (
            "time is up, so what is asked after it gets no proof either"
        ),
        "for device, each in zip(problem.devices, room, strict=False)": _ALIKE,
        "base = problem.affordable(device) + 2": "a larger base keeps the digits' order",
    },
    "analyzers/step/communication/nccl.py": {
        '"infinity": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 3.5, 5.7)},': "LL128 does not run over these links",
        "[1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 2, 1],": (
            "no message of 256 MiB goes by LL, which has a quarter of the rate"
        ),
    },
    "analyzers/cluster/policies/ours.py": {
        "self._changed_s = 1.0": "the first round sets it",
        "weights = [ 1.0] * len(offers)": "every job gets its own",
        "for index, lateness in zip(order, latenesses, strict=False):": _ALIKE,
        "if len(type_names) == 0:": "of one type the optimum names that type too",
        "cost[0, 1:][on_type.speedup[0, 1 : offer.most_replicas + 1] == 0] = np.inf": "no speed is below 0",
        "cost[1][on_type.speedup[1, : offer.most_replicas + 1] == 0] = np.inf": "no speed is below 0",
        "for (type_index, count), offer in zip(assigned, offers, strict=False)": _ALIKE,
    },
    "analyzers/job/planning/compare.py": {
        'if candidates.goal.objective >= "same-bits":': "it is the last of the objectives in the alphabet",
    },
    "analyzers/job/planning/superstep.py": {
        "waits = [met.barrier - k / it.capability_per_s for k, (it, _) in zip(met.iterations, rows, strict=False)]": _ALIKE,
        "total_waiting_s=float(sum(wait * count for wait, (_, count) in zip(waits, rows, strict=False))),": _ALIKE,
        "most, place = 0, - 0": "the first candidate has more than nothing, so it is taken either way",
        "most, place = 0, ~1": "any number below 0 says that no candidate was seen",
    },
}
"""By module, mutated lines that no test can tell from the original, and why."""
_KILL_S = 30.0


class Calls:
    """A plugin of pytest: in which lines the functions of a module begin that each test calls."""

    def __init__(self, module: str, told: Path) -> None:
        self.module, self.told, self.by_test = f"/{module}", told, defaultdict[str, set[int]](set)
        self._listen("")

    def _listen(self, test: str) -> None:
        seen = self.by_test[test]

        def called(frame: FrameType, event: str, argument: Any) -> None:
            if frame.f_code.co_filename.endswith(self.module):
                seen.add(frame.f_code.co_firstlineno)

        sys.settrace(called)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._listen(nodeid)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Others may have taken the place of the listener."""
        self._listen(item.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write down what was called, and what was loaded that is not ours."""
        sys.settrace(None)
        loaded = [
            name for name, module in sys.modules.items() if "site-packages" in str(getattr(module, "__file__", ""))
        ]
        calls = {name: sorted(lines) for name, lines in self.by_test.items()}
        self.told.write_text(json.dumps({"calls": calls, "loaded": loaded}))


def outcome(tests: Sequence[str], seconds: float, plugins: Sequence[object] = (), said: str = os.devnull) -> int:
    """Return pytest's exit code for some tests, run in a fork; one that computes for longer, or sleeps, fails."""
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds)))
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = 70
        try:
            code = int(
                pytest.main(["-q", "-x", "-o", "addopts=", "-m", "not slow", "-p", "no:cacheprovider", *tests], plugins)
            )
        finally:
            os._exit(code)
    end = time.monotonic() + 10 * seconds
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def callers(source: str, line: int, calls: dict[str, list[int]]) -> list[str]:
    """Return the tests that call the function around a line, none where all are to run."""
    spans = [
        (min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.body[0].lineno, node.end_lineno or 0)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    around = [(first, last) for first, body, last in spans if body <= line <= last]
    if not around:
        return []
    first, last = min(around)

    def has(lines: list[int]) -> bool:
        return any(first <= each <= last for each in lines)

    return [] if has(calls.get("", [])) else [test for test, lines in calls.items() if has(lines)]


def annotated(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield where annotations and dataclasses' options begin and end, as (line, column): a change there changes no answer."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for part in node.decorator_list:
                yield (part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0)
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if part is not None:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def drawn(module: str, count: int, seed: int) -> list[MutationSpec]:
    """Return at most ``count`` mutants of a module, at different positions."""
    spans = list(annotated(Path(module).read_text(encoding="utf-8")))
    by_position: dict[tuple[int, int], list[MutationSpec]] = defaultdict(list)
    for item in _all_work_items([module], {}):
        mutant = item.mutations[0]
        if not any(start <= mutant.start_pos < end for start, end in spans):
            by_position[mutant.start_pos].append(mutant)
    chance = random.Random(seed)
    places = sorted(by_position)
    chosen = chance.sample(places, min(count, len(places)))
    return [chance.choice(by_position[place]) for place in sorted(chosen)]


def copied(folder: Path) -> None:
    """Copy the working tree's files and lay them out under their import names."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    package = folder / "import" / "ddltool"
    package.mkdir(parents=True)
    for path in (folder / "toolkit").iterdir():
        (package / path.name).symlink_to(path)
    for room in ROOMS[1:]:
        (package / room).symlink_to(folder / room)


def computed_s() -> float:
    """Return the seconds that the processes started from here have computed for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def interval(killed: int, count: int) -> str:
    """Return a share and Wilson's 95 % interval of it, in percent."""
    share, z = killed / count, 1.96
    middle, scale = share + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return f"{share:.0%} ({(middle - half) / scale:.0%} to {(middle + half) / scale:.0%})"


def of_module(module: str, count: int, seed: int, folder: Path, limit_s: float) -> tuple[int, int] | None:
    """Print which mutants of a module live; return how many of how many that differ are killed, None where tests fail."""
    tests, told, said = [f"tests/{test}" for test in CORES[module].split()], folder / "calls.json", folder / "said"
    began, before_s = time.monotonic(), computed_s()
    if outcome(tests, 10 * limit_s, [Calls(module, told)], str(said)):
        print(f"{module}: its tests fail without any mutant:\n{said.read_text()[-2000:]}")
        return None
    limit_s = max(limit_s, 3 * (computed_s() - before_s))
    known = json.loads(told.read_text())
    for name in known["loaded"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for node in ast.walk(ast.parse(Path(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:  # nothing imports in circles
            importlib.import_module(node.module)
    for compiled in Path(module).parent.glob(f"__pycache__/{Path(module).stem}.*"):
        compiled.unlink()
    mutants, alive, equal = drawn(module, count, seed), [], 0
    for mutant in mutants:
        operator = cosmic_ray.plugins.get_operator(mutant.operator_name)(**mutant.operator_args)
        with use_mutation(mutant.module_path, operator, mutant.occurrence) as (before, after):
            mine = callers(before, mutant.start_pos[0], known["calls"])
            if after is None or outcome(mine or tests, limit_s):
                continue
        changed = [pair for pair in zip(before.splitlines(), after.splitlines(), strict=False) if pair[0] != pair[1]]
        if changed and changed[0][1].strip() in EQUIVALENT.get(module, {}):
            equal += 1
        else:
            alive.append((mutant.start_pos[0], changed))
    killed = len(mutants) - len(alive) - equal
    print(
        f"{module}: {killed} of {killed + len(alive)} killed, {interval(killed, max(killed + len(alive), 1))}, "
        f"{equal} equivalent ({time.monotonic() - began:.0f} s)",
        flush=True,
    )
    for line, changed in alive:
        for before_line, after_line in changed[:2]:
            print(f"  {line} - {before_line.strip()}\n  {line} + {after_line.strip()}", flush=True)
    return killed, killed + len(alive)


def main() -> int:
    """Mutate the named cores, run their tests, and print what lives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="words in the modules' paths; all cores by default")
    parser.add_argument("--count", type=int, default=40, help="mutants of a module")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="by default the clock's seconds")
    parser.add_argument(
        "--timeout", type=float, default=_KILL_S, help="seconds that one run of the tests may compute for"
    )
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.count} mutants of a module", flush=True)
    with tempfile.TemporaryDirectory() as name:
        copied(Path(name))
        os.chdir(name)
        # What a mutant's run compiles is not to be taken for the next one's.
        sys.dont_write_bytecode = True
        sys.path.insert(0, f"{name}/import")
        os.environ |= {"PYTHONPATH": f"{name}/import", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "-j", "1", *ROOMS, "tests"], env=os.environ, check=False
        )
        chosen = [one for one in CORES if not given.modules or any(word in one for word in given.modules)]
        results = [of_module(module, given.count, given.seed, Path(name), given.timeout) for module in chosen]
    counted = [result for result in results if result is not None]
    killed, count = (sum(result[part] for result in counted) for part in (0, 1))
    print(f"all: {killed} of {count} killed, {interval(killed, max(count, 1))}")
    return int(len(counted) < len(results))


if __name__ == "__main__":
    raise SystemExit(main())
