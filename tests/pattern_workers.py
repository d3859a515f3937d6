"""Training loops as people write them, run on two ranks with uneven batches and, for comparison, in one process.

Each pattern is one function of a :class:`Script`, which stands for the process that it runs in: alone it hands the model back
and loads whole batches; in a job it wraps the model and takes the loader of the hook or of the balancer. So both runs are the
same lines. A pattern returns what was trained; float64 throughout.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
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
from ddltool.runtime.balancing import BalanceOptions, balance
from ddltool.runtime.hook.batches import VariableBatchSampler
from tests.runtime_workers import enforcement

SIZES = (12, 20)
TOTAL = sum(SIZES)
SAMPLES = 2 * TOTAL + 8
WIDTH, CLASSES = 6, 3
Pattern = Callable[["Script"], list[Tensor]]
PATTERNS: dict[str, Pattern] = {}


class Script:
    """The process in which a pattern runs; ``way``: alone, hook or balance."""

    def __init__(self, way: str, rank: int) -> None:
        self.way, self.alone, self.rank = way, way == "alone", 0 if way == "alone" else rank
        self.ranks = 1 if self.alone else dist.get_world_size()

    def start(
        self, model: nn.Module, optimizer: Any, dataset: Dataset[Any] | None = None, *, wrap: bool = True, **ddp: Any
    ) -> tuple[Any, Any]:
        """Return the model to train and the hook (or balancer) of this process."""
        if self.alone:
            return model, self
        wrapped = DistributedDataParallel(model, **ddp) if wrap else model
        if self.way == "balance":
            assert dataset is not None
            options = BalanceOptions(enabled=False)
            return wrapped, balance(wrapped, optimizer, dataset, sizes=SIZES, options=options)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "enforce.json")
            save(enforcement(SIZES), path)
            return wrapped, runtime.attach(path, model=wrapped, optimizer=optimizer, dataset=dataset)

    def batches(self, handle: Any, dataset: Dataset[Any], epochs: int = 2, **options: Any) -> Iterator[Any]:
        """Yield the batches of some epochs."""
        if self.alone:
            loader = DataLoader(dataset, batch_sampler=whole_batches(dataset), **options)
        else:
            more = {} if self.way == "balance" else {"batch_size": TOTAL}
            loader = handle.dataloader(shuffle=False, **more, **options)
        for epoch in range(epochs):
            if not self.alone:
                handle.set_epoch(epoch)
            yield from loader

    def loss(self, loss: Tensor, **how: Any) -> Tensor:
        """What the hook's ``loss`` is in one process."""
        return loss


def whole_batches(dataset: Any) -> VariableBatchSampler:
    return VariableBatchSampler(len(dataset), [TOTAL], 0, shuffle=False)


def pattern(function: Pattern) -> Pattern:
    PATTERNS[function.__name__.replace("_", " ").strip()] = function
    return function


