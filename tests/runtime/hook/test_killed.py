"""A process is killed, stopped or ended at any moment: the others end in time, in one line that names it."""

from __future__ import annotations

import random
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.kills import GRACE_S, KINDS, RANKS, SIGNALS, TIMEOUT_S, Outcome, disturbed
from ddltool import runtime
from ddltool.artifacts import save
from tests.helpers.processes import as_job
from tests.helpers.runtime_workers import enforcement


def check(
    kind: str, name: str, victim: int, delay_s: float, call: tuple[int, bool] | None = None, **more: float
) -> Outcome:
    found = disturbed(kind, SIGNALS[name], victim, delay_s, call, **more)
    assert None not in found.codes, f"some hung: {found}"
    assert found.names(victim, among=True) == len(found.told), found
    assert not found.torn, found
    return found


@pytest.mark.parametrize(
    ("kind", "name", "call"),
    [
        ("agent", "SIGKILL", None),
        ("elastic", "SIGSTOP", (9, False)),  # in the set-up
        ("servers", "SIGTERM", None),
        ("hook", "SIGKILL", None),
    ],
)
def test_the_others_end_and_name_the_process(kind: str, name: str, call: tuple[int, bool] | None) -> None:
    """Whoever is killed or ends breaks a connection; only one that is stopped is missed when the job's time is up."""
    check(kind, name, 1, 0.1 if call is None else 0.0, call, limit_s=8.0 if name == "SIGSTOP" else 60.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIGNALS)
def test_random_moments(kind: str, name: str) -> None:
    chance = random.Random(f"{kind} {name}")
    for _ in range(5):
        found = check(kind, name, chance.randrange(RANKS + (kind == "servers")), chance.uniform(0.0, 1.0))
        assert found.lived_s < TIMEOUT_S + GRACE_S, found


def left_out(rank: int) -> None:
    """Three steps, of which rank 1 goes through the second without a backward pass; then all wait for each other."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    save(enforcement([4, 8]), f"enforce.{rank}.json")
    model = DistributedDataParallel(nn.Linear(3, 1))
    hook = runtime.attach(f"enforce.{rank}.json", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        hook.count_samples(4 + 4 * rank)
        loss = model(torch.ones(4 + 4 * rank, 3)).mean()
        if (rank, step) != (1, 1):
            hook.loss(loss, reduction="average").backward()
    dist.barrier()


def test_who_leaves_a_backward_pass_out_is_named(tmp_path: Path) -> None:
    (code, _, told), (other, _, _) = as_job(2, tmp_path, left_out)
    assert code == other == 1
    # Rank 0 holds the store, so the other one may find it gone; where rank 1 is too busy to answer in time it is as if gone.
    named = r"^error: rank 1 (has begun 2 backward passes, and rank 0 3, each of which needs all ranks|is gone);"
    assert re.search(named, told, re.M), told
