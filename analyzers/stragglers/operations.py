"""What-if of a pipeline-parallel job from a table of its operations, as ByteDance's study does. Start at :func:`what_if`.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025). A step is played through by its
dependencies, every rank starting what it can at once: first with the durations as they were (T), then with each as long as
the mean of its class, transfers as the median (T_ideal). ``S = T / T_ideal`` (Equation 1); with only some operations ideal,
``(T - T_some) / (T - T_ideal)`` is what they explain: M_W of the slowest 3 % of the workers (Equation 5), M_S of the last
stage.

The dependencies are those of one data-parallel rank in one step; ranks and steps are played together, as vectors.
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
"""Kind, number within the stage's step, stage."""
COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc")
_PASSES = ("forward", "backward")
_TO_PEER = {("forward", "send"): 1, ("forward", "recv"): -1, ("backward", "send"): -1, ("backward", "recv"): 1}
_P2P = tuple(f"{way}-{side}" for way, side in _TO_PEER)
_GATHER, _SCATTER, _SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
_NORM, _EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
_CLIP, _OPTIMIZER = "optimizer-clip-main-grad", "optimizer"
_COMMUNICATION = frozenset([*_P2P, _GATHER, _SCATTER, _SEPARATE, _NORM, _EMBEDDING, _CLIP])
_OVER_REPLICAS = frozenset([_GATHER, _SCATTER, _SEPARATE, _CLIP])
_COMPUTE = tuple(f"{way}-compute" for way in _PASSES)
KNOWN = frozenset([*_COMMUNICATION, *_COMPUTE, _OPTIMIZER, "gc"])
# Times are cut to a fraction of a millisecond.
_SAME_S = 5e-5
# Clocks of machines differ by less: a transfer that ends so much before its peer comes is as much too long there.
_CLOCKS_S = 1e-2
_MOST_ROWS = 200_000_000
_LEAST_SLOWDOWN, _LEAST_EXPLAINED, _SEQUENCES = 1.05, 0.3, 0.9


@dataclass(frozen=True, kw_only=True, eq=False)
class Operations:
    """Operations of D data-parallel ranks over K steps, the same in each."""

    ops: list[Op]
    duration_s: Floats
    """(n, D, K)"""
    start_s: Floats
    """(n, D, K)"""
    rank: Ints
    """(D, stages)"""
    chunk: dict[Op, tuple[int, int]]
    """The model chunk of the stage and of the model that an operation belongs to."""
    steps: int


