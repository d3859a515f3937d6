"""ElasticBSP's three algorithms written down as published, for comparison: lists, sets and loops.

Algorithm 1 (GridScan, and FullGridScan which rotates its designated row) and Algorithm 2 (ZipLine, whose set Z is a list
kept in the order of Omega and searched for the duplicate of every element taken). Timestamps equal across workers are
taken in the order of the workers, where the paper says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]
Chosen = list[tuple[float, int, int]]  # (end, worker, iteration from 1)


def spread(chosen: Chosen) -> float:
    """Return the seconds between the first and the last end of a set: its waiting time."""
    return max(chosen)[0] - min(chosen)[0]


def zipline(matrix: Matrix) -> tuple[float, Chosen]:
    """Return ZipLine's waiting time and set; ``matrix``: predicted ends in seconds, one row a worker."""
    workers = len(matrix)
    omega = [(end, worker, place) for worker, row in enumerate(matrix) for place, end in enumerate(row, start=1)]
    omega.sort()
    position = 0
    taken: Chosen = []
    while len(taken) < workers:
        replace(taken, omega[position])
        position += 1
    best, least = list(taken), taken[-1][0] - taken[0][0]
    while position < len(omega):
        del taken[0]
        while len(taken) < workers and position < len(omega):
            replace(taken, omega[position])
            position += 1
        if len(taken) < workers:
            break  # the removed worker has no further end: no later set is complete
        waiting = taken[-1][0] - taken[0][0]
        if waiting < least:
            best, least = list(taken), waiting
    return least, best


def replace(taken: Chosen, element: tuple[float, int, int]) -> None:
    """Append an element to the set, in place of the same worker's earlier one."""
    for index, (_, worker, _) in enumerate(taken):
        if worker == element[1]:
            del taken[index]
            break
    taken.append(element)


def gridscan(matrix: Matrix, designated: int | None = None) -> tuple[float, Chosen]:
    """Return GridScan's waiting time and set: each worker's end nearest to each end of the designated one (who ends first)."""
    if designated is None:
        designated = min(range(len(matrix)), key=lambda worker: matrix[worker][0])
    best: Chosen = []
    least = float("inf")
    for place, end in enumerate(matrix[designated], start=1):
        chosen = [(end, designated, place)]
        for worker, row in enumerate(matrix):
            if worker == designated:
                continue
            nearest, at = abs(row[0] - end), 0
            for other in range(1, len(row)):
                distance = abs(row[other] - end)
                if distance < nearest:
                    nearest, at = distance, other
            chosen.append((row[at], worker, at + 1))
        waiting = spread(chosen)
        if waiting < least:
            best, least = chosen, waiting
    return least, best


def full_gridscan(matrix: Matrix) -> tuple[float, Chosen]:
    """Return FullGridScan's waiting time and set: the best of GridScan with every worker designated in turn."""
    best: Chosen = []
    least = float("inf")
    for designated in range(len(matrix)):
        waiting, chosen = gridscan(matrix, designated)
        if waiting < least:
            best, least = chosen, waiting
    return least, best
