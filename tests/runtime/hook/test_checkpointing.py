"""Checkpointed modules train as they would without, compute again what they do not keep, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddltool.errors import InputError
from ddltool.plans import Recomputed, is_product
from ddltool.runtime.hook.sharding import checkpoint_modules


class Products(TorchDispatchMode):
    """Counts forward products: those with one row of results per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_product(func.overloadpacket.__name__):
            self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks)


def trained(plan: list[Recomputed]) -> tuple[list[Tensor], Counter[str], list[str]]:
    net = model()
    checkpoint_modules(net, plan)
    torch.manual_seed(1)
    with Products() as seen:
        net(torch.ones(4, 8)).square().sum().backward()
    return [value.grad for value in net.parameters() if value.grad is not None], seen.count, list(net.state_dict())


def test_gradients_and_names_stay_and_only_what_is_not_kept_is_computed_again() -> None:
    gradients, products, names = trained([])
    assert products["addmm"] == 6
    for keeps, again in (([], 2), ([0], 1), ([0, 1], 0)):
        plan = [Recomputed(module="1", keeps=keeps)]
        same, more, named = trained(plan)
        assert named == names
        assert all(torch.equal(one, other) for one, other in zip(gradients, same, strict=True))
        assert more["addmm"] == 6 + again
        assert more["mm"] == products["mm"]


def test_all_or_nothing() -> None:
    net = model()
    with pytest.raises(InputError, match="checkpointing: the model has no module '7'"):
        checkpoint_modules(net, [Recomputed(module="0"), Recomputed(module="7")])
    checkpoint_modules(net, [Recomputed(module="0")])
    with pytest.raises(InputError, match="'0' is checkpointed already"):
        checkpoint_modules(net, [Recomputed(module="0")])
