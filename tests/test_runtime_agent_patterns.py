"""Every way to train under the agent, on two ranks with uneven batches, is that of one process in float64, or is refused.

The oracle has none of the code under test: a copy of everything for each rank, whose gradients are added by what the losses
are means over.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from ddltool.analyzers.goodput.elastic_table import Split
from ddltool.errors import InputError
from ddltool.runtime.agent.agent import GoodputAgent
from ddltool.runtime.hook.batches import VariableBatchSampler
from tests.agent_workers import scripted
from tests.runtime_workers import crew
from tests.training_patterns import PATTERNS, Pattern

RANKS, TOTAL, EPOCHS = 2, 17, 2
PER_REPLICA = {"batch_norm_and_dropout", "buffer_made_in_forward"}
"""What DDP computes otherwise than one process, with equal batches as well."""
REFUSED = {
    "iterable_dataset": "dataset: is a Endless, an IterableDataset; give a map-style dataset (with __len__ and __getitem__)",
    "late_unfreezing": "optimizer: trains module.0.weight, which was frozen when DDP wrapped the model",
    "loss_with_parameters": "optimizer: trains a parameter of shape (3, 3) that is not in the model",
    "parameter_outside": "optimizer: trains a parameter of shape () that is not in the model",
}
TRAINED = sorted(PATTERNS.keys() - REFUSED - PER_REPLICA)


def made_of(name: str) -> Pattern:
    return PATTERNS[name](torch.float64)


def split_of(made: Pattern) -> Split:
    return Split(world_size=RANKS, total_batch_size=TOTAL, accumulation_steps=made.accumulation - 1)


def result(made: Pattern) -> list[Tensor]:
    return [value.detach().double().clone() for value in (*made.model.parameters(), *made.seen())]


def expected_of(name: str) -> list[Tensor]:
    """Train one copy of everything for each rank, in one process."""
    copies = [made_of(name) for _ in range(RANKS)]
    first = copies[0]
    size = len(first.dataset)
    step = 0
    for epoch in range(EPOCHS):
        rows: list[list[list[Any]]] = []
        for rank, made in enumerate(copies):
            sampler = VariableBatchSampler(size, split_of(made), rank, whole=True)
            sampler.set_epoch(epoch)
            for indices in sampler:
                taken = sampler.issued.popleft()
                while len(rows) <= taken.step:
                    rows.append([[] for _ in copies])
                rows[taken.step][rank].append(default_collate([made.dataset[index] for index in indices]))
        for row in rows:
            total = sum(counted(first, batch) for part in row for batch in part)

            def loss_of(row: Any = row, total: float = total) -> Tensor:
                for made in copies:
                    made.optimizer.zero_grad()
                shown = 0.0
                for made, part in zip(copies, row, strict=True):
                    for batch in part:
                        loss = made.loss(made.model, batch) * (counted(made, batch) / total)
                        (first.scaler or Unscaled).scale(loss).backward()
                        shown += loss.item()
                for values in zip(*(made.model.parameters() for made in copies), strict=True):
                    gradients = [value.grad for value in values if value.grad is not None]
                    values[0].grad = sum(gradients[1:], gradients[0].clone()) if gradients else None
                return torch.tensor(shown)

            if name == "lbfgs":
                first.optimizer.step(lambda: same(copies) or loss_of())
            else:
                loss_of()
                update(first, step)
            same(copies)
            step += 1
            if first.scheduler is not None and not first.per_epoch:
                first.scheduler.step()
            for made in copies:
                made.after_update(step - 1)
        if first.scheduler is not None and first.per_epoch:
            first.scheduler.step()
    return result(first)


class Unscaled:
    """A scaler that scales nothing."""

    @staticmethod
    def scale(loss: Tensor) -> Tensor:
        return loss


def same(copies: list[Pattern]) -> None:
    with torch.no_grad():
        for values in zip(*(made.model.parameters() for made in copies), strict=True):
            for value in values[1:]:
                value.copy_(values[0])


def counted(made: Pattern, batch: Any) -> float:
    if made.count is not None:
        return made.count(batch)
    return float(len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0]))


def update(made: Pattern, step: int) -> None:
    made.before_update(step)
    if made.scaler is None:
        made.optimizer.step()
    else:
        made.scaler.step(made.optimizer)
        made.scaler.update()


def follows(made: Pattern, model: nn.Module, **options: Any) -> GoodputAgent:
    given = {
        "initial_batch_size": TOTAL,
        "max_batch_size": TOTAL,
        "max_local_batch_size": -(-TOTAL // (RANKS * made.accumulation)),
        "adapt": False,
        "scheduler": None if made.per_epoch else made.scheduler,
        "rule": "constant",
    } | options
    return GoodputAgent(model, made.optimizer, made.dataset, **given)


def by_agent(name: str, plain: bool, counts: bool = True, **changes: Any) -> list[Tensor] | str:
    """Train as a script does; ``plain``: with loss.backward()."""
    made = made_of(name)
    for key, value in changes.items():
        setattr(made, key, value(made))
    model = DistributedDataParallel(made.model, find_unused_parameters=made.unused)
    step = 0
    try:
        agent = follows(made, model)
        for epoch in range(EPOCHS):
            for batch in agent.batches(epoch):

                def backward(batch: Any = batch) -> Tensor:
                    loss = made.loss(model, batch)
                    scaled = (made.scaler or Unscaled).scale(loss)
                    if made.count is not None and counts:
                        agent.backward(scaled, count=made.count(batch))
                    elif plain:
                        scaled.backward()
                    else:
                        agent.backward(scaled)
                    return loss

                if name == "lbfgs":
                    made.optimizer.step(lambda backward=backward: made.optimizer.zero_grad() or backward())
                else:
                    backward()
                if not agent.complete:
                    continue
                if name != "lbfgs":
                    update(made, step)
                made.optimizer.zero_grad()
                made.after_update(step)
                step += 1
            if made.scheduler is not None and made.per_epoch:
                made.scheduler.step()
        agent.close()
    except InputError as error:
        return str(error)
    return result(made)


def cells(rank: int, names: list[str], plain: bool) -> dict[str, Any]:
    return {name: by_agent(name, plain) for name in names}


@pytest.fixture(scope="module", params=["agent.backward", "loss.backward"])
def table(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return crew().run(cells, sorted(PATTERNS.keys() - PER_REPLICA), request.param == "loss.backward")


@functools.cache
def reference(name: str) -> list[Tensor]:
    return expected_of(name)


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_that_of_one_process_in_float64(name: str, table: list[dict[str, Any]]) -> None:
    made = made_of(name)
    start = result(made)
    for cell in table:
        found = cell[name]
        assert not isinstance(found, str), found
        for value, right, before in zip(found, reference(name), start, strict=True):
            moved = float((right - before).norm())
            assert float((value - right).norm()) <= made.tolerance * max(moved, 1e-3), name


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_in_one_line(name: str, table: list[dict[str, Any]]) -> None:
    for cell in table:
        assert cell[name].startswith(REFUSED[name])


def wrapped_optimizers(rank: int) -> dict[str, Any]:
    """Return what comes out with accelerate's wrapper and with ZeRO, and what a second optimizer and other losses meet."""

    class Accelerated(torch.optim.Optimizer):
        """As accelerate's: it derives from Optimizer and sets nothing of it up."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.optimizer.zero_grad(set_to_none)

    def zero(made: Pattern) -> Any:
        return ZeroRedundancyOptimizer(made.model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9)

    made = made_of("plain")
    other = nn.Linear(2, 2)
    second = torch.optim.SGD(other.parameters(), lr=0.1)

    def gan(model: Any, batch: Any) -> Tensor:
        other(torch.ones(2)).sum().backward()
        second.step()
        return made.loss(model, batch)

    return {
        "accelerate": by_agent("plain", False, optimizer=lambda made: Accelerated(made.optimizer)),
        "ZeRO": by_agent("plain", False, optimizer=zero),
        "a second optimizer": by_agent("plain", False, loss=lambda _: gan),
        "no count": by_agent("token_means", False, counts=False),
        "a sum": by_agent(
            "plain",
            False,
            loss=lambda _: lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
        ),
    }


def test_wrapped_optimizers_are_right_and_what_cannot_be_weighed_is_refused() -> None:
    for found in crew().run(wrapped_optimizers):
        for name in ("accelerate", "ZeRO"):
            assert not isinstance(found[name], str), found[name]
            for value, right in zip(found[name], reference("plain"), strict=True):
                torch.testing.assert_close(value, right, rtol=0, atol=1e-7)
        assert found["a second optimizer"].startswith("optimizer: a second one (SGD) steps within agent.batches")
        assert found["no count"].startswith("loss: is a mean over")
        assert found["a sum"].startswith("loss: is a sum over the batch, not a mean over its samples")


def differing(rank: int) -> str:
    """Return what ranks are told whose datasets have the same length and other samples."""
    made = made_of("plain")
    made.dataset.tensors[0][0] += rank
    with pytest.raises(InputError) as refused:
        follows(made, DistributedDataParallel(made.model))
    return str(refused.value)


def test_datasets_that_differ_are_refused() -> None:
    for told in crew().run(differing):
        assert told.startswith("dataset: content of samples: differs between rank 0")


def gathered(rank: int) -> list[Tensor]:
    """Train SimCLR with negatives from all ranks: gradients reach the embeddings that other ranks have made."""
    made = made_of("plain")

    def loss(model: Any, batch: Any) -> Tensor:
        one, other = model(batch[0]), model(batch[0].flip(1))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
        dist.all_gather(sizes, torch.tensor([len(one)]))
        padded = nn.functional.pad(other, (0, 0, 0, int(max(sizes)) - len(other)))
        parts = torch.distributed.nn.functional.all_gather(padded)
        keys = torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])
        begin = int(sizes[0]) * rank
        return nn.functional.cross_entropy(one @ keys.T, torch.arange(begin, begin + len(one)))

    made.loss = loss
    model = DistributedDataParallel(made.model)
    agent = follows(made, model)
    for batch in agent.batches(0):
        agent.backward(made.loss(model, batch))
        made.optimizer.step()
        made.optimizer.zero_grad()
    agent.close()
    return result(made)


def test_terms_that_reach_other_ranks_come_out_right() -> None:
    made = made_of("plain")
    sampler = VariableBatchSampler(len(made.dataset), [TOTAL], 0)
    for indices in sampler:
        inputs, _ = default_collate([made.dataset[index] for index in indices])
        made.optimizer.zero_grad()
        one, other = made.model(inputs), made.model(inputs.flip(1))
        nn.functional.cross_entropy(one @ other.T, torch.arange(len(one))).backward()
        made.optimizer.step()
    for found in crew().run(gathered):
        for value, right in zip(found, result(made), strict=True):
            torch.testing.assert_close(value, right, rtol=0, atol=1e-9)


def scheduled(rank: int, script: dict[int, tuple[int, int]], hand: bool) -> Any:
    """Train one epoch of 51 samples, 4 at first, under a schedule of its 13 steps; return its rates."""
    made = made_of("plain")
    scheduler = torch.optim.lr_scheduler.LinearLR(made.optimizer, 1.0, 0.0, total_iters=13)
    model: nn.Module = DistributedDataParallel(made.model) if dist.is_initialized() else made.model
    rates, steps = [], 0
    with scripted(script):
        agent = follows(
            made,
            model,
            initial_batch_size=4,
            max_batch_size=16,
            max_local_batch_size=16,
            adapt=True,
            interval_steps=2,
            background=False,
            scheduler=None if hand else scheduler,
        )
        try:
            for batch in agent.batches(0):
                agent.backward(made.loss(model, batch))
                made.optimizer.step()
                steps += 1
                if hand:
                    scheduler.step()
                rates.append((agent.sampler.position, made.optimizer.param_groups[0]["lr"]))
        except InputError as error:
            return str(error)
        agent.close()
    return rates


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_schedule_of_steps_goes_with_the_samples(ranks: int) -> None:
    script = {0: (12, 0)}
    for rates in crew().run(scheduled, script, False) if ranks == 2 else [scheduled(0, script, False)]:
        assert len(rates) == 2 + 4  # 4 + 4 samples, then 12 each, the last 7
        for position, rate in rates:
            done = 13 if position == 51 else position // 4
            assert rate == pytest.approx(0.1 * (1 - done / 13))
    told = scheduled(0, script, True)
    assert told.startswith(
        "the learning rate: changes from step to step of an epoch, but larger batches make fewer steps"
    )


def test_a_step_that_was_passed_over_is_no_progress() -> None:
    made = made_of("scaled_with_overflow")
    agent = follows(made, made.model, max_local_batch_size=TOTAL, rule="linear")
    for step, batch in enumerate(agent.batches(0)):
        agent.backward(made.scaler.scale(made.loss(made.model, batch)))
        update(made, step)
        made.optimizer.zero_grad()
    assert agent.sampler.position == len(made.dataset)
    assert agent.progress == len(made.dataset) / TOTAL - 1
    agent.close()


def test_a_loop_that_fetches_ahead_is_refused() -> None:
    made = made_of("plain")
    batches = follows(made, made.model, max_local_batch_size=TOTAL).batches(0)
    assert len(batches) == len(made.dataset) / TOTAL
    next(batches)
    with pytest.raises(InputError, match=r"agent.batches: the next one was fetched before the first was trained on"):
        next(batches)


def test_a_refusal_that_nobody_catches_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    made = PATTERNS["iterable_dataset"](torch.float64)
    with pytest.raises(InputError) as refused:
        follows(made, made.model)
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(InputError, refused.value, None)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {REFUSED['iterable_dataset']}\n"
