"""What-if of a pipeline-parallel job from a table of its operations, as ByteDance's study does. Start at :func:`what_if`.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025). A step is replayed by its
dependencies, each operation starting as soon as they allow: first with the recorded durations, which takes T, then with each
at the mean of its class (transfers at the median), which takes T_ideal. The slowdown is ``S = T / T_ideal`` (Equation 1). If
the step takes T_some with only some operations ideal, these explain the share ``(T - T_some) / (T - T_ideal)`` of it: M_W for
the slowest 3 % of the workers (Equation 5), M_S for the last stage.

The dependencies are those of one data-parallel rank in one step; all ranks and steps are replayed together. Array shapes:
n operations of a step, D data-parallel ranks, K steps; all times are in seconds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd

from ddltool.arrays import Flags, Floats, Ints
from ddltool.errors import InputError
from ddltool.results import StragglerFinding, StragglersResult
from ddltool.tables import demand_columns

Op = tuple[str, int, int]
"""Kind of operation, its index among those of this kind in the stage's step, and the stage."""
COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc")
_PASSES = ("forward", "backward")
# (pass, side of a transfer) -> stage of the peer minus own stage.
_TO_PEER = {("forward", "send"): 1, ("forward", "recv"): -1, ("backward", "send"): -1, ("backward", "recv"): 1}
_P2P = tuple(f"{way}-{side}" for way, side in _TO_PEER)
# Kinds of operations, as ByteDance's traces spell them.
_GATHER, _SCATTER, _SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
_NORM, _EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
_CLIP, _OPTIMIZER = "optimizer-clip-main-grad", "optimizer"
_COMMUNICATION = frozenset([*_P2P, _GATHER, _SCATTER, _SEPARATE, _NORM, _EMBEDDING, _CLIP])
# Collectives over all data-parallel ranks: they begin when the last rank is there.
_OVER_REPLICAS = frozenset([_GATHER, _SCATTER, _SEPARATE, _CLIP])
_COMPUTE = tuple(f"{way}-compute" for way in _PASSES)
KNOWN = frozenset([*_COMMUNICATION, *_COMPUTE, _OPTIMIZER, "gc"])
# Recorded times are rounded to a fraction of a millisecond, so moments this close count as the same.
_ROUNDING_S = 5e-5
# Clocks of different machines differ by less than this, in seconds.
_CLOCK_DIFFERENCE_S = 1e-2
_MOST_ROWS = 200_000_000
# Slowdown from which on a cause is named; share of it that a cause must explain.
_LEAST_SLOWDOWN, _LEAST_EXPLAINED = 1.05, 0.3
# Correlation of forward with backward durations from which on sequences of unequal length count as the cause.
_SEQUENCES = 0.9


@dataclass(frozen=True, kw_only=True, eq=False)
class Operations:
    """The n operations of a step, the same in each of D data-parallel ranks and K steps."""

    ops: list[Op]
    duration_s: Floats
    """(n, D, K) recorded durations, waiting for peers included."""
    start_s: Floats
    """(n, D, K) starts since the step's start; 0 for an operation that is absent (garbage collection may be)."""
    rank: Ints
    """(D, stages) global rank of each worker."""
    chunk: dict[Op, tuple[int, int]]
    """Operation -> (index of its model chunk within the stage, index within the model); -1: it belongs to no chunk."""
    steps: int
    """Number of steps, K."""


def read_operations(path: Path) -> Operations:
    """Return the operations in a parquet file with :data:`COLUMNS`, times in seconds.

    Raises InputError for another kind of file, for unknown operations, and where no step has all operations on all ranks.
    """
    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise InputError(str(path), "needs pyarrow to be read", "pip install 'ddltool[parquet]'") from None
    except (OSError, ValueError) as error:
        raise InputError(str(path), f"is no parquet file ({str(error)[:120]})", "one operation a row") from None
    demand_columns(frame, COLUMNS, str(path))
    if not 0 < len(frame) <= _MOST_ROWS:
        raise InputError(str(path), f"has {len(frame):,} rows", f"1 to {_MOST_ROWS:,}")
    return of_frame(frame, str(path))


