"""Exposed communication of a step: the seconds that compute does not hide. Start at :class:`Communication`.

Three sources: a traced graph on a known network gives DDP's buckets or FSDP2's prefetch, with default and with best
settings (``analyzers/step/communication``); a fitted throughput model gives the fit's synchronisation (Pollux, section
3.2); telemetry gives an earlier run's measured synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ddltool.analyzers.job.goodput.throughput import ThroughputParams, overlapped, sync_time_s
from ddltool.analyzers.step.communication.collectives import (
    Compression,
    best_cuts,
    bucket_setting,
    compressed_ddp,
    default_cuts,
    finish_s,
    plan_ddp,
)
from ddltool.analyzers.step.communication.fsdp import plan_fsdp, prefetch_setting
from ddltool.analyzers.step.communication.nccl import Fabric, Floor
from ddltool.analyzers.step.communication.program import program_of, stretched
from ddltool.analyzers.step.transfers.order import tac
from ddltool.analyzers.step.transfers.timeline import Simulator
from ddltool.errors import Infeasible
from ddltool.graph import COMPUTE, Graph
from ddltool.plans import BucketSetting, CompressionFigures, PrefetchSetting
from ddltool.units import show_bytes

FITTED, MEASURED = "as fitted", "as measured"
"""``Exposed.setting`` of a fit or a run, which do not know the order of transfers and so propose no better one."""
# Passes so alike are the same: as far as two measurements of one are apart.
_SAME_PASS = 0.1

# What every replica of DDP holds, in sizes of the weights: weights, gradients and Adam's two moments.
STATES = 4
# Number of simulated runs with random orders of which an asynchronous exposure is the mean.
_SEEDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposed:
    """Seconds of communication that a step's compute does not hide, with default and with the best settings.

    Settings are DDP's buckets, FSDP2's prefetch, or the order of transfers to parameter servers.
    """

    default_s: float
    best_s: float
    low_s: float | None = None
    """Lower end of the interval of ``best_s``; None: not known. ``high_s`` is the upper end."""
    high_s: float | None = None
    setting: str = ""
    """The best setting in words; empty: there is nothing to set."""
    ddp: BucketSetting | None = None
    fsdp2: PrefetchSetting | None = None


class Communication(Protocol):
    """A source of exposed communication.

    In all methods, ``devices`` is device type -> number of devices, and ``pass_s`` the seconds of compute of one pass.
    """

    @property
    def source(self) -> str:
        """Return in words where the figures come from."""
        ...

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return the exposure of a step of data-parallel replicas; gradients travel during the step's last pass.

        May raise Infeasible where the model does not fit into memory.
        """
        ...

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return the exposure of one iteration of a worker with a parameter server."""
        ...

    def ordered(self, devices: Mapping[str, int], exposed: Exposed) -> Exposed:
        """Return the exposure of ESTs (logical workers), whose gradients are summed in a fixed order.

        ``exposed``: the exposure of replicas on the same devices, which sum in any order. By default the order costs nothing.
        """
        return exposed

    def least_s(self, devices: Mapping[str, int], pass_s: float) -> float:
        """Return ``best_s`` of :meth:`synchronous`; a subclass may have a faster way, as searches call it often."""
        return self.synchronous(devices, pass_s).best_s

    def bound_s(self, devices: Mapping[str, int], most: Mapping[str, int], pass_s: float) -> float:
        """Return a lower bound of :meth:`least_s` on any numbers of devices from ``devices`` up to ``most``.

        It is 0.0 where no bound is known.
        """
        return 0.0

    def demand_whole(self, name: str) -> None:
        """Raise Infeasible where a device of the type ``name`` cannot hold the state of the whole model.

        By default memory is not known, and nothing is raised.
        """
        return


class GraphCommunication(Communication):
    """Exposure simulated on a timed training graph, with compute scaled to ``pass_s``, and the network of each device type.

    Parameter servers are assumed to be on all nodes, so that the bottleneck is the link that a node's workers share.
    """

    def __init__(
        self,
        graph: Graph,
        fabrics: Mapping[str, Fabric],
        memory_gib: Mapping[str, float | None],
    ) -> None:
        """Take a timed graph, and by device type the network and the memory in GiB (None: not known, so not limited).

        Raises InputError where the graph is not that of a training step.
        """
        self.graph = graph
        self.program = program_of(graph)
        """When the graph's gradients are ready in a pass, which communication starts from."""
        self.fabrics = fabrics
        self.memory_bytes = {name: size * 2**30 for name, size in memory_gib.items() if size is not None}
        self.state_bytes = STATES * graph.parameter_bytes
        """Of a whole replica: weights, gradients and Adam's two moments."""
        # Key: compute of a pass in s, bytes/s and latency in s of the workers' link.
        self._asynchronous_cache: dict[tuple[float, float, float], Exposed] = {}
        # Key: compute of a pass in s, devices by type; value: exposed seconds.
        self._least_s_cache: dict[tuple[float, tuple[tuple[str, int], ...]], float] = {}

    @property
    def source(self) -> str:
        """Return in words the graph's name and its networks, each with its device types if the networks differ."""
        names_by_text: dict[str, list[str]] = {}
        for name, fabric in self.fabrics.items():
            names_by_text.setdefault(fabric.text, []).append(name)
        has_several = len(names_by_text) > 1
        links = "; ".join(
            f"{', '.join(names)}: {text}" if has_several else text for text, names in names_by_text.items()
        )
        return f"{self.graph.name}'s gradients on {links} (predicted)"

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return DDP's exposure, or FSDP2's where a whole replica does not fit into the smallest device.

        Raises Infeasible when neither fits into memory. It is 0 for one device.
        """
        replicas = sum(devices.values())
        if replicas < 2:
            return Exposed(default_s=0.0, best_s=0.0, setting="one process")
        program = stretched(self.program, pass_s)
        group = Fabric.joined(self.fabrics, devices)
        if self._must_shard(devices):
            fsdp = plan_fsdp(program, group)
            if fsdp is None:
                raise Infeasible(
                    f"a replica needs {show_bytes(self.state_bytes)} for weights, gradients and Adam's moments, more "
                    "than its device has, and the parameters' names show no blocks to shard"
                )
            best, default = fsdp.best, fsdp.default
            # Keeping parameters gathered (no reshard) is chosen only where every device's memory is known and holds them.
            held_bytes = self.state_bytes / replicas + fsdp.without_reshard.gathered_bytes
            is_roomy = all(held_bytes <= self.memory_bytes.get(name, 0.0) for name in devices)
            if is_roomy and fsdp.without_reshard.step_s < best.step_s:
                best = fsdp.without_reshard
            reshard_text = "" if best.reshard_after_forward else ", reshard_after_forward=False"
            return Exposed(
                default_s=max(0.0, default.step_s - pass_s),
                best_s=max(0.0, best.step_s - pass_s),
                setting=f"FSDP2, prefetch {best.forward_depth} / {best.backward_depth}{reshard_text}",
                fsdp2=prefetch_setting(fsdp, best),
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
        """Return the exposed seconds with DDP's best buckets, or with FSDP2's best prefetch where a replica does not fit.

        They are cached by devices and ``pass_s``, because searches ask for the same ones again.
        """
        if sum(devices.values()) < 2:
            return 0.0
        key = pass_s, tuple(sorted(devices.items()))
        if key not in self._least_s_cache:
            if self._must_shard(devices):
                self._least_s_cache[key] = self.synchronous(devices, pass_s).best_s
            else:
                program, group = stretched(self.program, pass_s), Fabric.joined(self.fabrics, devices)
                end_s = finish_s(program, group, default_cuts(program))
                if end_s > pass_s:
                    end_s = min(end_s, finish_s(program, group, best_cuts(program, group)))
                self._least_s_cache[key] = max(0.0, end_s - pass_s)
        return self._least_s_cache[key]

    def bound_s(self, devices: Mapping[str, int], most: Mapping[str, int], pass_s: float) -> float:
        """Return a lower bound of :meth:`least_s` on any numbers of devices from ``devices`` up to ``most``.

        It is the exposure of the best buckets on a network as fast as the fastest of these. It is 0.0 for models that must be
        sharded and where no such network can be given.
        """
        least_memory_bytes, _ = self._least_memory(devices)
        if self.state_bytes > least_memory_bytes:
            return 0.0
        group = Fabric.joined(self.fabrics, devices)
        most_nodes = Fabric.joined(self.fabrics, most).nodes
        fastest_network = Floor.of(group, list(self.fabrics.values()), most_nodes)
        if fastest_network is None:
            return 0.0
        program = stretched(self.program, pass_s)
        end_s = finish_s(program, fastest_network, best_cuts(program, fastest_network))
        return max(0.0, end_s - pass_s)

    def demand_whole(self, name: str) -> None:
        """Raise Infeasible where a device of the type ``name`` cannot hold weights, gradients and Adam's moments.

        Strategies that cannot shard the model call it.
        """
        needed_bytes, available_bytes = self.state_bytes, self.memory_bytes.get(name, math.inf)
        if needed_bytes > available_bytes:
            raise Infeasible(
                f"memory: a whole model in each process takes {show_bytes(needed_bytes)} for weights, gradients and "
                f"Adam's moments; each {name} has {show_bytes(available_bytes)}, "
                f"{show_bytes(needed_bytes - available_bytes)} missing"
            )

    def compressed(
        self, devices: Mapping[str, int], pass_s: float, compression: Compression, memory_bytes_per_s: float
    ) -> CompressionFigures:
        """Return the figures of a step with compressed gradients, beside DDP's default buckets, on two or more devices.

        Args:
            devices: device type -> number of devices.
            pass_s: seconds of compute of a pass.
            compression: how gradients are compressed.
            memory_bytes_per_s: memory bandwidth of the slowest device, which limits the speed of compressing.
        """
        program, group = stretched(self.program, pass_s), Fabric.joined(self.fabrics, devices)
        default_s = max(pass_s, finish_s(program, group, default_cuts(program)))
        return compressed_ddp(self.graph, program, group, compression, memory_bytes_per_s, default_s)

    def _must_shard(self, devices: Mapping[str, int]) -> bool:
        """Return whether the model must be sharded, because the smallest device cannot hold a whole replica's state.

        Raises Infeasible when the state does not fit even if it is sharded over all ``devices``.
        """
        available_bytes, smallest = self._least_memory(devices)
        replicas = sum(devices.values())
        if self.state_bytes / replicas > available_bytes:
            raise Infeasible(
                f"memory: weights, gradients and Adam's moments are {show_bytes(self.state_bytes)}; "
                f"{replicas} devices hold {show_bytes(available_bytes)} each ({smallest})"
            )
        return self.state_bytes > available_bytes

    def _least_memory(self, devices: Mapping[str, int]) -> tuple[float, str]:
        """Return (bytes, type) of the device with least memory; infinite bytes where no type's memory is known."""
        return min((self.memory_bytes.get(name, math.inf), name) for name in devices)

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return the exposure of a worker with parameter servers, by simulating the graph with its transfers.

        ``best_s`` is with TAC's order of transfers, ``default_s`` the mean over random orders. Workers of a node share its
        link to the servers.
        """
        bytes_per_s, latency_s = self._server_link(devices)
        key = pass_s, bytes_per_s, latency_s
        if key not in self._asynchronous_cache:
            # The graph's own times, computing scaled to ``pass_s`` and transfers to the worker's link.
            durations = self.graph.duration_s.copy()
            is_compute = self.graph.kind == COMPUTE
            durations[is_compute] *= pass_s / self.program.compute_s
            durations[~is_compute] = latency_s + self.graph.size_bytes[~is_compute] / bytes_per_s
            graph = self.graph.with_durations(durations, list(self.graph.estimate))
            simulator = Simulator(graph)
            # None: transfers that are ready at the same time go in random order
            by_tac_s, default_s = (
                float(np.mean([simulator.run(order, seed).makespan_s for seed in range(_SEEDS)]))
                for order in (tac(graph).priority, None)
            )
            best_s = min(by_tac_s, default_s)
            self._asynchronous_cache[key] = Exposed(
                default_s=default_s - pass_s, best_s=best_s - pass_s, setting="TAC's order of transfers"
            )
        return self._asynchronous_cache[key]

    def _server_link(self, devices: Mapping[str, int]) -> tuple[float, float]:
        """Return (bytes per second, latency in seconds) that each worker has to the parameter servers.

        Servers are on all nodes. It is the link inside the node where all ``devices`` are on one, else each worker's share of
        the slowest link between nodes.
        """
        fabrics = [self.fabrics[name] for name in devices]
        leaves_node = any(count > self.fabrics[name].gpus_per_node for name, count in devices.items())
        if len(devices) < 2 and not leaves_node:
            return fabrics[0].inside.bytes_per_s, fabrics[0].inside.latency_s
        return min((fabric.between.bytes_per_s / fabric.gpus_per_node, fabric.between.latency_s) for fabric in fabrics)


class LinkedSteps:
    """Step times under DDP's default buckets for placement on nodes, on the slowest links of all device types."""

    def __init__(self, source: GraphCommunication) -> None:
        """Take the program of ``source`` and, of all its device types, the slowest links inside and between nodes."""
        fabrics = list(source.fabrics.values())
        slowest = min(fabrics, key=lambda fabric: fabric.between.bytes_per_s)
        inside = min((fabric.inside for fabric in fabrics), key=lambda link: link.bytes_per_s)
        self.program, self.fabric = source.program, replace(slowest, inside=inside)

    def sync_s(self, nodes: int, replicas: int) -> float:
        """Return the seconds of synchronisation by itself, on ``replicas`` devices of ``nodes`` nodes: all buckets in turn."""
        return self.step_s(0.0, nodes, replicas)  # all gradients are ready at once

    def step_s(self, compute_s: float, nodes: int, replicas: int) -> float:
        """Return the seconds of a step with ``compute_s`` seconds of compute on ``replicas`` devices of ``nodes`` nodes."""
        group = self.fabric.over(replicas, min(nodes, replicas))
        communicated_s = finish_s(stretched(self.program, compute_s), group, default_cuts(self.program))
        return max(compute_s, communicated_s)


