"""Parts of every target of ``emit``: the plan's hash, names that clusters accept, and the processes on each node.

A plan has assignments: numbers of devices of one type. A device may stand for a *group* of several, which hold one copy of
the model by tensor or pipeline parallelism; there is one process for each single device.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from ddltool.errors import InputError, did_you_mean, shortened
from ddltool.plans import Plan

# The longest name that leaves room for what JobSet and Trainer append ("-node-0-0-xxxxx") in a label of 63 characters.
NAME_LENGTH = 40
_LABEL_LENGTH, _LONGEST_COMMENT = 63, 120


Kind = Literal["TrainJob", "JobSet"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualNodes:
    """``nodes`` nodes of one device type that start the same number of processes each."""

    device_type: str
    nodes: int
    processes_per_node: int
    first_node: int
    """Rank of the group's first node; its other nodes follow."""
    first_rank: int
    """Rank of the group's first process; its other processes follow, node by node."""

    @property
    def processes(self) -> int:
        """Number of processes of the group."""
        return self.nodes * self.processes_per_node

    @property
    def node_ranks(self) -> range:
        """The nodes' ranks."""
        return range(self.first_node, self.first_node + self.nodes)

    @property
    def text(self) -> str:
        """The group as a phrase for comments: "nodes 0 to 1: A100, 8 process(es) per node, ranks 0 to 15"."""
        ranks = _span(range(self.first_rank, self.first_rank + self.processes), "rank")
        nodes = _span(self.node_ranks, "node")
        return f"{nodes}: {one_word(self.device_type)}, {self.processes_per_node} process(es) per node, {ranks}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLayout:
    """The groups of nodes in the order of ranks: process r runs rank r of the plan."""

    groups: tuple[EqualNodes, ...]
    assumed: bool
    """Whether the number of devices per node is a guess, as neither the plan nor the user gives it."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(group.nodes for group in self.groups)

    @property
    def processes(self) -> int:
        """Number of processes."""
        return sum(group.processes for group in self.groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Settings of a launcher that are not part of a plan."""

    script: Sequence[str]
    """The training script with its arguments."""
    resource: str | None = None
    """Name of the devices' resource: Kubernetes' extended resource, Slurm's GRES; None: none is requested."""
    queue: str | None = None
    """Kueue's LocalQueue, Slurm's partition."""
    image: str | None = None
    node_label: str = "ddltool/device-type"
    """The Kubernetes label of nodes whose value is the device type."""
    label_values: Mapping[str, str] = field(default_factory=dict)
    """The label's value by device type; for absent types the type itself."""
    kind: Kind | None = None
    """None: TrainJob if all nodes are equal, else JobSet."""


def plan_hash(plan: Plan) -> str:
    """Return the SHA-256, in hexadecimal, of the plan's canonical JSON: all fields, sorted keys, no blanks, UTF-8.

    It does not depend on the format of the plan's file, or on whether fields with default values are written there.
    """
    text = json.dumps(
        plan.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def cluster_name(text: str) -> str:
    """Return ``text`` as a name for Kubernetes objects: a label of RFC 1123 that begins with a letter (RFC 1035).

    A text that is such a name is returned unchanged; any other is changed into one and gets eight digits of its SHA-256,
    so that different texts keep different names.
    """
    if len(text) <= NAME_LENGTH and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    mapped = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not mapped[:1].isalpha():
        mapped = f"job-{mapped}".rstrip("-")
    # 9: the hyphen and the eight digits.
    return f"{mapped[: NAME_LENGTH - 9].rstrip('-')}-{digest}"


def node_value(device_type: str, settings: LaunchSettings) -> str:
    """Return the value of the node label for a device type: the user's, else :func:`label_value` of the type."""
    return settings.label_values.get(device_type) or label_value(device_type)


def label_value(text: str) -> str:
    """Return ``text`` as the value of a Kubernetes label: at most 63 of ``A-Za-z0-9-_.``, alphanumeric at the ends."""
    mapped = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_LABEL_LENGTH].strip("-_.")
    return mapped or cluster_name(text)


def one_word(text: str) -> str:
    """Return ``text`` for a comment line: shortened, and quoted as in JSON unless all of it is letters, digits, ``_.+/:-``."""
    text = shortened(text, _LONGEST_COMMENT)
    return text if re.fullmatch(r"[\w.+/:-]+", text, re.ASCII) else json.dumps(text)


