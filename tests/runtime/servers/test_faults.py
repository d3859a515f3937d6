"""Faults between real processes: overflow, unwritable checkpoints, SIGTERM, and what a lost worker leaves undone."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddltool.errors import InputError
from ddltool.runtime.processes.stopping import StopSignals, Terminated
from ddltool.runtime.servers import ASP, BSP, SyncPolicy, Worker
from tests.helpers import sync_fault_workers as bodies
from tests.helpers.processes import as_job
from tests.helpers.transfer_workers import Outcome, launch


def run(
    policy: SyncPolicy, folder: Path, fault: str, servers: int = 1, **options: Any
) -> tuple[list[Outcome], list[Outcome]]:
    """Return how three workers and the servers ended; without ``culprits`` worker 1 is the one."""
    options = {"culprits": (1,)} | options
    outcomes = launch(bodies.train, 3 + servers, policy, 3, servers, folder, fault, options)
    return outcomes[:3], outcomes[3:]


def check_saved(folder: Path, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    for rank in ranks:
        saved = torch.load(folder / f"last.{rank}.pt", weights_only=True)
        assert all(bool(torch.isfinite(value).all()) for value in saved["model"].values())
        assert saved["clock"] >= 1


def rows(folder: Path, rank: int = 3) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"sync.{rank}.jsonl").read_text(encoding="utf-8").splitlines()]


SUM, OPTIMIZER = "workers' finite gradients is too large for torch.float32", "left the numbers of torch.float32"


@pytest.mark.parametrize(
    ("policy", "servers", "culprits", "lr", "cause"),
    [
        (BSP(), 1, (0, 1), 0.01, f"the sum of 3 {SUM}"),
        (BSP(), 2, (0, 1), 0.01, f"the sum of 3 {SUM}"),
        (ASP(), 1, (1,), 10.0, OPTIMIZER),
    ],
    ids=["bsp", "bsp on two servers", "asp"],
)
def test_what_overflows_is_not_published(
    policy: SyncPolicy, servers: int, culprits: tuple[int, ...], lr: float, cause: str, tmp_path: Path
) -> None:
    """All gradients are finite, so no worker is to blame; the last finite parameters are kept."""
    workers, ours = run(policy, tmp_path, "huge", servers, culprits=culprits, lr=lr)
    for rank, worker in enumerate(workers):
        if isinstance(policy, ASP) and rank not in culprits and not worker.error:
            continue  # nobody holds it up: it may have made all its steps before
        assert worker.error.startswith("TransferError: ")
        assert cause in worker.error
        assert "is not finite" in worker.error
        assert "gradient of step 3" in worker.error
    assert all(server.result["finite"] and server.result["lost"] == {} for server in ours)
    assert cause in ours[0].result["ending"] + ours[-1].result["ending"]
    check_saved(tmp_path, culprits)  # under ASP others may still be in their first step


def test_a_server_that_is_lost_after_the_last_step_is_told_when_closing(tmp_path: Path) -> None:
    worker, server = launch(bodies.lose_the_server_before_the_end, 2, BSP(), 3, tmp_path)
    assert server.exit_code == -signal.SIGKILL
    assert worker.error == ""
    assert "server 0 (rank 1) closed its connection" in worker.result
    assert torch.load(tmp_path / "last.pt", weights_only=True)["clock"] >= 1


def test_a_long_step_is_no_silence_and_nothing_is_asked_after_the_end() -> None:
    """The transport's heartbeats go on while a worker computes."""
    worker, server = launch(bodies.train_beyond, 2, 2.0, 3.0)
    assert (worker.error, server.error, server.result) == ("", "", "served")
    assert worker.result == (
        "worker 0 (rank 0): is asked for something after it has closed; ask before, inside its block"
    )


def test_a_server_that_hangs_is_named() -> None:
    worker, _ = launch(bodies.fall_silent, 2, 2.0)
    assert worker.error == "TransferError: worker 0 (rank 0): nothing came from server 0 (rank 1) for 2 s"


def test_who_has_stood_still_blames_nobody(tmp_path: Path) -> None:
    """Worker 0 closes at once: so the server waits for the other, in its time as in the worker's."""
    _, worker, server = launch(bodies.stand_still, 3, 3.0, tmp_path / "night")
    assert (worker.error, server.error, worker.result, server.result) == ("", "", "nights: []", "lost: {}")


def test_a_failure_is_told_and_not_an_older_one(tmp_path: Path) -> None:
    """With a text that is no UTF-8, as names of files may be: the server ends with its own failure, and says it."""
    broken = bodies.train_until_the_optimizer_breaks
    worker, lost, server = launch(broken, 3, 400, "cannot read \udcff.jpg", tmp_path / "sign")
    assert lost.error == "ValueError: a bad batch of long ago"
    assert server.error.startswith("TransferError: server 0 (rank 2) failed: RuntimeError: cannot read ")
    assert "long ago" not in server.error
    assert worker.error.endswith("the job has ended: server 0 (rank 2) failed: RuntimeError: cannot read ?.jpg")


def test_what_a_server_refuses_is_told_on_all_ranks(tmp_path: Path) -> None:
    line = "lost_after_s: is 0.0; give seconds above 0"
    workers, (server,) = run(ASP(), tmp_path, "none", lost_after_s=0.0)
    assert server.error == f"InputError: {line}"
    for worker in workers:
        assert line in worker.error


def test_a_checkpoint_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    workers, _ = run(ASP(), tmp_path, "nan without a folder", checkpoint=tmp_path / "gone")
    error = workers[1].error
    assert error.startswith("TransferError: worker 1 (rank 1)")
    assert "taken out" in error
    assert f"checkpoint {tmp_path}/gone/last.1.pt: cannot be written (No such file or directory)" in error


