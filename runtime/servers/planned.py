"""Training by an elastic-bsp plan: workers with predicted barriers, and their server. Start at :func:`follow`."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from ddltool.errors import InputError
from ddltool.plans import Enforcement
from ddltool.runtime.hook.job import planned_for
from ddltool.runtime.hook.telemetry import Identity, StepRecorder, TelemetryFile
from ddltool.runtime.processes.launcher import count_nodes, launched_number
from ddltool.runtime.processes.same_samples import dataset_length
from ddltool.runtime.processes.step_times import is_cuda
from ddltool.runtime.processes.stopping import refuse_in_one_line
from ddltool.runtime.servers.policies import ElasticBSP
from ddltool.runtime.servers.server import Server
from ddltool.runtime.servers.transfers import TransferPlan
from ddltool.runtime.servers.worker import Worker


def follow(
    config: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Dataset[Any],
    *,
    epochs: float = 1.0,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Yield this worker's planned batches; on the last rank, the server, train until all workers end, and yield none.

    ::

        for inputs, answers in follow("enforce.json", model, optimizer, dataset, epochs=3):
            nn.functional.cross_entropy(model(inputs), answers).backward()

    The loop's body makes one forward and one backward pass per batch; the server's ``optimizer`` makes the updates. The
    loop ends when all workers together have processed ``epochs`` times the dataset, whatever the share of each; then
    ``model`` has the trained parameters on every process.

    Args:
        config: the enforcement config, of strategy elastic-bsp.
        model: the bare model (no DDP).
        optimizer: over its parameters; used on the server only.
        dataset: map-style, the same on every worker.
        epochs: how often all workers together go through the dataset.
        seed: of the order of samples.
        checkpoint: a file of this rank's own, as for :class:`Worker`.
        options: go to ``DataLoader``.

    Raises InputError where config and job do not fit, TransferError when the server is lost.
    """
    refuse_in_one_line()
    path, planned = planned_for(config, model)
    if planned.strategy != "elastic-bsp" or planned.superstep is None:
        remedy = "give it to runtime.attach; this is elastic-bsp's"
        raise InputError(f"{path}:strategy", f"is {planned.strategy}", remedy)
    if not epochs > 0:
        raise InputError("epochs", f"is {epochs}", "give a number above 0")
    plan = _transfer_plan(planned, model)
    # The plan's objective is the most iterations per second; with known speeds that is the least waiting per iteration.
    gap = planned.superstep.iteration_gap
    policy = ElasticBSP(planned.superstep.lookahead, objective="per_iteration", max_gap=gap)
    rank = launched_number("RANK", "0")
    if rank == plan.rank_of_server(0):
        model.load_state_dict(Server(model, plan, optimizer, policy).serve(), strict=False)
        return
    size = planned.ranks[0].local_batch_size
    samples = dataset_length(dataset)
    if samples < size * plan.workers:
        problem = f"is {size} for each of {plan.workers} workers, but the dataset has {samples} samples"
        raise InputError(f"{path}:ranks.local_batch_size", problem, "plan smaller batches or fewer devices")
    updates = math.ceil(epochs * samples / size)  # of all workers together: each batch of any worker is one
    file = _open_telemetry(planned, rank)
    with Worker(model, plan, policy, checkpoint=checkpoint) as worker:
        file.identity = replace(file.identity, run=worker.run)  # server 0's name for the run is known only now
        recorder = StepRecorder(file, cuda=is_cuda(model))
        for batch in _batches_of_epochs(worker, dataset, size, seed, options):
            if worker.updates >= updates:
                worker.pull()  # the trained parameters, into the model
                return
            has_left = False
            with worker.step():
                recorder.begin_forward()
                waited_s = worker.waited_s
                try:
                    yield batch
                except GeneratorExit:  # the script has left its loop, after this step
                    has_left = True
                exchange = recorder.begin_exchange(size, size * plan.workers)
                # Waiting for parameters in the forward pass; a device has nothing to compute meanwhile.
                exchange.paused_s = worker.waited_s - waited_s
                exchange.note_ready()
            recorder.after_update()
            if has_left:
                return


def _transfer_plan(planned: Enforcement, model: nn.Module) -> TransferPlan:
    """Return the plan of transfers between the planned workers and one server.

    Their order is the planned one if that names exactly the model's parameters, else the order of registration.
    """
    priority = {record.name: record.priority for record in planned.parameters if record.priority is not None}
    names_every_parameter = priority.keys() == dict(model.named_parameters()).keys()
    return TransferPlan.for_model(
        model, workers=planned.world_size, servers=1, priority=priority if names_every_parameter else None
    )


def _batches_of_epochs(
    worker: Worker, dataset: Dataset[Any], size: int, seed: int, options: dict[str, Any]
) -> Iterator[Any]:
    """Yield this worker's batches of ``size`` samples without end, one epoch after the other.

    A faster worker starts the next epoch earlier. ``options`` go to ``DataLoader``.
    """
    for epoch in itertools.count():
        shares = worker.batches(dataset_length(dataset), size, epoch=epoch, seed=seed, drop_last=True)
        yield from DataLoader(dataset, batch_sampler=[share.tolist() for share in shares], **options)


def _open_telemetry(planned: Enforcement, rank: int) -> TelemetryFile:
    """Return the file for this worker's telemetry, a row per iteration; if the plan names none, one that drops its rows."""
    size = planned.world_size
    device = planned.ranks[rank].device_type
    # + 1: the server is a process of the job too, beside the planned workers.
    identity = Identity(rank=rank, world_size=size, num_nodes=count_nodes(size + 1), device=device, servers=1)
    file = TelemetryFile(Path(planned.telemetry or os.devnull), identity)
    if planned.telemetry is not None:
        file.open()
    return file
