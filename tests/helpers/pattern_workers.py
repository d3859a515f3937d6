"""Training loops as people write them, and what comes of each on two ranks with uneven batches: right, or refused.

Each loop is one function of a :class:`Script`, which stands for the process that it runs in: alone it hands the model back
and loads whole batches; in a job it wraps the model and takes the loader of the hook or of the balancer. So both runs are the
same lines. Every loop says what its losses are, by ``handle.loss``. A loop returns what was trained; float64 throughout.
Start at :data:`CASES`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
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
from ddltool.runtime.processes.same_samples import dataset_length
from tests.helpers import training_patterns
from tests.helpers.runtime_workers import enforcement
from tests.helpers.training_patterns import CLASSES, classified, sequences

SIZES = (12, 20)
TOTAL = sum(SIZES)
SAMPLES = 2 * TOTAL + 8
WIDTH = training_patterns.FEATURES
AGENT_TOTAL = 33
HOOK, BALANCE, AGENT, IN_PASSES = "hook", "balance", "agent", "agent in passes"
USUAL = (HOOK, BALANCE, AGENT)
Loss = Callable[[Any, Any, Any], Tensor | None]
"""The loss of a batch as said, given the model (wrapped or not), the batch and the hook; None: its backward pass is done."""
Form = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A loss of a net's outputs, of targets for them and of labels; or what it counts."""


class Script:
    """The process in which a loop runs; ``way``: one of :data:`USUAL`; ``alone``: it trains on whole batches, by itself."""

    def __init__(self, way: str, rank: int, sizes: tuple[int, int] = SIZES, *, alone: bool = False) -> None:
        self.way, self.alone, self.rank, self.sizes = way, alone, 0 if alone else rank, sizes
        self.total = AGENT_TOTAL if way in (AGENT, IN_PASSES) else sum(sizes)
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
        if self.way == HOOK:
            with planned_sizes(self.sizes) as path:
                return wrapped, runtime.attach(path, model=wrapped, optimizer=optimizer, dataset=dataset)
        assert dataset is not None
        if self.way == BALANCE:
            options = BalanceOptions(enabled=False)
            return wrapped, balance(wrapped, optimizer, dataset, sizes=self.sizes, options=options)
        most = -(-AGENT_TOTAL // (4 if self.way == IN_PASSES else 2))
        sizes = {"initial_batch_size": AGENT_TOTAL, "max_batch_size": AGENT_TOTAL, "max_local_batch_size": most}
        return wrapped, GoodputAgent(wrapped, optimizer, dataset, **sizes, adapt=False, rule="constant", shuffle=False)

    def epochs(self, handle: Any, dataset: Dataset[Any], **options: Any) -> Iterator[Iterable[Any]]:
        """Yield two epochs of batches."""
        agent = self.way in (AGENT, IN_PASSES) and not self.alone
        if isinstance(dataset, IterableDataset) and self.alone:
            loader: Any = DataLoader(dataset, batch_size=self.total)
        elif self.alone:
            sampler = VariableBatchSampler(dataset_length(dataset), [self.total], 0, shuffle=False, whole=True)
            loader = DataLoader(dataset, batch_sampler=sampler, **options)
        elif not agent:
            more = {} if self.way == BALANCE else {"batch_size": self.total}
            loader = handle.dataloader(shuffle=False, **more, **options)
        for epoch in range(2):
            if not self.alone and not agent:
                handle.set_epoch(epoch)
            yield handle.batches(epoch, **options) if agent else loader

    def batches(self, handle: Any, dataset: Dataset[Any]) -> Iterator[Any]:
        """Yield the batches of two epochs."""
        return itertools.chain.from_iterable(self.epochs(handle, dataset))

    def loss(self, loss: Tensor, *, count: float | Tensor | None = None, reduction: str = "mean") -> Tensor:
        """Return what the hook's ``loss`` is in one process: a sum over what is counted becomes the mean."""
        return loss / count if reduction == "sum" and count is not None else loss


@dataclass(frozen=True)
class Case:
    """A loop, what it is refused with (a pattern; by way, where ways differ), and the ways in which it can be written."""

    loop: Callable[[Script], list[Tensor]]
    refused: str | Mapping[str, str] = ""
    ways: Sequence[str] = USUAL
    tolerance: float = 1e-6

    def expected(self, way: str) -> str:
        """Return what it is refused with in this way; "": nothing."""
        return self.refused if isinstance(self.refused, str) else self.refused.get(way, "")


def outcome(rank: int, name: str, way: str) -> float | str:
    """Return what :func:`compared` says of a case of this table."""
    return compared(CASES[name].loop, Script(way, rank))


def compared(loop: Callable[[Script], list[Tensor]], script: Script) -> float | str:
    """Return how far a loop's parameters are from one process's, over how far those moved; or the refusal.

    Rank 0 alone trains as one process, for both.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = Script(script.way, script.rank, script.sizes, alone=True)
    refusal, one_process = "", [None]
    try:
        torch.manual_seed(11)
        try:
            parameters = loop(script)
        except InputError as error:
            refusal = str(error)
        refusals: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(refusals, refusal)
        if refusal:
            return refusal
        assert not any(refusals), f"refused on one rank alone: {refusals}"
        if script.rank == 0:
            torch.manual_seed(11)
            one_process = [(loop(alone), alone.begun)]  # type: ignore[list-item]
        dist.broadcast_object_list(one_process, src=0)
    finally:
        torch.set_num_threads(threads)
    expected, begun = cast(tuple[list[Tensor], list[Tensor]], one_process[0])
    moved = max(float((one - two).abs().max()) for one, two in zip(expected, begun, strict=True))
    assert moved > 1e-3, "this loop trains nothing"
    return max(float((one - two).abs().max()) for one, two in zip(expected, parameters, strict=True)) / moved


def values(*things: Any) -> list[Tensor]:
    """Return copies of all parameters, or of tensors."""
    tensors: list[Tensor] = []
    for thing in things:
        tensors += thing.parameters() if isinstance(thing, nn.Module) else [thing]
    return [(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone() for tensor in tensors]


@contextlib.contextmanager
def planned_sizes(sizes: Iterable[int] = SIZES) -> Iterator[Path]:
    """Give the file of a plan with these local batches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "enforce.json")
        save(enforcement(sizes), path)
        yield path


