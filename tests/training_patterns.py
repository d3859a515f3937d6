"""Ways in which people train, each as small as it can be: one table for everything that is put into a user's loop.

A pattern is made anew for each process, the same every time. Whoever tests an integration writes its loop once, over
``loss``, ``before_update`` and ``after_update``, and runs all patterns through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset

SAMPLES, FEATURES, CLASSES, LENGTH = 51, 6, 3, 5
Loss = Callable[[Any, Any], Tensor]


@dataclass(kw_only=True)
class Pattern:
    """What a script has before its loop, and what it does in it.

    Attributes:
        loss: the loss of a batch, given the model (wrapped or not); a mean over ``count`` of the batch.
        criterion: the loss as a module, where it has parameters or buffers.
        count: what the loss is a mean over; None: over the samples.
        before_update, after_update: called with the number of the step, from 0.
        seen: what else must come out right.
    """

    model: nn.Module
    optimizer: Any
    loss: Loss
    dataset: Any
    criterion: nn.Module | None = None
    count: Callable[[Any], float] | None = None
    scheduler: Any = None
    per_epoch: bool = False
    scaler: Any = None
    accumulation: int = 1
    unused: bool = False
    before_update: Callable[[int], object] = lambda step: None
    after_update: Callable[[int], object] = lambda step: None
    seen: Callable[[], Sequence[Tensor]] = tuple
    tolerance: float = 1e-6
    also: dict[str, Any] = field(default_factory=dict)


PATTERNS: dict[str, Callable[[torch.dtype], Pattern]] = {}


def pattern(make: Callable[[torch.dtype], Pattern]) -> Callable[[torch.dtype], Pattern]:
    """Add a pattern under its function's name."""

    @functools.wraps(make)
    def made(dtype: torch.dtype) -> Pattern:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            return make(dtype)

    PATTERNS[make.__name__] = made
    return made


