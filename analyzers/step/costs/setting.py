"""How a job's replicas are joined, where they run, and how its model is trained: what the time of a step depends on.

A replica is one copy of the model that processes batches of its own; it is one GPU, or several that share it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.model import OPTIMIZER
from ddltool.analyzers.step.costs.offloading import demand_host_update
from ddltool.analyzers.step.costs.optimizers import OPTIMIZERS
from ddltool.analyzers.step.costs.saving import ON_HOST, Checkpointing, split_way
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.errors import InputError, did_you_mean
from ddltool.units import parse_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDegrees:
    """How the GPUs of one replica share its model, by tensors, blocks and tokens; and how many replicas share its experts."""

    tensor: int = 1
    """The number of GPUs that share the matrix products of every block."""
    pipeline: int = 1
    """The number of GPUs among which the blocks are divided."""
    sequence: bool = False
    """Whether the GPUs that share products also divide, by tokens, the tensors between them."""
    virtual: int = 1
    """The number of stages on each GPU of a pipeline; several are interleaved."""
    overlapped: bool = False
    """Whether what these GPUs exchange runs piece by piece beside the products (asynchronous tensor parallelism)."""
    expert: int = 1
    """The number of replicas among which the experts of every block are divided."""

    @property
    def gpus(self) -> int:
        """The number of GPUs of one replica."""
        return self.tensor * self.pipeline


ALONE = ParallelDegrees()
"""A replica is one GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the replicas of a job run: on how many nodes (machines), among which they are spread evenly."""

    num_nodes: int
    num_replicas: int
    gpus: int = 1
    """The number of GPUs of one replica."""

    def __post_init__(self) -> None:
        """Raise InputError for more nodes than GPUs, or none."""
        if not 1 <= self.num_nodes <= self.num_replicas * self.gpus:
            text = f"{self.num_replicas} replicas on {self.num_nodes} nodes"
            raise InputError("--replicas", text, "every node holds at least one replica")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How the replicas are joined, and how the model is trained."""

    fabric: Fabric
    optimizer: str = OPTIMIZER
    accumulation: int = 1
    """The number of passes in a step."""
    compile: bool = False
    """Whether the model runs under ``torch.compile``."""
    sharding: str | Sharding = "ddp"
    """A text for :meth:`Sharding.named`, which holds for any number of replicas (a single one is sharded only with ":cpu"), or
    the sharding for one number of replicas."""
    checkpointing: str = "none"
    """The checkpointing of every block (none, selective, full), or a budget of bytes for a step's tensors, as 40GiB; with
    ``:cpu`` behind, what blocks save goes to the host."""
    layout: ParallelDegrees = ALONE
    """How the GPUs of one replica share its model."""

    def sharded(self, replicas: int) -> Sharding:
        """Return how this number of replicas shares the step's parameters, gradients and optimizer states.

        A single replica shares nothing, whatever ``sharding`` says, unless its state lies on the host.
        """
        sharding = self.sharding
        if not isinstance(sharding, Sharding):
            text = sharding if replicas > 1 or sharding.endswith(":cpu") else "none"
            sharding = Sharding.named(text, replicas)
            # A text is read as if all replicas were on one host.
            sharding = replace(sharding, on_host=min(sharding.on_host, self.fabric.gpus_per_node))
        return replace(sharding, sums=self.accumulation > 1)

    @property
    def budget_bytes(self) -> float | None:
        """The budget of a step's tensors in bytes; None: ``checkpointing`` names one kind for all blocks."""
        text, _ = split_way(self.checkpointing)
        return None if text in get_args(Checkpointing) else parse_bytes(text, "--checkpointing")

    @property
    def saves_on_host(self) -> bool:
        """Whether blocks may save on the host what their backward passes need (activation offloading)."""
        _, is_on_host = split_way(self.checkpointing)
        return is_on_host

    @property
    def uniform(self) -> str:
        """The checkpointing of every block; under a budget it is ``full``, which holds the least memory."""
        if self.budget_bytes is None:
            return self.checkpointing
        return f"full{ON_HOST}" if self.saves_on_host else "full"

    def __post_init__(self) -> None:
        """Raise InputError for an unknown checkpointing, sharding or optimizer, and for one that cannot run on the host."""
        kind = split_way(self.checkpointing)[0]
        if not any(sign.isdigit() for sign in kind) and kind not in get_args(Checkpointing):
            suggestion = did_you_mean(self.checkpointing, (*get_args(Checkpointing), "40GiB", "full:cpu", "40GiB:cpu"))
            raise InputError("--checkpointing", f"unknown {self.checkpointing!r}", suggestion)
        _ = self.budget_bytes  # raises for a text that is no size
        if isinstance(self.sharding, str):
            shard = self.sharding.removesuffix(":cpu").partition(":")[2]
            Sharding.named(self.sharding, int(shard) if shard.isdecimal() else 1)  # one replica is checked, too
        if self.optimizer not in OPTIMIZERS:
            raise InputError("--optimizer", f"unknown {self.optimizer!r}", did_you_mean(self.optimizer, OPTIMIZERS))
        if isinstance(self.sharding, str) and self.sharding.endswith(":cpu"):
            demand_host_update(self.optimizer)