def outcome(rank: int, name: str, way: str) -> float | str:
    """Return how far a pattern's parameters are from one process's, over how far those moved; or the refusal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = fresh(name, Script("alone", rank))
        try:
            found = fresh(name, Script(way, rank))
        except InputError as error:
            return str(error)
    finally:
        torch.set_num_threads(threads)
    begun = STARTS[name]
    moved = max(float((one - two).abs().max()) for one, two in zip(expected, begun, strict=True))
    assert moved > 1e-3, "this pattern trains nothing"
    return max(float((one - two).abs().max()) for one, two in zip(expected, found, strict=True)) / moved


STARTS: dict[str, list[Tensor]] = {}


def fresh(name: str, script: Script) -> list[Tensor]:
    torch.manual_seed(11)
    return PATTERNS[name](script)


def values(*things: Any) -> list[Tensor]:
    """Return copies of all parameters, or of tensors."""
    found: list[Tensor] = []
    for thing in things:
        found += thing.parameters() if isinstance(thing, nn.Module) else [thing]
    return [(one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for one in found]


def begins(script: Script, *things: Any) -> None:
    """Note what the parameters are before training, in the run alone."""
    if script.alone:
        import inspect

        caller = inspect.stack()[1].function
        STARTS[CALLED.get(caller, caller.replace("_", " ").strip())] = values(*things)


CALLED: dict[str, str] = {}


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
    epoch_end: Callable[[], None] = lambda: None,
    name: str,
    **options: Any,
) -> list[Tensor]:
    """Return the parameters after a common loop, of which a pattern changes a part."""
    model, dataset = model or net(), dataset or data()
    if script.alone:
        STARTS[name] = values(model)
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
def plain(script: Script) -> list[Tensor]:
    return trained(script, name="plain")


@pattern
def clipping(script: Script) -> list[Tensor]:
    model = net()

    def after(optimizer: Any, number: int) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return trained(script, model=model, after=after, name="clipping")


@pattern
def scheduler_per_step(script: Script) -> list[Tensor]:
    schedulers: list[Any] = []

    def optimizer(model: nn.Module) -> Any:
        made = sgd(model)
        schedulers.append(torch.optim.lr_scheduler.OneCycleLR(made, 0.5, total_steps=8))
        return made

    def after(optimizer: Any, number: int) -> None:
        optimizer.step()
        schedulers[0].step()

    return trained(script, optimizer=optimizer, after=after, name="scheduler per step")


@pattern
def scheduler_per_epoch(script: Script) -> list[Tensor]:
    schedulers: list[Any] = []

    def optimizer(model: nn.Module) -> Any:
        made = sgd(model)
        schedulers.append(torch.optim.lr_scheduler.StepLR(made, 1, 0.5))
        return made

    def after(optimizer: Any, number: int) -> None:
        optimizer.step()
        if number % 3 == 2:
            schedulers[0].step()

    return trained(script, optimizer=optimizer, after=after, name="scheduler per epoch")


@pattern
def adamw(script: Script) -> list[Tensor]:
    return trained(script, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.02), name="adamw")


@pattern
def lbfgs(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    begins(script, model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    wrapped, handle = script.start(model, optimizer, dataset)
    for features, labels in script.batches(handle, dataset):

        def closure(features: Tensor = features, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(features), labels)
            loss.backward()
            # The script's own job, with or without uneven batches: a line search goes by the loss of all ranks.
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
    return values(model)


@pattern
def zero(script: Script) -> list[Tensor]:
    def optimizer(model: nn.Module) -> Any:
        if script.alone:
            return torch.optim.AdamW(model.parameters(), lr=0.02)
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.02)

    return trained(script, optimizer=optimizer, name="zero")


def _accumulated(script: Script, name: str, *, quiet: bool) -> list[Tensor]:
    model, dataset = net(), data()
    STARTS[name] = values(model)
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
    return _accumulated(script, "accumulation under no sync", quiet=True)


@pattern
def accumulation_without_no_sync(script: Script) -> list[Tensor]:
    return _accumulated(script, "accumulation without no sync", quiet=False)


@pattern
def bfloat16_autocast(script: Script) -> list[Tensor]:
    """In float64 autocast changes nothing; what it leaves in the graph is there all the same."""

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()

    return trained(script, backward=backward, name="bfloat16 autocast")


@pattern
def gradscaler_with_overflow(script: Script) -> list[Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss * (torch.inf if number == 1 else 1.0)).backward()

    def after(optimizer: Any, number: int) -> None:
        scaler.step(optimizer)
        scaler.update()

    return trained(script, backward=backward, after=after, name="gradscaler with overflow")


# Models.


@pattern
def compiled_model(script: Script) -> list[Tensor]:
    model = net()
    if script.alone:
        return trained(script, model=model, name="compiled model")
    trained(script, model=torch.compile(model, backend="eager"), name="compiled model")  # type: ignore[arg-type]
    return values(model)


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        made: Tensor = checkpoint(self.layers[1:], hidden, use_reentrant=self.reentrant)
        return made


@pattern
def checkpointing(script: Script) -> list[Tensor]:
    return trained(script, model=Recomputed(False), name="checkpointing")


@pattern
def reentrant_checkpointing(script: Script) -> list[Tensor]:
    return trained(script, model=Recomputed(True), name="reentrant checkpointing")


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
    return trained(script, model=Dropped(False), ddp={"find_unused_parameters": True}, name="unused parameters")


@pattern
def layerdrop(script: Script) -> list[Tensor]:
    return trained(script, model=Dropped(True), ddp={"find_unused_parameters": True}, name="layerdrop")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 9, bias=False)
        self.head.weight = self.words.weight
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        made: Tensor = self.head(self.mix(self.words(words)).tanh())
        return made


@pattern
def tied_weights(script: Script) -> list[Tensor]:
    words = (torch.arange(SAMPLES * 4) * 5 % 9).view(-1, 4)

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].roll(1, 1).flatten()).backward()

    return trained(script, model=Tied(), dataset=TensorDataset(words), backward=backward, name="tied weights")


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
    return trained(script, model=Positions(False), name="lazily made table")


@pattern
def lazily_made_mean(script: Script) -> list[Tensor]:
    return trained(script, model=Positions(True), name="lazily made mean")


@pattern
def time_first_rnn(script: Script) -> list[Tensor]:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(WIDTH, 5), nn.Linear(5, CLASSES)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(self.cell(x)[1][0])
            return made

    def collate(samples: Any) -> tuple[Tensor, Tensor]:
        return torch.stack([one[0].expand(7, WIDTH) for one in samples], 1), torch.stack([one[1] for one in samples])

    return trained(script, model=Recurrent(), collate_fn=collate, name="time first rnn")


@pattern
def fsdp2(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    begins(script, model)
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
def average_made_before(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    begins(script, model, model)
    optimizer, average = sgd(model), AveragedModel(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    for features, labels in script.batches(handle, dataset):
        optimizer.zero_grad()
        F.cross_entropy(wrapped(features), labels).backward()
        optimizer.step()
        average.update_parameters(model)
    return values(model, average)


@pattern
def average_made_after(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    begins(script, model, model)
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
def two_passes(script: Script) -> list[Tensor]:
    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        one, two = model(batch[0]), model(-batch[0])
        (F.cross_entropy(one, batch[1]) + F.mse_loss(one, two)).backward()

    return trained(script, backward=backward, name="two passes")


@pattern
def three_passes(script: Script) -> list[Tensor]:
    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        one, two, three = model(batch[0]), model(batch[0] * 1.1), model(batch[0].flip(1))
        F.triplet_margin_loss(one, two, three).backward()

    return trained(script, backward=backward, name="three passes")


@pattern
def pass_thrown_away(script: Script) -> list[Tensor]:
    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        model(batch[0] * 2)  # nobody uses it
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    return trained(script, backward=backward, name="pass thrown away")


@pattern
def two_losses_one_pass(script: Script) -> list[Tensor]:
    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        made = model(batch[0])
        F.cross_entropy(made, batch[1]).backward(retain_graph=True)
        (made.square().mean() * 0.1).backward()

    ddp = {"static_graph": False}
    return trained(script, backward=backward, ddp=ddp, name="two losses one pass")


@pattern
def penalty_on_parameters(script: Script) -> list[Tensor]:
    model = net()

    def backward(wrapped: Any, batch: Any, handle: Any, number: int) -> None:
        penalty = sum(value.square().sum() for value in model.parameters())
        (F.cross_entropy(wrapped(batch[0]), batch[1]) + 0.01 * penalty).backward()

    return trained(script, model=model, backward=backward, name="penalty on parameters")


@pattern
def gan(script: Script) -> list[Tensor]:
    maker, judge, dataset = net(), nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1)).double(), data()
    begins(script, maker, judge)
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


def _fixmatch(script: Script, name: str, unlabelled: Callable[[Tensor], Tensor], weigh: bool = False) -> list[Tensor]:
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

    return trained(script, dataset=numbered, backward=backward, name=name)


@pattern
def fixmatch(script: Script) -> list[Tensor]:
    """One batch labelled, seven times as many unlabelled, one backward pass."""
    return _fixmatch(script, "fixmatch", lambda places: (places[:, None] * 7 + torch.arange(7)).flatten())


@pattern
def fixmatch_equal_unlabelled(script: Script) -> list[Tensor]:
    """As many unlabelled samples on all ranks: one share cannot be right for both terms."""
    return _fixmatch(script, "fixmatch equal unlabelled", lambda places: places.min() * 7 + torch.arange(16))


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
def simclr(script: Script) -> list[Tensor]:
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

    return trained(script, backward=backward, name="simclr")


@pattern
def simclr_all_on_each(script: Script) -> list[Tensor]:
    """Each rank computes the loss of all anchors, over embeddings that carry gradients back."""

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        views = [F.normalize(model(view), dim=1) for view in (batch[0], batch[0] + 0.3)]
        one, two = views if script.alone else [Gathered.apply(view) for view in views]
        loss = F.cross_entropy(one @ two.T / 0.2, torch.arange(len(one)))
        handle.loss(loss, reduction="average").backward()

    return trained(script, backward=backward, name="simclr all on each")


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
    return trained(script, model=model, name="syncbatchnorm")


# Losses that are no mean over samples, and batches of other kinds.


def texts() -> TensorDataset:
    lengths = torch.arange(SAMPLES) * 5 % 7 + 1
    words = (torch.arange(SAMPLES * 8) * 5 % 9).view(-1, 8)
    return TensorDataset(words, torch.where(torch.arange(8) <= lengths[:, None], words.roll(1, 1), -100))


def _tokens(script: Script, name: str, way: str) -> list[Tensor]:
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

    return trained(script, model=Tied(), dataset=texts(), backward=backward, name=name)


@pattern
def variable_lengths(script: Script) -> list[Tensor]:
    return _tokens(script, "variable lengths", "bare")


@pattern
def variable_lengths_counted(script: Script) -> list[Tensor]:
    return _tokens(script, "variable lengths counted", "counted")


@pattern
def labels_of_all_ranks(script: Script) -> list[Tensor]:
    """The loss of transformers' Trainer with average_tokens_across_devices."""
    return _tokens(script, "labels of all ranks", "all ranks")


