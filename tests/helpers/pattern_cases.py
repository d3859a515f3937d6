"""What comes of training loops on two ranks with uneven batches: right, refused, or a limit. Start at :data:`CASES`.

A loss is a function of the model, the batch's tensors and ``say`` (the hook's ``loss``); a loop is one of a
:class:`~tests.helpers.pattern_workers.Script`. What :func:`losses` and :func:`loops` put into the table with the ways ``LONG``
is of classes that nobody looked at while the hook was made: twenty updates in two epochs with a smaller last batch, under an
uneven plan and an even one.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.helpers import training_patterns
from tests.helpers.pattern_workers import (
    AGENT,
    BALANCE,
    CLASSES,
    EVEN,
    HOOK,
    IN_PASSES,
    LENGTH,
    LIMIT,
    RIGHT,
    STEPS,
    TOTAL,
    UNEVEN,
    USUAL,
    WIDTH,
    Case,
    Loop,
    Loss,
    Script,
    bare,
    compared,
    given,
    net,
    several,
    sgd,
    trained,
    usual,
    values,
)

ce, cat, one_hot, normalize = F.cross_entropy, torch.cat, F.one_hot, F.normalize
HOOK_ALONE, LONG = (HOOK,), (UNEVEN, EVEN)

# What is refused, in one line.
COUPLED, PAST, AGAIN, DIFFERS, UNSAID = r"coupled|depend", r"wrapped model", r"twice|again", r"differ", r"\.loss\("
HOOKED = r"hook|\.loss|within backward|past the weights|a second one"
FROZEN = r"^gradient: of 0\.weight differs between ranks; .* unfreeze layers before"
OUTSIDE = r"^gradient: of a parameter of shape \(.*\) that is not in the model differs between ranks"
TWO_AGENTS = {AGENT: r"^backward: no batch is under way; call it inside for"}
SECOND = {
    AGENT: r"^optimizer: a second one \(\w+\) steps within agent\.batches, whose gradients nobody weighs; train one"
}
AHEAD = {AGENT: r"^agent\.batches: the next one was fetched before the first was trained on"}
STREAM = {AGENT: r"^dataset: is a Endless, an IterableDataset; give a map-style"}
NOT_DDP = r"^model: is a FSDPSequential, not a DistributedDataParallel; give the model that"
MAX_NORM = r"^model: embedding has max_norm, by which each rank changes rows of its own batch; leave it out"
COLUMNS = r"^forward: the batch cannot be counted by dimension 0 of the model's arguments \(6\)"
CLEARED = r"^gradients: were changed or cleared before the step's last pass; clear and clip them where agent\.complete"
ATTRIBUTE = r"attribute|output|\.loss\(|coupled|depend"
"""What a term that the model keeps beside its outputs is refused with."""

CASES: dict[str, Case] = {}


def loops(truth: str | Mapping[str, str], table: Mapping[str, Loop], ways: Sequence[str] = USUAL) -> None:
    """Put loops of one truth into the table."""
    assert not CASES.keys() & table.keys()
    CASES.update({name: Case(loop, truth, ways) for name, loop in table.items()})


def losses(truth: str, table: Mapping[str, Loss], ways: Sequence[str] = LONG, **options: Any) -> None:
    """Put losses of one truth into the table; ``options`` change the common loop."""
    loops(truth, {name: partial(trained, loss=loss, **options) for name, loss in table.items()}, ways)


def made(loss: Callable[[Script], Loss], **options: Any) -> Loop:
    """Return the common loop of a loss that is made for each script."""
    return lambda script: trained(script, loss(script), **options)


def outcome(rank: int, name: str, way: str) -> float | str:
    """Return what :func:`compared` says of a case of this table."""
    return compared(CASES[name].loop, way, rank)


# The table that all integrations share.


def declared(name: str) -> Loop:
    """Return the loop of a pattern of that table."""

    def run(script: Script) -> list[Tensor]:
        pattern = training_patterns.make(name)
        script.begin(pattern.model, *pattern.seen)
        given = pattern.model, pattern.optimizer, pattern.dataset
        model, handle = script.start(*given, find_unused_parameters=pattern.unused)

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
                pattern.after(step, epoch_ends=False)
                step += 1
            if pattern.scheduler is not None and pattern.per_epoch:
                pattern.scheduler.step()
        return values(pattern.model, *pattern.seen)

    return run


PER_REPLICA = {"batch_norm_and_dropout", "tensor_in_attribute", "tensors_in_list", "loss_with_a_mean_not_told"}
"""What DDP computes otherwise than one process, with equal batches as well."""
BY_PASSES = {
    *("plain", "clipping", "adamw", "schedule_per_step", "scaled_with_overflow", "checkpointing"),
    *("token_means", "ema"),
}
"""What is tried in steps of several passes too."""
REFUSED: dict[str, str | dict[str, str]] = {
    "simclr": COUPLED,
    **dict.fromkeys(("loss_with_parameters", "parameter_outside"), OUTSIDE),
    "late_unfreezing": FROZEN,
    "buffer_made_in_forward": DIFFERS,
    "short_rows": MAX_NORM,
    "iterable_dataset": STREAM,
}
for each_name in sorted(training_patterns.MAKERS.keys() - PER_REPLICA):
    each_ways = (*USUAL, IN_PASSES) if each_name in BY_PASSES else (HOOK, AGENT)
    tolerance = 0.02 if each_name == "bf16_autocast" else 1e-6
    CASES[each_name] = Case(declared(each_name), REFUSED.get(each_name, RIGHT), each_ways, tolerance)


# Losses in many forms.


def each(logits: Tensor, label: Tensor) -> Tensor:
    """Return the loss of each sample."""
    return ce(logits, label, reduction="none")


CLASS_WEIGHTS = torch.tensor([1, 2, 5], dtype=torch.float64)
FORMS: dict[str, Loss] = {
    "loss: weights of classes": lambda m, x, y, say: say(ce(m(x), y, CLASS_WEIGHTS), count=CLASS_WEIGHTS[y].sum()),
    "loss: sum": lambda m, x, y, say: say(F.mse_loss(m(x), x[:, :CLASSES], reduction="sum"), reduction="sum"),
    "loss: sum of what is counted": lambda m, x, y, say: say(
        each(m(x), y)[y > 0].sum(), count=(y > 0).sum(), reduction="sum"
    ),
}
losses(RIGHT, FORMS, HOOK_ALONE, lr=0.05)
FORMS = {
    "loss: correlation": lambda m, x, y, say: say(((o := m(x)).T @ o / len(o)).square().mean()),
    "loss: softmax over the batch": lambda m, x, y, say: say((m(x).softmax(0) * x[:, :CLASSES]).mean()),
}
losses(COUPLED, FORMS, HOOK_ALONE, lr=0.05)
losses(UNSAID, {"loss: nothing said": lambda m, x, y, say: ce(m(x), y)}, USUAL, lr=0.05)


# Optimizers, and what comes between backward and update.


def accumulated(script: Script, *, quiet: bool) -> list[Tensor]:
    (wrapped,), (optimizer,), handle, batches = several(script, model := net())
    for number, (x, y) in enumerate(batches):
        last = number % 3 != 0
        with script.quiet(wrapped, last=last or not quiet):
            handle.loss(ce(wrapped(x), y) / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def zero_optimizer(script: Script) -> list[Tensor]:
    def optimizer(model: nn.Module) -> Any:
        if script.alone:
            return torch.optim.AdamW(model.parameters(), lr=0.02)
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.02)

    return trained(script, optimizer=optimizer)


def two_optimizers(script: Script) -> list[Tensor]:
    script.begin(model := net())
    optimizers = sgd(model[0]), torch.optim.AdamW(model[2].parameters(), lr=0.02)
    wrapped, handle = script.start(model, optimizers[0], dataset := script.data())
    for batch in script.batches(handle, dataset):
        model.zero_grad()
        usual(wrapped, *batch, handle.loss).backward()
        for optimizer in optimizers:
            optimizer.step()
    return values(model)


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


def rates_that_differ(script: Script) -> list[Tensor]:
    """A schedule by what each rank has seen by itself."""

    def after(optimizer: Any) -> None:
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9 - 0.1 * script.rank

    return trained(script, after=after)


def gradients_cleared_in_every_pass(script: Script) -> list[Tensor]:
    """As everybody does who has never heard of passes."""
    (wrapped,), (optimizer,), handle, batches = several(script, model := net())
    for batch in batches:
        optimizer.zero_grad()
        usual(wrapped, *batch, handle.loss).backward()
        if getattr(handle, "complete", True):
            optimizer.step()
    return values(model)


def hooked(change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a net whose gradients a hook changes."""
    for value in (model := net()).parameters():
        value.register_hook(change)
    return model


