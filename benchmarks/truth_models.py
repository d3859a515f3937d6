"""The models of the measured rows, and what their steps ask of a device: each traced once, its kernels kept in a folder.

``timm:NAME@SIZE`` is the product's own source; the others are written here as the scripts that were measured have them.
Start at :func:`traced`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddltool.analyzers.step.costs.kernels import Kernels, kernels_of
from ddltool.analyzers.step.tracing.factories import imported, timm_step
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss, language_model_loss
from ddltool.analyzers.step.tracing.torch_adapter import trace_any_batch
from ddltool.analyzers.step.tracing.transformers_models import NamedConfig, configured_step
from ddltool.errors import DdlToolError
from ddltool.graph import COMPUTE, SEND, Graph


@dataclass(frozen=True, order=True, slots=True)
class Trace:
    """What is traced once for all batch sizes and devices."""

    model: str
    """``timm:NAME@SIZE``, or ``NAME@LENGTH`` of a factory below."""
    precision: str
    channels_last: bool = False
    mode: str = "training"
    fused: bool = False
    """Whether attention runs in one kernel: torch does so from 2.0 on, and measurements before it do not."""

    @property
    def file(self) -> str:
        """Return the name of the file that keeps it."""
        layout = "last" if self.channels_last else "first"
        attention = "fused" if self.fused else "eager"
        return f"{re.sub('[^a-z0-9@_.]', '-', self.model)}-{self.precision}-{layout}-{self.mode}-{attention}.npz"


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """The work of a step at one batch size: its kernels, alike ones once."""

    kernels: Kernels
    count: np.ndarray
    ops: int
    views: int
    parameter_bytes: float
    tensors: int


# Models -----------------------------------------------------------------------------------------------------------------


def _answers(output: Any) -> Tensor:
    """Return the loss of question answering: cross entropy of the start and the end."""
    return default_loss((output.start_logits, output.end_logits))


def _tokens(length: int) -> tuple[Tensor, ...]:
    return (torch.zeros(2, length, dtype=torch.long),)


def bert(length: int, large: bool, attention: str) -> TrainingStep:
    """Return BERT for question answering (SQuAD), base or large."""
    transformers = imported("transformers", "bert")
    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    config = transformers.BertConfig(**(shape if large else {}), attn_implementation=attention)
    module = transformers.BertForQuestionAnswering(config)
    return TrainingStep(name="bert", module=module, inputs=_tokens(length), loss=_answers)


def gpt(
    length: int,
    layers: int,
    width: int,
    heads: int,
    attention: str,
    vocabulary: int = 50257,
    dropout: float = 0.1,
    activation: str = "gelu_new",
) -> TrainingStep:
    """Return GPT-2 of a shape; MPT is of the same shapes, without dropout, with torch's GELU and 50,368 words."""
    transformers = imported("transformers", "gpt")
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=length, vocab_size=vocabulary, use_cache=False,
        attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout, attn_implementation=attention,
        activation_function=activation,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config)
    return TrainingStep(name="gpt", module=module, inputs=_tokens(length), loss=language_model_loss)


def llama(batch: int, length: int, **shape: Any) -> TrainingStep:
    """Return a Llama of a shape (fields of transformers' configuration) as the product has it, its loss in float32."""
    config = imported("transformers", "llama").LlamaConfig(max_position_embeddings=2**17, use_cache=False, **shape)
    return configured_step(NamedConfig(config, "llama", "llama", "llama", ""), length).at_batch(batch)


def cifar_resnet18() -> TrainingStep:
    """Return ResNet-18 for images of 32 x 32: a 3 x 3 stem without pooling (github.com/kuangliu/pytorch-cifar)."""
    module = imported("timm", "cifar").create_model("resnet18", num_classes=10)
    module.conv1, module.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    for part in module.modules():
        if isinstance(part, nn.ReLU):
            part.inplace = False
    return _cifar(module)


def _cifar(module: nn.Module) -> TrainingStep:
    return TrainingStep(name="cifar", module=module, inputs=(torch.zeros(2, 3, 32, 32),), loss=default_loss)


def cifar_vgg11() -> TrainingStep:
    """Return VGG-11 with normalisation and one linear layer (github.com/kuangliu/pytorch-cifar)."""
    layers: list[nn.Module] = []
    before = 3
    for width, pooled in ((64, 1), (128, 1), (256, 0), (256, 1), (512, 0), (512, 1), (512, 0), (512, 1)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] * pooled
        before = width
    return _cifar(nn.Sequential(*layers, nn.AvgPool2d(1, 1), nn.Flatten(), nn.Linear(512, 10)))


