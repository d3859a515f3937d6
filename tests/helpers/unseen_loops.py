"""Training loops of classes that the first table has not: each is right, refused, or beyond what is measured.

The loops are written as in :mod:`tests.helpers.pattern_workers`, for 40 updates in two epochs with a smaller last batch each.
:func:`case` puts a loss (or a whole loop) into :data:`UNSEEN` with the truth about it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import TensorDataset

from tests.helpers import training_patterns
from tests.helpers.pattern_workers import (
    COUPLED,
    DIFFERS,
    HOOK,
    PAST,
    TOTAL,
    WIDTH,
    Script,
    bare,
    compared,
    each,
    net,
    of_all_ranks,
    sgd,
    trained,
    values,
)
from tests.helpers.training_patterns import CLASSES, classified

BATCHES, TAIL = 19, 11
SAMPLES = BATCHES * TOTAL + TAIL
LENGTH, WORDS, FAR = 5, 7, 0.05
RIGHT, LIMIT = "right", "limit"
ATTRIBUTE = r"attribute|output|\.loss\(|coupled|depend"
"""What a term that the model keeps beside its outputs is refused with."""


@dataclass(frozen=True)
class Unseen:
    """A loop and the truth about it.

    ``truth``: "right"; what it is refused with (a pattern); "limit": it trains on, and otherwise than one process, which only
    the comparison with one process finds.
    """

    loop: Callable[[Script], list[Tensor]]
    truth: str


UNSEEN: dict[str, Unseen] = {}


def data(tail: int = TAIL) -> TensorDataset:
    return training_patterns.data(torch.float64, BATCHES * TOTAL + tail)


def sentences() -> TensorDataset:
    """Rows of one to five words after a first one; 0 is padding."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1), generator=generator)
    return TensorDataset(torch.where(torch.arange(LENGTH) < lengths, words, 0))