def averaging(wrapped: Any) -> None:
    """Register a communication hook; DDP compares the annotations of one that has some with real types."""

    def average(group, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, average)


loops(
    RIGHT,
    {
        "ZeRO optimizer": zero_optimizer,
        "accumulation under no_sync": partial(accumulated, quiet=True),
        "accumulation without no_sync": partial(accumulated, quiet=False),
        "optimizer around another": partial(trained, optimizer=lambda model: AroundAnother(sgd(model))),
        "communication hook of its own": partial(trained, ready=averaging),
    },
)
loops(SECOND, {"two optimizers": two_optimizers})
loops(HOOKED, {"update within backward": partial(trained, optimizer=stepping_by_itself)})
loops(DIFFERS, {"rates that differ": rates_that_differ})
loops({IN_PASSES: CLEARED}, {"gradients cleared in every pass": gradients_cleared_in_every_pass}, (AGENT, IN_PASSES))
CENTRED = partial(trained, model=lambda: hooked(lambda value: value - value.mean(-1, keepdim=True)))
loops(RIGHT, {"centralised gradients": CENTRED}, HOOK_ALONE)
CLIPPED = partial(trained, model=lambda: hooked(lambda value: value.clamp(-0.01, 0.01)))
loops(HOOKED, {"gradients clipped by hooks": CLIPPED}, HOOK_ALONE)


# Models.


