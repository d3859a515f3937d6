"""Synthetic workloads: the jobs' arrivals, size classes and requests, by a seed. Start at :func:`generate`.

Size classes are those of Pollux (section 5.1) by total GPU time: small up to 1 GPU-hour, medium to 10, large to 100, xlarge
above. Applications of a class come from Pollux's Table 1 (:data:`POLLUX`), or from given applications
(:func:`templates`), whose requests follow its rule: GPUs that reach 50 to 80 % of linear speed-up at their best batch.
Nothing here was measured on a cluster, so the jobs' names say that a workload is synthetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.cluster.cluster import ClusterSpec, packed
from ddltool.analyzers.cluster.truth import Application
from ddltool.arrays import Floats, Places
from ddltool.errors import InputError, did_you_mean
from ddltool.simulation_results import JobSpec

SIZE_CLASSES: Mapping[str, float] = {"small": 1.0, "medium": 10.0, "large": 100.0, "xlarge": math.inf}
"""Upper ends in GPU-hours (Pollux, section 5.1; its xlarge ends at 1,000, here it is open)."""
CLASS_SHARES: Mapping[str, float] = {"small": 0.72, "medium": 0.20, "large": 0.06, "xlarge": 0.02}
"""Share of jobs by class: the sums of Pollux's Table 1."""
PATTERNS = ("constant", "poisson", "diurnal")
# Relative rates in eight equal parts of the span; the shape is our choice.
_DIURNAL = (1.0, 1.4, 2.2, 3.0, 2.4, 1.8, 1.4, 1.2)
_MOST_JOBS, _MOST_HOURS = 10_000_000, 87_600.0
# Range of the share of linear speed-up that requested GPUs reach (Pollux, section 5.1).
_LEAST_EFFICIENCY, _MOST_EFFICIENCY = 0.5, 0.8
_MOST_REQUESTED = 64


@dataclass(frozen=True, slots=True)
class Template:
    """An application, its size class, its share of the jobs, and the (GPUs, total batch size) that its jobs may request."""

    application: str
    size: str
    share: float
    requests: tuple[tuple[int, int], ...]


# Classes and shares: Pollux, Table 1. Requests: the hand-tuned ones of its published workloads.
POLLUX: tuple[Template, ...] = (
    Template("imagenet", "xlarge", 0.02, ((24, 3200), (32, 6400), (48, 6400))),
    Template("yolov3", "large", 0.06, ((4, 64),)),
    Template("deepspeech2", "medium", 0.10, ((6, 320), (8, 320), (12, 640))),
    Template("bert", "medium", 0.10, ((6, 384), (8, 384), (12, 384), (16, 384))),
    Template("cifar10", "small", 0.36, ((6, 2048), (8, 2048), (12, 4096), (16, 4096))),
    Template("ncf", "small", 0.36, ((1, 32768),)),
)


PUBLISHED_CLASSES: Mapping[str, str] = {template.application: template.size for template in POLLUX}
"""Size class of each application of Pollux's Table 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """The number of jobs, the hours over which they arrive, and the pattern of arrivals (:data:`PATTERNS`).

    ``constant``: equal gaps; ``poisson``: a Poisson process with the given number of jobs; ``diurnal``: the same with a rate
    that rises to three times its first value before the middle of the span and falls again. Raises InputError naming the field.
    """

    jobs: int = 160
    hours: float = 8.0
    pattern: str = "diurnal"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for a number out of range and an unknown pattern."""
        if not 1 <= self.jobs <= _MOST_JOBS:
            raise InputError("jobs", f"is {self.jobs}", f"from 1 to {_MOST_JOBS}")
        if not 0 < self.hours <= _MOST_HOURS:
            raise InputError("hours", f"is {self.hours:g}", f"above 0 and at most {_MOST_HOURS:.0f} (ten years)")
        if self.pattern not in PATTERNS:
            raise InputError("pattern", f"unknown pattern {self.pattern!r}", did_you_mean(self.pattern, PATTERNS))
        if self.seed < 0:
            raise InputError("seed", f"is {self.seed}", "a whole number >= 0")


def size_class(gpu_hours: float) -> str:
    """Return the size class of a total GPU time (Pollux, section 5.1).

    >>> [size_class(hours) for hours in (0.5, 1.0, 99.0, 5000.0)]
    ['small', 'medium', 'large', 'xlarge']
    """
    return next((name for name, end in SIZE_CLASSES.items() if gpu_hours < end), "xlarge")


def class_indices(gpu_hours: Floats) -> Places:
    """Return (n,) the indices in :data:`SIZE_CLASSES` of the classes of n total GPU times in hours."""
    return np.searchsorted(np.array(list(SIZE_CLASSES.values())[:-1]), gpu_hours, side="right")


