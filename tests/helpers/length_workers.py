"""Ranks that train a small attention model on sentences of unequal length, against one process with whole batches."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from ddltool import runtime
from tests.helpers.runtime_workers import furthest, gradients

WORDS = 11


class Sentences(Dataset[tuple[int, Tensor]]):
    """So many sentences of 1 to 40 words, most of them short; an item is its index and its words."""

    def __init__(self, samples: int) -> None:
        chance = np.random.default_rng(5)
        self.lengths = np.minimum(chance.lognormal(2, 0.9, samples).astype(int) + 1, 40)
        self.words = [torch.from_numpy(chance.integers(1, WORDS, length)) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.words[index]


def padded(samples: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """The indices, and the words with zeros behind."""
    return torch.tensor([index for index, _ in samples]), pad_sequence(
        [words for _, words in samples], batch_first=True
    )


class Attention(nn.Module):
    """Causal attention over the words of each sentence; padding takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.mixed, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, 24), nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        query, key, value = self.mixed(self.embedded(words)).chunk(3, dim=-1)
        out: Tensor = self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return out


def made() -> Attention:
    torch.manual_seed(2)
    return Attention().double()


def token_loss(model: nn.Module, words: Tensor) -> tuple[Tensor, int]:
    """The mean over all words that are there, and their number."""
    loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten(), ignore_index=0)
    return loss, int((words > 0).sum())


def trained(rank: int, config: str, way: str, passes: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train an epoch; return the largest error of a step's gradients, the samples of each, and each step's tokens here.

    ``way``: the hook's own loader, or one that is planned. Half-way the sampler's state goes into a new sampler.
    """
    data = Sentences(103)
    model, reference = DistributedDataParallel(made()), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # so that every step starts alike
    hook = runtime.attach(config, model=model, optimizer=optimizer, dataset=data)
    lengths = runtime.Lengths(data.lengths, **options) if options else data.lengths
    if way == "hook":
        loader = hook.dataloader(batch_size=1, seed=3, lengths=lengths, collate_fn=padded)
    else:
        given = DataLoader(data, batch_size=4, shuffle=True, collate_fn=padded)
        loader = hook.planned(given, accumulated=passes if passes > 1 else None, lengths=lengths)
    steps: list[list[int]] = []
    error, tokens, group = 0.0, [0], list[int]()
    sizes: list[int] = []
    torch.manual_seed(4)  # the planned loader's own sampler draws its order from it
    for number, (indices, words) in enumerate(loader, 1):
        group += indices.tolist()
        sizes.append(len(indices))
        is_last = number % passes == 0
        loss, count = token_loss(model, words)
        tokens[-1] += count
        with contextlib.nullcontext() if is_last else model.no_sync():
            # of a mean over the samples each pass would have its weight; over tokens the pass says its own
            (hook.loss(loss * count, reduction="sum") / 100).backward()
        if not is_last:
            continue
        everybody: list[Any] = [None] * hook.world_size
        torch.distributed.all_gather_object(everybody, group)
        together = [index for each in everybody for index in each]
        reference.zero_grad()
        whole, total = token_loss(reference, padded([data[index] for index in sorted(together)])[1])
        (whole * total / 100).backward()
        error = max(error, furthest(gradients(model), gradients(reference)))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(sorted(together))
        group, tokens = [], [*tokens, 0]
    return {"error": error, "steps": steps, "tokens": tokens[:-1], "sizes": sizes}


def mean_error(rank: int, config: str) -> float:
    """Return the largest error of gradients of a mean over samples, and one over tokens with a count, on shared-out batches."""
    data = Sentences(64)
    model, reference = DistributedDataParallel(made()), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hook = runtime.attach(config, model=model, optimizer=optimizer, dataset=data)
    worst = 0.0
    for number, (indices, words) in enumerate(
        hook.dataloader(batch_size=1, seed=3, lengths=data.lengths, collate_fn=padded)
    ):
        loss, count = token_loss(model, words)
        everybody: list[Any] = [None] * hook.world_size
        torch.distributed.all_gather_object(everybody, indices.tolist())
        whole = padded([data[index] for each in everybody for index in each])[1]
        if number % 2:
            hook.loss(loss, count=count).backward()
            expected = token_loss(reference, whole)[0]
        else:
            hook.loss(_per_sample(model, words)).backward()
            expected = _per_sample(reference, whole)
        reference.zero_grad()
        expected.backward()
        worst = max(worst, furthest(gradients(model), gradients(reference)))
        optimizer.step()
        optimizer.zero_grad()
    return worst


def _per_sample(model: nn.Module, words: Tensor) -> Tensor:
    """The mean over sentences of the mean over their words."""
    losses = nn.functional.cross_entropy(model(words).transpose(1, 2), words, ignore_index=0, reduction="none")
    return (losses.sum(dim=1) / (words > 0).sum(dim=1)).mean()


def refusals(rank: int, config: str, given: list[Any]) -> list[str]:
    """Return what the hook says to each of the lengths; the last are each rank's own."""
    from tests.helpers.processes import message_of

    data = Sentences(20)
    hook = runtime.attach(config, dataset=data)
    said = [message_of(lambda each=each: hook.dataloader(batch_size=1, lengths=each)) for each in given]  # type: ignore[misc]
    return [*said, message_of(lambda: hook.dataloader(batch_size=1, lengths=data.lengths + rank))]


def counted(steps: list[list[int]]) -> Counter[int]:
    return Counter(index for step in steps for index in step)