def fsdp2(script: Script) -> list[Tensor]:
    model = net()
    if not script.alone:
        mesh = init_device_mesh("cpu", (script.ranks,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    return trained(script, model=lambda: model, wrap=False)


def net_with_lazy_table() -> nn.Module:
    """Make a buffer that is alike everywhere in the first pass."""

    def shifted(module: nn.Module, inputs: Any) -> Any:
        if not hasattr(module, "shift"):
            module.register_buffer("shift", torch.arange(WIDTH).double() / 10)
        return inputs[0] - module.shift

    (model := net()).register_forward_pre_hook(shifted)
    return model


def net_with_moving_code() -> nn.Module:
    """Move a code to the mean of what is near it, in the forward pass."""
    model, code = net(), nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64), requires_grad=False)
    model.register_parameter("code", code)
    model.register_forward_pre_hook(torch.no_grad()(lambda _, x: x[0] - code.lerp_(x[0].mean(0), 0.1)))
    return model


def sparse_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 5, sparse=True), nn.Flatten(), nn.Linear(5 * LENGTH, 7)).double()


def judge() -> nn.Module:
    return nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def gan(script: Script, *, frozen: bool) -> list[Tensor]:
    """Two models in turns; ``frozen``: two backward passes for the judge, which is frozen while the maker trains."""
    maker, judging_net = net(), judge()
    (judging, making), (of_judge, of_maker), handle, batches = several(script, judging_net, maker)
    script.begin(maker, judging_net)
    for x, y in batches:
        outputs, truth = making(x), one_hot(y, CLASSES).double()
        judging_net.requires_grad_(True)
        of_judge.zero_grad()
        right = handle.loss(F.softplus(-judging(truth)).mean())
        if frozen:
            right.backward()
            handle.loss(F.softplus(judging(outputs.detach())).mean()).backward()
        else:
            (right + handle.loss(F.softplus(judging(outputs.detach())).mean())).backward()
        of_judge.step()
        judging_net.requires_grad_(not frozen)
        of_maker.zero_grad()
        handle.loss(F.softplus(-judging(outputs)).mean()).backward()
        of_maker.step()
    return values(maker, judging_net)


def second_model_not_attached(script: Script) -> list[Tensor]:
    model, other = net(), nn.Linear(CLASSES, 1).double()
    judging: Any = other if script.alone else DistributedDataParallel(other)
    (wrapped,), (optimizer,), handle, batches = several(script, model)
    script.begin(model, other)
    second = sgd(other)
    for x, y in batches:
        outputs = wrapped(x)
        second.zero_grad()
        optimizer.zero_grad()
        handle.loss(judging(outputs.detach()).square().mean()).backward()
        handle.loss(ce(outputs, y)).backward()
        second.step()
        optimizer.step()
    return values(model, other)


def encoder_and_head_wrapped_each(script: Script) -> list[Tensor]:
    encoder, head = nn.Linear(WIDTH, 8).double(), nn.Linear(8, CLASSES).double()
    script.begin(encoder, head)
    optimizer = sgd(encoder, head)
    last = head if script.alone else DistributedDataParallel(head)
    wrapped, handle = script.start(encoder, optimizer, dataset := script.data())
    for x, y in script.batches(handle, dataset):
        optimizer.zero_grad()
        handle.loss(ce(last(wrapped(x).tanh()), y)).backward()
        optimizer.step()
    return values(encoder, head)


def mean_teacher(script: Script) -> list[Tensor]:
    """A copy of the wrapped model follows it, and says what the loss is."""
    (wrapped,), (optimizer,), handle, batches = several(script, model := net())
    teacher = copy.deepcopy(wrapped)
    for x, y in batches:
        with torch.no_grad():
            taught = bare(teacher)(x * 1.1).softmax(1)
        optimizer.zero_grad()
        outputs = wrapped(x)
        handle.loss(ce(outputs, y) + F.kl_div(outputs.log_softmax(1), taught, reduction="batchmean")).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), wrapped.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    teacher(x)
    return values(model)


loops({BALANCE: NOT_DDP, AGENT: NOT_DDP}, {"FSDP2": fsdp2})
loops(RIGHT, {"lazily made table": partial(trained, model=net_with_lazy_table)}, HOOK_ALONE)
loops(DIFFERS, {"code moved in a pass": partial(trained, model=net_with_moving_code)})
loops(TWO_AGENTS, {"GAN": partial(gan, frozen=False), "GAN with a frozen judge": partial(gan, frozen=True)})
loops(SECOND, {"second model not attached": second_model_not_attached})
loops(RIGHT, {"encoder and head wrapped each": encoder_and_head_wrapped_each, "mean teacher": mean_teacher})
losses(
    RIGHT,
    {"sparse gradients": lambda m, x, say: say(ce(m(x), x[:, 0]))},
    USUAL,
    model=sparse_model,
    dataset=lambda: training_patterns.sequences(torch.float64),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
)


# Passes, and losses that are no mean over a rank's samples.


def several_updates_with_one_batch(script: Script) -> list[Tensor]:
    (wrapped,), (optimizer,), handle, batches = several(script, model := net())
    for x, y in batches:
        for view in (x, x.flip(1)):
            optimizer.zero_grad()
            usual(wrapped, view, y, handle.loss).backward()
            optimizer.step()
    return values(model)


