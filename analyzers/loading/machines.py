"""Nodes and their devices as nvidia-smi, Slurm and Kubernetes list them.

Start at :func:`read_nodes`; :func:`first_files` makes a job.yaml and a cluster.yaml of what was found.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, ParseError, fromstring

import yaml

from ddltool.analyzers.loading.sources import is_graph_file
from ddltool.artifacts import parse, read_bytes
from ddltool.errors import InputError, shortened
from ddltool.fixtures.loading import devices
from ddltool.job import Cluster, Job, is_code
from ddltool.units import show_bytes

_LONGEST, _MOST_NODES, _MOST_DEVICES, _MOST_ELEMENTS = 1 << 26, 10_000, 1024, 2_000_000
_STAND_IN = "zoo:resnet50_v1"
"""What job.yaml names where no model is given, so that there is something to plan."""
_BATCH, _SAME_MEMORY = 8, 0.1
_COMMANDS = "nvidia-smi -q -x, scontrol show node or kubectl get nodes -o json"
# States of Slurm in which a node runs no new job until somebody does something about it.
_AWAY = ("DOWN", "DRAIN", "FAIL", "MAINT", "NOT_RESPONDING", "UNKNOWN", "ERROR", "FUTURE", "INVAL", "POWERED_DOWN")
_PRODUCT_LABELS = (
    *("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator"),
    *("k8s.amazonaws.com/accelerator", "karpenter.k8s.aws/instance-gpu-name"),
)
_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Equal devices of one machine."""

    name: str
    device: str
    """As ddltool calls it where it knows it, else as the machine does."""
    count: int
    memory_gib: float | None = None
    """Of one device, as the machine says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """What a list of machines holds for a training job."""

    nodes: tuple[Node, ...]
    remarks: tuple[str, ...] = ()
    """What was left out and why, and what is not known."""
    specs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Figures of device types that the table lacks and that were measured here."""

    @property
    def counts(self) -> dict[str, int]:
        """Devices by type, in the order of the nodes."""
        found: dict[str, int] = {}
        for node in self.nodes:
            found[node.device] = found.get(node.device, 0) + node.count
        return found

    @property
    def unknown(self) -> list[str]:
        """Device types of which nothing but the name is known."""
        return [name for name in self.counts if devices().find(name) is None and name not in self.specs]


def read_nodes(paths: Sequence[Path]) -> Nodes:
    """Return the nodes of one or more lists; ``-`` is standard input. Raises InputError in one line for what is none.

    Of a Slurm or Kubernetes list only nodes that a job can be sent to are kept; the others are named in the remarks.
    """
    nodes: list[Node] = []
    remarks: list[str] = []
    for path in paths:
        where = "standard input" if str(path) == "-" else str(path)
        text = _text(path, where)
        kind = text.lstrip("\ufeff \t\r\n")[:1]
        if kind == "<":
            found = _from_nvidia_smi(text, where, "node" if str(path) == "-" else path.name.partition(".")[0])
        elif kind in ("{", "["):
            found = _from_kubectl(text, where)
        elif re.search(r"^\s*NodeName=", text, re.MULTILINE):
            found = _from_scontrol(text, where)
        else:
            raise InputError(where, "is no list of nodes that ddltool knows", f"give the output of {_COMMANDS}")
        for node in found:
            if isinstance(node, str):
                remarks.append(node)
            elif len(nodes) >= _MOST_NODES:
                raise InputError(where, f"has more than {_MOST_NODES:,} nodes", "give the nodes of one partition")
            else:
                nodes.append(named(node))
    if not nodes:
        told = f": {remarks[0]}" if remarks else ""
        raise InputError("--nodes", f"no node with a device is free for a job{told}", f"give the output of {_COMMANDS}")
    return Nodes(nodes=tuple(nodes), remarks=tuple(_merged(remarks)))


def _text(path: Path, where: str) -> str:
    try:
        data = sys.stdin.buffer.read(_LONGEST + 1) if str(path) == "-" else read_bytes(path, _LONGEST)
        if len(data) > _LONGEST:
            raise InputError(where, f"holds more than {show_bytes(_LONGEST)}", "give the nodes of one partition")
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(where, f"is not UTF-8 text (byte {error.start})", "give a text file") from None
    except InputError as error:
        raise InputError(where, error.problem, error.remedy) from None
    if not text.strip():
        raise InputError(where, "is empty", f"give the output of {_COMMANDS}")
    return text


