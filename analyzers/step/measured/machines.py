"""Nodes and their devices as nvidia-smi, Slurm and Kubernetes list them.

Start at :func:`read_nodes`; :func:`first_files` makes a job.yaml and a cluster.yaml from the nodes.
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

from ddltool.analyzers.step.tracing.sources import is_graph_file
from ddltool.artifacts import parse, read_bytes
from ddltool.errors import InputError, shortened
from ddltool.job import Cluster, Job, is_code
from ddltool.plain_values import from_json, from_yaml
from ddltool.shipped import devices
from ddltool.units import show_bytes

# Limits on what is read, so that a wrong file is refused before it fills the memory.
_MAX_BYTES = 1 << 26  # of a list
_MAX_NODES = 10_000  # of all lists
_MAX_DEVICES = 1024  # of a node
_MAX_ELEMENTS = 2_000_000  # of an XML document
_STAND_IN = "zoo:resnet50_v1"
"""The model in job.yaml where the user gives none, so that the job can be planned."""
# The batch size that a new job.yaml begins with.
_BATCH_SIZE = 8
# A reported memory within this share of the table's counts as the table's, because drivers reserve a part of it.
_MEMORY_TOLERANCE = 0.1
# The memory in the commented example of a device's figures, where the machine does not report its own.
_EXAMPLE_GIB = "24"
# Names that a remark on several nodes shows; the others are counted.
_NAMES_SHOWN = 3
_COMMANDS = "nvidia-smi -q -x, scontrol show node or kubectl get nodes -o json"
_NVIDIA_SMI, _KUBECTL = "give the output of nvidia-smi -q -x", "give the output of kubectl get nodes -o json"
"""Remedies for a list that is not what these commands print."""
# States of Slurm in which a node runs no new job until an administrator acts.
_UNAVAILABLE = (
    "DOWN", "DRAIN", "FAIL", "MAINT", "NOT_RESPONDING", "UNKNOWN", "ERROR", "FUTURE", "INVAL", "POWERED_DOWN",
)  # fmt: skip
# Labels of Kubernetes nodes that name their GPU, and resources by which pods ask for GPUs.
_PRODUCT_LABELS = (
    "nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator", "karpenter.k8s.aws/instance-gpu-name",
)  # fmt: skip
_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Equal devices of one machine."""

    name: str
    device: str
    """Device type by the name in ddltool's table, else by the machine's name."""
    count: int
    memory_gib: float | None = None
    """Memory of one device as the machine reports it, None where it does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The nodes that a training job can use."""

    nodes: tuple[Node, ...]
    remarks: tuple[str, ...] = ()
    """Sentences on nodes that are left out, with the reason, and on unknown facts."""
    specs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Measured figures of device types that the table lacks."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of devices by type, in the order of the nodes."""
        count_of: dict[str, int] = {}
        for node in self.nodes:
            count_of[node.device] = count_of.get(node.device, 0) + node.count
        return count_of

    @property
    def unknown(self) -> list[str]:
        """Device types that are in neither ddltool's table nor ``specs``."""
        return [name for name in self.counts if devices().find(name) is None and name not in self.specs]


def read_nodes(paths: Sequence[Path]) -> Nodes:
    """Return the nodes of one or more lists; ``-`` is standard input.

    The format of a list is known by how it begins: XML is nvidia-smi's, JSON kubectl's, and ``NodeName=`` scontrol's. Of a
    Slurm or Kubernetes list, nodes that can run no job are left out and named in the remarks. Raises InputError (one
    line) for text in no known format, and for lists without a usable node.
    """
    nodes: list[Node] = []
    remarks: list[str] = []
    for path in paths:
        where = "standard input" if str(path) == "-" else str(path)
        text = _read_text_list(path, where)
        stem = "node" if str(path) == "-" else path.name.partition(".")[0]
        for item in _nodes_and_remarks(text, where, stem):
            if isinstance(item, str):
                remarks.append(item)
            elif len(nodes) >= _MAX_NODES:
                raise InputError(where, f"has more than {_MAX_NODES:,} nodes", "give the nodes of one partition")
            else:
                nodes.append(named(item))
    if not nodes:
        reason = f": {remarks[0]}" if remarks else ""
        problem = f"no node with a device is free for a job{reason}"
        raise InputError("--nodes", problem, f"give the output of {_COMMANDS}")
    return Nodes(nodes=tuple(nodes), remarks=tuple(_merge_remarks(remarks)))


