"""How much communication a step leaves exposed, by the best source that a job has. Start at :class:`Communication`.

A traced graph on a known network gives DDP's buckets or FSDP2's prefetch, as they come and at their best
(``analyzers/communication``); a fitted throughput model gives the fit's synchronisation (Pollux, section 3.2);
telemetry of an earlier run gives that run's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from ddltool.analyzers.communication.collectives import (
    Compression,
    best_cuts,
    bucket_setting,
    compressed_ddp,
    default_cuts,
    finish_s,
    plan_ddp,
)
from ddltool.analyzers.communication.fsdp import plan_fsdp, prefetch_setting
from ddltool.analyzers.communication.order import tac
from ddltool.analyzers.communication.program import program_of, stretched
from ddltool.analyzers.communication.timeline import Simulator
from ddltool.analyzers.costs.nccl import Fabric, Floor
from ddltool.analyzers.goodput.throughput import ThroughputParams, overlapped, sync_time_s
from ddltool.errors import Infeasible
from ddltool.graph import COMPUTE, Graph
from ddltool.plans import BucketSetting, CompressionFigures, PrefetchSetting
from ddltool.units import show_bytes

FITTED, MEASURED = "as fitted", "as measured"
"""The setting of an exposure that a fit or a run gives: no order of transfers is known, so none is better."""

# Weights, gradients and Adam's two moments, all of one dtype: what every replica of DDP holds.
STATES = 4
_SEEDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposed:
    """Seconds of communication that a step does not hide: as it comes, and with the best setting."""

    default_s: float
    best_s: float
    low_s: float | None = None
    """The least and the most of ``best_s``, where they are known."""
    high_s: float | None = None
    setting: str = ""
    ddp: BucketSetting | None = None
    fsdp2: PrefetchSetting | None = None


class Communication(Protocol):
    """Where the figures come from."""

    @property
    def source(self) -> str:
        """Return what the figures are made of, in words."""
        ...

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return what data-parallel replicas leave exposed; ``pass_s``: compute of the pass that ends with it."""
        ...

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return what one worker of a parameter server leaves exposed in each of its iterations."""
        ...

    def ordered(self, devices: Mapping[str, int], exposed: Exposed) -> Exposed:
        """Return what logical workers leave exposed, whose gradients are added in one order, from what replicas do."""
        return exposed

    def least_s(self, devices: Mapping[str, int], pass_s: float) -> float:
        """Return the seconds of ``synchronous`` with its best setting, without the setting."""
        return self.synchronous(devices, pass_s).best_s

    def bound_s(self, devices: Mapping[str, int], most: Mapping[str, int], pass_s: float) -> float:
        """Return seconds that no devices expose less of, if they are at least these and at most others."""
        return 0.0

    def demand_whole(self, name: str) -> None:
        """Raise Infeasible where a process on such a device cannot hold the whole model's state."""
        return