@pattern
def sum_said(script: Script) -> list[Tensor]:
    return _tokens(script, "sum said", "sum")


@pattern
def bare_sum(script: Script) -> list[Tensor]:
    return _tokens(script, "bare sum", "bare sum")


@pattern
def weighted_classes(script: Script) -> list[Tensor]:
    """``cross_entropy`` with weights is a mean over the weights of the labels."""

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
        loss = F.cross_entropy(model(batch[0]), batch[1], weight=weights)
        handle.loss(loss, count=weights[batch[1]].sum()).backward()

    return trained(script, backward=backward, name="weighted classes")


@pattern
def compiled_loss(script: Script) -> list[Tensor]:
    compiled = torch.compile(F.cross_entropy, backend="aot_eager")

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        compiled(model(batch[0]), batch[1]).backward()

    return trained(script, backward=backward, name="compiled loss")


@pattern
def dict_batches(script: Script) -> list[Tensor]:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, *, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
            made = self.inner(features)
            return {"loss": F.cross_entropy(made, labels), "logits": made}

    def collate(samples: Any) -> dict[str, Tensor]:
        return {
            "features": torch.stack([one[0] for one in samples]),
            "labels": torch.stack([one[1] for one in samples]),
        }

    def backward(model: Any, batch: Any, handle: Any, number: int) -> None:
        model(**batch)["loss"].backward()

    return trained(script, model=Named(), backward=backward, collate_fn=collate, name="dict batches")


