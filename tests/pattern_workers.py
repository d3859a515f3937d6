"""Training loops as people write them, run on two ranks with uneven batches and, for comparison, in one process.

Each pattern is one function of a :class:`Script`, which stands for the process that it runs in: alone it hands the model back
and loads whole batches; in a job it wraps the model and takes the loader of the hook or of the balancer. So both runs are the
same lines. A pattern returns what was trained; float64 throughout.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from ddltool import runtime
from ddltool.artifacts import save
from ddltool.errors import InputError
from ddltool.runtime.agent import GoodputAgent
from ddltool.runtime.balancing import BalanceOptions, balance
from ddltool.runtime.hook.batches import VariableBatchSampler
from ddltool.runtime.hook.job import dataset_length
from tests import training_patterns
from tests.runtime_workers import enforcement

SIZES = (12, 20)
TOTAL = sum(SIZES)
SAMPLES = 2 * TOTAL + 8
WIDTH, CLASSES = 6, 3
AGENT_TOTAL, IN_PASSES = 33, "agent in passes"
WAYS = ("hook", "balance", "agent", IN_PASSES)
Pattern = Callable[["Script"], list[Tensor]]
PATTERNS: dict[str, Pattern] = {}


class Script:
    """The process in which a pattern runs; ``way``: alone, or of :data:`WAYS`; ``total``: samples of a step, alone."""

    def __init__(self, way: str, rank: int, total: int = TOTAL) -> None:
        self.way, self.alone, self.rank, self.total = way, way == "alone", 0 if way == "alone" else rank, total
        self.ranks = 1 if self.alone else dist.get_world_size()
        self.begun: list[Tensor] = []

    def begin(self, *things: Any) -> None:
        """Note what is to be trained as it is now."""
        self.begun = values(*things)

    def start(
        self, model: nn.Module, optimizer: Any, dataset: Dataset[Any] | None = None, *, wrap: bool = True, **ddp: Any
    ) -> tuple[Any, Any]:
        """Return the model to train and the hook (balancer, agent) of this process."""
        if self.alone:
            return model, self
        wrapped = DistributedDataParallel(model, **ddp) if wrap else model
        if self.way == "hook":
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "enforce.json")
                save(enforcement(SIZES), path)
                return wrapped, runtime.attach(path, model=wrapped, optimizer=optimizer, dataset=dataset)
        assert dataset is not None
        if self.way == "balance":
            options = BalanceOptions(enabled=False)
            return wrapped, balance(wrapped, optimizer, dataset, sizes=SIZES, options=options)
        most = -(-AGENT_TOTAL // (4 if self.way == IN_PASSES else 2))
        sizes = {"initial_batch_size": AGENT_TOTAL, "max_batch_size": AGENT_TOTAL, "max_local_batch_size": most}
        return wrapped, GoodputAgent(wrapped, optimizer, dataset, **sizes, adapt=False, rule="constant", shuffle=False)

    def epochs(self, handle: Any, dataset: Dataset[Any], **options: Any) -> Iterator[Iterable[Any]]:
        """Yield two epochs of batches."""
        if isinstance(dataset, IterableDataset) and self.alone:
            loader: Any = DataLoader(dataset, batch_size=self.total)
        elif self.alone:
            sampler = VariableBatchSampler(dataset_length(dataset), [self.total], 0, shuffle=False, whole=True)
            loader = DataLoader(dataset, batch_sampler=sampler, **options)
        elif self.way in ("hook", "balance"):
            more = {} if self.way == "balance" else {"batch_size": TOTAL}
            loader = handle.dataloader(shuffle=False, **more, **options)
        for epoch in range(2):
            if self.way in ("hook", "balance"):
                handle.set_epoch(epoch)
            yield handle.batches(epoch, **options) if self.way.startswith("agent") else loader

    def batches(self, handle: Any, dataset: Dataset[Any], **options: Any) -> Iterator[Any]:
        """Yield the batches of two epochs."""
        return itertools.chain.from_iterable(self.epochs(handle, dataset, **options))

    def loss(self, loss: Tensor, **how: Any) -> Tensor:
        """What the hook's ``loss`` is in one process."""
        return loss


def pattern(function: Pattern) -> Pattern:
    PATTERNS[function.__name__.replace("_", " ").strip()] = function
    return function


