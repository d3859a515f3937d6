"""Training loops as people write them, on two ranks with the hook, the balancer or the agent, against one process.

Each loop is one function of a :class:`Script`, which stands for the process that it runs in: alone it hands the model back
and loads whole batches; in a job it wraps the model and takes the loader of the hook, the balancer or the agent. So both runs
are the same lines. A loop returns what was trained; float64 throughout. The loops are in :mod:`tests.helpers.pattern_cases`.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from ddltool import runtime
from ddltool.artifacts import save
from ddltool.errors import InputError
from ddltool.runtime.agent import GoodputAgent
from ddltool.runtime.balancing import BalanceOptions, balance
from ddltool.runtime.processes.batches import VariableBatchSampler
from ddltool.runtime.processes.same_samples import dataset_length
from tests.helpers import training_patterns
from tests.helpers.runtime_workers import enforcement

WIDTH, CLASSES, LENGTH = training_patterns.FEATURES, training_patterns.CLASSES, training_patterns.LENGTH
TOTAL, AGENT_TOTAL = 32, 33
STEPS = 9
"""Whole steps of an epoch of the long ways; a smaller one comes after them."""
HOOK, BALANCE, AGENT, IN_PASSES = "hook", "balance", "agent", "agent in passes"
UNEVEN, EVEN = "hook, uneven", "hook, even"
SIZES = {EVEN: (16, 16)}
USUAL = (HOOK, BALANCE, AGENT)
RIGHT, LIMIT = "", "limit"
Loss = Callable[..., Any]
"""The loss of a batch as said, given the model (wrapped or not), the batch's tensors and ``say``; None: backward is done."""
Loop = Callable[["Script"], list[Tensor]]


