"""The same bits on any number of processes, over real gloo processes."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltool.artifacts import save
from ddltool.errors import InputError
from ddltool.runtime.elastic import checkpoint as elastic_checkpoint
from ddltool.runtime.elastic.processes import divide
from ddltool.runtime.elastic.run_difference import compare_runs, first_difference
from ddltool.runtime.elastic.trainer import ElasticTrainer
from ddltool.runtime.processes.digests import digest
from tests.conftest import write_lines
from tests.helpers.elastic_workers import (
    WORKERS,
    Digits,
    bits,
    build,
    by_ddp,
    by_four_copies,
    evaluated,
    on,
    refusal,
    run,
    stopped_at,
)
from tests.helpers.processes import as_job, torchrun
from tests.helpers.runtime_workers import enforcement

STEPS = 20
JOBS = [("cnn", "sgd"), ("cnn", "adam"), ("transformer", "adamw")]


def train(size: int, path: Path, **options: Any) -> list[list[float]]:
    """Train on ``size`` processes; return the losses, which are the same on all."""
    losses = on(size, _run, str(path), options)
    assert all(each == losses[0] for each in losses)
    return losses[0]


def _run(path: str, options: dict[str, Any]) -> list[list[float]]:
    return run(path, **options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[dict[str, str], list[list[float]]]]:
    """Each job on one process: the digests of everything after the last step, and all losses."""
    folder = tmp_path_factory.mktemp("alone")
    answers = {}
    for model, optimizer in JOBS:
        path = folder / f"{model}-{optimizer}.pt"
        losses = train(1, path, model=model, optimizer=optimizer, until=STEPS)
        answers[model, optimizer] = (bits(path), losses)
    return answers


@pytest.mark.parametrize("job", JOBS, ids="-".join)
def test_one_process_equals_four_copies_of_the_model(job: tuple[str, str], alone: Any) -> None:
    """The oracle has none of the code under test: no swapping, no buckets, no shared model."""
    state, losses = by_four_copies(*job, STEPS)
    found, found_losses = alone[job]
    assert found_losses == losses
    assert len(losses) == STEPS
    assert losses[-1] != losses[0]
    names = dict(build(*job)[0].named_parameters())
    for name, value in state.items():
        place = f"parameters.{name}" if name in names else f"workers.0.buffers.{name}"
        assert found[place] == digest(value), name


@pytest.mark.parametrize(
    ("job", "placement"),
    [(JOBS[0], (2, 2)), (JOBS[1], (3, 1)), (JOBS[2], (1, 1, 1, 1)), (JOBS[0], (1, 2, 1)), (JOBS[2], (2, 2))],
    ids=str,
)
def test_any_placement_gives_the_same_bits(
    job: tuple[str, str], placement: tuple[int, ...], alone: Any, tmp_path: Path
) -> None:
    model, optimizer = job
    path = tmp_path / "run.pt"
    losses = train(len(placement), path, model=model, optimizer=optimizer, until=STEPS, placement=placement)
    assert (bits(path), losses) == alone[job]


def test_a_plan_places_the_workers_and_is_measured(tmp_path: Path) -> None:
    """Three logical workers on the first process, one on the second; on one and on four the same bits, and no telemetry."""
    config, rows = tmp_path / "enforce.json", tmp_path / "telemetry.jsonl"
    made = enforcement([3 * 8, 8], telemetry=str(rows), strategy="est")
    ranks = [entry.model_copy(update={"ests": n}) for entry, n in zip(made.ranks, (3, 1), strict=True)]
    save(made.model_copy(update={"ranks": ranks}), config)
    two, other = on(2, planned, str(config))
    assert two == other == planned(str(config))
    assert on(4, planned, str(config)) == [two] * 4
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert sorted((row["rank"], row["step"], row["batch"], row["passes"]) for row in found) == [
        *((0, step, 24, 3) for step in range(3)),
        *((1, step, 8, 1) for step in range(3)),
    ]
    assert all(0 < row["compute_s"] + row["wait_s"] + row["sync_s"] <= row["step_s"] for row in found)
    save(enforcement([8, 4]), config)
    with pytest.raises(InputError, match="are no equal logical workers; plan with --strategy est"):
        planned(str(config))


def planned(config: str) -> list[tuple[float, ...]]:
    """Train three steps of a plan; return the losses."""
    model, optimizer, _ = build("cnn", "sgd")
    trainer = ElasticTrainer.planned(config, model, optimizer, nn.CrossEntropyLoss(), Digits(96), seed=3)
    return [step.losses for step in trainer.epoch(0)]


def test_resized_runs_give_the_same_bits(alone: Any, tmp_path: Path) -> None:
    """4 -> 2 -> 1 -> 3 processes, mid-epoch and at an epoch's end, with one loop for all."""
    path = tmp_path / "run.pt"
    losses = []
    for size, until in ((4, 3), (2, 10), (1, 14), (3, STEPS)):
        losses += train(size, path, optimizer="adam", until=until)
    assert (bits(path), losses) == alone["cnn", "adam"]


