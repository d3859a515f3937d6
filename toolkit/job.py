"""Job and Cluster: the contents of job.yaml and cluster.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ddltool.artifacts import Artifact, Record, load
from ddltool.device import DEVICES_PER_NODE, name_key
from ddltool.errors import InputError
from ddltool.links import parse_link, parse_nic
from ddltool.precision import ALIASES, NAMES, PrecisionName
from ddltool.quantities import AtLeastOne, Devices, Name, NonNegative, Positive, Price, Processes, Rate

# A larger weight would overflow the solvers' sums, or make the other jobs vanish in them.
LARGEST = 1e9
Determinism = Literal["D0", "D1", "D2"]
OptimizerName = Literal[
    "none", "sgd", "momentum", "adam", "adamw", "adamw-8bit", "lion", "muon", "adafactor",
    "foreach-sgd", "foreach-momentum", "foreach-adam", "foreach-adamw",
]  # fmt: skip


LINKS = "links"
"""The value of a job's ``network`` that names no file: synchronisation over the cluster's links."""


class Linked(Record):
    """The link between the devices of a node, and the network cards of the node."""

    link: str | None = Field(
        default=None,
        description="inside a node: nvlink1 to nvlink5, pcie3 to pcie5, or a measured rate such as 240GB/s",
    )
    nic: str | None = Field(
        default=None, description="cards of a node for RDMA, by datasheet: 200Gbit in all, or 8x200Gbit"
    )
    nic_gbit: Positive | None = Field(default=None, description="network card as measured, Gbit/s, without RDMA")

    @field_validator("link", "nic")
    @classmethod
    def _check_link(cls, text: str | None, about: ValidationInfo) -> str | None:
        """Refuse a text that names no link, with the same message as the option ``--link`` or ``--nic``."""
        try:
            if text is not None:
                (parse_link if about.field_name == "link" else parse_nic)(text, "")
        except InputError as error:
            raise ValueError(f"{error.problem}; {error.remedy}") from None
        return text

    @model_validator(mode="after")
    def _check_one_card(self) -> Self:
        """Refuse a network card that is said twice, by datasheet and as measured."""
        if self.nic is not None and self.nic_gbit is not None:
            raise ValueError("has both nic and nic_gbit; give one of the two")
        return self


class DeviceOffer(Linked):
    """Devices of one type that the job may use."""

    type: Name = Field(description="name of the device type")
    count: Devices = Field(default=0, description="how many are offered; taken from the cluster when one is named")
    capability_per_s: Rate | None = Field(
        default=None, description="mini-batches per second of one EST alone on one such device"
    )
    profile: str | None = Field(default=None, description="profile.csv to take the capability from")
    goodput: str | None = Field(
        default=None, description="goodput.json of this device type, for the goodput and lb-bsp strategies"
    )
    max_local_batch_size: AtLeastOne | None = Field(
        default=None, description="most samples of a step on one such device, for the lb-bsp strategy"
    )
    saturation_batch: AtLeastOne | None = Field(
        default=None, description="samples below which a step takes no less time, for the lb-bsp strategy"
    )
    max_ests: AtLeastOne | None = Field(default=None, description="most ESTs on one such device, for the est strategy")
    memory_gib: Positive | None = None
    per_node: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="how many stand on a node, where no cluster says it"
    )
    price_per_hour: Price | None = Field(default=None, description="price of one device for an hour, in US dollars")
    spec: dict[str, Any] | None = Field(
        default=None, description="a ddltool.devices entry without its name, for a type that ddltool does not know"
    )

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        """Refuse both a capability and a profile, and a spec that has a name of its own."""
        if self.capability_per_s is not None and self.profile is not None:
            raise ValueError(f"{self.type} has both capability_per_s and profile; give one of the two")
        if self.spec is not None and "name" in self.spec:
            raise ValueError(f"the spec of {self.type} has a name; its type is its name: leave the name out")
        return self


class GoodputSection(Record):
    """The input for choosing the batch of highest goodput (Pollux, section 3)."""

    noise_scale: NonNegative | None = Field(
        default=None, description="gradient noise scale in samples; null: every sample counts the same"
    )
    initial_batch_size: AtLeastOne | None = Field(
        default=None, description="M0, the total batch that the learning rate was tuned for; max_workers x batch_size"
    )
    max_batch_size: AtLeastOne
    max_local_batch_size: AtLeastOne = Field(description="what fits into a device's memory")
    learning_rate: Positive = Field(default=1.0, description="at M0; 1: the table then shows factors")
    epoch_samples: AtLeastOne | None = None
    devices_per_node: AtLeastOne = DEVICES_PER_NODE


class Constraints(Record):
    """Limits that every plan must keep; all are optional."""

    homogeneous: bool = Field(default=False, description="use devices of one type only")
    max_devices: AtLeastOne | None = None
    max_price_per_hour: Price | None = None
    memory_per_worker_gib: Positive | None = Field(
        default=None, description="device memory that one EST needs while it runs (ESTs of a device take turns)"
    )
    memory_fixed_gib: NonNegative | None = Field(
        default=None,
        description="ESTs do not take turns with their memory: k of them need this much and k x memory_per_worker_gib",
    )
    min_throughput: Rate | None = Field(
        default=None, description="logical mini-batches per second that an est plan must reach"
    )
    hardware_agnostic: bool | None = Field(
        default=None, description="false: the model needs vendor-tuned kernels, so D2 keeps to one device type too"
    )
    determinism: Determinism | None = Field(
        default=None,
        description="D0: same bits for the same placement; D1: for any number of devices of one type; D2: of any types",
    )


Attention = Literal["eager", "sdpa", "flash"]
Offload = Literal["auto", "none", "optimizer", "activations"]
LoraRank = Annotated[int, Field(ge=1, le=4096)]


class WorkerGroup(Record):
    """A group of devices that holds one copy of the model: one logical worker, whose step is measured or given."""

    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1

    @model_validator(mode="before")
    @classmethod
    def _refuse_experts(cls, given: Any) -> Any:
        """Refuse the field ``expert`` with its reason; as an unknown field it would be taken for a misspelt one."""
        if isinstance(given, dict) and "expert" in given:
            raise ValueError("expert: the all-to-all of experts is not modelled; give tensor: and pipeline: alone")
        return given

    @property
    def size(self) -> int:
        """Number of devices of a group."""
        return self.tensor * self.pipeline

    @property
    def text(self) -> str:
        """The group in words: "8 devices (tensor 4, pipeline 2)"."""
        return f"{self.size} devices (tensor {self.tensor}, pipeline {self.pipeline})"


class Job(Artifact):
    """A training job (kind ``ddltool.job``)."""

    kind: Literal["ddltool.job"] = "ddltool.job"
    name: Name
    model: str | None = Field(
        default=None, description="SOURCE of the model: zoo:NAME, file.py:factory, graph.json, ..."
    )
    max_workers: Processes = Field(description="maxP: logical workers (ESTs)")
    batch_size: AtLeastOne = Field(default=1, description="samples per logical worker and step")
    precision: PrecisionName = Field(
        default="fp32",
        description="what predicted times are for; fp32: as torch runs it by default; bf16, fp16 (or amp): autocast over "
        "float32 parameters; bf16-pure, fp16-pure: everything in it; fp8: bf16 with linear layers in float8",
        json_schema_extra={"enum": [*NAMES, *ALIASES]},
    )
    channels_last: bool = Field(default=False, description="images in channels_last")
    optimizer: OptimizerName = "adam"
    compile: bool = Field(default=False, description="the step runs under torch.compile")
    offload: Offload = Field(
        default="auto",
        description="what the hosts' memory takes: parameters, gradients and optimizer states, or what blocks save for their "
        "backward passes; auto: either where nothing else fits, activations where that is faster, too",
    )
    sequence_length: AtLeastOne | None = Field(default=None, description="tokens of a sample; null: the source's own")
    attention: Attention | None = Field(
        default=None, description="of a transformers: or timm: model; flash: sdpa in 16 bit; null: the library's choice"
    )
    lora: LoraRank | None = Field(
        default=None, description="rank of the adapters that are trained while all else is frozen; null: all is trained"
    )
    load_in_4bit: bool = Field(default=False, description="of LoRA: the frozen linear layers have weights of 4 bits")
    devices: list[DeviceOffer] = Field(default_factory=list, max_length=1000)
    cluster: str | None = Field(default=None, description="cluster.yaml that gives the device counts")
    group: WorkerGroup | None = Field(
        default=None, description="what one logical worker runs on; devices are then planned by groups of so many"
    )
    constraints: Constraints = Field(default_factory=Constraints)
    network: str | None = Field(
        default=None,
        description="what an est plan adds to its step: goodput.json for its fitted synchronisation time, or links for that of "
        "the model's gradients on the cluster's links",
    )
    weight: Annotated[float, Field(ge=1 / LARGEST, le=LARGEST, allow_inf_nan=False)] = Field(
        default=1.0, description="of this job beside others that are planned with it"
    )
    goodput: GoodputSection | None = Field(default=None, description="for the goodput strategy")

    @property
    def asks_for_hosts(self) -> bool:
        """Whether the job says what the hosts' memory takes, rather than leaving it to the plan or ruling it out."""
        return self.offload not in ("auto", "none")

    @field_validator("precision", mode="before")
    @classmethod
    def _resolve_alias(cls, value: Any) -> Any:
        """Return the precision for an alias, such as fp16 for amp; other values pass, to be checked by the field's type."""
        return ALIASES.get(value, value) if isinstance(value, str) else value

    @field_validator("devices")
    @classmethod
    def _merge_offers(cls, offers: list[DeviceOffer]) -> list[DeviceOffer]:
        """Merge offers of one device type, however spelt, into one with their total count if their other fields are equal.

        Refuses two offers of one type that differ in another field.
        """
        offer_by_identity: dict[tuple[str, str], DeviceOffer] = {}
        for offer in offers:
            identity = name_key(offer.type), offer.model_dump_json(exclude={"type", "count"})
            if (earlier_offer := offer_by_identity.get(identity)) is not None:
                offer = earlier_offer.model_copy(update={"count": earlier_offer.count + offer.count})
            offer_by_identity[identity] = offer
        names = [name_key(offer.type) for offer in offer_by_identity.values()]
        for offer in offer_by_identity.values():
            if names.count(name_key(offer.type)) > 1:
                raise ValueError(f"device type {offer.type!r} stands twice with other figures; give one another name")
        return list(offer_by_identity.values())

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        """Refuse a job without devices or cluster, and settings that contradict each other."""
        if not self.devices and self.cluster is None:
            raise ValueError("names no devices; give devices: [{type, count, capability_per_s}] or cluster: FILE")
        if self.constraints.memory_fixed_gib is not None and self.constraints.memory_per_worker_gib is None:
            raise ValueError("constraints.memory_fixed_gib needs memory_per_worker_gib beside it")
        if self.load_in_4bit and self.lora is None:
            raise ValueError("load_in_4bit packs the weights that LoRA freezes; give lora: 16 beside it")
        if self.group is not None and self.network == LINKS:
            raise ValueError("group does not go with network: links, which places single devices")
        return self