@pattern
def batch_fetched_ahead(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    begins(script, model)
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


@pattern
def loss_with_parameters(script: Script) -> list[Tensor]:
    model, dataset, heat = net(), data(), nn.Linear(1, 1).double()
    begins(script, model, heat)
    optimizer = sgd(model, heat)
    wrapped, handle = script.start(model, optimizer, dataset)
    for features, labels in script.batches(handle, dataset):
        optimizer.zero_grad()
        F.cross_entropy(wrapped(features) * heat.weight, labels).backward()
        optimizer.step()
    return values(model, heat)


@pattern
def late_unfreezing(script: Script) -> list[Tensor]:
    model = net()
    model[0].requires_grad_(False)

    def after(optimizer: Any, number: int) -> None:
        optimizer.step()
        if number == 2:
            model[0].requires_grad_(True)

    return trained(script, model=model, after=after, name="late unfreezing")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*data().tensors, strict=True))


@pattern
def iterable_dataset(script: Script) -> list[Tensor]:
    model, dataset = net(), Stream()
    begins(script, model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    loader: Any = DataLoader(dataset, batch_size=TOTAL)
    if not script.alone:
        loader = handle.dataloader(**({} if script.way == "balance" else {"batch_size": TOTAL}))
    for _ in range(2):
        for features, labels in loader:
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


def _given(script: Script, name: str, loader: Any, *, early: bool = False, **options: Any) -> list[Tensor]:
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
    STARTS[name] = values(model)
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
        for features, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(features), labels).backward()
            optimizer.step()
    return values(model)


