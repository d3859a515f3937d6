"""How to hold and train a model on a job's devices: sharding, checkpointing, batches and passes together.

Combinations of devices, ``replicate x shard``, checkpointing and passes are enumerated, each costed by
:class:`~.layout_figures.LayoutFigures`. The samples of a step are the job's, whatever the devices. What does not fit stays in
the list with what it lacks. A shard group of HSDP is of one type. Start at :meth:`Layouts.search`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ddltool.analyzers.job.placement.device_search import best_devices
from ddltool.analyzers.job.placement.problem import Problem
from ddltool.analyzers.job.placement.steps import Counts
from ddltool.analyzers.job.planning.goal import Goal
from ddltool.analyzers.job.planning.layout_figures import GIB, SURE, LayoutCandidate, LayoutFigures, gib
from ddltool.analyzers.step.costs.memory import Sharding
from ddltool.decision import LEAST_GAIN, Layout, NothingFits
from ddltool.errors import Infeasible
from ddltool.units import show_bytes

_SIMPLER = {"none": 0, "ddp": 1, "fsdp": 2, "hsdp": 3, "zero2": 4}
# How many layouts get their best buckets or prefetch before one is picked, and up to how many times the best default step.
_SETTLED, _SETTINGS_GAIN = 8, 1.5
# Layouts listed that do not fit.
_LISTED = 8
# Of the devices that would hold a step, the most that are looked for.
_MOST_SOUGHT = 4096


@dataclass(frozen=True, kw_only=True)
class Layouts(LayoutFigures):
    """Which of a job's layouts is best."""

    def search(
        self, problem: Problem, goal: Goal | None = None, *, equal: bool = False, limit_s: float = 5.0
    ) -> tuple[list[LayoutCandidate], float]:
        """Return (layouts worth a line, gap): the best layout first, those that do not fit memory last.

        ``equal``: devices that take part take equal shares. What is picked has been played through torch's allocator on each
        type; of communication all have what comes by default. The gap is relative to what no layout's value is below; infinite
        where nothing is known of it. Raises NothingFits.
        """
        goal = goal or Goal(step_samples=self.total)
        fitting, lacking, value = list[LayoutCandidate](), list[LayoutCandidate](), self.value(goal)
        first = _largest(problem, self.total)
        largest = first[0]
        # One node of each type: nothing leaves it.
        nodes = [min(self.kinds[each.name].fabric.gpus_per_node, each.count) for each in problem.devices]
        first += [tuple(size * (kind == only) for kind in range(len(nodes))) for only, size in enumerate(nodes)]

        def of(counts: Counts, least: float) -> tuple[float, list[LayoutCandidate]] | None:
            # Of all devices every layout is shown; of fewer what could be better, or simpler and as good as that.
            limit = least if counts != largest else math.inf
            if self._bound(problem, counts, counts, goal) >= limit:
                return None
            fit, short = self._on(problem, counts, equal, goal, limit * (1 + LEAST_GAIN) ** 2)
            lacking.extend(short if counts == largest else [])
            fitting.extend(fit)
            return (value(_simplest(fit, value).layout) if fit else math.inf), fit

        def bound(low: Counts, high: Counts) -> float:
            return self._bound(problem, low, high, goal)

        best = best_devices(
            problem, of, bound, most=self.total, limit_s=limit_s, first=first, spare=goal.objective != "cheapest"
        )
        if not fitting and (lacking or not goal.limited):
            raise self._nothing_fits(lacking)
        if best is None:
            raise Infeasible("what fits is slower or dearer than the job allows")
        picked = self._picked(problem, fitting, lacking, goal, equal)
        picked = self._settled(picked, fitting, goal)
        counts = problem.counts(picked.layout.devices)
        beside = self._on(problem, counts, equal, goal)[0]
        rest = sorted((it for it in [*beside, *fitting] if it.layout != picked.layout), key=lambda it: value(it.layout))
        mine = set(map(id, beside))
        short = _distinct(sorted(lacking, key=lambda it: it.layout.missing_bytes))
        # Plain DDP is what people ask for first, however much it lacks.
        plain = [it for it in short[_LISTED:] if simplicity(it.layout)[:2] == (1, 0)]
        gap = value(picked.layout) / best.bound - 1 if best.bound else math.inf
        shown = _distinct(rest, lambda it: id(it) not in mine or not self._missing_bytes(it))
        return [picked, *shown, *short[:_LISTED], *plain], max(0.0, gap)

    def _picked(
        self, problem: Problem, fitting: list[LayoutCandidate], lacking: list[LayoutCandidate], goal: Goal, equal: bool
    ) -> LayoutCandidate:
        """Return the simplest of the best layouts that the allocator holds; those it does not go to ``lacking``.

        Some devices have one layout, whatever else is offered: the simplest of the best on them.
        """
        value, chosen = self.value(goal), False
        while fitting:
            on = dict[tuple[tuple[str, int], ...], list[LayoutCandidate]]()
            for found in fitting:
                on.setdefault(tuple(found.layout.devices.items()), []).append(found)
            picked = _simplest([_simplest(each, value) for each in on.values()], value)
            if lack := self._missing_bytes(picked):
                fitting.remove(picked)
                layout = picked.layout.model_copy(update={"missing_bytes": lack, "step_s": None})
                lacking.append(replace(picked, layout=layout))
                more = picked.layout.passes + 1
                again = self._fastest_shape(
                    picked.layout.devices, picked.sharding, picked.recompute, equal, least_passes=more
                )
                if again is not None and not again.layout.missing_bytes:
                    fitting.append(again)
                continue
            if picked.recompute == "none" or goal.objective == "least-memory" or chosen:
                return picked
            chosen = True
            if (made := self._with_solved_recomputation(picked)) is not None:
                fitting.append(made)
        raise self._nothing_fits(lacking)

    def _settled(self, picked: LayoutCandidate, fitting: list[LayoutCandidate], goal: Goal) -> LayoutCandidate:
        """Return what is best once each has its own best buckets or prefetch: ``picked``, or one near it that fits.

        A simpler one within a little stays.
        """
        value = self.value(goal)
        if goal.objective == "least-memory":
            return picked
        near = [it for it in fitting if value(it.layout) <= value(picked.layout) * _SETTINGS_GAIN]
        best, worth = picked, value(self._with_settings(picked)) / (1 + LEAST_GAIN)
        for other in sorted(near, key=lambda it: value(it.layout))[:_SETTLED]:
            settled = value(self._with_settings(other))
            if settled < worth and not self._missing_bytes(other):
                best, worth = other, settled
        return best

    def _on(
        self, problem: Problem, counts: Counts, equal: bool, goal: Goal, limit: float = math.inf
    ) -> tuple[list[LayoutCandidate], list[LayoutCandidate]]:
        """Return the layouts on exactly these devices: those that fit and are not above a limit, and those that do not fit.

        Under a limit, without those that compute more again than what fits in one pass.
        """
        value, limit_s = self.value(goal), limit if goal.objective == "fastest" else math.inf
        used = problem.named(counts)
        fit, short = list[LayoutCandidate](), list[LayoutCandidate]()
        for sharding in self._shardings(counts, problem):
            if self._above(used, sharding, goal, limit):
                continue
            for recompute in self._recomputations():
                made = self._fastest_shape(
                    used, sharding, recompute, equal, lambda layout: value(layout) <= limit, limit_s=limit_s
                )
                if made is not None:
                    (short if made.layout.missing_bytes else fit).append(made)
                    if limit < math.inf and made.layout.passes == 1 and not made.layout.missing_bytes:
                        break
        return fit, short

    def _above(self, used: Mapping[str, int], sharding: Sharding, goal: Goal, limit: float) -> bool:
        """Return whether one collective of all gradients takes more than a limit: buckets and units of them take longer."""
        if limit == math.inf or sum(used.values()) == 1 or goal.objective == "least-memory":
            return False
        size_bytes = self._exchanged_bytes(next(iter(used)))
        group = self._process_group(used, sharding)
        step_s = SURE * (group.reduce_scatter_s(size_bytes) if sharding.gathers else group.all_reduce_s(size_bytes))
        hourly = sum(count * (self.kinds[name].price_per_hour or 0.0) for name, count in used.items())
        return goal.of(step_s, sum(used.values()), hourly * step_s / 3600) > limit

    def plainest(self, problem: Problem) -> LayoutCandidate:
        """Return what one would do first: an equal split over all devices, sharded and checkpointed as little as need be.

        Where none fits, the fastest of those on a single type; at last, the best layout.
        """
        alone = [replace(problem, devices=(device,)) for device in problem.devices]
        for part in ([problem], alone) if len(alone) > 1 else ([problem],):
            found = [plain for each in part for plain in self._plain(each)]
            if found:
                return min(found, key=lambda it: it.layout.step_s or math.inf)
        return self.search(problem)[0][0]

    def equally(self, problem: Problem, counts: Counts) -> LayoutCandidate:
        """Return an equal split on exactly these devices, by tensors alone. Raises Infeasible where none fits."""
        fit, _ = self._on(problem, counts, True, Goal())
        if not fit:
            raise Infeasible("nothing fits on these devices")
        return _simplest(fit, self.value(Goal()))

    def _plain(self, problem: Problem) -> list[LayoutCandidate]:
        fitting = [it for counts in _largest(problem, self.total) for it in self._on(problem, counts, True, Goal())[0]]
        while fitting:
            plain = min(fitting, key=lambda it: simplicity(it.layout)[1::-1])
            if not self._missing_bytes(plain):
                return [plain]
            fitting.remove(plain)
        return []

    def value(self, goal: Goal) -> Callable[[Layout], float]:
        """Return what a layout is ranked by, least first."""

        def of(layout: Layout) -> float:
            price = None if layout.price_per_sample is None else layout.price_per_sample * self.total
            worth = goal.of(layout.step_s or math.inf, sum(layout.devices.values()), price)
            return max(layout.memory_bytes.values()) if goal.objective == "least-memory" and worth < math.inf else worth

        return of

    def _bound(self, problem: Problem, low: Counts, high: Counts, goal: Goal) -> float:
        """Return what no layout on devices between two corners is below: all of them compute at full speed, all the time.

        Nor is a step shorter than all gradients take on the slowest card that they must pass.
        """
        if not any(high) or sum(low) > self.total:
            return math.inf
        if goal.objective == "least-memory":
            return 0.0
        size = -(-self.total // sum(device.count for device in problem.devices))
        rate, price, least, quickest, card = 0.0, 0.0, math.inf, math.inf, math.inf
        below = problem.named(low)
        leaves = len(below) > 1
        for name, most in problem.named(high).items():
            fewest = below.get(name, 0)
            each = 1 / self._sample_s(name, size)
            quickest = min(quickest, 1 / each)
            hourly, fabric = self.kinds[name].price_per_hour or 0.0, self.kinds[name].fabric
            if fewest and (leaves or fewest > fabric.gpus_per_node):
                card = min(card, math.inf if fabric.measured else fabric.between.bytes_per_s)
            rate, price, least = rate + most * each, price + fewest * hourly, min(least, hourly / each)
        # Samples are whole: somebody takes the mean of them, rounded up.
        step_s = SURE * max(self.total / rate, quickest * math.ceil(self.total / min(sum(high), self.total)))
        step_s = max(step_s, SURE * self._exchanged_bytes(problem.devices[0].name) / card)
        return goal.of(step_s, max(sum(low), 1), max(price * step_s, SURE * least * self.total) / 3600)

    def _shardings(self, counts: Counts, problem: Problem) -> list[Sharding]:
        """Return the ways in which so many devices can share the state."""
        n = sum(counts)
        if n == 1:
            return [Sharding(kind="none")]
        used = [count for count in counts if count]
        per_node = [self.kinds[device.name].fabric.gpus_per_node for device in problem.devices]
        common = math.gcd(*used)
        sizes = {2**power for power in range(1, n.bit_length())} | {*used, *per_node}
        kinds: list[Sharding] = [Sharding(kind="ddp")]
        if self.work.lifetimes(1).blocks:
            kinds += [Sharding(kind="fsdp", shard=n), Sharding(kind="zero2", shard=n)]
            kinds += [
                Sharding(kind="hsdp", shard=size) for size in sorted(sizes) if 1 < size < n and common % size == 0
            ]
        return kinds

    def _nothing_fits(self, lacking: Sequence[LayoutCandidate]) -> NothingFits:
        short = _distinct(sorted(lacking, key=lambda it: it.layout.missing_bytes))
        if not short:
            return NothingFits(f"no devices take {self.total} samples", [])
        first = short[0].layout
        name = max(first.devices, key=lambda each: -self.kinds[each].usable_bytes)
        has = self.kinds[name].usable_bytes
        on = f"each of {first.devices_text}" if sum(first.devices.values()) > 1 else f"one {name}"
        text = (
            f"memory: one sample on {on} takes {show_bytes(first.memory_bytes[name])} in a process ({first.text}), "
            f"and each {name} has {show_bytes(has)} for it: {gib(first.missing_bytes)} missing"
        )
        recompute = self._recomputations()[-1]
        alone = self._peak(Sharding(kind="none"), recompute, 1)
        ways = [f"one device of {math.ceil(alone / GIB) + 1} GiB"]
        if self.work.lifetimes(1).blocks:
            shards = (2**power for power in range(1, _MOST_SOUGHT.bit_length()))
            enough = next((n for n in shards if self._peak(Sharding(kind="fsdp", shard=n), recompute, 1) <= has), None)
            if enough is not None:
                ways.insert(0, f"{enough} {name} (FSDP2, {recompute} checkpointing)")
        return NothingFits(f"{text}; it would fit on {' or '.join(ways)}", [it.layout for it in short[:_LISTED]])


def simplicity(layout: Layout) -> tuple[int, int, int, int]:
    """Return how much there is to set, least first: sharding, checkpointing, passes, devices left in."""
    kind = "zero2" if layout.sharding == "fsdp" and not layout.reshard_after_forward else layout.sharding
    again = ("none", "selective", "full", "chosen").index(layout.checkpointing)
    return _SIMPLER[kind], again, layout.passes, sum(layout.devices.values())


def _simplest(found: Sequence[LayoutCandidate], value: Callable[[Layout], float]) -> LayoutCandidate:
    """Return the simplest of the layouts as good as the best."""
    best = min(value(it.layout) for it in found)
    as_good = [it for it in found if value(it.layout) <= best * (1 + LEAST_GAIN)]
    return min(as_good, key=lambda it: (*simplicity(it.layout), value(it.layout)))


def _distinct(
    found: Iterable[LayoutCandidate], holds: Callable[[LayoutCandidate], bool] = lambda _: True
) -> list[LayoutCandidate]:
    """Return the first of each kind of layout on the same types, of those that hold."""
    kept: dict[tuple[object, ...], LayoutCandidate] = {}
    for it in found:
        layout = it.layout
        key = layout.sharding, layout.replicate > 1, layout.reshard_after_forward, layout.checkpointing, *layout.devices
        if key not in kept and holds(it):
            kept[key] = it
    return list(kept.values())


def _largest(problem: Problem, total: int) -> list[Counts]:
    """Return the largest sets of devices that the constraints take: of all types, or of each where they may not mix."""
    order = problem.fastest_first
    kept = [[kind] for kind in order] if problem.single_type else [order]
    return [tuple(problem.filled(kinds, total)) for kinds in kept if any(problem.filled(kinds, total))]