def of_frame(frame: pd.DataFrame, where: str) -> Operations:
    """Return the operations of a table with :data:`COLUMNS`, one operation per row.

    Steps that lack an operation on some rank are left out; of the others, the largest group of steps with the same operations
    is kept. Raises InputError, with ``where`` as the file, as :func:`read_operations` does.
    """
    frame = frame.assign(optype=frame["optype"].astype(str))
    unknown = sorted(set(frame["optype"]) - KNOWN - {"first-op"})
    if unknown:
        raise InputError(f"{where}:optype", f"has {unknown[0]!r}", f"known are {', '.join(sorted(KNOWN))}")
    times = frame[["start_ts", "duration"]].to_numpy(dtype=np.float64)
    if not (np.isfinite(times).all() and (times[:, 1] >= 0).all()):
        row = int(np.argmax(~np.isfinite(times).all(axis=1) | ~(times[:, 1] >= 0)))
        raise InputError(f"{where}:row {row + 1}:duration", f"is {times[row, 1]}", "finite seconds, at least 0")
    frame = frame[frame["optype"] != "first-op"]
    frame = frame.fillna({"mc": -1, "gmc": -1})
    keys = ["optype", "seq_id", "stage"]
    # A row for each operation, a column for each step and data-parallel rank.
    cells = frame.drop_duplicates([*keys, "dp_rank", "step"]).pivot(
        index=keys, columns=["step", "dp_rank"], values=["duration", "start_ts"]
    )
    replicas = sorted({int(replica) for replica in frame["dp_rank"].unique()})
    durations, starts = pd.DataFrame(cells["duration"]), pd.DataFrame(cells["start_ts"])
    steps, has_operation = _whole_steps(durations, len(replicas))
    if not steps:
        raise InputError(where, "has no step with every operation on every rank", "give whole steps of one job")
    durations, starts = durations.loc[has_operation].fillna(0.0), starts.loc[has_operation]
    shape = (len(durations), len(steps), len(replicas))
    index = pd.MultiIndex.from_product([steps, replicas])
    duration, start = (
        table.reindex(columns=index).to_numpy(dtype=np.float64).reshape(shape).transpose(0, 2, 1)
        for table in (durations, starts)
    )
    start = np.nan_to_num(start - np.nanmin(start, axis=(0, 1), keepdims=True))
    ops = [(str(kind), int(sequence_id), int(stage)) for kind, sequence_id, stage in durations.index]
    ranks = frame.drop_duplicates(["dp_rank", "stage"]).pivot(index="dp_rank", columns="stage", values="rank")
    first_rows = frame[frame["step"].isin(steps)].drop_duplicates(keys)
    columns = [first_rows[name].tolist() for name in (*keys, "mc", "gmc")]
    chunk = {(str(kind), int(n), int(s)): (int(mc), int(gmc)) for kind, n, s, mc, gmc in zip(*columns, strict=True)}
    return Operations(
        ops=ops, duration_s=duration, start_s=start, rank=ranks.to_numpy(dtype=np.int64), chunk=chunk, steps=len(steps)
    )


def _whole_steps(durations: pd.DataFrame, replicas: int) -> tuple[list[int], Flags]:
    """Return the steps to keep, and (rows,) which operations (rows of ``durations``) these steps have.

    ``durations`` has a column per step and data-parallel rank (there are ``replicas`` ranks), NaN where that lacks the
    operation. A step is whole if all ranks have the same operations in it. Of the whole steps, the largest group with the same
    operations is kept; ([], all False) where there is none.
    """
    # Number of ranks that have an operation (row) in a step (column). Garbage collection may be absent: it counts as present
    # everywhere, so that it neither makes a step incomplete nor splits a group.
    rank_count = pd.DataFrame(durations.notna().T.groupby(level="step").sum()).T
    rank_count.loc[rank_count.index.get_level_values("optype") == "gc", :] = replicas
    is_complete = ((rank_count == replicas) | (rank_count == 0)).all(axis=0)
    steps_by_operations: dict[bytes, list[int]] = defaultdict(list)
    for step in rank_count.columns[is_complete]:
        steps_by_operations[(rank_count[step] > 0).to_numpy().tobytes()].append(int(step))
    steps = max(steps_by_operations.values(), key=len, default=[])
    if not steps:
        return [], np.zeros(len(durations), dtype=bool)
    return steps, (rank_count[steps[0]] > 0).to_numpy()


