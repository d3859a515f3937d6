"""A data-parallel job played through with known causes, written down as one profiler trace per rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PARTS = ("input", "forward", "backward", "optimizer", "host")
USUAL_MS = {"input": 1.0, "forward": 8.0, "backward": 16.0, "optimizer": 2.0, "host": 1.0}
TRANSFER_MS = 3.0
Slow = Callable[[int, int, dict[str, float]], float]
"""Changes a rank's parts in a step, and returns how long it stands still in its backward pass, all in milliseconds."""


def event(name: str, category: str, start_ms: float, length_ms: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    found = {
        **{"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid},
        **{"ts": start_ms * 1e3, "dur": length_ms * 1e3},
    }
    return {**found, "args": args}


def write_run(
    folder: Path,
    slow: Slow = lambda rank, step, parts: 0.0,
    *,
    ranks: int = 4,
    steps: int = 20,
    gpu: bool = False,
    offsets_ms: tuple[float, ...] = (),
    noise: float = 0.01,
    seed: int = 0,
    elements: Callable[[int, int], int] | None = None,
    late: Callable[[int, int], float] = lambda rank, step: 0.0,
    groups: Sequence[Sequence[Sequence[int]]] = (),
) -> tuple[list[Path], dict[str, np.ndarray]]:
    """Return the traces, and the truth in milliseconds: each rank's parts, waiting and step (ranks, steps).

    With ``offsets_ms`` each rank has its own clock and machine. ``elements`` gives the size of a rank's tensors in a step;
    ``late`` how much later a rank sees a step's transfer end; ``groups`` who communicates with whom, one transfer after the
    other (all with all, once).
    """
    chance = np.random.default_rng(seed)
    events: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    truth = {name: np.zeros((ranks, steps)) for name in (*PARTS, "wait", "step")}
    now = np.zeros(ranks)
    for step in range(steps):
        begin, still, parts = now.copy(), np.zeros(ranks), []
        for rank in range(ranks):
            mine = {name: length * (1 + noise * abs(chance.standard_normal())) for name, length in USUAL_MS.items()}
            still[rank] = slow(rank, step, mine)
            parts.append(mine)
            for name in PARTS:
                truth[name][rank, step] = mine[name] + (still[rank] if name == "backward" else 0.0)
        ahead = [sum(mine[name] for name in ("input", "forward", "backward")) for mine in parts]
        arrival = begin + ahead + still
        meetings = []  # of each transfer: the groups, when each rank comes and when its own is over
        came = arrival
        for among in groups or [[range(ranks)]]:
            over = np.zeros(ranks)
            for members in among:
                over[list(members)] = came[list(members)].max() + TRANSFER_MS
            meetings.append((among, came, over))
            truth["wait"][:, step] += over - TRANSFER_MS - came
            came = over
        for rank, mine in enumerate(parts):
            add, at = events[rank].append, float(begin[rank])
            dims = {} if elements is None else {"Input Dims": [[elements(rank, step), 4], [4, 4], []]}
            compute = _gpu if gpu else _cpu
            add(event("enumerate(DataLoader)#_Iter.__next__", "user_annotation", at, mine["input"]))
            at += mine["input"]
            compute(add, "aten::mm", at, mine["forward"], dims)
            at += mine["forward"]
            half = mine["backward"] / 2
            back = "autograd::engine::evaluate_function: MmBackward0"
            for start in (at, at + half + still[rank]):
                add(event(back, "cpu_op", start, half))
                compute(add, "aten::mm", start, half, dims)
            for place, (among, came, over) in enumerate(meetings):
                comes, done = float(came[rank]), float(over[rank]) + late(rank, step)
                if gpu:
                    number = 10**6 + 10 * step + place
                    add(event("cudaLaunchKernel", "cuda_runtime", comes - 0.01, 0.005, correlation=number))
                    mine_with = next(list(members) for members in among if rank in members)
                    args = {"correlation": number, "Process Group Ranks": str(mine_with), "device": 0}
                    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
                    add(event(kernel, "kernel", comes, done - comes, 7, **args))
                else:
                    add(event("gloo:all_reduce", "user_annotation", comes, done - comes, 2))
            copied = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
            add(event(copied, "cpu_op", done, 0.0))
            add(event("Optimizer.step#SGD.step", "user_annotation", done, mine["optimizer"]))
            compute(add, "aten::add_", done, mine["optimizer"], {})
            now[rank] = done + mine["optimizer"] + mine["host"]
            add(
                event(f"ProfilerStep#{step + 5}", "user_annotation", float(begin[rank]), float(now[rank] - begin[rank]))
            )
        truth["step"][:, step] = now - begin
    paths = []
    for rank in range(ranks):
        off = offsets_ms[rank] if offsets_ms else 0.0
        header = {
            "distributedInfo": {"rank": rank, "world_size": ranks},
            "host_name": f"node{rank}" if offsets_ms else "one",
        }
        moved = [{**one, "ts": one["ts"] + (1e9 + off * 1e3)} for one in events[rank]]
        folder.mkdir(parents=True, exist_ok=True)
        paths.append(folder / f"trace{rank}.json")
        paths[-1].write_text(json.dumps({**header, "traceEvents": moved}))
    return paths, truth


def _cpu(add: Callable[[dict[str, Any]], None], name: str, start: float, length: float, args: dict[str, Any]) -> None:
    add(event(name, "cpu_op", start, length, **args))


def _gpu(add: Callable[[dict[str, Any]], None], name: str, start: float, length: float, args: dict[str, Any]) -> None:
    """The host calls and the device runs at once, for as long."""
    number = round(start * 1e4)
    add(event(name, "cpu_op", start, 0.02, **args))
    add(event("cudaLaunchKernel", "cuda_runtime", start + 0.005, 0.005, correlation=number))
    add(event("gemm", "kernel", start + 0.02, length - 0.02, 7, correlation=number, device=0))
