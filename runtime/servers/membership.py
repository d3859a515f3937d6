"""Who is in the job: members, the lost and why, who has been silent, and whose samples are whose.

Samples are shared again at every epoch among those who are members when the first of them begins it, so a lost worker's
share is handed over with the next epoch that nobody has begun; what it had not processed of its last epoch is left out,
and counted (:class:`Share`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddltool.errors import InputError
from ddltool.runtime.servers.policies import Policy
from ddltool.runtime.servers.transfers import IDLE_S

# Requests: who shares this epoch's samples; let me in (clock -1: and say from when on); all servers have let me in; my
# share of the epoch that I last asked for has so many batches.
MEMBERS, JOIN, JOINED, SHARE = 3, 4, 5, 6
# A wait that times out closes all connections of its group, and a long wait may be due to the policy. So waits have no
# limit but this one: a dead peer ends them by closing, a silent one is found by looking at the clock.
FOREVER_S = 10 * IDLE_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """How far a worker has come in the epoch that it asked for last."""

    epoch: int
    steps: int
    """Steps of it whose gradients have come whole."""
    batches: int | None
    """How many there are to make; None: the worker has not said."""

    @property
    def left_out(self) -> int | None:
        """Batches of the share that were not processed; None: not known."""
        return None if self.batches is None else max(0, self.batches - self.steps)


@dataclass(kw_only=True, slots=True)
class _Epoch:
    number: int
    batches: int | None = None
    clock: int | None = None
    """The number of the worker's first step in it."""


@dataclass(kw_only=True, slots=True)
class Membership:
    """One server's view; the server guards it by its lock. Times are monotonic seconds."""

    workers: int
    lost_after_s: float
    members: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)
    """Worker to the reason, in the order of loss."""
    _heard_s: dict[int, float] = field(default_factory=dict)
    _blocked: dict[int, tuple[int, str]] = field(default_factory=dict)
    _epochs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _begun: dict[int, _Epoch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        now_s = time.monotonic()
        self.members.update(range(self.workers))
        self._heard_s = dict.fromkeys(range(self.workers), now_s)

    def heard(self, worker: int) -> None:
        """A worker has sent or taken something."""
        self._heard_s[worker] = time.monotonic()

    def blocked(self, worker: int, clock: int, name: str) -> None:
        """A worker waits for others before it can have ``name``."""
        self._blocked[worker] = clock, name

    def free(self, worker: int) -> None:
        """A worker waits no longer; its silence counts from now."""
        if self._blocked.pop(worker, None) is not None:
            self.heard(worker)

    def waiting(self) -> list[tuple[int, int, str]]:
        """Return (worker, clock, parameter) of those who wait for others."""
        return [(worker, *what) for worker, what in self._blocked.items()]

    def silent(self, among: Sequence[int]) -> dict[int, float]:
        """Return those of ``among`` that wait for nobody and have been silent for too long, and for how many seconds.

        Who waits has a reason to be silent.
        """
        now_s = time.monotonic()
        return {
            worker: now_s - self._heard_s[worker]
            for worker in among
            if worker in self.members
            and worker not in self._blocked
            and now_s - self._heard_s[worker] >= self.lost_after_s
        }

    def remove(self, worker: int, reason: str | None) -> bool:
        """Take a worker out (``reason`` None: it has closed); return whether it was a member."""
        if worker not in self.members:
            return False
        self.members.discard(worker)
        self._blocked.pop(worker, None)
        if reason is None:
            self.closed.add(worker)
        else:
            self.lost[worker] = reason
        return True

    def add(self, worker: int) -> None:
        """Let a late worker in."""
        self.members.add(worker)
        self.heard(worker)

    @property
    def next_epoch(self) -> int:
        """The first epoch that nobody has begun."""
        return max(self._epochs, default=-1) + 1

    def of_epoch(self, epoch: int) -> tuple[int, ...]:
        """Return the members that share the samples of ``epoch``, the same for all who ask."""
        return self._epochs.setdefault(epoch, tuple(sorted(self.members)))

    def begins(self, worker: int, epoch: int) -> None:
        """A worker has asked for the members of ``epoch``, which it begins with its next step."""
        self._begun[worker] = _Epoch(number=epoch)

    def shares(self, worker: int, batches: int) -> None:
        """A worker has said how many batches its share of that epoch has."""
        if worker in self._begun:
            self._begun[worker].batches = batches

    def steps(self, worker: int, clock: int) -> None:
        """A worker begins step number ``clock``."""
        begun = self._begun.get(worker)
        if begun is not None and begun.clock is None:
            begun.clock = clock

    def share(self, worker: int, made: int, local_steps: int = 1) -> Share | None:
        """Return how far ``worker`` is after ``made`` pushes of ``local_steps`` steps each; None: it has asked for none."""
        begun = self._begun.get(worker)
        if begun is None:
            return None
        steps = 0 if begun.clock is None else max(0, made - begun.clock) * local_steps
        return Share(epoch=begun.number, steps=steps, batches=begun.batches)


def shard(samples: int, members: Sequence[int], worker: int, *, epoch: int, seed: int) -> NDArray[np.int64]:
    """Return (m,) the indices of ``worker``'s samples in ``epoch``, shuffled.

    The members' shards are disjoint, hold every sample once, and differ in length by one at most. They depend on the
    arguments alone. Raises InputError when ``worker`` is no member.
    """
    if worker not in members:
        raise InputError(f"worker {worker}", f"is not among the members {list(members)}", "ask as a member")
    place = sorted(members).index(worker)
    order = np.random.default_rng((seed, epoch)).permutation(samples)
    return order[place :: len(members)]


def check_same_policy(policy: Policy) -> None:
    """Raise InputError on every rank unless all have the same synchronisation model. A collective over all ranks."""
    if not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group('gloo') first"
        raise InputError("torch.distributed", "is not initialised", remedy)
    text = policy.describe().encode()[:256].ljust(256, b"\0")
    mine = torch.tensor(list(text), dtype=torch.uint8)
    given = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(given, mine)
    texts = [bytes(one.tolist()).rstrip(b"\0").decode() for one in given]
    for rank, other in enumerate(texts):
        if other != texts[0]:
            problem = f"is {texts[0]} on rank 0 and {other} on rank {rank}"
            raise InputError("synchronisation model", problem, "give every rank the same")