class _Inverted(nn.Module):
    """An inverted bottleneck of :func:`cifar_efficientnet_b0`: its gate stands behind the last convolution."""

    def __init__(self, before: int, after: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = expansion * before
        self.convolutions = nn.ModuleList(
            (
                nn.Conv2d(before, wide, 1, bias=False),
                nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
                nn.Conv2d(wide, after, 1, bias=False),
            )
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (wide, wide, after))
        self.down, self.up = nn.Conv2d(after, after // 16, 1), nn.Conv2d(after // 16, after, 1)
        self.stride, self.shortcut = stride, nn.Identity() if before == after else nn.Sequential(
            nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of ``after`` channels."""
        made = x
        for place, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            made = norm(convolution(made))
            made = F.relu(made) if place < 2 else made
        gate = torch.sigmoid(self.up(F.relu(self.down(F.avg_pool2d(made, made.size(2))))))
        return made * gate + (self.shortcut(x) if self.stride == 1 else made)


def cifar_efficientnet_b0() -> TrainingStep:
    """Return the EfficientNet-B0 of github.com/kuangliu/pytorch-cifar: strides and gates of its own, ReLU."""
    shape = ((1, 16, 1, 2), (6, 24, 2, 1), (6, 40, 2, 2), (6, 80, 3, 2), (6, 112, 3, 1), (6, 192, 4, 2), (6, 320, 1, 2))
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    before = 32
    for expansion, width, count, stride in shape:
        for place in range(count):
            layers.append(_Inverted(before, width, expansion, 1 if place else stride))
            before = width
    return _cifar(nn.Sequential(*layers, nn.Flatten(), nn.Linear(320, 10)))


class Gnmt(nn.Module):
    """GNMT of NVIDIA's examples: four layers of 1024 each way, the first bidirectional, with Bahdanau attention."""

    def __init__(self, words: int = 32320, width: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.first = nn.LSTM(width, width, bidirectional=True)
        self.encoder = nn.ModuleList(nn.LSTM(2 * width if place == 0 else width, width) for place in range(3))
        self.start = nn.LSTM(width, width)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width) for _ in range(3))
        self.query, self.key = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.value = nn.Parameter(torch.empty(width))
        self.classes = nn.Linear(width, words)
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Any:
        """Return logits (length, batch, words) of translating ``tokens`` (batch, length) into as many."""
        words = self.embedding(tokens.t())
        encoded, _ = self.first(self.dropout(words))
        for place, layer in enumerate(self.encoder):
            made, _ = layer(self.dropout(encoded))
            encoded = made if place == 0 else made + encoded
        states, _ = self.start(self.dropout(words))
        query, key = self.query(states).transpose(0, 1), self.key(encoded).transpose(0, 1)
        scores = torch.matmul(torch.tanh(query.unsqueeze(2) + key.unsqueeze(1)), self.value)
        seen = torch.bmm(torch.softmax(scores, -1), encoded.transpose(0, 1)).transpose(0, 1)
        for place, layer in enumerate(self.decoder):
            made, _ = layer(self.dropout(torch.cat([states, seen], -1)))
            states = made if place == 0 else made + states
        return self.classes(states)


def _token_loss(logits: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.long, device=flat.device))


class Ssd(nn.Module):
    """SSD300 on ResNet-50 without its last stage, stride 1 in the third (NVIDIA's examples)."""

    def __init__(self) -> None:
        super().__init__()
        base = imported("timm", "ssd").create_model("resnet50")
        self.base = nn.Sequential(base.conv1, base.bn1, base.act1, base.maxpool, base.layer1, base.layer2, base.layer3)
        for layer in (base.layer3[0].conv2, base.layer3[0].downsample[0]):
            layer.stride = (1, 1)
        outer, inner = (1024, 512, 512, 256, 256, 256), (256, 256, 128, 128, 128)
        self.extra = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(before, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU()),
                nn.Conv2d(middle, after, 3, stride=2 if place < 3 else 1, padding=int(place < 3), bias=False),
                *(nn.BatchNorm2d(after), nn.ReLU()),
            )
            for place, (before, middle, after) in enumerate(zip(outer, inner, outer[1:], strict=False))
        )
        boxes = (4, 6, 6, 6, 4, 4)
        self.places, self.classes = (
            nn.ModuleList(nn.Conv2d(width, box * size, 3, padding=1) for width, box in zip(outer, boxes, strict=True))
            for size in (4, 81)
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return places (batch, 4, boxes) and classes (batch, 81, boxes)."""
        maps = [self.base(images)]
        for layer in self.extra:
            maps.append(layer(maps[-1]))

        def joined(heads: nn.ModuleList, size: int) -> Tensor:
            made = [head(seen) for head, seen in zip(heads, maps, strict=True)]
            return torch.cat([each.reshape(each.shape[0], size, -1) for each in made], 2)

        return joined(self.places, 4), joined(self.classes, 81)


def _box_loss(output: tuple[Tensor, Tensor]) -> Tensor:
    places, classes = output
    target = torch.zeros(classes.shape[0], classes.shape[2], dtype=torch.long, device=classes.device)
    return F.smooth_l1_loss(places, torch.zeros_like(places)) + F.cross_entropy(classes, target)


class WordModel(nn.Module):
    """The word language model of torch's examples: two LSTM layers of 200; later ones return logarithms of shares."""

    def __init__(self, words: int = 33278, width: int = 200, *, shares: bool = False) -> None:
        super().__init__()
        self.shares = shares
        self.embedding, self.classes = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers, self.dropout = nn.LSTM(width, width, 2, dropout=0.2), nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Any:
        """Return logits (length, batch, words)."""
        made = self.classes(self.dropout(self.layers(self.dropout(self.embedding(tokens.t())))[0]))
        return F.log_softmax(made, -1) if self.shares else made


def _asked(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **{**kwargs, "need_weights": True})


class Translator(nn.Module):
    """The Transformer of "Attention Is All You Need", base, with the vocabulary of Multi30k."""

    def __init__(self, words: int = 9521, width: int = 512) -> None:
        super().__init__()
        self.embedding, self.classes = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.Transformer(width, 8, 6, 6, 2048, batch_first=True)
        for layer in self.layers.modules():
            if isinstance(layer, nn.MultiheadAttention):  # several kernels in its year: as where weights are asked for
                layer.forward = partial(_asked, layer.forward)  # type: ignore[method-assign]

    def forward(self, tokens: Tensor) -> Any:
        """Return logits (batch, length, words)."""
        words = self.embedding(tokens)
        return self.classes(self.layers(words, words))


_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "1b": (24, 2048, 16),
    "7b": (32, 4096, 32),
    "70b": (80, 8192, 64),
}
_GPT = {"gpt2-large": (36, 1280, 20), "gpt3-xl": (24, 3072, 24), "gpt3-2.7b": (32, 2560, 32)}


