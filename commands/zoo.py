"""``ddltool zoo``: the built-in models beside TicTac's Table 1."""

from __future__ import annotations

from pathlib import Path

from ddltool.analyzers.loading.timed_graph import timed_graph
from ddltool.artifacts import make_folder
from ddltool.commands.output import out, print_json, progress, say, table
from ddltool.fixtures.loading import folder, graph_files
from ddltool.fixtures.zoo import ZOO, entry
from ddltool.graph import COMPUTE, RECV, Mode, read_graph, write_graph
from ddltool.graph_results import ZooModel, ZooResult

MODES: dict[str, Mode] = {"inference": "inference", "training": "training"}


def zoo(
    write: Path | None = None,
    as_json: bool = False,
) -> None:
    """List the built-in models: parameters, size and ops in both modes, beside the figures of TicTac's Table 1."""
    if write is not None:
        _write(write, as_json)
        return
    models = [describe(name) for name in ZOO]
    if as_json:
        print_json(ZooResult(models=models))
        return
    rows = [_row(model) for model in models]
    columns = ("zoo:NAME", "batch", "param.", "MiB", "ops", "Table 1: param. MiB ops")
    caption = "param.: parameter tensors; ops: inference/training (ours aten's, TicTac's Table 1 TensorFlow's)"
    out().print(table("Built-in models", columns, rows, caption=caption))


def _write(to: Path, as_json: bool) -> None:
    """Write the shipped graphs: the zoo traced anew, the others (the papers' toys, and what TAC gets wrong) as they are."""
    make_folder(to)
    written: list[Path] = []
    with progress("tracing", len(ZOO) * len(MODES)) as advance:
        for path in graph_files():
            advance(len(written), path.name)
            name, _, mode = path.name.partition(".")[0].rpartition("-")
            graph = timed_graph(f"zoo:{name}", mode=MODES[mode]) if name in ZOO else read_graph(path)
            written.append(to / path.name)
            write_graph(graph, written[-1])
    if as_json:
        print_json(ZooResult(paths=[str(path) for path in written]))
    else:
        say(f"wrote {len(written)} graphs to {to}")


def describe(name: str) -> ZooModel:
    """Return a zoo model's figures in both modes, from the graphs that ship, with the published ones where there are some."""
    inference, training = (read_graph(folder() / "graphs" / f"{name}-{mode}.graph.json.gz") for mode in MODES)
    return ZooModel(
        name=name,
        title=entry(name).title,
        batch_size=entry(name).batch_size,
        parameters=len(training.of_kind(RECV)),
        parameter_elements=int(training.meta["parameter_elements"] or 0),
        parameter_mib=training.parameter_bytes / 2**20,
        ops_inference=len(inference.of_kind(COMPUTE)),
        ops_training=len(training.of_kind(COMPUTE)),
        published=entry(name).published,
    )


def _row(model: ZooModel) -> tuple[str, ...]:
    published, table1 = model.published, "-"
    if published is not None:
        ops = f"{published.ops_inference}/{published.ops_training}"
        table1 = f"{published.parameters:3d}  {published.parameter_mib:6.2f}  {ops:>9s}"
    ours = f"{model.ops_inference}/{model.ops_training}"
    return model.name, str(model.batch_size), str(model.parameters), f"{model.parameter_mib:.2f}", ours, table1
