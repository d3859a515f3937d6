"""``ddltool emit PLAN``: a plan in the words of what will run it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from ddltool.analyzers.emitting.enforcement import Target, not_expressed, to_enforcement
from ddltool.analyzers.emitting.kubernetes import assumptions, manifest_text, manifests
from ddltool.analyzers.emitting.layout import Kind, LaunchSettings, Layout, layout, plan_hash
from ddltool.analyzers.emitting.scripts import CORES, ddp_module, fsdp2_module, gres_type, slurm_script, torchrun_script
from ddltool.artifacts import load, to_json, write_text
from ddltool.commands.options import Json, demand_part, is_given, one_of
from ddltool.commands.output import note, print_json, say
from ddltool.commands.values import device_counts, words
from ddltool.errors import InputError, did_you_mean, known, shortened
from ddltool.outputs import check_outputs
from ddltool.plans import Enforcement, Plan
from ddltool.results import EmitResult

_Text = str | None
_OUTPUTS = {
    **{"hook": "enforce.json", "torchrun": "launch.sh", "kubernetes": "kubernetes.yaml", "slurm": "slurm.sh"},
    **{"fsdp2": "fsdp2_plan.py", "ddp": "ddp_plan.py"},
}
_SERVED = ("hook", "torchrun")
_ALL = {"plan_file", "output", "target", "telemetry", "script", "as_json"}
# Options that say something to some targets only.
_MORE = {
    "torchrun": {"devices_per_node"},
    "slurm": {"devices_per_node", "queue", "resource"},
    "kubernetes": {"devices_per_node", "queue", "resource", "image", "kind", "node_label", "label_value"},
}
_LABEL_KEY = r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_NODE_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?"
# registry.example:5000/team/name:tag@sha256:digest
_IMAGE_NAME = r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}"
_SLURM_NAME = r"[A-Za-z0-9_.,/-]+"


def emit(
    context: typer.Context,
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, written by ddltool plan -o.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to write (a name that fits the target); - is stdout."
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(**one_of(*_OUTPUTS, help="What will read it; hook: ddltool.runtime."))
    ] = "hook",
    telemetry: Annotated[
        str, typer.Option(metavar="FILE", help="File the hook writes measurements to; 'none' for no telemetry.")
    ] = "telemetry.jsonl",
    script: Annotated[
        str, typer.Option(help='torchrun, kubernetes, slurm: "train.py --its options".', metavar="SCRIPT")
    ] = "train.py",
    devices_per_node: Annotated[
        _Text, typer.Option(help="torchrun, kubernetes, slurm: 8, or by type V100=8,T4=1.", metavar="COUNT")
    ] = None,
    queue: Annotated[
        _Text, typer.Option(metavar="NAME", help="kubernetes: Kueue's LocalQueue; slurm: partition.")
    ] = None,
    resource: Annotated[
        _Text,
        typer.Option(
            help="kubernetes: a device's resource (nvidia.com/gpu); slurm: its GRES (gpu); 'none' asks for none.",
            metavar="NAME",
        ),
    ] = None,
    image: Annotated[
        _Text, typer.Option(metavar="NAME", help="kubernetes: container image with the script, torch and ddltool.")
    ] = None,
    kind: Annotated[
        _Text,
        typer.Option(**one_of(*get_args(Kind), help="kubernetes: by default the first that can say the plan.")),
    ] = None,
    node_label: Annotated[
        str, typer.Option(help="kubernetes: node label that holds the device type.", metavar="KEY")
    ] = "ddltool/device-type",
    label_value: Annotated[
        str, typer.Option(help="kubernetes: its values, where they are not the types.", metavar="TYPE=VALUE,...")
    ] = "",
    as_json: Json = False,
) -> None:
    """Write the enforcement config, launch script, manifest or settings that make a job follow a plan."""
    chosen = cast(Target, known("--target", target, tuple(_OUTPUTS)))
    demand_part(context, f"--target {chosen}", _ALL | _MORE.get(chosen, set()))
    path = output or Path(_OUTPUTS[chosen])
    if as_json and str(path) == "-":
        raise InputError("--json", "cannot share stdout with -o -", "give -o a file name")
    if not (telemetry.strip() and telemetry.isprintable()):
        problem = f"is {telemetry!r}, which is no name of a file"
        raise InputError("--telemetry", problem, "give a file such as telemetry.jsonl, or none")
    paths = [path]
    if chosen in ("torchrun", "slurm") and str(path) != "-":  # a manifest holds it, the hook's target is it
        paths.append(path.with_name("enforce.json"))
    check_outputs([plan_file], dict(zip(("-o", "enforce.json"), paths, strict=False)))
    plan = load(plan_file, Plan)
    if plan.group is not None:
        problem = f"each device is a group of {plan.group.text}, whose own processes no plan starts"
        raise InputError(f"{plan_file}:group", problem, "take each group's batch and passes from the plan")
    if plan.strategy == "elastic-bsp" and chosen not in _SERVED:
        problem = f"has no parameter server, which {plan_file}, an elastic-bsp plan, needs"
        raise InputError(f"--target {chosen}", problem, f"give --target {' or '.join(_SERVED)}")
    enforcement = to_enforcement(plan, telemetry=None if telemetry == "none" else telemetry)
    if chosen in _MORE:
        device = _name("--resource", resource or ("gpu" if chosen == "slurm" else "nvidia.com/gpu"), chosen)
        settings = LaunchSettings(
            script=words(script, "--script"),
            image=None if image is None else _name("--image", image, chosen),
            resource=None if device == "none" else device,
            node_label=_name("--node-label", node_label, "kubernetes"),
            label_values=_label_values(label_value, [row.device_type for row in plan.assignments]),
            queue=None if queue is None else _name("--queue", queue, chosen),
            kind=None if kind is None else cast(Kind, known("--kind", kind, get_args(Kind))),
        )
        placed = layout(plan, _per_node(devices_per_node))
        here = is_given(context, "script") or chosen == "kubernetes"
        here = here or any((folder / script).exists() for folder in (Path(), path.parent))
        missing = [] if here else [f"script: {script} is started, and there is none here (--script names yours)"]
        text, gaps = _launcher(plan, enforcement, chosen, placed, settings, missing)
    else:
        gaps = not_expressed(plan, chosen)
        modules = {"ddp": ddp_module, "fsdp2": fsdp2_module}
        text = to_json(enforcement) if chosen == "hook" else modules[chosen](plan, gaps=gaps)
    for brought in paths[1:]:
        write_text(brought, to_json(enforcement))
    write_text(path, text)
    if as_json:
        names = [str(each) for each in paths]
        sha, size = plan_hash(plan), plan.world_size
        print_json(EmitResult(target=chosen, paths=names, world_size=size, plan_sha256=sha, not_expressed=gaps))
        return
    for gap in gaps:
        note(f"not expressed by {chosen}: {gap}")
    if str(path) != "-":
        sizes = [str(rank.local_batch_size) for rank in enforcement.ranks]
        batches = ", ".join([*sizes[:16], *(["..."] if len(sizes) > 16 else [])])
        say(f"wrote {' and '.join(map(str, paths))}: {len(sizes)} processes, local batch sizes {batches}")


def _launcher(
    plan: Plan,
    enforcement: Enforcement,
    target: Target,
    placed: Layout,
    settings: LaunchSettings,
    missing: Sequence[str],
) -> tuple[str, list[str]]:
    """Return the text that starts a plan's processes, and what it leaves out or takes for granted."""
    gaps = [*not_expressed(plan, target, placed), *missing]
    if target == "torchrun":
        return torchrun_script(plan, placed, settings, gaps=gaps), gaps
    if target == "slurm":
        if settings.resource is not None:
            types = ", ".join(sorted({gres_type(group.device_type) for group in placed.groups}))
            gaps.append(f"GRES types: the site must name its devices {types} (--resource none asks for none)")
        limits = "the partition's own time limit (sbatch options override)"
        gaps.append(f"cores and time: {CORES} cores a process, {limits}")
        return slurm_script(plan, placed, settings, gaps=gaps), gaps
    gaps += assumptions(settings, plan)
    return manifest_text(plan, manifests(plan, enforcement, placed, settings), placed, gaps), gaps


