"""``ddltool profile --network``: latency and bandwidth between processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.runtime.measuring.network import NetworkMeasurement


# A fit this far off says little about any size of message.
_BAD_FIT = 1.0


def profile_network(processes: int, output: Path | None, as_json: bool) -> None:
    """Measure between the processes of this torchrun job, or between local ones, and print; rank 0 speaks for all."""
    from ddltool.artifacts import check_writable, save
    from ddltool.commands.output import print_json, progress
    from ddltool.runtime.measuring.network import measure_network

    if output is not None:
        check_writable(output)
    with progress("measuring the network") as advance:
        found = measure_network(processes, progress=lambda done, total: advance(done, f"pair {done} of {total}"))
    if int(os.environ.get("RANK", "0")) != 0:
        return
    document = network_document(found)
    if output is not None:
        save(document, output)
    if as_json:
        print_json(document)
    else:
        show_network(found, output)


def network_document(found: NetworkMeasurement) -> dict[str, Any]:
    """Return the JSON document of a measurement (kind ``ddltool.network``)."""
    return {
        "kind": "ddltool.network",
        "schema_version": 1,
        "processes": found.processes,
        "local": found.local,
        "bandwidth_bytes_per_s": found.bandwidth_bytes_per_s,
        "latency_s": found.latency_s,
        "residual": found.residual,
        "pairs": [
            {
                "ranks": [pair.first, pair.second],
                "bandwidth_bytes_per_s": pair.fit.bandwidth_bytes_per_s,
                "latency_s": pair.fit.latency_s,
                "residual": pair.fit.residual,
                "sizes_bytes": list(pair.sizes_bytes),
                "shortest_s": list(pair.shortest_s),
                "median_s": list(pair.median_s),
                "spread_s": list(pair.spread_s),
            }
            for pair in found.pairs
        ],
    }


def show_network(found: NetworkMeasurement, output: Path | None) -> None:
    """Print a measurement as a table, and the options that hand it on."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_bytes, show_seconds

    rows = [
        (
            f"{pair.first} - {pair.second}",
            show_seconds(pair.fit.latency_s),
            f"{show_bytes(pair.fit.bandwidth_bytes_per_s)}/s",
            f"{pair.fit.residual:.1%}",
            show_seconds(pair.median_s[0]),
            show_seconds(pair.median_s[-1]),
        )
        for pair in found.pairs
    ]
    smallest, largest = (show_bytes(found.pairs[0].sizes_bytes[end]) for end in (0, -1))
    columns = ("ranks", "latency", "bandwidth", "misfit", f"median {smallest}", f"median {largest}")
    console = out()
    console.print(table(f"Network between {found.processes} processes (measured, one way)", columns, rows))
    if found.residual > _BAD_FIT:
        console.print(
            f"The times do not lie on a line (misfit {found.residual:.0%}): measure again on a quieter machine."
        )
    if found.local or os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "-"):
        console.print("These processes share one machine: that is its loopback, not a network.")
    rate = found.bandwidth_bytes_per_s * 8 / 1e9
    console.print(f"For ddltool trace: --bandwidth {rate:.3g}Gbit --latency {found.latency_s * 1e6:.3g}us")
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)
