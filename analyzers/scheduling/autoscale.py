"""Renting nodes for one long job: scale by goodput or by throughput, and what that costs. Start at :func:`autoscale`.

Pollux, section 5.4.1. With ``N`` nodes a scaler looks at ``rate(N) / (N rate(1))``, what it gets over what perfect
scaling would give. Whenever that is above ``U`` it takes the largest number of nodes at which it is still at least
``L``. It never gives nodes back. The goodput scaler's rate is progress per second at the best batch of the current
epoch, so it grows as larger batches become useful; the throughput scaler's (Or et al., MLSys 2020, as the paper
describes it) is samples per second at the largest batch that the GPUs hold, which training does not change.

Speeds and gradient statistics are as measured, and both scalers know them: what differs is the rule alone. Decisions
are made between epochs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ddltool.analyzers.scheduling.truth import Application
from ddltool.errors import InputError

Rule = Literal["goodput", "throughput", "fixed"]
_CANDIDATES = 50
_MOST_NODES = 1024
FIXED = (1, 4, 16)
"""Numbers of nodes that are held throughout, to compare with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudNode:
    """What can be rented: equal nodes of ``gpus`` GPUs, at most ``most`` of them, ``price_per_h`` each."""

    gpus: int = 4
    gpu_type: str = "any"
    most: int = 16
    price_per_h: float = 1.0

    def __post_init__(self) -> None:
        if self.gpus < 1 or not 1 <= self.most <= _MOST_NODES:
            raise InputError("nodes", f"are {self.most} of {self.gpus} GPUs", f"1 to {_MOST_NODES} of 1 GPU or more")
        if not (np.isfinite(self.price_per_h) and self.price_per_h > 0):
            raise InputError("price", f"is {self.price_per_h}", "a number above 0 per node and hour")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRule:
    """When to scale; ``upper`` and ``lower`` are Pollux's U and L, ``nodes`` those of the rule "fixed"."""

    rule: Rule = "goodput"
    upper: float = 2 / 3
    lower: float = 1 / 2
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.rule not in ("goodput", "throughput", "fixed"):
            raise InputError("rule", f"is {self.rule!r}", "goodput, throughput or fixed")
        if not 0 < self.lower <= self.upper <= 1:
            raise InputError(
                "U, L", f"are {self.upper:g} and {self.lower:g}", "0 < L <= U <= 1; Pollux's are 2/3 and 1/2"
            )
        if self.nodes < 1:
            raise InputError("nodes", f"are {self.nodes}", "at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One epoch: when it began (a restart before it included), on what, and its statistical efficiency."""

    begin_s: float
    seconds: float
    nodes: int
    batch_size: int
    efficiency: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """A whole training; ``cost`` is nodes held times their price."""

    rule: ScalingRule
    epochs: tuple[Epoch, ...]
    seconds: float
    node_seconds: float
    cost: float
    restarts: int

    @property
    def efficiency(self) -> float:
        """The average statistical efficiency: progress over what the same samples at M0 would have made."""
        samples = sum(epoch.seconds * epoch.batch_size for epoch in self.epochs)
        return sum(epoch.seconds * epoch.batch_size * epoch.efficiency for epoch in self.epochs) / samples


class NodeSpeeds:
    """Rates of an application on N whole nodes, at the best batch among 50 totals in equal ratios, each computed once."""

    def __init__(self, application: Application, node: CloudNode) -> None:
        if not application.runs_on(node.gpu_type):
            problem = f"was not measured on {node.gpu_type}"
            raise InputError(f"application {application.name}", problem, f"measured on {', '.join(application.times)}")
        self.application, self.node = application, node
        self.most = min(node.most, max(1, application.max_replicas // node.gpus))
        if application.max_replicas < node.gpus:
            problem = f"uses at most {application.max_replicas} GPUs"
            raise InputError(f"application {application.name}", problem, f"nodes of at most that, not {node.gpus}")
        self._batches: dict[int, list[tuple[int, float, bool]]] = {}

    def batches(self, nodes: int) -> list[tuple[int, float, bool]]:
        """Return (total batch, seconds per optimizer step, whether it needs no accumulation) on ``nodes`` nodes."""
        if nodes not in self._batches:
            application, replicas = self.application, nodes * self.node.gpus
            largest = application.largest_local_batch(self.node.gpu_type)
            low = max(application.init_batch_size, application.min_local_batch_size * replicas)
            found: dict[int, tuple[float, bool]] = {}
            for total in np.geomspace(low, application.max_batch_size, _CANDIDATES).tolist():
                steps = max(int(np.ceil(total / replicas / largest - 1e-8)), 1)
                local = int(np.ceil(total / replicas / steps - 1e-8))
                if replicas * local * steps > application.max_batch_size:
                    local -= 1
                whole = replicas * local * steps
                if local < application.min_local_batch_size or not low <= whole <= application.max_batch_size:
                    continue
                step, sync = application.step_times((self.node.gpus,) * nodes, local, self.node.gpu_type)
                found[whole] = step + (steps - 1) * (step - sync), steps == 1
            self._batches[nodes] = [(total, *found[total]) for total in sorted(found)]
        return self._batches[nodes]

    def goodput(self, nodes: int, epoch: int) -> tuple[float, int]:
        """Return progress (iterations at M0) per second and the total batch that makes the most of it in an epoch."""
        options = self.batches(nodes)
        return max(
            ((self.application.gain(total, epoch) / step, total) for total, step, _ in options), default=(0.0, 0)
        )

    def throughput(self, nodes: int) -> tuple[float, int]:
        """Return samples per second and the total batch: as many samples as the GPUs hold at once."""
        plain = [(total / step, total) for total, step, alone in self.batches(nodes) if alone]
        return max(plain or [(total / step, total) for total, step, _ in self.batches(nodes)], default=(0.0, 0))


def autoscale(application: Application, node: CloudNode, rule: ScalingRule, *, restart_delay_s: float = 30.0) -> Scaled:
    """Return the whole training of ``application`` on rented nodes under ``rule``.

    Every change of the number of nodes and the first start cost ``restart_delay_s``, for which the new nodes are paid.
    Raises InputError where the application was not measured on the nodes' GPUs or cannot use a whole node.
    """
    if not 0 <= restart_delay_s < float("inf"):
        raise InputError("restart delay", f"is {restart_delay_s}", "seconds, at least 0")
    speeds = NodeSpeeds(application, node)
    nodes = min(rule.nodes, speeds.most) if rule.rule == "fixed" else 1
    epochs: list[Epoch] = []
    now_s = node_seconds = 0.0
    starts, running_on = 0, 0
    epoch = 0
    while True:
        nodes = next_nodes(speeds, rule, nodes, epoch)
        begin_s = now_s
        if nodes != running_on:
            starts, running_on = starts + 1, nodes
            now_s += restart_delay_s
        batch = speeds.throughput(nodes)[1] if rule.rule == "throughput" else speeds.goodput(nodes, epoch)[1]
        step = next(seconds for total, seconds, _ in speeds.batches(nodes) if total == batch)
        gain = application.gain(batch, epoch)
        seconds = (application.progress[epoch + 1] - application.progress[epoch]) / gain * step
        now_s += seconds
        node_seconds += nodes * (now_s - begin_s)
        efficiency = gain * application.init_batch_size / batch
        epochs.append(Epoch(begin_s=begin_s, seconds=seconds, nodes=nodes, batch_size=batch, efficiency=efficiency))
        if epoch + 1 >= application.max_epochs:
            break
        epoch += 1
    return Scaled(
        rule=rule,
        epochs=tuple(epochs),
        seconds=now_s,
        node_seconds=node_seconds,
        cost=node_seconds / 3600 * node.price_per_h,
        restarts=starts - 1,
    )


def next_nodes(speeds: NodeSpeeds, rule: ScalingRule, nodes: int, epoch: int) -> int:
    """Return on how many nodes the epoch is to run, at least the current ``nodes``."""
    if rule.rule == "fixed":
        return nodes

    def rate(count: int) -> float:
        return speeds.throughput(count)[0] if rule.rule == "throughput" else speeds.goodput(count, epoch)[0]

    alone = rate(1)
    if rate(nodes) / (nodes * alone) <= rule.upper:
        return nodes
    fitting = [count for count in range(nodes, speeds.most + 1) if rate(count) >= rule.lower * count * alone]
    return max(fitting, default=nodes)


def autoscale_document(
    application: Application, node: CloudNode | None = None, *, restart_delay_s: float = 30.0
) -> dict[str, Any]:
    """Return the document (kind ``ddltool.autoscaling``): the goodput scaler, the throughput scaler, fixed clusters."""
    node = node or CloudNode()
    scalers: tuple[Rule, ...] = ("throughput", "goodput")
    rules = {name: ScalingRule(rule=name) for name in scalers} | {
        f"fixed-{count}": ScalingRule(rule="fixed", nodes=count) for count in FIXED if count <= node.most
    }
    made = {name: autoscale(application, node, rule, restart_delay_s=restart_delay_s) for name, rule in rules.items()}
    return {
        "kind": "ddltool.autoscaling",
        "schema_version": 1,
        "application": application.name,
        "gpus_per_node": node.gpus,
        "most_nodes": node.most,
        "price_per_h": node.price_per_h,
        "upper": rules["goodput"].upper,
        "lower": rules["goodput"].lower,
        "restart_delay_s": restart_delay_s,
        "rules": {
            name: {
                "seconds": result.seconds,
                "node_seconds": result.node_seconds,
                "cost": result.cost,
                "efficiency": result.efficiency,
                "restarts": result.restarts,
                "first_nodes": result.epochs[0].nodes,
                "last_nodes": result.epochs[-1].nodes,
                "epochs": [asdict(epoch) for epoch in result.epochs],
            }
            for name, result in made.items()
        },
    }