def case(truth: str = RIGHT, *, whole: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Put a loss, or a loop that is ``whole``, into the table under its name; ``options`` change the common loop."""

    def put(function: Callable[..., Any]) -> Any:
        name = function.__name__.strip("_").replace("_", " ")
        assert name not in UNSEEN
        UNSEEN[name] = Unseen(function if whole else lambda script: ran(script, function, **options), truth)
        return function

    return put


def ran(
    script: Script,
    loss: Any,
    *,
    model: Callable[[], nn.Module] = net,
    lr: float = FAR,
    made: Any = data,
    **options: Any,
) -> list[Tensor]:
    """Return the parameters after the common loop."""
    updates = options.pop("optimizer", lambda model: sgd(model, lr=lr))
    return trained(script, loss, model=model(), dataset=made(), optimizer=updates, **options)


def outcome(rank: int, name: str, sizes: tuple[int, int]) -> float | str:
    """Return how far a loop ends from one process's, or the refusal; by the hook, with these local batches."""
    return compared(UNSEEN[name].loop, Script(HOOK, rank, sizes))


def summed(script: Script, number: Tensor) -> Tensor:
    """Return the sum of a number over the ranks."""
    number = number.detach().clone()
    if not script.alone:
        dist.all_reduce(number)
    return number


class SyncNorm(nn.Module):
    """BatchNorm over the samples of all ranks."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script, self.scale = script, nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        everything, _ = of_all_ranks(self.script, x)
        return self.scale * (x - everything.mean(0)) / (everything.var(0) + 1e-3).sqrt()


def slopes(outputs: Tensor, inputs: Tensor) -> Tensor:
    (gradients,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return gradients.norm(2, dim=1)


# Samples of a batch that are compared with each other.


def views(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return F.normalize(model(batch[0]), dim=1), F.normalize(model(batch[0] * 1.1 + 0.2), dim=1)


def without_themselves(one: Tensor) -> Tensor:
    """Return the similarities of rows, those with themselves left out."""
    return (one @ one.T / 0.5).masked_fill(torch.eye(len(one), dtype=torch.bool), -1e9)


@case(COUPLED)
def simclr_of_2n_by_2n(model: Any, batch: Any, handle: Any) -> Any:
    one = F.normalize(model(torch.cat([batch[0], batch[0] * 1.1 + 0.2])), dim=1)
    return handle.loss(F.cross_entropy(without_themselves(one), torch.arange(len(one)).roll(len(batch[0]))))


@case(COUPLED)
def nt_xent_by_cosine_similarity(model: Any, batch: Any, handle: Any) -> Any:
    one, two = model(batch[0]), model(batch[0] * 1.1 + 0.2)
    return handle.loss(-F.cosine_similarity(one[:, None], two[None], dim=2).log_softmax(1).diagonal().mean())


@case(COUPLED)
def supervised_contrast(model: Any, batch: Any, handle: Any) -> Any:
    alike = (batch[1][:, None] == batch[1]).double().fill_diagonal_(0)
    logs = without_themselves(F.normalize(model(batch[0]), dim=1)).log_softmax(1)
    return handle.loss(-((logs * alike).sum(1) / alike.sum(1).clamp(min=1)).mean())


@case(COUPLED)
def prototypes_of_the_batch(model: Any, batch: Any, handle: Any) -> Any:
    outputs, classes = model(batch[0]), F.one_hot(batch[1], CLASSES).double()
    centres = classes.T @ outputs / classes.sum(0).clamp(min=1)[:, None]
    return handle.loss(F.cross_entropy(-(outputs[:, None] - centres).square().sum(2), batch[1]))


@case(COUPLED)
def cox_partial_likelihood(model: Any, batch: Any, handle: Any) -> Any:
    risk, times = model(batch[0])[:, 0], batch[0][:, 0]
    later = torch.where(times[None] >= times[:, None], risk[None], -1e9).logsumexp(1)
    return handle.loss(((later - risk) * (batch[1] > 0)).mean())


@case(COUPLED)
def gram_by_einsum(model: Any, batch: Any, handle: Any) -> Any:
    outputs = model(batch[0])
    gram = torch.einsum("ni,nj->ij", outputs, outputs) / len(outputs)
    return handle.loss(classified(model, batch) + (gram - torch.eye(CLASSES)).square().sum())


@case(COUPLED)
def triplet_mined_in_the_batch(model: Any, batch: Any, handle: Any) -> Any:
    outputs, alike = model(batch[0]), batch[1][:, None] == batch[1]
    apart = (outputs[:, None] - outputs[None]).square().sum(2)
    furthest, nearest = apart.masked_fill(~alike, 0).amax(1), apart.masked_fill(alike, 1e9).amin(1)
    return handle.loss(F.relu(furthest - nearest + 1).mean())


@case(COUPLED)
def clip_of_the_rank(model: Any, batch: Any, handle: Any) -> Any:
    image, text = views(model, batch)
    logits, here = image @ text.T / 0.3, torch.arange(len(image))
    return handle.loss((F.cross_entropy(logits, here) + F.cross_entropy(logits.T, here)) / 2)


@case(whole=True)
def clip_gathered(script: Script) -> list[Tensor]:
    def loss(model: Any, batch: Any, handle: Any) -> Any:
        image, text = views(model, batch)
        (images, first), (texts, _) = of_all_ranks(script, image), of_all_ranks(script, text)
        here = first + torch.arange(len(image))
        both = F.cross_entropy(image @ texts.T / 0.3, here) + F.cross_entropy(text @ images.T / 0.3, here)
        return handle.loss(both / 2, count=len(image))

    return ran(script, loss)


@case(COUPLED)
def barlow_twins(model: Any, batch: Any, handle: Any) -> Any:
    one, two = ((part - part.mean(0)) / part.std(0) for part in (model(batch[0]), model(batch[0] * 1.1 + 0.2)))
    cross = one.T @ two / len(one)
    return handle.loss((cross - torch.eye(CLASSES)).square().sum())


@case(COUPLED)
def vicreg(model: Any, batch: Any, handle: Any) -> Any:
    one, two = model(batch[0]), model(batch[0] * 1.1 + 0.2)
    spread = F.relu(1 - (one.var(0) + 1e-4).sqrt()).mean()
    return handle.loss(F.mse_loss(one, two) + spread + 0.04 * one.T.cov().fill_diagonal_(0).square().sum())


@case(COUPLED)
def variance_of_the_batch(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(classified(model, batch) - 0.1 * model(batch[0]).tanh().var(0).mean())


@case(COUPLED)
def entropy_of_the_mean_prediction(model: Any, batch: Any, handle: Any) -> Any:
    outputs = model(batch[0])
    mean = outputs.softmax(1).mean(0)
    return handle.loss(F.cross_entropy(outputs, batch[1]) + (mean * mean.log()).sum())


@case(COUPLED)
def dice_over_the_batch(model: Any, batch: Any, handle: Any) -> Any:
    shares, truth = model(batch[0]).sigmoid(), F.one_hot(batch[1], CLASSES)
    return handle.loss(1 - 2 * (shares * truth).sum() / (shares + truth).sum())


@case(COUPLED)
def area_under_the_curve(model: Any, batch: Any, handle: Any) -> Any:
    scores = model(batch[0])[:, 0]
    pairs = F.softplus(scores[batch[1] != 0][None] - scores[batch[1] == 0][:, None])
    return handle.loss(pairs.sum() / max(pairs.numel(), 1))


@case(COUPLED)
def ranking_of_a_list(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(-(model(batch[0])[:, 0].log_softmax(0) * batch[0][:, 0].softmax(0)).sum())


@case(COUPLED)
def discrepancy_of_halves(model: Any, batch: Any, handle: Any) -> Any:
    outputs = model(batch[0])
    near = (-(outputs[:, None] - outputs[None]).square().sum(2)).exp()
    sign = torch.where(batch[1] > 0, 1.0, -1.0).double()
    return handle.loss(sign @ near @ sign / len(sign) ** 2 + F.cross_entropy(outputs, batch[1]))


@case(COUPLED)
def root_of_the_mean_square(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss((each(model(batch[0]), batch[1]) ** 2).mean().sqrt())


@case()
def queue_of_fixed_negatives(model: Any, batch: Any, handle: Any) -> Any:
    one, two = views(model, batch)
    queue = F.normalize(torch.linspace(-1, 1, 10 * CLASSES, dtype=torch.float64).sin().view(10, CLASSES), dim=1)
    logits = torch.cat([(one * two.detach()).sum(1, keepdim=True), one @ queue.T], 1) / 0.5
    return handle.loss(F.cross_entropy(logits, torch.zeros_like(batch[1])))


@case()
def dice_of_each_sample(model: Any, batch: Any, handle: Any) -> Any:
    shares, truth = model(batch[0]).sigmoid(), batch[0][:, :CLASSES].sigmoid()
    return handle.loss((1 - 2 * (shares * truth).sum(1) / (shares + truth).sum(1)).mean())


# What is made of the rank's batch and leaves no second derivative: beyond what is measured.


@case(LIMIT)
def energy_distance_by_cdist(model: Any, batch: Any, handle: Any) -> Any:
    outputs = model(batch[0])
    return handle.loss(F.cross_entropy(outputs, batch[1]) - 0.1 * torch.cdist(outputs, outputs.flip(0)).tanh().mean())


@case(LIMIT)
def median_of_the_batch(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(each(model(batch[0]), batch[1]).median())


@case(LIMIT)
def hardest_of_the_batch(model: Any, batch: Any, handle: Any) -> Any:
    losses = each(model(batch[0]), batch[1])
    return handle.loss(losses.topk(max(len(losses) // 4, 1))[0].mean())


@case(LIMIT)
def running_sum_over_the_batch(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(each(model(batch[0]), batch[1]).cumsum(0).mean() / 10)


@case(LIMIT)
def losses_over_their_detached_mean(model: Any, batch: Any, handle: Any) -> Any:
    losses = each(model(batch[0]), batch[1])
    return handle.loss((losses * (losses / losses.mean()).detach()).mean())


@case(LIMIT)
def weights_normalised_on_the_rank(model: Any, batch: Any, handle: Any) -> Any:
    weights = batch[0][:, 0].abs()
    return handle.loss((each(model(batch[0]), batch[1]) * weights / weights.mean()).mean())


def clipped(model: Any, batch: Any, advantages: Tensor) -> Tensor:
    """Return the losses of PPO against the policy before this step."""
    logs = -each(model(batch[0]), batch[1])
    ratio = (logs - logs.detach() + 0.1 * batch[0][:, 1]).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@case(LIMIT)
def ppo_with_advantages_of_the_rank(model: Any, batch: Any, handle: Any) -> Any:
    gains = batch[0][:, 0]
    return handle.loss(clipped(model, batch, (gains - gains.mean()) / (gains.std() + 1e-8)).mean())


@case(LIMIT, model=lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double())
def batch_norm_of_the_rank(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(classified(model, batch))


@case(LIMIT)
def mixup_within_the_batch(model: Any, batch: Any, handle: Any) -> Any:
    outputs = model(0.7 * batch[0] + 0.3 * batch[0].flip(0))
    return handle.loss(0.7 * F.cross_entropy(outputs, batch[1]) + 0.3 * F.cross_entropy(outputs, batch[1].flip(0)))


@case(LIMIT, whole=True)
def centre_of_the_ranks_own(script: Script) -> list[Tensor]:
    return centred(script, of_all=False)


@case(LIMIT, whole=True)
def hardest_after_a_warm_up(script: Script) -> list[Tensor]:
    """Found by nothing that looks at the first steps."""
    steps = itertools.count()

    def loss(model: Any, batch: Any, handle: Any) -> Any:
        losses = each(model(batch[0]), batch[1])
        return handle.loss(losses.mean() if next(steps) < 20 else losses.topk(max(len(losses) // 2, 1))[0].mean())

    return ran(script, loss)


@case(LIMIT)
def shares_of_experts_returned(model: Any, batch: Any, handle: Any) -> Any:
    """The balance of a mixture of experts (Switch Transformer, equation 4), whose counts have no gradient."""
    outputs = model(batch[0])
    chosen = F.one_hot(outputs.argmax(1), CLASSES).double().mean(0)
    return handle.loss(F.cross_entropy(outputs, batch[1]) + CLASSES * (chosen * outputs.softmax(1).mean(0)).sum())


# The same, over all ranks.


def centred(script: Script, *, of_all: bool) -> list[Tensor]:
    """DINO: a centre that follows the mean of the teacher's outputs."""
    centre = torch.zeros(CLASSES, dtype=torch.float64)
    teacher = net()

    def loss(model: Any, batch: Any, handle: Any) -> Any:
        nonlocal centre
        with torch.no_grad():
            taught = teacher(batch[0])
            total, number = taught.sum(0), torch.tensor(float(len(taught)))
            mean = summed(script, total) / summed(script, number) if of_all else total / number
        value = -((taught - centre).softmax(1) * model(batch[0] * 1.1).log_softmax(1)).sum(1).mean()
        centre = 0.5 * centre + 0.5 * mean
        return handle.loss(value)

    return ran(script, loss)


@case(whole=True)
def centre_of_all_ranks(script: Script) -> list[Tensor]:
    return centred(script, of_all=True)


@case(whole=True)
def ppo_with_advantages_of_all_ranks(script: Script) -> list[Tensor]:
    def loss(model: Any, batch: Any, handle: Any) -> Any:
        gains = batch[0][:, 0]
        number, total, squares = summed(script, torch.stack([torch.tensor(len(gains)), gains.sum(), gains @ gains]))
        mean = total / number
        return handle.loss(clipped(model, batch, (gains - mean) / (squares / number - mean**2).sqrt()).mean())

    return ran(script, loss)


@case(whole=True)
def positives_of_all_ranks(script: Script) -> list[Tensor]:
    """RetinaNet: a sum over the anchors that match, over the ranks' mean of their number."""

    def loss(model: Any, batch: Any, handle: Any) -> Any:
        matched = (batch[1] > 0).double()
        mean = summed(script, matched.sum()) / script.ranks
        return handle.loss((each(model(batch[0]), batch[1]) * matched).sum() / mean, reduction="average")

    return ran(script, loss)


@case(whole=True)
def norm_over_all_ranks(script: Script) -> list[Tensor]:
    """SyncBatchNorm."""
    layers = net()
    model = nn.Sequential(layers[0], SyncNorm(script), layers[1], layers[2])
    return ran(script, lambda model, batch, handle: handle.loss(classified(model, batch)), model=lambda: model)


# Losses with their words.


@case(made=sentences, model=lambda: training_patterns.Tied().double())
def next_words(model: Any, batch: Any, handle: Any) -> Any:
    following = batch[0][:, 1:]
    loss = F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), following.flatten(), ignore_index=0)
    return handle.loss(loss, count=(following != 0).sum())


