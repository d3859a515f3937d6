"""ddltool: one model of a distributed training job, and the tools that read it.

``import ddltool as dt`` is for notebooks and scripts: ``dt.trace``, ``dt.predict``, ``dt.plan``, ``dt.emit``, ``dt.verify`` and
the other verbs are what the commands are made from. Each returns a record with ``to_frame()``, ``save()`` and ``chart()``,
which a notebook shows as its section of the report. ``dt.Job`` and ``dt.Cluster`` are what jobs and machines are written as;
``dt.record`` records the loop in a block.

The package itself holds the nouns (Graph, Profile, Cluster, Job, Plan, Enforcement) and how they are read and written; start
at :mod:`ddltool.graph`. Importing it is cheap: nothing heavy is loaded until a function is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddltool import showing

if TYPE_CHECKING:
    from ddltool.analyzers.step.recording.window import record as record
    from ddltool.artifact_files import read as read
    from ddltool.commands.balance import balance as balance
    from ddltool.commands.barrier import barrier as barrier
    from ddltool.commands.devices import devices as devices
    from ddltool.commands.emit import emit as emit
    from ddltool.commands.fit import fit as fit
    from ddltool.commands.gate import gate as gate
    from ddltool.commands.plan import plan as plan
    from ddltool.commands.predict import predict as predict
    from ddltool.commands.profile import profile as profile
    from ddltool.commands.report import report as report
    from ddltool.commands.simulate import simulate as simulate
    from ddltool.commands.trace import trace as trace
    from ddltool.commands.verify import verify as verify
    from ddltool.errors import DdlToolError as DdlToolError
    from ddltool.errors import Infeasible as Infeasible
    from ddltool.errors import InputError as InputError
    from ddltool.job import Cluster as Cluster
    from ddltool.job import Job as Job

__version__ = "0.3.0"

showing.register(lambda: import_module("ddltool.analyzers.answers.reporting.notebook"))
showing.register(lambda: import_module("ddltool.commands.emit"), "emits plans")

# Where each name lives; docs/api.md lists them and a test pins them.
_VERBS = (
    *("devices", "trace", "predict", "profile", "fit", "plan", "emit", "verify"),
    *("simulate", "balance", "barrier", "gate", "report"),
)
_HOMES = {
    **{verb: f"commands.{verb}" for verb in _VERBS},
    "record": "analyzers.step.recording.window",
    "read": "artifact_files",
    "Job": "job",
    "Cluster": "job",
    "DdlToolError": "errors",
    "InputError": "errors",
    "Infeasible": "errors",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Return the public object ``name``; its module is imported on first use. Raises AttributeError for any other name."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ddltool' has no attribute {name!r}")
    # Kept as a global, so that Python does not come here for it again.
    found = globals()[name] = getattr(import_module(f"ddltool.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    """Return all public names, including those that are not imported yet."""
    return sorted(__all__)