def _nodes_and_remarks(text: str, where: str, stem: str) -> Iterator[Node | str]:
    """Return an iterator over the nodes of a list in any known format, and over remarks on what is left out of it.

    ``where`` names the list in errors; ``stem`` is the name of a node whose list holds none. Raises InputError for another
    format.
    """
    first_character = text.lstrip("\ufeff \t\r\n")[:1]
    if first_character == "<":
        return _from_nvidia_smi(text, where, stem)
    if first_character in ("{", "["):
        return _from_kubectl(text, where)
    if re.search(r"^\s*NodeName=", text, re.MULTILINE):
        return _from_scontrol(text, where)
    raise InputError(where, "is no list of nodes that ddltool knows", f"give the output of {_COMMANDS}")


def _read_text_list(path: Path, where: str) -> str:
    """Return the text of the list of nodes at ``path``, ``-``: standard input; ``where`` names it in errors.

    Raises InputError for a file that is too long, not UTF-8 or empty.
    """
    try:
        data = sys.stdin.buffer.read(_MAX_BYTES + 1) if str(path) == "-" else read_bytes(path, _MAX_BYTES)
        if len(data) > _MAX_BYTES:
            raise InputError(where, f"holds more than {show_bytes(_MAX_BYTES)}", "give the nodes of one partition")
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(where, f"is not UTF-8 text (byte {error.start})", "give a text file") from None
    except InputError as error:
        raise InputError(where, error.problem, error.remedy) from None
    if not text.strip():
        raise InputError(where, "is empty", f"give the output of {_COMMANDS}")
    return text


def named(node: Node) -> Node:
    """Return a node with its device called as in ddltool's table; return it unchanged if the table lacks the device."""
    spec = devices().find(node.device)
    return node if spec is None else replace(node, device=spec.name)


def _merge_remarks(remarks: Iterable[str]) -> Iterator[str]:
    """Yield one remark per reason from remarks of the form ``NAME: REASON``, with the first three names and a count.

    >>> list(_merge_remarks(["a: is DOWN, left out", "b: is DOWN, left out"]))
    ['a, b: is DOWN, left out']
    """
    names_by_reason: dict[str, list[str]] = {}
    for remark in remarks:
        name, _, reason = remark.partition(": ")
        names_by_reason.setdefault(reason, []).append(name)
    for reason in sorted(names_by_reason):
        names = names_by_reason[reason]
        shown = ", ".join(names[:_NAMES_SHOWN])
        more_count = len(names) - _NAMES_SHOWN
        if more_count > 0:
            shown += f" and {more_count} more"
        yield f"{shown}: {reason}"


# -- nvidia-smi


