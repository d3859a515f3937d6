"""ddltool: one model of a distributed training job, and the tools that read it.

``import ddltool as dt`` is for notebooks and scripts: ``dt.trace``, ``dt.predict``, ``dt.profile``, ``dt.fit``, ``dt.plan``,
``dt.simulate``, ``dt.balance``, ``dt.barrier``, ``dt.gate`` and ``dt.report`` are the functions that the commands call. Each
returns a record with ``to_frame()``, ``save()`` and ``chart()``, which a notebook shows as its section of the report.

The package itself holds the nouns (Graph, Profile, Cluster, Job, Plan, Enforcement) and how they are read and written; start
at :mod:`ddltool.graph`. Importing it is cheap: nothing heavy is loaded until a function is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.balancing.replay import balance as balance
    from ddltool.analyzers.barriers.choices import barrier as barrier
    from ddltool.analyzers.communication.result import trace as trace
    from ddltool.analyzers.deciding.planning import plan as plan
    from ddltool.analyzers.gating.verdict import gate as gate
    from ddltool.analyzers.loading.artifact_files import read as read
    from ddltool.analyzers.loading.fitted_models import fit as fit
    from ddltool.analyzers.loading.predictions import predict as predict
    from ddltool.analyzers.reporting.report import report as report
    from ddltool.analyzers.scheduling.replay import simulate as simulate
    from ddltool.errors import DdlToolError as DdlToolError
    from ddltool.errors import Infeasible as Infeasible
    from ddltool.errors import InputError as InputError
    from ddltool.runtime.measuring.profiling import profile as profile

__version__ = "0.1.0"

# Where each name lives; docs/api.md lists them and a test pins them.
_HOMES = {
    "trace": "analyzers.communication.result",
    "predict": "analyzers.loading.predictions",
    "profile": "runtime.measuring.profiling",
    "fit": "analyzers.loading.fitted_models",
    "plan": "analyzers.deciding.planning",
    "simulate": "analyzers.scheduling.replay",
    "balance": "analyzers.balancing.replay",
    "barrier": "analyzers.barriers.choices",
    "gate": "analyzers.gating.verdict",
    "report": "analyzers.reporting.report",
    "read": "analyzers.loading.artifact_files",
    "DdlToolError": "errors",
    "InputError": "errors",
    "Infeasible": "errors",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddltool' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"ddltool.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
