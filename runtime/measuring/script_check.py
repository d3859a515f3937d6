"""Checks that a training script computes with ddltool what one process would. Start at :func:`check_script`."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddltool.errors import InputError
from ddltool.results import ScriptCheck
from ddltool.runtime.measuring.overhead import demand_script, failure_of_script, run_script
from ddltool.runtime.processes.checking import CHECK, RESULT


def check_script(command: Sequence[str], replicas: int = 2, timeout_s: float = 900.0) -> ScriptCheck:
    """Compare the first steps of a script, run as ``replicas`` processes, with those of one process, and return the outcome.

    The script's own processes make the comparison (:mod:`~ddltool.runtime.processes.checking`), because an environment
    variable tells them to, and write its outcome to a file. ``command``: the script and its arguments. Raises InputError
    when the script fails before an outcome, takes longer than ``timeout_s`` seconds, or attaches neither hook nor
    balancer.
    """
    demand_script(command)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        environment = {**os.environ, CHECK: "end", RESULT: str(result)}
        exit_code, errors = run_script(command, replicas, environment, command[0], timeout_s)
        outcome = json.loads(result.read_text("utf-8")) if result.exists() else None
    # If the script has failed, its outcome counts only if updates were compared, and so the outcome decided, before.
    if outcome is not None and (outcome["updates"] or not exit_code):
        return ScriptCheck(script=shlex.join(command), replicas=replicas, **outcome)
    if exit_code:
        raise failure_of_script(command, exit_code, errors)
    problem = "ran to its end without a check"
    remedy = "attach the hook or the balancer with uneven batches in it, for 3 updates or more"
    raise InputError(command[0], problem, remedy)
