"""The best layout of a model on a job's devices: sharding, checkpointing, batches and passes together.

Combinations of devices, ``replicate x shard``, checkpointing and passes are enumerated, each costed by
:class:`~.layout_figures.LayoutFigures`. The samples of a step are the job's, whatever the devices. What does not fit stays in
the list with what it lacks. A shard group of HSDP is of one type. Start at :meth:`Layouts.search`; :func:`layouts_of` makes
them of a job. It loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from ddltool.analyzers.job.placement.problem import Problem
from ddltool.analyzers.job.placement.steps import Counts
from ddltool.analyzers.job.planning.device_search import best_devices
from ddltool.analyzers.job.planning.layout_batches import MOST_PASSES, SURE, LayoutBatches
from ddltool.analyzers.job.planning.layout_figures import (
    GIB,
    WAYS,
    WAYS_ON_HOST,
    WHOLE,
    DeviceKind,
    LayoutCandidate,
    gib,
)
from ddltool.analyzers.job.planning.options import Goal
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.costs.offloading import demand_host_update
from ddltool.analyzers.step.costs.parallel import parallel_curve
from ddltool.analyzers.step.costs.predict import usable_bytes
from ddltool.analyzers.step.costs.saving import split_way
from ddltool.analyzers.step.costs.setting import ParallelDegrees, Setting
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.work import WorkCurve, work_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.decision import LEAST_GAIN, Layout, NothingFits
from ddltool.device import GIVEN, DeviceTable
from ddltool.errors import Infeasible, InputError
from ddltool.job import Job
from ddltool.shipped import calibration
from ddltool.units import show_bytes

# What people run without a tool.
_PLAIN = ("none", "ddp", "fsdp")
_SIMPLER = {"none": 0, "ddp": 1, "fsdp": 2, "hsdp": 3, "zero2": 4}
# How many layouts get their best buckets or prefetch before one is picked, and up to how many times the best default step.
_SETTLED, _SETTINGS_GAIN = 8, 1.5
# Layouts listed that do not fit.
_LISTED = 8
# Of the devices that would hold a step, the most that are looked for.
_MOST_SOUGHT = 4096
# By how much a step has to gain by activations on the host: how far their copies hide is known worse than other times.
_HOST_GAIN = 0.05
# Clouds and vendors sell hosts with up to 256 GB for each device (p5, p5en, p6); some of it is the system's.
_HOST_BYTES = 240e9


@dataclass(frozen=True, kw_only=True)
class Layouts(LayoutBatches):
    """Searches the layouts of one job for the best one."""

    def in_groups(self, degrees: ParallelDegrees) -> Layouts | None:
        """Return the layouts on groups of devices, each of which holds one replica of the model between them.

        ``degrees`` say by how many devices a group splits tensors and how many pipeline stages it has. Only device types of
        which a node holds a whole tensor group are left. None where no type is left, where the model cannot be divided in this
        way, and where state or activations are to be kept in the hosts' memory.
        """
        kinds = {
            # a group is priced as a whole; a price that is None (not known) stays so
            name: replace(kind, price_per_hour=kind.price_per_hour and kind.price_per_hour * degrees.gpus)
            for name, kind in self.kinds.items()
            if kind.fabric.gpus_per_node >= degrees.tensor
        }
        if not kinds or self.offload or self.ways != WAYS:  # nothing on a host is modelled for groups
            return None
        fabric = next(iter(kinds.values())).fabric
        try:  # as many passes as stages are in flight at a time at most
            work = parallel_curve(self.work, Setting(fabric=fabric, accumulation=degrees.pipeline, layout=degrees))
        except InputError:
            return None
        return self.changed(work=work, kinds=kinds, degrees=degrees, saves_on_host=False)

    def on_hosts(self, what: str = "optimizer") -> Layouts:
        """Return the layouts that use the hosts' memory.

        ``what`` is "optimizer" (parameters, gradients and the optimizer's state are kept there) or "activations" (blocks may
        save their activations there). Raises InputError for a model without blocks, and for an optimizer that has no update
        on hosts.
        """
        if not self.work.lifetimes(1).blocks:
            raise InputError("--offload", "the model has no list of blocks to gather one by one", "give none")
        if what == "activations":
            return self.changed(ways=WAYS_ON_HOST, saves_on_host=True)
        demand_host_update(self.optimizer)
        return self.changed(offload=True, saves_on_host=False)

    def search(
        self,
        problem: Problem,
        goal: Goal | None = None,
        *,
        equal: bool = False,
        limit_s: float = 5.0,
        plays_all: bool = False,
    ) -> tuple[list[LayoutCandidate], float]:
        """Search all device counts and layouts; return (the layouts to list, gap), the best layout first.

        Layouts that do not fit memory come last in the list. All are costed with default settings of communication. The gap is
        how much higher the best value is than a lower bound of every layout's value, as a share; infinite where that is 0.

        Args:
            problem: the offered devices and the constraints on them.
            goal: what layouts are compared by; None: the time of a step.
            equal: whether devices that take part take equal numbers of samples.
            limit_s: seconds of CPU time for the search over device counts.
            plays_all: whether torch's allocator is simulated for every layout, which is slow; else for the candidates of the
                first place only.

        Raises NothingFits where no layout fits memory, Infeasible where every one that fits breaks a limit of the goal.
        """
        goal = goal or Goal(step_samples=self.total)
        value = self.value(goal)
        fitting, too_large = list[LayoutCandidate](), list[LayoutCandidate]()
        # 1. Search the numbers of devices, by bounds on what any layout on them can reach.
        start_counts = _largest_counts(problem, self.total)
        all_counts = start_counts[0]
        # One node of each type: nothing leaves it.
        node_sizes = [min(self._between(device.name).gpus_per_node, device.count) for device in problem.devices]
        start_counts += [tuple(row) for row in np.diag(node_sizes).tolist()]
        open_bounds: list[float] = []
        """Lower bounds on devices of several types whose samples could take more passes than are tried."""

        def best_on(counts: Counts, best_value: float) -> tuple[float, list[LayoutCandidate]] | None:
            """Return the best value on ``counts`` devices of each type, and its layouts; None: none is below ``best_value``."""
            # Of all devices every layout is shown; of fewer what could be better, or simpler and as good as that: hence the
            # factor once for "as good as the best here", once for "as good as the best elsewhere".
            value_limit = best_value if counts != all_counts else math.inf
            if self._lower_bound(problem, counts, counts, goal) >= value_limit:
                return None
            fits, misfits = self._layouts_on(problem, counts, equal, goal, value_limit * (1 + LEAST_GAIN) ** 2)
            if plays_all:
                missing = [self._missing_bytes(candidate) for candidate in fits]
                misfits = [*misfits, *(_refused(*pair) for pair in zip(fits, missing, strict=True) if pair[1])]
                fits = [candidate for candidate, lacking in zip(fits, missing, strict=True) if not lacking]
            too_large.extend(misfits if counts == all_counts else [])
            fitting.extend(fits)
            if not equal and np.count_nonzero(counts) > 1 and self.total // sum(counts) > MOST_PASSES:
                open_bounds.append(bound(counts, counts))
            return (value(_simplest(fits, value).layout) if fits else math.inf), fits

        def bound(low: Counts, high: Counts) -> float:
            """Return a lower bound of the value on device counts between ``low`` and ``high``."""
            return self._lower_bound(problem, low, high, goal)

        spare = goal.objective != "cheapest"
        best = best_devices(problem, best_on, bound, most=self.total, limit_s=limit_s, first=start_counts, spare=spare)
        if not fitting and (too_large or not goal.limited):
            raise self._nothing_fits(too_large)
        if best is None:
            raise Infeasible("what fits is slower or dearer than the job allows")
        # 2. Pick one: the allocator must have room for it, then communication settings are compared.
        try:
            pick = self._pick_simplest(fitting, too_large, goal, equal)
        except NothingFits:
            # Layouts of less value that the allocator holds were passed over for those that it does not.
            if plays_all:
                raise
            return self.search(problem, goal, equal=equal, limit_s=limit_s, plays_all=True)
        pick = self._pick_with_settings(pick, fitting, goal)
        # 3. List the others: all layouts on the same devices, the best of other devices, and what nearly fits.
        same_devices, _ = self._layouts_on(problem, problem.counts(pick.layout.devices), equal, goal)
        least_bound = min([best.bound, *open_bounds])
        gap = value(pick.layout) / least_bound - 1 if least_bound else math.inf
        gap = max(0.0, gap, self._recomputation_gap(pick))
        return [pick, *self._others_listed(pick, [*same_devices, *fitting], too_large, value)], gap

    def _others_listed(
        self,
        pick: LayoutCandidate,
        fitting: Iterable[LayoutCandidate],
        too_large: list[LayoutCandidate],
        value: Callable[[Layout], float],
    ) -> list[LayoutCandidate]:
        """Return the layouts to list beside ``pick``, one of each kind: those that fit, best first, then what nearly fits.

        ``fitting``: layouts whose tensors fit memory. Those for which torch's allocator has no room are added to ``too_large``.
        ``value``: the function that layouts are ranked by, the least first.
        """
        others = [candidate for candidate in fitting if candidate.layout != pick.layout]
        others.sort(key=lambda candidate: value(candidate.layout))

        def is_held(candidate: LayoutCandidate) -> bool:
            """Return whether the allocator has room for a layout; one that it refuses is among what nearly fits."""
            if missing_bytes := self._missing_bytes(candidate):
                too_large.append(_refused(candidate, missing_bytes))
            return not missing_bytes

        shown = _distinct(others, is_held)
        closest = _distinct(sorted(too_large, key=lambda candidate: candidate.layout.missing_bytes))
        # Plain DDP (sharding 1, checkpointing 0) is what people ask for first, so it is listed however much it lacks.
        plain_ddp = [candidate for candidate in closest[_LISTED:] if simplicity(candidate.layout)[:2] == (1, 0)]
        return [*shown, *closest[:_LISTED], *plain_ddp]

    def _pick_simplest(
        self, fitting: list[LayoutCandidate], too_large: list[LayoutCandidate], goal: Goal, equal: bool
    ) -> LayoutCandidate:
        """Return the simplest of the best layouts for which torch's allocator has room.

        Changes both lists: layouts of ``fitting`` for which the allocator has no room move to ``too_large``, and layouts in
        more passes or with recomputation that a solver chose are added to ``fitting``. ``equal``: devices take equal numbers
        of samples. Raises NothingFits where the allocator holds none.

        Each set of devices enters with one layout, the simplest of the best on it, so that what else is offered does not
        change the layout on these devices.
        """
        value = self.value(goal)
        is_recomputation_solved = False
        while fitting:
            by_devices = dict[tuple[tuple[str, int], ...], list[LayoutCandidate]]()
            for candidate in fitting:
                by_devices.setdefault(tuple(candidate.layout.devices.items()), []).append(candidate)
            pick = _simplest([_simplest(candidates, value) for candidates in by_devices.values()], value)
            if missing_bytes := self._missing_bytes(pick):
                fitting.remove(pick)
                too_large.append(_refused(pick, missing_bytes))
                fitting += self._in_smaller_passes(pick, equal)
                continue
            if pick.recompute == "none" or goal.objective == "least-memory" or is_recomputation_solved:
                return pick
            is_recomputation_solved = True
            must_save_on_host = self.ways != WAYS
            if not must_save_on_host:
                fitting += filter(None, [self._with_solved_recomputation(pick, on_host=False)])
            # Saving on the host as well is tried where it could gain: fitting[-1] is what was just found on the device, if
            # anything.
            if self.saves_on_host and (must_save_on_host or self._could_gain_on_host(fitting[-1], pick)):
                on_host = self._with_solved_recomputation(pick, on_host=True)
                best_value = min(value(candidate.layout) for candidate in fitting)
                is_by_itself = (
                    on_host is not None
                    and self.usual_hosts_hold(on_host.layout)
                    and not self._shares_host_link(on_host.layout)
                    and value(on_host.layout) * (1 + _HOST_GAIN) <= best_value
                )
                if on_host is not None and (must_save_on_host or is_by_itself):
                    fitting.append(on_host)
        raise self._nothing_fits(too_large)

    def _in_smaller_passes(self, refused: LayoutCandidate, equal: bool) -> list[LayoutCandidate]:
        """Return a list with the layout in so many passes that some device takes a sample less in each; [] if none fits.

        ``refused``: a layout for which torch's allocator has no room; ``equal``: devices take equal numbers of samples.
        """
        layout = refused.layout
        least_passes = math.inf
        for size in layout.local_batch_sizes.values():
            pass_samples = -(-size // layout.passes)
            if pass_samples > 1:
                least_passes = min(least_passes, -(-size // (pass_samples - 1)))
        if least_passes == math.inf:  # every pass is of a single sample already
            return []
        retry = self._fastest_batching(
            layout.devices, refused.sharding, refused.recompute, equal, least_passes=int(least_passes)
        )
        return [] if retry is None or retry.layout.missing_bytes else [retry]

    def usual_hosts_hold(self, layout: Layout) -> bool:
        """Return whether hosts have memory for what a layout keeps there, activations or state, by what hosts have a device."""
        most_on_host = min(min(count, self.kinds[name].fabric.gpus_per_node) for name, count in layout.devices.items())
        return layout.host_bytes <= most_on_host * _HOST_BYTES

    def _shares_host_link(self, layout: Layout) -> bool:
        """Return whether a device's exchanges with others take the link to its host, too, for which nothing is counted."""
        return sum(layout.devices.values()) > 1 and any(
            self.kinds[name].model.device.link.startswith("PCIe") for name in layout.devices
        )

    def _could_gain_on_host(self, best: LayoutCandidate, pick: LayoutCandidate) -> bool:
        """Return whether saving on the host could make a step that is shorter than ``best``'s by more than ``_HOST_GAIN``.

        Saving there at most spares the recomputation. So ``best`` is compared with ``pick`` as it would be if it recomputed
        nothing, whatever memory that takes. Both are layouts with a step.
        """
        ideal = self._cost(pick.layout.devices, pick.sharding, "none", pick.layout.passes, pick.rows)
        return ideal is not None and (best.layout.step_s or 0.0) > (ideal.layout.step_s or 0.0) * (1 + _HOST_GAIN)

    def _pick_with_settings(self, pick: LayoutCandidate, fitting: list[LayoutCandidate], goal: Goal) -> LayoutCandidate:
        """Return the best layout once each has its own best DDP buckets or FSDP2 prefetch.

        It is ``pick`` unless another one of ``fitting``, of nearly its value with default settings, is better by at least
        ``LEAST_GAIN`` with the best ones, for ``pick`` is the simplest.
        """
        value = self.value(goal)
        if goal.objective == "least-memory":  # settings change the time alone
            return pick
        near = [candidate for candidate in fitting if value(candidate.layout) <= value(pick.layout) * _SETTINGS_GAIN]
        best, best_value = pick, value(self._with_settings(pick)) / (1 + LEAST_GAIN)
        for other in sorted(near, key=lambda candidate: value(candidate.layout))[:_SETTLED]:
            settled_value = value(self._with_settings(other))
            if settled_value < best_value and not self._missing_bytes(other):
                best, best_value = other, settled_value
        return best

    def _layouts_on(
        self, problem: Problem, counts: Counts, equal: bool, goal: Goal, limit: float = math.inf
    ) -> tuple[list[LayoutCandidate], list[LayoutCandidate]]:
        """Return the layouts on exactly ``counts`` devices: (those that fit, those too large for memory).

        ``equal``: every device takes as many samples; ``limit``: layouts of a higher value of the goal are left out. Under a
        finite limit recomputation grows only until a layout fits in one pass, because more of it takes longer; for the least
        memory it grows on.
        """
        value = self.value(goal)
        # the value of the objective "fastest" is the seconds of a step, which can be bounded before a layout is costed
        limit_s = limit if goal.objective == "fastest" else math.inf
        devices = problem.named(counts)
        fits, too_large = list[LayoutCandidate](), list[LayoutCandidate]()
        # The fastest step has the fewest passes. Memory is least at an end: one pass keeps no sum of gradients for the next,
        # the most passes keep the fewest activations.
        by_memory = goal.objective == "least-memory"
        least_passes_tried = {1, max(1, self.total // sum(counts))} if by_memory else {1}
        for sharding in self._shardings(counts, problem):
            if self._exceeds(devices, sharding, goal, limit):
                continue
            for recompute, least_passes in product(self._recomputations(), sorted(least_passes_tried)):
                candidate = self._fastest_batching(
                    devices,
                    sharding,
                    recompute,
                    equal,
                    lambda layout: value(layout) <= limit,
                    least_passes=least_passes,
                    limit_s=limit_s,
                )
                if candidate is not None:
                    (too_large if candidate.layout.missing_bytes else fits).append(candidate)
                    is_in_one_pass = candidate.layout.passes == 1 and not candidate.layout.missing_bytes
                    if limit < math.inf and is_in_one_pass and not by_memory:
                        break
        return fits, too_large

    def _exceeds(self, devices: Mapping[str, int], sharding: Sharding, goal: Goal, limit: float) -> bool:
        """Return whether exchanging all gradients in a single collective already exceeds ``limit``, a value of the goal.

        Real steps exchange them in several buckets or units, which takes longer, so such a sharding needs no closer look.
        False where one device exchanges nothing and where the goal is not about time or money.
        """
        if limit == math.inf or sum(devices.values()) == 1 or goal.objective == "least-memory":
            return False
        size_bytes = self._exchanged_bytes(next(iter(devices)), sharding)
        group = self._process_group(devices, sharding)
        step_s = SURE * (group.reduce_scatter_s(size_bytes) if sharding.gathers else group.all_reduce_s(size_bytes))
        price_per_hour = sum(count * (self.kinds[name].price_per_hour or 0.0) for name, count in devices.items())
        return goal.of(step_s, sum(devices.values()), price_per_hour * step_s / 3600) > limit

    def plainest(self, problem: Problem) -> LayoutCandidate:
        """Return what a careful engineer would run: equal shares on all devices; the fastest of DDP, FSDP2 and HSDP by nodes.

        Where none fits, it is the fastest of those on a single device type; where none fits there either, the best layout.
        """
        on_all = self._plainest_fitting(problem)
        if on_all:
            return on_all[0]
        if len(problem.devices) > 1:
            single_types = [replace(problem, devices=(device,)) for device in problem.devices]
            on_one_type = [candidate for single in single_types for candidate in self._plainest_fitting(single)]
            if on_one_type:
                return min(on_one_type, key=lambda candidate: candidate.layout.step_s or math.inf)
        listed, _ = self.search(problem)
        return listed[0]

    def equally(self, problem: Problem, counts: Counts) -> LayoutCandidate:
        """Return the best equal split on exactly ``counts`` (T,) devices. Raises Infeasible where none fits.

        Only the sizes of tensors are compared with memory; torch's allocator is not simulated.
        """
        fits, _ = self._layouts_on(problem, counts, True, Goal())
        if not fits:
            raise Infeasible("nothing fits on these devices")
        return _simplest(fits, self.value(Goal()))

    def _plainest_fitting(self, problem: Problem) -> list[LayoutCandidate]:
        """Return a list with the simplest of the fastest equal splits that fit torch's allocator; empty where none fits.

        Plain ones (one device, DDP, FSDP2, HSDP that shards within nodes) are preferred to all others.
        """
        node_sizes = {self._between(device.name).gpus_per_node for device in problem.devices}

        fitting = list[LayoutCandidate]()
        for counts in _largest_counts(problem, self.total):
            fits, _ = self._layouts_on(problem, counts, True, Goal())
            fitting += fits
        plain = [
            candidate
            for candidate in fitting
            if candidate.sharding.kind in _PLAIN
            or (candidate.sharding.kind == "hsdp" and {candidate.sharding.shard} == node_sizes)
        ]
        fitting = plain or fitting
        while fitting:
            plainest = _simplest(fitting, self.value(Goal()))
            if not self._missing_bytes(plainest):
                return [plainest]
            fitting.remove(plainest)
        return []

    def value(self, goal: Goal) -> Callable[[Layout], float]:
        """Return the function that layouts are ranked by, the least first: the goal's value, or bytes for least memory."""

        def value_of(layout: Layout) -> float:
            """Return a layout's value; infinite where it breaks a limit of the goal."""
            price = None if layout.price_per_sample is None else layout.price_per_sample * self.total
            devices = sum(layout.devices.values()) * self.degrees.gpus
            goal_value = goal.of(layout.step_s or math.inf, devices, price)
            by_memory = goal.objective == "least-memory" and goal_value < math.inf
            return max(layout.memory_bytes.values()) if by_memory else goal_value

        return value_of

    def _lower_bound(self, problem: Problem, low: Counts, high: Counts, goal: Goal) -> float:
        """Return a lower bound of the goal's value over layouts on ``low`` to ``high`` devices of each type, (T,) each.

        It assumes that all devices compute at full speed, all the time, and that no step is shorter than all gradients take on
        the slowest network card that they must pass.
        """
        if not any(high) or sum(low) > self.total:
            return math.inf
        if goal.objective == "least-memory":
            return 0.0
        mean_samples = -(-self.total // sum(device.count for device in problem.devices))
        samples_per_s = 0.0  # of all devices of ``high``
        low_price_per_hour = 0.0  # of all devices of ``low``, which are paid in any case
        least_price = math.inf  # of the cheapest type: hourly price over samples per second
        least_sample_s = math.inf  # seconds of a sample on the fastest type
        card_bytes_per_s = math.inf  # of the slowest network card between nodes that gradients must pass
        low_counts = problem.named(low)
        spans_types = len(low_counts) > 1
        for name, count in problem.named(high).items():
            low_count = low_counts.get(name, 0)
            device_per_s = 1 / self._sample_s(name, mean_samples)
            least_sample_s = min(least_sample_s, 1 / device_per_s)
            price_per_hour = self.kinds[name].price_per_hour or 0.0
            fabric = self._between(name)
            leaves_node = low_count and (spans_types or low_count > fabric.gpus_per_node)
            if leaves_node and not fabric.measured:  # measured collectives have no bound by the card's rate
                card_bytes_per_s = min(card_bytes_per_s, fabric.between.bytes_per_s)
            samples_per_s += count * device_per_s
            low_price_per_hour += low_count * price_per_hour
            least_price = min(least_price, price_per_hour / device_per_s)
        # Samples are whole: one device at least takes their mean, rounded up.
        most_samples = math.ceil(self.total / min(sum(high), self.total))
        compute_s = SURE * max(self.total / samples_per_s, least_sample_s * most_samples)
        exchange_s = SURE * self._exchanged_bytes(problem.devices[0].name, WHOLE) / card_bytes_per_s
        step_s = max(compute_s, exchange_s)
        step_price = max(low_price_per_hour * step_s, SURE * least_price * self.total) / 3600
        return goal.of(step_s, max(sum(low), 1), step_price)

    def _shardings(self, counts: Counts, problem: Problem) -> list[Sharding]:
        """Return the ways in which ``counts`` (T,) devices can share the state: parameters, gradients, optimizer.

        With ``offload`` the state is kept on hosts, so only ways that gather parameters from shards remain.
        """
        devices = sum(counts)
        per_node = [self._between(device.name).gpus_per_node for device in problem.devices]
        if not self.offload:
            return [Sharding(kind="none")] if devices == 1 else self._shardings_on_devices(counts, per_node)
        sharded = [Sharding(kind="fsdp")] if devices == 1 else self._shardings_on_devices(counts, per_node)
        on_fullest_host = max(min(count, most) for count, most in zip(counts, per_node, strict=True))
        return [replace(sharding, on_host=on_fullest_host) for sharding in sharded if sharding.gathers]

    def _shardings_on_devices(self, counts: Counts, per_node: Sequence[int]) -> list[Sharding]:
        """Return the ways in which ``counts`` (T,) devices, two or more in all, can share state that the devices hold.

        ``per_node``: devices on a node, by type. HSDP's shard groups are powers of two, nodes, and all devices of a type,
        where they divide the devices of every type. A model without a list of blocks has nothing to gather one by one.
        """
        shardings: list[Sharding] = [Sharding(kind="ddp")]
        if not self.work.lifetimes(1).blocks:
            return shardings
        devices = sum(counts)
        used_counts = [count for count in counts if count]
        common_divisor = math.gcd(*used_counts)
        group_sizes = {2**power for power in range(1, devices.bit_length())} | {*used_counts, *per_node}
        hybrid_sizes = [size for size in sorted(group_sizes) if 1 < size < devices and common_divisor % size == 0]
        shardings += [Sharding(kind="fsdp", shard=devices), Sharding(kind="zero2", shard=devices)]
        shardings += [Sharding(kind="hsdp", shard=size) for size in hybrid_sizes]
        return shardings

    def _nothing_fits(self, lacking: Sequence[LayoutCandidate]) -> NothingFits:
        """Return the error that names the bytes that the closest layout lacks, and the devices that would hold the model.

        ``lacking``: the layouts that were tried, each with its ``missing_bytes``; empty where no devices take all samples.
        """
        closest = _distinct(sorted(lacking, key=lambda candidate: candidate.layout.missing_bytes))
        if not closest:
            return NothingFits(f"no devices take {self.total} samples", [])
        layout = closest[0].layout
        name = min(layout.devices, key=lambda each: self.kinds[each].usable_bytes)  # the type with least memory
        usable = self.kinds[name].usable_bytes
        needed = show_bytes(usable + layout.missing_bytes)  # of tensors, or of what torch's allocator reserves for them
        device_text = f"each of {layout.devices_text}" if sum(layout.devices.values()) > 1 else f"one {name}"
        text = (
            f"memory: one sample on {device_text} takes {needed} in a process ({layout.text}), "
            f"and each {name} has {show_bytes(usable)} for it: {gib(layout.missing_bytes)} missing"
        )
        recompute = self._recomputations()[-1]  # the way that takes least memory
        whole_bytes = self._peak(Sharding(kind="none"), recompute, 1)
        ways = [f"one device of {math.ceil(whole_bytes / GIB) + 1} GiB"]
        if self.work.lifetimes(1).blocks:
            shard_counts = (2**power for power in range(1, _MOST_SOUGHT.bit_length()))
            peaks = ((n, self._peak(Sharding(kind="fsdp", shard=n), recompute, 1)) for n in shard_counts)
            shards_needed = next((n for n, peak_bytes in peaks if peak_bytes <= usable), None)
            if shards_needed is not None:
                ways.insert(0, f"{shards_needed} {name} (FSDP2, {split_way(recompute)[0]} checkpointing)")
        layouts = [candidate.layout for candidate in closest[:_LISTED]]
        return NothingFits(f"{text}; it would fit on {' or '.join(ways)}", layouts)

    def holds(self, problem: Problem) -> bool:
        """Return whether the model fits: all devices (of one type where they may not mix) hold a sample each in some layout."""
        recompute = self._recomputations()[-1]  # the way that takes least memory
        for counts in _largest_counts(problem, self.total):
            least_bytes = min(self.kinds[name].usable_bytes for name in problem.named(counts))
            if any(self._peak(sharding, recompute, 1) <= least_bytes for sharding in self._shardings(counts, problem)):
                return True
        return False


def simplicity(layout: Layout) -> tuple[int, int, int, int]:
    """Return the sort key that puts simpler layouts first: (rank of sharding, rank of checkpointing, passes, devices)."""
    kind = "zero2" if layout.sharding == "fsdp" and not layout.reshard_after_forward else layout.sharding
    checkpointing_rank = ("none", "selective", "full", "chosen").index(layout.checkpointing)
    if layout.activations:  # any saving on the host is less simple than all checkpointing on the device
        checkpointing_rank += 4
    return _SIMPLER[kind], checkpointing_rank, layout.passes, sum(layout.devices.values())


def _simplest(candidates: Sequence[LayoutCandidate], value: Callable[[Layout], float]) -> LayoutCandidate:
    """Return the simplest of the layouts whose value is within ``LEAST_GAIN`` of the best; ``value``: lower is better."""
    best_value = min(value(candidate.layout) for candidate in candidates)
    as_good = [candidate for candidate in candidates if value(candidate.layout) <= best_value * (1 + LEAST_GAIN)]
    return min(as_good, key=lambda candidate: (*simplicity(candidate.layout), value(candidate.layout)))


def _refused(candidate: LayoutCandidate, missing_bytes: float) -> LayoutCandidate:
    """Return the layout marked as one that does not fit: it lacks ``missing_bytes`` and has no step time."""
    layout = candidate.layout.model_copy(update={"missing_bytes": missing_bytes, "step_s": None})
    return replace(candidate, layout=layout)


def _distinct(
    candidates: Iterable[LayoutCandidate], is_shown: Callable[[LayoutCandidate], bool] = lambda _: True
) -> list[LayoutCandidate]:
    """Return the first of each kind of layout on the same types, of those for which ``is_shown`` holds.

    A kind is how the state is sharded and what is recomputed or saved on the host.
    """
    kept: dict[tuple[object, ...], LayoutCandidate] = {}
    for candidate in candidates:
        layout = candidate.layout
        how = layout.checkpointing, bool(layout.activations)
        key = layout.sharding, layout.replicate > 1, layout.reshard_after_forward, *how, *layout.devices
        if key not in kept and is_shown(candidate):
            kept[key] = candidate
    return list(kept.values())


def _largest_counts(problem: Problem, total: int) -> list[Counts]:
    """Return the largest (T,) device counts within the constraints: of all types, or of each type where they may not mix.

    ``total``: samples of a step, beyond which more devices would have nothing to do.
    """
    types = problem.fastest_first
    type_sets = [[kind] for kind in types] if problem.single_type else [types]
    return [
        tuple(problem.with_added(type_set, total)) for type_set in type_sets if any(problem.with_added(type_set, total))
    ]


def job_work(job: Job) -> WorkCurve:
    """Return the step of a job's model as a function of the batch size, traced once per process.

    Raises InputError where the model cannot be traced.
    """
    numerics = Numerics(job.precision, job.channels_last, load_in_4bit=job.load_in_4bit)
    return _work(str(job.model), numerics, job.sequence_length, job.lora, job.attention)


@cache
def _work(
    source: str, numerics: Numerics, sequence_length: int | None, lora: int | None, attention: str | None
) -> WorkCurve:
    """Return the traced step of the model ``source``; the cache shares one trace among all jobs that train it alike.

    ``sequence_length`` in tokens, the LoRA rank ``lora`` and the implementation of ``attention``: None: the model's own, no
    adapters, and the model's own.
    """
    return work_of(source, numerics, sequence_length, lora, attention)


def layouts_of(job: Job, table: DeviceTable, fabrics: Mapping[str, Fabric]) -> Layouts | None:
    """Return the layouts of a job, all of whose device types ``table`` knows.

    ``fabrics``: device type -> network. None where the model's traced step has no batch dimension, so that samples cannot be
    divided among devices.
    """
    work = job_work(job)
    if work.traced.graph.batch_size is None:
        return None
    kinds = {}
    for offer in job.devices:
        if offer.count:
            device = table.device(offer.type, "devices.type")
            limited_device = device
            if offer.memory_gib is not None:  # the job limits the memory, or knows it better than the table
                limited_device = device.model_copy(update={"memory_gib": offer.memory_gib, "source": GIVEN})
            kinds[offer.type] = DeviceKind(
                model=cost_model(device, calibration()),
                fabric=fabrics[offer.type],
                usable_bytes=usable_bytes(limited_device),
                price_per_hour=offer.price_per_hour,
            )
    total = job.max_workers * job.batch_size
    layouts = Layouts(
        work=work,
        kinds=kinds,
        total=total,
        optimizer=job.optimizer,
        compile=job.compile,
        saves_on_host=job.offload == "auto",
    )
    return layouts.on_hosts(job.offload) if job.asks_for_hosts else layouts
