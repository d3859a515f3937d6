"""``ddltool emit PLAN``: a plan in the words of what will run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ddltool.analyzers.emitting.gaps import TARGETS, Target
from ddltool.analyzers.emitting.layout import plan_hash
from ddltool.artifacts import load, write_text
from ddltool.commands.emit_targets import Wishes, render
from ddltool.commands.options import Json
from ddltool.commands.output import note, out, print_json
from ddltool.errors import InputError, did_you_mean
from ddltool.outputs import demand_distinct
from ddltool.plan import Plan
from ddltool.results import EmitResult

_OUTPUTS: dict[Target, str] = {
    "hook": "enforce.json",
    "torchrun": "launch.sh",
    "kubernetes": "kubernetes.yaml",
    "slurm": "slurm.sh",
    "fsdp2": "fsdp2_plan.py",
    "ddp": "ddp_plan.py",
}


def emit(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, written by ddltool plan -o.")],
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to write (a name that fits the target); - is stdout."
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(help="What will read it: hook (ddltool.runtime), torchrun, kubernetes, slurm, fsdp2 or ddp."),
    ] = "hook",
    telemetry: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="File the hook appends measurements to; 'none' for no telemetry."),
    ] = "telemetry.jsonl",
    script: Annotated[
        str, typer.Option(help='torchrun, kubernetes, slurm: "train.py --its options".', metavar="SCRIPT")
    ] = "train.py",
    devices_per_node: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="torchrun, kubernetes, slurm: 8, or by type V100=8,T4=1.", metavar="COUNT"),
    ] = None,
    queue: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="kubernetes: Kueue's LocalQueue; slurm: partition."),
    ] = None,
    resource: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="kubernetes: a device's resource (nvidia.com/gpu); slurm: its GRES (gpu); 'none' asks for none.",
            metavar="NAME",
        ),
    ] = None,
    image: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="kubernetes: container image with the script, torch and ddltool."),
    ] = None,
    kind: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="kubernetes: TrainJob, PyTorchJob or JobSet; by default the first that can say the plan."),
    ] = None,
    node_label: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="kubernetes: node label that holds the device type (ddltool/device-type).", metavar="KEY"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the enforcement config, launch script, manifest or settings that make a job follow a plan."""
    known = next((name for name in TARGETS if name == target), None)
    if known is None:
        raise InputError("--target", f"unknown target {target!r}", did_you_mean(target, TARGETS))
    path = output or Path(_OUTPUTS[known])
    if as_json and str(path) == "-":
        raise InputError("--json", "cannot share stdout with -o -", "give -o a file name")
    demand_distinct([plan_file], {"-o": path})
    wishes = Wishes(
        telemetry=None if telemetry == "none" else telemetry,
        script=script,
        devices_per_node=devices_per_node,
        queue=queue,
        resource=resource,
        image=image,
        kind=kind,
        node_label=node_label,
    )
    plan = load(plan_file, Plan)
    made = render(plan, known, wishes)
    write_text(path, made.text)
    if as_json:
        found = EmitResult(
            target=target,
            paths=[str(path)],
            world_size=plan.world_size,
            plan_sha256=plan_hash(plan),
            not_expressed=list(made.gaps),
        )
        print_json(found)
        return
    for gap in made.gaps:
        note(f"not expressed by {target}: {gap}")
    if str(path) != "-":
        _say(plan, path)


def _say(plan: Plan, path: Path) -> None:
    """Print what was written, with the batches of the first ranks."""
    sizes: list[str] = []
    for row in plan.assignments:
        sizes += [str(row.local_batch_size)] * min(row.devices, 16 - len(sizes))
    more = ", ..." if plan.world_size > 16 else ""
    batches = ", ".join(sizes)
    out().print(f"wrote {path}: {plan.world_size} processes, local batch sizes {batches}{more}", soft_wrap=True)
