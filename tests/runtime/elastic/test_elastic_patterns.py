"""Every way to train gives the same bits on one, two and three processes, resized in mid-run too, or is refused in a line.

The oracle has none of the code under test: a copy of everything for each logical worker, trained in turns.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddltool.errors import InputError
from ddltool.runtime.elastic.trainer import ElasticTrainer
from ddltool.runtime.processes.digests import digest
from tests.helpers.elastic_workers import by_copies, on
from tests.helpers.training_patterns import MAKERS, Pattern, make, network, ordinary

WORKERS, BATCH, STEPS, CUT = 3, 4, 5, 2
REFUSED = {
    "lbfgs": "optimizer: is LBFGS, which computes the loss itself, of one logical worker's batch; use one whose step() "
    "needs no closure",
    "loss_with_a_mean_not_told": "the turn: a Prototypes that it calls changes, and is neither in the model nor the loss_fn; "
    "give it as loss_fn, or make it a part of the model",
    "number_in_namespace": "model:space: is a SimpleNamespace that changes in a turn, and no logical worker can have "
    "one of its own; use buffers, numbers or tensors",
    "short_rows": "model: its parameters changed in a turn; update them once, when turn_done returns True",
    "iterable_dataset": "dataset: is a Endless, an IterableDataset; give a map-style dataset (with __len__ and __getitem__)",
}
TRAINED = sorted(MAKERS.keys() - REFUSED)


def bits(made: Pattern, losses: list[float]) -> dict[str, str]:
    """Return the digests of all that training has changed and that must not depend on the processes."""
    tensors = [*made.model.parameters(), *made.seen]
    return {"losses": repr(losses)} | {str(place): digest(value) for place, value in enumerate(tensors)}


def expected(name: str) -> dict[str, str]:
    """Train a copy of everything for each logical worker."""
    copies = [make(name) for _ in range(WORKERS)]
    losses = by_copies(copies, STEPS, BATCH)
    return bits(copies[0], [sum(step) / WORKERS for step in losses])


def by_trainer(name: str, path: str, until: int) -> dict[str, str] | str:
    """Train up to a step, from the checkpoint if there is one, and write one; return bits, or what is refused."""
    made = make(name)
    extras = made.also | {
        key: value for key, value in (("scheduler", made.scheduler), ("scaler", made.scaler)) if value is not None
    }
    try:
        trainer = ElasticTrainer(
            made.model,
            made.optimizer,
            made.criterion,
            made.dataset,
            max_workers=WORKERS,
            batch_size=BATCH,
            accumulation=made.accumulation,
            bucket_mib=1e-4,
            extras=extras,
        )
        trainer.resume(path)
        if trainer.steps_made:  # what a script does by the number of the step, it does again
            for step in range(trainer.steps_made):
                if name == "late_unfreezing":
                    made.after_update(made, step)
        losses = []
        epoch = trainer.epoch_number
        while trainer.steps_made < until:
            for batch in trainer.batches(epoch):
                loss = made.loss(made.model, batch)
                (made.scaler.scale(loss) if made.scaler is not None else loss).backward()
                if not trainer.turn_done(loss):
                    continue
                number = trainer.steps_made - 1
                made.update(number)
                made.after(number, epoch_ends=trainer.step_in_epoch == trainer.steps_per_epoch)
                assert trainer.last_step is not None
                losses.append(trainer.last_step.loss)
                if trainer.steps_made == until:
                    break
            else:
                epoch += 1
        trainer.save(path)
        return bits(made, losses)
    except InputError as error:
        return str(error)


def cells(folder: str, until: int, names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: by_trainer(name, f"{folder}/{name}.pt", until) for name in names}


@pytest.fixture(scope="module")
def table() -> dict[str, list[Any]]:
    """Each pattern on one process, and resized from 3 to 1 to 2 in mid-run."""
    names = sorted(MAKERS)
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as resized:
        columns = [on(1, cells, alone, STEPS, names)]
        columns += [on(size, cells, resized, until, names) for size, until in ((3, CUT), (1, CUT + 1), (2, STEPS))]
    for column in columns:
        assert all(each == column[0] for each in column), "processes differ"
    whole = [column[0] for column in columns]
    return {name: [column[name] for column in whole] for name in names}


@pytest.mark.parametrize("name", TRAINED)
def test_the_bits_are_those_of_copies_on_any_number_of_processes(name: str, table: dict[str, list[Any]]) -> None:
    one, *_, resized = table[name]
    copies = expected(name)
    assert one == copies
    assert resized | {"losses": ""} == copies | {"losses": ""}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_in_one_line(name: str, table: dict[str, list[Any]]) -> None:
    assert set(table[name]) == {REFUSED[name]}


class Drawing(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.generator = network(torch.float32), torch.Generator()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.body(inputs + torch.randn(inputs.shape, generator=self.generator))
        return logits


class Growing(nn.Module):
    """Makes a layer when it is first used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network(torch.float32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "more"):
            self.more = nn.Identity()
        logits: torch.Tensor = self.body(inputs)
        return logits


