"""``ddltool profile --network``: latency and bandwidth between processes."""

from __future__ import annotations

import os
from pathlib import Path

from ddltool.analyzers.reporting.result_sections import network_section
from ddltool.artifacts import check_writable, save
from ddltool.commands.output import print_json, progress, show
from ddltool.results import NetworkPair, NetworkResult
from ddltool.runtime.measuring.network import NetworkMeasurement, measure_network


def profile_network(processes: int, output: Path | None, as_json: bool) -> None:
    """Measure between the processes of this torchrun job, or between local ones, and print; rank 0 speaks for all."""
    if output is not None:
        check_writable(output)
    with progress("measuring the network") as advance:
        measured = measure_network(processes, progress=lambda done, total: advance(done, f"pair {done} of {total}"))
    if int(os.environ.get("RANK", "0")) != 0:
        return
    found = network_result(measured)
    if output is not None:
        save(found, output)
    if as_json:
        print_json(found)
        return
    together = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "-")
    show(network_section(found.model_copy(update={"local": found.local or together}), "this job"), output)


def network_result(found: NetworkMeasurement) -> NetworkResult:
    """Return a measurement as a record."""
    return NetworkResult(
        processes=found.processes,
        local=found.local,
        bandwidth_bytes_per_s=found.bandwidth_bytes_per_s,
        latency_s=found.latency_s,
        residual=found.residual,
        pairs=[
            NetworkPair(
                ranks=[pair.first, pair.second],
                bandwidth_bytes_per_s=pair.fit.bandwidth_bytes_per_s,
                latency_s=pair.fit.latency_s,
                residual=pair.fit.residual,
                sizes_bytes=list(pair.sizes_bytes),
                shortest_s=list(pair.shortest_s),
                median_s=list(pair.median_s),
                spread_s=list(pair.spread_s),
            )
            for pair in found.pairs
        ],
    )
