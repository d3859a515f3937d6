"""How the wall clock of a job was spent, its restarts included, and what to do about it. Start at :func:`ledger`.

A *ledger* is the account of a job's wall clock: seconds for each of :data:`PARTS`. A *job* may consist of several *runs*,
because each restart begins a new one. Every moment of a rank belongs to one part, and a part is the mean over the ranks of a
run, so the parts add up to the wall clock. The share of computation is the goodput. MegaScale's effective training time and
ml-goodput-measurement's productive time include more: kept steps with their waiting and communication, which is ``in_steps``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd

from ddltool.analyzers.job.planning.failures import daly_s
from ddltool.results import Ledger
from ddltool.telemetry import rows_of_runs, runs_of
from ddltool.units import counted, faster_than, show_seconds

PRODUCTIVE, WAITING, DATA, COMMUNICATION = (
    "compute",
    "waiting for the slowest rank",
    "waiting for data",
    "communication",
)
CHECKPOINT, RESTART, LOST, REST = "checkpoint", "start and restart", "lost work", "unaccounted"
STEPS = (PRODUCTIVE, WAITING, DATA, COMMUNICATION)
"""The parts of kept steps, which a plan with failures calls training."""
PARTS = (*STEPS, CHECKPOINT, RESTART, LOST, REST)
# Share of the wall clock from which on a part is worth an action.
_WORTH = 0.05
# Ratio of compute times up to which two ranks count as equally fast.
_NOISE_RATIO = 1.02


def ledger(frame: pd.DataFrame, where: str) -> Ledger | None:
    """Return the ledger of the last job in a telemetry table of all runs: its wall clock by part, and the advice.

    The job's runs are collected backwards from the last one: a run continues the job of the run before it if torchrun restarted
    it (``restarts`` above 0), or if its first step is above 0. None where the rows lack values of ``end_s`` and ``data_s``, or
    where the clock was set back. ``where``: the telemetry file. Raises InputError for rows that
    :func:`~ddltool.telemetry.check_rows` refuses.
    """
    rows = rows_of_runs(frame, where)
    if not {"end_s", "data_s"} <= set(rows):
        return None
    defaults = dict.fromkeys(("start_s", "checkpoint_s", "restarts"), 0.0)  # columns that may be missing
    rows = rows.reindex(columns=[*rows, *sorted(defaults.keys() - set(rows))]).fillna(defaults)
    rows["run"] = runs_of(frame)
    rows["begin_s"] = rows["end_s"] - rows["step_s"]
    job: list[pd.DataFrame] = []
    for run_number in sorted(rows["run"].unique(), reverse=True):
        run = rows[rows["run"] == run_number]
        if run[["end_s", "data_s"]].isna().to_numpy().any():  # written by an earlier version of the hook
            break
        job.insert(0, run)
        continues_earlier_run = run["restarts"].max() or run["step"].min()
        if not continues_earlier_run:
            break
    if not job or job[-1]["end_s"].max() <= job[0]["begin_s"].min():  # the clock was set back in between
        return None
    return _ledger_of_job(job, where)


def _ledger_of_job(job: list[pd.DataFrame], where: str) -> Ledger:
    """Return the ledger of one job from its runs in the order of time.

    ``job``: one table of telemetry per run, with a row per step and rank, and its begin on the clock in ``begin_s``. A step
    that a later run makes again counts as lost work. A run lasts until the next one begins, and its parts (seconds) are means
    over its ranks, so that the parts of all runs add up to the wall clock. ``where`` is the telemetry file, for the commands in
    the advice.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    start_s = float((job[0]["begin_s"] - job[0]["start_s"]).min())
    begins_s = [start_s, *(float(run["begin_s"].min()) for run in job[1:])]
    ends_s = [*begins_s[1:], float(job[-1]["end_s"].max())]
    in_steps_s = 0.0
    kept_steps = lost_steps = checkpoints = 0
    for number, run in enumerate(job):
        # steps from here on were lost: a later run began at or before them
        first_redone = min((float(later["step"].min()) for later in job[number + 1 :]), default=math.inf)
        ranks = run.groupby("rank")
        for _, rank_rows in ranks:
            kept = rank_rows[rank_rows["step"] < first_redone]
            parts_s = _parts_of_rank(rank_rows, kept, begins_s[number], ends_s[number], is_last=number == len(job) - 1)
            for part, value in parts_s.items():
                seconds[part] += value / len(ranks)
            in_steps_s += float((kept["step_s"] - kept["data_s"]).sum()) / len(ranks)
        steps = run.drop_duplicates("step")["step"]
        kept_steps += int((steps < first_redone).sum())
        lost_steps += int((steps >= first_redone).sum())
        checkpoints += int(ranks["checkpoint_s"].agg(lambda spent: (spent > 0).sum()).max())
    wall_s = ends_s[-1] - start_s
    remarks = [
        f"run {number} of {len(job)} begins at step 0: if it went on from a checkpoint, say so by hook.resumed(steps)"
        for number, run in enumerate(job[1:], 2)
        if not run["step"].min()
    ]
    account = Ledger(
        wall_s=wall_s,
        starts=len(job),
        parts_s=seconds,
        goodput=min(1.0, max(0.0, seconds[PRODUCTIVE] / wall_s)),
        in_steps=min(1.0, max(0.0, in_steps_s / wall_s)),
        steps=kept_steps,
        lost_steps=lost_steps,
        checkpoints=checkpoints,
        largest=None,
        gain="",
        action="nothing: no part that could be avoided takes 5 % of the wall clock",
        remarks=remarks,
    )
    # The advice is on the largest part that can be avoided.
    largest = max(_ACTIONS, key=seconds.__getitem__)
    share = seconds[largest] / wall_s
    if share < _WORTH:
        return account
    gain = f"{largest} takes {show_seconds(seconds[largest])}, {share:.1%} of the wall clock: without it the job is "
    gain += f"{faster_than(1 / max(1 - share, 1e-9) - 1)} it was"
    action = _ACTIONS[largest](account, pd.concat(job), where)
    return account.model_copy(update={"largest": largest, "gain": gain, "action": action})