class LateState(nn.Module):
    """Begins to count in its third pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.since = network(torch.float32), 0
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes = self.passes + 1
        if self.passes > 2:
            self.since += 1
        logits: torch.Tensor = self.body(inputs)
        return logits


def refusals() -> dict[str, str]:
    """Return what each construction or first steps are refused with, on this process."""
    found = {}
    optimizer = torch.optim.SGD
    made = {
        "own generator": lambda: ordinary(torch.float32, Drawing()),
        "grows": lambda: ordinary(torch.float32, Growing()),
        "late state": lambda: ordinary(torch.float32, LateState()),
        "lazy": lambda: ordinary(torch.float32, nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))),
        "SyncBatchNorm": lambda: ordinary(torch.float32, nn.Sequential(nn.Linear(6, 3), nn.SyncBatchNorm(3))),
    }
    if dist.is_initialized():
        del made["late state"]  # each process finds it in a turn of its own
        model = network(torch.float32)
        zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optimizer, lr=0.1)
        made["ZeRO"] = lambda: ordinary(torch.float32, model, optimizer=zero)
        made["FSDP2"] = lambda: ordinary(torch.float32, fully_shard(network(torch.float32)))
    for name, construct in made.items():
        try:
            pattern = construct()
            options = {"max_workers": WORKERS, "batch_size": 2}
            trainer = ElasticTrainer(
                pattern.model, pattern.optimizer, nn.CrossEntropyLoss(), pattern.dataset, **options
            )
            steps = [step.number for step in trainer.epoch(0)]
            found[name] = f"trained {len(steps)} steps"
        except InputError as error:
            found[name] = str(error)
    return found


def test_what_no_worker_can_have_for_itself_is_refused() -> None:
    (alone,) = on(1, refusals)
    assert alone["own generator"].startswith("model:generator: is a Generator that changes in a turn")
    assert alone["grows"].startswith("model:more: is added by a forward pass")
    assert alone["late state"].startswith("model:since: changes in turn 8, and did not in the first ones")
    assert alone["lazy"].startswith("model:0.weight: has no shape yet")
    assert alone["SyncBatchNorm"].startswith("model:1: is a SyncBatchNorm")
    for here in on(2, refusals):
        assert here["own generator"] == alone["own generator"]
        assert here["ZeRO"].startswith("optimizer: is ZeroRedundancyOptimizer, whose state is spread over processes")
        assert here["FSDP2"].startswith("model:0.weight: is sharded (FSDP2, a DTensor)")


def wrong_loops() -> dict[str, str]:
    """Return what loops are told that update at the wrong time, with another optimizer, or ask the other processes."""

    def closure(trainer: ElasticTrainer, done: bool) -> None:
        if done:
            trainer.optimizer.step(lambda: torch.zeros(()))

    def early(trainer: ElasticTrainer, done: bool) -> None:
        trainer.optimizer.step()

    def another(trainer: ElasticTrainer, done: bool) -> None:
        with torch.no_grad():
            for value in trainer.model.parameters():
                value += 0.1

    def asks(trainer: ElasticTrainer, done: bool) -> None:
        if done:
            trainer.optimizer.step()

    def cleared(trainer: ElasticTrainer, done: bool) -> None:
        if done:
            trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=False)

    def second(trainer: ElasticTrainer, done: bool) -> None:
        if done:
            trainer.optimizer.step()
            torch.optim.Adam(trainer.model.parameters(), lr=0.01).step()
            trainer.save(os.devnull)

    found = {}
    for way in (closure, early, another, asks, cleared, second):
        made = make("plain", torch.float32)
        sizes = {"max_workers": 2, "batch_size": 2, "accumulation": 2 if way is cleared else 1}
        trainer = ElasticTrainer(made.model, made.optimizer, None, made.dataset, **sizes)
        try:
            for batch in trainer.batches(0):
                loss = made.loss(made.model, batch)
                loss.backward()
                if way is asks and dist.is_initialized():
                    dist.all_reduce(loss.detach())
                way(trainer, trainer.turn_done(loss))
        except InputError as error:
            found[way.__name__] = str(error)
    return found


def test_loops_that_update_at_the_wrong_time_are_refused() -> None:
    (alone,) = on(1, wrong_loops)
    assert alone["closure"].startswith("optimizer.step: was given a closure")
    assert alone["early"].startswith("optimizer.step: came before the step's last turn")
    assert alone["another"].startswith("model: its parameters changed in a turn")
    assert alone["cleared"].startswith("gradients: were changed or cleared between the micro-batches of a turn")
    assert alone["second"].startswith("optimizer: a second one (Adam) trains the model as well, and a checkpoint would")
    for here in on(2, wrong_loops):
        assert here["asks"].startswith("the turn: ran a collective of all processes")
        assert here["cleared"] == alone["cleared"]


def by_epoch(name: str) -> dict[str, str]:
    """Train with ``epoch``, which calls model and loss itself."""
    made = make(name)
    loss: Any = made.criterion
    if name == "dict_batches":
        made.model = Named(made.model)
        loss = lambda outputs, batch: nn.functional.cross_entropy(outputs, batch["targets"])  # noqa: E731
    trainer = ElasticTrainer(made.model, made.optimizer, loss, made.dataset, max_workers=WORKERS, batch_size=BATCH)
    losses: list[float] = []
    for epoch in range(STEPS):
        for step in trainer.epoch(epoch):
            losses.append(step.loss)
            if step.number == STEPS:
                return bits(made, losses)
    raise AssertionError("unreachable")


class Named(nn.Module):
    """Takes its batch by name."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.body(inputs)
        return logits


@pytest.mark.parametrize("name", ["dict_batches", "loss_with_parameters"])
def test_epoch_takes_mappings_and_losses_with_parameters(name: str) -> None:
    for size in (1, 2):
        assert on(size, by_epoch, name)[0] == expected(name)


def test_a_refusal_that_nobody_catches_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    made = make("lbfgs")
    with pytest.raises(InputError) as refused:
        ElasticTrainer(made.model, made.optimizer, None, made.dataset)
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(InputError, refused.value, None)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {REFUSED['lbfgs']}\n"