def outcome(rank: int, name: str, way: str) -> float | str:
    """Return how far a pattern's parameters are from one process's, over how far those moved; or the refusal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        try:
            found = fresh(name, Script(way, rank))
        except InputError as error:
            return str(error)
        alone = Script("alone", rank, total=AGENT_TOTAL if way.startswith("agent") else TOTAL)
        expected = fresh(name, alone)
    finally:
        torch.set_num_threads(threads)
    moved = max(float((one - two).abs().max()) for one, two in zip(expected, alone.begun, strict=True))
    assert moved > 1e-3, "this pattern trains nothing"
    return max(float((one - two).abs().max()) for one, two in zip(expected, found, strict=True)) / moved


def fresh(name: str, script: Script) -> list[Tensor]:
    torch.manual_seed(11)
    if name in training_patterns.PATTERNS:
        return declared(script, training_patterns.PATTERNS[name](torch.float64))
    return PATTERNS[name](script)


def declared(script: Script, made: training_patterns.Pattern) -> list[Tensor]:
    """Return what comes out of a pattern of the common table."""
    script.begin(made.model, *made.seen())
    model, handle = script.start(made.model, made.optimizer, made.dataset, find_unused_parameters=made.unused)
    step = 0
    for epoch in script.epochs(handle, made.dataset):
        for batch in epoch:

            def backward(batch: Any = batch) -> Tensor:
                loss = made.loss(model, batch)
                weighed = loss if made.count is None else handle.loss(loss, count=made.count(batch))
                (weighed if made.scaler is None else made.scaler.scale(weighed)).backward()
                return loss

            if isinstance(made.optimizer, torch.optim.LBFGS):
                made.optimizer.step(lambda backward=backward: made.optimizer.zero_grad() or backward())  # type: ignore[arg-type]
            else:
                backward()
                if not getattr(handle, "complete", True):
                    continue
                made.before_update(step)
                if made.scaler is None:
                    made.optimizer.step()
                else:
                    made.scaler.step(made.optimizer)
                    made.scaler.update()
            made.optimizer.zero_grad()
            made.after_update(step)
            step += 1
            if made.scheduler is not None and not made.per_epoch:
                made.scheduler.step()
        if made.scheduler is not None and made.per_epoch:
            made.scheduler.step()
    return values(made.model, *made.seen())


def values(*things: Any) -> list[Tensor]:
    """Return copies of all parameters, or of tensors."""
    found: list[Tensor] = []
    for thing in things:
        found += thing.parameters() if isinstance(thing, nn.Module) else [thing]
    return [(one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for one in found]


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
    features *= torch.linspace(0.3, 2.0, samples, dtype=torch.float64)[:, None]
    return TensorDataset(features, torch.arange(samples) * 7 % CLASSES)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def sgd(*models: nn.Module, lr: float = 0.3, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD([each for model in models for each in model.parameters()], lr=lr, momentum=momentum)


def trained(
    script: Script,
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], Any] = sgd,
    backward: Callable[[Any, Any, Any, Any], None] | None = None,
    dataset: Dataset[Any] | None = None,
    ddp: dict[str, Any] | None = None,
    after: Callable[[Any, int], None] = lambda optimizer, number: optimizer.step(),
    **options: Any,
) -> list[Tensor]:
    """Return the parameters after a common loop, of which a pattern changes a part."""
    model, dataset = model or net(), dataset or data()
    script.begin(model)
    updates = optimizer(model)
    wrapped, handle = script.start(model, updates, dataset, **(ddp or {}))
    for number, batch in enumerate(script.batches(handle, dataset, **options)):
        updates.zero_grad()
        if backward is None:
            F.cross_entropy(wrapped(batch[0]), batch[1]).backward()
        else:
            backward(wrapped, batch, handle, number)
        after(updates, number)
    return values(model)


# Optimizers, schedules and what comes between backward and update.


@pattern
def zero(script: Script) -> list[Tensor]:
    def optimizer(model: nn.Module) -> Any:
        if script.alone:
            return torch.optim.AdamW(model.parameters(), lr=0.02)
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.02)

    return trained(script, optimizer=optimizer)


def _accumulated(script: Script, *, quiet: bool) -> list[Tensor]:
    model, dataset = net(), data()
    script.begin(model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    for number, (features, labels) in enumerate(script.batches(handle, dataset)):
        last = number % 3 != 0
        quietly = wrapped.no_sync() if quiet and not last and not script.alone else contextlib.nullcontext()
        with quietly:
            (F.cross_entropy(wrapped(features), labels) / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


@pattern
def accumulation_under_no_sync(script: Script) -> list[Tensor]:
    return _accumulated(script, quiet=True)


@pattern
def accumulation_without_no_sync(script: Script) -> list[Tensor]:
    return _accumulated(script, quiet=False)


# Models.


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        made: Tensor = checkpoint(self.layers[1:], hidden, use_reentrant=self.reentrant)
        return made


class Dropped(nn.Module):
    """Leaves a layer out in every other pass (LayerDrop), or never uses one."""

    def __init__(self, drop: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.never, self.drop, self.calls = nn.Linear(2, 2), drop, 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x).tanh()
        if not self.drop or self.calls % 2:
            x = x + self.middle(x).tanh()
        made: Tensor = self.last(x)
        return made


@pattern
def unused_parameters(script: Script) -> list[Tensor]:
    return trained(script, model=Dropped(False), ddp={"find_unused_parameters": True})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 9, bias=False)
        self.head.weight = self.words.weight
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        made: Tensor = self.head(self.mix(self.words(words)).tanh())
        return made


class Positions(nn.Module):
    """Makes a buffer in its first pass: a table that is alike everywhere, or a mean of what it sees."""

    def __init__(self, seen: bool) -> None:
        super().__init__()
        self.inner, self.seen = net(), seen

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            shift = x.detach().mean(0) if self.seen else torch.arange(WIDTH).double() / 10
            self.register_buffer("shift", shift)
        made: Tensor = self.inner(x - self.shift)
        return made


@pattern
def lazily_made_table(script: Script) -> list[Tensor]:
    return trained(script, model=Positions(False))


@pattern
def lazily_made_mean(script: Script) -> list[Tensor]:
    return trained(script, model=Positions(True))


@pattern
def fsdp2(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    script.begin(model)
    if not script.alone:
        mesh = init_device_mesh("cpu", (script.ranks,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset, wrap=False)
    for features, labels in script.batches(handle, dataset):
        optimizer.zero_grad()
        F.cross_entropy(wrapped(features), labels).backward()
        optimizer.step()
    return values(model)


# Averages of the model.


@pattern
def average_made_after(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    script.begin(model, model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    average = AveragedModel(wrapped)
    for features, labels in script.batches(handle, dataset):
        optimizer.zero_grad()
        F.cross_entropy(wrapped(features), labels).backward()
        optimizer.step()
        average.update_parameters(wrapped)
    average(features)
    return values(model, average)


# Passes that are no micro-batches.


@pattern
def two_losses_one_pass(script: Script) -> list[Tensor]:
    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        made = model(batch[0])
        F.cross_entropy(made, batch[1]).backward(retain_graph=True)
        (made.square().mean() * 0.1).backward()

    ddp = {"static_graph": False}
    return trained(script, backward=backward, ddp=ddp)


@pattern
def penalty_on_parameters(script: Script) -> list[Tensor]:
    model = net()

    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        penalty = sum(value.square().sum() for value in model.parameters())
        (F.cross_entropy(wrapped(batch[0]), batch[1]) + 0.01 * penalty).backward()

    return trained(script, model=model, backward=backward)


@pattern
def gan(script: Script) -> list[Tensor]:
    maker, judge, dataset = net(), nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1)).double(), data()
    script.begin(maker, judge)
    of_maker, of_judge = sgd(maker), sgd(judge)
    judging, handle = script.start(judge, of_judge, dataset)
    making, _ = script.start(maker, of_maker, dataset)
    for features, labels in script.batches(handle, dataset):
        truth, noise = F.one_hot(labels, CLASSES).double(), features
        made = making(noise)
        of_judge.zero_grad()
        right, wrong = judging(truth), judging(made.detach())
        ones, zeros = torch.ones_like(right), torch.zeros_like(wrong)
        real = F.binary_cross_entropy_with_logits(right, ones)
        (real + F.binary_cross_entropy_with_logits(wrong, zeros)).backward()
        of_judge.step()
        of_maker.zero_grad()
        F.binary_cross_entropy_with_logits(judging(made), ones).backward()
        of_maker.step()
    return values(maker, judge)


def _fixmatch(script: Script, unlabelled: Callable[[Tensor], Tensor], weigh: bool = False) -> list[Tensor]:
    pool = torch.randn(7 * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    numbered = TensorDataset(*data().tensors, torch.arange(SAMPLES))

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        features, labels, places = batch
        others = pool[unlabelled(places)]
        made = model(torch.cat([features, others]))
        known, guessed = made[: len(labels)], made[len(labels) :]
        sure = (others[:, 0] > 0).double()
        unknown = (F.cross_entropy(guessed, guessed.argmax(1), reduction="none") * sure).mean()
        F.cross_entropy(known, labels).add(unknown, alpha=0.5).backward()

    return trained(script, dataset=numbered, backward=backward)


@pattern
def fixmatch_equal_unlabelled(script: Script) -> list[Tensor]:
    """As many unlabelled samples on all ranks: one share cannot be right for both terms."""
    return _fixmatch(script, lambda places: places.min() * 7 + torch.arange(16))


# Terms that reach other ranks.


class Gathered(torch.autograd.Function):
    """All ranks' rows, with gradients from all of them."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([len(mine)]))
        ctx.counts, most = [int(count) for count in counts], max(map(int, counts))
        rows = [mine.new_zeros(most, *mine.shape[1:]) for _ in counts]
        dist.all_gather(rows, torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])]))
        return torch.cat([part[:count] for part, count in zip(rows, ctx.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.split(ctx.counts)[dist.get_rank()]


class Summed(torch.autograd.Function):
    """The sum over all ranks, as SyncBatchNorm takes it."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        total = mine.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


@pattern
def simclr_gathered(script: Script) -> list[Tensor]:
    """Each rank's anchors against all ranks' embeddings."""

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        one, two = (F.normalize(model(view), dim=1) for view in (batch[0], batch[0] + 0.3))
        others = two if script.alone else Gathered.apply(two)
        first = 0
        if not script.alone:
            counts = [torch.zeros(1, dtype=torch.int64) for _ in range(script.ranks)]
            dist.all_gather(counts, torch.tensor([len(two)]))
            first = int(sum(counts[: script.rank]))  # type: ignore[arg-type]
        F.cross_entropy(one @ others.T / 0.2, first + torch.arange(len(one))).backward()

    return trained(script, backward=backward)


@pattern
def simclr_gathered_on_each(script: Script) -> list[Tensor]:
    """Each rank computes the loss of all anchors, over embeddings that carry gradients back."""

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        views = [F.normalize(model(view), dim=1) for view in (batch[0], batch[0] + 0.3)]
        one, two = views if script.alone else [Gathered.apply(view) for view in views]
        loss = F.cross_entropy(one @ two.T / 0.2, torch.arange(len(one)))
        handle.loss(loss, reduction="average").backward()

    return trained(script, backward=backward)


class SyncNorm(nn.Module):
    """BatchNorm over the samples of all ranks."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.alone, self.scale = script.alone, nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([len(x)])])
        sums = sums if self.alone else Summed.apply(sums)
        mean, square = sums[:8] / sums[-1], sums[8:16] / sums[-1]
        return self.scale * (x - mean) / (square - mean.square() + 1e-3).sqrt()


@pattern
def syncbatchnorm(script: Script) -> list[Tensor]:
    layers = net()
    model = nn.Sequential(layers[0], SyncNorm(script), layers[1], layers[2])
    return trained(script, model=model)


# Losses that are no mean over samples, and batches of other kinds.


def texts() -> TensorDataset:
    lengths = torch.arange(SAMPLES) * 5 % 7 + 1
    words = (torch.arange(SAMPLES * 8) * 5 % 9).view(-1, 8)
    return TensorDataset(words, torch.where(torch.arange(8) <= lengths[:, None], words.roll(1, 1), -100))


def _tokens(script: Script, way: str) -> list[Tensor]:
    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        words, labels = batch
        made, counted = model(words).flatten(0, 1), (labels != -100).sum()
        if way == "all ranks":
            everywhere = counted.double()
            if not script.alone:
                dist.all_reduce(everywhere)
            loss = F.cross_entropy(made, labels.flatten(), reduction="sum") / everywhere * script.ranks
            handle.loss(loss, reduction="average").backward()
        elif way == "sum":
            handle.loss(F.cross_entropy(made, labels.flatten(), reduction="sum") / 100, reduction="sum").backward()
        elif way == "bare sum":
            F.cross_entropy(made, labels.flatten(), reduction="sum").backward()
        else:
            loss = F.cross_entropy(made, labels.flatten())
            (handle.loss(loss, count=counted) if way == "counted" else loss).backward()

    return trained(script, model=Tied(), dataset=texts(), backward=backward)


@pattern
def variable_lengths(script: Script) -> list[Tensor]:
    return _tokens(script, "bare")


@pattern
def labels_of_all_ranks(script: Script) -> list[Tensor]:
    """The loss of transformers' Trainer with average_tokens_across_devices."""
    return _tokens(script, "all ranks")


@pattern
def sum_said(script: Script) -> list[Tensor]:
    return _tokens(script, "sum")


@pattern
def bare_sum(script: Script) -> list[Tensor]:
    return _tokens(script, "bare sum")


@pattern
def weighted_classes(script: Script) -> list[Tensor]:
    """``cross_entropy`` with weights is a mean over the weights of the labels."""

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
        loss = F.cross_entropy(model(batch[0]), batch[1], weight=weights)
        handle.loss(loss, count=weights[batch[1]].sum()).backward()

    return trained(script, backward=backward)


@pattern
def compiled_loss(script: Script) -> list[Tensor]:
    compiled = torch.compile(F.cross_entropy, backend="aot_eager")

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        compiled(model(batch[0]), batch[1]).backward()

    return trained(script, backward=backward)


@pattern
def batch_fetched_ahead(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    script.begin(model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    batches = script.batches(handle, dataset)
    coming = next(batches, None)
    while coming is not None:
        features, labels = coming
        coming = next(batches, None)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(features), labels).backward()
        optimizer.step()
    return values(model)


class Parted(IterableDataset[Any]):
    """The samples from ``begin`` to ``end``, of which each data worker gives a part."""

    def __init__(self, begin: int = 0, end: int = SAMPLES) -> None:
        self.begin, self.end = begin, end

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for place in range(self.begin + worker, self.end, workers):
            yield data()[place]


def _given(script: Script, loader: Any, *, early: bool = False, **options: Any) -> list[Tensor]:
    """A common loop over a loader that the script made before it wrapped its model, or before everything else."""
    hook = None
    # The crew's processes are daemons, which may have no children; these loaders' are gone when their loops end.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if early and not script.alone:
        with tempfile.TemporaryDirectory() as folder:
            save(enforcement(SIZES), Path(folder, "enforce.json"))
            hook = runtime.attach(Path(folder, "enforce.json"))
        loader = hook.planned(loader, **options)
    model = net()
    script.begin(model)
    optimizer, wrapped = sgd(model), model
    if hook is not None:
        wrapped = DistributedDataParallel(model)  # type: ignore[assignment]
        hook.bind(wrapped, optimizer)
    elif not script.alone:
        wrapped, hook = script.start(model, optimizer)
        loader = hook.planned(loader, **options)
    for epoch in range(2):
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(epoch)
            next(iter(loader))
        for features, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(features), labels).backward()
            optimizer.step()
    return values(model)


@pattern
def loader_made_before(script: Script) -> list[Tensor]:
    return _given(script, DataLoader(data(), batch_size=TOTAL, shuffle=True))


@pattern
def loader_of_a_distributed_sampler(script: Script) -> list[Tensor]:
    """It is told its epoch as before, and looked into before each."""
    sampler: Any = DistributedSampler(data(), script.ranks, script.rank, seed=3)
    return _given(script, DataLoader(data(), batch_size=TOTAL, sampler=sampler))


@pattern
def loader_before_everything(script: Script) -> list[Tensor]:
    return _given(script, DataLoader(data(), batch_size=TOTAL, num_workers=1), early=True)


@pattern
def loader_with_its_own_order(script: Script) -> list[Tensor]:
    sampler = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 50)
    loader = DataLoader(data(), batch_size=TOTAL, sampler=sampler, drop_last=True)
    return _given(script, loader)


@pattern
def stream_with_data_workers(script: Script) -> list[Tensor]:
    loader = DataLoader(Parted(), batch_size=TOTAL, num_workers=2)
    return _given(script, loader, early=True)


def _own_streams(script: Script, **options: Any) -> list[Tensor]:
    """Rank 0 has 40 samples in batches of 12, rank 1 has 32 in batches of 20."""
    if script.alone:
        mine, other = list(range(40)), list(range(40, SAMPLES))
        batches = [mine[12 * step : 12 * step + 12] + other[20 * step : 20 * step + 20] for step in range(4)]
        return _given(script, DataLoader(data(), batch_sampler=batches))
    stream = Parted(0, 40) if script.rank == 0 else Parted(40, SAMPLES)
    return _given(script, DataLoader(stream, batch_size=16), **options)


def streams_of_the_ranks_own(script: Script) -> list[Tensor]:
    return _own_streams(script, shared=False)


PATTERNS["streams of the ranks' own"] = streams_of_the_ranks_own


@pattern
def one_stream_of_two(script: Script) -> list[Tensor]:
    return _own_streams(script)


def _own_loader(script: Script, turned: bool) -> list[Tensor]:
    """A loader of the script's own: each rank takes its planned part of each 32 samples, a tail in other shares."""
    model, (features, labels) = net(), data().tensors
    script.begin(model)
    optimizer = sgd(model)
    inner = nn.Sequential(Turned(), model) if turned else model
    wrapped, _ = script.start(inner, optimizer)
    for begin in range(0, SAMPLES, TOTAL):
        size = min(TOTAL, SAMPLES - begin)
        cut = SIZES[0] if size == TOTAL else 5
        mine = slice(begin, begin + size)
        if not script.alone:
            mine = slice(begin, begin + cut) if script.rank == 0 else slice(begin + cut, begin + size)
        optimizer.zero_grad()
        inputs = features[mine].T if turned else features[mine]
        F.cross_entropy(wrapped(inputs), labels[mine]).backward()
        optimizer.step()
    return values(model)


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.T


@pattern
def own_loader(script: Script) -> list[Tensor]:
    return _own_loader(script, turned=False)


@pattern
def own_loader_turned(script: Script) -> list[Tensor]:
    return _own_loader(script, turned=True)


# Scripts that are written in other ways.


@pattern
def past_the_wrapper(script: Script) -> list[Tensor]:
    model = net()

    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    return trained(script, model=model, backward=backward)


@pattern
def past_the_wrapper_after_a_pass(script: Script) -> list[Tensor]:
    model = net()

    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        F.cross_entropy(wrapped(batch[0]), batch[1]).backward()
        model(batch[0].flip(1)).square().mean().backward()

    return trained(script, model=model, backward=backward)


@pattern
def past_the_wrapper_beside_a_pass(script: Script) -> list[Tensor]:
    model = net()

    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        (F.cross_entropy(wrapped(batch[0]), batch[1]) + model(batch[0].flip(1)).square().mean()).backward()

    return trained(script, model=model, backward=backward)


@pattern
def gradients_by_hand(script: Script) -> list[Tensor]:
    """Per-sample gradients, as for privacy."""
    model = net()

    def of_sample(values: dict[str, Tensor], features: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (features[None],)), label[None])

    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        held = {name: value.detach() for name, value in model.named_parameters()}
        found = torch.func.vmap(torch.func.grad(of_sample), (None, 0, 0))(held, *batch)
        for name, value in model.named_parameters():
            value.grad = found[name].mean(0)

    return trained(script, model=model, backward=backward)


def _penalised(script: Script, penalise: Callable[[Any, Tensor], None]) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        penalise(wrapped, batch[0].clone().requires_grad_())

    return trained(script, model=model, backward=backward, optimizer=lambda model: sgd(model, lr=0.01))


def _slopes(made: Tensor, inputs: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(made.sum(), inputs, create_graph=True)
    return found.norm(2, dim=1)


@pattern
def gradient_penalty(script: Script) -> list[Tensor]:
    """The critic of WGAN-GP: the gradient of a gradient."""

    def penalise(wrapped: Any, inputs: Tensor) -> None:
        slopes = _slopes(wrapped(inputs), inputs)
        (wrapped(inputs.flip(1)).mean() - wrapped(inputs * 2).mean() + (slopes - 1).square().mean()).backward()

    return _penalised(script, penalise)


@pattern
def gradient_penalty_and_zero(script: Script) -> list[Tensor]:
    """A term times 0 is there for its graph (the penalty of StyleGAN2)."""

    def penalise(wrapped: Any, inputs: Tensor) -> None:
        made = wrapped(inputs)
        (_slopes(made, inputs).square().mean() + 0 * made[0].sum()).backward()

    return _penalised(script, penalise)


@pattern
def gradient_penalty_alone(script: Script) -> list[Tensor]:
    return _penalised(script, lambda wrapped, inputs: _slopes(wrapped(inputs), inputs).square().mean().backward())


@pattern
def dcgan(script: Script) -> list[Tensor]:
    """Two backward passes for the judge, which is frozen while the maker trains."""
    maker, judge, dataset = net(), nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1)).double(), data()
    script.begin(maker, judge)
    of_maker, of_judge = sgd(maker), sgd(judge)
    judging, handle = script.start(judge, of_judge, dataset)
    making, _ = script.start(maker, of_maker, dataset)
    for features, labels in script.batches(handle, dataset):
        judge.requires_grad_(True)
        of_judge.zero_grad()
        F.softplus(-judging(F.one_hot(labels, CLASSES).double())).mean().backward()
        made = making(features)
        F.softplus(judging(made.detach())).mean().backward()
        of_judge.step()
        judge.requires_grad_(False)
        of_maker.zero_grad()
        F.softplus(-judging(made)).mean().backward()
        of_maker.step()
    return values(maker, judge)


