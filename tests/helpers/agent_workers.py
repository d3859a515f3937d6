"""What the processes of the goodput agent's tests are asked to do."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool.analyzers.job.goodput.elastic_table import Split
from ddltool.runtime.agent import choosing
from ddltool.runtime.agent.agent import GoodputAgent
from ddltool.runtime.agent.choosing import BatchDecision
from tests.helpers.runtime_workers import digits_table


def digits(samples: int) -> TensorDataset:
    """Return scikit-learn's digits as (image, target, index), in a mixed order."""
    table = np.random.default_rng(0).permutation(digits_table())[:samples]
    features = torch.tensor(table[:, :-1], dtype=torch.float32) / 16
    return TensorDataset(features, torch.tensor(table[:, -1].astype(int)), torch.arange(samples))


def network() -> nn.Sequential:
    """Return a small network, the same every time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def vector(model: nn.Module) -> Tensor:
    """Return all parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def build(dataset: TensorDataset, lr: float, momentum: float, **options: Any) -> tuple[Any, Any, GoodputAgent]:
    """Return model, optimizer and agent of this process."""
    module = network()
    model = DistributedDataParallel(module) if dist.is_initialized() else module
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    given: dict[str, Any] = {
        **{"initial_batch_size": 24, "max_batch_size": 200, "max_local_batch_size": 64, "rule": "linear"},
        **{"overhead": 1.0, "background": False},
    }
    return model, optimizer, GoodputAgent(model, optimizer, dataset, **(given | options))


def scripted(script: dict[int, tuple[int, int]]) -> Any:
    """Replace decisions by those of a script: total batch and accumulation steps by the number of the look."""
    looks = iter(range(10**6))

    def decide(times: Any, nodes: int, present: Split, *_: Any, **__: Any) -> BatchDecision | None:
        look = next(looks)
        if look not in script:
            return None
        total, accumulation = script[look]
        split = Split(world_size=present.world_size, total_batch_size=total, accumulation_steps=accumulation)
        return BatchDecision(split=split, goodput_per_s=2.0, params=None)  # type: ignore[arg-type]

    return mock.patch.object(choosing, "decide", decide)


def packed(state: dict[str, Any]) -> bytes:
    """Return a checkpoint as a file holds it (tensors would be shared between the processes of a crew)."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def opened(checkpoint: bytes) -> Any:
    """Return the state in a checkpoint."""
    return torch.load(io.BytesIO(checkpoint), weights_only=True)


def train(
    rank: int,
    samples: int,
    epochs: int,
    script: dict[int, tuple[int, int]],
    *,
    stop_at: int | None = None,
    checkpoint: bytes | None = None,
    workers: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train under scripted decisions; return what each step used, and all that a checkpoint holds."""
    dataset = digits(samples)
    with scripted(script):
        model, optimizer, agent = build(dataset, 0.05, 0.9, **options)
        module = model.module if isinstance(model, DistributedDataParallel) else model
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        if checkpoint is not None:
            state = opened(checkpoint)
            module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
            agent.load_state_dict(state["agent"])
        steps: list[dict[str, Any]] = []
        used: list[int] = []
        for epoch in range(epochs):
            for inputs, answers, indices in agent.batches(epoch, num_workers=workers):
                agent.loss(nn.functional.cross_entropy(model(inputs), answers)).backward()
                used += indices.tolist() if agent.samples else []
                if not agent.complete:
                    continue
                row = {
                    "epoch": epoch,
                    "indices": used,
                    "factor": agent.learning_rate_factor,
                    "step": agent.sampler.step,
                }
                used = []
                optimizer.step()
                optimizer.zero_grad()
                if agent.sampler.position == samples:
                    scheduler.step()
                steps.append(row | {"lr": optimizer.param_groups[0]["lr"]})
                if agent.sampler.step == stop_at:
                    break
            if agent.sampler.step == stop_at:
                break
        agent.close()
    kept = {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "agent": agent.state_dict(),
    }
    return {
        **{"steps": steps, "changes": agent.changes, "state": packed(kept)},
        **{"vector": vector(module), "progress": agent.progress},
    }


def train_two(rank: int, *args: Any) -> dict[str, Any]:
    """As :func:`train`, with the keyword arguments as the last positional one."""
    *plain, options = args
    return train(rank, *plain, **options)


def frozen_noise(rank: int, samples: int, batch: int, passes: int, adam: bool, epochs: int) -> tuple[float, float]:
    """Return the agent's noise scale at fixed weights, and its stated relative error."""
    dataset = digits(samples)
    options = {"noise_every": 1, "smoothing": 0.9999, "adapt": False, "max_local_batch_size": batch}
    module = network()
    # Gradients that DDP averages where they are, and others that it copies.
    model = DistributedDataParallel(module, gradient_as_bucket_view=adam) if dist.is_initialized() else module
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if adam:
        optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
        for parameter in module.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(7.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": adam_moment(parameter),
            }
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    agent = GoodputAgent(
        model,
        optimizer,
        dataset,
        initial_batch_size=batch * passes * ranks,
        max_batch_size=batch * passes * ranks,
        max_local_batch_size=batch,
        **{key: value for key, value in options.items() if key != "max_local_batch_size"},  # type: ignore[arg-type]
    )
    for epoch in range(epochs):
        for inputs, answers, _ in agent.batches(epoch):
            agent.loss(nn.functional.cross_entropy(model(inputs), answers)).backward()
            if agent.complete:
                model.zero_grad()  # no update: the weights stay, as after an overflow under AMP
    agent.state_dict()
    estimator = agent._chooser.estimator
    agent.close()
    return estimator.noise_scale or 0.0, estimator.relative_error or 1.0


def adam_moment(parameter: Tensor) -> Tensor:
    """Return a second moment that differs much between coordinates, the same on every rank."""
    generator = torch.Generator().manual_seed(parameter.numel())
    return torch.rand(parameter.shape, generator=generator) ** 4 * 1e-4


def gather(steps: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row per step with the indices of all ranks."""
    return [rows[0] | {"indices": [i for row in rows for i in row["indices"]]} for rows in zip(*steps, strict=True)]