def loss_of_two_batches(script: Script) -> list[Tensor]:
    """One backward pass for two batches."""
    held: list[Tensor] = []
    (wrapped,), (optimizer,), handle, batches = several(script, model := net())
    for number, batch in enumerate(batches):
        held.append(usual(wrapped, *batch, handle.loss))
        if number % 3:
            optimizer.zero_grad()
            (sum(held, torch.zeros(())) / len(held)).backward()
            optimizer.step()
            held = []
    return values(model)


def parts_of_a_size(script: Script) -> list[Tensor]:
    """Each batch in parts of at most 8 samples, so that ranks make different numbers of passes."""

    def loss(m: Any, x: Any, y: Any, say: Any) -> None:
        parts = list(zip(x.split(8), y.split(8), strict=True))
        for place, (features, labels) in enumerate(parts, 1):
            with script.quiet(m, last=place == len(parts)):
                say(ce(m(features), labels) * (len(features) / len(x))).backward()

    return trained(script, loss)


def twice_by_one_pass(m: Any, x: Any, y: Any, say: Any) -> Any:
    outputs = m(x)
    say(ce(outputs, y)).backward(retain_graph=True)
    return say(outputs.square().mean() * 0.1)


def past_the_wrapper_after_a_pass(m: Any, x: Any, y: Any, say: Any) -> Any:
    usual(m, x, y, say).backward()
    return say(bare(m)(x.flip(1)).square().mean())


def with_others_of_one_number(m: Any, x: Any, y: Any, say: Any) -> Any:
    """The same unlabelled samples on all ranks: two terms, each with its word."""
    others = torch.linspace(-1, 1, 16 * WIDTH, dtype=torch.float64).view(16, WIDTH)
    outputs = m(cat([x, others]))
    guessed = outputs[len(x) :]
    return say(ce(outputs[: len(x)], y)) + say(ce(guessed, guessed.argmax(1)), reduction="average")


def squares(m: Any) -> Any:
    return sum(value.square().sum() for value in m.parameters())


def norm_of_the_gradient(m: Any, x: Any, y: Any, say: Any) -> Any:
    gradients = torch.autograd.grad(loss := ce(m(x), y), list(m.parameters()), create_graph=True)
    return say(loss + 0.1 * torch.stack([slope.square().sum() for slope in gradients]).sum())


def gradients_by_hand(m: Any, x: Any, y: Any, say: Any) -> None:
    """Per-sample gradients, as for privacy."""
    inner = bare(m)

    def of_sample(parameters: dict[str, Tensor], features: Tensor, label: Tensor) -> Tensor:
        return ce(torch.func.functional_call(inner, parameters, (features[None],)), label[None])

    held = {name: value.detach() for name, value in inner.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(of_sample), (None, 0, 0))(held, x, y)
    for name, value in inner.named_parameters():
        value.grad = gradients[name].mean(0)


def simclr_gathered(script: Script, *, on_each: bool) -> list[Tensor]:
    """Each rank's anchors against all ranks' embeddings; ``on_each``: each rank computes the loss of all anchors."""

    def loss(m: Any, x: Any, y: Any, say: Any) -> Any:
        one, two = normalize(m(x), dim=1), normalize(m(x + 0.3), dim=1)
        others, first = script.gathered(two)
        if on_each:
            one, first = script.gathered(one)[0], 0
        value = ce(one @ others.T / 0.2, first + torch.arange(len(one)))
        return say(value, **({"reduction": "average"} if on_each else {"count": len(one)}))

    return trained(script, loss)