class Script:
    """The process in which a loop runs; ``way``: how it is trained; ``alone``: on whole batches, by itself."""

    def __init__(self, way: str, rank: int, *, alone: bool = False) -> None:
        self.sizes, self.is_long = SIZES.get(way, (12, 20)), way in (UNEVEN, EVEN)
        self.way, self.alone, self.rank = HOOK if self.is_long else way, alone, 0 if alone else rank
        self.total = AGENT_TOTAL if way in (AGENT, IN_PASSES) else TOTAL
        self.ranks = 1 if alone else dist.get_world_size()
        self.begun: list[Tensor] = []

    def begin(self, *things: Any) -> None:
        """Note what is to be trained as it is now."""
        self.begun = values(*things)

    def start(
        self, model: nn.Module, optimizer: Any, dataset: Any = None, *, wrap: bool = True, **ddp: Any
    ) -> tuple[Any, Any]:
        """Return the model to train and the hook (balancer, agent) of this process."""
        if self.alone:
            return model, self
        wrapped: Any = DistributedDataParallel(model, **ddp) if wrap else model
        if self.way == HOOK:
            with self.plan() as path:
                return wrapped, runtime.attach(path, model=wrapped, optimizer=optimizer, dataset=dataset)
        if self.way == BALANCE:
            options = BalanceOptions(enabled=False)
            return wrapped, balance(wrapped, optimizer, dataset, sizes=self.sizes, options=options)
        most = -(-AGENT_TOTAL // (4 if self.way == IN_PASSES else 2))
        sizes = {"initial_batch_size": AGENT_TOTAL, "max_batch_size": AGENT_TOTAL, "max_local_batch_size": most}
        return wrapped, GoodputAgent(wrapped, optimizer, dataset, **sizes, adapt=False, rule="constant", shuffle=False)

    def epochs(self, handle: Any, dataset: Dataset[Any]) -> Iterator[Iterable[Any]]:
        """Yield two epochs of batches."""
        agent = self.way in (AGENT, IN_PASSES) and not self.alone
        if isinstance(dataset, IterableDataset) and self.alone:
            loader: Any = DataLoader(dataset, batch_size=self.total)
        elif self.alone:
            sampler = VariableBatchSampler(dataset_length(dataset), [self.total], 0, shuffle=False, whole=True)
            loader = DataLoader(dataset, batch_sampler=sampler)
        elif not agent:
            loader = handle.dataloader(shuffle=False, **({} if self.way == BALANCE else {"batch_size": self.total}))
        for epoch in range(2):
            if not self.alone and not agent:
                handle.set_epoch(epoch)
            yield handle.batches(epoch) if agent else loader

    def batches(self, handle: Any, dataset: Dataset[Any]) -> Iterator[Any]:
        """Yield the batches of two epochs."""
        return itertools.chain.from_iterable(self.epochs(handle, dataset))

    @contextlib.contextmanager
    def plan(self) -> Iterator[Path]:
        """Give the file of a plan with the local batches."""
        with tempfile.TemporaryDirectory() as folder:
            save(enforcement(self.sizes), path := Path(folder, "enforce.json"))
            yield path

    def loss(self, loss: Tensor, *, count: Any = None, reduction: str = "mean") -> Tensor:
        """Return what the hook's ``loss`` is in one process: a sum over what is counted becomes the mean."""
        return loss / count if reduction == "sum" and count is not None else loss

    def data(self, tail: int = 11) -> TensorDataset:
        """Samples for two steps and a smaller one; or for ``STEPS`` and ``tail``."""
        return training_patterns.data(torch.float64, STEPS * TOTAL + tail if self.is_long else 2 * TOTAL + 8)

    def quiet(self, wrapped: Any, *, last: bool) -> Any:
        """Return DDP's ``no_sync`` for all passes of a step but the last."""
        return contextlib.nullcontext() if self.alone or last else wrapped.no_sync()

    def summed(self, number: Any) -> Tensor:
        """Return the sum of a number over the ranks."""
        number = torch.as_tensor(number, dtype=torch.float64).detach().clone()
        if not self.alone:
            dist.all_reduce(number)
        return number

    def gathered(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return all ranks' rows, with gradients from all of them, and the place of this rank's first one."""
        if self.alone:
            return rows, 0
        counts: list[Any] = [None] * self.ranks
        dist.all_gather_object(counts, len(rows))
        first = sum(counts[: self.rank])
        return all_reduce(F.pad(rows, (0, 0, first, sum(counts) - first - len(rows)))), first


def values(*things: Any) -> list[Tensor]:
    """Return copies of all parameters, or of tensors."""
    tensors = [each for thing in things for each in (thing.parameters() if isinstance(thing, nn.Module) else [thing])]
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in tensors]


def net(*_: Any) -> nn.Sequential:
    return training_patterns.network(torch.float64)


def sgd(*models: nn.Module, lr: float = 0.3) -> torch.optim.SGD:
    return training_patterns.sgd([value for model in models for value in model.parameters()], lr)


def bare(model: Any) -> Any:
    """Return the model in its wrapper, if it has one."""
    return getattr(model, "module", model)


def usual(m: Any, x: Any, y: Any, say: Any) -> Any:
    return say(F.cross_entropy(m(x), y))


def trained(
    script: Script,
    loss: Loss = usual,
    *,
    model: Callable[[], Any] = net,
    dataset: Callable[[], Any] | None = None,
    lr: float | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    order: Callable[[Iterator[Any]], Iterable[Any]] = iter,
    ready: Callable[[Any], object] = lambda wrapped: None,
    after: Callable[[Any], object] = lambda optimizer: optimizer.step(),
    **start: Any,
) -> list[Tensor]:
    """Return the parameters after a common loop, of which a case changes a part.

    ``model``, ``optimizer``, ``dataset`` make these; ``order``: how the loop takes its batches; ``ready``: what it does with
    the wrapped model; ``after``: with the optimizer after each backward pass.
    """
    module, samples = model(), dataset() if dataset else script.data()
    script.begin(module)
    updates = optimizer(module) if optimizer else sgd(module, lr=lr or (0.05 if script.is_long else 0.3))
    wrapped, handle = script.start(module, updates, samples, **start)
    if not script.alone:
        ready(wrapped)
    for batch in order(script.batches(handle, samples)):
        updates.zero_grad()
        value = loss(wrapped, *batch, handle.loss)
        if value is not None:
            value.backward()
        after(updates)
    return values(module)


def several(script: Script, *models: nn.Module, lr: float = 0.3) -> tuple[list[Any], list[Any], Any, Iterator[Any]]:
    """Return wrapped models, each with an optimizer and attached to; the optimizers, the first one's hook, and the batches."""
    dataset = script.data()
    script.begin(*models)
    optimizers = [sgd(model, lr=lr) for model in models]
    started = [script.start(model, updates, dataset) for model, updates in zip(models, optimizers, strict=True)]
    handle = started[0][1]
    return [wrapped for wrapped, _ in started], optimizers, handle, script.batches(handle, dataset)


def given(script: Script, loader: Any, *, early: bool = False, **options: Any) -> list[Tensor]:
    """A common loop over a loader that the script made before it wrapped its model, or before everything else."""
    hook = None
    # The crew's processes are daemons, which may have no children; these loaders' are gone when their loops end.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if early and not script.alone:
        with script.plan() as path:
            hook = runtime.attach(path)
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
            next(iter(loader))  # looked into before the epoch
        for batch in loader:
            optimizer.zero_grad()
            usual(wrapped, *batch, (hook or script).loss).backward()
            optimizer.step()
    return values(model)


@dataclass(frozen=True)
class Case:
    """A loop, and the truth about it.

    ``truth``: "": it is right; "limit": it trains on, and otherwise than one process, which only the comparison with one
    finds; else what it is refused with (a pattern), or that by way, where ways differ.
    """

    loop: Loop
    truth: str | Mapping[str, str] = RIGHT
    ways: Sequence[str] = USUAL
    tolerance: float = 1e-6

    def expected(self, way: str) -> str:
        """Return the truth in this way."""
        return self.truth if isinstance(self.truth, str) else self.truth.get(way, RIGHT)


def compared(loop: Loop, way: str, rank: int) -> float | str:
    """Return how far a loop's parameters are from one process's, over how far those moved; or the refusal.

    Rank 0 alone trains as one process, for both.
    """
    threads, refusal, one_process = torch.get_num_threads(), "", [None]
    torch.set_num_threads(1)
    try:
        torch.manual_seed(11)
        try:
            parameters = loop(Script(way, rank))
        except InputError as error:
            refusal = str(error)
        refusals: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(refusals, refusal)
        if refusal:
            return refusal
        assert not any(refusals), f"refused on one rank alone: {refusals}"
        if rank == 0:
            torch.manual_seed(11)
            alone = Script(way, rank, alone=True)
            one_process = [(loop(alone), alone.begun)]  # type: ignore[list-item]
        dist.broadcast_object_list(one_process, src=0)
    finally:
        torch.set_num_threads(threads)
    expected, begun = one_process[0]  # type: ignore[misc]
    moved = max(float((one - two).abs().max()) for one, two in zip(expected, begun, strict=True))
    assert moved > 1e-3, "this loop trains nothing"
    return max(float((one - two).abs().max()) for one, two in zip(expected, parameters, strict=True)) / moved