def _from_nvidia_smi(text: str, where: str, stem: str) -> Iterator[Node | str]:
    """Yield the node of each document of ``nvidia-smi -q -x``, or a remark; a file may hold those of several machines.

    ``stem``, the file's name, is the node's name: with an index behind it where the file holds several documents. A machine
    with several types of GPU becomes a node for each type. ``where``: the list, for errors. Raises InputError for another
    document, and for a GPU without a name.
    """
    documents = [part for part in re.split(r"(?=<\?xml)", text) if part.strip()]
    for index, document in enumerate(documents):
        name = stem if len(documents) == 1 else f"{stem}-{index}"
        log = _parse_xml(document, where)
        if log.tag != "nvidia_smi_log":
            raise InputError(where, f"begins with <{shortened(log.tag, 60)}>", _NVIDIA_SMI)
        gpus: list[tuple[str, float | None]] = []  # the name and the GiB of memory of each GPU
        for gpu in log.iterfind("gpu"):
            product = (gpu.findtext("product_name") or "").strip()
            if not product:
                remedy = "give the whole output of nvidia-smi -q -x"
                raise InputError(where, "has a <gpu> without <product_name>", remedy)
            if (gpu.findtext("mig_mode/current_mig") or "").strip() == "Enabled":
                yield f"{name}: a {product} in MIG mode is left out: its slices are no device of the table"
                continue
            gpus.append((product, _mib_to_gib(gpu.findtext("fb_memory_usage/total"))))
        for (product, memory), equal_gpus in groupby(sorted(gpus, key=str)):
            yield Node(name=name, device=product, count=len(list(equal_gpus)), memory_gib=memory)
        if not gpus:
            yield f"{name}: no GPU, left out"
        elif len({product for product, _ in gpus}) > 1:
            yield f"{name}: holds several device types, each of which is written as a node of its own"


def _parse_xml(text: str, where: str) -> Element:
    """Return the root of an XML document. Raises InputError for entities, too many elements and malformed XML.

    Both are checked before the text is parsed, because a short text with entities may unfold into one that fills the memory.
    """
    if "<!ENTITY" in text:
        raise InputError(where, "declares XML entities, which are not read", _NVIDIA_SMI)
    if text.count("<") > 2 * _MAX_ELEMENTS:  # each has a tag that opens it and one that closes it
        raise InputError(where, "has too many elements", _NVIDIA_SMI)
    try:
        return fromstring(text)
    except ParseError as error:
        location = f"{where}:line {error.position[0]}"
        raise InputError(location, f"is not whole XML ({error})", "make the file again") from None


def _mib_to_gib(text: str | None) -> float | None:
    """Return the GiB of a text such as ``81559 MiB``, None for a text of another form."""
    match = re.fullmatch(r"\s*([0-9]{1,9}) MiB\s*", text or "")
    return round(int(match[1]) / 1024, 1) if match else None


# -- Slurm


def _from_scontrol(text: str, where: str) -> Iterator[Node | str]:
    """Yield a node for each device type of each record of ``scontrol show node``, or a remark on what is left out.

    A record is ``KEY=VALUE`` fields from one ``NodeName=`` to the next. ``Gres`` has the node's GPUs, and ``ActiveFeatures``
    words that the site has given to it. Raises InputError for a record without a name.
    """
    for record in re.split(r"^[ \t]*(?=NodeName=)", text, flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"(?:^|\s)([A-Za-z]\w*)=(\S*)", record))
        name = fields["NodeName"]
        if not name:
            raise InputError(f"{where}:NodeName", "is empty", "give the whole output of scontrol show node")
        state = fields.get("State", "")
        if "*" in state or any(word in state.upper() for word in _UNAVAILABLE):  # "*": it does not respond
            yield f"{name}: is {state}, left out"
            continue
        gres_without_sockets = re.sub(r"\([^)]*\)", "", fields.get("Gres", ""))  # such as "(S:0-1)"
        resources = gres_without_sockets.split(",")
        gpu_entries = [resource for resource in resources if resource.startswith("gpu")]
        if not gpu_entries:
            yield f"{name}: has no gpu in Gres, left out"
            continue
        # A site may name the type of GPU among the features where Gres has only gpu:COUNT.
        features = re.split(r"[,&|]", fields.get("ActiveFeatures", ""))
        known_feature = next((word for word in features if word and devices().find(word)), None)
        for gpu_entry in gpu_entries:
            device, count = _gres(gpu_entry, f"{where}:{name}.Gres")
            if device and re.search(r"[0-9]g\.[0-9]+gb", device):  # such as 1g.5gb
                yield f"{name}: {device} is a slice of a GPU (MIG) and left out"
                continue
            if not count:
                continue
            gpu_type = device or known_feature
            if gpu_type is None:
                yield f"{name}: Gres does not say which GPU it has; write its type in place of gpu"
            yield Node(name=name, device=gpu_type or "gpu", count=_checked_count(count, where, name))
        if len(gpu_entries) > 1:
            yield f"{name}: holds several device types, each of which is written as a node of its own"