@case(made=sentences, model=lambda: training_patterns.Tied().double())
def masked_words(model: Any, batch: Any, handle: Any) -> Any:
    masked = (batch[0] == 3) | (batch[0] == 5)
    total = F.cross_entropy(model(batch[0].masked_fill(masked, 0))[masked], batch[0][masked], reduction="sum")
    return handle.loss(total, count=masked.sum(), reduction="sum")


@case()
def rare_ignored_labels(model: Any, batch: Any, handle: Any) -> Any:
    labels = batch[1].masked_fill(batch[0][:, 0] > 1.8, -100)
    return handle.loss(F.cross_entropy(model(batch[0]), labels), count=(labels >= 0).sum())


@case(made=lambda: data(3))
def tail_of_three(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(classified(model, batch))


@case(made=lambda: data(2))
def tail_of_two_counted(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(classified(model, batch), count=len(batch[0]))


@case()
def weights_over_their_sum(model: Any, batch: Any, handle: Any) -> Any:
    weights = batch[0][:, 0].abs()
    loss = (each(model(batch[0]), batch[1]) * (weights / weights.sum())).sum()
    return handle.loss(loss, count=weights.sum())


@case()
def detached_weights(model: Any, batch: Any, handle: Any) -> Any:
    losses = each(model(batch[0]), batch[1])
    return handle.loss((losses * (1 - (-losses).exp()).detach()).mean())


@case()
def focal(model: Any, batch: Any, handle: Any) -> Any:
    losses = each(model(batch[0]), batch[1])
    return handle.loss(((1 - (-losses).exp()) ** 2 * losses).mean())


@case()
def focal_over_its_positives(model: Any, batch: Any, handle: Any) -> Any:
    losses, positive = each(model(batch[0]), batch[1]), (batch[1] > 0).sum()
    loss = ((1 - (-losses).exp()) ** 2 * losses).sum() / positive.clamp(min=1)
    return handle.loss(loss, count=positive.clamp(min=1))


@case(whole=True)
def hard_ones_after_a_warm_up(script: Script) -> list[Tensor]:
    """By a threshold, so that no sample is chosen by others."""
    steps = itertools.count()

    def loss(model: Any, batch: Any, handle: Any) -> Any:
        losses = each(model(batch[0]), batch[1])
        hard = losses.detach() > (0.0 if next(steps) < 10 else 0.8)
        return handle.loss((losses * hard).sum(), count=hard.sum(), reduction="sum")

    return ran(script, loss)


@case()
def smoothed_labels(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1))


@case(whole=True)
def distillation(script: Script) -> list[Tensor]:
    teacher = net()

    def loss(model: Any, batch: Any, handle: Any) -> Any:
        outputs = model(batch[0])
        near = F.kl_div(
            (outputs / 2).log_softmax(1), (teacher(batch[0]).detach() / 2).softmax(1), reduction="batchmean"
        )
        return handle.loss(F.cross_entropy(outputs, batch[1])) + handle.loss(4 * near)

    return ran(script, loss)


@case()
def ctc(model: Any, batch: Any, handle: Any) -> Any:
    outputs = model(batch[0]) * torch.arange(1, 5).double()[:, None, None]
    lengths, ones = torch.full_like(batch[1], 4), torch.ones_like(batch[1])
    return handle.loss(F.ctc_loss(outputs.log_softmax(2), batch[1][:, None] % 2 + 1, lengths, ones))


class Pixels(nn.Module):
    """Classes of the six pixels of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, CLASSES, 1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.body(x.view(-1, 1, 2, 3))).relu())
        return logits


@case(model=lambda: Pixels().double())
def segmentation_with_ignored_pixels(model: Any, batch: Any, handle: Any) -> Any:
    labels = ((batch[0] > 0).long() + (batch[0] > 1).long()).masked_fill(batch[0] < -0.7, 255).view(-1, 2, 3)
    return handle.loss(F.cross_entropy(model(batch[0]), labels, ignore_index=255), count=(labels != 255).sum())


@case(model=lambda: Pixels().double())
def segmentation_by_pixels_of_samples(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(F.cross_entropy(model(batch[0]), (batch[0] > 0).long().view(-1, 2, 3)))


@case(lr=0.002)
def variational_sum(model: Any, batch: Any, handle: Any) -> Any:
    middle, width = model(batch[0])[:, :2].chunk(2, 1)
    drawn = middle + (width / 2).exp() * batch[0][:, :1]
    loss = F.mse_loss(drawn.expand(-1, WIDTH), batch[0], reduction="sum")
    return handle.loss(loss - 0.5 * (1 + width - middle**2 - width.exp()).sum(), reduction="sum")


@case()
def variational_mean(model: Any, batch: Any, handle: Any) -> Any:
    middle, width = model(batch[0])[:, :2].chunk(2, 1)
    drawn = middle + (width / 2).exp() * batch[0][:, :1]
    loss = (drawn - batch[0]).square().sum() - 0.5 * (1 + width - middle**2 - width.exp()).sum()
    return handle.loss(loss / len(batch[0]) / 10)


@case(model=lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, WIDTH)).double())
def diffusion(model: Any, batch: Any, handle: Any) -> Any:
    kept, noise = batch[0][:, :1].sigmoid(), batch[0].roll(1, 1).sin()
    return handle.loss(F.mse_loss(model(kept.sqrt() * batch[0] + (1 - kept).sqrt() * noise), noise))


@case()
def pinball(model: Any, batch: Any, handle: Any) -> Any:
    off = batch[0][:, :CLASSES] - model(batch[0])
    return handle.loss(torch.maximum(0.9 * off, -0.1 * off).mean())


@case()
def mixture_density(model: Any, batch: Any, handle: Any) -> Any:
    outputs, places = model(batch[0]), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    logs = outputs.log_softmax(1) - (batch[0][:, :1] - places).square()
    return handle.loss(-logs.logsumexp(1).mean())


@case()
def triplets_of_the_dataset(model: Any, batch: Any, handle: Any) -> Any:
    outputs = (model(batch[0] * scale + shift) for scale, shift in ((1, 0), (1.1, 0.1), (-1, 0.3)))
    return handle.loss(F.triplet_margin_loss(*outputs))


@case()
def pairs_in_one_pass(model: Any, batch: Any, handle: Any) -> Any:
    one, two = model(torch.cat([batch[0], -batch[0]])).chunk(2)
    return handle.loss(F.margin_ranking_loss(one[:, 0], two[:, 0], 2.0 * (batch[1] > 0) - 1, margin=1.0))


@case()
def mixup_of_the_dataset(model: Any, batch: Any, handle: Any) -> Any:
    outputs = model(0.7 * batch[0] + 0.3 * batch[0].flip(1))
    return handle.loss(0.7 * F.cross_entropy(outputs, batch[1]) + 0.3 * F.cross_entropy(outputs, 2 - batch[1]))


@case()
def distance_without_second_derivative(model: Any, batch: Any, handle: Any) -> Any:
    centres = torch.eye(CLASSES, dtype=torch.float64)
    return handle.loss(F.cross_entropy(-torch.cdist(model(batch[0]), centres), batch[1]))


@case()
def several_losses_one_backward(model: Any, batch: Any, handle: Any) -> Any:
    outputs, odd = model(batch[0]), batch[1] == 1
    loss = handle.loss(F.cross_entropy(outputs, batch[1]))
    loss = loss + handle.loss(outputs[odd].square().sum() / odd.sum().clamp(min=1), count=odd.sum())
    return loss + handle.loss(0.01 * outputs.abs().sum(), reduction="sum")


@case()
def losses_in_a_list(model: Any, batch: Any, handle: Any) -> Any:
    outputs = model(batch[0])
    torch.autograd.backward([handle.loss(F.cross_entropy(outputs, batch[1])), handle.loss(outputs.square().mean())])


@case()
def half_of_a_gradient(model: Any, batch: Any, handle: Any) -> Any:
    handle.loss(classified(model, batch)).backward(torch.tensor(0.5, dtype=torch.float64))


@case()
def several_backward_passes(model: Any, batch: Any, handle: Any) -> Any:
    for view in (batch[0], batch[0].flip(1), -batch[0]):
        handle.loss(classified(model, (view, batch[1])) / 3).backward()


@case(whole=True)
def weight_by_the_step(script: Script) -> list[Tensor]:
    steps = itertools.count()

    def loss(model: Any, batch: Any, handle: Any) -> Any:
        outputs, weight = model(batch[0]), next(steps) / 40
        return handle.loss((1 - weight) * F.cross_entropy(outputs, batch[1]) + weight * outputs.square().mean())

    return ran(script, loss)


@case()
def penalty_said_as_a_mean(model: Any, batch: Any, handle: Any) -> Any:
    """The ranks' weights add up to one, so what is the same on all ranks may be said so."""
    return handle.loss(classified(model, batch) + 0.01 * sum(value.square().sum() for value in model.parameters()))


@case()
def compiled_loss(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(torch.compile(F.cross_entropy, backend="eager")(model(batch[0]), batch[1]))


# Models that compute their losses, and that keep terms of them.


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
        logits = self.inner(x)
        return self.form(logits, F.cross_entropy(logits, labels))


@case(model=lambda: Losing(lambda logits, loss: {"logits": logits, "loss": loss}))
def loss_in_a_dictionary(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(model(*batch)["loss"])


@case(model=lambda: Losing(lambda logits, loss: (loss, logits)))
def loss_in_a_tuple(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(model(*batch)[0])


@case(model=lambda: Losing(Answer))
def loss_in_a_dataclass_with_slots(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(model(*batch).loss)


@case(COUPLED, model=lambda: Losing(lambda logits, loss: (loss + logits.var(0).mean(), logits)))
def coupled_loss_in_a_tuple(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(model(*batch)[0])


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


def with_kept_term(model: Any, batch: Any, handle: Any) -> Any:
    loss = classified(model, batch)
    return handle.loss(loss + bare(model).auxiliary)


def with_returned_term(model: Any, batch: Any, handle: Any) -> Any:
    outputs, term = model(batch[0])
    return handle.loss(F.cross_entropy(outputs, batch[1]) + term)


@case(ATTRIBUTE, model=lambda: Experts(importance, kept=True))
def importance_in_an_attribute(model: Any, batch: Any, handle: Any) -> Any:
    return with_kept_term(model, batch, handle)


@case(ATTRIBUTE, model=lambda: Experts(of_gates, kept=True))
def gate_losses_in_an_attribute(model: Any, batch: Any, handle: Any) -> Any:
    return with_kept_term(model, batch, handle)


@case(LIMIT, model=lambda: Experts(importance, kept=False))
def importance_returned(model: Any, batch: Any, handle: Any) -> Any:
    return with_returned_term(model, batch, handle)


@case(model=lambda: Experts(of_gates, kept=False))
def gate_losses_returned(model: Any, batch: Any, handle: Any) -> Any:
    return with_returned_term(model, batch, handle)


class Weighing(nn.Module):
    """Two tasks with learned weights (Kendall et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.logs = net(), nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.logs


@case(model=Weighing)
def weights_of_tasks_as_parameters(model: Any, batch: Any, handle: Any) -> Any:
    outputs, logs = model(batch[0])
    tasks = torch.stack([F.cross_entropy(outputs, batch[1]), F.mse_loss(outputs, batch[0][:, :CLASSES])])
    return handle.loss(((-logs).exp() * tasks + logs).sum())


@case(model=lambda: nn.Sequential(*(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 3)),)).double())
def spectral_norm(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(classified(model, batch))


class Attending(nn.Module):
    """Attention among the features of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.first, self.head = nn.Linear(1, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.first(x[:, :, None])).mean(1))
        return logits


@case(model=lambda: Attending().double())
def attention_within_samples(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(classified(model, batch))


class Checkpointed(nn.Module):
    """Two blocks that are computed again in the backward pass."""

    def __init__(self, again: Callable[[nn.Sequential, Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head, self.again = nn.Linear(8, CLASSES), again
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.again(self.body, x.detach().requires_grad_()))
        return logits


@case(model=lambda: Checkpointed(lambda body, x: checkpoint(body, x, use_reentrant=True)))
def checkpointing_reentrant(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(classified(model, batch))


@case(model=lambda: Checkpointed(lambda body, x: checkpoint_sequential(body, 2, x, use_reentrant=False)))
def checkpointing_in_parts(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(classified(model, batch))


# Gradients that are used in between, and gradients of gradients.


@case(lr=0.01)
def gradient_penalty_on_data(model: Any, batch: Any, handle: Any) -> Any:
    """R1: the squared slope of the score at the data, by itself; a term times 0 is there for its graph alone."""
    inputs = batch[0].clone().requires_grad_()
    outputs = model(inputs)
    slope = slopes(outputs, inputs).square().mean() + 0 * outputs.sum()
    return handle.loss(F.softplus(-outputs).mean()) + handle.loss(slope, count=len(inputs))


@case()
def adversarial_samples(model: Any, batch: Any, handle: Any) -> Any:
    """FGSM, whose attack goes through the module itself."""
    inputs = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(bare(model)(inputs), batch[1]), inputs)
    return handle.loss(classified(model, (batch[0] + 0.1 * slope.sign(), batch[1])))


@case()
def adversarial_samples_by_the_wrapped_model(model: Any, batch: Any, handle: Any) -> Any:
    inputs = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(inputs), batch[1]), inputs)
    return handle.loss(classified(model, (batch[0] + 0.1 * slope.sign(), batch[1])))


@case(whole=True)
def sharpness_aware_in_two_steps(script: Script) -> list[Tensor]:
    """SAM with its norm over all parameters, by a plain average of two backward passes."""

    def loss(model: Any, batch: Any, handle: Any) -> None:
        handle.loss(classified(model, batch)).backward()
        found = [value.grad.clone() for value in model.parameters()]
        norm = torch.stack([slope.norm() for slope in found]).norm()
        with torch.no_grad():
            for value, slope in zip(model.parameters(), found, strict=True):
                value += 0.05 * slope / norm
        model.zero_grad()
        handle.loss(classified(model, batch)).backward()
        with torch.no_grad():
            for value, slope in zip(model.parameters(), found, strict=True):
                value -= 0.05 * slope / norm

    return ran(script, loss)


def stepping(script: Script, change: Callable[[nn.Module], object]) -> list[Tensor]:
    """Train, with something done to the gradients before each update."""
    model = net()

    def after(optimizer: Any) -> None:
        change(model)
        optimizer.step()

    return ran(
        script, lambda model, batch, handle: handle.loss(classified(model, batch)), model=lambda: model, after=after
    )


@case(whole=True)
def clipped_by_norm(script: Script) -> list[Tensor]:
    return stepping(script, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05))


@case(whole=True)
def clipped_by_value(script: Script) -> list[Tensor]:
    return stepping(script, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))


@case(whole=True)
def grad_scaler_with_unscaling(script: Script) -> list[Tensor]:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)

    def after(optimizer: Any) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    def loss(wrapped: Any, batch: Any, handle: Any) -> Any:
        return scaler.scale(handle.loss(classified(wrapped, batch)))

    return ran(script, loss, model=lambda: model, after=after)


@case(whole=True)
def accumulated_under_no_sync(script: Script) -> list[Tensor]:
    """Four batches an update, divided outside of what is said."""
    model, numbers = net(), itertools.count(1)
    due = [False]

    def loss(wrapped: Any, batch: Any, handle: Any) -> None:
        due[0] = next(numbers) % 4 == 0
        with contextlib.nullcontext() if due[0] or script.alone else wrapped.no_sync():
            (handle.loss(classified(wrapped, batch)) / 4).backward()

    class Fourth(torch.optim.SGD):
        """Keeps gradients until an update is due."""

        def zero_grad(self, set_to_none: bool = True) -> None:
            if due[0]:
                super().zero_grad(set_to_none)

    return ran(
        script,
        loss,
        model=lambda: model,
        optimizer=lambda model: Fourth(model.parameters(), lr=FAR),
        after=lambda optimizer: optimizer.step() if due[0] else None,
    )


@case(whole=True)
def lbfgs(script: Script) -> list[Tensor]:
    return by_closure(script, lambda loss, batch: loss, lr=0.1, max_iter=2)


@case(whole=True)
def line_search_by_the_loss_of_all_ranks(script: Script) -> list[Tensor]:
    def mean(loss: Tensor, batch: Any) -> Tensor:
        return summed(script, loss * len(batch[0])) / summed(script, torch.tensor(float(len(batch[0]))))

    return by_closure(script, mean, lr=0.1, max_iter=2, line_search_fn="strong_wolfe")


def by_closure(script: Script, told: Callable[[Tensor, Any], Tensor], **options: Any) -> list[Tensor]:
    """Train by an optimizer that calls back; ``told``: what it is told that the loss is."""
    model, dataset = net(), data()
    script.begin(model)
    optimizer = torch.optim.LBFGS(model.parameters(), **options)
    wrapped, handle = script.start(model, optimizer, dataset)
    for batch in script.batches(handle, dataset):

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = handle.loss(classified(wrapped, batch))
            loss.backward()
            return told(loss.detach(), batch)

        optimizer.step(closure)
    return values(model)


# Rates, and passes beside the wrapper.


@case(DIFFERS, whole=True)
def rate_of_one_rank_at_step_5(script: Script) -> list[Tensor]:
    steps = itertools.count()

    def after(optimizer: Any) -> None:
        if next(steps) == 5 and script.rank == 1:
            optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()

    return ran(script, lambda model, batch, handle: handle.loss(classified(model, batch)), after=after)


@case(DIFFERS, whole=True)
def noise_of_the_ranks_own(script: Script) -> list[Tensor]:
    """Langevin dynamics, with a random stream that differs from rank to rank: the parameters drift apart."""
    drawn = torch.Generator().manual_seed(script.rank)

    def after(optimizer: Any) -> None:
        optimizer.step()
        for value in optimizer.param_groups[0]["params"]:
            value.data += 0.01 * torch.randn(value.shape, generator=drawn, dtype=value.dtype)

    return ran(script, lambda model, batch, handle: handle.loss(classified(model, batch)), after=after)


def on_a_plateau(script: Script, *, of_all: bool) -> list[Tensor]:
    """Lower the rate where the loss does not fall: of the rank's batch, or of all ranks'."""
    model, dataset = net(), data()
    script.begin(model)
    optimizer = sgd(model, lr=FAR)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=1)
    wrapped, handle = script.start(model, optimizer, dataset)
    for batch in script.batches(handle, dataset):
        optimizer.zero_grad()
        loss = handle.loss(classified(wrapped, batch))
        loss.backward()
        optimizer.step()
        weight = torch.tensor(float(len(batch[0])))
        mean = summed(script, loss * weight) / summed(script, weight)
        schedule.step(float(mean) if of_all else loss.item())
    return values(model)


@case(DIFFERS, whole=True)
def plateau_of_the_ranks_own_loss(script: Script) -> list[Tensor]:
    return on_a_plateau(script, of_all=False)


@case(whole=True)
def plateau_of_all_ranks_loss(script: Script) -> list[Tensor]:
    return on_a_plateau(script, of_all=True)


@case(PAST)
def consistency_past_the_wrapper(model: Any, batch: Any, handle: Any) -> Any:
    one, two = model(batch[0]), bare(model)(batch[0] * 1.1)
    return handle.loss(F.cross_entropy(one, batch[1]) + F.mse_loss(one, two))


@case(PAST)
def layer_past_the_wrapper(model: Any, batch: Any, handle: Any) -> Any:
    return handle.loss(classified(model, batch) + bare(model)[0](batch[0]).square().mean())


# Several models, and copies.


@case(whole=True)
def moving_average(script: Script) -> list[Tensor]:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def after(optimizer: Any) -> None:
        optimizer.step()
        average.update_parameters(model)

    loop = ran(
        script, lambda model, batch, handle: handle.loss(classified(model, batch)), model=lambda: model, after=after
    )
    script.begun += values(net()) if script.alone else []
    return loop + values(average.module)


def following(
    script: Script, loss: Callable[[Any, Any, Any, nn.Module], Any], share: float, every: int = 1
) -> list[Tensor]:
    """Train with a copy of the model that comes after it by ``share`` every so many steps."""
    model = net()
    copied, steps = copy.deepcopy(model).requires_grad_(False), itertools.count(1)

    def after(optimizer: Any) -> None:
        optimizer.step()
        if next(steps) % every == 0:
            for slow, fast in zip(copied.parameters(), model.parameters(), strict=True):
                slow.data.lerp_(fast.data, share)

    return ran(
        script, lambda wrapped, batch, handle: loss(wrapped, batch, handle, copied), model=lambda: model, after=after
    )


@case(whole=True)
def byol(script: Script) -> list[Tensor]:
    def loss(model: Any, batch: Any, handle: Any, target: nn.Module) -> Any:
        one, two = (F.normalize(net_(view), dim=1) for net_, view in ((model, batch[0]), (target, batch[0] * 1.1)))
        return handle.loss((2 - 2 * (one * two).sum(1)).mean() + 0.1 * classified(model, batch))

    return following(script, loss, 0.1)


@case()
def simsiam(model: Any, batch: Any, handle: Any) -> Any:
    one, two = model(batch[0]), model(batch[0] * 1.1)
    near = F.cosine_similarity(one, two.detach()) + F.cosine_similarity(two, one.detach())
    return handle.loss(F.cross_entropy(one, batch[1]) - near.mean() / 2)


@case(whole=True)
def mean_teacher_of_the_module(script: Script) -> list[Tensor]:
    def loss(model: Any, batch: Any, handle: Any, teacher: nn.Module) -> Any:
        outputs = model(batch[0])
        return handle.loss(F.cross_entropy(outputs, batch[1]) + F.mse_loss(outputs, teacher(batch[0] * 1.1)))

    return following(script, loss, 0.05)


@case(whole=True)
def deep_q(script: Script) -> list[Tensor]:
    def loss(model: Any, batch: Any, handle: Any, target: nn.Module) -> Any:
        valued = model(batch[0]).gather(1, batch[1][:, None])[:, 0]
        wanted = batch[0][:, 0] + 0.9 * target(batch[0].roll(1, 1)).amax(1)
        return handle.loss(F.smooth_l1_loss(valued, wanted))

    return following(script, loss, 1.0, every=7)


@case(whole=True)
def value_with_a_target_network(script: Script) -> list[Tensor]:
    def loss(model: Any, batch: Any, handle: Any, target: nn.Module) -> Any:
        policy, value = model(batch[0]).split([2, 1], 1)
        gain = batch[0][:, 0] + 0.9 * target(batch[0].roll(1, 1))[:, 2] - value[:, 0]
        return handle.loss(0.5 * gain.square().mean()) + handle.loss(
            (gain.detach() * each(policy, batch[1] % 2)).mean()
        )

    return following(script, loss, 0.1)


@case(whole=True)
def two_that_learn_from_each_other(script: Script) -> list[Tensor]:
    first, second, dataset = net(), net(), data()
    script.begin(first, second)
    of_first, of_second = sgd(first, lr=FAR), sgd(second, lr=FAR)
    one, handle = script.start(first, of_first, dataset)
    other, _ = script.start(second, of_second, dataset)
    for features, labels in script.batches(handle, dataset):
        outputs = one(features), other(features)
        for place, optimizer in enumerate((of_first, of_second)):
            optimizer.zero_grad()
            mine, seen = outputs[place], outputs[1 - place].detach().softmax(1)
            near = F.kl_div(mine.log_softmax(1), seen, reduction="batchmean")
            handle.loss(F.cross_entropy(mine, labels) + near).backward()
            optimizer.step()
    return values(first, second)


@case(whole=True)
def wasserstein_critic_with_clipped_weights(script: Script) -> list[Tensor]:
    """Two updates of the critic for one of the maker."""
    maker, critic, dataset = net(), nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1)).double(), data()
    script.begin(maker, critic)
    of_maker, of_critic = sgd(maker, lr=FAR), sgd(critic, lr=FAR)
    judging, handle = script.start(critic, of_critic, dataset)
    making, _ = script.start(maker, of_maker, dataset)
    for features, _ in script.batches(handle, dataset):
        made = making(features)
        for truth in (features[:, :CLASSES], features[:, -CLASSES:]):
            of_critic.zero_grad()
            handle.loss(judging(made.detach()).mean() - judging(truth).mean()).backward()
            of_critic.step()
            for value in critic.parameters():
                value.data.clamp_(-0.5, 0.5)
        of_maker.zero_grad()
        handle.loss(-judging(made).mean()).backward()
        of_maker.step()
    return values(maker, critic)


@case(whole=True)
def frozen_body(script: Script) -> list[Tensor]:
    model = net()
    model[0].requires_grad_(False)
    return ran(
        script,
        lambda model, batch, handle: handle.loss(classified(model, batch)),
        model=lambda: model,
        optimizer=lambda model: torch.optim.AdamW([*model[2].parameters()], lr=0.01),
    )
