"""How ddltool calls the CP-SAT solver: a fixed seed, a time limit, and one thread unless more are asked for."""

from __future__ import annotations

from ortools.sat.python import cp_model


def solver_for(limit_s: float, seed: int, *, threads: int = 1) -> cp_model.CpSolver:
    """Return a CP-SAT solver that stops after ``limit_s`` seconds; with one thread and one seed its answers repeat.

    ``threads``: how many search at once; 0: as many as there are cores.
    """
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = threads
    solver.parameters.random_seed = seed % 2**31  # CP-SAT takes 31 bits
    # With True, CP-SAT would replace Python's handler, and a later Ctrl-C would end the process without clean-up.
    solver.parameters.catch_sigint_signal = False
    return solver


def run(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
    """Solve the model and return CP-SAT's status; values are then read from ``solver``.

    Raises ValueError for a malformed model, whose status would otherwise be taken for "no answer in time".
    """
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT does not take the model: {model.validate()}")
    return status
