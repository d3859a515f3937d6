"""This process's place in a torchrun job, and the job's store. Start at :func:`job_from_environment`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from ddltool.runtime.processes.launcher import launched_number

START_LIMIT_S = 300.0
"""Seconds that processes wait for each other at the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process's place in a torchrun job; local numbers are those within its ``node``, which is numbered from 0."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int


def job_from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place by torchrun's variables; None if RANK, WORLD_SIZE or the MASTER variables are missing.

    Missing local variables are guessed as if nodes were filled one by one. Raises InputError for a variable that is not
    a whole number.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None

    number = partial(launched_number, environment=environment)
    number("MASTER_PORT")  # only checked here: torch reads it itself
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

    So a restarted job reads no key of an earlier attempt. Blocks until the store answers; raises RuntimeError if that
    takes longer than ``timeout_s`` seconds.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    store = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))[0]
    return PrefixStore(f"{use}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
