"""Telemetry: rows of real training, where waiting is attributed, and what survives a kill, a full disk and a rerun."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from ddltool import runtime
from ddltool.artifacts import save
from ddltool.errors import InputError
from ddltool.runtime.hook import telemetry
from ddltool.runtime.hook.telemetry import Identity, ObservedStep, StepRecorder, TelemetryFile
from ddltool.runtime.processes import line_files
from ddltool.runtime.processes.step_times import Exchange, Stamp, seconds_between
from ddltool.telemetry import TelemetryRow
from tests.helpers.processes import as_job, wait_until
from tests.helpers.runtime_workers import (
    crew,
    enforcement,
    loss_of,
    make_data,
    make_model,
    observed_training,
    train_alone,
    trained_and_observed,
)

SLEEP_S = 0.05
LONG_S = 0.3
"""Beside this, what a busy machine adds to half the steps is little."""


def rows_in(path: Path) -> list[TelemetryRow]:
    """Return the rows of a file, each line checked."""
    return [TelemetryRow.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def observed(tmp_path: Path, **options: Any) -> list[list[TelemetryRow]]:
    """Train with two real ranks and return each one's rows."""
    save(enforcement([3, 13], telemetry="telemetry.jsonl"), tmp_path / "enforce.json")
    crew().run(observed_training, "enforce.json", str(tmp_path), options)
    rows = rows_in(tmp_path / "telemetry.jsonl")
    return [[row for row in rows if row.rank == rank] for rank in (0, 1)]


def test_each_rank_writes_a_row_per_step(tmp_path: Path) -> None:
    for rank, rows in enumerate(observed(tmp_path)):
        assert [row.step for row in rows] == list(range(6))
        assert {row.batch for row in rows} == {(3, 13)[rank]}
        assert {row.device for row in rows} == {f"type{rank}"}
        assert {row.passes for row in rows} == {1}
        assert {(row.world_size, row.num_nodes, row.total_batch) for row in rows} == {(2, 1, 16)}
        for row in rows:
            assert row.compute_s > 0
            assert row.wait_s + row.sync_s > 0
            assert row.step_s > row.compute_s + row.wait_s + row.sync_s