class Pipeline:
    """The dependency graph of one step, and its replay.

    ``needs``: operation -> operations that must end before it starts; ``groups``: lists of operations that start together, when
    the last of them is ready (send and receive, collectives); ``units``: groups and single operations in topological order;
    ``number``: operation -> row in the arrays; ``last``: rows of the operations that end a step; ``start`` and ``end``:
    operation -> seconds in the first rank's first step; ``chunks``: parts of the model's layers that a stage holds.
    """

    def __init__(self, operations: Operations) -> None:
        """Derive the dependencies of a step from kinds, stages and the order in the first rank's first step."""
        self.operations = operations
        self.number = {op: index for index, op in enumerate(operations.ops)}
        self.start = {op: float(operations.start_s[index, 0, 0]) for op, index in self.number.items()}
        self.end = {op: self.start[op] + float(operations.duration_s[self.number[op], 0, 0]) for op in self.number}
        self.stages = 1 + max(stage for _, _, stage in self.number)
        self.chunks = 1 + max(mc for mc, _ in operations.chunk.values())
        self.needs: dict[Op, set[Op]] = defaultdict(set)
        self.groups: list[list[Op]] = []
        pairs: dict[tuple[Op, Op], list[Op]] = defaultdict(list)
        for stage in range(self.stages):
            self._pair_transfers(stage, pairs)
            self._chain_stage(stage)
        self.groups += list(pairs.values())
        self.groups += [[op] for op in self.number if op[0] in (_GATHER, _SCATTER, _SEPARATE)]
        self.groups += [[op for op in self.number if op[0] == kind] for kind in (_EMBEDDING, _CLIP)]
        self.groups = [group for group in self.groups if group]
        self.units = self._topological_units()
        # A step ends with its optimizers; nothing waits for operations recorded after them.
        updates = [index for op, index in self.number.items() if op[0] == _OPTIMIZER]
        self.last = updates or list(self.number.values())

    def _ops_by_start(self, stage: int, *kinds: str) -> list[Op]:
        """Return a stage's operations of the given ``kinds``, by their start in the first rank's first step."""
        ops = [op for op in self.number if op[2] == stage and op[0] in kinds]
        return sorted(ops, key=lambda op: (self.start[op], op[1], op[0]))

    def _chain(self, ops: Sequence[Op], after: Sequence[Op] = ()) -> None:
        """Make each operation depend on the one before it, and the first one on all of ``after``."""
        for op in ops:
            self.needs[op].update(after)
            after = [op]

    def _pair_transfers(self, stage: int, pairs: dict[tuple[Op, Op], list[Op]]) -> None:
        """Make a stage's sends depend on their compute and its compute on receives; add sends and receives to ``pairs``.

        ``pairs``: (key of one side, key of the other) -> operations of both sides. The i-th valid send of a stage meets the
        i-th valid receive of its neighbour. The profiler also records transfers that were never launched, before the first or
        after the last compute or beyond the model's first or last chunk: these stay unpaired.
        """
        for (way, side), delta in _TO_PEER.items():
            transfers = self._ops_by_start(stage, f"{way}-{side}")
            compute = self._ops_by_start(stage, f"{way}-compute")
            if not compute:
                continue
            last_start_s = max(self.start[op] for op in compute)
            first_end_s = min(self.end[op] for op in compute)
            if side == "recv":
                launched = [op for op in transfers if self.start[op] <= last_start_s + _ROUNDING_S]
            else:
                launched = [op for op in transfers if self.end[op] >= first_end_s - _ROUNDING_S]
            # With one receive less than computations, the first computation reads the batch and receives nothing.
            offset = 1 if side == "recv" and len(launched) + 1 == len(compute) else 0
            valid_count = 0
            for compute_index, op in enumerate(launched, offset):
                own_compute = (f"{way}-compute", compute_index, stage)
                if own_compute not in self.number:
                    self.groups.append([op])
                    continue
                if side == "send":
                    self.needs[op].add(own_compute)
                else:
                    self.needs[own_compute].add(op)
                    previous_compute = (own_compute[0], compute_index - 1, stage)
                    if previous_compute in self.number:
                        self.needs[op].add(previous_compute)
                peer_chunk = self.operations.chunk[own_compute][1] + delta
                if not 0 <= peer_chunk < self.chunks * self.stages:  # the model begins or ends here: no peer
                    self.groups.append([op])
                    continue
                peer = (f"{way}-{'recv' if side == 'send' else 'send'}", valid_count, (stage + delta) % self.stages)
                own_key = (op[0], valid_count, stage)
                pairs[min(own_key, peer), max(own_key, peer)].append(op)
                valid_count += 1
            self.groups += [[op] for op in transfers if op not in launched]

    def _chain_stage(self, stage: int) -> None:
        """Add the dependencies within one stage: computations, transfers of each kind, and the update run in sequence.

        The first backward transfers depend on the warm-up's last forward (the second last before the first backward), because
        the schedule launches them after it.
        """
        compute = self._ops_by_start(stage, *_COMPUTE)
        self._chain(compute)
        for kind in _P2P:
            self._chain(self._ops_by_start(stage, kind))
        first_back = next((index for index, op in enumerate(compute) if op[0] == "backward-compute"), 0)
        if first_back >= 2:
            for kind in ("backward-recv", "backward-send"):
                if (kind, 0, stage) in self.number:
                    self.needs[kind, 0, stage].add(compute[first_back - 2])
        self._chain(self._ops_by_start(stage, _GATHER, _SCATTER))
        self._tie_to_chunks(stage, compute)
        self._chain_update(stage, compute)

    def _tie_to_chunks(self, stage: int, compute: Sequence[Op]) -> None:
        """Make a chunk's first forward depend on its gathered parameters, and its gradients' reduction on its last backward.

        ``compute``: the stage's computations. A chunk is a part of the model's layers; a stage may hold several.
        """
        chunk = self.operations.chunk

        def of_chunk(kind: str, chunk_index: int) -> list[Op]:
            """Return the stage's computations of one kind on the model chunk ``chunk_index``."""
            return [op for op in compute if op[0] == kind and chunk[op][0] == chunk_index]

        gathers = sorted(self._ops_by_start(stage, _GATHER), key=lambda op: op[1])
        # The dictionaries keep the last operation of each chunk in iteration order; scatters are in reverse, so their first.
        for chunk_index, last_gather in {chunk[op][0]: op for op in gathers}.items():
            if forwards := of_chunk("forward-compute", chunk_index):
                self.needs[min(forwards, key=self.start.__getitem__)].add(last_gather)
        if not self._ops_by_start(stage, _SEPARATE):
            return
        scatters = sorted(self._ops_by_start(stage, _SCATTER), key=lambda op: -op[1])
        for chunk_index, first_scatter in {chunk[op][0]: op for op in scatters}.items():
            if backwards := of_chunk("backward-compute", chunk_index):
                self.needs[first_scatter].add(max(backwards, key=self.end.__getitem__))

    def _chain_update(self, stage: int, compute: Sequence[Op]) -> None:
        """Make the operations after a stage's last computation (the last of ``compute`` to end) depend on each other in turn.

        They are garbage collection, the norms' and embeddings' gradients, the reduction of gradients, clip and optimizer.
        """
        before = [max(compute, key=self.end.__getitem__)] if compute else []
        collections = self._ops_by_start(stage, "gc")
        if collections:
            self._chain(collections, before)
            before = collections[-1:]
        reductions = self._ops_by_start(stage, _SEPARATE)
        scatters = self._ops_by_start(stage, _SCATTER)
        if reductions and scatters:
            # scatters depend on their chunks' backward passes (:meth:`_tie_to_chunks`), so the update only waits for the last
            before = [*before, max(scatters, key=lambda op: op[1])]
        closing = [*self._ops_by_start(stage, _NORM), *self._ops_by_start(stage, _EMBEDDING), *(reductions or scatters)]
        self._chain([*closing, *self._ops_by_start(stage, _CLIP), *self._ops_by_start(stage, _OPTIMIZER)], before)

    def _topological_units(self) -> list[list[Op]]:
        """Return groups, and the other operations as lists of one, in an order in which each comes after those it needs.

        Raises InputError where operations depend on each other in a circle.
        """
        unit_of: dict[Op, int] = {op: index for index, group in enumerate(self.groups) for op in group}
        units = [*self.groups, *([op] for op in self.number if op not in unit_of)]
        unit_of |= {unit[0]: index for index, unit in enumerate(units) if len(unit) == 1}
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(len(units)))
        graph.add_edges_from((unit_of[before], unit_of[op]) for op, needed in self.needs.items() for before in needed)
        try:
            return [units[index] for index in nx.lexicographical_topological_sort(graph)]
        except nx.NetworkXUnfeasible:
            problem = "operations wait for each other in a circle"
            raise InputError("operations", problem, "give the operations of whole steps of one job") from None

    def transfer_s(self) -> Floats:
        """Return (n, D, K) durations in seconds without waiting: a transfer begins when its last peer does.

        A negative duration above -10 ms is kept, because clocks of machines may differ by that much, and then the peer's
        duration is too long by as much. At or below -10 ms clocks cannot explain it, and the duration becomes 0.
        """
        start_s = self.operations.start_s
        durations_s = self.operations.duration_s.copy()
        end_s = start_s + durations_s
        for group in self.groups:
            rows = [self.number[op] for op in group]
            last_peer_s = start_s[rows].max(axis=0)
            if group[0][0] in _OVER_REPLICAS:
                last_peer_s = np.broadcast_to(last_peer_s.max(axis=0), last_peer_s.shape)
            without_wait_s = end_s[rows] - last_peer_s
            durations_s[rows] = np.where(without_wait_s <= -_CLOCK_DIFFERENCE_S, 0.0, without_wait_s)
        return durations_s

    def play(self, length_s: Floats) -> Floats:
        """Return the step times (K,) in seconds of a replay with operations of the durations ``length_s`` (n, D, K).

        Each operation starts as soon as its dependencies have ended, and a group when all of its operations can start.
        """
        end_s = np.zeros_like(length_s)
        for group in self.units:
            rows = [self.number[op] for op in group]
            start_s = np.zeros(length_s.shape[1:])
            for op in group:
                for needed in self.needs.get(op, ()):
                    np.maximum(start_s, end_s[self.number[needed]], out=start_s)
            if group[0][0] in _OVER_REPLICAS:
                start_s = np.broadcast_to(start_s.max(axis=0), start_s.shape)
            end_s[rows] = start_s + length_s[rows]
        step_s: Floats = end_s[self.last].max(axis=(0, 1))
        return step_s


