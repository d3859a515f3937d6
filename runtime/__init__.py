"""What runs inside training processes. Start at :func:`attach`, the hook that makes a job follow its plan.

Everything is loaded, and torch with it, when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.runtime.agent import GoodputAgent
    from ddltool.runtime.batch_control import BalanceOptions, balance
    from ddltool.runtime.data_parallel import apply_prefetch, bucket_report, ddp_arguments, prefetch_units
    from ddltool.runtime.digests import first_difference
    from ddltool.runtime.elastic import ElasticTrainer
    from ddltool.runtime.hook import Hook, attach
    from ddltool.runtime.run_recorder import RunRecorder
    from ddltool.runtime.transfers import TransferPlan
    from ddltool.runtime.workers import Worker

_HOMES = {
    "BalanceOptions": "batch_control",
    "ElasticTrainer": "elastic",
    "GoodputAgent": "agent",
    "Hook": "hook",
    "RunRecorder": "run_recorder",
    "TransferPlan": "transfers",
    "Worker": "workers",
    "apply_prefetch": "data_parallel",
    "attach": "hook",
    "balance": "batch_control",
    "bucket_report": "data_parallel",
    "ddp_arguments": "data_parallel",
    "first_difference": "digests",
    "prefetch_units": "data_parallel",
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
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