def build(trace: Trace) -> TrainingStep:
    """Return the step that a trace names. Raises KeyError for a name without a factory."""
    timm = imported("timm", trace.model)
    timm.layers.set_fused_attn(trace.fused)
    attention = "sdpa" if trace.fused else "eager"
    name, _, size = trace.model.partition("@")
    if trace.model.startswith("timm:"):
        return timm_step(trace.model.removeprefix("timm:"))
    length = int(size)
    if name in ("bert-base", "bert-large"):
        return bert(length, name == "bert-large", attention)
    if name in _GPT:
        return gpt(length, *_GPT[name], attention)
    if name.startswith("mpt-"):
        shape = _MPT[name.removeprefix("mpt-")]
        return gpt(length, *shape, attention, vocabulary=50368, dropout=0.0, activation="gelu")
    others: Mapping[str, Callable[[], TrainingStep]] = {
        "cifar-efficientnet-b0": cifar_efficientnet_b0,
        "cifar-resnet18": cifar_resnet18,
        "cifar-vgg11": cifar_vgg11,
        "gnmt": lambda: TrainingStep(name=name, module=Gnmt(), inputs=_tokens(length), loss=_token_loss),
        "ssd300": lambda: TrainingStep(name=name, module=Ssd(), inputs=(torch.zeros(2, 3, 300, 300),), loss=_box_loss),
        "word-lstm": lambda: TrainingStep(name=name, module=WordModel(), inputs=_tokens(length), loss=_token_loss),
        "word-lstm-log-softmax": lambda: TrainingStep(
            name=name, module=WordModel(shares=True), inputs=_tokens(length), loss=_token_loss
        ),
        "translator": lambda: TrainingStep(name=name, module=Translator(), inputs=_tokens(length), loss=_token_loss),
    }
    return others[name]()