def data() -> TensorDataset:
    return training_patterns.data(torch.float64, SAMPLES)


def net() -> nn.Sequential:
    return training_patterns.network(torch.float64)


def sgd(*models: nn.Module, lr: float = 0.3) -> torch.optim.SGD:
    return training_patterns.sgd([value for model in models for value in model.parameters()], lr)


def bare(model: Any) -> Any:
    """Return the model in its wrapper, if it has one."""
    return getattr(model, "module", model)


def usual_loss(model: Any, batch: Any, handle: Any) -> Tensor:
    loss: Tensor = handle.loss(classified(model, batch))
    return loss


def said(form: Form, count: Form | None = None, **how: Any) -> Loss:
    """Return the loss of a net's outputs by ``form``, said so: a mean over ``count``, or as ``how`` says."""

    def loss(model: Any, batch: Any, handle: Any) -> Tensor:
        given = model(batch[0]), batch[0][:, :CLASSES], batch[1]
        more = {} if count is None else {"count": count(*given).detach()}
        value: Tensor = handle.loss(form(*given), **how, **more)
        return value

    return loss


def trained(
    script: Script,
    loss: Loss = usual_loss,
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[Any], Any] = sgd,
    dataset: Dataset[Any] | None = None,
    order: Callable[[Iterator[Any]], Iterable[Any]] = iter,
    ready: Callable[[Any], object] = lambda wrapped: None,
    after: Callable[[Any], object] = lambda optimizer: optimizer.step(),
    **start: Any,
) -> list[Tensor]:
    """Return the parameters after a common loop, of which a case changes a part.

    ``order``: how the loop takes its batches; ``ready``: what it does with the wrapped model; ``after``: with the optimizer
    after each backward pass.
    """
    model, dataset = model or net(), dataset or data()
    script.begin(model)
    updates = optimizer(model)
    wrapped, handle = script.start(model, updates, dataset, **start)
    if not script.alone:
        ready(wrapped)
    for batch in order(script.batches(handle, dataset)):
        updates.zero_grad()
        value = loss(wrapped, batch, handle)
        if value is not None:
            value.backward()
        after(updates)
    return values(model)


def loop(loss: Loss = usual_loss, **options: Any) -> Callable[[Script], list[Tensor]]:
    """Return the common loop with changes; ``model``, ``optimizer``: functions that make them, given nothing and the model."""

    def run(script: Script) -> list[Tensor]:
        made = {"model": options["model"]()} if "model" in options else {}
        return trained(script, loss, **(options | made))

    return run