def test_telemetry_where_nothing_is_enforced_changes_no_bit(tmp_path: Path) -> None:
    plain, watched = (crew().run(trained_and_observed, target) for target in (None, str(tmp_path / "rows.jsonl")))
    for one, other in zip(plain, watched, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    rows = rows_in(tmp_path / "rows.jsonl")
    assert sorted((row.rank, row.step) for row in rows) == [(rank, step) for rank in (0, 1) for step in range(3)]
    assert {(row.batch, row.total_batch, row.device) for row in rows} == {(16, 32, "cpu")}
    assert all(row.compute_s > 0 and row.wait_s + row.sync_s > 0 for row in rows)


def test_when_the_slowest_is_ready_is_noted_apart_from_the_end_of_the_exchange(tmp_path: Path) -> None:
    """Of every tenth exchange, on each rank."""
    save(enforcement([3, 13], telemetry="telemetry.jsonl"), tmp_path / "enforce.json")
    assert crew().run(arrivals_noted, "enforce.json", str(tmp_path), {"steps": 11}) == [2, 2]


def arrivals_noted(rank: int, config: str, folder: str, options: dict[str, Any]) -> int:
    noted = []
    real = Exchange.note_arrival

    def note(exchange: Exchange, _: object = None) -> None:
        real(exchange)
        noted.append(exchange.arrived_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "note_arrival", note)
        observed_training(rank, config, folder, options)
        wait_until(lambda: len(noted) >= 2, "two are noted")  # by another thread, maybe after the step
    return len(noted)


@pytest.mark.parametrize(
    ("slow", "options"),
    [
        (1, {}),
        pytest.param(1, {"bucket_cap_mb": 0.001}, marks=pytest.mark.slow),
        pytest.param(0, {"bucket_cap_mb": 0.001}, marks=pytest.mark.slow),
        pytest.param(1, {"nested": True}, marks=pytest.mark.slow),
    ],
    ids=["the second", "the second, several buckets", "the first, several buckets", "averaged within checkpointing"],
)
def test_the_others_wait_for_the_slow_rank(tmp_path: Path, slow: int, options: dict[str, Any]) -> None:
    sleep_s = (LONG_S, 0.0) if slow == 0 else (0.0, LONG_S)
    nested = "nested" in options  # its first step tells that it is, and its hooks outlast those of the first updates
    ranks = observed(tmp_path, sleep_s=sleep_s, steps=7 if nested else 5, **options)
    slow_rows, other_rows = ranks[slow], ranks[1 - slow]
    other_wait_s = statistics.median(row.wait_s for row in other_rows)
    assert min(row.compute_s for row in slow_rows) >= LONG_S
    assert other_wait_s > LONG_S / 2
    assert not nested or min(row.wait_s for row in other_rows[1:]) > LONG_S / 2
    assert statistics.median(row.wait_s for row in slow_rows) < other_wait_s / 2
    assert statistics.median(row.compute_s for row in other_rows) < LONG_S
    assert statistics.median(row.sync_s for row in other_rows) < other_wait_s / 2


def test_micro_batches_add_up(tmp_path: Path) -> None:
    """Four forward passes of a step under ``no_sync`` all count as its compute, and their samples as its batch."""
    for rank, rows in enumerate(observed(tmp_path, micro_batches=4, steps=3, sleep_s=(SLEEP_S / 4, SLEEP_S / 4))):
        assert [row.batch for row in rows] == [4 * (3, 13)[rank]] * 3
        assert {row.total_batch for row in rows} == {64}
        assert {row.passes for row in rows} == {4}
        assert all(row.compute_s >= SLEEP_S for row in rows)


def test_a_run_is_appended_under_a_name_of_its_own(tmp_path: Path) -> None:
    """All ranks agree on it, and what a killed run has left of a line is cut off."""
    observed(tmp_path, steps=4)
    first = (tmp_path / "telemetry.jsonl").read_bytes()
    (tmp_path / "telemetry.jsonl").write_bytes(first + first[:40])
    both = observed(tmp_path, steps=2)
    assert (tmp_path / "telemetry.jsonl").read_bytes().startswith(first + b'{"kind"')
    assert [[row.step for row in rows] for rows in both] == [[0, 1, 2, 3, 0, 1]] * 2
    names = [[row.run for row in rows] for rows in both]
    assert names[0] == names[1] == [names[0][0]] * 4 + [names[0][4]] * 2
    assert len(set(names[0])) == 2
    assert "" not in names[0]


def alone(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int, target: str = "telemetry.jsonl") -> runtime.Hook:
    """Train ``steps`` steps of 16 samples in this process, which has no process group."""
    monkeypatch.chdir(folder)
    save(enforcement([16], telemetry=target), folder / "enforce.json")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(*make_data(16 * steps))
    hook = runtime.attach("enforce.json", model=model, optimizer=optimizer, dataset=dataset)
    for inputs, answers in hook.dataloader(batch_size=1):
        hook.loss(loss_of(model, inputs, answers)).backward()
        optimizer.step()
    return hook


def test_one_process_without_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path, monkeypatch, 12).close()
    rows = rows_in(tmp_path / "telemetry.jsonl")
    assert [row.step for row in rows] == list(range(12))
    for row in rows:
        assert (row.rank, row.world_size, row.batch, row.total_batch) == (0, 1, 16, 16)
        assert row.step_s > row.compute_s > 0
        assert (row.wait_s, row.sync_s) == (0, 0)
        # The kernel counts in pages held per thread; its two figures for the peak agree to a few percent.
        assert 0 < row.memory_bytes <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 * 1.05