def ideal_s(operations: Operations, length_s: Floats) -> Floats:
    """Return ideal durations (n, D, K): the mean of each kind of compute, and the median of each kind of communication.

    Communication has few but large outliers, which would raise a mean.
    """
    kinds = np.array([kind for kind, _, _ in operations.ops])
    ideal = np.empty_like(length_s)
    for kind in np.unique(kinds):
        rows = kinds == kind
        ideal[rows] = np.median(length_s[rows]) if kind in _COMMUNICATION else np.mean(length_s[rows])
    return ideal


def what_if(operations: Operations) -> StragglersResult:
    """Return the slowdown S, the shares of it that the slowest workers and the last stage explain (M_W, M_S), and the finding.

    The result also has the slowdowns with only one class of operations, one stage or one data-parallel rank at its real
    durations, and everything else ideal.
    """
    pipeline = Pipeline(operations)
    real = pipeline.transfer_s()
    ideal = ideal_s(operations, real)
    actual_s = float(pipeline.play(real).mean())
    ideal_step_s = float(pipeline.play(ideal).mean())
    all_chosen = np.ones(real.shape[:2], dtype=bool)

    def slowdown_of(chosen: Flags) -> float:
        """Return the slowdown when only the ``chosen`` operations (n, D) keep their real durations."""
        return float(pipeline.play(np.where(chosen[:, :, None], real, ideal)).mean()) / ideal_step_s

    def explained_by(chosen: Flags) -> float | None:
        """Return the share of the slowdown that vanishes with the ``chosen`` operations (n, D) ideal; None without slowdown."""
        if abs(actual_s - ideal_step_s) <= 1e-9:  # less than a nanosecond is rounding
            return None
        left_s = float(pipeline.play(np.where(chosen[:, :, None], ideal, real)).mean())
        return (actual_s - left_s) / (actual_s - ideal_step_s)

    kinds = np.array([_class_of(kind) for kind, _, _ in operations.ops])[:, None]
    stage = np.array([index for _, _, index in operations.ops])[:, None]
    replicas, stages = operations.rank.shape
    replica = np.arange(replicas)
    by_stage = [slowdown_of(all_chosen & (stage == index)) for index in range(stages)]
    by_replica = [slowdown_of(all_chosen & (replica == index)) for index in range(replicas)]
    workers = itertools.product(range(replicas), range(stages))
    # A worker's own slowdown is taken as the smaller one of its replica's and its stage's, which saves a replay per worker.
    score = {(row, index): min(by_replica[row], by_stage[index]) for row, index in workers}
    order = sorted(score, key=lambda worker: (-score[worker], operations.rank[worker]))
    slowest = order[: -(-3 * len(order) // 100)]  # 3 % of the workers, rounded up
    m_w = explained_by(np.logical_or.reduce([(replica == row) & (stage == index) for row, index in slowest]))
    m_s = explained_by(all_chosen & (stage == stages - 1))
    slowdown = actual_s / ideal_step_s
    finding = _finding(operations, slowest[0], slowdown, m_w or 0.0, m_s or 0.0)
    verdict = finding.sentence if finding else f"No worker and no stage explains the slowdown of {slowdown:.3f}."
    return StragglersResult(
        source="operations",
        ranks=operations.rank.size,
        steps=operations.steps,
        step_s=actual_s,
        ideal_step_s=ideal_step_s,
        slowdown=slowdown,
        m_w=m_w,
        m_s=m_s,
        verdict=verdict,
        findings=[finding] if finding else [],
        splits=[],
        classes={kind: slowdown_of(all_chosen & (kinds == kind)) for kind in dict.fromkeys(kinds[:, 0].tolist())},
        stages={f"stage {index}": value for index, value in enumerate(by_stage)},
        workers={f"data-parallel rank {index}": value for index, value in enumerate(by_replica)},
    )


def _class_of(kind: str) -> str:
    """Return the class under which a kind of operation is shown: sends and receives of one pass count together."""
    return f"{kind.split('-')[0]} transfers" if kind in _P2P else kind


def _finding(
    operations: Operations, worst: tuple[int, int], slowdown: float, m_w: float, m_s: float
) -> StragglerFinding | None:
    """Return the finding on the slowdown's cause: a worker, the last stage, or unequal sequences; None: no cause explains it.

    Args:
        worst: data-parallel rank and stage of the slowest worker.
        slowdown: S, the step over the ideal step.
        m_w: share of the slowdown that the slowest workers explain.
        m_s: share that the last stage explains.
    """
    if slowdown < _LEAST_SLOWDOWN:
        return None
    lost = 1.0 - 1.0 / slowdown  # share of a step

    def finding(
        cause: str, share: float, sentence: str, rank: int | None = None, ratio: float | None = None, **remedy: Any
    ) -> StragglerFinding:
        """Return the record of a finding that holds in every step; ``remedy``: its predicted gain and command, if any."""
        return StragglerFinding(
            rank=rank,
            cause=cause,
            pattern="persistent",
            part="compute",
            since_step=0,
            slow_steps=operations.steps,
            ratio=ratio,
            excess_s=0.0,
            share_of_steps=share,
            share_of_run=share,
            sentence=sentence,
            **remedy,
        )

    compute = {kind: [index for index, op in enumerate(operations.ops) if op[0] == kind] for kind in _COMPUTE}
    if m_w >= _LEAST_EXPLAINED:  # 1. a worker: its computations against those of its peers in the same stage
        replica, stage = worst
        rows = [row for kind in _COMPUTE for row in compute[kind] if operations.ops[row][2] == stage]
        worker_s = operations.duration_s[rows, replica].mean()
        peers_s = np.delete(operations.duration_s[rows], replica, axis=1)
        ratio = float(worker_s / peers_s.mean()) if peers_s.size else None
        rank = int(operations.rank[worst])
        pace = "" if ratio is None else f" computes {ratio:.2f}x slower than its peers and"
        share = lost * min(m_w, 1.0)
        command = "ddltool plan job.yaml"
        sentence = (
            f"Rank {rank} (data-parallel rank {replica}, stage {stage}){pace} explains {m_w:.0%} of the slowdown: {share:.0%} "
            f"of every step (slow device). Take it out of the job, or give its replica less: {command}"
        )
        return finding("slow device", share, sentence, rank, ratio, predicted_gain=share, command=command)
    if m_s >= _LEAST_EXPLAINED:  # 2. the last stage, which also computes the loss
        share = lost * min(m_s, 1.0)
        sentence = f"The last pipeline stage explains {m_s:.0%} of the slowdown: {share:.0%} of every step. "
        return finding("slow stage", share, sentence + "Give it fewer layers.")
    # 3. microbatches that are long in both passes
    forward_s, backward_s = (operations.duration_s[compute[kind]].ravel() for kind in _COMPUTE)
    if (
        len(forward_s) == len(backward_s)
        and forward_s.std() > 0
        and np.corrcoef(forward_s, backward_s)[0, 1] >= _SEQUENCES
    ):
        sentence = (
            f"Sequences of unequal length: microbatches that are long forward are long backward; {lost:.0%} of every step "
            "(uneven work). Deal them out by their compute and not by their number."
        )
        return finding("uneven work", lost, sentence)
    return None
