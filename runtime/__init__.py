"""What runs inside training processes. Start at :func:`attach`, the hook that makes a job follow its plan.

Everything is loaded, and torch with it, when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.runtime.agent import GoodputAgent
    from ddltool.runtime.balancing import BalanceOptions, balance
    from ddltool.runtime.elastic import ElasticTrainer, RunRecorder, first_difference
    from ddltool.runtime.hook import Hook, apply_prefetch, attach, bucket_report, ddp_arguments, prefetch_units, shard
    from ddltool.runtime.hook.watching import watch_ranks
    from ddltool.runtime.servers import TransferPlan, Worker

# The package that each name comes from.
_HOMES = {
    "BalanceOptions": "balancing",
    "ElasticTrainer": "elastic",
    "GoodputAgent": "agent",
    "Hook": "hook",
    "RunRecorder": "elastic",
    "TransferPlan": "servers",
    "Worker": "servers",
    "apply_prefetch": "hook",
    "attach": "hook",
    "balance": "balancing",
    "bucket_report": "hook",
    "ddp_arguments": "hook",
    "first_difference": "elastic",
    "prefetch_units": "hook",
    "shard": "hook",
    "watch_ranks": "hook.watching",
}
__all__ = [
    "BalanceOptions",
    "ElasticTrainer",
    "GoodputAgent",
    "Hook",
    "RunRecorder",
    "TransferPlan",
    "Worker",
    "apply_prefetch",
    "attach",
    "balance",
    "bucket_report",
    "ddp_arguments",
    "first_difference",
    "prefetch_units",
    "shard",
    "watch_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
