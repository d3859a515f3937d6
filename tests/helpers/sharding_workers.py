"""What ranks do for the tests of sharded training: a small GPT under a plan, beside the same steps in one process."""

from __future__ import annotations

import json
import runpy
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.plans import Offloaded, Recomputed
from ddltool.runtime import attach, shard
from ddltool.runtime.hook import offloading
from ddltool.runtime.hook.job import loaded
from ddltool.runtime.hook.offloading import offload_modules
from ddltool.runtime.hook.sharding import checkpoint_modules
from tests.helpers.processes import message_of

LENGTH, WORDS = 16, 64


class Layer(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*part.shape[:2], 4, -1).transpose(1, 2) for part in self.attend(self.before(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(x.shape))
        added: Tensor = x + self.narrow(F.gelu(self.wide(self.after(x))))
        return added


class Gpt(nn.Module):
    """Embeddings, blocks, a head; its loss is the mean over the tokens of a batch."""

    def __init__(self, layers: int = 3, width: int = 32, length: int = LENGTH, words: int = WORDS) -> None:
        super().__init__()
        self.length, self.words_known = length, words
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(x)
        return made

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    def example_targets(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, self.length, dtype=torch.long)


def small() -> tuple[nn.Module, Tensor]:
    """A factory for plans."""
    return Gpt(), torch.zeros(4, LENGTH, dtype=torch.long)


def middling() -> tuple[nn.Module, Tensor]:
    """Large enough that activations and parameters both count."""
    return Gpt(layers=4, width=128, length=64, words=512), torch.zeros(4, 64, dtype=torch.long)


def gpt(layers: int, batch: int) -> TrainingStep:
    """Return the step of a GPT of :func:`middling`'s width."""
    module = Gpt(layers=layers, width=128, length=64, words=512)
    tokens = torch.zeros(batch, module.length, dtype=torch.long)

    def loss(output: Tensor) -> Tensor:
        return module.loss(output, output.new_zeros(output.shape[:2], dtype=torch.long))

    return TrainingStep(name="gpt", module=module, inputs=(tokens,), loss=loss)


def built(make: Callable[[], tuple[nn.Module, Tensor]], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return make()[0].to(dtype)


Steps = Sequence[Sequence[Sequence[int]]]
"""Samples by step, pass and rank."""


def train(
    rank: int, config: str, steps: Steps, dtype: torch.dtype, hooked: bool = True,
    make: Callable[[], tuple[nn.Module, Tensor]] = small, emitted: str | None = None,
) -> tuple[float, list[str]]:  # fmt: skip
    """Return how far parameters and the last gradients are from one process's, and what runs on the model.

    ``emitted``: a module that shards the model in place of the runtime.
    """
    alone, model = built(make, dtype), built(make, dtype)
    model = shard(model, config) if emitted is None else runpy.run_path(emitted)["shard"](model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2, momentum=0.9) for each in (alone, model)]
    hook = attach(config, model=model, optimizer=optimizers[1]) if hooked else None
    generator = torch.Generator().manual_seed(1)
    inner = getattr(model, "module", model)
    for passes in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        total = sum(map(sum, passes))
        tokens = torch.randint(alone.words_known, (total, alone.length + 1), generator=generator)
        first = 0
        for sizes in passes:
            begin = first + sum(sizes[:rank])
            mine, whole = tokens[begin : begin + sizes[rank]], tokens[first : first + sum(sizes)]
            first += sum(sizes)
            (alone.loss(alone(whole[:, :-1]), whole[:, 1:]) / len(passes)).backward()
            loss = inner.loss(model(mine[:, :-1]), mine[:, 1:])
            ((loss if hook is None else hook.loss(loss)) / len(passes)).backward()
        for optimizer in optimizers:
            optimizer.step()
    worst = 0.0
    for (name, one), (_, other) in zip(alone.named_parameters(), inner.named_parameters(), strict=True):
        for made, expected in ((other, one), (other.grad, one.grad)):
            value = made.full_tensor() if isinstance(made, DTensor) else made
            assert value.shape == expected.shape, name
            worst = max(worst, float((value - expected).abs().max()))
    return worst, [type(module).__name__ for module in (model, *inner.layers)]


class Normed(nn.Module):
    """Blocks of convolutions and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        blocks = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3))
        self.layers, self.head = nn.ModuleList(blocks), nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for layer in self.layers:
            x = x + layer(x)
        made: Tensor = self.head(x.mean((2, 3)))
        return made


def normed() -> tuple[nn.Module, Tensor]:
    """A factory for plans."""
    return Normed(), torch.zeros(2, 3, 6, 6)


def train_normed(rank: int, config: str, emitted: str | None) -> tuple[float, set[torch.dtype]]:
    """Return how far parameters and statistics in bfloat16 are from those of one process in float32, and the statistics' types.

    All ranks have the same images, so that their statistics are those of one.
    """
    torch.manual_seed(0)
    alone, model = Normed(), Normed()
    model.load_state_dict(alone.state_dict())
    if emitted is None:
        shard(model, config, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    else:
        runpy.run_path(emitted)["shard"](model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    images = torch.randn(8, 3, 6, 6)
    for each in (alone, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            each(images).float().square().mean().backward()
            optimizer.step()
    pairs = [
        *zip(model.parameters(), alone.parameters(), strict=True),
        *zip(model.buffers(), alone.buffers(), strict=True),
    ]
    found = [(made.full_tensor() if isinstance(made, DTensor) else made, expected) for made, expected in pairs]
    worst = max(float((made - expected).detach().abs().max()) for made, expected in found)
    return worst, {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()}


def peak_bytes(rank: int, config: str, make: Callable[[], tuple[nn.Module, Tensor]] = middling) -> float:
    """Return the most bytes of tensors in the second of two steps under the plan, as torch's own tracker sees them."""
    samples = loaded(config)[0].ranks[rank].local_batch_size
    model = shard(built(make, torch.float32), config)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)
    tokens = make()[1][:1].repeat(samples, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((tokens,))
        with tracker:
            for turn in range(2):
                loss = model.loss(model(tokens), tokens)  # type: ignore[operator]
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
                if turn == 0:
                    tracker.reset_mod_stats()
    return float(next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"])


def allocated_bytes(
    rank: int, kind: str, keeps: Mapping[str, Sequence[int]], layers: int, samples: int, on_host: Mapping[str, str] = {}
) -> float:
    """Return the most bytes that torch's profiler sees a rank hold in a step under ``ddp`` or ``zero1``, of four the fewest.

    It sees what C++ allocates as well; DDP makes its buckets again in the second step of six. Now and then gloo's threads
    hold something from one step until into the next. ``on_host``: modules that save there, until which; the host's memory is
    Python's, which no profiler of torch sees.
    """
    host_bytes = patch.object(
        offloading, "_host_bytes", lambda n, **_: torch.frombuffer(bytearray(n), dtype=torch.uint8)
    )
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, host_bytes:
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model = Gpt(layers=layers, width=128, length=64, words=512)
            tokens = torch.zeros(samples, model.length, dtype=torch.long)
            checkpoint_modules(model, [Recomputed(module=name, keeps=list(kept)) for name, kept in keeps.items()])
            offload_modules(model, [Offloaded(module=name, until=until) for name, until in on_host.items()])
            replica, settings = DistributedDataParallel(model), {"lr": 0.1, "momentum": 0.9}
            optimizer: torch.optim.Optimizer = (
                ZeroRedundancyOptimizer(replica.parameters(), torch.optim.SGD, **settings)
                if kind == "zero1"
                else torch.optim.SGD(replica.parameters(), **settings)
            )
            for turn in range(6):
                with record_function(f"turn {turn}"):
                    loss = model.loss(replica(tokens), tokens)
                    loss.backward()
                    del loss
                    optimizer.step()
                    optimizer.zero_grad()
                time.sleep(0.05)
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    steady = [event for event in events if event.get("name") in {f"turn {turn}" for turn in range(2, 6)}]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    held = list(zip((at for at, _ in changes), accumulate(size for _, size in changes), strict=True))
    return float(min(max(size for at, size in held if step["ts"] <= at <= step["ts"] + step["dur"]) for step in steady))


def offloaded(rank: int, config: str) -> bool:
    """Return whether FSDP2 keeps the parameters of every block on the host."""
    model = shard(Gpt(), config)
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in model.layers]  # type: ignore[operator, union-attr]
    return all(parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params)


def refusal(rank: int, config: str) -> str:
    """Return what ``shard`` says."""
    return message_of(shard, Gpt(layers=1), config)