def layout(plan: Plan, devices_per_node: Mapping[str, int] | int | None = None) -> ProcessLayout:
    """Return the processes on each node, one for each single device: full nodes of each device type, then one for the rest.

    The parameter server of an elastic-bsp plan is one more process on the last node.

    ``devices_per_node``: number of single devices of a node, for all types or by type. None: the plan's own number, else
    its processes spread evenly over its number of nodes, else all devices of a type on one node (``assumed``). Raises
    InputError for a type that the plan does not use, a number below one, and a node that would split a tensor group.
    """
    devices_per_rank = plan.processes // plan.world_size  # more than one if ranks are groups
    # (device type, number of single devices) of successive assignments of one type, in the order of ranks.
    device_runs = [
        (name, devices_per_rank * sum(row.devices for row in rows))
        for name, rows in groupby(plan.assignments, key=lambda row: row.device_type)
    ]
    devices_by_type = _per_node(plan, [name for name, _ in device_runs], devices_per_node)
    for name, count in devices_by_type.items():
        if plan.group is not None and count % plan.group.tensor:
            problem = f"a node of {count} {name} holds no whole number of tensor groups of {plan.group.tensor}"
            raise InputError("--devices-per-node", problem, f"give a multiple of {plan.group.tensor}")
    groups: list[EqualNodes] = []
    next_node = 0
    next_rank = 0
    for name, devices in device_runs:
        per_node = min(devices_by_type.get(name, devices), devices)
        # As many full nodes as there are, then one with the rest.
        for nodes, processes in ((devices // per_node, per_node), (1, devices % per_node)):
            if not processes:
                continue
            groups.append(
                EqualNodes(
                    device_type=name,
                    nodes=nodes,
                    processes_per_node=processes,
                    first_node=next_node,
                    first_rank=next_rank,
                )
            )
            next_node += nodes
            next_rank += nodes * processes
    if plan.strategy == "elastic-bsp":
        groups = [*groups[:-1], *_with_server(groups[-1])]
    return ProcessLayout(groups=tuple(groups), assumed=any(name not in devices_by_type for name, _ in device_runs))


def _with_server(group: EqualNodes) -> list[EqualNodes]:
    """Return ``group`` with one more process, a parameter server, on its last node, which is then a group of its own."""
    if group.nodes == 1:
        return [replace(group, processes_per_node=group.processes_per_node + 1)]
    before = replace(group, nodes=group.nodes - 1)
    last_node = replace(
        group,
        nodes=1,
        first_node=group.first_node + before.nodes,
        first_rank=group.first_rank + before.processes,
        processes_per_node=group.processes_per_node + 1,
    )
    return [before, last_node]


def _per_node(plan: Plan, types: list[str], devices_per_node: Mapping[str, int] | int | None) -> dict[str, int]:
    """Return the number of single devices of a node by device type; a type for which it is not known is absent.

    The user's ``devices_per_node`` counts, else the plan's numbers, else its processes spread over its nodes. Raises
    InputError if the user names a type that is not in ``types``, or a number below one.
    """
    if devices_per_node is None:
        if plan.run is not None and plan.run.gpus_per_node is not None:
            return {name: count for name, count in plan.run.gpus_per_node.items() if name in types}
        if plan.devices_per_node is not None:
            devices_per_rank = plan.processes // plan.world_size
            return {name: count * devices_per_rank for name, count in plan.devices_per_node.items() if name in types}
        part_with_nodes = plan.goodput or plan.network  # the parts of a plan that may have a number of nodes
        node_count = part_with_nodes.num_nodes if part_with_nodes else None
        if not node_count or len(set(types)) != 1:
            return {}
        return {types[0]: math.ceil(plan.processes / node_count)}
    counts = dict.fromkeys(types, devices_per_node) if isinstance(devices_per_node, int) else dict(devices_per_node)
    for name, count in counts.items():
        if name not in types:
            raise InputError("--devices-per-node", f"no device {name!r} in the plan", did_you_mean(name, set(types)))
        if count < 1:
            raise InputError("--devices-per-node", f"is {count}", "a node has at least one")
    return counts


def _span(numbers: range, noun: str) -> str:
    """Return "rank 3" for one number, "ranks 0 to 3" for several; ``noun``: "rank"."""
    return f"{noun} {numbers[0]}" if len(numbers) == 1 else f"{noun}s {numbers[0]} to {numbers[-1]}"