def _parts_of_rank(
    rank_rows: pd.DataFrame, kept: pd.DataFrame, begin_s: float, end_s: float, *, is_last: bool
) -> dict[str, float]:
    """Return part -> seconds of one rank's time in one run, which lasts from ``begin_s`` to ``end_s``.

    ``kept``: the rank's rows whose steps no later run makes again. The time before the first row counts as start and restart,
    and so does the time after the last row, unless the run is the job's last one (``is_last``): then it is unaccounted.
    """
    columns = {WAITING: "wait_s", DATA: "data_s", COMMUNICATION: "sync_s"}
    parts_s = {part: float(kept[column].sum()) for part, column in columns.items()}
    parts_s[PRODUCTIVE] = float(kept["step_s"].sum()) - sum(parts_s.values())  # includes the optimizer's update
    parts_s[LOST] = float(rank_rows["step_s"].sum() - kept["step_s"].sum())
    parts_s[CHECKPOINT] = float(rank_rows["checkpoint_s"].sum())
    # The checkpoint in the first row was made before that row, and is already counted as checkpoint.
    parts_s[RESTART] = float(rank_rows["begin_s"].min()) - begin_s - float(rank_rows["checkpoint_s"].iloc[0])
    if not is_last:
        parts_s[RESTART] += end_s - float(rank_rows["end_s"].max())
    parts_s[REST] = end_s - begin_s - sum(parts_s.values())
    return parts_s


def _balance(_: Ledger, rows: pd.DataFrame, where: str) -> str:
    """Return the advice against waiting: the rank that computes longest, and the commands that give it less work.

    ``rows``: telemetry of all the job's runs; ``where``: its file.
    """
    compute_s = rows.groupby("rank")["compute_s"].mean()
    rank = int(float(str(compute_s.idxmax())))  # pandas types a label as any hashable; the column may hold floats
    ratio = float(compute_s.max() / compute_s.drop(compute_s.idxmax()).median())
    slowest = "no rank is always last"
    if ratio > _NOISE_RATIO:
        slowest = f"rank {rank} computes longest, {ratio:.2f} times the others' median"
    return (
        f"{slowest}: ddltool stragglers {where} says why; ddltool plan JOB --telemetry {where} gives it fewer samples; "
        f"where lengths differ, ddltool balance LENGTHS; none costs a device"
    )


def _load(_: Ledger, rows: pd.DataFrame, where: str) -> str:
    """Return the advice against waiting for data: the number of additional loader workers that a rank needs.

    If a step waits for data k times as long as the rest of it takes, k more workers in parallel hide that.
    """
    step_s, data_s = (float(rows[name].mean()) for name in ("step_s", "data_s"))
    rest_s = max(step_s - data_s, 1e-3 * step_s)  # never 0, where a step is nothing but loading
    more_workers = math.ceil(data_s / rest_s)
    return (
        f"load ahead: DataLoader(num_workers=), at least {more_workers} above today's; costs as many CPU cores for each rank, "
        "or samples that are prepared once, on disk"
    )


def _exchange(_: Ledger, __: pd.DataFrame, where: str) -> str:
    """Return the advice against exposed communication: the command that compares compression, batches and layouts."""
    return (
        f"ddltool plan JOB --telemetry {where} --compress bf16 says what compressed gradients, larger batches or other "
        "layouts bring; costs the gradients' precision, or a larger batch"
    )


def _start_faster(account: Ledger, _: pd.DataFrame, __: str) -> str:
    """Return the advice against slow starts: their number, the mean length of one, and what shortens it."""
    per_start = show_seconds(account.parts_s[RESTART] / account.starts)
    return (
        f"{counted(account.starts, 'start')} of {per_start} each: keep what a start loads and compiles on the node's disk; a "
        "spare that waits costs its device, and saves finding one"
    )


def _save_by_daly(account: Ledger, _: pd.DataFrame, __: str) -> str:
    """Return the advice on checkpoints: the interval with the shortest run, by this job's failures and times (Daly 2006).

    Every start after the first counts as a failure; a job without any is treated as failing once in its wall clock.
    """
    trained_s = account.wall_s - account.parts_s[CHECKPOINT] - account.parts_s[RESTART]
    if not account.checkpoints:
        return "no checkpoint is told of: save within hook.checkpoint(), and plan --mtbf says how often"
    failures_seen = account.starts - 1
    mtbf_s = account.wall_s / max(failures_seen, 1)
    checkpoint_s = account.parts_s[CHECKPOINT] / account.checkpoints
    rate_text = "one failure in such a time"
    if failures_seen:
        rate_text = f"{counted(failures_seen, 'failure')} in {show_seconds(account.wall_s)}"
    present_interval = show_seconds(trained_s / account.checkpoints)
    best_interval = show_seconds(daly_s(checkpoint_s, mtbf_s))
    cost = show_seconds(checkpoint_s)
    return f"a checkpoint ({cost}) every {best_interval} of training, by Daly for {rate_text}; now every {present_interval}"


# Avoidable part -> function that returns the advice against it, from the ledger, the job's rows and their file.
_ACTIONS: dict[str, Callable[[Ledger, pd.DataFrame, str], str]] = {
    **{WAITING: _balance, DATA: _load, COMMUNICATION: _exchange},
    **{CHECKPOINT: _save_by_daly, RESTART: _start_faster, LOST: _save_by_daly},
}
