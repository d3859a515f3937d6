"""Ends replays that would never end by themselves: starving jobs, training that comes to nothing, a hundred years."""

from __future__ import annotations

from collections.abc import Sequence

from ddltool.analyzers.scheduling.cluster import ClusterSpec
from ddltool.analyzers.scheduling.failures import NodeStates
from ddltool.analyzers.scheduling.job import SimulatedJob, Tuning
from ddltool.errors import Infeasible

YEAR_S = 31_536_000.0
# Rounds in which nothing runs and nothing is on its way, after which a policy is taken to starve its jobs for good.
_PATIENCE = 1000
# Rounds and seconds in which no job gets further than before, after which all training is taken to be undone.
_FUTILE = 10_000, 604_800.0
# From the first submission on. No workload that people replay lasts as long.
_LONGEST_S = 100 * YEAR_S
_NAMED_NODES, _NAMED_JOBS = 8, 3


class Watchdog:
    """Looks at every round of one replay under the policy called ``policy``; ``nodes``: None where none can fail."""

    def __init__(self, policy: str, nodes: NodeStates | None, first_submit_s: float) -> None:
        self.policy, self.nodes, self.first_submit_s = policy, nodes, first_submit_s
        self.rounds = self.idle = 0
        self.furthest: dict[int, float] = {}
        self.gained = 0, 0.0
        """Round and time at which a job last got further than ever."""

    def finished(self, now_s: float) -> None:
        """Take note that a job finished: one that is shorter than a round is never seen in one with progress."""
        self.gained = self.rounds, now_s

    def look(self, jobs: Sequence[SimulatedJob], up: ClusterSpec, now_s: float, *, more: bool) -> None:
        """Look at the jobs of a round; ``more``: some are still to come. Raises Infeasible where it is in vain to go on."""
        self.rounds += 1
        moving = more or any(job.allocation for job in jobs) or (self.nodes is not None and self.nodes.returns)
        self.idle = 0 if moving else self.idle + 1
        if self.idle > _PATIENCE:
            names = _listed([job.spec.name for job in jobs], _NAMED_JOBS)
            starved = f"policy {self.policy} gives no GPUs to {len(jobs)} jobs ({names}) any more"
            raise Infeasible(f"{self._cause(jobs, up)}{starved}")
        self._watch_progress(jobs, up, now_s)
        if now_s - self.first_submit_s > _LONGEST_S:
            names = _listed([job.spec.name for job in jobs], _NAMED_JOBS)
            raise Infeasible(
                f"after {_LONGEST_S / YEAR_S:.0f} simulated years under policy {self.policy} {len(jobs)} jobs are not done "
                f"({names}): check the units of times and batch sizes"
            )

    def _watch_progress(self, jobs: Sequence[SimulatedJob], up: ClusterSpec, now_s: float) -> None:
        """Raise Infeasible when for a long time no job has come further than it had been."""
        for job in jobs:
            if job.progress > self.furthest.get(job.index, 0.0):
                self.furthest[job.index] = job.progress
                self.gained = self.rounds, now_s
        if self.rounds - self.gained[0] > _FUTILE[0] and now_s - self.gained[1] > _FUTILE[1]:
            why = "restarts leave no time to train; shorten the restart delay or lengthen the interval"
            if self.nodes is not None:
                why = (
                    "failures undo what is trained, or too few nodes are up; shorten the checkpoint interval or lengthen "
                    "the MTBF"
                )
            problem = f"under policy {self.policy} no job has come further for {now_s - self.gained[1]:.0f} s: {why}"
            raise Infeasible(f"{self._cause(jobs, up)}{problem}")

    def _cause(self, jobs: Sequence[SimulatedJob], up: ClusterSpec) -> str:
        """Return which nodes are gone and which job needs them; "" where all nodes come back."""
        gone = sorted(self.nodes.gone) if self.nodes is not None else []
        if not gone:
            return ""
        stuck, wants = min(jobs, key=lambda job: (job.spec.submit_s, job.index)), 0
        for job in sorted(jobs, key=lambda job: (job.spec.submit_s, job.index)):
            most = max((up.gpus_of(name) for name in job.gpu_types), default=0)
            if job.tuning is Tuning.RIGID and job.spec.num_replicas > most:
                stuck, wants = job, job.spec.num_replicas
                break
        need = f" and it wants {wants} of the {up.total_gpus} GPUs that are left" if wants else ""
        nodes = _listed([str(node) for node in gone], _NAMED_NODES)
        noun, verb = ("node", "does") if len(gone) == 1 else ("nodes", "do")
        return f"job {stuck.spec.name} cannot run: {noun} {nodes} {verb} not come back{need}; "


def _listed(names: Sequence[str], most: int) -> str:
    return ", ".join([*names[:most], *(["..."] if len(names) > most else [])])