def declared(name: str) -> Callable[[Script], list[Tensor]]:
    """Return the loop of a pattern of the table that all integrations share."""

    def run(script: Script) -> list[Tensor]:
        pattern = training_patterns.make(name)
        script.begin(pattern.model, *pattern.seen)
        model, handle = script.start(
            pattern.model, pattern.optimizer, pattern.dataset, find_unused_parameters=pattern.unused
        )

        def backward(batch: Any) -> Tensor:
            loss = pattern.loss(model, batch)
            told = handle.loss(loss, **({} if pattern.count is None else {"count": pattern.count(batch)}))
            (told if pattern.scaler is None else pattern.scaler.scale(told)).backward()
            return loss

        step = 0
        for epoch in script.epochs(handle, pattern.dataset):
            for batch in epoch:
                if isinstance(pattern.optimizer, torch.optim.LBFGS):
                    pattern.optimizer.step(lambda batch=batch: pattern.optimizer.zero_grad() or backward(batch))  # type: ignore[misc]
                else:
                    backward(batch)
                    if not getattr(handle, "complete", True):
                        continue
                    pattern.update(step)
                pattern.optimizer.zero_grad()
                pattern.after_update(pattern, step)
                step += 1
                if pattern.scheduler is not None and not pattern.per_epoch:
                    pattern.scheduler.step()
            if pattern.scheduler is not None and pattern.per_epoch:
                pattern.scheduler.step()
        return values(pattern.model, *pattern.seen)

    return run


# Loops that are more than the common one with changes.


def begun(script: Script) -> tuple[nn.Module, Any, Any, Any, Iterator[Any]]:
    """Return a net, its optimizer, the wrapped net, the hook, and the batches of two epochs."""
    model, dataset = net(), data()
    script.begin(model)
    optimizer = sgd(model)
    wrapped, handle = script.start(model, optimizer, dataset)
    return model, optimizer, wrapped, handle, script.batches(handle, dataset)


def accumulated(script: Script, *, quiet: bool) -> list[Tensor]:
    model, optimizer, wrapped, handle, batches = begun(script)
    for number, batch in enumerate(batches):
        last = number % 3 != 0
        with wrapped.no_sync() if quiet and not last and not script.alone else contextlib.nullcontext():
            handle.loss(classified(wrapped, batch) / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def gan(script: Script, *, frozen: bool) -> list[Tensor]:
    """Two models in turns; ``frozen``: two backward passes for the judge, which is frozen while the maker trains."""
    maker, judge, dataset = net(), nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1)).double(), data()
    script.begin(maker, judge)
    of_maker, of_judge = sgd(maker), sgd(judge)
    judging, handle = script.start(judge, of_judge, dataset)
    making, _ = script.start(maker, of_maker, dataset)
    for features, labels in script.batches(handle, dataset):
        outputs, truth = making(features), F.one_hot(labels, CLASSES).double()
        judge.requires_grad_(True)
        of_judge.zero_grad()
        right = handle.loss(F.softplus(-judging(truth)).mean())
        if frozen:
            right.backward()
            handle.loss(F.softplus(judging(outputs.detach())).mean()).backward()
        else:
            (right + handle.loss(F.softplus(judging(outputs.detach())).mean())).backward()
        of_judge.step()
        judge.requires_grad_(not frozen)
        of_maker.zero_grad()
        handle.loss(F.softplus(-judging(outputs)).mean()).backward()
        of_maker.step()
    return values(maker, judge)


def several_updates_with_one_batch(script: Script) -> list[Tensor]:
    model, optimizer, wrapped, handle, batches = begun(script)
    for features, labels in batches:
        for view in (features, features.flip(1)):
            optimizer.zero_grad()
            handle.loss(classified(wrapped, (view, labels))).backward()
            optimizer.step()
    return values(model)


def loss_of_two_batches(script: Script) -> list[Tensor]:
    """One backward pass for two batches."""
    held: list[Tensor] = []
    model, optimizer, wrapped, handle, batches = begun(script)
    for number, batch in enumerate(batches):
        held.append(handle.loss(classified(wrapped, batch)))
        if number % 3:
            optimizer.zero_grad()
            (sum(held, torch.zeros(())) / len(held)).backward()
            optimizer.step()
            held = []
    return values(model)


def gradients_cleared_in_every_pass(script: Script) -> list[Tensor]:
    """As everybody does who has never heard of passes."""
    model, optimizer, wrapped, handle, batches = begun(script)
    for batch in batches:
        optimizer.zero_grad()
        handle.loss(classified(wrapped, batch)).backward()
        if getattr(handle, "complete", True):
            optimizer.step()
    return values(model)


def mean_teacher(script: Script) -> list[Tensor]:
    """A copy of the wrapped model follows it, and says what the loss is."""
    model, optimizer, wrapped, handle, batches = begun(script)
    teacher = copy.deepcopy(wrapped)
    for features, labels in batches:
        with torch.no_grad():
            taught = bare(teacher)(features * 1.1).softmax(1)
        optimizer.zero_grad()
        outputs = wrapped(features)
        near = F.kl_div(outputs.log_softmax(1), taught, reduction="batchmean")
        handle.loss(F.cross_entropy(outputs, labels) + near).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), wrapped.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    teacher(features)
    return values(model)