class GraphCommunication(Communication):
    """From a timed training graph and the network of each device type; compute is stretched to the job's devices.

    Parameter servers are taken to be spread over the nodes, so that the workers of a node share its link and no other is
    narrower.
    """

    def __init__(
        self,
        graph: Graph,
        fabrics: Mapping[str, Fabric],
        memory_gib: Mapping[str, float | None],
    ) -> None:
        """Prepare a graph; networks and memory by device type. Raises InputError for a graph that is no training step."""
        self.graph = graph
        self.program = program_of(graph)
        self.fabrics = fabrics
        self.memory_bytes = {name: size * 2**30 for name, size in memory_gib.items() if size is not None}
        self.state_bytes = STATES * graph.parameter_bytes
        self._asynchronous: dict[tuple[float, float, float], Exposed] = {}
        self._least: dict[tuple[float, tuple[tuple[str, int], ...]], float] = {}

    @property
    def source(self) -> str:
        """Return what the figures are made of, in words."""
        texts: dict[str, list[str]] = {}
        for name, fabric in self.fabrics.items():
            texts.setdefault(fabric.text, []).append(name)
        several = len(texts) > 1
        links = "; ".join(f"{', '.join(names)}: {text}" if several else text for text, names in texts.items())
        return f"{self.graph.name}'s gradients on {links} (predicted)"

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return DDP's exposure, or FSDP2's where a whole replica does not fit. Raises Infeasible when neither fits."""
        replicas = sum(devices.values())
        if replicas < 2:
            return Exposed(default_s=0.0, best_s=0.0, setting="one process")
        program = stretched(self.program, pass_s)
        group = Fabric.joined(self.fabrics, devices)
        if self._sharded(devices):
            found = plan_fsdp(program, group)
            if found is None:
                raise Infeasible(
                    f"a replica needs {show_bytes(self.state_bytes)} for weights, gradients and Adam's moments, more "
                    "than its device has, and the parameters' names show no blocks to shard"
                )
            best, default = found.best, found.default
            # All gathered parameters beside a share of the states, where it is known that there is room.
            held = self.state_bytes / replicas + found.without_reshard.gathered_bytes
            roomy = all(held <= self.memory_bytes.get(name, 0.0) for name in devices)
            if roomy and found.without_reshard.step_s < best.step_s:
                best = found.without_reshard
            kept = "" if best.reshard_after_forward else ", reshard_after_forward=False"
            return Exposed(
                default_s=max(0.0, default.step_s - pass_s),
                best_s=max(0.0, best.step_s - pass_s),
                setting=f"FSDP2, prefetch {best.forward_depth} / {best.backward_depth}{kept}",
                fsdp2=prefetch_setting(found, best),
            )
        ddp = plan_ddp(program, group)
        buckets = bucket_setting(ddp)
        return Exposed(
            default_s=ddp.default.exposed_s,
            best_s=max(0.0, buckets.step_s - pass_s),
            setting=_bucket_text(buckets),
            ddp=buckets,
        )

    def least_s(self, devices: Mapping[str, int], pass_s: float) -> float:
        """Return the seconds that the best buckets leave exposed, or FSDP2's best prefetch."""
        if sum(devices.values()) < 2:
            return 0.0
        key = pass_s, tuple(sorted(devices.items()))
        if key not in self._least:
            if self._sharded(devices):
                self._least[key] = self.synchronous(devices, pass_s).best_s
            else:
                program, group = stretched(self.program, pass_s), Fabric.joined(self.fabrics, devices)
                ends = finish_s(program, group, default_cuts(program))
                if ends > pass_s:
                    ends = min(ends, finish_s(program, group, best_cuts(program, group)))
                self._least[key] = max(0.0, ends - pass_s)
        return self._least[key]

    def bound_s(self, devices: Mapping[str, int], most: Mapping[str, int], pass_s: float) -> float:
        """Return what the best buckets leave exposed on the floor of what these and others make of the network."""
        if self.state_bytes > self._least_memory(devices)[0]:
            return 0.0
        used = Fabric.joined(self.fabrics, devices)
        if (floor := Floor.of(used, list(self.fabrics.values()), Fabric.joined(self.fabrics, most).nodes)) is None:
            return 0.0
        program = stretched(self.program, pass_s)
        return max(0.0, finish_s(program, floor, best_cuts(program, floor)) - pass_s)

    def demand_whole(self, name: str) -> None:
        """Raise Infeasible where a device of a type cannot hold weights, gradients and Adam's moments."""
        needed, has = self.state_bytes, self.memory_bytes.get(name, math.inf)
        if needed > has:
            raise Infeasible(
                f"memory: a whole model in each process takes {show_bytes(needed)} for weights, gradients and "
                f"Adam's moments; each {name} has {show_bytes(has)}, {show_bytes(needed - has)} missing"
            )

    def compressed(
        self, devices: Mapping[str, int], pass_s: float, compression: Compression, memory_bytes_per_s: float
    ) -> CompressionFigures:
        """Return what compressed gradients would bring DDP's default buckets on at least two devices."""
        program, group = stretched(self.program, pass_s), Fabric.joined(self.fabrics, devices)
        default_s = max(pass_s, finish_s(program, group, default_cuts(program)))
        return compressed_ddp(self.graph, program, group, compression, memory_bytes_per_s, default_s)

    def _sharded(self, devices: Mapping[str, int]) -> bool:
        """Return whether the model states must be sharded. Raises Infeasible when even that is too much."""
        has, smallest = self._least_memory(devices)
        if self.state_bytes / (replicas := sum(devices.values())) > has:
            raise Infeasible(
                f"memory: weights, gradients and Adam's moments are {show_bytes(self.state_bytes)}; "
                f"{replicas} devices hold {show_bytes(has)} each ({smallest})"
            )
        return self.state_bytes > has

    def _least_memory(self, devices: Mapping[str, int]) -> tuple[float, str]:
        return min((self.memory_bytes.get(name, math.inf), name) for name in devices)

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return the exposure of TAC's order over a random one, simulated on the graph."""
        fabrics = [self.fabrics[name] for name in devices]
        leaves = any(count > self.fabrics[name].gpus_per_node for name, count in devices.items())
        if len(devices) < 2 and not leaves:  # nor do the servers
            rate, delay = fabrics[0].inside.bytes_per_s, fabrics[0].inside.latency_s
        else:
            rate, delay = min((it.between.bytes_per_s / it.gpus_per_node, it.between.latency_s) for it in fabrics)
        key = pass_s, rate, delay
        if key not in self._asynchronous:
            durations = self.graph.duration_s.copy()
            compute = self.graph.kind == COMPUTE
            durations[compute] *= pass_s / self.program.compute_s
            durations[~compute] = delay + self.graph.size_bytes[~compute] / rate
            graph = self.graph.with_durations(durations, list(self.graph.estimate))
            simulator, priority = Simulator(graph), tac(graph).priority
            best, default = (
                float(np.mean([simulator.run(given, seed).makespan_s for seed in range(_SEEDS)]))
                for given in (priority, None)
            )
            best = min(best, default)
            self._asynchronous[key] = Exposed(
                default_s=default - pass_s, best_s=best - pass_s, setting="TAC's order of transfers"
            )
        return self._asynchronous[key]