def with_evaluation_before_backward(m: Any, x: Any, y: Any, say: Any) -> Any:
    loss = usual(m, x, y, say)
    m.eval()
    bare(m)(x[:3])  # keeps gradients
    m.train()
    return loss


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Fetch each batch before the one before it is trained on."""
    coming = next(batches)
    for following in batches:
        yield coming
        coming = following
    yield coming


def some_left_out(batches: Iterator[Any]) -> Iterator[Any]:
    return (batch for number, batch in enumerate(batches) if number not in (1, 5))


loops(
    RIGHT,
    {
        "several updates with one batch": several_updates_with_one_batch,
        "parts of a size": parts_of_a_size,
        "SimCLR gathered": partial(simclr_gathered, on_each=False),
        "SimCLR gathered on each": partial(simclr_gathered, on_each=True),
    },
)
loops(AHEAD, {"loss of two batches": loss_of_two_batches, "batch fetched ahead": partial(trained, order=ahead)})
losses(RIGHT, {"batches left out": with_evaluation_before_backward}, USUAL, order=some_left_out)
losses(AGAIN, {"two losses one pass": twice_by_one_pass}, USUAL)
FORMS = {
    "past the wrapper": lambda m, x, y, say: say(ce(bare(m)(x), y)),
    "past the wrapper after a pass": past_the_wrapper_after_a_pass,
    "past the wrapper beside a pass": lambda m, x, y, say: say(ce(m(x), y) + bare(m)(x.flip(1)).square().mean()),
}
losses(PAST, FORMS, USUAL)
FORMS = {
    "penalty on parameters": lambda m, x, y, say: say(ce(m(x), y)) + say(0.01 * squares(bare(m)), reduction="average"),
    "unlabelled samples of one number": with_others_of_one_number,
}
losses(RIGHT, FORMS, USUAL)
losses(COUPLED, {"norm of the gradient": norm_of_the_gradient}, USUAL)
losses(UNSAID, {"gradients by hand": gradients_by_hand}, USUAL)


# Loaders of the script's own, which are the hook's alone: balancer and agent bring the loader.


class Parted(IterableDataset[Any]):
    """The samples from ``begin`` to ``end``, of which each data worker gives a part."""

    def __init__(self, begin: int = 0, end: int = 72) -> None:
        self.begin, self.end = begin, end

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        samples = training_patterns.data(torch.float64, 72)
        return (samples[place] for place in range(self.begin + worker, self.end, workers))


def loader(script: Script, *, early: bool = False, **options: Any) -> list[Tensor]:
    return given(script, DataLoader(script.data(), batch_size=TOTAL, **options), early=early)


def loader_of_a_distributed_sampler(script: Script) -> list[Tensor]:
    return loader(script, sampler=DistributedSampler(script.data(), script.ranks, script.rank, seed=3))


def streams(script: Script, **options: Any) -> list[Tensor]:
    """Rank 0 has 40 samples in batches of 12, rank 1 has 32 in batches of 20."""
    if script.alone:
        mine, other = list(range(40)), list(range(40, 72))
        batches = [mine[12 * step : 12 * step + 12] + other[20 * step : 20 * step + 20] for step in range(4)]
        return given(script, DataLoader(script.data(), batch_sampler=batches))
    stream = Parted(0, 40) if script.rank == 0 else Parted(40)
    return given(script, DataLoader(stream, batch_size=16), **options)


def own_loader(script: Script, *, turned: bool) -> list[Tensor]:
    """Each rank takes its planned part of each 32 samples, a tail in other shares; ``turned``: samples in columns."""
    model, (features, labels) = net(), script.data().tensors
    script.begin(model)
    optimizer = sgd(model)
    if turned:
        model.register_forward_pre_hook(lambda module, inputs: inputs[0].T)
    wrapped, handle = script.start(model, optimizer)
    for begin in range(0, len(labels), TOTAL):
        end = min(begin + TOTAL, len(labels))
        cut = begin + (12 if end == begin + TOTAL else 5)
        mine = slice(begin, end) if script.alone else slice(begin, cut) if script.rank == 0 else slice(cut, end)
        optimizer.zero_grad()
        usual(wrapped, features[mine].T if turned else features[mine], labels[mine], handle.loss).backward()
        optimizer.step()
    return values(model)


def validated(script: Script, *, quiet: bool) -> list[Tensor]:
    """Other batches of the hook's are looked at after each update, and loaders are made anew for each epoch."""
    script.begin(model := net())
    optimizer = sgd(model)
    wrapped, hook = script.start(model, optimizer)
    for epoch in range(2):
        torch.manual_seed(epoch)
        made_here: list[Any] = [DataLoader(script.data(), batch_size=TOTAL, shuffle=each) for each in (True, False)]
        training, held_out = made_here if script.alone else map(hook.planned, made_here)
        for batch in training:
            optimizer.zero_grad()
            usual(wrapped, *batch, hook.loss).backward()
            optimizer.step()
            wrapped.eval()
            with torch.set_grad_enabled(not quiet):
                for x, y in held_out:
                    ce(wrapped(x), y)
            wrapped.train()
    return values(model)


loops(
    RIGHT,
    {
        "loader made before": partial(loader, shuffle=True),
        "loader before everything": partial(loader, num_workers=1, early=True),
        "loader of a distributed sampler": loader_of_a_distributed_sampler,
        "loader with its own order": lambda script: loader(
            script, sampler=WeightedRandomSampler(torch.arange(1.0, 73.0), 50), drop_last=True
        ),
        "stream with data workers": lambda script: given(
            script, DataLoader(Parted(), batch_size=TOTAL, num_workers=2), early=True
        ),
        "streams of the ranks' own": partial(streams, shared=False),
        "batches by hand": partial(own_loader, turned=False),
        "validation between updates": partial(validated, quiet=True),
        "validation with gradients": partial(validated, quiet=False),
    },
    HOOK_ALONE,
)
loops(DIFFERS, {"one stream of two": streams}, HOOK_ALONE)
loops(COLUMNS, {"batches by hand in columns": partial(own_loader, turned=True)}, HOOK_ALONE)


# Unseen: samples of a batch that are compared with each other.


def moved(x: Tensor) -> Tensor:
    """Return the second view of samples."""
    return x * 1.1 + 0.2


def without_themselves(one: Tensor) -> Tensor:
    """Return the similarities of rows, those with themselves left out."""
    return (one @ one.T / 0.5).masked_fill(torch.eye(len(one), dtype=torch.bool), -1e9)


def simclr_of_2n_by_2n(m: Any, x: Any, y: Any, say: Any) -> Any:
    one = normalize(m(cat([x, moved(x)])), dim=1)
    return say(ce(without_themselves(one), torch.arange(len(one)).roll(len(x))))


def prototypes_of_the_batch(m: Any, x: Any, y: Any, say: Any) -> Any:
    outputs, classes = m(x), one_hot(y, CLASSES).double()
    centres = classes.T @ outputs / classes.sum(0).clamp(min=1)[:, None]
    return say(ce(-(outputs[:, None] - centres).square().sum(2), y))


