"""What a program hands over where a command line has texts: a model with its batch, devices by type, a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddltool.analyzers.job.planning.job_inputs import offered
from ddltool.analyzers.step.tracing.sources import Source, holding
from ddltool.errors import InputError
from ddltool.job import Cluster, DeviceOffer, Job

Devices = str | Mapping[str, int] | Cluster


def devices_text(devices: Devices) -> str:
    """Return devices as ``A100=8,V100=4``."""
    if isinstance(devices, str):
        return devices
    counts = devices.device_counts() if isinstance(devices, Cluster) else devices
    return ",".join(f"{name}={count}" for name, count in counts.items())


def on_cluster(job: Job, cluster: Cluster) -> Job:
    """Return the job with the devices of a cluster as they stand in its nodes.

    Of groups of nodes with one device type, the fewest devices per node and the first links count.
    """
    offers = []
    for offer in job.devices:
        groups = [group for group in cluster.nodes if group.devices.type == offer.type]
        per_node = min(group.devices.count for group in groups)
        offers.append(offer.model_copy(update={"per_node": per_node, "link": groups[0].link, "nic": groups[0].nic}))
    # model_copy checks nothing, so the new fields are checked here.
    return job.model_copy(update={"devices": [DeviceOffer.model_validate(one.model_dump()) for one in offers]})


def card_of(cluster: Cluster) -> str | None:
    """Return the slowest network card of a cluster as ``--bandwidth`` has it (``100Gbit``); None where one is not measured."""
    cards = [group.nic_gbit for group in cluster.nodes]
    return None if None in cards else f"{min(card for card in cards if card):g}Gbit"


@contextmanager
def named(model: Source, batch: Any = None) -> Iterator[str]:
    """Yield a text that stands for a model, with a batch for it, wherever a source is named within the block.

    ``batch``: what a DataLoader yields; None: none is given. Raises InputError for what is no batch.
    """
    if batch is None:
        with holding(model) as text:
            yield text
        return
    from ddltool.analyzers.step.tracing.batches import Fed, samples_in  # torch, which not every plan needs

    samples_in(batch)
    with holding(Fed(model, batch)) as text:
        yield text


def total_batch(batch: Any, devices: str) -> int:
    """Return the samples of a step in which each of the ``devices``, such as ``8xH100``, takes a ``batch`` of this size.

    Raises InputError where no device is offered.
    """
    from ddltool.analyzers.step.tracing.batches import samples_in

    counts = [offer.count or 0 for offer in offered(devices)]
    if not sum(counts):
        raise InputError("devices", f"{devices!r} offers none", "for example 8xH100,4xA100")
    return samples_in(batch) * sum(counts)


def is_model(job: Any) -> bool:
    """Return whether what a plan is asked for is a model that the program holds, neither a file, a job nor a command."""
    return not isinstance(job, (str, Path, Job, Mapping, list))