def _gres(entry: str, where: str) -> tuple[str | None, int]:
    """Return (type, count) of Slurm's ``gpu``, ``gpu:COUNT``, ``gpu:TYPE`` or ``gpu:TYPE:COUNT``; type None: not given.

    Raises InputError for an entry of another form.

    >>> _gres("gpu:a100:8", "nodes.txt"), _gres("gpu:4", "nodes.txt")
    (('a100', 8), (None, 4))
    """
    match = re.fullmatch(r"gpu(?::(?P<type>[^:=]+))?(?::(?P<count>[0-9]{1,6}))?", entry)
    if match is None:
        raise InputError(where, f"has {shortened(entry, 60)!r}", "gpu:TYPE:COUNT is expected")
    device: str | None = match["type"]
    if device and device.isdigit() and match["count"] is None:  # gpu:COUNT, whose number the pattern takes for a type
        return None, int(device)
    return device, int(match["count"] or 1)


# -- Kubernetes


def _from_kubectl(text: str, where: str) -> Iterator[Node | str]:
    """Yield a node for each item of ``kubectl get nodes -o json``, or a remark on what is left out.

    Nodes on which a job's pods cannot run are left out, and so are slices of GPUs (MIG) and GPUs that several pods share.
    Raises InputError for another document.
    """
    document = from_json(text, where)
    items = document.get("items", [document]) if isinstance(document, dict) else document
    if not isinstance(items, list) or not all(
        isinstance(item, dict) and item.get("kind", "Node") == "Node" for item in items
    ):
        raise InputError(f"{where}:items", "is no list of nodes", _KUBECTL)
    for index, item in enumerate(items):
        yield from _from_kubernetes_node(item, where, f"{where}:items[{index}]")


def _from_kubernetes_node(item: Mapping[str, Any], where: str, location: str) -> Iterator[Node | str]:
    """Yield the node of one item of ``kubectl get nodes -o json``, and remarks on it; a remark alone if it is left out.

    ``where``, ``location``: the list and the item in it, for errors.
    """
    metadata, spec, status = (_mapping_field(item, name, location) for name in ("metadata", "spec", "status"))
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"{location}.metadata.name", "is missing", _KUBECTL)
    reason = _unschedulable_reason(spec, status, location)
    if reason is not None:
        yield f"{name}: {reason}, left out"
        return
    labels = {key: str(value) for key, value in _mapping_field(metadata, "labels", f"{location}.metadata").items()}
    # What pods may use of the machine's resources, by name; all that it has where the list does not say this.
    allocatable = _mapping_field(status, "allocatable", f"{location}.status")
    resources = allocatable or _mapping_field(status, "capacity", f"{location}.status")
    if any(str(key).startswith("nvidia.com/mig-") and str(size) != "0" for key, size in resources.items()):
        yield f"{name}: has slices of GPUs (MIG), which are left out"
    gpu_resource = next((key for key in _RESOURCES if str(resources.get(key, "0")) != "0"), None)
    if gpu_resource is None:
        yield f"{name}: has no GPU that a pod could ask for, left out"
        return
    text_count = str(resources[gpu_resource])
    if not re.fullmatch(r"[0-9]{1,6}", text_count):
        problem = f"is {shortened(text_count, 40)!r}"
        raise InputError(f"{location}.status.allocatable.{gpu_resource}", problem, "a whole number is expected")
    product = next((labels[key] for key in _PRODUCT_LABELS if labels.get(key)), None)
    if product is not None and product.endswith("-SHARED"):  # the device plugin's mark of time slices
        yield f"{name}: {product} is one GPU for several pods, left out"
        return
    if product is None:
        yield f"{name}: no label says which GPU it has; write its type in place of gpu"
    memory_mib = labels.get("nvidia.com/gpu.memory", "")
    count = _checked_count(int(text_count), where, name)
    yield Node(name=name, device=product or "gpu", count=count, memory_gib=_mib_to_gib(f"{memory_mib} MiB"))