class FittedCommunication(Communication):
    """Exposure by fitted throughput models (Pollux); default and best are the same, as a fit knows no order of transfers."""

    def __init__(self, models: Mapping[str, ThroughputParams], devices_per_node: int) -> None:
        """Take ``models`` by device type, and how many devices fill a node."""
        self.models = models
        self.devices_per_node = devices_per_node

    @property
    def source(self) -> str:
        """Return the device types whose fits are used."""
        return "fitted synchronisation of " + ", ".join(self.models)

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return the longest exposure that the models of the used types predict; all models where no used type has one."""
        replicas = sum(devices.values())
        nodes = sum(-(-count // self.devices_per_node) for count in devices.values())
        used_models = [self.models[name] for name in devices if name in self.models] or list(self.models.values())
        exposed_s = max(
            float(overlapped(pass_s, float(sync_time_s(model, nodes, replicas)), model.gamma)) - pass_s
            for model in used_models
        )
        return Exposed(default_s=max(0.0, exposed_s), best_s=max(0.0, exposed_s), setting=FITTED)

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return the same as :meth:`synchronous`, because there is no fit of parameter servers."""
        return self.synchronous(devices, pass_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCommunication(Communication):
    """Exposure scaled from an earlier run of DDP.

    With K processes a ring all-reduce of n bytes sends 2 (K - 1) / K n bytes from each process in 2 (K - 1) messages, and
    receives as much; on a single node one processor does both, so one direction alone takes half the time. A run does not
    tell whether bytes, messages or the copying devices limit it: the interval covers these assumptions.
    """

    sync_s: float
    """Exposed synchronisation in a step of the run."""
    replicas: int
    """Processes of the run, 2 or more."""
    nodes: int = 1
    """Nodes of the run."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Samples per second of each of the run's device types."""
    buckets: int | None = None
    """Number of buckets of an EST's gradients; None: not known."""
    served_pass_s: float | None = None
    """Mean pass of a run with a parameter server, from whose waiting ``sync_s`` was derived (:meth:`of_servers`); None: DDP."""

    @classmethod
    def of_servers(cls, response_s: float, pass_s: float, workers: int, **more: Any) -> MeasuredCommunication:
        """Return the communication of a run with one parameter server, for which its workers wait ``response_s`` in a step.

        ``sync_s`` becomes that of a DDP whose transfers take as long: so :meth:`asynchronous` returns ``response_s`` for the
        run's own ``workers``, 2 or more, and their mean pass of ``pass_s``. ``more``: the other fields.
        """
        unit = cls(sync_s=1.0, replicas=workers, served_pass_s=pass_s, **more)  # all its times are per second of sync_s
        # Bisection for sync_s: a response grows with the server's service time, and is no shorter than that alone.
        low_s = 0.0
        high_s = response_s / (2 * unit._transfer_s)
        for _ in range(60):
            middle_s = (low_s + high_s) / 2
            found_s = replace(unit, sync_s=middle_s)._response_s(workers, pass_s)
            if found_s < response_s:
                low_s = middle_s
            else:
                high_s = middle_s
        return replace(unit, sync_s=high_s)

    @property
    def source(self) -> str:
        """Return in words the number of processes of the measured run."""
        measured = "synchronisation" if self.served_pass_s is None else "waiting for a parameter server"
        return f"{measured} measured on {self.replicas} processes"

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return the measured time scaled to K processes by their bytes, with an interval.

        Bytes grow as (K - 1) / K, messages as K - 1: the times scaled by the one and by the other are the interval's ends. If
        the devices here are faster than the run's, its lower end is shorter by that ratio.
        """
        count = sum(devices.values())
        by_messages_s = self.sync_s * (count - 1) / (self.replicas - 1)
        by_bytes_s = by_messages_s * self.replicas / count
        slowest_of_run = min(self.speeds.values(), default=1.0)
        slowest_here = min((self.speeds.get(name, slowest_of_run) for name in devices), default=slowest_of_run)
        # Faster devices may copy faster, if copying is what limits the exchange.
        speed_ratio = slowest_of_run / slowest_here
        low_s = min(by_bytes_s, by_messages_s) * min(speed_ratio, 1.0)
        if self.served_pass_s is not None:  # waiting for a server says little of an all-reduce
            low_s = 0.0
        return Exposed(
            default_s=by_bytes_s,
            best_s=by_bytes_s,
            low_s=low_s,
            high_s=max(by_bytes_s, by_messages_s),
            setting=MEASURED,
        )

    @property
    def _transfer_s(self) -> float:
        """Return the seconds of sending all gradients from one process to another on an otherwise idle network.

        It follows from the measured ring all-reduce: see the class for its bytes.
        """
        transfer_s = self.sync_s * self.replicas / (2 * (self.replicas - 1))
        return transfer_s / 2 if self.nodes == 1 else transfer_s

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        """Return the seconds of a push and a pull at one server, which serves the workers one after another.

        The length of its queue is by mean value analysis (Reiser and Lavenberg, 1980). The lower end of the interval is a push
        or a pull alone, the upper end a worker that waits for all others. What a run with a server measured has no interval
        for as many workers with passes as long.
        """
        workers = sum(devices.values())
        response_s = self._response_s(workers, pass_s)
        is_same_pass = self.served_pass_s is not None and math.isclose(pass_s, self.served_pass_s, rel_tol=_SAME_PASS)
        if is_same_pass and workers == self.replicas:  # just what was measured
            low_s = high_s = response_s
        else:
            low_s = self._transfer_s
            high_s = workers * 2 * self._transfer_s
        return Exposed(default_s=response_s, best_s=response_s, low_s=low_s, high_s=high_s, setting=MEASURED)

    def _response_s(self, workers: int, pass_s: float) -> float:
        """Return the mean seconds from a worker's push to the end of its pull, waiting for the server included.

        One server serves ``workers`` workers in turn, each of which computes for ``pass_s`` in between. By mean value
        analysis: a worker that is added finds the queue that the others have on average.
        """
        service_s = 2 * self._transfer_s  # a push and a pull
        response_s = service_s
        queue_length = 0.0  # mean number of workers at the server
        for worker_count in range(1, workers + 1):
            response_s = service_s * (1 + queue_length)
            queue_length = worker_count * response_s / (pass_s + response_s) if response_s else 0.0
        return response_s

    def ordered(self, devices: Mapping[str, int], exposed: Exposed) -> Exposed:
        """Return the exposure of ESTs, which sum in order: a chain reduce, then a chain broadcast, over K processes.

        With B buckets each chain takes (K - 1 + B - 1) / B times the gradients' transfer, because buckets are pipelined. The
        lower end of the interval is one of the two chains. One process exposes nothing more than ``exposed``.
        """
        hops = sum(devices.values()) - 1
        if not hops:
            return exposed
        # Where the number of buckets is not known: between one bucket, and so many that the pipeline is always full.
        most_s, least_s = (
            2 * self._transfer_s * (hops + buckets - 1) / buckets
            for buckets in (self.buckets or 1, self.buckets or 2**20)
        )
        best_s = max(exposed.best_s, math.sqrt(most_s * least_s))
        # On one node both directions may have to share a processor again.
        both_ways = 2 if self.nodes == 1 else 1
        low_s = min(least_s / 2, best_s)
        high_s = max(most_s * both_ways, best_s)
        return replace(exposed, default_s=best_s, best_s=best_s, low_s=low_s, high_s=high_s)


def _bucket_text(setting: BucketSetting) -> str:
    """Return DDP's bucket setting in a few words: a list of the plan's own, torch's defaults, or one size in MB."""
    if setting.bucket_cap_mb_list is not None:
        return f"DDP, {len(setting.bucket_cap_mb_list)} buckets of the plan"
    return "DDP's defaults" if setting.bucket_cap_mb is None else f"DDP, bucket_cap_mb={setting.bucket_cap_mb:.4g}"