@pattern
def loader_made_before(script: Script) -> list[Tensor]:
    return _given(script, "loader made before", DataLoader(data(), batch_size=TOTAL, shuffle=True))


@pattern
def loader_before_everything(script: Script) -> list[Tensor]:
    return _given(script, "loader before everything", DataLoader(data(), batch_size=TOTAL, num_workers=1), early=True)


@pattern
def loader_with_its_own_order(script: Script) -> list[Tensor]:
    sampler = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 50)
    loader = DataLoader(data(), batch_size=TOTAL, sampler=sampler, drop_last=True)
    return _given(script, "loader with its own order", loader)


@pattern
def stream_with_data_workers(script: Script) -> list[Tensor]:
    loader = DataLoader(Parted(), batch_size=TOTAL, num_workers=2)
    return _given(script, "stream with data workers", loader, early=True)


def _own_streams(script: Script, name: str, **options: Any) -> list[Tensor]:
    """Rank 0 has 40 samples in batches of 12, rank 1 has 32 in batches of 20."""
    if script.alone:
        mine, other = list(range(40)), list(range(40, SAMPLES))
        batches = [mine[12 * step : 12 * step + 12] + other[20 * step : 20 * step + 20] for step in range(4)]
        return _given(script, name, DataLoader(data(), batch_sampler=batches))
    stream = Parted(0, 40) if script.rank == 0 else Parted(40, SAMPLES)
    return _given(script, name, DataLoader(stream, batch_size=16), **options)


def streams_of_the_ranks_own(script: Script) -> list[Tensor]:
    return _own_streams(script, "streams of the ranks' own", shared=False)


PATTERNS["streams of the ranks' own"] = streams_of_the_ranks_own


@pattern
def one_stream_of_two(script: Script) -> list[Tensor]:
    return _own_streams(script, "one stream of two")


def _own_loader(script: Script, name: str, turned: bool) -> list[Tensor]:
    """A loader of the script's own: each rank takes its planned part of each 32 samples, a tail in other shares."""
    model, (features, labels) = net(), data().tensors
    STARTS[name] = values(model)
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
    return _own_loader(script, "own loader", turned=False)


@pattern
def own_loader_turned(script: Script) -> list[Tensor]:
    return _own_loader(script, "own loader turned", turned=True)