def data(dtype: torch.dtype, samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(9)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def network(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


def classified(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def ordinary(dtype: torch.dtype, model: nn.Module | None = None, **changes: Any) -> Pattern:
    model = network(dtype) if model is None else model
    parts: dict[str, Any] = {"optimizer": None, "loss": classified, "dataset": data(dtype)} | changes
    parts["optimizer"] = parts["optimizer"] or sgd(model.parameters())
    return Pattern(model=model, **parts)


@pattern
def plain(dtype: torch.dtype) -> Pattern:
    return ordinary(dtype)


@pattern
def clipping(dtype: torch.dtype) -> Pattern:
    made = ordinary(dtype)
    made.before_update = lambda step: nn.utils.clip_grad_norm_(made.model.parameters(), 0.05)
    return made


@pattern
def adamw(dtype: torch.dtype) -> Pattern:
    model = network(dtype)
    return ordinary(dtype, model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


@pattern
def schedule_per_step(dtype: torch.dtype) -> Pattern:
    made = ordinary(dtype)
    made.scheduler = torch.optim.lr_scheduler.OneCycleLR(made.optimizer, max_lr=0.2, total_steps=20)
    return made


@pattern
def schedule_per_epoch(dtype: torch.dtype) -> Pattern:
    made = ordinary(dtype)
    made.scheduler, made.per_epoch = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, 0.3), True
    return made


@pattern
def accumulation(dtype: torch.dtype) -> Pattern:
    return ordinary(dtype, accumulation=2)


@pattern
def bf16_autocast(dtype: torch.dtype) -> Pattern:
    def loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return classified(model, (batch[0].float(), batch[1]))

    return ordinary(dtype, network(torch.float32), loss=loss, tolerance=0.02)


@pattern
def scaled_with_overflow(dtype: torch.dtype) -> Pattern:
    """The second step overflows and is passed over, on all ranks and processes alike."""
    made = ordinary(dtype)
    made.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def spoil(step: int) -> None:
        if step == 1:
            next(made.model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]

    made.before_update = spoil
    return made


@pattern
def compiled(dtype: torch.dtype) -> Pattern:
    model = network(dtype)
    return ordinary(dtype, torch.compile(model, backend="eager"), optimizer=sgd(model.parameters()))  # type: ignore[arg-type]


class Checkpointed(nn.Module):
    """Computes its body again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.0), nn.Tanh())
        self.head, self.reentrant = nn.Linear(8, CLASSES), reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.detach().requires_grad_()
        logits: Tensor = self.head(checkpoint(self.body, inputs, use_reentrant=self.reentrant))
        return logits


@pattern
def checkpointing(dtype: torch.dtype) -> Pattern:
    return ordinary(dtype, Checkpointed(False).to(dtype))


@pattern
def checkpointing_reentrant(dtype: torch.dtype) -> Pattern:
    return ordinary(dtype, Checkpointed(True).to(dtype))


class Dropping(nn.Module):
    """Leaves a layer out of every second pass, and one out of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        skip = int(self.passes) % 2  # type: ignore[operator,arg-type]
        self.passes = self.passes + 1  # type: ignore[operator]
        for place, layer in enumerate(self.layers):
            if place not in (skip, 2):
                inputs = layer(inputs).tanh()
        logits: Tensor = self.head(inputs)
        return logits


@pattern
def layer_drop(dtype: torch.dtype) -> Pattern:
    return ordinary(dtype, Dropping().to(dtype), unused=True)


class Tied(nn.Module):
    """An embedding that is its own output layer, over sequences of several lengths (0: padding)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(self.embedding(tokens)).tanh())
        return logits


def sequences(dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, 7, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=generator)
    return TensorDataset(torch.where(torch.arange(LENGTH) < lengths, tokens, 0))


@pattern
def tied_weights(dtype: torch.dtype) -> Pattern:
    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).mean(1), batch[0][:, 0])

    return ordinary(dtype, Tied().to(dtype), loss=loss, dataset=sequences(dtype))


@pattern
def short_rows(dtype: torch.dtype) -> Pattern:
    """A forward pass shortens rows of the embedding: those of its batch."""

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).mean(1), batch[0][:, 0])

    model = Tied()
    model.embedding.max_norm = 1.0
    return ordinary(dtype, model.to(dtype), loss=loss, dataset=sequences(dtype))


@pattern
def token_means(dtype: torch.dtype) -> Pattern:
    """The mean is over tokens, of which samples have one to five."""

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten(), ignore_index=0)

    return ordinary(
        dtype,
        Tied().to(dtype),
        loss=loss,
        dataset=sequences(dtype),
        count=lambda batch: float((batch[0] != 0).sum()),
    )


@pattern
def ema(dtype: torch.dtype) -> Pattern:
    made = ordinary(dtype)
    average = torch.optim.swa_utils.AveragedModel(made.model)
    made.after_update = lambda step: average.update_parameters(made.model)
    made.seen = lambda: list(average.parameters())
    made.also = {"average": average}
    return made


@pattern
def two_passes(dtype: torch.dtype) -> Pattern:
    def loss(model: Any, batch: Any) -> Tensor:
        inputs, targets = batch
        first, second = model(inputs), model(inputs.flip(1))
        return F.cross_entropy(first, targets) + F.mse_loss(first.softmax(1), second.softmax(1))

    return ordinary(dtype, loss=loss)


@pattern
def three_passes(dtype: torch.dtype) -> Pattern:
    def loss(model: Any, batch: Any) -> Tensor:
        inputs, targets = batch
        anchor, near, far = model(inputs), model(inputs * 1.1), model(inputs.flip(1))
        return F.triplet_margin_loss(anchor, near, far) + F.cross_entropy(anchor, targets)

    return ordinary(dtype, loss=loss)


@pattern
def thrown_away_pass(dtype: torch.dtype) -> Pattern:
    def loss(model: Any, batch: Any) -> Tensor:
        model(batch[0] * 2)
        return classified(model, batch)

    return ordinary(dtype, loss=loss)


@pattern
def fixmatch(dtype: torch.dtype) -> Pattern:
    """Labelled, and seven times as many unlabelled, in one backward pass."""

    def loss(model: Any, batch: Any) -> Tensor:
        inputs, targets = batch
        weak = torch.cat([inputs * (1 + 0.01 * place) for place in range(7)])
        with torch.no_grad():
            guessed = model(weak).argmax(1)
        return F.cross_entropy(model(inputs), targets) + F.cross_entropy(model(weak.flip(1)), guessed)

    return ordinary(dtype, loss=loss)


@pattern
def simclr(dtype: torch.dtype) -> Pattern:
    """Negatives from the batch at hand: a mean over its samples, of what depends on all of them."""

    def loss(model: Any, batch: Any) -> Tensor:
        one, other = F.normalize(model(batch[0])), F.normalize(model(batch[0].flip(1)))
        return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))

    return ordinary(dtype, loss=loss)


class TimeFirst(nn.Module):
    """A recurrent network whose batches have samples in their second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(2, 5), nn.Linear(5, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(inputs)[0][-1])
        return logits


@pattern
def time_first(dtype: torch.dtype) -> Pattern:
    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].unflatten(1, (3, 2)).transpose(0, 1)), batch[1])

    return ordinary(dtype, TimeFirst().to(dtype), loss=loss)