@pytest.mark.parametrize("announced", [True, False])
def test_what_comes_between_epochs_is_in_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    """An hour passes before an epoch that ``set_epoch`` announces, or that nobody does."""
    hour_s, late_s, real = 3600.0, [0.0], telemetry.time.perf_counter
    monkeypatch.setattr(telemetry.time, "perf_counter", lambda: real() + late_s[0])
    monkeypatch.chdir(tmp_path)
    save(enforcement([4], telemetry="telemetry.jsonl"), "enforce.json")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(*make_data(8))
    with runtime.attach("enforce.json", model=model, optimizer=optimizer, dataset=dataset) as hook:
        loader = hook.dataloader(batch_size=1)
        for epoch in range(2):
            if announced:
                hook.set_epoch(epoch)
            for inputs, answers in loader:
                hook.loss(loss_of(model, inputs, answers)).backward()
                optimizer.step()
            late_s[0] += hour_s
    steps_s = [row.step_s for row in rows_in(tmp_path / "telemetry.jsonl")]
    assert [seconds > hour_s for seconds in steps_s] == [False, False, not announced, False]


def test_closing_twice_writes_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = alone(tmp_path, monkeypatch, 3)
    hook.close()
    hook.close()
    assert len(rows_in(tmp_path / "telemetry.jsonl")) == 3


@pytest.mark.parametrize(("end", "steps", "written"), [("killed", 120, 70), ("left", 7, 7)])
def test_what_is_in_the_file_when_a_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, steps: int, written: int
) -> None:
    """Killed, it leaves whole lines, all but the last 50 at most; left without ``close``, it writes the rest."""
    monkeypatch.chdir(tmp_path)
    save(enforcement([16], telemetry="telemetry.jsonl"), "enforce.json")
    ((code, _, told),) = as_job(1, tmp_path, train_alone, "enforce.json", steps, end)
    assert code == (-signal.SIGKILL if end == "killed" else 0), told
    found = [row.step for row in rows_in(tmp_path / "telemetry.jsonl")]
    assert found == list(range(len(found)))
    assert written <= len(found) <= steps


def test_a_full_disk_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(line_files.os, "write", no_space)
    alone(tmp_path, monkeypatch, 2 * telemetry.ROWS_HELD + 1).close()
    assert [record.message for record in caplog.records] == [
        "telemetry.jsonl: telemetry stops, training goes on (No space left on device)"
    ]


