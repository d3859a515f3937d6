"""Integer programs, and how ddltool calls CP-SAT: a fixed seed, a time limit, and one thread unless more are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from ddltool.arrays import Floats, Ints


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


@dataclass(frozen=True, kw_only=True, eq=False)
class IntegerProgram:
    """Whole numbers x (n,) from 0 to ``upper`` are sought, with ``rows @ x <= limits`` and the least ``cost @ x``."""

    cost: Ints
    """(n,)"""
    upper: Ints
    """(n,)"""
    rows: Ints
    """(m, n)"""
    limits: Ints
    """(m,)"""

    def relaxed(self) -> tuple[Floats, float] | None:
        """Return the best (x, ``cost @ x``) if x may be fractions, a bound for whole numbers; None: nothing is allowed."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        scale = np.abs(self.rows).max(axis=1, initial=1)
        scaled_rows: Any = csr_array(self.rows / scale[:, None])  # scipy-stubs knows dense matrices only
        bounds = [(0.0, float(most)) for most in self.upper.tolist()]
        solved = linprog(self.cost, A_ub=scaled_rows, b_ub=self.limits / scale, bounds=bounds, method="highs")
        return None if solved.x is None or solved.fun is None else (solved.x, float(solved.fun))

    def model(self) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
        """Return (the program as CP-SAT takes it, its variables (n,))."""
        model = cp_model.CpModel()
        variables = [model.new_int_var(0, most, "") for most in self.upper.tolist()]
        for row, limit in zip(self.rows, self.limits.tolist(), strict=True):
            columns = np.flatnonzero(row)
            chosen = [variables[column] for column in columns]
            model.add(cp_model.LinearExpr.weighted_sum(chosen, row[columns].tolist()) <= limit)
        model.minimize(cp_model.LinearExpr.weighted_sum(variables, self.cost.tolist()))
        return model, variables