def _label_values(text: str, types: Sequence[str]) -> dict[str, str]:
    """Return ``T4=Tesla-T4,V100=Tesla-V100`` by device type. Raises InputError for a type that the plan has not."""
    made: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not (equals and value):
            raise InputError("--label-value", f"{shortened(part, 80)!r} is not TYPE=VALUE", "for example T4=Tesla-T4")
        if name not in types:
            raise InputError("--label-value", f"the plan has no {name!r}", did_you_mean(name, types))
        if not re.fullmatch(_NODE_VALUE, value):
            raise InputError(
                "--label-value", f"{shortened(value, 80)!r} is no label's value", f"expected {_NODE_VALUE}"
            )
        made[name] = value
    return made


def _per_node(text: str | None) -> dict[str, int] | int | None:
    """Return ``8`` or ``V100=8,T4=1`` as numbers."""
    if text is None or "=" in text:
        return None if text is None else device_counts("--devices-per-node", text)
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise InputError("--devices-per-node", f"is {text!r}", "give a count such as 8, or by type V100=8,T4=1")
    return int(text)


def _name(option: str, text: str, target: str) -> str:
    """Return a name that a cluster takes. Raises InputError for any other."""
    patterns = {"--image": _IMAGE_NAME, "--queue": _LABEL_VALUE}
    pattern = _SLURM_NAME if target == "slurm" else patterns.get(option, _LABEL_KEY)
    if not re.fullmatch(pattern, text):
        shown = shortened(text, 80)
        raise InputError(option, f"is {shown!r}, which no cluster takes as a name", f"expected {pattern}")
    return text
