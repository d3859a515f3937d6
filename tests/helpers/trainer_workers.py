"""Transformers' Trainer as people use it: alone with whole batches, and on two ranks with the mixin and uneven ones.

Each cell is one function that gets the Trainer class and its options, and returns what was trained; float64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from ddltool.artifacts import load, save
from ddltool.plans import Enforcement
from ddltool.runtime import Lengths
from ddltool.runtime.integrations import HookedTrainerMixin, TelemetryCallback  # first: it mends torchvision
from tests.helpers.whole_trainers import SAMPLES, TOTAL, WIDTH, Cell, Points, Run, Stream

import transformers  # isort: skip
from transformers import Trainer, TrainingArguments  # isort: skip

LENGTH, WORDS = WIDTH, 7


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of one to five words; labels are the words, -100 where there is none."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(2)
        words = torch.randint(1, WORDS, (samples, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
        self.words = torch.where(torch.arange(LENGTH) < lengths, words, 0)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.words[index]
        return {"words": words, "labels": torch.where(words == 0, -100, words)}


def points() -> Points:
    return Points(classes=WORDS)


class Writer(nn.Module):
    """Says each word's loss as transformers' models do: their sum over ``num_items_in_batch``, where that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Linear(6, WORDS)
        self.double()

    def forward(self, words: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.head(self.body(self.words(words)).tanh())
        if labels is None:
            return {"logits": logits}
        number = kwargs.get("num_items_in_batch")
        how = "mean" if number is None else "sum"
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction=how)
        return {"loss": loss if number is None else loss / number, "logits": logits}