@pattern
def several_updates_with_one_batch(script: Script) -> list[Tensor]:
    """PPO's epochs; truncated back-propagation through time with a state that is carried on."""
    cell, head = nn.GRU(2, 5).double(), nn.Linear(5, CLASSES).double()
    model, dataset = nn.ModuleList([cell, head]), data()
    script.begin(model)

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, part: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            made, state = cell(part[None], state)
            return head(made[0]), state

    optimizer = sgd(model)
    wrapped, handle = script.start(Text(), optimizer, dataset)
    for features, labels in script.batches(handle, dataset):
        state = torch.zeros(1, len(features), 5, dtype=torch.float64)
        for part in features.split(2, dim=1):
            made, state = wrapped(part, state.detach())
            optimizer.zero_grad()
            F.cross_entropy(made, labels).backward()
            optimizer.step()
    return values(model)


@pattern
def mean_teacher(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    script.begin(model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    teacher = copy.deepcopy(wrapped)
    for features, labels in script.batches(handle, dataset):
        with torch.no_grad():
            taught = getattr(teacher, "module", teacher)(features * 1.1).softmax(1)
        optimizer.zero_grad()
        made = wrapped(features)
        (F.cross_entropy(made, labels) + F.kl_div(made.log_softmax(1), taught, reduction="batchmean")).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), wrapped.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return values(model)


@pattern
def batches_left_out(script: Script) -> list[Tensor]:
    """With ``continue``, and with an evaluation that keeps gradients in the middle of a step."""
    model, dataset = net(), data()
    script.begin(model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    for number, (features, labels) in enumerate(script.batches(handle, dataset)):
        if number in (1, 5):
            continue
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(features), labels)
        wrapped.eval()
        model(features[:3])
        wrapped.train()
        loss.backward()
        optimizer.step()
    return values(model)


@pattern
def loss_of_two_batches(script: Script) -> list[Tensor]:
    """One backward pass for two batches."""
    model, dataset, held = net(), data(), []
    script.begin(model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    for number, (features, labels) in enumerate(script.batches(handle, dataset)):
        held.append(F.cross_entropy(wrapped(features), labels))
        if number % 3:
            optimizer.zero_grad()
            (sum(held, torch.zeros(())) / len(held)).backward()
            optimizer.step()
            held = []
    return values(model)


@pattern
def two_optimizers(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    script.begin(model)
    first, second = sgd(model[0]), torch.optim.AdamW(model[2].parameters(), lr=0.02)
    wrapped, handle = script.start(model, first, dataset)
    for features, labels in script.batches(handle, dataset):
        model.zero_grad()
        F.cross_entropy(wrapped(features), labels).backward()
        first.step()
        second.step()
    return values(model)


@pattern
def wrapped_optimizer(script: Script) -> list[Tensor]:
    """As accelerate's: it derives from Optimizer and sets nothing of it up."""

    class Accelerated(torch.optim.Optimizer):
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.optimizer.zero_grad(set_to_none)

    return trained(script, optimizer=lambda model: Accelerated(sgd(model)))


@pattern
def sharpness_aware(script: Script) -> list[Tensor]:
    """Two backward passes with a step aside between them, by an optimizer without a ``step``."""
    model, dataset = net(), data()
    script.begin(model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    for features, labels in script.batches(handle, dataset):
        F.cross_entropy(wrapped(features), labels).backward()
        with torch.no_grad():
            aside = [0.05 * value.grad for value in model.parameters()]  # type: ignore[operator]
            for value, step in zip(model.parameters(), aside, strict=True):
                value += step
        optimizer.zero_grad()
        F.cross_entropy(wrapped(features), labels).backward()
        with torch.no_grad():
            for value, step in zip(model.parameters(), aside, strict=True):
                value -= step
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pattern
def sparse_gradients(script: Script) -> list[Tensor]:
    words = (torch.arange(SAMPLES * 4) * 5 % 9).view(-1, 4)
    model = nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Flatten(), nn.Linear(20, 9)).double()

    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        F.cross_entropy(wrapped(batch[0]), batch[0][:, 0]).backward()

    dataset = TensorDataset(words)
    return trained(
        script, model=model, dataset=dataset, backward=backward, optimizer=lambda each: sgd(each, momentum=0)
    )


@pattern
def gradients_cleared_in_every_pass(script: Script) -> list[Tensor]:
    """As everybody does who has never heard of passes."""
    model, dataset = net(), data()
    script.begin(model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    for features, labels in script.batches(handle, dataset):
        loss = F.cross_entropy(wrapped(features), labels)
        optimizer.zero_grad()
        loss.backward()
        if getattr(handle, "complete", True):
            optimizer.step()
    return values(model)


# Scripts with more than one model, or with gradients that hooks change.


def _taught(script: Script, teach: Callable[[Any, Any, Any, int], Tensor], **options: Any) -> list[Tensor]:
    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        teach(wrapped, batch, handle, number).backward()

    return trained(script, backward=backward, **options)


@pattern
def distillation_from_a_frozen_teacher(script: Script) -> list[Tensor]:
    teacher = net().requires_grad_(False).eval()

    def teach(wrapped: Any, batch: Any, handle: Any, number: int) -> Tensor:
        made = wrapped(batch[0])
        soft = F.kl_div((made / 3).log_softmax(1), (teacher(batch[0]) / 3).softmax(1), reduction="batchmean") * 9
        return 0.3 * F.cross_entropy(made, batch[1]) + 0.7 * soft

    return _taught(script, teach)


@pattern
def q_learning_with_a_target_network(script: Script) -> list[Tensor]:
    """Double DQN: the net chooses, its copy of some steps ago values; gradients are clipped by value."""
    model = net()
    target = copy.deepcopy(model).requires_grad_(False)

    def teach(wrapped: Any, batch: Any, handle: Any, number: int) -> Tensor:
        if number % 2 == 0:
            target.load_state_dict(model.state_dict())
        states, actions = batch
        following = states.roll(1, 1)
        with torch.no_grad():
            valued = target(following).gather(1, model(following).argmax(1, keepdim=True))[:, 0]
        chosen = wrapped(states).gather(1, actions[:, None])[:, 0]
        return F.smooth_l1_loss(chosen, states[:, 0] + 0.9 * valued)

    def after(optimizer: Any, number: int) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()

    return _taught(script, teach, model=model, after=after)


def _queued(script: Script, gathered: bool) -> list[Tensor]:
    """MoCo: positives by a slow copy of the net, negatives from a queue of what the slow copy has seen."""
    model = net()
    slow = copy.deepcopy(model).requires_grad_(False)
    queue = [F.normalize(torch.randn(TOTAL, CLASSES, dtype=torch.float64), dim=1)]

    def teach(wrapped: Any, batch: Any, handle: Any, number: int) -> Tensor:
        asked, keys = F.normalize(wrapped(batch[0]), dim=1), F.normalize(slow(batch[0] * 1.1), dim=1)
        logits = torch.cat([(asked * keys).sum(1, keepdim=True), asked @ queue[0].T], 1) / 0.3
        everything = keys if script.alone or not gathered else Gathered.apply(keys)
        queue[0] = torch.cat([everything, queue[0]])[:TOTAL]
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))

    def after(optimizer: Any, number: int) -> None:
        optimizer.step()
        for one, other in zip(slow.parameters(), model.parameters(), strict=True):
            one.lerp_(other.detach(), 0.2)

    return _taught(script, teach, model=model, after=after)


@pattern
def queue_of_all_ranks_keys(script: Script) -> list[Tensor]:
    return _queued(script, gathered=True)


class Talk(nn.Module):
    """Packed sequences through a recurrent encoder, whose last state starts the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder, self.decoder = nn.Embedding(9, 5), nn.GRU(5, 6, batch_first=True), nn.GRUCell(5, 6)
        self.head = nn.Linear(6, 9)
        self.double()

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        state, made = self.encoder(packed)[1][0], []
        for place in range(words.shape[1]):
            state = self.decoder(self.words(words[:, place]), state)
            made.append(self.head(state))
        return torch.stack(made, 1)


@pattern
def packed_sequences_and_smoothed_labels(script: Script) -> list[Tensor]:
    def teach(wrapped: Any, batch: Any, handle: Any, number: int) -> Tensor:
        words, labels = batch
        counted = (labels != -100).sum()
        made = wrapped(words, (labels != -100).sum(1)).flatten(0, 1)
        loss = F.cross_entropy(made, labels.flatten(), ignore_index=-100, label_smoothing=0.1)
        weighed: Tensor = handle.loss(loss, count=counted)
        return weighed

    return _taught(script, teach, model=Talk(), dataset=texts())


@pattern
def two_tasks_in_two_passes(script: Script) -> list[Tensor]:
    """Each with a forward and a backward pass of its own, scaled by hand, and unscaled before the update."""
    model = net()

    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        (F.cross_entropy(wrapped(batch[0]), batch[1]) * 1024).backward()
        (F.mse_loss(wrapped(batch[0].flip(1)), batch[0][:, :CLASSES]) * 512).backward()

    def after(optimizer: Any, number: int) -> None:
        for value in model.parameters():
            value.grad /= 1024  # type: ignore[operator]
        optimizer.step()

    return trained(script, model=model, backward=backward, after=after)


def _hooked_gradients(script: Script, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model = net()
    for value in model.parameters():
        value.register_hook(change)
    return trained(script, model=model)


@pattern
def centralised_gradients(script: Script) -> list[Tensor]:
    return _hooked_gradients(script, lambda value: value - value.mean(-1, keepdim=True))


@pattern
def gradients_clipped_by_hooks(script: Script) -> list[Tensor]:
    """What a rank clips is its own gradient, before the average."""
    return _hooked_gradients(script, lambda value: value.clamp(-0.01, 0.01))


@pattern
def averaged_weights_at_the_end(script: Script) -> list[Tensor]:
    """torch's SWA, with its schedule."""
    model, dataset = net(), data()
    script.begin(model, model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    average, schedule = AveragedModel(model), torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
    for epoch in script.epochs(handle, dataset):
        for features, labels in epoch:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(features), labels).backward()
            optimizer.step()
        average.update_parameters(model)
        schedule.step()
    return values(model, average)


@pattern
def update_within_backward(script: Script) -> list[Tensor]:
    """Each parameter's optimizer steps as soon as its gradient is there, which is the rank's own."""
    model, dataset = net(), data()
    script.begin(model)
    optimizers = {value: sgd(nn.ParameterList([value])) for value in model.parameters()}
    for value in model.parameters():
        value.register_post_accumulate_grad_hook(lambda value: optimizers[value].step())
    wrapped, handle = script.start(model, optimizers[model[0].weight], dataset)
    for features, labels in script.batches(handle, dataset):
        wrapped.zero_grad()
        F.cross_entropy(wrapped(features), labels).backward()
    return values(model)


@pattern
def optimizer_made_after_unfreezing(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    script.begin(model)
    model[0].requires_grad_(False)
    optimizer = sgd(model[2])
    wrapped, handle = script.start(model, optimizer, dataset)
    for number, (features, labels) in enumerate(script.batches(handle, dataset)):
        if number == 1:
            model[0].requires_grad_(True)
            optimizer = sgd(model)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(features), labels).backward()
        optimizer.step()
    return values(model)


def _beside(script: Script, other: nn.Module) -> list[Tensor]:
    """Something else is trained in turns with the model, by an optimizer of its own."""
    model, dataset = net(), data()
    script.begin(model, other)
    optimizer, second = sgd(model), sgd(other)
    judging: Any = other if script.alone or isinstance(other, nn.ParameterList) else DistributedDataParallel(other)
    wrapped, handle = script.start(model, optimizer, dataset)
    for features, labels in script.batches(handle, dataset):
        made = wrapped(features)
        second.zero_grad()
        optimizer.zero_grad()
        if isinstance(other, nn.ParameterList):
            F.cross_entropy(made * other[0].exp(), labels).backward()
        else:
            judging(made.detach()).square().mean().backward()
            F.cross_entropy(made, labels).backward()
        second.step()
        optimizer.step()
    return values(model, other)


@pattern
def second_model_not_attached(script: Script) -> list[Tensor]:
    return _beside(script, nn.Linear(CLASSES, 1).double())


@pattern
def temperature_of_its_own(script: Script) -> list[Tensor]:
    return _beside(script, nn.ParameterList([nn.Parameter(torch.zeros((), dtype=torch.float64))]))


@pattern
def encoder_and_head_wrapped_each(script: Script) -> list[Tensor]:
    encoder, head, dataset = nn.Linear(WIDTH, 8).double(), nn.Linear(8, CLASSES).double(), data()
    script.begin(encoder, head)
    optimizer = sgd(encoder, head)
    last = head if script.alone else DistributedDataParallel(head)
    wrapped, handle = script.start(encoder, optimizer, dataset)
    for features, labels in script.batches(handle, dataset):
        optimizer.zero_grad()
        F.cross_entropy(last(wrapped(features).tanh()), labels).backward()
        optimizer.step()
    return values(encoder, head)


@pattern
def rates_that_differ(script: Script) -> list[Tensor]:
    """A schedule by what each rank has seen by itself."""

    def after(optimizer: Any, number: int) -> None:
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9 - 0.1 * script.rank

    return trained(script, after=after)


class Codebook(nn.Module):
    """Moves a code to the mean of what is near it, in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.code = net(), nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.code.lerp_(x.mean(0), 0.1)
        made: Tensor = self.inner(x - self.code)
        return made


@pattern
def code_moved_in_a_pass(script: Script) -> list[Tensor]:
    return trained(script, model=Codebook())


class Slotted:
    __slots__ = ("loss",)


class Telling(nn.Module):
    """Returns its loss in an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor, labels: Tensor) -> Slotted:
        made = Slotted()
        made.loss = F.cross_entropy(self.inner(x), labels)  # type: ignore[attr-defined]
        return made


@pattern
def loss_in_slots(script: Script) -> list[Tensor]:
    return trained(script, model=Telling(), backward=lambda model, batch, *_: model(*batch).loss.backward())


@pattern
def norm_of_the_gradient(script: Script) -> list[Tensor]:
    model = net()

    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        loss = F.cross_entropy(wrapped(batch[0]), batch[1])
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.1 * torch.stack([slope.square().sum() for slope in slopes]).sum()).backward()

    return trained(script, model=model, backward=backward)


