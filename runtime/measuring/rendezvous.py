"""Where a process stands in a torchrun job, and the store at which its processes meet.

Start at :func:`job_from_environment`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ddltool.errors import InputError

START_LIMIT_S = 300.0
"""How long processes wait for each other at the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process's place in a torchrun job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int


def job_from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place by torchrun's variables, None outside a job. Raises InputError for one that is no number."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None

    def number(name: str, default: str | None = None) -> int:
        """Return a variable as a whole number, ``default`` where it is not set. Raises InputError for anything else."""
        text = environment.get(name, default) or ""
        if not text.isdecimal():
            raise InputError(name, f"is {text!r}", "start the job with torchrun")
        return int(text)

    number("MASTER_PORT")  # which torch reads itself
    size = number("WORLD_SIZE")
    local_size = number("LOCAL_WORLD_SIZE", str(size))
    rank = number("RANK")
    return Place(
        rank=rank,
        world_size=size,
        local_rank=number("LOCAL_RANK", str(rank % max(1, local_size))),
        local_world_size=local_size,
        node=number("GROUP_RANK", str(rank // max(1, local_size))),
    )


def job_store(use: str, timeout_s: float) -> Any:
    """Return a connection to the job's store, whose keys are prefixed by ``use`` and the number of restarts.

    So a restarted job reads no key of the attempt before. Raises RuntimeError when the store cannot be reached within
    ``timeout_s``.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    store = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))[0]
    return PrefixStore(f"{use}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
