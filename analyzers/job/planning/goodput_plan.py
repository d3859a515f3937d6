"""A job's goodput as a plan: how many devices, which batch, and the batch on any other number. Start at :func:`plan_goodput`.

The choice maximises goodput over the numbers of devices of one type, local batches and accumulation steps (Pollux, section
3). Each type has a model of its own, and the best type wins, or a mix of types in unequal batches whose total is chosen with it
(Cannikin). On one type the plan also says from where on more devices bring less than half of what the first did, and how to
keep the chosen total batch when their number changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ddltool.analyzers.job.goodput.elastic_table import ElasticLimits, elastic_table
from ddltool.analyzers.job.goodput.lr_rules import GradientStatistics, rule_names
from ddltool.analyzers.job.goodput.throughput import StepTime, ThroughputParams, efficiency, iteration_time_s
from ddltool.analyzers.job.goodput.tuning import BatchLimits, Frontier, frontier
from ddltool.analyzers.job.placement.problem import from_job
from ddltool.analyzers.job.planning.split import memory_limit, plan_best_total
from ddltool.decision import LEAST_GAIN
from ddltool.errors import Infeasible
from ddltool.job import GoodputSection, Job
from ddltool.plans import Assignment, GoodputChoice, Plan, ScalingRow

PAYS_SHARE = 0.5
"""Share of the first devices' goodput that further devices must bring on average to pay."""
# Fields of a tuned batch that a plan repeats.
BATCH = ("local_batch_size", "accumulation_steps", "total_batch_size")


def plan_goodput(job: Job, section: GoodputSection, models: Mapping[str, ThroughputParams]) -> Plan:
    """Return the plan of highest goodput (useful samples per second).

    ``section``: the job's goodput section; ``models``: fitted model by device type, others are not used. The plan is on devices
    of one type with equal batches, unless devices of several types with unequal batches are better by more than ``LEAST_GAIN``.
    Raises Infeasible when no number of the offered devices allows a batch.
    """
    initial = section.initial_batch_size or job.max_workers * job.batch_size
    # without a noise scale every sample counts in full, whatever the batch
    phi = math.inf if section.noise_scale is None else section.noise_scale
    mixed = _mixed(job, section, models, initial, phi)
    try:
        single = _of_one_type(job, section, models, initial, phi)
    except Infeasible:
        if mixed is None:
            raise
        return mixed
    assert single.goodput is not None
    if mixed is None or mixed.split is None:
        return single
    is_better = (mixed.split.goodput_per_s or 0.0) > single.goodput.goodput_per_s * (1 + LEAST_GAIN)
    return mixed if is_better else single


def _mixed(
    job: Job, section: GoodputSection, models: Mapping[str, ThroughputParams], initial: int, phi: float
) -> Plan | None:
    """Return the plan of highest goodput on devices of several types, with unequal batches.

    None where the job has a fitted model for one offered type alone, where its workers must be of one type, and where no
    devices or total batch within the limits are possible.

    Args:
        job: the job, with its offered devices and constraints.
        section: the job's goodput section.
        models: fitted model by device type.
        initial: the initial batch size M0 in samples, which is the smallest total batch.
        phi: the noise scale in samples, infinite where it is not known.
    """
    offers = [offer for offer in job.devices if offer.type in models]
    if len(offers) < 2 or section.max_batch_size < initial:
        return None
    curves = {
        offer.type: StepTime(
            launch_s=models[offer.type].alpha_grad_s,
            per_sample_s=models[offer.type].beta_grad_s,
            memory_limit=memory_limit(job, offer),
            sync=models[offer.type],
            devices_per_node=section.devices_per_node,
        )
        for offer in offers
    }
    speeds = {name: 1 / max(curve.seconds(job.batch_size), 1e-12) for name, curve in curves.items()}

    def useful_samples(total: int) -> float:
        """Return the progress of a step with a total batch of ``total`` samples, in samples at full statistical efficiency."""
        return total * float(efficiency(phi, total, initial))

    with suppress(Infeasible):
        problem = from_job(job.model_copy(update={"devices": offers}), speeds)
        if problem.single_type:
            return None
        plan = plan_best_total(problem, curves, range(initial, section.max_batch_size + 1), useful_samples)
        if plan is not None:
            # The plan's mini-batches are single samples; restate it in those of the job.
            own_units = {"max_workers": job.max_workers, "batch_size": job.batch_size}
            return plan.model_copy(update={**own_units, "throughput": plan.throughput / job.batch_size})
    return None