class Mappings(Dataset[dict[str, Tensor]]):
    """Samples by name."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.inputs, self.targets = data(dtype).tensors

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


@pattern
def dict_batches(dtype: torch.dtype) -> Pattern:
    def loss(model: Any, batch: Any) -> Tensor:
        return classified(model, (batch["inputs"], batch["targets"]))

    return ordinary(dtype, loss=loss, dataset=Mappings(dtype))


class Prototypes(nn.Module):
    """A loss with parameters and a buffer of its own (distance to learned centres, whose pull follows a running mean)."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(CLASSES, CLASSES))
        self.register_buffer("pull", torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        distances = torch.cdist(outputs, self.centres)
        with torch.no_grad():
            self.pull = 0.9 * self.pull + 0.1 * distances.mean()
        return F.cross_entropy(-distances / self.pull, targets)


@pattern
def loss_with_parameters(dtype: torch.dtype) -> Pattern:
    model, criterion = network(dtype), Prototypes().to(dtype)
    return ordinary(
        dtype,
        model,
        criterion=criterion,
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        optimizer=sgd([*model.parameters(), *criterion.parameters()]),
        seen=lambda: list(criterion.parameters()),
    )


@pattern
def loss_with_a_mean_not_told(dtype: torch.dtype) -> Pattern:
    criterion = Prototypes().to(dtype).requires_grad_(False)
    return ordinary(dtype, loss=lambda model, batch: criterion(model(batch[0]), batch[1]))


@pattern
def parameter_outside(dtype: torch.dtype) -> Pattern:
    """A temperature that is in the optimizer, and in no module."""
    model, temperature = network(dtype), nn.Parameter(torch.ones((), dtype=dtype))
    return ordinary(
        dtype,
        model,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]) * temperature, batch[1]),
        optimizer=sgd([{"params": model.parameters()}, {"params": [temperature], "lr": 0.01}]),
        seen=lambda: [temperature],
    )


@pattern
def late_unfreezing(dtype: torch.dtype) -> Pattern:
    made = ordinary(dtype)
    first = next(iter(made.model.children()))
    first.requires_grad_(False)
    made.optimizer = sgd(made.model.parameters())

    def unfreeze(step: int) -> None:
        if step == 1:
            first.requires_grad_(True)

    made.after_update = unfreeze
    return made


class Remembering(nn.Module):
    """Keeps what ``habit`` says from pass to pass, and computes with it."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.body, self.habit = network(torch.float64), habit
        self.calls, self.memory, self.history = 0, torch.zeros(()), []  # type: ignore[var-annotated]
        self.space = SimpleNamespace(calls=0)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs)
        mean = outputs.detach().mean()
        if self.habit == "buffer":
            if not hasattr(self, "kept"):
                self.register_buffer("kept", mean.clone())
            self.kept = 0.5 * self.kept + mean
            return outputs * (1 + self.kept)
        self.calls += 1
        if self.habit == "number":
            return outputs * (1 + self.calls)
        if self.habit == "namespace":
            self.space.calls += 1
            return outputs * (1 + self.space.calls)
        if self.habit == "tensor":
            self.memory = 0.5 * self.memory + mean
            return outputs * (1 + self.memory)
        self.history.append(mean)
        del self.history[:-3]
        return outputs * (1 + sum(self.history))


@pattern
def buffer_made_in_forward(dtype: torch.dtype) -> Pattern:
    return ordinary(dtype, Remembering("buffer").to(dtype))


@pattern
def number_in_attribute(dtype: torch.dtype) -> Pattern:
    return ordinary(dtype, Remembering("number").to(dtype))


@pattern
def number_in_namespace(dtype: torch.dtype) -> Pattern:
    return ordinary(dtype, Remembering("namespace").to(dtype))


@pattern
def tensor_in_attribute(dtype: torch.dtype) -> Pattern:
    return ordinary(dtype, Remembering("tensor").to(dtype))


@pattern
def tensors_in_list(dtype: torch.dtype) -> Pattern:
    return ordinary(dtype, Remembering("list").to(dtype))


@pattern
def batch_norm_and_dropout(dtype: torch.dtype) -> Pattern:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))
    return ordinary(dtype, model.to(dtype))


@pattern
def lbfgs(dtype: torch.dtype) -> Pattern:
    model = network(dtype)
    return ordinary(dtype, model, optimizer=torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))


class Endless(IterableDataset[Any]):
    """Samples that only come one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*data(torch.float64).tensors, strict=True))


@pattern
def iterable_dataset(dtype: torch.dtype) -> Pattern:
    return ordinary(dtype, dataset=Endless())
