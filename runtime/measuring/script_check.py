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

    ``command``: the script and its arguments. :mod:`~ddltool.runtime.processes.checking` compares, in the script's
    processes. Raises InputError when the script fails before an outcome, takes longer than ``timeout_s``, or attaches
    neither hook nor balancer.
    """
    demand_script(command)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        environment = {**os.environ, CHECK: "end", RESULT: str(result)}
        code, errors = run_script(command, replicas, environment, command[0], timeout_s)
        answer = json.loads(result.read_text("utf-8")) if result.exists() else None
    # If the script has failed, its answer counts only if updates were compared, and so the outcome decided, before.
    if answer is not None and (answer["updates"] or not code):
        return ScriptCheck(script=shlex.join(command), replicas=replicas, **answer)
    if code:
        raise failure_of_script(command, code, errors)
    problem = "ran to its end without a check"
    remedy = "attach the hook or the balancer with uneven batches in it, for 3 updates or more"
    raise InputError(command[0], problem, remedy)