def _mapping_field(item: Mapping[str, Any], name: str, location: str) -> Mapping[str, Any]:
    """Return the mapping in an item's field ``name``, {} if it is missing or null.

    ``location``: the item's, for messages. Raises InputError for a field of another type.
    """
    value = item.get(name) or {}
    if not isinstance(value, dict):
        raise InputError(f"{location}.{name}", "is no mapping", _KUBECTL)
    return value


def _unschedulable_reason(spec: Mapping[str, Any], status: Mapping[str, Any], location: str) -> str | None:
    """Return the reason why a job's pods cannot run on a node, None if they can.

    ``spec``, ``status``: fields of the node's item at ``location``. Taints of GPU resources are ignored, because pods that
    ask for GPUs tolerate them. Raises InputError for taints or conditions that are no lists of mappings.
    """
    if spec.get("unschedulable") is True:
        return "is unschedulable (cordoned)"
    taints, conditions = spec.get("taints") or [], status.get("conditions") or []
    for rows, field_name in ((taints, "spec.taints"), (conditions, "status.conditions")):
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(f"{location}.{field_name}", "is no list of mappings", _KUBECTL)
    for taint in taints:
        if taint.get("effect") in ("NoSchedule", "NoExecute") and taint.get("key") not in _RESOURCES:
            return f"has the taint {shortened(str(taint.get('key')), 60)}:{taint['effect']}"
    if any(row.get("type") == "Ready" and row.get("status") != "True" for row in conditions):
        return "is not ready"
    return None


def _checked_count(count: int, where: str, name: str) -> int:
    """Return ``count``, the devices of the node ``name``, unchanged. Raises InputError above ``_MAX_DEVICES``."""
    if count > _MAX_DEVICES:
        raise InputError(where, f"{name} has {count} devices", f"a node has at most {_MAX_DEVICES}")
    return count


# -- job.yaml and cluster.yaml