class ForgetfulWriter(Writer):
    """Its loss is a mean over the labels of the batch, whatever ``num_items_in_batch`` says; ``shifts``: past the first."""

    def __init__(self, *, shifts: bool = False) -> None:
        super().__init__()
        self.shifts = shifts

    def forward(self, words: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        if not self.shifts or labels is None:
            return super().forward(words, labels)
        return super().forward(words[:, :-1], labels[:, 1:])


class EachText(Writer):
    """Its loss is a mean over samples, of the means over the labels of each."""

    def forward(self, words: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        logits = super().forward(words)["logits"]
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        return {"loss": (loss.sum(1) / labels.ne(-100).sum(1)).mean(), "logits": logits}


class Judge(nn.Module):
    """Its loss is a mean over the batch; ``forgetful``: it takes the number of labels and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(LENGTH, 6), nn.Linear(6, WORDS)
        self.double()

    def forward(self, points: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.body(points).tanh())
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class ForgetfulJudge(Judge):
    def forward(self, points: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(points, labels)


def trained(
    run: Run,
    model: nn.Module,
    dataset: Any,
    *,
    base: type[Trainer] = Trainer,
    resume: str | None = None,
    options: dict[str, Any] | None = None,
    lengths: Any = None,
    **arguments: Any,
) -> Trainer:
    """Return a Trainer that has trained; ``lengths``: those by which ranks share out each step."""
    given: dict[str, Any] = {
        "output_dir": str(run.folder), "use_cpu": True, "num_train_epochs": 2, "learning_rate": 0.05, "report_to": [],
        "save_strategy": "no", "logging_steps": 1, "remove_unused_columns": False, "disable_tqdm": True,
        "per_device_train_batch_size": TOTAL, "seed": 3, "lr_scheduler_type": "linear",
    }  # fmt: skip
    run.begins(model.parameters())
    made: Any = base
    more = dict(options or {})
    if not run.alone:
        made = type("Made", (HookedTrainerMixin, base), {})
        more |= {"enforcement": run.plan, "lengths": lengths}
    trainer: Trainer = made(model, TrainingArguments(**(given | arguments)), train_dataset=dataset, **more)
    trainer.train(resume_from_checkpoint=resume)
    run.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer


def in_passes(run: Run, *args: Any, passes: int = 2, **options: Any) -> Trainer:
    """A plan of two passes a step, made by a Trainer that accumulates as many batches; alone it is one."""
    plan = load(run.file, Enforcement)
    ranks = [entry.model_copy(update={"accumulation_steps": 1}) for entry in plan.ranks]
    save(plan.model_copy(update={"ranks": ranks}), run.file)
    return trained(run, *args, gradient_accumulation_steps=1 if run.alone else passes, **options)


def lengths_of(texts: Texts) -> Any:
    return texts.words.ne(0).sum(dim=1)


def loss_of_a_function(run: Run) -> Trainer:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.cross_entropy(outputs["logits"].flatten(0, -2), labels.flatten(), reduction="sum") / num_items_in_batch

    return trained(run, Judge(), points(), options={"compute_loss_func": loss}, gradient_accumulation_steps=2)


class Pairs(Trainer):
    """Holds each sample against all others of the batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(**inputs)["logits"]
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class SaidLoss(Trainer):
    """Says what its loss is: a mean over samples with weights of their own, divided by the sum of these weights."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        each = F.cross_entropy(model(inputs["points"])["logits"], inputs["labels"], reduction="none")
        weights = 1.0 + inputs["labels"]
        loss = (weights * each).sum() / weights.sum()
        return self.hook.loss(loss, count=weights.sum()) if isinstance(self, HookedTrainerMixin) else loss


class SometimesSaidLoss(SaidLoss):
    """Says it in the first step alone."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return (
            super().compute_loss(*args, **kwargs)
            if self.state.global_step == 0
            else Trainer.compute_loss(self, *args, **kwargs)
        )


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def checkpoint_resumed(run: Run) -> Trainer:
    """Stops in the middle of the second epoch, and goes on in another Trainer."""
    first = trained(run, Writer(), Texts(), max_steps=6, save_strategy="steps", save_steps=6, num_train_epochs=3)
    assert first.state.global_step == 6
    torch.manual_seed(1)
    return trained(run, Writer(), Texts(), max_steps=11, resume=str(run.folder / "checkpoint-6"), num_train_epochs=3)


def trained_twice(run: Run) -> Trainer:
    trainer = trained(run, Judge(), points())
    trainer.train()
    return trainer


def masked_words(run: Run) -> Trainer:
    """Takes ``num_items_in_batch``, and is a mean over the labels all the same; some texts have none of them."""
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    texts = [
        {"input_ids": one["words"], "labels": torch.where(one["words"] % 3 == 1, one["labels"], -100)}
        for one in Texts()  # type: ignore[attr-defined]
    ]
    return trained(run, transformers.BertForMaskedLM(config).double(), texts, gradient_accumulation_steps=2)


def llama(run: Run) -> Trainer:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    texts = [{"input_ids": one["words"], "labels": one["labels"]} for one in Texts()]  # type: ignore[attr-defined]
    return trained(run, transformers.LlamaForCausalLM(config).double(), texts, gradient_accumulation_steps=2)


class Times(Trainer):
    """Multiplies by the number of ranks, as the Trainer's own ``compute_loss`` does where labels of all ranks count."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = model(**inputs, num_items_in_batch=num_items_in_batch)["loss"]
        return loss * self.accelerator.num_processes


def stream_resumed(run: Run) -> Trainer:
    trained(run, Judge(), Stream(points()), max_steps=2, save_strategy="steps", save_steps=2)
    return trained(run, Judge(), Stream(points()), max_steps=4, resume=str(run.folder / "checkpoint-2"))


class Batches(Trainer):
    def get_train_dataloader(self) -> Any:
        batches = BatchSampler(SequentialSampler(range(SAMPLES)), 16, False)
        return DataLoader(points(), batch_sampler=list(batches))  # type: ignore[arg-type]


def cell(train: Callable[[Run], Trainer]) -> Cell:
    return lambda run: train(run).model.parameters()


OTHER = (
    r"loss: is neither a sum divided by num_items_in_batch nor a mean over samples or labels; say self\.hook\.loss\("
)
CELLS: dict[str, Cell] = {
    "labels of all ranks accumulated": cell(
        lambda run: trained(run, Writer(), Texts(), average_tokens_across_devices=True, gradient_accumulation_steps=2)
    ),
    "labels of the rank accumulated": cell(
        lambda run: trained(run, Writer(), Texts(), average_tokens_across_devices=False, gradient_accumulation_steps=2)
    ),
    "mean over samples": cell(lambda run: trained(run, Judge(), points(), max_grad_norm=0.05)),
    "mean over samples accumulated": cell(lambda run: trained(run, Judge(), points(), gradient_accumulation_steps=3)),
    "labels in planned passes": cell(lambda run: in_passes(run, Writer(), Texts())),
    "samples in planned passes": cell(lambda run: in_passes(run, Judge(), points())),
    "labels by length accumulated": cell(
        lambda run: trained(run, Writer(), Texts(), lengths=lengths_of(Texts()), gradient_accumulation_steps=2)
    ),
    "labels by length in planned passes": cell(
        lambda run: in_passes(run, Writer(), Texts(), lengths=Lengths(lengths_of(Texts()), padded=True))
    ),
    "number of labels not used": cell(
        lambda run: trained(
            run, ForgetfulJudge(), points(), average_tokens_across_devices=True, gradient_accumulation_steps=2
        )
    ),
    "mean over labels accumulated": cell(
        lambda run: trained(run, ForgetfulWriter(), Texts(), gradient_accumulation_steps=2)
    ),
    "mean over shifted labels": cell(lambda run: trained(run, ForgetfulWriter(shifts=True), Texts())),
    "mean over samples of means over labels": cell(lambda run: trained(run, EachText(), Texts())),
    "masked words": cell(masked_words),
    "loss said": cell(lambda run: trained(run, Judge(), points(), base=SaidLoss, gradient_accumulation_steps=2)),
    "loss of a function": cell(loss_of_a_function),
    "schedule and adafactor": cell(
        lambda run: trained(run, Judge(), points(), optim="adafactor", lr_scheduler_type="cosine", warmup_steps=2)
    ),
    "data workers": cell(
        lambda run: trained(run, Judge(), points(), dataloader_num_workers=2, gradient_accumulation_steps=2)
    ),
    "in order": cell(lambda run: trained(run, Writer(), Texts(), base=InOrder)),
    "stream": cell(lambda run: trained(run, Judge(), Stream(points()), max_steps=7)),
    "checkpoint resumed": cell(checkpoint_resumed),
    "trained twice": cell(trained_twice),
    "llama": cell(llama),
}
REFUSED: dict[str, tuple[Cell, str]] = {
    "passes of another number": (
        cell(lambda run: in_passes(run, Judge(), points(), passes=3)),
        "accumulated: is 3, but the plan makes an update of 32 samples in 2 passes; accumulate 2",
    ),
    "loss times the ranks": (cell(lambda run: trained(run, Writer(), Texts(), base=Times)), OTHER),
    "pairs": (cell(lambda run: trained(run, Judge(), points(), base=Pairs)), OTHER),
    "mean over labels in planned passes": (
        cell(lambda run: in_passes(run, ForgetfulWriter(), Texts())),
        "loss: is a mean over labels, which each pass of the plan would have of its own; say ",
    ),
    "loss said sometimes": (
        cell(lambda run: trained(run, Judge(), points(), base=SometimesSaidLoss)),
        "loss: was said to the hook in the first step, and is not in this one; say ",
    ),
    "stream resumed": (
        cell(stream_resumed),
        "resume_from_checkpoint: cannot skip batches of a stream; set ignore_data_skip=True",
    ),
    "batches of the script's own": (
        cell(lambda run: trained(run, Judge(), points(), base=Batches)),
        "loader: takes whole batches from a ",
    ),
}


def watched(rank: int, target: str, ranks: int) -> None:
    """Train with telemetry, and nothing enforced."""
    arguments = TrainingArguments(
        output_dir=str(Path(target).parent), use_cpu=True, per_device_train_batch_size=16, num_train_epochs=1, report_to=[],
        gradient_accumulation_steps=2, disable_tqdm=True, remove_unused_columns=False, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(Judge(), arguments, train_dataset=points())
    trainer.add_callback(TelemetryCallback(trainer, target))
    trainer.train()
