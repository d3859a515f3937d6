"""Arguments that a program gives as objects where a command line has texts: a model, its batch, devices, a cluster."""

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
"""A text as on the command line, the number of devices by type, or the nodes with their devices."""


def devices_text(devices: Devices) -> str:
    """Return devices as a text such as ``A100=8,V100=4``; a text is returned unchanged."""
    if isinstance(devices, str):
        return devices
    counts = devices.device_counts() if isinstance(devices, Cluster) else devices
    return ",".join(f"{name}={count}" for name, count in counts.items())


def on_cluster(job: Job, cluster: Cluster) -> Job:
    """Return the job with devices per node, links and network cards from a cluster, which must have all the job's types.

    If several groups of nodes have one type, the fewest devices per node, the first group's link and card, and the slowest of
    the measured cards are taken. A link or card that the job itself gives is kept.
    """
    offers = []
    for offer in job.devices:
        groups = [group for group in cluster.nodes if group.devices.type == offer.type]
        slowest_gbit = min((group.nic_gbit for group in groups if group.nic_gbit is not None), default=None)
        from_cluster: dict[str, Any] = {
            "per_node": min(group.devices.count for group in groups),
            "link": offer.link or groups[0].link,
        }
        if offer.nic is None and offer.nic_gbit is None:
            from_cluster |= {"nic": groups[0].nic} if slowest_gbit is None else {"nic_gbit": slowest_gbit}
        offers.append(offer.model_copy(update=from_cluster))
    # Validated here, as model_copy does not check new fields.
    return job.model_copy(update={"devices": [DeviceOffer.model_validate(offer.model_dump()) for offer in offers]})


@contextmanager
def named(model: Source, batch: Any = None) -> Iterator[str]:
    """Yield a text that is accepted as the model's SOURCE within the body.

    ``batch``: what a DataLoader yields, the model's input; None: the model's own example. Raises InputError for a value
    that is no batch.
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
    """Return the samples of a step in which each of the ``devices``, such as ``8xH100``, processes one such ``batch``.

    Raises InputError if the devices are none.
    """
    from ddltool.analyzers.step.tracing.batches import samples_in

    counts = [offer.count or 0 for offer in offered(devices)]
    if not sum(counts):
        raise InputError("devices", f"{devices!r} offers none", "for example 8xH100,4xA100")
    return samples_in(batch) * sum(counts)


def is_model(job: Any) -> bool:
    """Return whether the ``job`` of a plan is a model as an object, and not a file, a Job, a mapping or a command's words."""
    return not isinstance(job, (str, Path, Job, Mapping, list))
