"""The fastest batches, passes and recomputation of a layout on given devices.

Devices of different types take shares of the batch with which all end together (LB-BSP, Equation 3), all in the same number of
passes (accumulation steps), because sharded processes communicate in every pass. Start at
:meth:`LayoutBatches._fastest_batching`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from ddltool.analyzers.job.balancing.minmax import DeviceCurves, Row, spread
from ddltool.analyzers.job.goodput.throughput import StepTime
from ddltool.analyzers.job.planning.layout_figures import (
    WAYS,
    WHOLE,
    Accept,
    LayoutCandidate,
    LayoutFigures,
    checkpointing_of,
)
from ddltool.analyzers.job.planning.split import equal_rows
from ddltool.analyzers.step.costs.offloading import host_link_bytes_per_s
from ddltool.analyzers.step.costs.predict import lacking_bytes
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.decision import Layout
from ddltool.errors import Infeasible

# Factor on lower bounds that extrapolate linearly, because samples of larger batches take a little less time each.
SURE = 0.9
# Most passes of a step on devices of several types that are tried, beside the fewest that memory allows.
MOST_PASSES = 64
# Time limit of the solver that chooses which activations to recompute, in seconds, and the share of a step that ends it: a
# step is not known better.
_CHOOSING_S, _CHOOSING_GAP = 3.0, 1e-3


@dataclass(frozen=True, kw_only=True)
class LayoutBatches(LayoutFigures):
    """Finds what devices that share a model in a given way do fastest: samples of each, passes, and recomputation.

    Arguments are named as in :class:`LayoutFigures`.
    """

    def _sample_s(self, name: str, size: int) -> float:
        """Return a lower bound of the seconds that a sample takes on a device type in passes of about ``size`` samples.

        It is the least of what a sample takes on average and of what one more sample adds, in whole and in sharded steps, by
        passes of two sizes that are traced anyway.
        """
        traced_size = self.work.traced.graph.batch_size or 2 * size
        other_size = traced_size if traced_size != size else 2 * size
        small, large = sorted((size, other_size))
        least_s = math.inf
        for sharding in (WHOLE, Sharding(kind="fsdp")):
            small_s, large_s = (
                self._timed_pass(name, samples, "none", sharding).program.compute_s / self.degrees.pipeline
                for samples in (small, large)
            )
            added_s = (large_s - small_s) / (large - small)
            mean_s = small_s / small
            least_s = min(least_s, added_s, mean_s)
        return max(least_s, 1e-12)

    def _recomputations(self) -> Sequence[str]:
        """Return the ways of recomputing to try, from least to most; only "none" for a model without a list of blocks."""
        return self.ways if self.work.lifetimes(1).blocks else WAYS[:1]

    def _fastest_batching(
        self,
        used: Mapping[str, int],
        sharding: Sharding,
        recompute: str,
        equal: bool,
        accept: Accept = lambda _: True,
        least_passes: int = 1,
        limit_s: float = math.inf,
    ) -> LayoutCandidate | None:
        """Return the fastest number of passes and batch sizes for given devices, sharding and recomputation.

        A layout that lacks memory even for one sample has ``missing_bytes``. None where every number of passes was passed over.

        Args:
            used: device type -> number of devices.
            sharding: how the replicas share parameters, gradients and the optimizer's state.
            recompute: what is recomputed, see :class:`LayoutCandidate`.
            equal: whether every device takes as many samples; else all end at about the same time.
            accept: a layout for which it returns False is passed over.
            least_passes: fewest passes.
            limit_s: seconds of a step; a layout whose lower bound is above is not traced.
        """
        is_equal = equal or len(used) == 1  # devices of one type end together with equal numbers of samples
        found = self._fewest_passes(used, sharding, recompute, is_equal, least_passes)
        if found is None:
            return self._too_large(used, sharding, recompute)
        fewest_passes, limits = found
        best: LayoutCandidate | None = None
        for passes in self._passes(fewest_passes, sum(used.values()), unequal=not is_equal):
            summing = replace(sharding, sums=passes > 1)  # several passes keep the sum of their gradients
            rows = self._shares(used, limits, summing, recompute, passes, equal)
            if rows is None or min(row.size for row in rows) < passes:  # each pass needs a sample
                continue
            step_limit_s = min(limit_s, (best.layout.step_s or math.inf) if best is not None else math.inf)
            if step_limit_s < math.inf and self._lower_bound_s(used, summing, recompute, passes, rows) > step_limit_s:
                continue
            candidate = self._cost(used, summing, recompute, passes, rows, accept)
            if candidate is not None and (best is None or (candidate.layout.step_s or 0) < (best.layout.step_s or 0)):
                best = candidate
        return best

    def _fewest_passes(
        self, used: Mapping[str, int], sharding: Sharding, recompute: str, equal: bool, least: int
    ) -> tuple[int, dict[str, int]] | None:
        """Return (fewest passes that fit memory, device type -> most samples of a pass); None where not even one sample fits.

        ``equal``: every device takes as many samples; ``least``: fewest passes to return. A step's only pass holds more samples
        than one of several, beside which the sum of the gradients is kept; so where one pass turns out too few, the limits
        are found again with that sum (``sharding.sums``).
        """
        sharding = replace(sharding, sums=sharding.sums or least > 1)
        devices = sum(used.values())
        # A device is given at most twice the mean number of samples.
        upper = 2 * -(-self.total // devices)
        limits = {name: self._most_samples(sharding, recompute, name, upper) for name in used}
        if min(limits.values()) < 1:
            return None
        passes = max(least, -(-self.total // sum(count * limits[name] for name, count in used.items())))
        if equal:
            passes = max(passes, math.ceil(math.ceil(self.total / devices) / min(limits.values())))
        if passes > 1 and not sharding.sums:
            return self._fewest_passes(used, replace(sharding, sums=True), recompute, equal, least)
        return passes, limits

    def _passes(self, fewest: int, devices: int, unequal: bool) -> list[int]:
        """Return the numbers of passes to try, without repeats.

        ``fewest``: the fewest that fit memory; ``devices``: those that share the samples, whose numbers of samples may be
        ``unequal``.
        """
        if unequal:  # how well whole samples share out in a pass varies from one number to the next
            tried = list(range(fewest, min(max(fewest, self.total // devices), MOST_PASSES) + 1)) or [fewest]
        else:
            # If passes differ in samples, each takes as long as the largest: so a number that divides the samples is tried too.
            most_samples = -(-self.total // devices)
            dividing = next((passes for passes in range(fewest, 2 * fewest) if most_samples % passes == 0), fewest)
            tried = [fewest, dividing]
        if self.degrees.pipeline > 1:  # the more passes there are, the less pipeline stages wait for each other
            most = self.total // devices
            tried += [2**power for power in range(most.bit_length()) if fewest < 2**power <= most]
        return list(dict.fromkeys(tried))

    def _shares(
        self,
        used: Mapping[str, int],
        limits: Mapping[str, int],
        sharding: Sharding,
        recompute: str,
        passes: int,
        equal: bool,
    ) -> tuple[Row, ...] | None:
        """Return how many samples of a step each device takes, as rows of devices with equally many.

        The numbers are equal if ``equal`` or on one type, whatever memory holds; else such that all devices end at the same
        time, or None where memory does not hold them or some device would get no sample. A row's ``kind`` is the index of its
        type in ``used``. ``limits``: device type -> samples of one pass that a device holds.
        """
        counts = list(used.values())
        if equal or len(used) == 1:
            return tuple(equal_rows(dict(enumerate(counts)), self.total))
        pass_total = -(-self.total // passes)  # samples of all devices in a pass
        mean_samples = -(-pass_total // sum(counts))
        lines = [self._pass_line(name, mean_samples, recompute, sharding) for name in used]
        held = [replace(line, memory_limit=limits[name]) for line, name in zip(lines, used, strict=True)]
        # A pass takes as long as its largest: so samples are shared out in a pass, and a step has as many in each.
        rows = spread(DeviceCurves.of_types(held), counts, pass_total)
        if rows is None:
            return None
        return _without_surplus(
            [row._replace(size=row.size * passes) for row in rows], pass_total * passes - self.total
        )

    def _pass_line(self, name: str, size: int, recompute: str, sharding: Sharding) -> StepTime:
        """Return the time of a pass as a linear function of its samples (fixed seconds and seconds per sample).

        The line goes through the times of 1 sample and of ``size`` rounded up to a power of 2, so that few sizes are traced.
        """
        upper_size = 2 ** math.ceil(math.log2(max(size, 2)))
        if self.work.traced.largest is not None:
            upper_size = max(2, min(upper_size, self.work.traced.largest))
        single_s, upper_s = (
            self._timed_pass(name, samples, recompute, sharding).program.compute_s for samples in (1, upper_size)
        )
        sample_s = max((upper_s - single_s) / (upper_size - 1), 1e-12)
        return StepTime(launch_s=max(single_s - sample_s, 0.0), per_sample_s=sample_s)

    def _lower_bound_s(
        self, used: Mapping[str, int], sharding: Sharding, recompute: str, passes: int, rows: tuple[Row, ...]
    ) -> float:
        """Return a lower bound of the seconds of a step, without tracing the sizes of its passes.

        It is the slowest device's passes, the last of which ends no earlier than all gradients are exchanged, if that begins
        when the first gradient is ready. ``rows``: the samples of each device; ``kind``: index of its type in ``used``.
        """
        names = list(used)
        compute_s = 0.0  # of one pass on the slowest device
        for row in rows:
            size = -(-row.size // passes)
            compute_s = max(compute_s, self._pass_line(names[row.kind], size, recompute, sharding).seconds(size))
        group = self._process_group(used, sharding)
        name = names[rows[0].kind]
        program = self._timed_pass(name, self.work.traced.graph.batch_size or 1, "none", sharding).program
        reduce_s = group.reduce_scatter_s if sharding.gathers else group.all_reduce_s
        # The share of a pass before the first gradient is ready; 0 for a pipeline stage, of which it is not known.
        first_ready_share = float(program.ready_s[0]) / program.compute_s if self.degrees.pipeline == 1 else 0.0
        exchanged_s = 0.0 if group.replicas < 2 else reduce_s(self._exchanged_bytes(name, sharding))
        return SURE * ((passes - 1) * compute_s + max(compute_s, first_ready_share * compute_s + exchanged_s))

    def _with_solved_recomputation(self, candidate: LayoutCandidate, on_host: bool) -> LayoutCandidate | None:
        """Return the layout with the recomputation that takes least time and fits memory; None where no step is shorter.

        ``on_host``: see :meth:`_solve_recomputation`. Results are cached by the layout as JSON, which holds the sharding and
        the most samples of each device type: time and memory follow from these, and what the candidate itself recomputes is
        solved anew.
        """
        key = candidate.layout.model_dump_json(), on_host
        if key not in self._solved:
            self._solved[key] = self._solve_recomputation(candidate, on_host)
        return self._solved[key]

    def _solve_recomputation(self, candidate: LayoutCandidate, on_host: bool) -> LayoutCandidate | None:
        """Return the layout with the recomputation that takes least time and fits memory, chosen by a solver.

        ``on_host``: whether blocks may save activations on the host. None where no step is shorter, where no choice fits, and
        where ``on_host`` is allowed and saving there brings nothing.
        """
        from ddltool.analyzers.step.costs.checkpointing import cheapest  # it loads a solver

        layout = candidate.layout
        # one choice is made for all device types: that of the type with least memory left
        tightest = min(
            layout.memory_bytes,
            key=lambda device_type: self.kinds[device_type].usable_bytes - layout.memory_bytes[device_type],
        )
        size = -(-layout.local_batch_sizes[tightest] // layout.passes)
        work = self._work(candidate.sharding)
        lifetimes = work.lifetimes(size)
        budget_bytes = min(self.kinds[device_type].usable_bytes for device_type in layout.memory_bytes)
        timed_graph = self._timed_pass(tightest, size, "none", candidate.sharding).graph
        usable = self.kinds[tightest].usable_bytes
        try:
            recomputation = cheapest(
                lifetimes,
                lifetimes.seconds(timed_graph),
                candidate.sharding,
                self.optimizer,
                budget_bytes,
                batch_size=work.scaled(size),
                limit_s=_CHOOSING_S,
                host_bytes_per_s=host_link_bytes_per_s(self.kinds[tightest].model.device) if on_host else 0.0,
                gap=_CHOOSING_GAP,
                lacking_bytes=lambda saving: lacking_bytes(
                    work.held(size, candidate.sharding, self.optimizer, saving), usable
                ),
            )
        except Infeasible:  # no choice fits, or none was found within _CHOOSING_S
            return None
        if bool(recomputation.saving.on_host) != on_host:  # saving on the host brings nothing
            return None
        # Batches that were found for layouts that recompute may turn out to need no recomputation.
        key = "none"
        if recomputation.saving.recomputed() or on_host:
            key = f"chosen {len(self._choices)}"
            self._choices[key] = recomputation
        better = self._cost(layout.devices, candidate.sharding, key, layout.passes, candidate.rows)
        if better is None or (better.layout.step_s or 0) >= (layout.step_s or 0) * (1 - 1e-6):
            return None
        fits = all(
            size <= self.kinds[device_type].usable_bytes for device_type, size in better.layout.memory_bytes.items()
        )
        return better if fits else None

    def _recomputation_gap(self, candidate: LayoutCandidate) -> float:
        """Return how much longer a step is than its bound by what a solver chose to recompute, as a share of the bound."""
        choice = self._choices.get(candidate.recompute)
        unproven_s = 0.0 if choice is None else candidate.layout.passes * (choice.cost_s - choice.bound_s)
        step_s = candidate.layout.step_s or math.inf
        return unproven_s / (step_s - unproven_s) if unproven_s < step_s else 0.0

    def _too_large(self, used: Mapping[str, int], sharding: Sharding, recompute: str) -> LayoutCandidate:
        """Return the record of a layout that does not hold one sample per device, with the bytes that the smallest lacks."""
        usable_bytes = min(self.kinds[name].usable_bytes for name in used)
        needed_bytes = self._peak(sharding, recompute, 1)
        if needed_bytes <= usable_bytes:  # one sample fits, but not beside the sum of the passes before it
            needed_bytes = self._peak(replace(sharding, sums=True), recompute, 1)
        layout = Layout(
            devices=dict(used),
            **self._shape(sharding, sum(used.values())),
            checkpointing=checkpointing_of(recompute),
            local_batch_sizes=dict.fromkeys(used, 1),
            passes=1,
            memory_bytes=dict.fromkeys(used, needed_bytes),
            activations=self._saved_on_host(used, sharding, recompute, 1, dict.fromkeys(used, 1)),
            missing_bytes=needed_bytes - usable_bytes,
        )
        return LayoutCandidate(layout=layout, sharding=sharding, recompute=recompute)

    def _most_samples(self, sharding: Sharding, recompute: str, name: str, upper: int) -> int:
        """Return the most samples of a pass, up to ``upper``, that a device of a type holds; 0: not even one.

        Memory grows nearly linearly with the samples, so two of three tries are where the line through the two ends of the
        interval crosses the limit (regula falsi). Every third try halves the interval, which bounds the number of tries where
        memory does not grow so.
        """
        usable_bytes = self.kinds[name].usable_bytes
        largest = self.work.traced.largest  # the largest batch that the model takes; None: any
        low = 1
        high = upper if largest is None else min(upper, largest)
        low_bytes, high_bytes = (self._peak(sharding, recompute, samples) for samples in (low, high))
        if high_bytes <= usable_bytes:
            return high
        if low_bytes > usable_bytes:
            return 0
        for halves in cycle((False, False, True)):
            if high - low <= 1:
                break
            if halves or high_bytes == math.inf:
                tried = (low + high) // 2
            else:
                share = (usable_bytes - low_bytes) / (high_bytes - low_bytes)
                tried = low + int(share * (high - low))
            tried = min(max(tried, low + 1), high - 1)  # strictly inside, so that each try makes the interval smaller
            needed_bytes = self._peak(sharding, recompute, tried)
            if needed_bytes > usable_bytes:
                high, high_bytes = tried, needed_bytes
            else:
                low, low_bytes = tried, needed_bytes
        return low


def _without_surplus(rows: Sequence[Row], surplus: int) -> tuple[Row, ...]:
    """Return the rows with ``surplus`` samples fewer in all, which one of the devices with most samples goes without."""
    if not surplus:
        return tuple(rows)
    largest = max(rows, key=lambda row: row.size)
    others = [row if row is not largest else row._replace(devices=row.devices - 1) for row in rows]
    return (*(row for row in others if row.devices), Row(largest.kind, 1, largest.size - surplus))
