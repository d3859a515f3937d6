"""Makes a training script follow its plan: batches, weighted gradients, telemetry. Start at :func:`attach`."""

from ddltool.runtime.hook.attaching import Hook, attach
from ddltool.runtime.hook.data_parallel import apply_prefetch, bucket_report, ddp_arguments, prefetch_units
from ddltool.runtime.hook.outer import OuterSteps, island_group
from ddltool.runtime.hook.sharding import shard

__all__ = [
    "Hook",
    "OuterSteps",
    "apply_prefetch",
    "attach",
    "bucket_report",
    "ddp_arguments",
    "island_group",
    "prefetch_units",
    "shard",
]
