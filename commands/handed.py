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

    Of groups of nodes with one device type, the fewest devices per node, the first link and card, and the slowest of measured
    cards count. What the job says of its own devices goes before them.
    """
    offers = []
    for offer in job.devices:
        groups = [group for group in cluster.nodes if group.devices.type == offer.type]
        measured = min((group.nic_gbit for group in groups if group.nic_gbit is not None), default=None)
        joined: dict[str, Any] = {
            "per_node": min(group.devices.count for group in groups),
            "link": offer.link or groups[0].link,
        }
        if offer.nic is None and offer.nic_gbit is None:
            joined |= {"nic": groups[0].nic} if measured is None else {"nic_gbit": measured}
        offers.append(offer.model_copy(update=joined))
    # model_copy checks nothing, so the new fields are checked here.
    return job.model_copy(update={"devices": [DeviceOffer.model_validate(one.model_dump()) for one in offers]})


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
