"""Islands of devices on a slow link: the best plan of each, and what averaging every H steps costs (DiLoCo).

Start at :func:`plan_islands`. It compares them with two synchronous steps: one job over all devices, by the plan that is best
for it (which may leave an island idle), and every island by its own plan, with gradients averaged over the link in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddltool.analyzers.job.balancing.minmax import DeviceCurves, spread
from ddltool.analyzers.job.barriers.islands import FragmentExchange, Rounds
from ddltool.analyzers.job.barriers.outer_losses import published
from ddltool.analyzers.job.planning.job_inputs import job_of, read_with_specs, trained_numbers
from ddltool.analyzers.job.planning.options import PlanOptions
from ddltool.analyzers.job.planning.planning import solve
from ddltool.analyzers.step.communication.fabrics import between_nodes
from ddltool.analyzers.step.costs.predict import usable_bytes
from ddltool.device import DEVICES_PER_NODE
from ddltool.errors import Infeasible, InputError
from ddltool.island_results import (
    IslandFigures,
    IslandsPlan,
    OuterRow,
    OuterSetting,
    PublishedLoss,
    SynchronousStep,
    Way,
)
from ddltool.job import Job
from ddltool.links import Link
from ddltool.plans import Plan
from ddltool.shipped import devices_of
from ddltool.stages import Stage

# Ratio of two times up to which the simpler choice is taken: fewer inner steps, or no islands.
_AS_FAST = 1.05
# Ratio of the islands' step times up to which they count as equally fast.
_ALIKE = 1.02
# Share of a step that is the backward pass, behind which an all-reduce of gradients can hide.
_BACKWARD = 2 / 3
# The outer optimizer's state: numbers per parameter (the parameter and its momentum), bytes of each. Bits of a gradient.
_STATES, _STATE_BYTES, _GRADIENT_BITS = 2, 4, 32
_MOST_SAMPLES = 10**9


def link_of(text: str) -> Link:
    """Return the link between islands from a text such as ``1Gbit`` or ``1Gbit,30ms`` (latency).

    Raises InputError for anything else.
    """
    rate, _, latency = text.partition(",")
    link = between_nodes(None, rate.strip(), latency.strip() or None, ("", "--link-between", "--link-between"))
    assert link is not None  # a rate was given
    return link


def island_texts(devices: str) -> list[str]:
    """Return the devices of each island in ``8xH100+8xA100``. Raises InputError for an island without any."""
    texts = [part.strip() for part in devices.split("+")]
    if len(texts) > 1 and not all(texts):
        raise InputError("--devices", f"{devices!r} has an island without devices", "for example 8xH100+8xA100")
    return texts


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterOptions:
    """How islands should meet in outer steps."""

    every: Sequence[int]
    """Numbers of inner steps between outer steps to try."""
    fragments: int = 1
    """Parts in which the model is exchanged, one at a time."""
    overlap: int = 1
    """Inner steps during which a fragment may still be on its way."""
    bits: int = 32
    """Bits of each number that is sent."""


def plan_islands(
    source: str,
    devices: str,
    between: Link,
    outer: OuterOptions,
    options: PlanOptions,
    *,
    batch_size: int | None,
    stage: Stage,
    **model: Any,
) -> IslandsPlan:
    """Return the plan of islands, with a row of figures for each number of inner steps in ``outer.every``.

    The picked row is the one with the fewest inner steps that takes at most 5 % longer than the fastest. Shares of the batch
    are by devices, and where the islands' step times then differ by over 2 %, shares by speed are planned too.

    Args:
        source: the model, in the words of the command line: ``zoo:NAME``, ``file.py:factory``, ...
        devices: those of each island, with ``+`` between islands: ``8xH100+8xA100``.
        between: the link of one island to the others.
        outer: how the islands meet: the numbers of inner steps to try, and how the model is sent then.
        options: how the plan of each island is searched, and where remarks for the user go.
        batch_size: samples of all islands' inner steps together; None: 8 per device.
        stage: shows the progress of the planning.
        model: how the model is trained and the links inside an island: further arguments of :func:`job_of`.

    Raises InputError for arguments that cannot be, and Infeasible, which names the island, where one has no plan.
    """
    texts = island_texts(devices)
    remarks: set[str] = set()

    def tell_once(line: str) -> None:
        """Pass a remark on to the user unless another island's plan made the same one."""
        if line not in remarks:
            remarks.add(line)
            options.tell(line)

    options = replace(options, tell=tell_once)
    counts = [sum(offer.count for offer in job_of(source, text, **model).devices) for text in texts]
    total = batch_size or 8 * sum(counts)
    if not len(texts) <= total <= _MOST_SAMPLES:
        raise InputError("--batch-size", f"is {total}", f"give {len(texts)} (a sample for each island) or more")
    if not outer.every:
        raise InputError("outer_every", "is empty", "give the inner steps between outer steps to try, such as 1,8,64")
    shares = _shares_by_speed([1 / count for count in counts], total)
    with stage("planning islands", 2 * len(texts) + 1) as advance:
        # 1. What islands send each other, and their steps: with samples by devices, then by speed, then all as one job.
        planner = _Planner(source, texts, model, options, advance)
        elements, reads_tokens = trained_numbers(planner.job(texts[0], shares[0]))
        exchange = FragmentExchange(
            elements=elements, islands=len(texts), link=between, bits=outer.bits, fragments=outer.fragments
        )
        # raises InputError for impossible fragments before the planning, which takes long
        Rounds(step_s=[1.0], every=[min(outer.every)], fragment_s=0.0, fragments=outer.fragments)
        islands = planner.islands(shares)
        step_s = [plan.iteration_s for plan in islands]
        fair_shares = _shares_by_speed([seconds / share for seconds, share in zip(step_s, shares, strict=True)], total)
        is_mixed = max(step_s) > _ALIKE * min(step_s) and fair_shares != shares
        by_speed = planner.islands(fair_shares) if is_mixed else islands
        together = planner.together(total, sum(-(-count // DEVICES_PER_NODE) for count in counts), between)
    # 2. Rounds of each number of inner steps; the fewest steps that are nearly as fast as the fastest are picked.
    compared = _Comparison(
        exchange=exchange,
        shares=shares,
        step_s=step_s,
        step_by_speed_s=[plan.iteration_s for plan in by_speed] if is_mixed else None,
        overlap=outer.overlap,
        reads_tokens=reads_tokens,
    )
    rows = [compared.row(every) for every in sorted(set(outer.every))]
    fastest_s = min(row.overlapped_s for row in rows)
    best = next(row for row in rows if row.overlapped_s <= _AS_FAST * fastest_s)
    synchronous = sorted([*together, compared.averaged_gradients()], key=lambda step: step.step_s)
    return IslandsPlan(
        source=source,
        link_bytes_per_s=between.bytes_per_s,
        link_latency_s=between.latency_s,
        parameters=elements,
        total_batch=total,
        compute_s=compared.compute_s,
        islands=[
            _island_figures(text, plan, fast, elements, best.way if is_mixed else None, planner.job(text, share))
            for text, share, plan, fast in zip(texts, shares, islands, by_speed, strict=True)
        ],
        synchronous=synchronous,
        rows=rows,
        picked=best.outer_every,
        good_enough=synchronous[0].step_s <= _AS_FAST * best.overlapped_s,
        outer=OuterSetting(
            every=best.inner_steps,
            fragments=outer.fragments,
            overlap=best.overlap,
            bits=outer.bits,
        ),
    )


def _shares_by_speed(seconds: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` units of work among islands so that the slowest one ends as early as possible.

    Returns the whole number of units of each island, at least 1. ``seconds``: how long one unit takes on each island. Units
    are samples (LB-BSP, Equation 3) or inner steps (DyLU: Asynchronous Local-SGD, arXiv 2401.09135).
    """
    # to the solver of batch splits, each island is the only device of a type of its own
    rows = spread(DeviceCurves.of(per_sample_s=list(seconds)), [1] * len(seconds), total)
    assert rows is not None  # no island's share is limited
    return [row.size for row in sorted(rows, key=lambda row: row.kind)]


@dataclass(slots=True)
class _Planner:
    """Makes the plans of single islands and of all devices as one job."""

    source: str
    texts: Sequence[str]
    """The devices of each island."""
    model: dict[str, Any]
    """Further arguments of :func:`job_of`."""
    options: PlanOptions
    advance: Callable[..., object]
    """Called before each plan with the number of plans done and the name of the next one."""
    _done: int = 0

    def job(self, devices: str, samples: int, **more: Any) -> Job:
        """Return the job that trains ``samples`` samples in a step on ``devices`` (a text such as ``8xH100``).

        ``more`` replaces arguments of ``model``.
        """
        job = job_of(self.source, devices, batch_size=samples, **{**self.model, **more})
        # the user named the model on the command line, so its code is trusted
        return read_with_specs(job, self.model.get("devices_file"), allow_code=True)

    def islands(self, shares: Sequence[int]) -> list[Plan]:
        """Return the best plan of each island for its share of the samples. Raises Infeasible, which names the island."""
        return [
            self._solve(self.job(text, samples), f"island {number} ({text})", self.options)
            for number, (text, samples) in enumerate(zip(self.texts, shares, strict=True), 1)
        ]

    def together(self, total: int, nodes: int, link: Link) -> list[SynchronousStep]:
        """Return a list with the synchronous step of one job over all devices; an empty list where it has no feasible plan.

        Args:
            total: samples of the step.
            nodes: number of nodes that the devices of all islands fill.
            link: the link between any two of these nodes, also within an island: the slow one bounds every collective.

        Remarks for the user are dropped, because the islands' own plans have made the same ones.
        """
        job = self.job(",".join(self.texts), total, nodes=nodes, nic=None)
        options = replace(
            self.options,
            bandwidth=f"{link.bytes_per_s:.15g}B/s",
            latency=f"{link.latency_s:.15g}s",
            nccl_tests=(),  # measured on other links
            tell=lambda _: None,
        )
        with suppress(Infeasible):
            plan = self._solve(job, "all islands", options)
            return [SynchronousStep(name="one job", text=_layout_text(plan), step_s=plan.iteration_s)]
        return []

    def _solve(self, job: Job, name: str, options: PlanOptions) -> Plan:
        """Report progress, then return the job's best plan with samples by speed (LB-BSP).

        ``name`` says in errors which job has no plan: it takes the place of the job file's path. Raises Infeasible.
        """
        self.advance(self._done, name)
        self._done += 1
        return solve("lb-bsp", job, Path(name), options)


def _layout_text(plan: Plan) -> str:
    """Return a plan in words: ``FSDP2 on 8 H100 + 8 A100``, or the devices alone where no layout of the model was chosen."""
    devices = " + ".join(f"{row.devices} {row.device_type}" for row in plan.assignments)
    if plan.decision is None or not plan.decision.layouts:
        return devices
    layout = plan.decision.layouts[0].text
    return f"{layout} on {devices}" if layout else devices


def _island_figures(text: str, plan: Plan, fast: Plan, elements: int, way: Way | None, job: Job) -> IslandFigures:
    """Return an island's figures, with the memory that is left on its devices beside the outer optimizer's state.

    Memory is left out where the plan does not know it. The figures with samples by speed are left out where ``way`` is None.

    Args:
        text: the island's devices.
        plan: the island's plan with samples by its number of devices.
        fast: the island's plan with samples by its speed.
        elements: number of trained parameters.
        way: how the picked row balances unequal islands: see :meth:`_Comparison._ways`; None: they are equally fast.
        job: the island's job, which knows the device table.
    """
    taken = fast if way == "samples" else plan
    shard = 1 if taken.sharding is None else taken.sharding.shard
    # the outer optimizer's state is divided among the devices of a shard group, as the model is
    outer_bytes = float(_STATES * _STATE_BYTES * elements / shard)
    optional: dict[str, Any] = {}
    if way is not None:
        optional["samples_by_speed"] = _step_samples(fast)
        optional["step_by_speed_s"] = fast.iteration_s
    held_bytes = {} if taken.sharding is None else taken.sharding.memory_bytes  # by device type
    if held_bytes:
        table = devices_of(job, "--devices")
        free_bytes = [
            usable_bytes(table.device(name, "--devices")) - size - outer_bytes for name, size in held_bytes.items()
        ]
        optional["memory_bytes"] = float(max(held_bytes.values()))
        optional["free_bytes"] = float(min(free_bytes))
    return IslandFigures(
        devices=text,
        samples=_step_samples(plan),
        step_s=plan.iteration_s,
        outer_bytes=outer_bytes,
        plan=taken,
        **optional,
    )


def _step_samples(plan: Plan) -> int:
    """Return the samples that all devices of a plan train in a step."""
    return plan.max_workers * plan.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class _Comparison:
    """Times of the islands' rounds for any number of inner steps, and of a synchronous step."""

    exchange: FragmentExchange
    shares: Sequence[int]
    """Samples of each island in an inner step, by its devices."""
    step_s: Sequence[float]
    """Seconds of each island's inner step with these samples."""
    step_by_speed_s: Sequence[float] | None
    """The same with samples by speed; None: the islands are equally fast."""
    overlap: int
    reads_tokens: bool
    """Whether the model reads tokens, as those of the published losses do."""

    @property
    def compute_s(self) -> float:
        """Return the seconds of a total batch if nothing had to be sent between islands and no island ever waited."""
        samples_per_s = [share / seconds for share, seconds in zip(self.shares, self.step_s, strict=True)]
        total_batch_s = sum(self.shares) / sum(samples_per_s)
        if self.step_by_speed_s is None:
            return total_batch_s
        # with samples by speed the islands end nearly together, and other batches may compute more efficiently
        return min(total_batch_s, max(self.step_by_speed_s))

    def averaged_gradients(self) -> SynchronousStep:
        """Return the synchronous step of DDP between islands: gradients are averaged over the link in every step.

        The exchange is hidden behind the backward pass as far as that lasts; the remainder makes the step longer.
        """
        compute_s = min(max(self.step_s), max(self.step_by_speed_s or self.step_s))
        exchange_s = replace(
            self.exchange, bits=_GRADIENT_BITS, fragments=1
        ).fragment_s  # whole, uncompressed gradients
        exposed_s = max(0.0, exchange_s - _BACKWARD * compute_s)
        return SynchronousStep(name="DDP between islands", text="DDP between islands", step_s=compute_s + exposed_s)

    def row(self, every: int) -> OuterRow:
        """Return the figures of rounds with ``every`` inner steps on average, balanced by the fastest of :meth:`_ways`.

        A round is the inner steps up to an outer step, and the exchange. All times are seconds per total batch; without
        ``overlapped`` in the name they are those of the same round without overlap.
        """
        ways = self._ways(every)
        step_s = {way: self._per_total_batch_s(rounds.round_s, rounds.every) for way, rounds in ways.items()}
        way = min(ways, key=lambda one: step_s[one])
        best = ways[way]
        blocking = replace(best, overlap=0)  # every island stops until the exchange is over
        exchange = self.exchange
        return OuterRow(
            outer_every=every,
            inner_steps=list(best.every),
            way=way,
            step_s=self._per_total_batch_s(blocking.round_s, best.every),
            exposed_s=self._per_total_batch_s(blocking.exposed_s, best.every),
            overlap=best.overlap,
            overlapped_s=step_s[way],
            overlapped_exposed_s=self._per_total_batch_s(best.exposed_s, best.every),
            sent_bytes=exchange.sent_bytes,
            sent_bytes_per_s=exchange.sent_bytes / best.round_s,
            ways=step_s,
            published=_published(exchange.elements, exchange.islands, every) if self.reads_tokens else None,
        )

    def _ways(self, every: int) -> dict[Way, Rounds]:
        """Return the rounds of each way to balance islands of unequal speeds; ``every``: mean number of inner steps.

        The ways are ``equal`` (not balanced), ``steps`` (a faster island makes more inner steps in a round) and ``samples`` (a
        faster island trains more samples in each inner step). The last two exist for unequal islands only, and ``steps`` only
        if each island makes at least one inner step per fragment.
        """
        equal_numbers = [every] * len(self.shares)
        # way -> (seconds of an inner step, inner steps in a round), both by island
        inner_steps: dict[Way, tuple[Sequence[float], list[int]]] = {"equal": (self.step_s, equal_numbers)}
        if self.step_by_speed_s is not None:
            inner_steps["steps"] = self.step_s, _shares_by_speed(self.step_s, every * len(self.shares))
            inner_steps["samples"] = self.step_by_speed_s, equal_numbers
        return {
            way: Rounds(
                step_s=seconds,
                every=numbers,
                fragment_s=self.exchange.fragment_s,
                fragments=self.exchange.fragments,
                overlap=min(self.overlap, min(numbers) - 1),  # a fragment must arrive within the round
            )
            for way, (seconds, numbers) in inner_steps.items()
            if min(numbers) >= self.exchange.fragments or way == "equal"
        }

    def _per_total_batch_s(self, round_s: float, every: Sequence[int]) -> float:
        """Convert seconds of (or within) a round into seconds per total batch, so that rounds can be compared with steps.

        ``every``: inner steps of each island in the round. A total batch is one inner step's samples of all islands.
        """
        round_samples = sum(steps * share for steps, share in zip(every, self.shares, strict=True))
        return round_s * sum(self.shares) / round_samples


def _published(elements: int, islands: int, every: int) -> PublishedLoss | None:
    """Return the range of changes in loss that papers measured in the settings nearest to this one; None for no such paper.

    ``elements``: number of trained parameters; ``islands``: their number; ``every``: inner steps between outer steps.
    """
    runs = published(elements, islands, every)
    if not runs:
        return None
    return PublishedLoss(
        low=min(run.change for run in runs),
        high=max(run.change for run in runs),
        islands=runs[0].islands,
        every=runs[0].every,
        parameters_low=min(run.parameters for run in runs),
        parameters_high=max(run.parameters for run in runs),
        source="; ".join(dict.fromkeys(run.source for run in runs)),
    )