class LinkedSteps:
    """Steps under DDP's default buckets on known links, for placement: the slowest links of all types."""

    def __init__(self, source: GraphCommunication) -> None:
        """Take program and networks of a graph's communication."""
        used = list(source.fabrics.values())
        slowest = min(used, key=lambda fabric: fabric.between.bytes_per_s)
        inside = min((fabric.inside for fabric in used), key=lambda link: link.bytes_per_s)
        self.program, self.fabric = source.program, replace(slowest, inside=inside)

    def sync_s(self, nodes: int, replicas: int) -> float:
        """Return the seconds of all buckets, one after another."""
        return self.step_s(0.0, nodes, replicas)

    def step_s(self, compute_s: float, nodes: int, replicas: int) -> float:
        """Return the seconds of a step of which computing takes ``compute_s``."""
        group = self.fabric.over(replicas, min(nodes, replicas))
        return max(compute_s, finish_s(stretched(self.program, compute_s), group, default_cuts(self.program)))


class FittedCommunication(Communication):
    """From fitted throughput models: the synchronisation by the fit. No order is known, so none is better."""

    def __init__(self, models: Mapping[str, ThroughputParams], devices_per_node: int) -> None:
        """Take ``models`` by device type; types without one count like those with."""
        self.models = models
        self.devices_per_node = devices_per_node

    @property
    def source(self) -> str:
        """Return what the figures are made of, in words."""
        return "fitted synchronisation of " + ", ".join(self.models)

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return the exposure by the slowest of the used types' models."""
        replicas = sum(devices.values())
        nodes = sum(-(-count // self.devices_per_node) for count in devices.values())
        used = [self.models[name] for name in devices if name in self.models] or list(self.models.values())
        exposed = max(
            float(overlapped(pass_s, float(sync_time_s(model, nodes, replicas)), model.gamma)) - pass_s
            for model in used
        )
        return Exposed(default_s=max(0.0, exposed), best_s=max(0.0, exposed), setting=FITTED)

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return what :meth:`synchronous` does: nothing here has seen an exchange with servers."""
        return self.synchronous(devices, pass_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCommunication(Communication):
    """What one run's telemetry, ``sync_s`` on ``replicas`` processes of DDP, says of its own and of other exchanges.

    With n bytes a ring sends 2 (K - 1) / K n from each process, in 2 (K - 1) messages, while as much comes in; where all
    processes are on one machine, both are work of the same processor, and one way alone takes half. What of it decides,
    bytes, messages or the devices that copy them, a run does not tell: the ends of an interval are by either.
    """

    sync_s: float
    replicas: int
    nodes: int = 1
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Samples per second of each of the run's device types."""
    buckets: int | None = None
    """In which EST's gradients travel; None: not known."""

    @property
    def source(self) -> str:
        """Return what the figures are made of, in words."""
        return f"synchronisation measured on {self.replicas} processes"

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return the measured time, scaled by (K - 1) / K as a ring all-reduce's bytes."""
        count = sum(devices.values())
        by_messages = self.sync_s * (count - 1) / (self.replicas - 1)
        by_bytes = by_messages * self.replicas / count
        slowest = min(self.speeds.values(), default=1.0)
        quicker = slowest / min((self.speeds.get(name, slowest) for name in devices), default=slowest)
        return Exposed(
            default_s=by_bytes,
            best_s=by_bytes,
            low_s=min(by_bytes, by_messages) * min(quicker, 1.0),
            high_s=max(by_bytes, by_messages),
            setting=MEASURED,
        )

    @property
    def _there_s(self) -> float:
        """Return the seconds of all gradients from one process to another, and nothing else meanwhile."""
        one_way_s = self.sync_s * self.replicas / (2 * (self.replicas - 1))
        return one_way_s / 2 if self.nodes == 1 else one_way_s

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return the seconds of a push and a pull at one server that serves workers one after another.

        What a worker finds before it there is by mean value analysis (Reiser and Lavenberg, 1980). At least one of both is
        not hidden; at most all others come first.
        """
        workers, service_s = sum(devices.values()), 2 * self._there_s
        response_s, there = service_s, 0.0
        for number in range(1, workers + 1):
            response_s = service_s * (1 + there)
            there = number * response_s / (pass_s + response_s) if response_s else 0.0
        return Exposed(
            default_s=response_s,
            best_s=response_s,
            low_s=service_s / 2,
            high_s=workers * service_s,
            setting=MEASURED,
        )

    def ordered(self, devices: Mapping[str, int], exposed: Exposed) -> Exposed:
        """Return the seconds of the sum that passes from process to process, and of the mean that goes round after it.

        At least one of both is not hidden. Of the first bucket each is a chain of K - 1 messages, and the others follow.
        """
        hops = sum(devices.values()) - 1
        if not hops:
            return exposed
        # Of an unknown number of buckets, one and many.
        most_s, least_s = (2 * self._there_s * (hops + n - 1) / n for n in (self.buckets or 1, self.buckets or 2**20))
        best_s = max(exposed.best_s, math.sqrt(most_s * least_s))
        ends = min(least_s / 2, best_s), max(most_s * (2 if self.nodes == 1 else 1), best_s)
        return replace(exposed, default_s=best_s, best_s=best_s, low_s=ends[0], high_s=ends[1])


def _bucket_text(setting: BucketSetting) -> str:
    if setting.bucket_cap_mb_list is not None:
        return f"DDP, {len(setting.bucket_cap_mb_list)} buckets of the plan"
    return "DDP's defaults" if setting.bucket_cap_mb is None else f"DDP, bucket_cap_mb={setting.bucket_cap_mb:.4g}"
