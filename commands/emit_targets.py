"""The targets of ``ddltool emit``: from the command line's wishes to the text of the file."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ddltool.errors import InputError, did_you_mean, shortened

if TYPE_CHECKING:
    from ddltool.analyzers.emitting.gaps import Target
    from ddltool.analyzers.emitting.kubernetes import Kind
    from ddltool.analyzers.emitting.layout import Layout
    from ddltool.plan import Plan

_IMAGE = "pytorch/pytorch:latest"
_LAUNCHERS = ("torchrun", "kubernetes", "slurm")
# Options that say something to some targets only; given to another they would be lost in silence.
_MEANT_FOR = {
    "devices_per_node": _LAUNCHERS,
    "queue": ("kubernetes", "slurm"),
    "resource": ("kubernetes", "slurm"),
    "image": ("kubernetes",),
    "kind": ("kubernetes",),
    "node_label": ("kubernetes",),
}
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
# registry.example:5000/team/name:tag@sha256:digest
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
_SLURM_NAME = re.compile(r"[\w.,/-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The options of the command line."""

    telemetry: str | None
    script: str
    devices_per_node: str | None
    queue: str | None
    resource: str | None
    image: str | None
    kind: str | None
    node_label: str | None


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The text of a target's file and what it does not say."""

    text: str
    gaps: list[str]


def render(plan: Plan, target: Target, wishes: Wishes) -> Rendered:
    """Return the file for a target. Raises InputError for options that it does not take and plans it cannot run."""
    from ddltool.analyzers.emitting.gaps import not_expressed
    from ddltool.analyzers.emitting.layout import layout
    from ddltool.analyzers.emitting.scripts import gres_type, slurm_script, torchrun_script
    from ddltool.analyzers.emitting.settings import ddp_module, fsdp2_module
    from ddltool.analyzers.placement.enforcement import to_enforcement
    from ddltool.artifacts import to_json

    for field in fields(wishes):
        if getattr(wishes, field.name) is not None and target not in _MEANT_FOR.get(field.name, (target,)):
            option = "--" + field.name.replace("_", "-")
            raise InputError(option, f"says nothing to {target}", f"it is for {', '.join(_MEANT_FOR[field.name])}")
    if wishes.telemetry is not None and not (wishes.telemetry.strip() and wishes.telemetry.isprintable()):
        problem = f"is {wishes.telemetry!r}, which is no name of a file"
        raise InputError("--telemetry", problem, "give a file such as telemetry.jsonl, or none")
    enforcement = to_enforcement(plan, telemetry=wishes.telemetry)  # refuses what no process group can run
    if target not in _LAUNCHERS:
        gaps = not_expressed(plan, target)
        if target == "hook":
            return Rendered(text=to_json(enforcement), gaps=gaps)
        return Rendered(text=(ddp_module if target == "ddp" else fsdp2_module)(plan, gaps=gaps), gaps=gaps)
    placed = layout(plan, _devices_per_node(wishes.devices_per_node))
    gaps = not_expressed(plan, target, placed)
    words = _words(wishes.script)
    if target == "torchrun":
        return Rendered(text=torchrun_script(plan, placed, script=words, gaps=gaps), gaps=gaps)
    if target == "slurm":
        gres = _named("--resource", wishes.resource or "gpu", _SLURM_NAME)
        partition = None if wishes.queue is None else _named("--queue", wishes.queue, _SLURM_NAME)
        if gres != "none":
            types = ", ".join(sorted({gres_type(group.device_type) for group in placed.groups}))
            gaps.append(f"GRES types: the site must name its devices {types} (--resource none asks for none)")
        text = slurm_script(
            plan, placed, script=words, gaps=gaps, gres=None if gres == "none" else gres, partition=partition
        )
        return Rendered(text=text, gaps=gaps)
    return _kubernetes(plan, wishes, placed, gaps)


def _kubernetes(plan: Plan, wishes: Wishes, placed: Layout, gaps: list[str]) -> Rendered:
    """Return the manifest."""
    from ddltool.analyzers.emitting.kubernetes import (
        ClusterSettings,
        assumptions,
        choose_kind,
        manifest_text,
        manifests,
    )
    from ddltool.analyzers.placement.enforcement import to_enforcement

    resource = _named("--resource", wishes.resource or "nvidia.com/gpu", _LABEL_KEY)
    settings = ClusterSettings(
        script=_words(wishes.script),
        image=_IMAGE if wishes.image is None else _named("--image", wishes.image, _IMAGE_NAME),
        resource=None if resource == "none" else resource,
        node_label=_named("--node-label", wishes.node_label or "ddltool/device-type", _LABEL_KEY),
        queue=None if wishes.queue is None else _named("--queue", wishes.queue, _LABEL_VALUE),
    )
    kind = choose_kind(placed) if wishes.kind is None else _kind(wishes.kind)
    gaps = [*gaps, *assumptions(settings, plan)]
    if wishes.image is None:
        gaps.append(f"image: no --image; {_IMAGE} holds neither the script nor ddltool")
    documents = manifests(plan, to_enforcement(plan, telemetry=wishes.telemetry), placed, settings, kind)
    return Rendered(text=manifest_text(plan, documents, placed, gaps), gaps=gaps)


def _kind(text: str) -> Kind:
    from ddltool.analyzers.emitting.kubernetes import KINDS

    for kind in KINDS:
        if kind.lower() == text.lower():
            return kind
    raise InputError("--kind", f"unknown kind {text!r}", did_you_mean(text, KINDS))


def _words(script: str) -> list[str]:
    """Return the words of ``--script``. Raises InputError for an empty one and for quotes that do not close."""
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise InputError("--script", f"cannot be split ({error})", "mind the quotes") from None
    if not words or not all(character.isprintable() for character in script):
        raise InputError("--script", "is empty or holds a line break", 'give "train.py --its options"')
    if not words[0] or words[0].startswith("-"):
        raise InputError("--script", f"begins with {words[0]!r}, which is no script", 'give "train.py --its options"')
    return words


def _devices_per_node(text: str | None) -> dict[str, int] | int | None:
    """Return ``8`` or ``V100=8,T4=1`` as numbers."""
    if text is None:
        return None
    parts = [part.rpartition("=") for part in text.split(",")]
    counts = {name.strip(): count.strip() for name, _, count in parts}
    remedy = "give a count such as 8, or counts by type such as V100=8,T4=1"
    if len(counts) < len(parts) or ("" in counts and len(counts) > 1):
        raise InputError("--devices-per-node", f"is {text!r}", remedy)
    if not all(re.fullmatch(r"[0-9]{1,6}", count) and int(count) for count in counts.values()):
        raise InputError("--devices-per-node", f"is {text!r}", remedy)
    return int(counts[""]) if "" in counts else {name: int(count) for name, count in counts.items()}


def _named(option: str, text: str, pattern: re.Pattern[str]) -> str:
    if not pattern.fullmatch(text):
        shown = shortened(text, 80)
        raise InputError(option, f"is {shown!r}, which no cluster takes as a name", f"expected {pattern.pattern}")
    return text