class NodeDevices(Record):
    """The devices of one node."""

    type: Name
    count: Processes = 1


class NodeGroup(Linked):
    """``count`` equal nodes of a cluster."""

    name: Name
    count: Devices = 1
    devices: NodeDevices


class Cluster(Artifact):
    """Nodes and their devices (kind ``ddltool.cluster``)."""

    kind: Literal["ddltool.cluster"] = "ddltool.cluster"
    name: str | None = None
    nodes: list[NodeGroup] = Field(min_length=1, max_length=10_000)

    def device_counts(self, together: int = 1) -> dict[str, int]:
        """Return the number of devices by type, in file order.

        ``together``: count only devices that make whole groups of so many devices, each within one node or on several
        whole nodes.
        """
        counts: dict[str, int] = {}
        for group in self.nodes:
            per_node, usable_per_node = group.devices.count, 0
            if per_node >= together:
                usable_per_node = per_node - per_node % together
            elif together % per_node == 0:
                usable_per_node = per_node
            counts[group.devices.type] = counts.get(group.devices.type, 0) + group.count * usable_per_node
        return counts


def is_code(source: str) -> bool:
    """Return whether a SOURCE names user code, such as ``package.module:f``, which would be imported and run."""
    scheme, colon, _ = source.partition(":")
    return bool(colon) and scheme not in ("zoo", "timm", "transformers", "diffusers")