def first_files(found: Nodes, model: str | None, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the texts of ``cluster.yaml`` and ``job.yaml`` by file name, and remarks for the user.

    The job trains a model on all devices of the nodes. ``model``: its SOURCE; None: a model of the zoo stands in for it.
    ``folder``: where the files will be; the path of a graph file is made relative to it. Raises InputError for nodes that
    these files cannot express, such as a name with control characters.
    """
    remarks = list(found.remarks)
    if model is None:
        source = _STAND_IN
        remarks.append(f"no --model is given: job.yaml names {_STAND_IN} in its place")
    else:
        source = os.path.relpath(model, folder) if is_graph_file(model) else model
    advice = "is no device that ddltool knows: fill in its memory and speed in job.yaml, where a comment shows how"
    remarks += [f"{name} {advice}" for name in found.unknown]
    if len(found.nodes) > 1:
        remarks.append("how the nodes are joined is not known: add nic: 200Gbit, or what they have, in cluster.yaml")
    texts = {
        "cluster.yaml": "\n".join(_cluster_lines(found)) + "\n",
        "job.yaml": "\n".join(_job_lines(found, source, sum(found.counts.values()))) + "\n",
    }
    for name, model_class in (("cluster.yaml", Cluster), ("job.yaml", Job)):
        parse(from_yaml(texts[name], name), model_class, name)  # raises for a file that could not be read again
    return texts, remarks


def _cluster_lines(found: Nodes) -> Iterator[str]:
    """Yield the lines of cluster.yaml: one entry for consecutive equal nodes, and comments on what the user may add."""
    yield "kind: ddltool.cluster"
    yield "nodes:"
    for (device, count), equal_nodes in groupby(found.nodes, key=lambda node: (node.device, node.count)):
        nodes = list(equal_nodes)
        name = nodes[0].name if len(nodes) == 1 else f"{nodes[0].name} to {nodes[-1].name}"
        spec = devices().find(device)
        comment = f"  # {spec.title or spec.name}, {spec.memory_gib:g} GiB each" if spec else ""
        fields = f"devices: {{type: {_yaml_scalar(device)}, count: {count}}}"
        yield f"  - {{name: {_yaml_scalar(name)}, count: {len(nodes)}, {fields}}}{comment}"
    if len(found.nodes) > 1:
        yield "# Beside count: nic: 200Gbit (cards of a node for RDMA, by datasheet) or nic_gbit: 25 (as measured),"
        yield "# and link: nvlink3, pcie4, ... inside the node where it is not the device's own."


def _job_lines(found: Nodes, source: str, max_workers: int) -> Iterator[str]:
    """Yield the lines of job.yaml; unknown device types are commented out if there are known ones.

    ``source``: the model. ``max_workers``: the number of devices, one for each worker.
    """
    yield "kind: ddltool.job"
    job_name = re.sub(r"[^A-Za-z0-9_.-]+", "-", source.rpartition(":")[2]).strip("-")
    yield f"name: {_yaml_scalar(job_name or 'job')}"
    code = "  # your code: ddltool plan asks for --allow-code" if is_code(source) else ""
    yield f"model: {_yaml_scalar(source)}{code}"
    yield f"max_workers: {max_workers}  # times batch_size: samples of a step on all devices together"
    yield f"batch_size: {_BATCH_SIZE}"
    yield "precision: fp32  # or tf32, amp, bf16"
    yield "optimizer: adam"
    yield "cluster: cluster.yaml"
    yield "devices:"
    memory_gib = {node.device: node.memory_gib for node in found.nodes}
    entries = {name: _device_entry(name, memory_gib[name], found.specs.get(name)) for name in found.counts}
    known_entries = [entry for name, entry in entries.items() if name not in found.unknown]
    for entry in known_entries:
        yield f"  - {entry}"
    for name in found.unknown:
        advice = "give its datasheet's figures, or measure it (capability_per_s, profile)"
        yield f"  # {_yaml_scalar(name)} is not known: {advice}"
        yield f"  {'# ' if known_entries else ''}- {entries[name]}"


def _device_entry(name: str, memory_gib: float | None, spec: Mapping[str, Any] | None) -> str:
    """Return the entry of a device type in job.yaml.

    It holds ``spec``, the type's measured figures, unless that is None; otherwise the memory that the machine reports,
    ``memory_gib`` of one device, if it is given and differs from the table's. For a type that the table lacks, a comment
    shows which figures the user has to fill in.
    """
    table_spec = devices().find(name)
    if spec is not None:
        return f"{{type: {_yaml_scalar(name)}, spec: {json.dumps(spec)}}}"
    if table_spec is None:
        shown = f"{memory_gib:g}" if memory_gib else _EXAMPLE_GIB
        rates = "memory_bytes_per_s: 9.0e+11, peak_flops: {float32: 3.0e+13}"
        return f"{{type: {_yaml_scalar(name)}}}  # spec: {{like: A100, memory_gib: {shown}, {rates}}}"
    has_table_memory = memory_gib is None or abs(memory_gib / table_spec.memory_gib - 1) <= _MEMORY_TOLERANCE
    memory_field = "" if has_table_memory else f", memory_gib: {memory_gib:g}"
    return f"{{type: {_yaml_scalar(name)}{memory_field}}}"


def _yaml_scalar(text: str) -> str:
    """Return a text as a YAML scalar that may stand in a flow mapping, quoted where YAML would read it as something else.

    >>> _yaml_scalar("zoo:resnet50_v1"), _yaml_scalar("yes"), _yaml_scalar("a, b")
    ('zoo:resnet50_v1', '"yes"', '"a, b"')
    """
    plain = re.fullmatch(r"[A-Za-z][\w.+-]*(?::[\w.+-]+)?", text, re.ASCII) and from_yaml(text, text) == text
    return text if plain else json.dumps(text, ensure_ascii=True)