def test_a_short_write_counts_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line_files.os, "write", lambda descriptor, data: len(data) - 1)
    alone(tmp_path, monkeypatch, 2).close()
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("absent/telemetry.jsonl", r"absent/telemetry.jsonl: cannot be written \(no folder"),
        ("notes.txt", "notes.txt: holds something other than telemetry; move it or name another file"),
    ],
)
def test_targets_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("do not lose me\n", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        alone(tmp_path, monkeypatch, 1, target)
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "do not lose me\n"


def test_no_telemetry_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(enforcement([16], telemetry=None), "enforce.json")
    train_alone(0, "enforce.json", 2, "left")
    assert [path.name for path in tmp_path.iterdir()] == ["enforce.json"]


moment = Stamp


def opened(tmp_path: Path, device: str = "cpu") -> TelemetryFile:
    file = TelemetryFile(tmp_path / "rows.jsonl", Identity(rank=0, world_size=1, num_nodes=1, device=device))
    file.open()
    return file


def step_to(number: int, end_s: float) -> ObservedStep:
    exchanges = [Exchange(1, 1, moment(0.0), False)]
    return ObservedStep(number=number, exchanges=exchanges, begin=moment(0.0), end=moment(end_s), memory_bytes=1)


@pytest.mark.parametrize(
    ("arrived_s", "done_s", "split"),
    [
        (2.5, 3.25, (2.0, 0.5, 0.75)),
        (1.5, 3.25, (2.0, 0.0, 1.25)),  # noted before this rank was ready: clocks of two threads
        (9.0, 3.25, (2.0, 1.25, 0.0)),  # noted after the gradients were there: it cannot have been later
        (None, 3.25, (2.0, 1.25, 0.0)),
        (2.5, 1.0, (2.0, 0.0, 0.0)),
    ],
)
def test_a_step_is_split_where_the_ranks_meet(
    arrived_s: float | None, done_s: float, split: tuple[float, float, float]
) -> None:
    exchange = Exchange(3, 3, moment(0.0), False, moment(2.0), arrived_s, moment(done_s))
    assert exchange.split() == split


def test_an_exchange_that_never_came_about_has_no_length() -> None:
    assert Exchange(3, 3, moment(5.0), False).split() == (0.0, 0.0, 0.0)


@dataclasses.dataclass
class FakeEvent:
    """A CUDA event on a timeline of milliseconds, which must be complete before it is read."""

    at_ms: float
    complete: bool = False

    def synchronize(self) -> None:
        self.complete = True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert other.complete
        return other.at_ms - self.at_ms


def test_on_cuda_the_device_says_how_long_things_took() -> None:
    """Device: forward at 0, ready at 2 s, averaged at 3 s, updated at 3.5 s. The host waited 0.25 s."""
    start, ready, done, end = (
        Stamp(host_s, FakeEvent(at_ms, complete=at_ms < 3500))  # type: ignore[arg-type]
        for host_s, at_ms in ((0.0, 0.0), (0.1, 2000.0), (0.2, 3000.0), (0.4, 3500.0))
    )
    exchange = Exchange(4, 9, start, True, ready, 0.35, done)
    row = Identity(rank=1, world_size=2, num_nodes=1, device="V100").row(
        ObservedStep(number=7, exchanges=[exchange], begin=start, end=end, memory_bytes=5)
    )
    assert (row.compute_s, row.wait_s, row.sync_s, row.step_s) == (2.0, 0.25, 0.75, 3.5)
    assert (row.batch, row.total_batch, row.memory_bytes) == (4, 9, 5)
    assert seconds_between(ready, moment(0.3)) == pytest.approx(0.2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_model_alone(tmp_path: Path) -> None:
    file = opened(tmp_path, "cuda")
    recorder = StepRecorder(file, cuda=True, take_samples=lambda: (8, 8))
    matrix = torch.ones(2000, 2000, device="cuda")
    for _ in range(3):
        recorder.begin_forward()
        matrix @ matrix
        recorder.before_update()
        recorder.after_update()
    recorder.close()
    assert all(row.step_s >= row.compute_s > 0 and row.memory_bytes >= 16e6 for row in rows_in(file.path))


def test_the_first_step_of_an_epoch_begins_with_its_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that ticks once per reading: what came between two epochs is in no step."""
    ticks = iter(range(1000))
    monkeypatch.setattr(telemetry.time, "perf_counter", lambda: float(next(ticks)))
    file = opened(tmp_path)
    recorder = StepRecorder(file, take_samples=lambda: (1, 1))
    for step in range(3):
        if step == 2:
            for _ in range(100):
                next(ticks)
            recorder.begin_epoch()
        recorder.begin_forward()
        recorder.before_update()
        recorder.after_update()
    recorder.after_update()  # no backward pass before it: no row
    monkeypatch.undo()
    recorder.close()
    # forward, ready, end: 1, 2, 3; the second step counts from the first one's end.
    assert [(row.compute_s, row.step_s) for row in rows_in(file.path)] == [(1, 2), (1, 3), (1, 2)]


def test_rows_are_held_for_a_second(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.add(step_to(0, file._written_s + 0.5 * telemetry.SECONDS_HELD))
    assert rows_in(file.path) == []
    file.add(step_to(1, file._written_s + 1.01 * telemetry.SECONDS_HELD))
    assert [row.step for row in rows_in(file.path)] == [0]  # the last one waits for what others have to say
    file.close()
    assert [row.step for row in rows_in(file.path)] == [0, 1]


def test_a_forked_data_worker_does_not_write_its_parents_rows(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.add(step_to(0, file._written_s))
    child = os.fork()
    if child == 0:
        file.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert rows_in(file.path) == []
    file.close()
    assert len(rows_in(file.path)) == 1


def test_writes_are_whole_lines_of_bounded_size() -> None:
    lines = [json.dumps("x" * length) for length in (10, 4090, 4093, 5000, 1, 1)]
    blocks = list(line_files.whole_lines(lines))
    assert b"".join(blocks) == "".join(f"{line}\n" for line in lines).encode()
    assert all(block.endswith(b"\n") for block in blocks)
    assert [len(block) for block in blocks] == [13, 4093, 4096, 5003, 8]
