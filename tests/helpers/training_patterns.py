"""Ways in which people train, each as small as it can be: one table for everything that is put into a user's loop.

A pattern is made anew for each process, the same every time. Whoever tests an integration writes its loop once, over
``loss``, ``update`` and ``after``, and runs all patterns through it.
"""

from __future__ import annotations

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


@dataclass(kw_only=True)
class Pattern:
    """What a script has before its loop, and what it does in it.

    Attributes:
        loss: the loss of a batch, given the model (wrapped or not); a mean over ``count`` of the batch.
        criterion: the loss as a module, where it has parameters or buffers.
        count: what the loss is a mean over; None: over the samples.
        before_update, after_update: called with the pattern and the number of the step, from 0.
        seen: what else must come out right.
        also: what else a checkpoint has to hold.
    """

    model: nn.Module
    optimizer: Any
    loss: Callable[[Any, Any], Tensor]
    dataset: Any
    criterion: nn.Module | None = None
    count: Callable[[Any], float] | None = None
    scheduler: Any = None
    per_epoch: bool = False
    scaler: Any = None
    accumulation: int = 1
    unused: bool = False
    before_update: Callable[[Pattern, int], object] = lambda pattern, step: None
    after_update: Callable[[Pattern, int], object] = lambda pattern, step: None
    seen: Sequence[Tensor] = ()
    also: dict[str, Any] = field(default_factory=dict)

    def update(self, step: int) -> None:
        """Do what lies between a step's last backward pass and its next forward pass."""
        self.before_update(self, step)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def after(self, step: int, *, epoch_ends: bool) -> None:
        """Do what comes after an update, and at the end of an epoch."""
        if self.scheduler is not None and (epoch_ends or not self.per_epoch):
            self.scheduler.step()
        self.after_update(self, step)


def data(dtype: torch.dtype, samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(9)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def sequences(dtype: torch.dtype) -> TensorDataset:
    """Rows of one to five tokens; 0 is padding."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, 7, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=generator)
    return TensorDataset(torch.where(torch.arange(LENGTH) < lengths, tokens, 0))


class Mappings(Dataset[dict[str, Tensor]]):
    """Samples by name."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.inputs, self.targets = data(dtype).tensors

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


class Endless(IterableDataset[Any]):
    """Samples that only come one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*data(torch.float64).tensors, strict=True))


def network(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


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


class Tied(nn.Module):
    """An embedding that is its own output layer."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, max_norm=max_norm)
        self.body = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.body(self.embedding(tokens)).tanh())
        return logits


class TimeFirst(nn.Module):
    """A recurrent network whose batches have samples in their second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(2, 5), nn.Linear(5, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(inputs)[0][-1])
        return logits


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


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def classified(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def first_tokens(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).mean(1), batch[0][:, 0])


def every_token(model: Any, batch: Any) -> Tensor:
    """The mean over the tokens, of which samples have one to five."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten(), ignore_index=0)


def tokens(batch: Any) -> float:
    return float((batch[0] != 0).sum())


def two_views(model: Any, batch: Any) -> Tensor:
    first, second = model(batch[0]), model(batch[0].flip(1))
    return F.cross_entropy(first, batch[1]) + F.mse_loss(first.softmax(1), second.softmax(1))


def after_a_pass_for_nothing(model: Any, batch: Any) -> Tensor:
    model(batch[0] * 2)
    return classified(model, batch)


def fixmatch(model: Any, batch: Any) -> Tensor:
    """Labelled, and seven times as many unlabelled, in one backward pass."""
    weak = torch.cat([batch[0] * (1 + 0.01 * place) for place in range(7)])
    with torch.no_grad():
        guessed = model(weak).argmax(1)
    return classified(model, batch) + F.cross_entropy(model(weak.flip(1)), guessed)


def simclr(model: Any, batch: Any) -> Tensor:
    """Negatives from the batch at hand: a mean over its samples, of what depends on all of them."""
    one, other = F.normalize(model(batch[0])), F.normalize(model(batch[0].flip(1)))
    return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))


def in_bf16(model: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return classified(model, (batch[0].float(), batch[1]))


def ordinary(dtype: torch.dtype, model: nn.Module | None = None, **changes: Any) -> Pattern:
    model = network(dtype) if model is None else model
    parts: dict[str, Any] = {"optimizer": None, "loss": classified, "dataset": data(dtype)} | changes
    parts["optimizer"] = parts["optimizer"] or sgd(model.parameters())
    return Pattern(model=model, **parts)


def clip(pattern: Pattern, step: int) -> None:
    nn.utils.clip_grad_norm_(pattern.model.parameters(), 0.05)


def spoil(pattern: Pattern, step: int) -> None:
    if step == 1:
        next(pattern.model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]


def unfreeze(pattern: Pattern, step: int) -> None:
    if step == 1:
        next(iter(pattern.model.children())).requires_grad_(True)


def scheduled(dtype: torch.dtype, schedule: Callable[[Any], Any], **changes: Any) -> Pattern:
    pattern = ordinary(dtype, **changes)
    pattern.scheduler = schedule(pattern.optimizer)
    return pattern


def compiled(dtype: torch.dtype) -> Pattern:
    model = network(dtype)
    return ordinary(dtype, torch.compile(model, backend="eager"), optimizer=sgd(model.parameters()))  # type: ignore[arg-type]


def optimized(dtype: torch.dtype, optimizer: Callable[..., Any], **options: Any) -> Pattern:
    model = network(dtype)
    return ordinary(dtype, model, optimizer=optimizer(model.parameters(), **options))


def tied(dtype: torch.dtype, loss: Callable[[Any, Any], Tensor] = first_tokens, **changes: Any) -> Pattern:
    model = Tied(changes.pop("max_norm", None)).to(dtype)
    return ordinary(dtype, model, loss=loss, dataset=sequences(dtype), **changes)


def ema(dtype: torch.dtype) -> Pattern:
    pattern = ordinary(
        dtype, after_update=lambda pattern, step: pattern.also["average"].update_parameters(pattern.model)
    )
    pattern.also = {"average": torch.optim.swa_utils.AveragedModel(pattern.model)}
    pattern.seen = list(pattern.also["average"].parameters())
    return pattern


def loss_with_parameters(dtype: torch.dtype, trained: bool) -> Pattern:
    """``trained``: the optimizer has the loss's parameters too, and the loss is told."""
    model, criterion = network(dtype), Prototypes().to(dtype).requires_grad_(trained)
    pattern = ordinary(dtype, model, loss=lambda model, batch: criterion(model(batch[0]), batch[1]))
    if trained:
        pattern.criterion, pattern.seen = criterion, list(criterion.parameters())
        pattern.optimizer = sgd([*model.parameters(), *criterion.parameters()])
    return pattern


def parameter_outside(dtype: torch.dtype) -> Pattern:
    """A temperature that is in the optimizer, and in no module."""
    model, temperature = network(dtype), nn.Parameter(torch.ones((), dtype=dtype))
    return ordinary(
        dtype,
        model,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]) * temperature, batch[1]),
        optimizer=sgd([{"params": model.parameters()}, {"params": [temperature], "lr": 0.01}]),
        seen=[temperature],
    )