@pattern
def parts_of_a_size(script: Script) -> list[Tensor]:
    """Each batch in parts of at most 8 samples, so that ranks make different numbers of passes."""

    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        parts = list(zip(batch[0].split(8), batch[1].split(8), strict=True))
        for place, (features, labels) in enumerate(parts):
            quietly = contextlib.nullcontext() if script.alone or place == len(parts) - 1 else wrapped.no_sync()
            with quietly:
                (F.cross_entropy(wrapped(features), labels) * (len(features) / len(batch[0]))).backward()

    return trained(script, backward=backward)


def _averaging() -> Any:
    """Return a communication hook; DDP compares the annotations of one that has some with real types."""

    def average(group, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

    return average


@pattern
def communication_hook_of_its_own(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    script.begin(model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    if not script.alone:
        wrapped.register_comm_hook(None, _averaging())
    for features, labels in script.batches(handle, dataset):
        optimizer.zero_grad()
        F.cross_entropy(wrapped(features), labels).backward()
        optimizer.step()
    return values(model)


def _with_validation(script: Script, *, quiet: bool) -> list[Tensor]:
    """Other batches of the hook's are looked at after each update, and loaders are made anew for each epoch."""
    model = net()
    script.begin(model)
    optimizer = sgd(model)
    wrapped, hook = script.start(model, optimizer)
    for epoch in range(2):
        torch.manual_seed(epoch)
        loaders: list[Any] = [
            DataLoader(data(), batch_size=TOTAL, shuffle=True), DataLoader(data(TOTAL + 9), batch_size=TOTAL),
        ]  # fmt: skip
        training, held_out = loaders if script.alone else map(hook.planned, loaders)
        for features, labels in training:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(features), labels).backward()
            optimizer.step()
            wrapped.eval()
            with torch.no_grad() if quiet else contextlib.nullcontext():
                for features, labels in held_out:
                    F.cross_entropy(wrapped(features), labels)
            wrapped.train()
    return values(model)


@pattern
def validation_between_updates(script: Script) -> list[Tensor]:
    return _with_validation(script, quiet=True)


@pattern
def validation_with_gradients(script: Script) -> list[Tensor]:
    return _with_validation(script, quiet=False)


@pattern
def loader_made_anew(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    script.begin(model)
    optimizer = sgd(model)
    wrapped, hook = script.start(model, optimizer, dataset)
    for epoch in range(2):
        sampler: Any = DistributedSampler(dataset, 1, 0, seed=3)
        sampler.set_epoch(epoch)
        loader = DataLoader(dataset, batch_size=TOTAL, sampler=sampler)
        if not script.alone:
            hook.set_epoch(epoch)
            loader = hook.dataloader(batch_size=TOTAL, seed=3)
        for features, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(features), labels).backward()
            optimizer.step()
    return values(model)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mse": lambda made, target, label: F.mse_loss(made, target),
    "l1": lambda made, target, label: F.l1_loss(made, target),
    "huber": lambda made, target, label: F.huber_loss(made, target),
    "bce": lambda made, target, label: F.binary_cross_entropy_with_logits(
        made, target.sigmoid(), pos_weight=made.new_tensor([1, 2, 3])
    ),
    "multi margin": lambda made, target, label: F.multi_margin_loss(made, label),
    "gaussian": lambda made, target, label: F.gaussian_nll_loss(made, target, target.square() + 1),
    "cosine": lambda made, target, label: F.cosine_embedding_loss(made, target, 2 * (label > 0).double() - 1),
    "batchmean": lambda made, target, label: F.kl_div(made.log_softmax(1), target.softmax(1), reduction="batchmean"),
    "soft labels": lambda made, target, label: F.cross_entropy(made, target.softmax(1)),
    "smoothed labels": lambda made, target, label: F.cross_entropy(made, label, label_smoothing=0.1),
    "ctc": lambda made, target, label: F.ctc_loss(
        (made * torch.arange(1, 4).double()[:, None, None]).log_softmax(2),
        label[:, None] % 2 + 1,
        torch.full_like(label, 3),
        torch.ones_like(label),
    ),
    "loop over samples": lambda made, target, label: torch.stack(
        [F.cross_entropy(*each) for each in zip(made, label, strict=True)]
    ).mean(),
    "two terms": lambda made, target, label: F.cross_entropy(made, label).add(F.mse_loss(made, target), alpha=0.3),
    "weights of samples": lambda made, target, label: (
        F.cross_entropy(made, label, reduction="none") * target[:, 0].abs()
    ).mean(),
    "over their weights": lambda made, target, label: (
        (F.cross_entropy(made, label, reduction="none") * target[:, 0].abs()).sum() / target[:, 0].abs().sum()
    ),
    "weights of classes": lambda made, target, label: F.cross_entropy(made, label, made.new_tensor([1, 2, 5])),
    "ignored": lambda made, target, label: F.cross_entropy(made, label.where(target[:, 0] > 0, torch.tensor(-100))),
    "hard ones": lambda made, target, label: (lambda each: each[each > 1].mean())(
        F.cross_entropy(made, label, reduction="none")
    ),
    "hardest": lambda made, target, label: (
        F.cross_entropy(made, label, reduction="none").topk(len(made) // 4)[0].mean()
    ),
    "constant divisor": lambda made, target, label: F.cross_entropy(made, label, reduction="sum") / 16,
    "sum": lambda made, target, label: F.mse_loss(made, target, reduction="sum"),
    "sum of terms": lambda made, target, label: F.cross_entropy(made, label) + made.abs().sum(),
    "root": lambda made, target, label: F.mse_loss(made, target).sqrt(),
    "dice": lambda made, target, label: (lambda one, two: 1 - 2 * (one * two).sum() / (one + two).sum())(
        made.sigmoid(), target.sigmoid()
    ),
    "variance": lambda made, target, label: (made - made.mean(0)).square().mean(),
    "softmax over the batch": lambda made, target, label: (made.softmax(0) * target).mean(),
    "pairs": lambda made, target, label: F.cross_entropy(made @ made.T, torch.arange(len(made))),
    "mean of columns": lambda made, target, label: (F.mse_loss(made, target, reduction="none").mean(0) / 2).sum(),
    "squared mean": lambda made, target, label: (
        F.cross_entropy(made, label) + 0.1 * made.softmax(1).mean(0).square().sum()
    ),
    "shares of experts": lambda made, target, label: (
        F.cross_entropy(made, label)
        + 0.1 * (F.one_hot(made.argmax(1), CLASSES).to(made.dtype).mean(0) * made.softmax(1).mean(0)).sum()
    ),
    "correlation": lambda made, target, label: (made.T @ made / len(made)).square().mean(),
}


def _with_loss(name: str) -> Pattern:
    def run(script: Script) -> list[Tensor]:
        def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
            LOSSES[name](wrapped(batch[0]), batch[0][:, :CLASSES], batch[1]).backward()

        return trained(script, backward=backward, optimizer=lambda model: sgd(model, lr=0.05))

    return run


PATTERNS |= {f"loss: {name}": _with_loss(name) for name in LOSSES}