def two_optimizers(script: Script) -> list[Tensor]:
    model, dataset = net(), data()
    script.begin(model)
    first, second = sgd(model[0]), torch.optim.AdamW(model[2].parameters(), lr=0.02)
    wrapped, handle = script.start(model, first, dataset)
    for batch in script.batches(handle, dataset):
        model.zero_grad()
        handle.loss(classified(wrapped, batch)).backward()
        first.step()
        second.step()
    return values(model)


def second_model_not_attached(script: Script) -> list[Tensor]:
    model, other, dataset = net(), nn.Linear(CLASSES, 1).double(), data()
    script.begin(model, other)
    optimizer, second = sgd(model), sgd(other)
    judging: Any = other if script.alone else DistributedDataParallel(other)
    wrapped, handle = script.start(model, optimizer, dataset)
    for features, labels in script.batches(handle, dataset):
        outputs = wrapped(features)
        second.zero_grad()
        optimizer.zero_grad()
        handle.loss(judging(outputs.detach()).square().mean()).backward()
        handle.loss(F.cross_entropy(outputs, labels)).backward()
        second.step()
        optimizer.step()
    return values(model, other)


def encoder_and_head_wrapped_each(script: Script) -> list[Tensor]:
    encoder, head, dataset = nn.Linear(WIDTH, 8).double(), nn.Linear(8, CLASSES).double(), data()
    script.begin(encoder, head)
    optimizer = sgd(encoder, head)
    last = head if script.alone else DistributedDataParallel(head)
    wrapped, handle = script.start(encoder, optimizer, dataset)
    for features, labels in script.batches(handle, dataset):
        optimizer.zero_grad()
        handle.loss(F.cross_entropy(last(wrapped(features).tanh()), labels)).backward()
        optimizer.step()
    return values(encoder, head)


def fsdp2(script: Script) -> list[Tensor]:
    model = net()
    if not script.alone:
        mesh = init_device_mesh("cpu", (script.ranks,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    return trained(script, model=model, wrap=False)


def zero_optimizer(script: Script) -> list[Tensor]:
    def optimizer(model: nn.Module) -> Any:
        if script.alone:
            return torch.optim.AdamW(model.parameters(), lr=0.02)
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.02)

    return trained(script, optimizer=optimizer)


def rates_that_differ(script: Script) -> list[Tensor]:
    """A schedule by what each rank has seen by itself."""

    def after(optimizer: Any) -> None:
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9 - 0.1 * script.rank

    return trained(script, after=after)


def parts_of_a_size(script: Script) -> list[Tensor]:
    """Each batch in parts of at most 8 samples, so that ranks make different numbers of passes."""

    def loss(wrapped: Any, batch: Any, handle: Any) -> None:
        parts = list(zip(batch[0].split(8), batch[1].split(8), strict=True))
        for place, part in enumerate(parts):
            with contextlib.nullcontext() if script.alone or place == len(parts) - 1 else wrapped.no_sync():
                handle.loss(classified(wrapped, part) * (len(part[0]) / len(batch[0]))).backward()

    return trained(script, loss)


# Losses and models that reach other ranks.


def of_all_ranks(script: Script, rows: Tensor) -> tuple[Tensor, int]:
    """Return all ranks' rows, with gradients from all of them, and the place of this rank's first one."""
    if script.alone:
        return rows, 0
    counts: list[Any] = [None] * script.ranks
    dist.all_gather_object(counts, len(rows))
    first = sum(counts[: script.rank])
    return all_reduce(F.pad(rows, (0, 0, first, sum(counts) - first - len(rows)))), first


def simclr_gathered(script: Script, *, on_each: bool) -> list[Tensor]:
    """Each rank's anchors against all ranks' embeddings; ``on_each``: each rank computes the loss of all anchors."""

    def loss(model: Any, batch: Any, handle: Any) -> Tensor:
        one, two = (F.normalize(model(view), dim=1) for view in (batch[0], batch[0] + 0.3))
        others, first = of_all_ranks(script, two)
        if on_each:
            one, first = of_all_ranks(script, one)[0], 0
        value = F.cross_entropy(one @ others.T / 0.2, first + torch.arange(len(one)))
        told: Tensor = handle.loss(value, **({"reduction": "average"} if on_each else {"count": len(one)}))
        return told

    return trained(script, loss)


# Loaders that the script makes itself.


class Parted(IterableDataset[Any]):
    """The samples from ``begin`` to ``end``, of which each data worker gives a part."""

    def __init__(self, begin: int = 0, end: int = SAMPLES) -> None:
        self.begin, self.end = begin, end

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for place in range(self.begin + worker, self.end, workers):
            yield data()[place]


def given(script: Script, loader: Any, *, early: bool = False, **options: Any) -> list[Tensor]:
    """A common loop over a loader that the script made before it wrapped its model, or before everything else."""
    hook = None
    # The crew's processes are daemons, which may have no children; these loaders' are gone when their loops end.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if early and not script.alone:
        with planned_sizes() as path:
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
            (hook or script).loss(classified(wrapped, batch)).backward()
            optimizer.step()
    return values(model)


def loader_of_a_distributed_sampler(script: Script) -> list[Tensor]:
    sampler: Any = DistributedSampler(data(), script.ranks, script.rank, seed=3)
    return given(script, DataLoader(data(), batch_size=TOTAL, sampler=sampler))


def loader_with_its_own_order(script: Script) -> list[Tensor]:
    sampler = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 50)
    return given(script, DataLoader(data(), batch_size=TOTAL, sampler=sampler, drop_last=True))