def named(node: Node) -> Node:
    """Return a node whose device is called as in the table of devices, where it stands there."""
    known = devices().find(node.device)
    return node if known is None else replace(node, device=known.name)


def _merged(remarks: Iterable[str]) -> Iterator[str]:
    """Yield remarks; those that say the same of several nodes as one, which counts them."""
    parted = [remark.partition(": ") for remark in remarks]
    for why, group in groupby(sorted(parted, key=lambda part: part[2]), key=lambda part: part[2]):
        names = [name for name, _, _ in group]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        yield f"{shown}: {why}"


# -- nvidia-smi


def _from_nvidia_smi(text: str, where: str, stem: str) -> Iterator[Node | str]:
    """Yield the node of each document, called as the file is: outputs of several machines may follow one another."""
    documents = [part for part in re.split(r"(?=<\?xml)", text) if part.strip()]
    for place, document in enumerate(documents):
        name = stem if len(documents) == 1 else f"{stem}-{place}"
        log = _xml(document, where)
        if log.tag != "nvidia_smi_log":
            raise InputError(where, f"begins with <{shortened(log.tag, 60)}>", "give the output of nvidia-smi -q -x")
        gpus: list[tuple[str, float | None]] = []
        for gpu in log.iterfind("gpu"):
            product = (gpu.findtext("product_name") or "").strip()
            if not product:
                raise InputError(
                    where, "has a <gpu> without <product_name>", "give the whole output of nvidia-smi -q -x"
                )
            if (gpu.findtext("mig_mode/current_mig") or "").strip() == "Enabled":
                yield f"{name}: a {product} in MIG mode is left out: its slices are no device of the table"
                continue
            gpus.append((product, _gib(gpu.findtext("fb_memory_usage/total"))))
        for (product, memory), same in groupby(sorted(gpus, key=str)):
            yield Node(name=name, device=product, count=len(list(same)), memory_gib=memory)
        if not gpus:
            yield f"{name}: no GPU, left out"
        elif len({product for product, _ in gpus}) > 1:
            yield f"{name}: holds several device types, each of which is written as a node of its own"


def _xml(text: str, where: str) -> Element:
    """Return the root of an XML document that declares no entities. Raises InputError for any other, and for a long one."""
    if "<!ENTITY" in text:
        raise InputError(where, "declares XML entities, which are not read", "give the output of nvidia-smi -q -x")
    if text.count("<") > 2 * _MOST_ELEMENTS:
        raise InputError(where, "has too many elements", "give the output of nvidia-smi -q -x")
    try:
        return fromstring(text)
    except ParseError as error:
        place = f"{where}:line {error.position[0]}"
        raise InputError(place, f"is not whole XML ({error})", "make the file again") from None


def _gib(text: str | None) -> float | None:
    """Return ``81559 MiB`` in GiB."""
    match = re.fullmatch(r"\s*([0-9]{1,9}) MiB\s*", text or "")
    return round(int(match[1]) / 1024, 1) if match else None


# -- Slurm


def _from_scontrol(text: str, where: str) -> Iterator[Node | str]:
    for record in re.split(r"^[ \t]*(?=NodeName=)", text, flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"(?:^|\s)([A-Za-z]\w*)=(\S*)", record))
        name = fields["NodeName"]
        if not name:
            raise InputError(f"{where}:NodeName", "is empty", "give the whole output of scontrol show node")
        state = fields.get("State", "")
        away = [word for word in _AWAY if word in state.upper()]
        if away or "*" in state:
            yield f"{name}: is {state}, left out"
            continue
        kinds = [part for part in re.sub(r"\([^)]*\)", "", fields.get("Gres", "")).split(",") if part.startswith("gpu")]
        if not kinds:
            yield f"{name}: has no gpu in Gres, left out"
        for kind in kinds:
            match = re.fullmatch(r"gpu(?::(?P<type>[^:=]+))?(?::(?P<count>[0-9]{1,6}))?", kind)
            if match is None:
                raise InputError(f"{where}:{name}.Gres", f"has {shortened(kind, 60)!r}", "gpu:TYPE:COUNT is expected")
            device: str | None = match["type"]
            count = int(match["count"] or 1)
            if device and device.isdigit() and match["count"] is None:
                count, device = int(device), None
            if device and re.search(r"[0-9]g\.[0-9]+gb", device):
                yield f"{name}: {device} is a slice of a GPU (MIG) and left out"
            elif count:
                features = re.split(r"[,&|]", fields.get("ActiveFeatures", ""))
                told = device or next((word for word in features if word and devices().find(word)), None)
                if told is None:
                    yield f"{name}: Gres does not say which GPU it has; write its type in place of gpu"
                yield Node(name=name, device=told or "gpu", count=_count(count, where, name))
        if len(kinds) > 1:
            yield f"{name}: holds several device types, each of which is written as a node of its own"


