"""What runs inside training processes. Start at :func:`attach`, the hook that makes a job follow its plan.

Each name is imported, and torch with it, when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.runtime.agent import GoodputAgent as GoodputAgent
    from ddltool.runtime.balancing import BalanceOptions as BalanceOptions
    from ddltool.runtime.balancing import balance as balance
    from ddltool.runtime.elastic import ElasticTrainer as ElasticTrainer
    from ddltool.runtime.elastic import RunRecorder as RunRecorder
    from ddltool.runtime.elastic import first_difference as first_difference
    from ddltool.runtime.hook import Hook as Hook
    from ddltool.runtime.hook import OuterSteps as OuterSteps
    from ddltool.runtime.hook import apply_prefetch as apply_prefetch
    from ddltool.runtime.hook import attach as attach
    from ddltool.runtime.hook import bucket_report as bucket_report
    from ddltool.runtime.hook import ddp_arguments as ddp_arguments
    from ddltool.runtime.hook import island_group as island_group
    from ddltool.runtime.hook import prefetch_units as prefetch_units
    from ddltool.runtime.hook import shard as shard
    from ddltool.runtime.hook.loggers import log_steps as log_steps
    from ddltool.runtime.measuring.straggler_monitor import watch_ranks as watch_ranks
    from ddltool.runtime.processes.lengths import Lengths as Lengths
    from ddltool.runtime.servers import TransferPlan as TransferPlan
    from ddltool.runtime.servers import Worker as Worker

_NAMES = {
    "agent": ("GoodputAgent",),
    "balancing": ("BalanceOptions", "balance"),
    "elastic": ("ElasticTrainer", "RunRecorder", "first_difference"),
    "hook": (
        *("Hook", "OuterSteps", "apply_prefetch", "attach", "bucket_report", "ddp_arguments", "island_group"),
        *("prefetch_units", "shard"),
    ),
    "hook.loggers": ("log_steps",),
    "measuring.straggler_monitor": ("watch_ranks",),
    "processes.lengths": ("Lengths",),
    "servers": ("TransferPlan", "Worker"),
}
_HOMES = {name: package for package, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import the module that holds the public name ``name``, and torch with it, when the name is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