def barlow_twins(m: Any, x: Any, y: Any, say: Any) -> Any:
    one, two = ((part - part.mean(0)) / part.std(0) for part in (m(x), m(moved(x))))
    return say((one.T @ two / len(one) - torch.eye(CLASSES)).square().sum())


def dice_over_the_batch(m: Any, x: Any, y: Any, say: Any) -> Any:
    shares, truth = m(x).sigmoid(), one_hot(y, CLASSES)
    return say(1 - 2 * (shares * truth).sum() / (shares + truth).sum())


def area_under_the_curve(m: Any, x: Any, y: Any, say: Any) -> Any:
    pairs = F.softplus((scores := m(x)[:, 0])[y != 0][None] - scores[y == 0][:, None])
    return say(pairs.sum() / max(pairs.numel(), 1))


FORMS = {
    "simclr of 2n by 2n": simclr_of_2n_by_2n,
    "prototypes of the batch": prototypes_of_the_batch,
    "barlow twins": barlow_twins,
    "dice over the batch": dice_over_the_batch,
    "area under the curve": area_under_the_curve,
}
losses(COUPLED, FORMS)


# Unseen: what is made of the rank's batch and leaves no second derivative, and the same over all ranks.


def after_steps(warm: int, early: Callable[..., Any], late: Callable[..., Any]) -> Loop:
    """Return the loop of one loss of each sample's loss in the first steps, and of another later."""

    def loss(script: Script) -> Loss:
        steps = itertools.count()
        return lambda m, x, y, say: (early if next(steps) < warm else late)(each(m(x), y), say)

    return made(loss)


def hard_ones(threshold: float) -> Callable[..., Any]:
    """Return the sum of losses above a threshold, so that no sample is chosen by others."""
    return lambda found, say: say(
        (found * (hard := found.detach() > threshold)).sum(), count=hard.sum(), reduction="sum"
    )


def positives_of_all(script: Script) -> Loss:
    """RetinaNet: a sum over the anchors that match, over the ranks' mean of their number."""

    def loss(m: Any, x: Any, y: Any, say: Any) -> Any:
        mean = script.summed((matched := (y > 0).double()).sum()) / script.ranks
        return say((each(m(x), y) * matched).sum() / mean, reduction="average")

    return loss


class SyncNorm(nn.Module):
    """BatchNorm over the samples of all ranks."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script, self.scale = script, nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        everything, _ = self.script.gathered(x)
        return self.scale * (x - everything.mean(0)) / (everything.var(0) + 1e-3).sqrt()


def norm_over_all_ranks(script: Script) -> list[Tensor]:
    """SyncBatchNorm."""
    layers = net()
    return trained(script, model=lambda: nn.Sequential(layers[0], SyncNorm(script), layers[1], layers[2]))


losses(LIMIT, {"median of the batch": lambda m, x, y, say: say(each(m(x), y).median())})


def energy_distance(o: Tensor) -> Tensor:
    return torch.cdist(o, o.flip(0)).tanh().mean()


def has_second_derivative(function: Callable[[Tensor], Tensor]) -> bool:
    points = torch.rand(4, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(function(points), points, create_graph=True)
    try:
        torch.autograd.grad(slope.sum(), points)
    except RuntimeError:
        return False
    return True


losses(
    COUPLED if has_second_derivative(energy_distance) else LIMIT,  # newer torches derive cdist twice
    {"energy distance by cdist": lambda m, x, y, say: say(ce(o := m(x), y) - 0.1 * energy_distance(o))},
)
NORMED = (nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
losses(LIMIT, {"batch norm of the rank": usual}, model=lambda: copy.deepcopy(nn.Sequential(*NORMED)).double())
loops(
    RIGHT,
    {
        "positives of all ranks": made(positives_of_all),
        "norm over all ranks": norm_over_all_ranks,
        "hard ones after a warm up": after_steps(5, hard_ones(0.0), hard_ones(0.8)),
    },
    LONG,
)


# Unseen: losses with their words.


def sentences() -> TensorDataset:
    """Rows of one to five words after a first one; 0 is padding."""
    generator, rows = torch.Generator().manual_seed(5), STEPS * TOTAL + 11
    words = torch.randint(1, 7, (rows, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=generator)
    return TensorDataset(torch.where(torch.arange(LENGTH) < lengths, words, 0))


def masked_words(m: Any, x: Any, say: Any) -> Any:
    masked = (x == 3) | (x == 5)
    total = ce(m(x.masked_fill(masked, 0))[masked], x[masked], reduction="sum")
    return say(total, count=masked.sum(), reduction="sum")


def rare_ignored_labels(m: Any, x: Any, y: Any, say: Any) -> Any:
    labels = y.masked_fill(x[:, 0] > 1.8, -100)
    return say(ce(m(x), labels), count=(labels >= 0).sum())


class Pixels(nn.Module):
    """Classes of the six pixels of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, CLASSES, 1)
        self.norm = nn.GroupNorm(2, 4)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.body(x.view(-1, 1, 2, 3))).relu())


def ignored_pixels(m: Any, x: Any, y: Any, say: Any) -> Any:
    labels = ((x > 0).long() + (x > 1).long()).masked_fill(x < -0.7, 255).view(-1, 2, 3)
    return say(ce(m(x), labels, ignore_index=255), count=(labels != 255).sum())