# -- Kubernetes


def _from_kubectl(text: str, where: str) -> Iterator[Node | str]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"is not valid JSON ({shortened(str(error), 100)})"
        raise InputError(where, problem, "the file may be cut off; make it again") from None
    items = document.get("items", [document]) if isinstance(document, dict) else document
    if not isinstance(items, list) or not all(
        isinstance(it, dict) and it.get("kind", "Node") == "Node" for it in items
    ):
        raise InputError(f"{where}:items", "is no list of nodes", "give the output of kubectl get nodes -o json")
    for place, item in enumerate(items):
        at = f"{where}:items[{place}]"
        metadata, spec, status = (_mapping(item, name, at) for name in ("metadata", "spec", "status"))
        name = metadata.get("name")
        if not isinstance(name, str) or not name:
            raise InputError(f"{at}.metadata.name", "is missing", "give the output of kubectl get nodes -o json")
        if (reason := _unschedulable(spec, status, at)) is not None:
            yield f"{name}: {reason}, left out"
            continue
        labels = {key: str(value) for key, value in _mapping(metadata, "labels", f"{at}.metadata").items()}
        room = _mapping(status, "allocatable", f"{at}.status") or _mapping(status, "capacity", f"{at}.status")
        if any(str(key).startswith("nvidia.com/mig-") and str(n) != "0" for key, n in room.items()):
            yield f"{name}: has slices of GPUs (MIG), which are left out"
        resource = next((key for key in _RESOURCES if str(room.get(key, "0")) != "0"), None)
        if resource is None:
            yield f"{name}: has no GPU that a pod could ask for, left out"
            continue
        text_count = str(room[resource])
        if not re.fullmatch(r"[0-9]{1,6}", text_count):
            problem = f"is {shortened(text_count, 40)!r}"
            raise InputError(f"{at}.status.allocatable.{resource}", problem, "a whole number is expected")
        product = next((labels[key] for key in _PRODUCT_LABELS if labels.get(key)), None)
        if product is not None and product.endswith("-SHARED"):
            yield f"{name}: {product} is one GPU for several pods, left out"
            continue
        if product is None:
            yield f"{name}: no label says which GPU it has; write its type in place of gpu"
        memory = labels.get("nvidia.com/gpu.memory", "")
        count = _count(int(text_count), where, name)
        yield Node(name=name, device=product or "gpu", count=count, memory_gib=_gib(f"{memory} MiB"))


def _mapping(item: Mapping[str, Any], name: str, at: str) -> Mapping[str, Any]:
    value = item.get(name) or {}
    if not isinstance(value, dict):
        raise InputError(f"{at}.{name}", "is no mapping", "give the output of kubectl get nodes -o json")
    return value


def _unschedulable(spec: Mapping[str, Any], status: Mapping[str, Any], at: str) -> str | None:
    """Return why a job's pods do not get onto a node, or None. They tolerate the taint of the GPU that they ask for."""
    if spec.get("unschedulable") is True:
        return "is unschedulable (cordoned)"
    taints, conditions = spec.get("taints") or [], status.get("conditions") or []
    for rows, field_name in ((taints, "spec.taints"), (conditions, "status.conditions")):
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(
                f"{at}.{field_name}", "is no list of mappings", "give the output of kubectl get nodes -o json"
            )
    for taint in taints:
        if taint.get("effect") in ("NoSchedule", "NoExecute") and taint.get("key") not in _RESOURCES:
            return f"has the taint {shortened(str(taint.get('key')), 60)}:{taint['effect']}"
    if any(row.get("type") == "Ready" and row.get("status") != "True" for row in conditions):
        return "is not ready"
    return None


def _count(count: int, where: str, name: str) -> int:
    if count > _MOST_DEVICES:
        raise InputError(where, f"{name} has {count} devices", f"a node has at most {_MOST_DEVICES}")
    return count


# -- job.yaml and cluster.yaml


