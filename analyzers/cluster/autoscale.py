"""Renting nodes for one long job: scale by goodput or by throughput, and what that costs. Start at :func:`autoscale`.

Pollux, section 5.4.1. On ``N`` nodes a scaler computes ``rate(N) / (N rate(1))``, the share of perfect scaling that it reaches.
Whenever that is above ``U`` it takes the largest number of nodes at which the share is still at least ``L``. It never gives
nodes back. The goodput scaler's rate is progress per second at the best batch of the current epoch, so it grows as larger
batches become useful. The throughput scaler's (Or et al., MLSys 2020, as Pollux's paper describes it) is the most samples per
second with batches that fit into the GPUs, which training does not change.

Both scalers know the measured speeds and gradient statistics, so they differ only by their rule. Decisions are made between
epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

from ddltool.analyzers.cluster.truth import ANY_TYPE, Application
from ddltool.errors import InputError
from ddltool.simulation_results import AutoscalingResult, ScaledEpoch, ScaledTraining

PRICE_PER_H = 1.0
"""Price of a node per hour; it is 1, so that costs are in node hours."""
UPPER, LOWER = 2 / 3, 1 / 2
"""Pollux's U and L."""
FIXED = (1, 4, 16)
"""Numbers of nodes of the fixed clusters that scalers are compared with."""


class NodeSpeeds:
    """Rates of an application on 1 to ``most`` whole nodes of ``gpus`` GPUs, at the best of 50 total batches.

    Raises InputError for an application without measurements for any GPU type ("*"), and for one that cannot use a whole node.
    """

    def __init__(self, application: Application, gpus: int, most: int) -> None:
        """Take an application on nodes of ``gpus`` GPUs each; ``most`` is capped at the nodes that its replicas can fill."""
        where = f"application {application.name}"
        if not application.runs_on(ANY_TYPE):
            raise InputError(where, "was not measured on any", f"measured on {', '.join(application.times)}")
        if application.max_replicas < gpus:
            problem = f"uses at most {application.max_replicas} GPUs"
            raise InputError(where, problem, f"nodes of at most that, not {gpus}")
        self.application = application
        self.most = min(most, application.max_replicas // gpus)
        self.batches = cache(lambda nodes: application.batches((gpus,) * nodes))
        """Function: number of nodes -> [(total batch, seconds per optimizer step, passes)]."""

    def goodput(self, nodes: int, epoch: int) -> tuple[float, int, float]:
        """Return (progress per second, total batch, seconds per step) of most progress per second on ``nodes`` in ``epoch``.

        Progress is counted in iterations at M0, the smallest batch.
        """
        return max((self.application.gain(total, epoch) / step, total, step) for total, step, _ in self.batches(nodes))

    def throughput(self, nodes: int, epoch: int) -> tuple[float, int, float]:
        """Return (samples per second, total batch, seconds per step) of most samples per second on ``nodes``.

        Batches without accumulation are preferred. ``epoch`` is not used; it is there as in :meth:`goodput`.
        """
        options = self.batches(nodes)
        unaccumulated = [option for option in options if option[2] == 1] or options
        return max((total / step, total, step) for total, step, _ in unaccumulated)


def scale(speeds: NodeSpeeds, rule: str, *, restart_delay_s: float = 30.0) -> ScaledTraining:
    """Return the figures of a whole training under ``rule``: "goodput", "throughput", or "fixed-N".

    Scalers start on one node and decide before each epoch, as the module says; "fixed-N" keeps N nodes, with batches by
    goodput. The first start and every change of the number of nodes cost ``restart_delay_s`` seconds, for which the new nodes
    are paid.
    """
    application = speeds.application
    is_fixed = rule.startswith("fixed-")
    rate = speeds.throughput if rule == "throughput" else speeds.goodput
    nodes = min(int(rule.removeprefix("fixed-")), speeds.most) if is_fixed else 1
    epochs: list[ScaledEpoch] = []
    now_s = node_seconds = processed_samples = useful_samples = 0.0
    for epoch in range(application.max_epochs):
        if not is_fixed:
            nodes = _scaled_nodes(nodes, speeds.most, rate, epoch)
        begin_s = now_s  # before the restart, which the nodes are paid for
        if not epochs or nodes != epochs[-1].nodes:
            now_s += restart_delay_s
        _, batch, step_s = rate(nodes, epoch)
        gain = application.gain(batch, epoch)
        seconds = (application.progress[epoch + 1] - application.progress[epoch]) / gain * step_s
        now_s += seconds
        node_seconds += nodes * (now_s - begin_s)
        efficiency = gain * application.init_batch_size / batch
        processed_samples += seconds * batch
        useful_samples += seconds * batch * efficiency
        epochs.append(
            ScaledEpoch(begin_s=begin_s, seconds=seconds, nodes=nodes, batch_size=batch, efficiency=efficiency)
        )
    return ScaledTraining(
        seconds=now_s,
        node_seconds=node_seconds,
        cost=node_seconds / 3600 * PRICE_PER_H,
        efficiency=useful_samples / processed_samples,
        restarts=sum(earlier.nodes != later.nodes for earlier, later in pairwise(epochs)),
        first_nodes=epochs[0].nodes,
        last_nodes=epochs[-1].nodes,
        epochs=epochs,
    )


def _scaled_nodes(nodes: int, most: int, rate: Callable[[int, int], tuple[float, int, float]], epoch: int) -> int:
    """Return the number of nodes that a scaler takes for ``epoch``: ``nodes``, or more up to ``most``.

    Where the share of perfect scaling on ``nodes`` is above U, it is the largest number at which the share is at least L.
    ``rate``: :meth:`NodeSpeeds.goodput` or :meth:`NodeSpeeds.throughput`, whose first result is compared.
    """
    one_node_rate, _, _ = rate(1, epoch)
    if rate(nodes, epoch)[0] / (nodes * one_node_rate) <= UPPER:
        return nodes
    candidates = range(nodes, most + 1)
    efficient = [count for count in candidates if rate(count, epoch)[0] >= LOWER * count * one_node_rate]
    return max(efficient, default=nodes)


def autoscale(
    application: Application,
    *,
    gpus: int = 4,
    most: int = 16,
    restart_delay_s: float = 30.0,
) -> AutoscalingResult:
    """Return one training's figures under the goodput scaler, the throughput scaler and on fixed clusters.

    ``gpus``: GPUs per node; ``most``: largest number of nodes that may be rented; ``restart_delay_s``: seconds of each restart.
    Raises InputError as :class:`NodeSpeeds` does.
    """
    speeds = NodeSpeeds(application, gpus, most)
    rules = ("throughput", "goodput", *(f"fixed-{count}" for count in FIXED if count <= most))
    return AutoscalingResult(
        application=application.name,
        gpus_per_node=gpus,
        most_nodes=most,
        price_per_h=PRICE_PER_H,
        upper=UPPER,
        lower=LOWER,
        restart_delay_s=restart_delay_s,
        rules={rule: scale(speeds, rule, restart_delay_s=restart_delay_s) for rule in rules},
    )