def _of_one_type(
    job: Job, section: GoodputSection, models: Mapping[str, ThroughputParams], initial: int, phi: float
) -> Plan:
    """Return the plan of highest goodput on devices of one type, with equal batches.

    ``section``: the job's goodput section; ``models``: fitted model by device type; ``initial``: the initial batch size M0 in
    samples; ``phi``: the noise scale in samples, infinite where it is not known. Raises Infeasible when no number of the
    offered devices allows a batch.
    """
    started = time.perf_counter()
    device, best_index, curve = _best_type(job, section, models, initial, phi)

    def row(at: int) -> dict[str, Any]:
        """Return a plan's fields, name -> value, for the number of devices at index ``at`` of the curve.

        They are the numbers of devices and nodes, the best batch, its goodput, and the speedup over one device.
        """
        batch = {name: int(getattr(curve.tuned, name)[at]) for name in BATCH}
        speed = {"goodput_per_s": float(curve.tuned.goodput_per_s[at]), "speedup": float(curve.speedup[at])}
        return {"num_replicas": int(curve.num_replicas[at]), "num_nodes": int(curve.num_nodes[at]), **batch, **speed}

    # The chosen batch, the numbers of devices that pay, and how the batch is kept when the number changes.
    best_row = row(best_index)
    statistics = None if math.isinf(phi) else GradientStatistics.from_noise_scale(phi, initial)
    choice = GoodputChoice(
        device_type=device,
        **best_row,
        efficiency=float(efficiency(phi, best_row["total_batch_size"], initial)),
        pays_until=curve.pays_until,
        pays_share=PAYS_SHARE,
        scaling=[ScalingRow(**row(at)) for at in np.flatnonzero(curve.efficient).tolist()],
        elastic=elastic_table(
            best_row["total_batch_size"],
            range(1, len(curve.num_replicas) + 1),
            ElasticLimits(max_local_batch_size=section.max_local_batch_size),
            epoch_samples=section.epoch_samples,
            initial_batch_size=initial,
            learning_rate=section.learning_rate,
            rules=[name for name in rule_names() if name != "constant" and (statistics or name != "adascale")],
            statistics=statistics,
        ),
    )
    allocation = choice.num_nodes, choice.num_replicas, choice.local_batch_size, choice.accumulation_steps
    step_s = float(iteration_time_s(models[device], *allocation))
    samples = choice.local_batch_size * (choice.accumulation_steps + 1)
    assigned = Assignment(device_type=device, devices=choice.num_replicas, ests_per_device=0, local_batch_size=samples)
    return Plan(
        job=job.name,
        strategy="goodput",
        max_workers=job.max_workers,
        batch_size=job.batch_size,
        iteration_s=step_s,
        throughput=choice.total_batch_size / step_s / job.batch_size,
        assignments=[assigned],
        est_count=0,
        waste=0.0,
        overload_factor=step_s,
        status="optimal",
        gap=0.0,
        solve_seconds=time.perf_counter() - started,
        goodput=choice,
    )


def _best_type(
    job: Job, section: GoodputSection, models: Mapping[str, ThroughputParams], initial: int, phi: float
) -> tuple[str, int, Frontier]:
    """Return the device type of highest goodput, the index of its best number of devices in its curve, and that curve.

    ``section``: the job's goodput section; ``models``: fitted model by device type; ``initial``: the initial batch size M0 in
    samples; ``phi``: the noise scale in samples, infinite where it is not known.
    Raises Infeasible when no number of the offered devices, within the limits on devices and price, allows a batch.
    """
    limits = BatchLimits(
        initial_batch_size=initial,
        max_batch_size=section.max_batch_size,
        max_local_batch_size=section.max_local_batch_size,
    )
    hourly_budget = job.constraints.max_price_per_hour
    candidates: list[tuple[str, int, Frontier]] = []
    for offer in job.devices:
        max_devices = min(offer.count, job.constraints.max_devices or offer.count)
        if hourly_budget is not None and offer.price_per_hour:
            max_devices = min(max_devices, int(hourly_budget // offer.price_per_hour))
        if offer.type in models and max_devices >= 1:
            with suppress(Infeasible):
                curve = frontier(
                    models[offer.type],
                    max_devices,
                    limits,
                    replicas_per_node=section.devices_per_node,
                    noise_scale=phi,
                    threshold=PAYS_SHARE,
                )
                candidates.append((offer.type, int(curve.tuned.goodput_per_s.argmax()), curve))
    if not candidates:
        totals_text = f"a total batch of {initial} to {limits.max_batch_size}"
        raise Infeasible(f"no number of the offered devices allows {totals_text}")
    return max(candidates, key=lambda best: float(best[2].tuned.goodput_per_s[best[1]]))
