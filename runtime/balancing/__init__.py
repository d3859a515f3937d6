"""Batch sizes that follow the workers' speeds while a DDP job trains (LB-BSP). Start at :func:`balance`."""

from ddltool.runtime.balancing.control import BalanceOptions, balance
from ddltool.runtime.balancing.partitioned import PartitionedData

__all__ = ["BalanceOptions", "PartitionedData", "balance"]