def streams(script: Script, **options: Any) -> list[Tensor]:
    """Rank 0 has 40 samples in batches of 12, rank 1 has 32 in batches of 20."""
    if script.alone:
        mine, other = list(range(40)), list(range(40, SAMPLES))
        batches = [mine[12 * step : 12 * step + 12] + other[20 * step : 20 * step + 20] for step in range(4)]
        return given(script, DataLoader(data(), batch_sampler=batches))
    stream = Parted(0, 40) if script.rank == 0 else Parted(40, SAMPLES)
    return given(script, DataLoader(stream, batch_size=16), **options)


def own_loader(script: Script, *, turned: bool) -> list[Tensor]:
    """Each rank takes its planned part of each 32 samples, a tail in other shares; ``turned``: samples in columns."""
    model, (features, labels) = net(), data().tensors
    script.begin(model)
    optimizer = sgd(model)
    if turned:
        model.register_forward_pre_hook(lambda module, inputs: inputs[0].T)
    wrapped, handle = script.start(model, optimizer)
    for begin in range(0, SAMPLES, TOTAL):
        size = min(TOTAL, SAMPLES - begin)
        cut = SIZES[0] if size == TOTAL else 5
        mine = slice(begin, begin + size)
        if not script.alone:
            mine = slice(begin, begin + cut) if script.rank == 0 else slice(begin + cut, begin + size)
        optimizer.zero_grad()
        handle.loss(classified(wrapped, (features[mine].T if turned else features[mine], labels[mine]))).backward()
        optimizer.step()
    return values(model)


def validated(script: Script, *, quiet: bool) -> list[Tensor]:
    """Other batches of the hook's are looked at after each update, and loaders are made anew for each epoch."""
    model = net()
    script.begin(model)
    optimizer = sgd(model)
    wrapped, hook = script.start(model, optimizer)
    for epoch in range(2):
        torch.manual_seed(epoch)
        loaders: list[Any] = [DataLoader(data(), batch_size=TOTAL, shuffle=True), DataLoader(data(), batch_size=TOTAL)]
        training, held_out = loaders if script.alone else map(hook.planned, loaders)
        for batch in training:
            optimizer.zero_grad()
            hook.loss(classified(wrapped, batch)).backward()
            optimizer.step()
            wrapped.eval()
            with torch.no_grad() if quiet else contextlib.nullcontext():
                for held in held_out:
                    classified(wrapped, held)
            wrapped.train()
    return values(model)


# Parts that loops differ in.


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Fetch each batch before the one before it is trained on."""
    coming = next(batches)
    for following in batches:
        yield coming
        coming = following
    yield coming


def some_left_out(batches: Iterator[Any]) -> Iterator[Any]:
    return (batch for number, batch in enumerate(batches) if number not in (1, 5))


def averaging(wrapped: Any) -> None:
    """Register a communication hook; DDP compares the annotations of one that has some with real types."""

    def average(group, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, average)


class AroundAnother(torch.optim.Optimizer):
    """As accelerate's: it derives from Optimizer and sets nothing of it up."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def stepping_by_itself(model: nn.Module) -> Any:
    """Make each parameter's optimizer step as soon as its gradient is there, which is the rank's own."""
    optimizers = {value: training_patterns.sgd([value]) for value in model.parameters()}
    for value in model.parameters():
        value.register_post_accumulate_grad_hook(lambda value: optimizers[value].step())
    return optimizers[next(model.parameters())]