def first_files(found: Nodes, model: str | None, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the texts of ``cluster.yaml`` and ``job.yaml`` for what was found, and what people should know of them.

    ``model``: the job's SOURCE. Raises InputError for what no job can say, such as a name that is no text.
    """
    remarks, counts = list(found.remarks), found.counts
    source = _STAND_IN if model is None else model
    if model is None:
        remarks.append(f"no --model is given: job.yaml names {_STAND_IN} in its place")
    elif is_graph_file(model):
        source = os.path.relpath(model, folder)
    fill = "is no device that ddltool knows: fill in its memory and speed in job.yaml, where a comment shows how"
    remarks += [f"{name} {fill}" for name in found.unknown]
    if len(found.nodes) > 1:
        remarks.append("how the nodes are joined is not known: add nic: 200Gbit, or what they have, in cluster.yaml")
    texts = {
        "cluster.yaml": "\n".join(_cluster_lines(found)) + "\n",
        "job.yaml": "\n".join(_job_lines(found, source, sum(counts.values()))) + "\n",
    }
    for name, shape in (("cluster.yaml", Cluster), ("job.yaml", Job)):
        parse(yaml.safe_load(texts[name]), shape, name)  # what is written can be read
    return texts, remarks


def _cluster_lines(found: Nodes) -> Iterator[str]:
    yield "kind: ddltool.cluster"
    yield "nodes:"
    for (device, count), same in groupby(found.nodes, key=lambda node: (node.device, node.count)):
        nodes = list(same)
        name = nodes[0].name if len(nodes) == 1 else f"{nodes[0].name} to {nodes[-1].name}"
        known = devices().find(device)
        told = f"  # {known.title or known.name}, {known.memory_gib:g} GiB each" if known else ""
        yield f"  - {{name: {_scalar(name)}, count: {len(nodes)}, devices: {{type: {_scalar(device)}, count: {count}}}}}{told}"
    if len(found.nodes) > 1:
        yield "# Beside count: nic: 200Gbit (cards of a node for RDMA, by datasheet) or nic_gbit: 25 (as measured),"
        yield "# and link: nvlink3, pcie4, ... inside the node where it is not the device's own."


def _job_lines(found: Nodes, source: str, total: int) -> Iterator[str]:
    yield "kind: ddltool.job"
    yield f"name: {_scalar(re.sub(r'[^A-Za-z0-9_.-]+', '-', source.rpartition(':')[2]).strip('-') or 'job')}"
    code = "  # your code: ddltool plan asks for --allow-code" if is_code(source) else ""
    yield f"model: {_scalar(source)}{code}"
    yield f"max_workers: {total}  # times batch_size: samples of a step on all devices together"
    yield f"batch_size: {_BATCH}"
    yield "precision: fp32  # or tf32, amp, bf16"
    yield "optimizer: adam"
    yield "cluster: cluster.yaml"
    yield "devices:"
    memory = {node.device: node.memory_gib for node in found.nodes}
    lines = [(name, _offer(name, memory[name], found.specs.get(name))) for name in found.counts]
    held = [line for name, line in lines if name not in found.unknown]
    yield from (f"  - {line}" for line in held)
    for name, line in lines:
        if name in found.unknown:
            yield f"  # {_scalar(name)} is not known: give its datasheet's figures, or measure it (capability_per_s, profile)"
            yield f"  {'# ' if held else ''}- {line}"


def _offer(name: str, memory_gib: float | None, spec: Mapping[str, Any] | None) -> str:
    """Return the line of a device type: what the table knows of it stands nowhere else."""
    known = devices().find(name)
    if spec is not None:
        return f"{{type: {_scalar(name)}, spec: {json.dumps(spec)}}}"
    if known is None:
        shown = f"{memory_gib:g}" if memory_gib else "24"
        rates = "memory_bytes_per_s: 9.0e+11, peak_flops: {float32: 3.0e+13}"
        return f"{{type: {_scalar(name)}}}  # spec: {{like: A100, memory_gib: {shown}, {rates}}}"
    as_known = memory_gib is None or abs(memory_gib / known.memory_gib - 1) <= _SAME_MEMORY
    own = "" if as_known else f", memory_gib: {memory_gib:g}"
    return f"{{type: {_scalar(name)}{own}}}"


def _scalar(text: str) -> str:
    """Return a text as YAML within a flow mapping."""
    plain = re.fullmatch(r"[A-Za-z][\w.+-]*(?::[\w.+-]+)?", text, re.ASCII) and yaml.safe_load(text) == text
    return text if plain else json.dumps(text, ensure_ascii=True)