def test_sigterm_to_the_whole_job_leaves_checkpoints_and_telemetry(tmp_path: Path) -> None:
    workers, (server,) = run(BSP(), tmp_path, "terminate all", at=6, culprits=(2,))
    assert server.exit_code == 128 + signal.SIGTERM
    assert workers[2].exit_code == 128 + signal.SIGTERM
    for worker in workers[:2]:  # who heard of another's end first ends with that
        assert worker.exit_code == 128 + signal.SIGTERM or worker.error.startswith("TransferError: ")
    check_saved(tmp_path)
    assert not list(tmp_path.glob(".last*")), "nothing half written"
    told = rows(tmp_path)
    assert told[-1]["event"] == "summary"
    assert sum(told[-1]["steps"]) == sum(row["event"] == "step" for row in told) >= 6


def test_ctrl_c_in_one_worker_saves_its_parameters_and_the_rest_finish(tmp_path: Path) -> None:
    workers, (server,) = run(BSP(), tmp_path, "interrupt", at=5)
    check_saved(tmp_path, (1,))
    assert workers[1].exit_code not in (0, None)
    assert "left a step with KeyboardInterrupt" in server.result["lost"][1]
    assert not (tmp_path / "last.0.pt").exists()


def test_what_a_lost_worker_leaves_undone_is_counted(tmp_path: Path) -> None:
    """Four batches in the first epoch, two made in the second when it is killed: 2 of 4 are left out."""
    workers, (server,) = run(BSP(), tmp_path, "kill", at=6)
    assert workers[1].exit_code == -signal.SIGKILL
    left = {row["worker"]: row for row in rows(tmp_path) if row["event"] == "left"}
    assert (left[1]["lost"], left[1]["epoch"], left[1]["steps_of_epoch"], left[1]["batches_left"]) == (True, 1, 2, 2)
    assert (left[0]["lost"], left[0]["epoch"], left[0]["batches_left"]) == (False, 2, 0)
    assert [workers[rank].result["made"] for rank in (0, 2)] == [4 + 4 + 6] * 2, "two share the third epoch"
    assert list(server.result["lost"]) == [1]
    updates = workers[0].result["updates"]
    assert updates == list(range(14)), "under BSP every iteration is an update"


class Handlers:
    """The process's handlers as they were, whatever a test does to them."""

    def __enter__(self) -> None:
        self.before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def test_signals_are_heard_when_asked_and_handlers_given_back() -> None:
    for number, ending in ((signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)):
        with Handlers():
            mine = StopSignals()
            mine.open()
            mine.hear()
            signal.raise_signal(number)
            signal.raise_signal(number)  # the end is under way: once is enough
            with pytest.raises(ending) as ended:
                mine.hear()
            mine.hear()
            mine.close()
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if number == signal.SIGTERM:
            assert (ended.value.code, str(ended.value)) == (143, "SIGTERM")


def test_a_script_keeps_the_handlers_that_it_has() -> None:
    def own(*_: object) -> None:
        pass

    with Handlers():
        signal.signal(signal.SIGTERM, own)
        before = StopSignals()
        before.open()
        assert signal.getsignal(signal.SIGTERM) is own
        later = StopSignals()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        later.open()
        signal.signal(signal.SIGTERM, own)  # taken while a worker was there
        later.close()
        before.close()
        assert signal.getsignal(signal.SIGTERM) is own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        elsewhere = StopSignals()
        thread = threading.Thread(target=elsewhere.open)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "handlers belong to the main thread"


def end_a_forked_child(rank: int) -> None:
    StopSignals().open()
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b".")
        while True:
            time.sleep(0.01)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    os.write(1, str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def test_a_forked_child_dies_of_sigterm_as_ever(tmp_path: Path) -> None:
    """A data loader ends its workers by SIGTERM, which must not look like the end of the job in them."""
    assert as_job(1, tmp_path, end_a_forked_child) == [(0, str(-signal.SIGTERM), "")]


def test_the_first_of_several_reasons_is_told(tmp_path: Path) -> None:
    """Every worker raises in its fourth step."""
    workers, (server,) = run(BSP(), tmp_path, "raise", culprits=(0, 1, 2))
    for worker in workers:
        assert worker.error in ("ValueError: a bad batch", "")
    assert "no worker is left; the first lost was worker" in server.result["ending"]
    assert server.result["ending"].endswith("which left a step with ValueError: a bad batch")


def test_a_last_batch_that_is_not_whole_can_be_left_out() -> None:
    """Without processes: 9 samples in batches of 4; what the server is told counts the batches that there are."""
    told = []
    worker = object.__new__(Worker)
    worker.rank, worker.epoch, worker._open, worker._failure, worker._stop = 0, 0, True, None, StopSignals()
    worker.members = lambda epoch: (0,)  # type: ignore[method-assign]
    worker._tell = lambda server, kind, number: told.append(number)  # type: ignore[method-assign]
    all_of_them = worker.batches(9, 4, epoch=0, seed=0)
    whole = worker.batches(9, 4, epoch=0, seed=0, drop_last=True)
    assert [len(batch) for batch in all_of_them] == [4, 4, 1]
    assert [batch.tolist() for batch in whole] == [batch.tolist() for batch in all_of_them[:2]]
    assert len(worker.batches(8, 4, epoch=0, seed=0, drop_last=True)) == 2
    assert worker.batches(3, 4, epoch=0, seed=0, drop_last=True) == ()
    assert told == [3, 2, 2, 0]


def test_a_batch_needs_a_sample() -> None:
    with pytest.raises(InputError, match="batch_size: is 0; give 1 or more"):
        Worker.batches(object.__new__(Worker), 10, 0, epoch=0, seed=0)
