"""A job's goodput as a plan: how many devices, which batch, and the batch on any other number. Start at :func:`plan_goodput`.

The choice maximises goodput over the numbers of devices of one type, local batches and accumulation steps (Pollux, section
3); devices of other types have models of their own, and the best type wins. The plan says besides from where on more
devices bring less than half of what the first did, and how to keep the chosen total batch when their number changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from ddltool.analyzers.goodput.elastic_table import ElasticLimits, ElasticRow, elastic_table
from ddltool.analyzers.goodput.lr_rules import GradientStatistics, rule_names
from ddltool.analyzers.goodput.throughput import ThroughputParams, efficiency, iteration_time_s
from ddltool.analyzers.goodput.tuning import BatchLimits, Frontier, frontier
from ddltool.errors import Infeasible
from ddltool.job import GoodputSection, Job
from ddltool.plan import Assignment, ElasticSetting, GoodputChoice, Plan, ScalingRow

PAYS_SHARE = 0.5


def plan_goodput(job: Job, section: GoodputSection, models: Mapping[str, ThroughputParams]) -> Plan:
    """Return the plan of highest goodput; ``models`` by device type. All devices of the plan are of one type.

    Raises Infeasible when no number of the offered devices allows a batch.
    """
    started = time.perf_counter()
    initial = section.initial_batch_size or job.max_workers * job.batch_size
    limits = BatchLimits(
        initial_batch_size=initial,
        max_batch_size=section.max_batch_size,
        max_local_batch_size=section.max_local_batch_size,
    )
    phi = math.inf if section.noise_scale is None else section.noise_scale
    best: tuple[float, str, int, Frontier] | None = None
    for offer in job.devices:
        most = min(offer.count, job.constraints.max_devices or offer.count)
        price = offer.price_per_hour
        if job.constraints.max_price_per_hour is not None and price:
            most = min(most, int(job.constraints.max_price_per_hour // price))
        if offer.type not in models or most < 1:
            continue
        try:
            found = frontier(
                models[offer.type],
                most,
                limits,
                noise_scale=phi,
                replicas_per_node=section.devices_per_node,
                threshold=PAYS_SHARE,
            )
        except Infeasible:
            continue
        place = int(found.tuned.goodput_per_s.argmax())
        reached = float(found.tuned.goodput_per_s[place])
        if best is None or reached > best[0]:
            best = (reached, offer.type, place, found)
    if best is None:
        raise Infeasible(
            f"no number of the offered devices allows a total batch of {initial} to {limits.max_batch_size}"
        )
    _, device, place, found = best
    return _plan(job, section, initial, phi, device, models[device], place, found, started)


def _plan(
    job: Job,
    section: GoodputSection,
    initial: int,
    phi: float,
    device: str,
    params: ThroughputParams,
    place: int,
    found: Frontier,
    started: float,
) -> Plan:
    tuned = found.tuned
    replicas, nodes = int(found.num_replicas[place]), int(found.num_nodes[place])
    local, steps, total = (
        int(column[place]) for column in (tuned.local_batch_size, tuned.accumulation_steps, tuned.total_batch_size)
    )
    step_s = float(iteration_time_s(params, nodes, replicas, local, steps))
    throughput = total / step_s / job.batch_size
    choice = GoodputChoice(
        device_type=device,
        num_replicas=replicas,
        num_nodes=nodes,
        local_batch_size=local,
        accumulation_steps=steps,
        total_batch_size=total,
        goodput_per_s=float(tuned.goodput_per_s[place]),
        efficiency=float(efficiency(phi, total, initial)),
        speedup=float(found.speedup[place]),
        pays_until=found.pays_until,
        pays_share=PAYS_SHARE,
        scaling=[
            ScalingRow(
                num_replicas=int(found.num_replicas[row]),
                num_nodes=int(found.num_nodes[row]),
                local_batch_size=int(tuned.local_batch_size[row]),
                accumulation_steps=int(tuned.accumulation_steps[row]),
                total_batch_size=int(tuned.total_batch_size[row]),
                goodput_per_s=float(tuned.goodput_per_s[row]),
                speedup=float(found.speedup[row]),
            )
            for row in np.flatnonzero(found.efficient).tolist()
        ],
        elastic=_elastic(section, initial, phi, total, len(found.num_replicas)),
    )
    return Plan(
        job=job.name,
        strategy="goodput",
        max_workers=job.max_workers,
        batch_size=job.batch_size,
        iteration_s=step_s,
        throughput=throughput,
        assignments=[
            Assignment(device_type=device, devices=replicas, ests_per_device=0, local_batch_size=local * (steps + 1))
        ],
        est_count=0,
        waste=0.0,
        overload_factor=step_s,
        status="optimal",
        gap=0.0,
        solve_seconds=time.perf_counter() - started,
        goodput=choice,
    )


def _elastic(section: GoodputSection, initial: int, phi: float, total: int, most: int) -> list[ElasticSetting]:
    """Return what keeps the total batch on 1 to ``most`` devices."""
    known = None if math.isinf(phi) else GradientStatistics.from_noise_scale(phi, initial)
    rules = [name for name in rule_names() if name != "constant" and (known is not None or name != "adascale")]
    rows = elastic_table(
        total,
        range(1, most + 1),
        ElasticLimits(max_local_batch_size=section.max_local_batch_size),
        epoch_samples=section.epoch_samples,
        initial_batch_size=initial,
        learning_rate=section.learning_rate,
        rules=rules,
        statistics=known,
    )
    return [_setting(row) for row in rows]


def _setting(row: ElasticRow) -> ElasticSetting:
    split = row.split
    # the passes of the first ``remainder`` ranks, if any, and of the others: all ranks of a kind are alike
    kinds = [] if split is None else [0, split.remainder] if split.remainder else [0]
    return ElasticSetting(
        world_size=row.world_size,
        local_batch_sizes=[] if split is None else split.local_batch_sizes[kinds].tolist(),
        accumulation_steps=None if split is None else split.accumulation_steps,
        ranks_with_one_more=0 if split is None else split.remainder,
        reason=row.reason,
        nearest_total_batch_sizes=list(row.nearest_total_batch_sizes),
        learning_rates=row.learning_rates,
        steps_per_epoch=row.steps_per_epoch,
        last_step_samples=row.last_step_samples,
    )
