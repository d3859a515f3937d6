"""Islands that train a small model in float64 through ``hook.outer``, and the same written out in one process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ddltool import runtime
from ddltool.runtime.hook.outer import OuterSteps
from tests.helpers.processes import message_of

SIZES = (3, 7, 5, 2)


def made() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(SIZES))).double()


def inner_of(model: nn.Module, name: str = "adam") -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def batch(island: int, step: int) -> Tensor:
    return torch.randn(4, SIZES[0], generator=torch.Generator().manual_seed(100 * island + step), dtype=torch.float64)


def step(model: nn.Module, inner: torch.optim.Optimizer, inputs: Tensor) -> None:
    inner.zero_grad()
    model(inputs).square().sub(1).square().mean().backward()
    inner.step()


def values(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def furthest(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def written_out(
    islands: int,
    steps: int,
    *,
    every: int,
    optimizer: tuple[float, float] = (0.7, 0.9),
    parts: Sequence[Sequence[int]] = ((0, 1, 2, 3, 4, 5),),
    overlap: int = 0,
    mixing: float = 0.0,
    weights: Sequence[float] | None = None,
    inner: str = "adam",
) -> list[list[Tensor]]:
    """Each island's parameters at the end, by Streaming DiLoCo's recurrence: parameter by parameter, in one process.

    ``parts``: places of the parameters of each fragment.
    """
    models = [made() for _ in range(islands)]
    inners = [inner_of(model, inner) for model in models]
    share = [1 / islands] * islands if weights is None else [weight / sum(weights) for weight in weights]
    outer = values(models[0])
    momentum = [torch.zeros_like(value) for value in outer]
    waiting: dict[int, list[tuple[int, Tensor]]] = {}
    for number in range(1, steps + 1):
        for island in range(islands):
            step(models[island], inners[island], batch(island, number))
        own = [list(model.parameters()) for model in models]
        for part, places in enumerate(parts):
            if number % every == ((part + 1) * every // len(parts)) % every:
                for place in places:
                    gradient = sum(
                        weight * (outer[place] - mine[place].detach()) for weight, mine in zip(share, own, strict=True)
                    )
                    assert isinstance(gradient, Tensor)
                    waiting.setdefault(number + overlap, []).append((place, gradient))
        for place, gradient in waiting.pop(number, []):
            momentum[place] = optimizer[1] * momentum[place] + gradient
            outer[place] = outer[place] - optimizer[0] * (gradient + optimizer[1] * momentum[place])
            with torch.no_grad():
                for mine in own:
                    mine[place].copy_(mixing * mine[place] + (1 - mixing) * outer[place])
    return [values(model) for model in models]


def trained(
    rank: int, steps: int, resume_at: int | None, settings: dict[str, Any], inner: str = "adam"
) -> list[Tensor]:
    """This rank's parameters after so many steps, every rank an island; its state goes through a checkpoint half-way."""
    model = made()
    optimizer = inner_of(model, inner)
    hook = runtime.attach(None)
    weights = settings.pop("weights", None)
    outer = hook.outer(model, optimizer, **settings, **({"weight": weights[rank]} if weights else {}))
    for number in range(1, steps + 1):
        step(model, optimizer, batch(rank, number))
        if number == resume_at:
            saved = model.state_dict(), optimizer.state_dict(), hook.state_dict()
            outer.close()
            model = made()
            optimizer = inner_of(model, inner)
            hook = runtime.attach(None)
            outer = hook.outer(model, optimizer, **settings, **({"weight": weights[rank]} if weights else {}))
            for one, state in zip((model, optimizer, hook), saved, strict=True):
                one.load_state_dict(state)
    assert outer.steps == steps
    return values(model)


def inside(rank: int, port: int, steps: int, every: int) -> list[Tensor]:
    """Two islands that are two jobs apart, each of one rank; the average goes on over a group of its own."""
    group = runtime.island_group(f"127.0.0.1:{port}", rank, 2, timeout_s=60)
    alone = [dist.new_group([one]) for one in range(2)][rank]
    model = made()
    optimizer = inner_of(model)
    runtime.attach(None).outer(model, optimizer, every=every, group=group, inside=alone)
    for number in range(1, steps + 1):
        step(model, optimizer, batch(rank, number))
    return values(model)


def sharded(rank: int, steps: int, every: int) -> list[Tensor]:
    """One island whose two ranks hold FSDP2's shards, each alone in the group of its place; they have the same batches."""
    alone = [dist.new_group([one]) for one in range(2)][rank]
    model = made()
    fully_shard(model)
    optimizer = inner_of(model)
    outer = runtime.attach(None).outer(model, optimizer, every=every, group=alone)
    for number in range(1, steps + 1):
        step(model, optimizer, batch(0, number))
    assert sum(part.numel() for part in outer.outer) < sum(value.numel() for value in model.parameters())
    return [value.full_tensor().detach() for value in model.parameters()]  # type: ignore[attr-defined]


def changing(rank: int, port: int) -> dict[str, Any]:
    """Islands 0 and 1 train; 1 leaves in the middle of a round; 0 goes on alone; 1 joins again. H is 4, SGD outside."""
    address = f"127.0.0.1:{port}"
    model = made()
    optimizer = inner_of(model, "sgd")
    outer = OuterSteps(
        model, optimizer, every=4, optimizer=(0.5, 0.5), group=runtime.island_group(address, rank, 2, meeting=1)
    )
    found: dict[str, Any] = {}
    for number in range(1, 5):
        step(model, optimizer, batch(rank, number))
    found["together"] = values(model)
    alone = runtime.island_group(address, 0, 1, meeting=10 + rank)
    if rank == 0:
        outer.regroup(alone)
        for number in range(5, 9):
            step(model, optimizer, batch(0, number))
        found["alone"] = values(model)
    else:
        model = made()
        optimizer = inner_of(model, "sgd")
        outer = OuterSteps(model, optimizer, every=2, optimizer=(0.5, 0.5), group=alone)
    outer.regroup(runtime.island_group(address, rank, 2, meeting=2))
    found["joined"], found["steps"] = values(model), outer.steps
    for number in range(9, 13 if rank == 0 else 11):
        step(model, optimizer, batch(rank, number))
    found["after"] = values(model)
    return found


def losing(rank: int, port: int) -> dict[str, Any]:
    """Two islands; after a round island 1 goes away, in its next exchange island 0 finds out, regroups and goes on. H is 4."""
    address = f"127.0.0.1:{port}"
    group = runtime.island_group(address, rank, 2, meeting=1, timeout_s=60)
    model = made()
    optimizer = inner_of(model, "sgd")
    outer = OuterSteps(model, optimizer, every=4, optimizer=(0.5, 0.5), group=group)
    for number in range(1, 5):
        step(model, optimizer, batch(rank, number))
    found: dict[str, Any] = {"together": values(model)}
    if rank == 1:
        outer.close()
        del outer, group, model, optimizer
        gc.collect()
        return found
    for number in range(5, 9):
        found["said"] = message_of(step, model, optimizer, batch(0, number))
    outer.regroup(runtime.island_group(address, 0, 1, meeting=2))
    for number in range(9, 13):
        step(model, optimizer, batch(0, number))
    found["alone"] = values(model)
    return found


def refusals(rank: int, settings: list[dict[str, Any]]) -> list[str]:
    model = made()
    optimizer = inner_of(model)
    hook = runtime.attach(None)
    return [message_of(lambda given=given: hook.outer(model, optimizer, **given)) for given in settings]  # type: ignore[misc]