def pairs_in_one_pass(m: Any, x: Any, y: Any, say: Any) -> Any:
    one, two = m(cat([x, -x])).chunk(2)
    ranking = F.margin_ranking_loss(one[:, 0], two[:, 0], 2.0 * (y > 0) - 1, margin=1.0)
    return say(ranking + F.mse_loss(one.tanh(), two))  # samples that meet themselves, a batch apart


def several_losses_one_backward(m: Any, x: Any, y: Any, say: Any) -> Any:
    outputs, odd = m(x), y == 1
    loss = say(ce(outputs, y)) + say(outputs[odd].square().sum() / odd.sum().clamp(min=1), count=odd.sum())
    return loss + say(0.01 * outputs.abs().sum(), reduction="sum")


def losses_in_a_list(m: Any, x: Any, y: Any, say: Any) -> None:
    torch.autograd.backward([say(ce(outputs := m(x), y)), say(outputs.square().mean())])


def several_backward_passes(m: Any, x: Any, y: Any, say: Any) -> None:
    for view in (x, x.flip(1), -x):
        say(ce(m(view), y) / 3).backward()


for made_of, forms in (
    (sentences, {"masked words": masked_words}),
    (lambda: training_patterns.data(torch.float64, STEPS * TOTAL + 3), {"tail of three": usual}),
    (
        lambda: training_patterns.data(torch.float64, STEPS * TOTAL + 2),
        {"tail of two counted": lambda m, x, y, say: say(ce(m(x), y), count=len(x))},
    ),
):
    model = (lambda: training_patterns.Tied().double()) if made_of is sentences else net
    losses(RIGHT, forms, model=model, dataset=made_of)
FORMS = {
    "rare ignored labels": rare_ignored_labels,
    "pairs in one pass": pairs_in_one_pass,
    "distance without second derivative": lambda m, x, y, say: say(
        ce(-torch.cdist(m(x), torch.eye(CLASSES, dtype=torch.float64)), y)
    ),
    "several losses one backward": several_losses_one_backward,
    "losses in a list": losses_in_a_list,
    "half of a gradient": lambda m, x, y, say: say(ce(m(x), y)).backward(torch.tensor(0.5, dtype=torch.float64)),
    "several backward passes": several_backward_passes,
    # The ranks' weights add up to one, so what is the same on all ranks may be said so.
    "penalty said as a mean": lambda m, x, y, say: say(ce(m(x), y) + 0.01 * squares(m)),
    "compiled loss": lambda m, x, y, say: say(torch.compile(ce, backend="eager")(m(x), y)),
}
losses(RIGHT, FORMS)
losses(RIGHT, {"segmentation with ignored pixels": ignored_pixels}, model=Pixels)


# Unseen: models that compute their losses, and that keep terms of them.


@dataclass(slots=True)
class Answer:
    """What a model answers."""

    logits: Tensor
    loss: Tensor


class Losing(nn.Module):
    """A model that computes its loss and gives it in some form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.form = net(), form

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.form(logits := self.inner(x), ce(logits, labels))


class Experts(nn.Module):
    """A mixture of experts with a term beside its output: returned, or kept in an attribute."""

    def __init__(self, term: Callable[[Tensor], Tensor], kept: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(3))
        self.gate, self.term, self.kept = nn.Linear(WIDTH, 3), term, kept
        self.auxiliary: Any = None
        self.double()

    def forward(self, x: Tensor) -> Any:
        scores = self.gate(x)
        mixed = (torch.stack([expert(x) for expert in self.experts], 2) * scores.softmax(1)[:, None]).sum(2)
        if not self.kept:
            return mixed, self.term(scores)
        self.auxiliary = self.term(scores)
        return mixed


def of_gates(scores: Tensor) -> Tensor:
    return 0.1 * scores.logsumexp(1).square().mean()


def importance(scores: Tensor) -> Tensor:
    shares = scores.softmax(1).sum(0)
    return shares.var() / shares.mean().square()


def with_kept_term(m: Any, x: Any, y: Any, say: Any) -> Any:
    loss = ce(m(x), y)
    return say(loss + bare(m).auxiliary)


def with_returned_term(m: Any, x: Any, y: Any, say: Any) -> Any:
    outputs, term = m(x)
    return say(ce(outputs, y) + term)


class Weighing(nn.Module):
    """Two tasks with learned weights (Kendall et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.logs = net(), nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.logs


def weights_of_tasks(m: Any, x: Any, y: Any, say: Any) -> Any:
    outputs, logs = m(x)
    tasks = torch.stack([ce(outputs, y), F.mse_loss(outputs, x[:, :CLASSES])])
    return say(((-logs).exp() * tasks + logs).sum())


def of_models(truth: str, table: Mapping[str, tuple[Callable[[], nn.Module], Loss]]) -> None:
    """Put losses, each of a model of its own, into the table."""
    for name, (model, loss) in table.items():
        losses(truth, {name: loss}, model=model)


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 3))).double()


def first_of(m: Any, x: Any, y: Any, say: Any) -> Any:
    return say(m(x, y)[0])