def read_operations(path: Path) -> Operations:
    """Return the operations in a parquet file with :data:`COLUMNS`, times in seconds.

    Raises InputError for what is no such file, for unknown operations, and where no step has all operations on all ranks.
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
    """Return the operations of a table with :data:`COLUMNS`. Raises InputError as :func:`read_operations` does."""
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
    cells = frame.drop_duplicates([*keys, "dp_rank", "step"]).pivot(
        index=keys, columns=["step", "dp_rank"], values=["duration", "start_ts"]
    )
    replicas = sorted({int(replica) for replica in frame["dp_rank"].unique()})
    lengths, begins = pd.DataFrame(cells["duration"]), pd.DataFrame(cells["start_ts"])
    there = pd.DataFrame(lengths.notna().T.groupby(level="step").sum()).T  # on how many data-parallel ranks
    there.loc[there.index.get_level_values("optype") == "gc", :] = len(replicas)  # it need not come in every step
    # Steps are alike where they have the same operations: the usual kind of those that all ranks have whole is taken.
    alike: dict[bytes, list[int]] = defaultdict(list)
    for step in there.columns[((there == len(replicas)) | (there == 0)).all(axis=0)]:
        alike[(there[step] > 0).to_numpy().tobytes()].append(int(step))
    steps = max(alike.values(), key=len, default=[])
    if not steps:
        raise InputError(where, "has no step with every operation on every rank", "give whole steps of one job")
    kept = (there[steps[0]] > 0).to_numpy()
    lengths, begins = lengths.loc[kept].fillna(0.0), begins.loc[kept]
    shape = (len(lengths), len(steps), len(replicas))
    wanted = pd.MultiIndex.from_product([steps, replicas])
    duration, start = (
        part.reindex(columns=wanted).to_numpy(dtype=np.float64).reshape(shape).transpose(0, 2, 1)
        for part in (lengths, begins)
    )
    start = np.nan_to_num(start - np.nanmin(start, axis=(0, 1), keepdims=True))
    ops = [(str(kind), int(number), int(stage)) for kind, number, stage in lengths.index]
    ranks = frame.drop_duplicates(["dp_rank", "stage"]).pivot(index="dp_rank", columns="stage", values="rank")
    named = frame[frame["step"].isin(steps)].drop_duplicates(keys)
    columns = [named[name].tolist() for name in (*keys, "mc", "gmc")]
    chunk = {(str(kind), int(n), int(s)): (int(mc), int(gmc)) for kind, n, s, mc, gmc in zip(*columns, strict=True)}
    return Operations(
        ops=ops, duration_s=duration, start_s=start, rank=ranks.to_numpy(dtype=np.int64), chunk=chunk, steps=len(steps)
    )


class Pipeline:
    """The dependencies of one step, and playing it through."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.number = {op: place for place, op in enumerate(operations.ops)}
        self.start = {op: float(operations.start_s[place, 0, 0]) for op, place in self.number.items()}
        self.end = {op: self.start[op] + float(operations.duration_s[self.number[op], 0, 0]) for op in self.number}
        self.stages = 1 + max(stage for _, _, stage in self.number)
        self.chunks = 1 + max(mc for mc, _ in operations.chunk.values())
        self.needs: dict[Op, set[Op]] = defaultdict(set)
        self.groups: list[list[Op]] = []
        pairs: dict[tuple[Op, Op], list[Op]] = defaultdict(list)
        for stage in range(self.stages):
            self._transfers(stage, pairs)
            self._order(stage)
        self.groups += list(pairs.values())
        self.groups += [[op] for op in self.number if op[0] in (_GATHER, _SCATTER, _SEPARATE)]
        self.groups += [[op for op in self.number if op[0] == kind] for kind in (_EMBEDDING, _CLIP)]
        self.groups = [group for group in self.groups if group]
        self.units = self._sorted()
        # What is recorded after the optimizer nobody waits for.
        updates = [place for op, place in self.number.items() if op[0] == _OPTIMIZER]
        self.last = updates or list(self.number.values())

    def _of(self, stage: int, *kinds: str) -> list[Op]:
        """Return a stage's operations of some kinds, by time."""
        found = [op for op in self.number if op[2] == stage and op[0] in kinds]
        return sorted(found, key=lambda op: (self.start[op], op[1], op[0]))

    def _chain(self, ops: Sequence[Op], after: Sequence[Op] = ()) -> None:
        for op in ops:
            self.needs[op].update(after)
            after = [op]

    def _transfers(self, stage: int, pairs: dict[tuple[Op, Op], list[Op]]) -> None:
        """Sends follow their compute, compute its receives; the n-th that is sent is the n-th that the next stage receives.

        The profiler also records transfers that nobody launched: at the ends of the step, and beyond the model's ends.
        """
        for (way, side), delta in _TO_PEER.items():
            transfers, compute = self._of(stage, f"{way}-{side}"), self._of(stage, f"{way}-compute")
            if not compute:
                continue
            last, first = max(self.start[op] for op in compute), min(self.end[op] for op in compute)
            if side == "recv":
                real = [op for op in transfers if self.start[op] <= last + _SAME_S]
            else:
                real = [op for op in transfers if self.end[op] >= first - _SAME_S]
            offset = 1 if side == "recv" and len(real) + 1 == len(compute) else 0
            valid = 0
            for place, op in enumerate(real, offset):
                own = (f"{way}-compute", place, stage)
                if own not in self.number:
                    self.groups.append([op])
                    continue
                if side == "send":
                    self.needs[op].add(own)
                else:
                    self.needs[own].add(op)
                    if (before := (own[0], place - 1, stage)) in self.number:
                        self.needs[op].add(before)
                if not 0 <= self.operations.chunk[own][1] + delta < self.chunks * self.stages:
                    self.groups.append([op])
                    continue
                peer = (f"{way}-{'recv' if side == 'send' else 'send'}", valid, (stage + delta) % self.stages)
                mine = (op[0], valid, stage)
                pairs[min(mine, peer), max(mine, peer)].append(op)
                valid += 1
            self.groups += [[op] for op in transfers if op not in real]

    def _order(self, stage: int) -> None:
        """What a stage does in order: compute, each kind of transfer, gradients and the optimizer after the last compute."""
        compute = self._of(stage, *_COMPUTE)
        self._chain(compute)
        for kind in _P2P:
            self._chain(self._of(stage, kind))
        first_back = next((place for place, op in enumerate(compute) if op[0] == "backward-compute"), 0)
        if first_back >= 2:
            for kind in ("backward-recv", "backward-send"):
                if (kind, 0, stage) in self.number:
                    self.needs[kind, 0, stage].add(compute[first_back - 2])
        gathers, scatters = self._of(stage, _GATHER), self._of(stage, _SCATTER)
        replicas = sorted([*gathers, *scatters], key=lambda op: (self.start[op], op[1], op[0]))
        self._chain(replicas)
        chunk = self.operations.chunk
        for mc, op in {chunk[op][0]: op for op in sorted(gathers, key=lambda op: op[1])}.items():
            uses = [one for one in compute if one[0] == "forward-compute" and chunk[one][0] == mc]
            if uses:
                self.needs[min(uses, key=self.start.__getitem__)].add(op)
        separate = self._of(stage, _SEPARATE)
        if separate:
            for mc, op in {chunk[op][0]: op for op in sorted(scatters, key=lambda op: -op[1])}.items():
                made = [one for one in compute if one[0] == "backward-compute" and chunk[one][0] == mc]
                if made:
                    self.needs[op].add(max(made, key=self.end.__getitem__))
        last = [max(compute, key=self.end.__getitem__)] if compute else []
        if collect := self._of(stage, "gc"):
            self._chain(collect, last)
            last = collect[-1:]
        between = separate if separate else scatters
        if separate and scatters:
            last = [*last, max(scatters, key=lambda op: op[1])]
        tail = [*self._of(stage, _NORM), *self._of(stage, _EMBEDDING), *between]
        self._chain([*tail, *self._of(stage, _CLIP), *self._of(stage, _OPTIMIZER)], last)

    def _sorted(self) -> list[list[Op]]:
        """Return operations, those that meet together, so that each comes after what it needs."""
        home: dict[Op, int] = {op: place for place, group in enumerate(self.groups) for op in group}
        units = [*self.groups, *([op] for op in self.number if op not in home)]
        home |= {group[0]: place for place, group in enumerate(units) if len(group) == 1}
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(len(units)))
        graph.add_edges_from((home[before], home[op]) for op, needed in self.needs.items() for before in needed)
        self.meets = {op for group in self.groups for op in group}
        try:
            return [units[place] for place in nx.lexicographical_topological_sort(graph)]
        except nx.NetworkXUnfeasible:
            problem = "operations wait for each other in a circle"
            raise InputError("operations", problem, "give the operations of whole steps of one job") from None

    def transfer_s(self) -> Floats:
        """Return (n, D, K) durations without the waiting for those that one meets."""
        start, made = self.operations.start_s, self.operations.duration_s.copy()
        end = start + made
        for group in self.groups:
            rows = [self.number[op] for op in group]
            came = start[rows].max(axis=0)
            if group[0][0] in _OVER_REPLICAS:
                came = np.broadcast_to(came.max(axis=0), came.shape)
            took = end[rows] - came
            made[rows] = np.where(took <= -_CLOCKS_S, 0.0, took)
        return made

    def play(self, length_s: Floats) -> Floats:
        """Return (K,) how long the steps take with operations of these lengths (n, D, K)."""
        end = np.zeros_like(length_s)
        for group in self.units:
            rows = [self.number[op] for op in group]
            begin = np.zeros(length_s.shape[1:])
            for op in group:
                for before in self.needs.get(op, ()):
                    np.maximum(begin, end[self.number[before]], out=begin)
            if group[0][0] in _OVER_REPLICAS:
                begin = np.broadcast_to(begin.max(axis=0), begin.shape)
            end[rows] = begin + length_s[rows]
        longest: Floats = end[self.last].max(axis=(0, 1))
        return longest


