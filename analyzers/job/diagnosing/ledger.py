"""How the wall clock of a job was spent, its restarts included, and what to do about it. Start at :func:`ledger`.

Every moment of a rank is in one part, and a part is the mean over the ranks of a run: the parts add up to the wall clock. The
share of computation is the goodput. MegaScale's effective training time and ml-goodput-measurement's productive time are
wider: kept steps with their waiting and communication, which is ``in_steps``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd

from ddltool.analyzers.job.planning.options import Failures
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
PARTS = (PRODUCTIVE, WAITING, DATA, COMMUNICATION, CHECKPOINT, RESTART, LOST, REST)
# Share of the wall clock below which removing a part is not worth an action.
_WORTH = 0.05


def ledger(frame: pd.DataFrame, where: str) -> Ledger | None:
    """Return the ledger of the last job in a telemetry table of all runs; None where its rows do not say when they ended.

    A run goes on with the job of the run before where torchrun says that it started it again, or where its first step is a
    later one than 0. Steps that a later run makes again are lost work. Raises InputError for rows that
    :func:`~ddltool.telemetry.check_rows` refuses.
    """
    rows = rows_of_runs(frame, where)
    if not {"end_s", "data_s"} <= set(rows):
        return None
    optional = dict.fromkeys(("start_s", "checkpoint_s", "restarts"), 0.0)
    rows = rows.reindex(columns=[*rows, *sorted(optional.keys() - set(rows))]).fillna(optional)
    rows["run"], rows["begin_s"] = runs_of(frame), rows["end_s"] - rows["step_s"]
    job: list[pd.DataFrame] = []
    for number in sorted(rows["run"].unique(), reverse=True):
        run = rows[rows["run"] == number]
        if run[["end_s", "data_s"]].isna().to_numpy().any():  # of an earlier version
            break
        job.insert(0, run)
        if not (run["restarts"].max() or run["step"].min()):
            break
    if not job or job[-1]["end_s"].max() <= job[0]["begin_s"].min():  # the clock was set back in between
        return None
    return _of_job(job, where)


def _of_job(job: list[pd.DataFrame], where: str) -> Ledger:
    """Return the ledger of one job's runs, which are given in the order of time; ``where``: their file, for commands to say.

    A step that a later run makes again is lost. A run ends where the next one begins, and its parts (seconds) are the mean over
    its ranks, so that the parts of all runs add up to the wall clock.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    begins_s = [float(run["begin_s"].min()) for run in job]
    begins_s[0] = start_s = float((job[0]["begin_s"] - job[0]["start_s"]).min())
    ends_s = [*begins_s[1:], float(job[-1]["end_s"].max())]
    in_steps_s, kept_steps, lost_steps, checkpoints = 0.0, 0, 0, 0
    for number, run in enumerate(job):
        redone = min((float(later["step"].min()) for later in job[number + 1 :]), default=math.inf)
        ranks = run.groupby("rank")
        for _, own in ranks:
            kept = own[own["step"] < redone]
            parts_s = _of_rank(own, kept, begins_s[number], ends_s[number], is_last=number == len(job) - 1)
            for part, value in parts_s.items():
                seconds[part] += value / len(ranks)
            in_steps_s += float((kept["step_s"] - kept["data_s"]).sum()) / len(ranks)
        steps = run.drop_duplicates("step")["step"]
        kept_steps, lost_steps = kept_steps + int((steps < redone).sum()), lost_steps + int((steps >= redone).sum())
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
    largest = max(_ACTIONS, key=seconds.__getitem__)
    share = seconds[largest] / wall_s
    if share < _WORTH:
        return account
    gain = f"{largest} takes {show_seconds(seconds[largest])}, {share:.1%} of the wall clock: without it the job is "
    gain += f"{faster_than(1 / max(1 - share, 1e-9) - 1)} it was"
    action = _ACTIONS[largest](account, pd.concat(job), where)
    return account.model_copy(update={"largest": largest, "gain": gain, "action": action})