def arrivals(pattern: Pattern) -> Floats:
    """Return the submission times (jobs,) by ``pattern``, in whole seconds, ascending."""
    generator = np.random.default_rng([pattern.seed, 0])
    span_s = 3600.0 * pattern.hours
    if pattern.pattern == "constant":
        return np.floor(np.arange(pattern.jobs) * span_s / pattern.jobs)
    positions = generator.random(pattern.jobs)
    if pattern.pattern == "diurnal":
        rates = np.array(_DIURNAL)
        cumulative_rates = np.concatenate([[0.0], np.cumsum(rates) / rates.sum()])
        # the inverse of the cumulative rate turns uniformly drawn positions into arrivals with that rate
        positions = np.interp(positions, cumulative_rates, np.linspace(0.0, 1.0, len(cumulative_rates)))
    return np.sort(np.floor(positions * span_s))


def generate(pattern: Pattern, templates: Sequence[Template] = POLLUX) -> list[JobSpec]:
    """Return a workload of ``pattern.jobs`` jobs named ``synthetic-1``, ..., drawn by the templates' shares.

    It depends on the pattern and the templates alone. Raises InputError when no template has a share above 0.
    """
    shares = np.array([template.share for template in templates])
    if not templates or not (np.isfinite(shares).all() and (shares >= 0).all() and shares.sum() > 0):
        raise InputError("templates", "hold no application with a share above 0", "give at least one")
    submit_times_s = arrivals(pattern)
    generator = np.random.default_rng([pattern.seed, 1])
    template_indices = generator.choice(len(templates), pattern.jobs, p=shares / shares.sum())
    return make_specs(submit_times_s, template_indices, templates, generator, "synthetic")


def make_specs(
    times_s: Floats, indices: Places, templates: Sequence[Template], generator: np.random.Generator, prefix: str
) -> list[JobSpec]:
    """Return n jobs named ``PREFIX-1``, ...: job i of ``templates[indices[i]]``, submitted at ``times_s[i]``.

    ``generator`` draws each job's request evenly from its template's requests.
    """
    # A uniform number times the number of requests, rounded down, is the index of one of them.
    request_counts = np.array([len(template.requests) for template in templates])
    request_indices = np.floor(generator.random(len(indices)) * request_counts[indices]).astype(int).tolist()
    specs = []
    for job, (submit_s, index) in enumerate(zip(times_s.tolist(), indices.tolist(), strict=True)):
        replicas, batch = templates[index].requests[request_indices[job]]
        request = {"application": templates[index].application, "num_replicas": replicas, "batch_size": batch}
        specs.append(JobSpec(name=f"{prefix}-{job + 1}", submit_s=submit_s, **request))
    return specs


def templates(applications: Mapping[str, Application], cluster: ClusterSpec) -> tuple[Template, ...]:
    """Return templates of ``applications`` on ``cluster``: class by the GPU time on one GPU, requests by Pollux's rule.

    Applications of Pollux's Table 1 keep their published class, and those without measurements on the cluster's types are left
    out. A class's share is divided evenly among its applications. Classes without one leave theirs out, so that shares may sum
    to less than 1; draws scale them to 1.
    """
    sized = []
    for name, application in applications.items():
        # The first type of the cluster that it was measured on.
        gpu_type = next((gpu_type for gpu_type in cluster.type_names if application.runs_on(gpu_type)), None)
        if gpu_type is None:
            continue
        alone_s, requests = _requests(application, cluster, gpu_type)
        sized.append((name, PUBLISHED_CLASSES.get(name) or size_class(alone_s / 3600.0), requests))
    sizes = [size for _, size, _ in sized]
    return tuple(
        Template(name, size, CLASS_SHARES[size] / sizes.count(size), requests) for name, size, requests in sized
    )


def _requests(
    application: Application, cluster: ClusterSpec, gpu_type: str
) -> tuple[float, tuple[tuple[int, int], ...]]:
    """Return the seconds of the training on one GPU at the best batch size, and the requests of the application's jobs.

    Requests are the (GPUs, measured batch size) that reach 50 to 80 % of linear speed-up; where none does, one GPU.
    """
    type_nodes = cluster.of_type(gpu_type)
    batch_sizes = application.batch_sizes.tolist()

    def best_training(count: int) -> tuple[float, int]:
        """Return the least seconds of the whole training on ``count`` GPUs, and the measured batch size that it takes."""
        candidates = application.batches(packed(type_nodes, count), gpu_type, batch_sizes)
        seconds, total = min(
            ((float(application.epoch_seconds(total, step_s).sum()), total) for total, step_s, _ in candidates),
            default=(math.inf, application.init_batch_size),
        )
        return seconds, int(min(batch_sizes, key=lambda measured: abs(measured - total)))

    alone_s, alone_batch = best_training(1)
    most_gpus = min(type_nodes.total_gpus, application.max_replicas, _MOST_REQUESTED)
    # users request few GPUs, or whole nodes of four
    counts = [count for count in range(2, most_gpus + 1) if count <= 4 or count % 4 == 0]
    efficient = [
        (count, batch)
        for count, (seconds, batch) in zip(counts, map(best_training, counts), strict=True)
        if _LEAST_EFFICIENCY <= alone_s / seconds / count <= _MOST_EFFICIENCY
    ]
    return alone_s, tuple(efficient) or ((1, alone_batch),)
