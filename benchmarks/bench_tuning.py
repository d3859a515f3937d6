"""Microseconds per allocation to choose the batch, beside straightforward ways to do the same.

``same cluster``: allocations of up to 64 GPUs, many alike, as a scheduler asks. ``all different``: no two alike, so that
nothing can be shared. The loops: ``every point`` evaluates all local batches and up to 15 accumulation steps with numpy;
``scipy`` minimises over the local batch for each number of steps; ``50 sizes`` takes the best of 50 total batches in
geometric progression, as Pollux does (section 4.4), which is fast but not exact. CPU time, best of several.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from scipy.optimize import minimize_scalar

from ddltool.analyzers.job.goodput.throughput import ThroughputParams, goodput_per_s
from ddltool.analyzers.job.goodput.tuning import BatchLimits, tune, tune_one

PARAMS = ThroughputParams(
    alpha_grad_s=0.05,
    beta_grad_s=0.001,
    alpha_sync_local_s=0.02,
    beta_sync_local_s=0.001,
    alpha_sync_node_s=0.1,
    beta_sync_node_s=0.002,
    gamma=2.5,
)
LIMITS = BatchLimits(initial_batch_size=128, max_batch_size=10**6, max_local_batch_size=256, max_accumulation_steps=15)
NOISE = 2000.0


def goodput(nodes: int, replicas: int, m: object, s: object) -> np.ndarray:
    """Return samples per second of local batches ``m`` and accumulation steps ``s``, broadcast against each other."""
    return np.asarray(
        goodput_per_s(PARAMS, nodes, replicas, m, s, noise_scale=NOISE, initial_batch_size=LIMITS.initial_batch_size)
    )


def every_point(nodes: int, replicas: int) -> float:
    """Return the best goodput of an allocation over all whole batches: the answer to compare with."""
    m = np.arange(1, LIMITS.max_local_batch_size + 1)[:, None]
    s = np.arange(0, 16)[None, :]
    total = replicas * m * (s + 1)
    fits = (total >= LIMITS.initial_batch_size) & (total <= LIMITS.max_batch_size)
    return float(np.where(fits, goodput(nodes, replicas, m, s), 0.0).max())


def by_scipy(nodes: int, replicas: int) -> float:
    """Return the best goodput found by a bounded scalar search for each number of accumulation steps."""
    best = 0.0
    for s in range(16):
        low = max(1, -(-LIMITS.initial_batch_size // (replicas * (s + 1))))
        high = min(LIMITS.max_local_batch_size, LIMITS.max_batch_size // (replicas * (s + 1)))
        if low > high:
            continue
        found = minimize_scalar(
            lambda m, s=s: -float(goodput(nodes, replicas, m, s)), bounds=(low, high), method="bounded"
        )
        near = {low, high, *np.clip([math.floor(found.x), math.ceil(found.x)], low, high).tolist()}
        best = max(best, *(float(goodput(nodes, replicas, m, s)) for m in near))
    return best


def fifty_sizes(nodes: int, replicas: int) -> float:
    """Return the best goodput over fifty total batches in geometric progression, as Pollux does (section 4.4)."""
    most = min(LIMITS.max_batch_size, replicas * LIMITS.max_local_batch_size * 16)
    total = np.geomspace(max(LIMITS.initial_batch_size, replicas), most, 50)
    passes = np.ceil(total / replicas / LIMITS.max_local_batch_size)
    m = np.clip(np.ceil(total / replicas / passes), 1, LIMITS.max_local_batch_size)
    return float(goodput(nodes, replicas, m, passes - 1).max())


def one_by_one(loop: Callable[[int, int], float], allocations: list[tuple[int, int]]) -> None:
    """Choose the batch of one allocation after the other by ``loop``."""
    for nodes, replicas in allocations:
        loop(nodes, replicas)


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the shortest CPU seconds of ``repeats`` runs."""
    best = math.inf
    for _ in range(repeats):
        started = time.process_time()
        run()
        best = min(best, time.process_time() - started)
    return best


def main() -> None:
    """Print the table, then how the answers compare."""
    chance = np.random.default_rng(0)
    loops = {"every point": every_point, "scipy": by_scipy, "50 sizes": fifty_sizes}
    print(
        f"{'allocations':>22s}  {'tune':>9s}" + "".join(f"  {name:>12s}" for name in loops) + "   (us per allocation)"
    )
    for count in (1, 100, 1000, 10_000):
        for kind in ("same cluster", "all different"):
            replicas = chance.integers(1, 65, count) if kind == "same cluster" else np.arange(1, count + 1)
            nodes = -(-replicas // 4)
            call = partial(tune, PARAMS, nodes, replicas, LIMITS, noise_scale=NOISE)
            ours = seconds(call, 50 if count < 5000 else 10)
            line = f"{count:7d} {kind:>14s}  {ours / count * 1e6:9.3f}"
            few = list(zip(nodes.tolist(), replicas.tolist(), strict=True))[:: max(1, count // 20)][:20]
            for loop in loops.values():
                each = seconds(partial(one_by_one, loop, few), 2 if count > 1 else 5) / len(few)
                line += f"  {each * 1e6:12.0f}"
            print(line)
    lost = dict.fromkeys(loops, 0.0)
    for replicas in range(1, 65):
        nodes = -(-replicas // 4)
        own = tune_one(PARAMS, nodes, replicas, LIMITS, noise_scale=NOISE).goodput_per_s
        for name, loop in loops.items():
            lost[name] = max(lost[name], 1 - loop(nodes, replicas) / own, key=abs)
    print("goodput below ours, largest over 1 to 64 GPUs: " + ", ".join(f"{k} {v:.2e}" for k, v in lost.items()))


if __name__ == "__main__":
    main()
