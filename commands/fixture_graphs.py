"""The fixture graphs, as ``ddltool zoo --write FOLDER`` makes them: the zoo, the papers' toys, and what TAC gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ddltool.analyzers.communication.adverse import ADVERSE
from ddltool.analyzers.communication.toys import TOYS
from ddltool.analyzers.loading.timed_graph import timed_graph
from ddltool.fixtures.zoo import ZOO
from ddltool.graph import Graph, Mode
from ddltool.graph_io import write_graph

MODES: tuple[Mode, ...] = ("inference", "training")
# What the shipped graphs are timed for; `ddltool trace GRAPH --oracle roofline --device NAME` times them for another.
DEVICE, BANDWIDTH, LATENCY = "V100", "10Gbit", "50us"


def zoo_graph(name: str, mode: Mode) -> Graph:
    """Return a fresh trace of a zoo model as it is shipped."""
    return timed_graph(f"zoo:{name}", mode=mode, device=DEVICE, bandwidth=BANDWIDTH, latency=LATENCY)


def graphs() -> Iterator[tuple[str, Graph]]:
    """Yield every shipped graph with its file's stem."""
    for name, build in TOYS.items():
        yield f"toy-{name}", build()
    for name, build in ADVERSE.items():
        yield f"adverse-{name}", build()
    for name in ZOO:
        for mode in MODES:
            yield f"{name}-{mode}", zoo_graph(name, mode)


def write_graphs(folder: Path, progress: Callable[[int, str], None]) -> list[Path]:
    """Write every fixture graph into ``folder`` (made if absent) and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for stem, graph in graphs():
        progress(len(written), stem)
        written.append(folder / f"{stem}.graph.json.gz")
        write_graph(graph, written[-1])
    return written