def net_with_gradient_hooks(change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = net()
    for value in model.parameters():
        value.register_hook(change)
    return model


def net_with_lazy_table() -> nn.Module:
    """Make a buffer that is alike everywhere in the first pass."""

    def shifted(module: nn.Module, inputs: Any) -> Tensor:
        if not hasattr(module, "shift"):
            module.register_buffer("shift", torch.arange(WIDTH).double() / 10)
        moved: Tensor = inputs[0] - module.shift
        return moved

    model = net()
    model.register_forward_pre_hook(shifted)
    return model


def net_with_moving_code() -> nn.Module:
    """Move a code to the mean of what is near it, in the forward pass."""
    model, code = net(), nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64), requires_grad=False)
    model.register_parameter("code", code)

    @torch.no_grad()
    def moved(module: nn.Module, inputs: Any) -> Tensor:
        far: Tensor = inputs[0] - code.lerp_(inputs[0].mean(0), 0.1)
        return far

    model.register_forward_pre_hook(moved)
    return model


def with_evaluation_before_backward(model: Any, batch: Any, handle: Any) -> Tensor:
    loss = usual_loss(model, batch, handle)
    model.eval()
    bare(model)(batch[0][:3])  # keeps gradients
    model.train()
    return loss


def twice_by_one_pass(model: Any, batch: Any, handle: Any) -> Tensor:
    outputs = model(batch[0])
    handle.loss(F.cross_entropy(outputs, batch[1])).backward(retain_graph=True)
    loss: Tensor = handle.loss(outputs.square().mean() * 0.1)
    return loss


def past_the_wrapper_after_a_pass(model: Any, batch: Any, handle: Any) -> Tensor:
    usual_loss(model, batch, handle).backward()
    beside: Tensor = handle.loss(bare(model)(batch[0].flip(1)).square().mean())
    return beside


def with_others_of_one_number(model: Any, batch: Any, handle: Any) -> Tensor:
    """The same unlabelled samples on all ranks: two terms, each with its word."""
    others = torch.linspace(-1, 1, 16 * WIDTH, dtype=torch.float64).view(16, WIDTH)
    outputs = model(torch.cat([batch[0], others]))
    guessed = outputs[len(batch[0]) :]
    loss: Tensor = handle.loss(F.cross_entropy(outputs[: len(batch[0])], batch[1]))
    loss = loss + handle.loss(F.cross_entropy(guessed, guessed.argmax(1)), reduction="average")
    return loss


def penalty(model: Any, batch: Any, handle: Any) -> Tensor:
    smaller = 0.01 * sum(value.square().sum() for value in bare(model).parameters())
    loss: Tensor = handle.loss(classified(model, batch)) + handle.loss(smaller, reduction="average")
    return loss