def test_a_loop_written_by_hand_gives_the_same_bits(alone: Any, tmp_path: Path) -> None:
    losses = train(2, tmp_path / "run.pt", until=STEPS, plain_loop=True)
    assert (bits(tmp_path / "run.pt"), losses) == alone["cnn", "sgd"]


def test_ddp_with_the_ordered_hook_gives_the_same_bits_and_without_it_others(alone: Any) -> None:
    found, _ = alone["transformer", "adamw"]
    expected = {name.removeprefix("parameters."): value for name, value in found.items() if "parameters." in name}
    assert on(WORKERS, by_ddp, True, STEPS)[0] == expected
    assert on(WORKERS, by_ddp, False, STEPS)[0] != expected


def test_accumulation(tmp_path: Path) -> None:
    found = []
    for size in (1, 2, 3):
        path = tmp_path / f"{size}.pt"
        losses = train(size, path, until=6, accumulation=2)
        found.append((bits(path), losses))
    assert found[0] == found[1] == found[2]


CONTROLS = {
    "shared random streams": ("random stream", 0),
    "shared buffers": ("buffer before", 1),
    "torch stream not restored": ("random stream", 0),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of three steps on one process."""
    folder = tmp_path_factory.mktemp("recorded")
    train(1, folder / "run.pt", until=3, record=str(folder / "run.jsonl"))
    return folder / "run.jsonl"


def test_records_do_not_depend_on_the_placement(recorded: Path, tmp_path: Path) -> None:
    for size, until in ((2, 1), (4, 3)):  # a resumed run goes on in the same file
        train(size, tmp_path / "run.pt", until=until, record=str(tmp_path / "run.jsonl"))
    assert (tmp_path / "run.jsonl").read_text() == recorded.read_text()


@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_taken_away_is_noticed_and_named(control: str, recorded: Path, tmp_path: Path) -> None:
    train(2, tmp_path / "run.pt", until=3, control=control, record=str(tmp_path / "run.jsonl"))
    found = first_difference(recorded, tmp_path / "run.jsonl")
    assert found is not None
    kind, worker = CONTROLS[control]
    assert found.record == kind
    assert found.worker is not None
    assert found.worker >= worker


def test_first_difference_names_the_op(recorded: Path, tmp_path: Path) -> None:
    """A single flipped digit is found wherever it is, and what follows from it is not blamed."""
    changed = [json.loads(line) for line in recorded.read_text().splitlines()]
    turn = changed[1]["workers"]["2"]
    name = next(name for name in turn["output"] if "Dropout" in name)
    turn["output"][name] = turn["loss"]["loss 0"] = changed[1]["shared"]["parameter"]["head.bias"] = "0" * 16
    path = tmp_path / "changed.jsonl"
    write_lines(path, changed)
    found = first_difference(recorded, path)
    assert found is not None
    assert (found.step, found.worker, found.record, found.tensor) == (1, 2, "output", name)
    assert "logical worker 2: output 3 body.3 (Dropout)" in str(found)
    path.write_text(json.dumps(changed[2]) + "\n")
    (tmp_path / "early.jsonl").write_text(recorded.read_text().splitlines()[0] + "\n")
    with pytest.raises(InputError, match="no step in common"):
        compare_runs(tmp_path / "early.jsonl", path)


@given(workers=st.integers(1, 40), size=st.integers(1, 40))
def test_divide(workers: int, size: int) -> None:
    if size > workers:
        with pytest.raises(InputError, match="start at most"):
            divide(workers, size)
        return
    runs = divide(workers, size)
    assert sorted(rank for run in runs for rank in run) == list(range(workers))
    assert all(list(run) == sorted(run) for run in runs)
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    ends = {rank: (turn + 1) / len(run) for run in runs for turn, rank in enumerate(run)}
    assert all(ends[rank] <= ends[rank + 1] + 1e-9 for rank in range(workers - 1)), "turns end in rank order"


def test_evaluation_is_the_same_on_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    train(1, path, until=2)
    (here, _), *_ = on(1, evaluated, str(path))
    elsewhere = on(2, evaluated, str(path))
    assert [seen for seen, _ in elsewhere] == [here, here]
    assert elsewhere[0][1] != elsewhere[1][1]  # the buffers that each holds between steps are not the same


def test_a_request_to_stop_reaches_all_processes_in_the_same_step() -> None:
    assert on(3, stopped_at) == [[3], [3], [3]]


def saved(folder: Path, steps: int = 2) -> Path:
    path = folder / "run.pt"
    train(1, path, until=steps, model="transformer")
    return path


@pytest.mark.parametrize("call", ["fsync", "link", "replace"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_killed_save_leaves_a_whole_checkpoint(call: str, number: int, tmp_path: Path) -> None:
    """The process dies by SIGKILL at the n-th system call of a kind; afterwards there is the old file or the new one."""
    path = saved(tmp_path)
    old = elastic_checkpoint.read(path)
    child = os.fork()
    if child == 0:
        real, left = getattr(os, call), [number]

        def deadly(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(os, call, deadly)
        elastic_checkpoint.write(path, old | {"position": "new"})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or (call, number) == ("link", 2)
    position = elastic_checkpoint.read(path)["position"]
    assert position in (old["position"], "new")
    if (call, number) in (("fsync", 1), ("link", 1), ("replace", 1), ("replace", 2)):
        assert position == old["position"]
    elastic_checkpoint.write(path, old)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.pt", "run.pt.previous"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_damage_is_noticed_and_the_file_before_is_used(damage: str, tmp_path: Path) -> None:
    path = saved(tmp_path, 2)
    train(1, path, until=3, model="transformer")
    data = bytearray(path.read_bytes())
    if damage == "flipped":  # in the middle of a tensor, where no structure of the file format is
        content = elastic_checkpoint.read(path)
        place = bytes(data).index(content["parameters"]["project.weight"].numpy().tobytes())
        data[place + 7] ^= 16
    path.write_bytes({"cut": data[: len(data) // 2], "flipped": data, "empty": b""}[damage])
    with pytest.warns(UserWarning, match="damaged"):
        assert elastic_checkpoint.read(path)["position"]["steps_made"] == 2
    elastic_checkpoint.previous(path).unlink()
    with pytest.raises(InputError, match="damaged"):
        elastic_checkpoint.read(path)


def test_no_code_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"content": Trap(), "digest": ""}, tmp_path / "run.pt")
    with pytest.raises(InputError, match="damaged"):
        elastic_checkpoint.read(tmp_path / "run.pt")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4}, "batch_size: is 8 there and 4 here"),
        ({"seed": 1}, "seed: is 0 there and 1 here"),
        ({"extras": {}}, "scheduler is only on one side"),
        ({"max_workers": 3}, "max_workers: is 4 there and 3 here"),
    ],
    ids=str,
)
def test_another_setting_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    module, update, scheduler = build("transformer", "sgd")
    trainer = ElasticTrainer(module, update, None, Digits(), **({"extras": {"scheduler": scheduler}} | options))
    with pytest.raises(InputError, match=message):
        trainer.load(path)


def test_another_number_of_threads_or_model_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(InputError, match=r"parameters:body.0.weight: is missing there"):
        run(str(path), model="cnn")
    torch.set_num_threads(2)
    try:
        with pytest.raises(InputError, match="threads: is 1 there and 2 here"):
            run(str(path), model="transformer")
    finally:
        torch.set_num_threads(1)


def test_another_type_or_optimizer_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path)
    module, update, scheduler = build("transformer", "sgd")
    parts = {"extras": {"scheduler": scheduler}}
    with pytest.raises(InputError, match=r"is float32 \(.*\) there and float64 \(.*\) here"):
        ElasticTrainer(module.double(), update, None, Digits(), **parts).load(path)
    module, _, _ = build("transformer", "sgd")
    before = [value.clone() for value in module.parameters()]
    others = {
        "is SGD there and Adam here": torch.optim.Adam(module.parameters()),
        "has 1 parameter groups there and 2 here": torch.optim.SGD(
            [{"params": [value]} for value in list(module.parameters())[:2]], lr=0.1
        ),
        "parameters there and 2 here": torch.optim.SGD(list(module.parameters())[:2], lr=0.1),
    }
    for message, other in others.items():
        with pytest.raises(InputError, match=message):
            ElasticTrainer(module, other, None, Digits(), **parts).load(path)
    assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))


def test_other_options_of_the_optimizer_are_told(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    for rate, decay, told in ((0.1, 0.0, ""), (0.1, 0.0, ""), (0.7, 0.0, "lr of group 0 is 0.1 there and 0.7 here")):
        module = nn.Linear(2, 2)
        update = torch.optim.SGD(module.parameters(), lr=rate, weight_decay=decay)
        trainer = ElasticTrainer(module, update, None, Digits())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.resume(path)
        assert [told in str(each.message) for each in caught] == ([True] if told else [])
        trainer.save(path)


def test_a_run_does_not_overwrite_another(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    first, second = (
        ElasticTrainer(module, torch.optim.SGD(module.parameters(), lr=0.1), None, Digits())
        for module in (nn.Linear(2, 2), nn.Linear(2, 2))
    )
    first.save(path)
    first.save(path)
    assert second.resume(path)
    second.save(path)
    with pytest.raises(InputError, match=r"run\.pt: was written by another run in the meantime"):
        first.save(path)
    second.save(path)


def test_two_runs_do_not_write_one_file_at_a_time(tmp_path: Path) -> None:
    """What a killed run left unfinished is overwritten; what another one is writing is left alone."""
    path = saved(tmp_path)
    content = elastic_checkpoint.read(path)
    partial = tmp_path / ".run.pt.partial"
    partial.write_text("cut off")
    with partial.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"run\.pt: is being written by another run"):
            elastic_checkpoint.write(path, content)
        assert partial.read_text() == "cut off"
    elastic_checkpoint.write(path, content)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.pt", "run.pt.previous"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    content = elastic_checkpoint.read(saved(tmp_path))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, what in ((pipe, "a pipe or a device"), (tmp_path, "a folder"), (Path(os.devnull), "a pipe or a device")):
        with pytest.raises(InputError, match=f"{path.name}: is {what}; give a file name"):
            elastic_checkpoint.write(path, content)
    assert pipe.is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["pipe", "run.pt"]


def write_on_a_full_disk(rank: int, path: Path) -> None:
    content = elastic_checkpoint.read(path) | {"more": torch.zeros(100_000)}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    elastic_checkpoint.write(path, content)


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    ((code, _, told),) = as_job(1, tmp_path_factory.mktemp("said"), write_on_a_full_disk, path)
    assert code == 1
    assert "InputError" in told.splitlines()[-1]
    assert "run.pt: cannot be written (" in told
    assert [each.name for each in tmp_path.iterdir()] == ["run.pt"]
    assert path.read_bytes() == before


def test_only_the_file_itself_decides_what_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "conversion"  # a name with "version" in it
    folder.mkdir()
    path = saved(folder, 2)
    train(1, path, until=3, model="transformer")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.warns(UserWarning, match="damaged"):
        assert elastic_checkpoint.read(path)["position"]["steps_made"] == 2
    path.unlink()
    module, update, scheduler = build("transformer", "sgd")
    trainer = ElasticTrainer(module, update, None, Digits(), extras={"scheduler": scheduler})
    with pytest.warns(UserWarning, match=r"run\.pt is missing and .*previous is there: starting anew"):
        assert not trainer.resume(path)
    hollow = {"kind": elastic_checkpoint.KIND, "schema_version": 1}
    torch.save({"content": hollow, "digest": elastic_checkpoint.content_digest(hollow)}, path)
    with pytest.raises(InputError, match=r"run\.pt: has no settings"):
        trainer.load(path)
    torch.save({"content": torch.zeros(1), "digest": ""}, path)
    with pytest.warns(UserWarning, match="damaged"):
        trainer.load(path)
    with pytest.raises(InputError, match="names no file"):
        trainer.resume("")


def test_what_cannot_have_equal_bits_is_refused() -> None:
    assert "start at most 2 processes" in on(3, refusal_of, {"max_workers": 2})[1]
    assert "give 2 counts" in on(2, refusal_of, {"placement": (4,)})[0]
    assert "batch_size: is 0" in refusal(batch_size=0)
    assert "seed: is -1" in refusal(seed=-1)
    assert "bucket_mib: is nan" in refusal(bucket_mib=float("nan"))
    _, update, _ = build("cnn", "sgd")
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    with pytest.raises(InputError, match="bare module"):
        ElasticTrainer(ddp, update, None, Digits())


def refusal_of(options: dict[str, Any]) -> str:
    return refusal(**options)


def test_calls_out_of_order_are_refused(tmp_path: Path) -> None:
    module, update, _ = build("transformer", "sgd")
    trainer = ElasticTrainer(module, update, None, Digits())
    with pytest.raises(InputError, match="no logical worker is switched in"):
        trainer.turn_done()
    with pytest.raises(InputError, match="loss_fn"):
        next(trainer.epoch(0))
    batches = trainer.batches(0)
    for _ in range(WORKERS):
        images, targets = next(batches)
        with pytest.raises(InputError, match="the step is not over"):
            trainer.save(tmp_path / "run.pt")
        nn.functional.cross_entropy(module(images), targets).backward()
        complete = trainer.turn_done()
    assert complete
    with pytest.raises(InputError, match="the step is not over"):
        trainer.save(tmp_path / "run.pt")  # the gradients are there, and the optimizer has not used them
    update.step()
    trainer.save(tmp_path / "run.pt")
    next(batches)
    with pytest.raises(InputError, match="not followed by turn_done"):
        next(batches)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "kills"), [(60, 4), (400, 20)])
def test_kill_9_at_random_moments_and_restarts_under_torchrun(steps: int, kills: int, tmp_path: Path) -> None:
    """Each attempt continues from the last checkpoint; the end has the bits of a run that nobody disturbed."""
    train(1, tmp_path / "calm.pt", until=steps)
    job = "-m", "tests.helpers.elastic_kill", tmp_path / "killed.pt", steps, kills
    ended = torchrun(2, *job, folder=tmp_path, restarts=kills + 3)
    assert ended.returncode == 0, ended.stderr
    begins = [int(line.split()[-1]) for line in ended.stdout.splitlines() if line.startswith("attempt")]
    assert len(begins) == kills + 1
    assert begins == sorted(begins)
    assert len(set(begins)) > kills // 2  # the kills came in the middle of training
    assert bits(tmp_path / "killed.pt") == bits(tmp_path / "calm.pt")


@pytest.mark.slow
def test_the_example_prints_the_same_digest_on_any_number_of_processes(tmp_path: Path) -> None:
    last = set()
    for size in (1, 2, 4):
        example = Path(__file__).parents[3] / "examples" / "elastic_digits.py"
        ended = torchrun(size, example, "--checkpoint", tmp_path / f"{size}.pt", "--epochs", 1, folder=tmp_path)
        assert ended.returncode == 0, ended.stderr
        last.add(ended.stdout.splitlines()[-1])
    assert len(last) == 1
    assert float(last.pop().split("accuracy ")[1].split(",")[0]) > 0.8
