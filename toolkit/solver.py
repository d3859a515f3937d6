"""CP-SAT as every search here calls it: a fixed seed, a limit on its time, and one thread unless more are asked for."""

from __future__ import annotations

from ortools.sat.python import cp_model


def solver_for(limit_s: float, seed: int, *, threads: int = 1) -> cp_model.CpSolver:
    """Return CP-SAT with a limit on its time and a fixed seed, so that its answers repeat where it has one thread.

    ``limit_s``: seconds. ``threads``: how many search at once; 0: as many as there are cores.
    """
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = threads
    solver.parameters.random_seed = seed % 2**31
    # CP-SAT would put the default handler in Python's place, and a later Ctrl-C would end the process without clean-up.
    solver.parameters.catch_sigint_signal = False
    return solver


def run(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
    """Return CP-SAT's status. Raises ValueError for a model that it refuses, which is not the same as "no answer in time"."""
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT does not take the model: {model.validate()}")
    return status