of_models(
    RIGHT,
    {
        "loss in a dictionary": (
            lambda: Losing(lambda logits, loss: {"logits": logits, "loss": loss}),
            lambda m, x, y, say: say(m(x, y)["loss"]),
        ),
        "loss in a tuple": (lambda: Losing(lambda logits, loss: (loss, logits)), first_of),
        "loss in a dataclass with slots": (lambda: Losing(Answer), lambda m, x, y, say: say(m(x, y).loss)),
        "gate losses returned": (lambda: Experts(of_gates, kept=False), with_returned_term),
        "weights of tasks as parameters": (Weighing, weights_of_tasks),
        "spectral norm": (spectral, usual),
    },
)
of_models(LIMIT, {"importance returned": (lambda: Experts(importance, kept=False), with_returned_term)})
VARIED = lambda: Losing(lambda logits, loss: (loss + logits.var(0).mean(), logits))  # noqa: E731
of_models(COUPLED, {"coupled loss in a tuple": (VARIED, first_of)})
of_models(ATTRIBUTE, {"gate losses in an attribute": (lambda: Experts(of_gates, kept=True), with_kept_term)})


# Unseen: gradients that are used in between, and gradients of gradients.


def slopes(outputs: Tensor, inputs: Tensor) -> Tensor:
    (gradients,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return gradients.norm(2, dim=1)


def gradient_penalty_on_data(m: Any, x: Any, y: Any, say: Any) -> Any:
    """R1: the squared slope of the score at the data, by itself; a term times 0 is there for its graph alone."""
    outputs = m(inputs := x.clone().requires_grad_())
    slope = slopes(outputs, inputs).square().mean() + 0 * outputs.sum()
    return say(F.softplus(-outputs).mean()) + say(slope, count=len(inputs))


def adversarial(through: Callable[[Any], Any]) -> Loss:
    """FGSM, whose attack goes through the module itself, or through the wrapped model."""

    def loss(m: Any, x: Any, y: Any, say: Any) -> Any:
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(ce(through(m)(inputs), y), inputs)
        return usual(m, x + 0.1 * slope.sign(), y, say)

    return loss


def sharpness_aware(m: Any, x: Any, y: Any, say: Any) -> None:
    """SAM with its norm over all parameters, by a plain average of two backward passes."""
    usual(m, x, y, say).backward()
    found = [value.grad.clone() for value in m.parameters()]
    norm = torch.stack([slope.norm() for slope in found]).norm()
    for share in (0.05, -0.05):
        with torch.no_grad():
            for value, slope in zip(m.parameters(), found, strict=True):
                value += share * slope / norm
        if share > 0:
            m.zero_grad()
            usual(m, x, y, say).backward()


def grad_scaler_with_unscaling(script: Script) -> list[Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)

    def after(optimizer: Any) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
        scaler.step(optimizer)
        scaler.update()

    return trained(script, lambda m, x, y, say: scaler.scale(usual(m, x, y, say)), after=after)


def line_search(script: Script) -> list[Tensor]:
    """Train by an optimizer that calls back, and is told the loss of all ranks' samples."""
    script.begin(model := net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, line_search_fn="strong_wolfe")
    wrapped, handle = script.start(model, optimizer, dataset := script.data())
    for batch in script.batches(handle, dataset):

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = usual(wrapped, *batch, handle.loss)
            loss.backward()
            return script.summed(loss * len(batch[0])) / script.summed(len(batch[0]))

        optimizer.step(closure)
    return values(model)


def frozen_body(script: Script) -> list[Tensor]:
    model = net()
    model[0].requires_grad_(False)
    head = lambda model: torch.optim.AdamW([*model[2].parameters()], lr=0.01)  # noqa: E731
    return trained(script, model=lambda: model, optimizer=head)


FORMS = {
    "adversarial samples": adversarial(bare),
    "adversarial samples by the wrapped model": adversarial(lambda m: m),
    "sharpness aware in two steps": sharpness_aware,
}
losses(RIGHT, FORMS)
losses(RIGHT, {"gradient penalty on data": gradient_penalty_on_data}, lr=0.01)
loops(
    RIGHT,
    {
        "grad scaler with unscaling": grad_scaler_with_unscaling,
        "line search by the loss of all ranks": line_search,
        "frozen body": frozen_body,
    },
    LONG,
)


# Unseen: rates, and parameters that drift apart.


def rate_of_one_rank_at_step_5(script: Script) -> list[Tensor]:
    steps = itertools.count()

    def after(optimizer: Any) -> None:
        if next(steps) == 5 and script.rank == 1:
            optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()

    return trained(script, after=after)


def noise_of_the_ranks_own(script: Script) -> list[Tensor]:
    """Langevin dynamics, with a random stream that differs from rank to rank: the parameters drift apart."""
    stream = torch.Generator().manual_seed(script.rank)

    def after(optimizer: Any) -> None:
        optimizer.step()
        for value in optimizer.param_groups[0]["params"]:
            value.data += 0.01 * torch.randn(value.shape, generator=stream, dtype=value.dtype)

    return trained(script, after=after)


loops(
    DIFFERS,
    {"rate of one rank at step 5": rate_of_one_rank_at_step_5, "noise of the ranks own": noise_of_the_ranks_own},
    LONG,
)
