"""Memory and time of a job's model on its devices under each sharding. It loads torch. Start at :func:`layouts_of`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ddltool.analyzers.job.planning.layout_figures import DeviceKind
from ddltool.analyzers.job.planning.layouts import Layouts
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.costs.predict import WorkCurve, usable_bytes, work_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.device import GIVEN, DeviceTable
from ddltool.job import Job
from ddltool.shipped import calibration


def job_work(job: Job) -> WorkCurve:
    """Return the traced step of a job's model at any batch size, traced once. Raises InputError where it cannot be."""
    return _work(str(job.model), Numerics(job.precision, job.channels_last), job.sequence_length)


@cache
def _work(source: str, numerics: Numerics, sequence_length: int | None) -> WorkCurve:
    """Return the traced step of a model, one trace for all jobs that train it alike."""
    return work_of(source, numerics, sequence_length)


def layouts_of(job: Job, table: DeviceTable, fabrics: Mapping[str, Fabric]) -> Layouts | None:
    """Return the layouts of a job, all of whose types ``table`` knows; None where its model's step has no batch."""
    work = job_work(job)
    if work.traced.graph.batch_size is None:
        return None
    kinds = {}
    for offer in job.devices:
        if offer.count:
            device = table.device(offer.type, "devices.type")
            job_memory = {"memory_gib": offer.memory_gib, "source": GIVEN}
            limited_device = device if offer.memory_gib is None else device.model_copy(update=job_memory)
            kinds[offer.type] = DeviceKind(
                model=cost_model(device, calibration()),
                fabric=fabrics[offer.type],
                usable_bytes=usable_bytes(limited_device),
                price_per_hour=offer.price_per_hour,
            )
    return Layouts(work=work, kinds=kinds, total=job.max_workers * job.batch_size, optimizer=job.optimizer)