def late_unfreezing(dtype: torch.dtype) -> Pattern:
    pattern = ordinary(dtype, after_update=unfreeze)
    pattern.model[0].requires_grad_(False)  # type: ignore[index]
    return pattern


def batch_norm_and_dropout(dtype: torch.dtype) -> Pattern:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))
    return ordinary(dtype, model.to(dtype))


MAKERS: dict[str, Callable[[torch.dtype], Pattern]] = {
    "plain": ordinary,
    "clipping": lambda dtype: ordinary(dtype, before_update=clip),
    "adamw": lambda dtype: optimized(dtype, torch.optim.AdamW, lr=0.01),
    "lbfgs": lambda dtype: optimized(dtype, torch.optim.LBFGS, lr=0.1, max_iter=3),
    "schedule_per_step": lambda dtype: scheduled(
        dtype, lambda updates: torch.optim.lr_scheduler.OneCycleLR(updates, max_lr=0.2, total_steps=20)
    ),
    "schedule_per_epoch": lambda dtype: scheduled(
        dtype, lambda updates: torch.optim.lr_scheduler.StepLR(updates, 1, 0.3), per_epoch=True
    ),
    "accumulation": lambda dtype: ordinary(dtype, accumulation=2),
    "bf16_autocast": lambda dtype: ordinary(dtype, network(torch.float32), loss=in_bf16),
    # The second step overflows and is passed over, on all ranks and processes alike.
    "scaled_with_overflow": lambda dtype: ordinary(
        dtype, scaler=torch.amp.GradScaler("cpu", init_scale=256.0), before_update=spoil
    ),
    "compiled": compiled,
    "checkpointing": lambda dtype: ordinary(dtype, Checkpointed(False).to(dtype)),
    "checkpointing_reentrant": lambda dtype: ordinary(dtype, Checkpointed(True).to(dtype)),
    "layer_drop": lambda dtype: ordinary(dtype, Dropping().to(dtype), unused=True),
    "tied_weights": tied,
    # A forward pass shortens rows of the embedding: those of its batch.
    "short_rows": lambda dtype: tied(dtype, max_norm=1.0),
    "token_means": lambda dtype: tied(dtype, every_token, count=tokens),
    "ema": ema,
    "two_passes": lambda dtype: ordinary(dtype, loss=two_views),
    "thrown_away_pass": lambda dtype: ordinary(dtype, loss=after_a_pass_for_nothing),
    "fixmatch": lambda dtype: ordinary(dtype, loss=fixmatch),
    "simclr": lambda dtype: ordinary(dtype, loss=simclr),
    "time_first": lambda dtype: ordinary(
        dtype,
        TimeFirst().to(dtype),
        loss=lambda model, batch: classified(model, (batch[0].unflatten(1, (3, 2)).transpose(0, 1), batch[1])),
    ),
    "dict_batches": lambda dtype: ordinary(
        dtype, loss=lambda model, batch: classified(model, (batch["inputs"], batch["targets"])), dataset=Mappings(dtype)
    ),
    "iterable_dataset": lambda dtype: ordinary(dtype, dataset=Endless()),
    "loss_with_parameters": lambda dtype: loss_with_parameters(dtype, True),
    "loss_with_a_mean_not_told": lambda dtype: loss_with_parameters(dtype, False),
    "parameter_outside": parameter_outside,
    "late_unfreezing": late_unfreezing,
    "buffer_made_in_forward": lambda dtype: ordinary(dtype, Remembering("buffer").to(dtype)),
    "number_in_attribute": lambda dtype: ordinary(dtype, Remembering("number").to(dtype)),
    "number_in_namespace": lambda dtype: ordinary(dtype, Remembering("namespace").to(dtype)),
    "tensor_in_attribute": lambda dtype: ordinary(dtype, Remembering("tensor").to(dtype)),
    "tensors_in_list": lambda dtype: ordinary(dtype, Remembering("list").to(dtype)),
    "batch_norm_and_dropout": batch_norm_and_dropout,
}


def make(name: str, dtype: torch.dtype = torch.float64) -> Pattern:
    """Return the pattern of a name, the same every time, and leave the random stream alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return MAKERS[name](dtype)
