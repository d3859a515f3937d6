"""EST placement with CP-SAT beside the closed form, in the same run: seconds over device types, GPUs and workers."""

from __future__ import annotations

import time
from fractions import Fraction
from random import Random

from ddltool.analyzers.placement.closed_form import best_step_time
from ddltool.analyzers.placement.est import solve_est
from ddltool.analyzers.placement.problem import DeviceType, Problem

if __name__ == "__main__":
    random = Random(0)
    print("types   GPUs workers  CP-SAT s  closed form s  status   equal")
    for types, gpus, workers in ((2, 16, 64), (4, 100, 500), (8, 1000, 2000), (8, 10_000, 20_000), (8, 10_000, 50_000)):
        devices = tuple(
            DeviceType(
                name=f"t{i}", count=gpus // types, capability_per_s=Fraction(str(round(random.uniform(0.5, 9), 3)))
            )
            for i in range(types)
        )
        problem = Problem(job="bench", max_workers=workers, batch_size=1, devices=devices)
        plan = solve_est(problem)
        started = time.perf_counter()
        exact = best_step_time(problem)
        closed = time.perf_counter() - started
        equal = plan.iteration_s == float(exact)
        print(f"{types:5d} {gpus:6d} {workers:7d}  {plan.solve_seconds:8.3f}  {closed:13.4f}  {plan.status:8s} {equal}")