# Traces -----------------------------------------------------------------------------------------------------------------

_COLUMNS = ("kind", "direction", "flops", "moved_bytes", "gemm", "width", "is_channels_last", "sets_alignment")


def _table(graph: Graph) -> tuple[np.ndarray, list[str], list[float]]:
    """Return kernels (k, 15) with their counts first and their type's place in the list, and what else a fit needs."""
    kernels = kernels_of(graph)
    names = sorted(set(kernels.dtype))
    columns = [np.atleast_2d(np.asarray(getattr(kernels, name), dtype=np.float64).T) for name in _COLUMNS]
    types = np.array([[names.index(name) for name in kernels.dtype]], dtype=np.float64)
    rows, count = np.unique(np.concatenate([*columns, types]).T, axis=0, return_counts=True)
    ops = len(np.unique(kernels.op))
    summary = [ops, int((graph.kind == COMPUTE).sum()) - ops, graph.parameter_bytes, len(graph.of_kind(SEND))]
    return np.column_stack([count, rows]), names, [float(value) for value in summary]


def _work(table: np.ndarray, names: list[str], summary: np.ndarray) -> Work:
    columns = table.T
    kernels = Kernels(
        op=np.arange(len(table)), kind=columns[1].astype(np.int8), direction=columns[2].astype(np.int8),
        flops=columns[3], moved_bytes=columns[4], gemm=table[:, 5:9], width=columns[9],
        is_channels_last=columns[10].astype(bool), sets_alignment=table[:, 11:14].astype(bool),
        dtype=tuple(names[int(place)] for place in columns[14]), ops=len(table),
    )  # fmt: skip
    ops, views, parameter_bytes, tensors = summary.tolist()
    return Work(
        kernels=kernels, count=columns[0], ops=int(ops), views=int(views), parameter_bytes=parameter_bytes,
        tensors=int(tensors),
    )  # fmt: skip


def _trace_into(folder: Path, wanted: tuple[Trace, frozenset[int]]) -> str:
    """Trace one model, write its file, and return why it could not be done, if so."""
    trace, batches = wanted
    torch.set_num_threads(1)
    numerics = Numerics(trace.precision, trace.channels_last)  # type: ignore[arg-type]
    arrays: dict[str, Any] = {"batches": np.array(sorted(batches)), "failure": ""}
    try:
        step = trace_any_batch(partial(build, trace), mode=trace.mode, numerics=numerics)  # type: ignore[arg-type]
        for batch in sorted(batches):
            table, names, summary = _table(step.at(batch))
            arrays.update({f"{batch}/kernels": table, f"{batch}/types": names, f"{batch}/summary": summary})
    except (DdlToolError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        arrays = {"batches": np.array(sorted(batches)), "failure": f"{type(error).__name__}: {error}"[:300]}
    partly = folder / f"part-{os.getpid()}.npz"
    np.savez_compressed(partly, **arrays)
    partly.replace(folder / trace.file)
    return str(arrays["failure"])


def _be_nice() -> None:
    os.nice(10)


def traced(wanted: Mapping[Trace, Iterable[int]], folder: Path, *, processes: int = 2) -> dict[Trace, dict[int, Work]]:
    """Return the work of every wanted trace at every wanted batch size; a trace that cannot be made has none.

    What the folder keeps is not traced again: remove it when tracing itself changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for trace, batches in sorted(wanted.items(), key=lambda each: (each[0].mode == "inference", each[0])):
        path = folder / trace.file
        kept: set[int] = set(np.load(path)["batches"].tolist()) if path.exists() else set()
        if not set(batches) <= kept:
            missing.append((trace, frozenset(kept | set(batches))))
    if missing:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_be_nice) as pool:
            for place, failure in enumerate(pool.map(partial(_trace_into, folder), missing), start=1):
                note = f": {failure}" if failure else ""
                print(f"traced {place} of {len(missing)}: {missing[place - 1][0].file}{note}", flush=True)
    return {trace: _read(folder / trace.file) for trace in wanted}


def _read(path: Path) -> dict[int, Work]:
    with np.load(path) as kept:
        if str(kept["failure"]):
            return {}
        return {
            batch: _work(kept[f"{batch}/kernels"], kept[f"{batch}/types"].tolist(), kept[f"{batch}/summary"])
            for batch in kept["batches"].tolist()
        }