def read_job(path: str | Path, *, allow_code: bool = False) -> Job:
    """Return the job in a job.yaml, with its devices counted in its groups, if it has any.

    Counts that its devices lack are taken from its cluster; a job without devices gets all of the cluster's types. Paths
    in the file are relative to the file. Raises InputError for a device type that the cluster lacks, for missing files,
    and for a model that is code (:func:`is_code`) unless ``allow_code``.
    """
    path = Path(path)
    job = load(path, Job)
    if job.model is not None and is_code(job.model) and not allow_code:
        problem = f"names code, {job.model!r}, which would be imported and run"
        raise InputError(f"{path}:model", problem, "give --allow-code where you trust it, or name a built-in model")
    if job.network not in (None, LINKS) and not (path.parent / job.network).exists():
        problem = f"names {job.network!r}, which is not there"
        raise InputError(f"{path}:network", problem, "give the path of an existing file, or links")
    if job.cluster is None:
        return _in_groups(job, path)
    file = path.parent / job.cluster
    counts = load(file, Cluster).device_counts(job.group.size if job.group else 1)
    # Without devices of its own, the job may use all types of the cluster.
    offers = {offer.type: offer for offer in job.devices} or {name: DeviceOffer(type=name) for name in counts}
    for name in offers:
        if name not in counts:
            types = ", ".join(sorted(counts))
            raise InputError(f"{path}:devices", f"{name!r} is not in {job.cluster}", f"types there: {types}")
    devices = [
        offer.model_copy(update={"count": offer.count if "count" in offer.model_fields_set else counts[offer.type]})
        for offer in offers.values()
    ]
    return _in_groups(job.model_copy(update={"devices": devices}), path)


def _in_groups(job: Job, path: Path) -> Job:
    """Return the job with each offer counted in groups of devices, each with the memory and price of all its devices.

    Planners then take a group for one device. A job without groups is returned unchanged. Raises InputError if a type has too
    few devices for one group. ``path``: the job's file, for errors.
    """
    if job.group is None or (size := job.group.size) == 1:
        return job
    for offer in job.devices:
        if 0 < offer.count < size:
            problem = f"{offer.count} {offer.type} make no group of {job.group.text} on whole nodes"
            raise InputError(f"{path}:devices", problem, "offer more of them, or take a smaller group")
    if not any(offer.count for offer in job.devices):
        raise InputError(f"{path}:devices", f"make no group of {job.group.text} on whole nodes", "take a smaller group")
    summed_fields = {"memory_gib", "price_per_hour"}
    devices = [
        offer.model_copy(
            update={
                "count": offer.count // size,
                "per_node": None if offer.per_node is None else max(offer.per_node // size, 1),
                **{name: value * size for name in summed_fields if (value := getattr(offer, name)) is not None},
            }
        )
        for offer in job.devices
    ]
    return job.model_copy(update={"devices": devices})
