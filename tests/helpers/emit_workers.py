"""What the crew's ranks do with the modules that ``ddltool emit`` writes."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from ddltool.analyzers.step.recording.vision import declare_torchvision
from tests.helpers.data_parallel_workers import Blocks, step


def tiny(kind: str) -> nn.Module:
    """Return a small decoder of transformers in float64, or, "named", one without a plan of its own; "tied": embeddings."""
    declare_torchvision()
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 40, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": kind == "tied"}
    family = "Qwen3" if kind == "qwen3" else "Llama"
    config = getattr(transformers, f"{family}Config")(**sizes, **heads)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).double()  # its loss is taken in float32
    if kind == "named":
        model.tp_plan = {}
    return model


def learned(model: nn.Module, texts: Tensor, reduce: Callable[[Tensor], Tensor] = lambda loss: loss) -> list[float]:
    """Return the losses of three steps of momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for _ in range(3):
        loss = model(input_ids=texts, labels=texts).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(reduce(loss.detach())))
    return losses


def emitted_tensor(rank: int, module: str, kind: str, texts: Tensor) -> Any:
    """Return the mean losses of a model that an emitted module split and sharded, and its first shard's shape; or why not."""
    made = runpy.run_path(module)
    if kind == "refused":
        try:
            made["shard"](tiny("llama"))
        except ValueError as error:
            return str(error)
    groups, tensor = len(made["LOCAL_BATCH_SIZES"]), made["MESH"].get("tensor", 1)
    model = made["shard"](tiny(kind))
    own = texts.chunk(groups)[rank // tensor]

    def mean(loss: Tensor) -> Tensor:
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    return learned(model, own, mean), list(weight.to_local().shape)


def emitted_compiled(rank: int, module: str) -> list[bool]:
    """Return of the model and of each of its planned units whether an emitted module has told it to compile."""
    made = runpy.run_path(module)
    if "shard" in made:
        sharded = made["shard"](Blocks(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return [sharded.get_submodule(name)._compiled_call_impl is not None for name in ["", *made["UNITS"]]]
    return [made["wrap"](Blocks()).module._compiled_call_impl is not None]


def emitted_ddp(rank: int, module: str, changes: dict[str, Any]) -> tuple[str, list[int], int]:
    """Return the hash and batches of an emitted module, and how many buckets DDP forms with it."""
    made = runpy.run_path(module)
    torch.manual_seed(0)
    model = made["wrap"](Blocks(), **changes)
    for _ in range(3):
        step(model)
    rebuilt = str(model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"])
    return made["PLAN_SHA256"], made["LOCAL_BATCH_SIZES"], len(rebuilt.split(","))


def emitted_fsdp2(rank: int, module: str) -> list[str]:
    """Return the order of all-gathers in a step of a model that an emitted module sharded."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = runpy.run_path(module)["shard"](Blocks(), mesh=mesh)
    step(model)
    with profile(activities=[ProfilerActivity.CPU]) as run:
        step(model)
    start = "FSDP::all_gather ("
    gathers = [event for event in run.events() or [] if event.name.startswith(start)]
    gathers.sort(key=lambda event: event.time_range.start)
    return [event.name.removeprefix(start).rstrip(")") for event in gathers]