def _of_rank(own: pd.DataFrame, kept: pd.DataFrame, begin_s: float, end_s: float, *, is_last: bool) -> dict[str, float]:
    """Return the seconds of each part of a rank's time in one run, which lasts from ``begin_s`` to ``end_s``.

    ``own``: the rank's rows; ``kept``: those of steps that no later run makes again. What lies between a run's last row and the
    next one's begin is a restart; what lies behind the job's last row is the rest.
    """
    columns = {WAITING: "wait_s", DATA: "data_s", COMMUNICATION: "sync_s"}
    parts_s = {part: float(kept[column].sum()) for part, column in columns.items()}
    parts_s[PRODUCTIVE] = float(kept["step_s"].sum()) - sum(parts_s.values())  # the update included
    parts_s[LOST] = float(own["step_s"].sum() - kept["step_s"].sum())
    parts_s[CHECKPOINT] = float(own["checkpoint_s"].sum())
    # A checkpoint before the first row is a part of what lies before it.
    parts_s[RESTART] = float(own["begin_s"].min()) - begin_s - float(own["checkpoint_s"].iloc[0])
    parts_s[RESTART] += 0.0 if is_last else end_s - float(own["end_s"].max())
    parts_s[REST] = end_s - begin_s - sum(parts_s.values())
    return parts_s


def _balance(_: Ledger, rows: pd.DataFrame, where: str) -> str:
    """Name the rank that computes longest, and what shares its work out."""
    compute_s = rows.groupby("rank")["compute_s"].mean()
    rank = int(float(str(compute_s.idxmax())))
    times = float(compute_s.max() / compute_s.drop(compute_s.idxmax()).median())
    slowest = "no rank is always last"
    if times > 1.02:
        slowest = f"rank {rank} computes longest, {times:.2f} times the others' median"
    return (
        f"{slowest}: ddltool stragglers {where} says why; ddltool plan JOB --telemetry {where} gives it fewer samples; "
        f"where lengths differ, ddltool balance LENGTHS; none costs a device"
    )


def _load(_: Ledger, rows: pd.DataFrame, where: str) -> str:
    """Say how many loader workers a rank would need, were the batch loaded by one after another's computation."""
    step_s, data_s = (float(rows[name].mean()) for name in ("step_s", "data_s"))
    need = math.ceil(data_s / max(step_s - data_s, 1e-3 * step_s))
    return (
        f"load ahead: DataLoader(num_workers=), at least {need} above today's; costs as many CPU cores for each rank, or "
        "samples that are prepared once, on disk"
    )


def _exchange(_: Ledger, __: pd.DataFrame, where: str) -> str:
    return (
        f"ddltool plan JOB --telemetry {where} --compress bf16 says what compressed gradients, larger batches or other "
        "layouts bring; costs the gradients' precision, or a larger batch"
    )


def _start_faster(made: Ledger, _: pd.DataFrame, __: str) -> str:
    per_start = show_seconds(made.parts_s[RESTART] / made.starts)
    return (
        f"{counted(made.starts, 'start')} of {per_start} each: keep what a start loads and compiles on the node's disk; a "
        "spare that waits costs its device, and saves finding one"
    )


def _save_by_daly(made: Ledger, _: pd.DataFrame, __: str) -> str:
    """Say the interval between checkpoints that loses least at the failures and times of this job (Daly 2006)."""
    trained_s = made.wall_s - made.parts_s[CHECKPOINT] - made.parts_s[RESTART]
    if not made.checkpoints:
        return "no checkpoint is told of: save within hook.checkpoint(), and plan --mtbf says how often"
    failed = made.starts - 1
    failures = Failures(
        mtbf_s=made.wall_s / max(failed, 1),
        checkpoint_s=made.parts_s[CHECKPOINT] / made.checkpoints,
        restart_s=made.parts_s[RESTART] / made.starts,
    )
    seen = f"{counted(failed, 'failure')} in {show_seconds(made.wall_s)}" if failed else "one failure in such a time"
    now, best = show_seconds(trained_s / made.checkpoints), show_seconds(failures.interval_s(1))
    cost = show_seconds(failures.checkpoint_s)
    return f"a checkpoint ({cost}) every {best} of training, by Daly for {seen}; now every {now}"


_ACTIONS: dict[str, Callable[[Ledger, pd.DataFrame, str], str]] = {
    **{WAITING: _balance, DATA: _load, COMMUNICATION: _exchange},
    **{CHECKPOINT: _save_by_daly, RESTART: _start_faster, LOST: _save_by_daly},
}