def norm_of_the_gradient(model: Any, batch: Any, handle: Any) -> Tensor:
    loss = classified(model, batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    told: Tensor = handle.loss(loss + 0.1 * torch.stack([slope.square().sum() for slope in gradients]).sum())
    return told


def gradients_by_hand(model: Any, batch: Any, handle: Any) -> None:
    """Per-sample gradients, as for privacy."""
    inner = bare(model)

    def of_sample(parameters: dict[str, Tensor], features: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(inner, parameters, (features[None],)), label[None])

    held = {name: value.detach() for name, value in inner.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(of_sample), (None, 0, 0))(held, *batch)
    for name, value in inner.named_parameters():
        value.grad = gradients[name].mean(0)


def sparse_model() -> nn.Module:
    layers = nn.Embedding(7, 5, sparse=True), nn.Flatten(), nn.Linear(5 * training_patterns.LENGTH, 7)
    return nn.Sequential(*layers).double()


# What is refused, in one line.
COUPLED = r"coupled|depend"
PAST = r"wrapped model"
AGAIN = r"twice|again"
DIFFERS = r"differ"
UNSAID = r"\.loss\("
HOOKED = r"hook|\.loss|within backward|past the weights|a second one"
FROZEN = r"^gradient: of 0\.weight differs between ranks; .* unfreeze layers before"
OUTSIDE = r"^gradient: of a parameter of shape \(.*\) that is not in the model differs between ranks"
TWO_AGENTS = r"^backward: no batch is under way; call it inside for"
SECOND = r"^optimizer: a second one \(\w+\) steps within agent\.batches, whose gradients nobody weighs; train one"
BESIDE = r"^optimizer: trains a Linear beside the one that was attached to, whose losses nobody"
AHEAD = r"^agent\.batches: the next one was fetched before the first was trained on"
STREAM = r"^dataset: is a Endless, an IterableDataset; give a map-style"
NOT_DDP = r"^model: is a FSDPSequential, not a DistributedDataParallel; give the model that"
MAX_NORM = r"^model: embedding has max_norm, by which each rank changes rows of its own batch; leave it out"
COLUMNS = r"^forward: the batch cannot be counted by dimension 0 of the model's arguments \(6\)"
CLEARED = r"^gradients: were changed or cleared before the step's last pass; clear and clip them where agent\.complete"

OF_THE_TABLE: dict[str, str | dict[str, str]] = {
    "simclr": COUPLED,
    "loss_with_parameters": OUTSIDE,
    "parameter_outside": OUTSIDE,
    "late_unfreezing": FROZEN,
    "buffer_made_in_forward": DIFFERS,
    "short_rows": MAX_NORM,
    "iterable_dataset": {AGENT: STREAM},
}
PER_REPLICA = {"batch_norm_and_dropout", "tensor_in_attribute", "tensors_in_list", "loss_with_a_mean_not_told"}
"""What DDP computes otherwise than one process, with equal batches as well."""
BY_PASSES = {
    "plain",
    "clipping",
    "adamw",
    "schedule_per_step",
    "scaled_with_overflow",
    "checkpointing",
    "token_means",
    "ema",
}
"""What is tried in steps of several passes too."""


def each(logits: Tensor, label: Tensor) -> Tensor:
    """Return the loss of each sample."""
    return F.cross_entropy(logits, label, reduction="none")


class Doubled(torch.autograd.Function):
    """A function whose gradients the script says."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return 2 * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def two_terms(model: Any, batch: Any, handle: Any) -> Tensor:
    outputs = model(batch[0])
    loss: Tensor = handle.loss(F.cross_entropy(outputs, batch[1]))
    loss = loss + handle.loss(0.01 * outputs.abs().sum(), reduction="sum")
    return loss


FORMS: dict[str, tuple[Loss, str]] = {
    "loop over samples": (said(lambda logits, target, label: torch.stack([*each(logits, label)]).mean()), ""),
    "sum over the batch size": (said(lambda logits, target, label: each(logits, label).sum() / len(logits)), ""),
    "einsum": (said(lambda logits, target, label: torch.einsum("nc,nc->n", logits, target).tanh().mean()), ""),
    "dot": (said(lambda logits, target, label: logits.flatten() @ target.flatten() / len(logits)), ""),
    "function of its own": (said(lambda logits, target, label: Doubled.apply(each(logits, label)).mean()), ""),
    "weights of classes": (
        said(
            lambda logits, target, label: F.cross_entropy(logits, label, logits.new_tensor([1, 2, 5])),
            lambda logits, target, label: logits.new_tensor([1, 2, 5])[label].sum(),
        ),
        "",
    ),
    "sum": (said(lambda logits, target, label: F.mse_loss(logits, target, reduction="sum"), reduction="sum"), ""),
    "constant divisor": (said(lambda logits, target, label: each(logits, label).sum() / 16, reduction="sum"), ""),
    "sum of what is counted": (
        said(
            lambda logits, target, label: each(logits, label)[label > 0].sum(),
            lambda logits, target, label: (label > 0).sum(),
            reduction="sum",
        ),
        "",
    ),
    "two terms": (two_terms, ""),
    "correlation": (said(lambda logits, target, label: (logits.T @ logits / len(logits)).square().mean()), COUPLED),
    "softmax over the batch": (said(lambda logits, target, label: (logits.softmax(0) * target).mean()), COUPLED),
    "nothing said": (lambda model, batch, handle: classified(model, batch), UNSAID),
}


def partial(function: Callable[..., list[Tensor]], **options: Any) -> Callable[[Script], list[Tensor]]:
    return lambda script: function(script, **options)


CASES: dict[str, Case] = {
    name: Case(
        declared(name),
        OF_THE_TABLE.get(name, ""),
        (*USUAL, IN_PASSES) if name in BY_PASSES else (HOOK, AGENT),
        tolerance=0.02 if name == "bf16_autocast" else 1e-6,
    )
    for name in training_patterns.MAKERS.keys() - PER_REPLICA
}
CASES |= {
    f"loss: {name}": Case(
        loop(loss, optimizer=lambda model: sgd(model, lr=0.05)), refused, USUAL if refused == UNSAID else (HOOK,)
    )
    for name, (loss, refused) in FORMS.items()
}
CASES |= {
    # Optimizers, and what comes between backward and update.
    "ZeRO optimizer": Case(zero_optimizer),
    "accumulation under no_sync": Case(partial(accumulated, quiet=True)),
    "accumulation without no_sync": Case(partial(accumulated, quiet=False)),
    "two optimizers": Case(two_optimizers, {AGENT: SECOND}),
    "optimizer around another": Case(loop(optimizer=lambda model: AroundAnother(sgd(model)))),
    "update within backward": Case(loop(optimizer=stepping_by_itself), HOOKED),
    "rates that differ": Case(rates_that_differ, DIFFERS),
    "gradients cleared in every pass": Case(gradients_cleared_in_every_pass, {IN_PASSES: CLEARED}, (AGENT, IN_PASSES)),
    "centralised gradients": Case(
        loop(model=lambda: net_with_gradient_hooks(lambda value: value - value.mean(-1, keepdim=True))), "", (HOOK,)
    ),
    "gradients clipped by hooks": Case(
        loop(model=lambda: net_with_gradient_hooks(lambda value: value.clamp(-0.01, 0.01))), HOOKED, (HOOK,)
    ),
    "communication hook of its own": Case(loop(ready=averaging)),
    # Models.
    "FSDP2": Case(fsdp2, {BALANCE: NOT_DDP, AGENT: NOT_DDP}),
    "lazily made table": Case(loop(model=net_with_lazy_table), "", (HOOK,)),
    "code moved in a pass": Case(loop(model=net_with_moving_code), DIFFERS),
    "sparse gradients": Case(
        lambda script: trained(
            script,
            lambda model, batch, handle: handle.loss(F.cross_entropy(model(batch[0]), batch[0][:, 0])),
            model=sparse_model(),
            dataset=sequences(torch.float64),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
        )
    ),
    "GAN": Case(partial(gan, frozen=False), {AGENT: TWO_AGENTS}),
    "GAN with a frozen judge": Case(partial(gan, frozen=True), {AGENT: TWO_AGENTS}),
    "second model not attached": Case(second_model_not_attached, {AGENT: SECOND}),
    "encoder and head wrapped each": Case(encoder_and_head_wrapped_each),
    "mean teacher": Case(mean_teacher),
    # Passes, and losses that are no mean over a rank's samples.
    "several updates with one batch": Case(several_updates_with_one_batch),
    "two losses one pass": Case(loop(twice_by_one_pass), AGAIN),
    "loss of two batches": Case(loss_of_two_batches, {AGENT: AHEAD}),
    "parts of a size": Case(parts_of_a_size),
    "past the wrapper": Case(loop(lambda model, batch, handle: handle.loss(classified(bare(model), batch))), PAST),
    "past the wrapper after a pass": Case(loop(past_the_wrapper_after_a_pass), PAST),
    "past the wrapper beside a pass": Case(
        loop(
            lambda model, batch, handle: handle.loss(
                classified(model, batch) + bare(model)(batch[0].flip(1)).square().mean()
            )
        ),
        PAST,
    ),
    "penalty on parameters": Case(loop(penalty)),
    "norm of the gradient": Case(loop(norm_of_the_gradient), COUPLED),
    "gradients by hand": Case(loop(gradients_by_hand), UNSAID),
    "unlabelled samples of one number": Case(loop(with_others_of_one_number)),
    "SimCLR gathered": Case(partial(simclr_gathered, on_each=False)),
    "SimCLR gathered on each": Case(partial(simclr_gathered, on_each=True)),
    # Batches.
    "batch fetched ahead": Case(loop(order=ahead), {AGENT: AHEAD}),
    "batches left out": Case(loop(with_evaluation_before_backward, order=some_left_out)),
    # Loaders of the script's own, which are the hook's alone: balancer and agent bring the loader.
    "loader made before": Case(lambda s: given(s, DataLoader(data(), batch_size=TOTAL, shuffle=True)), "", (HOOK,)),
    "loader before everything": Case(
        lambda s: given(s, DataLoader(data(), batch_size=TOTAL, num_workers=1), early=True), "", (HOOK,)
    ),
    "loader of a distributed sampler": Case(loader_of_a_distributed_sampler, "", (HOOK,)),
    "loader with its own order": Case(loader_with_its_own_order, "", (HOOK,)),
    "stream with data workers": Case(
        lambda s: given(s, DataLoader(Parted(), batch_size=TOTAL, num_workers=2), early=True), "", (HOOK,)
    ),
    "streams of the ranks' own": Case(partial(streams, shared=False), "", (HOOK,)),
    "one stream of two": Case(streams, DIFFERS, (HOOK,)),
    "batches by hand": Case(partial(own_loader, turned=False), "", (HOOK,)),
    "batches by hand in columns": Case(partial(own_loader, turned=True), COLUMNS, (HOOK,)),
    "validation between updates": Case(partial(validated, quiet=True), "", (HOOK,)),
    "validation with gradients": Case(partial(validated, quiet=False), "", (HOOK,)),
}
