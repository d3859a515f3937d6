"""Which small mistakes in the analyzers' cores would their tests not see? Mutants of cosmic-ray, sampled, one at a time.

``make mutants`` prints, per module, how many of its sampled mutants the module's own tests kill, and the rest as diffs.
Every position of the source (outside annotations) is drawn at most once, with one of cosmic-ray's operators at random.
A copy of the working tree is mutated, never the tree itself.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).parents[1]
CORES = {
    "analyzers/communication/order.py": "test_communication_order.py",
    "analyzers/communication/efficiency.py": "test_communication_order.py test_trace_torch.py",
    "analyzers/goodput/noise_scale.py": "test_noise_scale.py",
    "analyzers/goodput/throughput.py": "test_fit.py test_goodput.py",
    "analyzers/goodput/lr_rules.py": "test_lr_rules.py",
    "analyzers/balancing/minmax.py": "test_balancing_plan.py test_balancing_plan_numbers.py",
    "analyzers/balancing/sizing.py": "test_balancing_algorithm2.py test_balancing_shortest.py test_balancing.py",
    "analyzers/barriers/zipline.py": "test_barriers.py",
    "analyzers/barriers/superstep.py": "test_superstep.py test_barrier_auto.py",
    "analyzers/placement/est.py": "test_placement.py test_placement_model.py",
    "analyzers/costs/nccl.py": "test_nccl.py",
    "analyzers/costs/kernel_times.py": "test_costs.py",
}
"""By module, the tests that are its own."""


def annotated(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield where annotations begin and end, as (line, column): a change there changes nothing."""
    for node in ast.walk(ast.parse(source)):
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
    for room in ("commands", "analyzers", "runtime", "fixtures"):
        (package / room).symlink_to(folder / room)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(CORES), help="all cores by default")
    parser.add_argument("--count", type=int, default=40, help="mutants of a module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one run of the tests; longer is killed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        copied(Path(name))
        os.chdir(name)
        os.environ |= {"PYTHONPATH": f"{name}/import", "HYPOTHESIS_PROFILE": "default", "OMP_NUM_THREADS": "1"}
        for module in given.modules:
            tests = [f"tests/{test}" for test in CORES[module].split()]
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "addopts=", "-m", "not slow", *tests]
            before = subprocess.run(command, capture_output=True, text=True, check=False)
            if before.returncode:
                print(f"{module}: its tests fail without any mutant:\n{before.stdout[-2000:]}")
                return 1
            mutants = drawn(module, given.count, given.seed)
            alive = []
            for mutant in mutants:
                result = mutate_and_test([mutant], shlex.join(command), given.timeout)
                if result.test_outcome == TestOutcome.SURVIVED:
                    alive.append(result.diff or "")
            print(f"{module}: {len(mutants) - len(alive)} of {len(mutants)} killed", flush=True)
            for diff in alive:
                print(
                    "\n".join(
                        line for line in diff.splitlines() if line[:1] in "@+-" and line[:3] not in ("+++", "---")
                    )
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