def ideal_s(operations: Operations, length_s: Floats) -> Floats:
    """Return (n, D, K) each operation as long as its class: the mean of compute, the median of communication."""
    kinds = np.array([kind for kind, _, _ in operations.ops])
    made = np.empty_like(length_s)
    for kind in np.unique(kinds):
        rows = kinds == kind
        made[rows] = np.median(length_s[rows]) if kind in _COMMUNICATION else np.mean(length_s[rows])
    return made


def what_if(operations: Operations) -> StragglersResult:
    """Return slowdown, M_W, M_S, what each class, stage and data-parallel rank costs alone, and the finding."""
    pipeline = Pipeline(operations)
    real = pipeline.transfer_s()
    ideal = ideal_s(operations, real)
    actual_s, ideal_step_s = float(pipeline.play(real).mean()), float(pipeline.play(ideal).mean())

    def alone(rows: Flags | slice, replica: int | slice = slice(None)) -> float:
        """Return the slowdown with all but some operations ideal."""
        length = ideal.copy()
        length[rows, replica] = real[rows, replica]
        return float(pipeline.play(length).mean()) / ideal_step_s

    def explained(rows: Flags, replica: int | slice = slice(None)) -> float:
        """Return the share of the slowdown that goes with some operations ideal."""
        length = real.copy()
        length[rows, replica] = ideal[rows, replica]
        return (actual_s - float(pipeline.play(length).mean())) / (actual_s - ideal_step_s)

    kinds = np.array([_class_of(kind) for kind, _, _ in operations.ops])
    stage = np.array([place for _, _, place in operations.ops])
    replicas, stages = operations.rank.shape
    classes = {kind: alone(kinds == kind) for kind in dict.fromkeys(kinds.tolist())}
    by_stage = [alone(stage == place) for place in range(stages)]
    by_replica = [alone(slice(None), place) for place in range(replicas)]
    places = itertools.product(range(replicas), range(stages))
    score = {place: min(by_replica[place[0]], by_stage[place[1]]) for place in places}
    order = sorted(score, key=lambda place: (-score[place], operations.rank[place]))
    slowdown = actual_s / ideal_step_s
    differs = abs(actual_s - ideal_step_s) > 1e-9
    worst = order[: -(-3 * len(order) // 100)]
    m_w = m_s = None
    if differs:
        length = real.copy()
        for replica, place in worst:
            length[stage == place, replica] = ideal[stage == place, replica]
        m_w = (actual_s - float(pipeline.play(length).mean())) / (actual_s - ideal_step_s)
        m_s = explained(stage == stages - 1)
    finding = _finding(operations, worst[0], slowdown, m_w or 0.0, m_s or 0.0)
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
        classes=classes,
        stages={f"stage {place}": value for place, value in enumerate(by_stage)},
        workers={f"data-parallel rank {place}": value for place, value in enumerate(by_replica)},
    )


def _class_of(kind: str) -> str:
    return f"{kind.split('-')[0]} transfers" if kind in _P2P else kind


def _finding(
    operations: Operations, worst: tuple[int, int], slowdown: float, m_w: float, m_s: float
) -> StragglerFinding | None:
    """Return whom the slowdown is of: a worker, the last stage, or sequences of unequal length."""
    if slowdown < _LEAST_SLOWDOWN:
        return None
    lost = 1.0 - 1.0 / slowdown

    def finding(
        cause: str, share: float, sentence: str, rank: int | None = None, ratio: float | None = None, **remedy: Any
    ) -> StragglerFinding:
        shares = {"share_of_steps": share, "share_of_run": share, "ratio": ratio, "excess_s": 0.0}
        steps = {"since_step": 0, "slow_steps": operations.steps}
        told = {"cause": cause, "pattern": "persistent", "part": "compute", "sentence": sentence}
        return StragglerFinding.model_validate({"rank": rank, **shares, **steps, **told, **remedy})

    compute = {kind: [place for place, op in enumerate(operations.ops) if op[0] == kind] for kind in _COMPUTE}
    if m_w >= _LEAST_EXPLAINED:
        replica, stage = worst
        rows = [row for kind in _COMPUTE for row in compute[kind] if operations.ops[row][2] == stage]
        mine, theirs = (
            operations.duration_s[rows, replica].mean(),
            np.delete(operations.duration_s[rows], replica, axis=1),
        )
        ratio = float(mine / theirs.mean()) if theirs.size else None
        rank, pace = int(operations.rank[worst]), ""
        if ratio is not None:
            pace = f" computes {ratio:.2f}x slower than its peers and"
        share, command = lost * min(m_w, 1.0), "ddltool plan job.yaml"
        sentence = (
            f"Rank {rank} (data-parallel rank {replica}, stage {stage}){pace} explains {m_w:.0%} of the slowdown: {share:.0%} "
            f"of every step (slow device). Take it out of the job, or give its replica less: {command}"
        )
        return finding("slow device", share, sentence, rank, ratio, predicted_gain=share, command=command)
    if m_s >= _LEAST_EXPLAINED:
        share = lost * min(m_s, 1.0)
        sentence = f"The last pipeline stage explains {m_s:.0%} of the slowdown: {share:.0%} of every step. "
        return finding("slow stage", share, sentence + "Give it fewer layers.")
    ahead, back = (operations.duration_s[compute[kind]].ravel() for kind in _COMPUTE)
    if len(ahead) == len(back) and ahead.std() > 0 and np.corrcoef(ahead, back)[0, 1] >= _SEQUENCES:
        sentence = (
            f"Sequences of unequal length: microbatches that are long forward are long backward; {lost:.0%} of every step "
            "(uneven work). Deal them out by their compute and not by their number."
        )
        return finding("uneven work", lost, sentence)
    return None
