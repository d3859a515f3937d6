"""``ddltool init``: a job.yaml and a cluster.yaml to begin with."""

from __future__ import annotations

from pathlib import Path

from ddltool.analyzers.step.measured.machines import first_files, read_nodes
from ddltool.artifacts import check_outputs, make_folder, write_text
from ddltool.commands.output import note, print_json, say
from ddltool.errors import InputError
from ddltool.job import is_code
from ddltool.results import InitResult
from ddltool.runtime.measuring.machine_checks import machine_nodes
from ddltool.units import counted


def init(
    model: str | None = None,
    nodes: list[Path] | None = None,
    output: Path = Path(),
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Write job.yaml and cluster.yaml from what this machine, nvidia-smi, Slurm or Kubernetes shows.

    ``nodes``: files with the output of those commands; None: this machine is examined. ``model``: the job's SOURCE of a
    model. ``output``: the folder, which is made if it is missing. Raises InputError for existing files, unless ``force``.
    """
    if model is not None and not (model.strip() and model.isprintable()):
        raise InputError("--model", f"is {model!r}", "give a SOURCE such as train.py:make_model")
    there = [output / name for name in ("job.yaml", "cluster.yaml") if (output / name).exists()]
    if there and not force:
        raise InputError(str(there[0]), "is there already", "give --force to write over it, or -o another folder")
    inventory = read_nodes(nodes) if nodes else machine_nodes()
    # The texts of job.yaml and cluster.yaml by file name; remarks say what was left out.
    texts, remarks = first_files(inventory, model, output)
    make_folder(output)
    paths = {name: output / name for name in texts}
    check_outputs(nodes or [], paths)
    for name, text in texts.items():
        write_text(paths[name], text)
    seen = len({node.name for node in inventory.nodes})
    if as_json:
        names = [str(path) for path in paths.values()]
        print_json(
            InitResult(paths=names, devices=inventory.counts, nodes=seen, unknown=inventory.unknown, remarks=remarks)
        )
        return
    for remark in remarks:
        note(f"note: {remark}")
    devices = ", ".join(f"{count} {name}" for name, count in inventory.counts.items())
    say(f"{devices} on {counted(seen, 'node')}")
    say(f"wrote {' and '.join(map(str, paths.values()))}")
    code = " --allow-code" if model is not None and is_code(model) else ""
    say(f"Next: ddltool plan {paths['job.yaml']}{code}")
